"""The online softmax in registers: row maxima of any size, weights, rows with one weight."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import math as mlir_math

from ....core import dropout, softmax
from ....core.problem import AttentionSpec
from . import inline
from .inline import (
    LANE_COLS,
    ROWS,
    WGMMA,
    assembly,
    at,
    coordinates,
    f32_constant,
    filled,
    fragmented,
    i32_constant,
    of_some_lane,
    origin,
    pair,
    signed_constant,
    splat,
)
from .softcap import Cap

# --- Row maxima, for logits of any finite size ----------------------------------------------------
# Weights are exp2(x * log2_scale - m): one fused multiply-add and one exponential per element. The
# product is exact there and m is rounded, so weights are relative to 2**m exactly, whatever the
# largest logit is, and the sum that they are divided by is relative to the same. But where m is so
# large that its rounding error is worth many factors of two, that overflows. The rows in which a
# logit is `far` (core/softmax.py) therefore have weights of exp2((x - shift) * log2_scale), where
# `shift` is the largest x so far. One branch per tile, uniform over a warp, spares all other rows
# the difference.

# What m is, finite, before a row has seen a key. A tile that hides all keys then has weights of
# exp2(-inf) and needs no second look.
LOWEST = float(np.finfo(np.float32).min)


class Maxima(NamedTuple):
    """Reference of the weights of each row.

    Attributes:
        m: f32[rows], base 2. NaN in a row that has a shift; at most LOWEST before the first key.
        shift: f32[rows], in units of x; 0 in other rows. None: no logit can be far, or it is `kept`
            in shared memory, for loops that have no register for it: f32[rows], written only where
            a far row is found, so that it is arbitrary where m is not a NaN. A thread reads what it
            has written itself.
    """

    m: Any
    shift: Any = None


def far_of(spec: AttentionSpec, dtype) -> float:
    """Returns core.softmax.far; 0 where no logit can be so large, as all are capped at less."""
    far = softmax.far(dtype)
    if spec.softcap is None or not spec.only_caps:
        return far
    return far if spec.softcap * softmax.LOG2E > far else 0.0


def raised(
    old: Maxima, top, log2_scale: float, far: float, kept=None
) -> tuple[Any, Any, Any, Maxima]:
    """Computes the maxima after a tile, of which some logit may be, or have been, far.

    Args:
        old: maxima before the tile.
        top: f32[rows], the largest x of the tile; -inf where all is hidden.
        log2_scale: x * log2_scale are logits in base 2.
        far: see core.softmax.far; 0 where no logit can be far.
        kept: as of `compared`.

    Returns:
        (before, m, shift, maxima): f32[rows], reference of the sums so far, 2**before, with the new
        shift; f32[rows], reference of this tile's weights exp2((x - shift) * log2_scale - m);
        f32[rows], None where no logit can be far; the Maxima to carry on with.
    """
    if not far:
        m = jnp.maximum(old.m, top * log2_scale)
        return old.m, m, None, Maxima(m, old.shift)
    if kept is not None:
        shift = plgpu.load(kept, layout=inline.ROWS) if old.shift is None else old.shift
        before, m, shift, maxima = raised(Maxima(old.m, shift), top, log2_scale, far)
        kept[...] = maxima.shift
        return before, m, shift, Maxima(maxima.m)
    zero = jnp.zeros_like(top)
    shifted = old.m != old.m
    unshifted = jnp.where(old.m > LOWEST, old.m * (1.0 / log2_scale), -math.inf)
    largest = jnp.where(shifted, old.shift, unshifted)  # x before the tile
    unseen, largest = largest == -math.inf, jnp.maximum(largest, top)
    still_unseen = largest == -math.inf
    is_far = (jnp.abs(largest) * log2_scale > far) & (largest > -math.inf)
    shift = jnp.where(is_far, largest, zero)
    near = jnp.where(shifted, top * log2_scale, jnp.maximum(old.m, top * log2_scale))
    m = jnp.where(is_far | still_unseen, zero, near)
    moved = (jnp.where(shifted, old.shift, zero) - shift) * log2_scale
    before = jnp.where(unseen, -math.inf, jnp.where(shifted, zero, old.m) + moved)
    maxima = Maxima(
        jnp.where(still_unseen, old.m, jnp.where(is_far, math.nan, m)),
        jnp.where(still_unseen, old.shift, shift),
    )
    return before, m, shift, maxima


class Compared(NamedTuple):
    """A tile of logits after the comparison with the maxima.

    Attributes:
        x: the logits minus the shift of their row.
        before: f32[rows], reference of the sums so far, base 2.
        m: f32[rows], reference of the weights, base 2.
        maxima: to carry on with.
        grew: i32, uniform over a warp: 1 if m differs from `before` in some row; None if that is
            not asked for.
    """

    x: Any
    before: Any
    m: Any
    maxima: Maxima
    grew: Any


def compared(
    old: Maxima,
    x,
    log2_scale: float,
    far: float,
    slack: float | None,
    interpret: bool,
    kept=None,
    top=None,
) -> Compared:
    """Compares a tile with the maxima so far.

    Args:
        old: maxima so far. With a shift next to `kept` there are none: the tile is the first, and
            rows that see none of its keys are looked at.
        x: f32 in the WGMMA layout, -inf where hidden.
        log2_scale: x * log2_scale are logits in base 2.
        far: see core.softmax.far; 0 where no logit can be far.
        slack: maxima stay as they are unless one grew by more, in base 2; None: they follow at
            once.
        interpret: run by the interpreter.
        kept: f32[rows] in shared memory where the shift is; None: it is among the maxima.
        top: f32[rows], maxima of x, where they are those of more columns; None: x has them all.
    """
    top = x.max(axis=1) if top is None else top
    first = kept is not None and old.shift is not None
    most = top * log2_scale if first else jnp.maximum(old.m, top * log2_scale)

    def plain():
        m, grew = most, None
        if slack is not None:
            m, grew = inline.lazy_max(old.m, most, slack, interpret)
        return Compared(x, old.m, m, Maxima(m, None if kept else old.shift), grew)

    def shifted():
        before, m, shift, maxima = raised(old, top, log2_scale, far, kept)
        less = x - lax.broadcast_in_dim(shift, x.shape, (0,))
        grew = None if slack is None else jnp.int32(1)
        return Compared(less, before, m, maxima, grew)

    if not far:
        return plain()
    seen = jnp.maximum(top, LOWEST) if first else top  # so that -inf counts as far
    return lax.cond(some_far(most, seen, far, interpret) > 0, shifted, plain)


def settled(maxima: Maxima, kept=None):
    """Returns (m, shift) of finished rows for `softmax.finish`; `kept` as of `compared`."""
    m, shift = maxima
    zero = jnp.zeros_like(m)
    if kept is not None:
        shift = jnp.where(m != m, plgpu.load(kept, layout=inline.ROWS), zero)
    if shift is None:
        return m, zero
    unseen = shift == -math.inf
    m = jnp.where(unseen, -math.inf, jnp.where(m != m, zero, m))
    return m, jnp.where(unseen, zero, shift)


def some_far(m, top, far: float, interpret: bool):
    """Returns i32, uniform over a warp: 1 if `raised` has to look at some of its rows.

    That is where the new maximum is far or NaN (then the old one was far), but not where a row has
    still seen no key.

    Args:
        m: f32[rows], the new maxima in base 2.
        top: f32[rows], the largest x of the tile.
        far: see core.softmax.far.
        interpret: run by the interpreter.
    """
    if interpret:
        unseen = (m <= LOWEST) & (top == -math.inf)
        return (~(jnp.abs(m) <= far) & ~unseen).any().astype(jnp.int32)
    vote = plgpu.inline_mgpu(
        arg_types=(inline.ROWS, inline.ROWS),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(functools.partial(_some_far_body, far))
    return vote(m, top)


def less_shift(x, shift, first, q_axis: int, interpret: bool):
    """Subtracts from x the shift of its queries, which is read as it is subtracted.

    Next to the accumulators of the fused backward there is no room for the shift of every column:
    it would cost 40 bytes of spills at head dim 64, in all calls.

    Args:
        x: f32 in the WGMMA layout.
        shift: f32 in device memory, [any].
        first: int32, index in it of the first query's shift.
        q_axis: which axis of x runs over queries.
        interpret: run by the interpreter.
    """
    if interpret:
        values = shift[pl.ds(first, x.shape[q_axis])]
        return x - lax.broadcast_in_dim(values, x.shape, (q_axis,))
    run = plgpu.inline_mgpu(
        arg_types=(inline.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, inline.WGMMA),
    )(functools.partial(_less_shift_body, q_axis))
    return run(x, shift, jnp.int32(first))


_QUADS = 8  # of a warp; lanes of the same place in their quad have the same columns


def _less_shift_body(q_axis, _, x, shift, first):
    f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
    place = arith.addi(splat(first), origin(x.shape, x.layout)[q_axis])
    base = mgpu.utils.memref_ptr(shift)

    def load(offset, many):
        at_place = arith.extsi(i64, arith.addi(place, offset))
        pointer = mgpu.utils.getelementptr(base, [at_place], f32)
        loaded = llvm.load(ir.VectorType.get((many,), f32), pointer)
        return [at(loaded, e) for e in range(many)]

    registers, by_place = x.registers.copy(), {}
    for index, row, col in coordinates(x.shape, x.layout):
        by_place.setdefault((row, col)[q_axis], []).append(index)
    if q_axis:
        values = _shared_by_quads(load, sorted(by_place))
    else:
        values = {row: load(i32_constant(row), 1) * 2 for row in by_place}
    for offset, indices in by_place.items():
        for i in indices:
            less = [arith.subf(at(registers[i], e), values[offset][e]) for e in (0, 1)]
            registers[i] = pair(*less)
    return fragmented(registers, x.layout)


def _shared_by_quads(load, columns):
    """Returns the pair of values of each of these columns, of which a quad reads an eighth."""
    lane = arith.remui(mgpu.utils.thread_idx(), i32_constant(32))
    quad, within = arith.divui(lane, i32_constant(4)), arith.remui(lane, i32_constant(4))
    many, step = -(-len(columns) // _QUADS), columns[1] - columns[0]
    by_column = {}
    for turn in range(many):
        number = arith.addi(arith.muli(quad, i32_constant(many)), i32_constant(turn))
        number = arith.minui(number, i32_constant(len(columns) - 1))
        own = load(arith.muli(number, i32_constant(step)), 2)
        for i in range(turn, len(columns), many):
            source = arith.addi(within, i32_constant(4 * (i // many)))
            code = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
            by_column[columns[i]] = [assembly(x.type, code, x, source) for x in own]
    return by_column


def _some_far_body(far, _, m, top):
    some = None
    compare, kinds = arith.cmpf, arith.CmpFPredicate
    seen = arith.constant(ir.IntegerType.get_signless(1), True)
    for m_register, top_register in zip(m.registers.flat, top.registers.flat, strict=True):
        m_, top_ = at(m_register, 0), at(top_register, 0)
        is_far = compare(kinds.UGT, mlir_math.absf(m_), f32_constant(far))
        hidden = compare(kinds.OEQ, top_, f32_constant(-math.inf))
        unseen = arith.andi(compare(kinds.OLE, m_, f32_constant(LOWEST)), hidden)
        bit = arith.andi(is_far, arith.xori(unseen, seen))
        some = bit if some is None else arith.ori(some, bit)
    return mgpu.FragmentedArray.splat(of_some_lane(some), (), is_signed=True)


# --- Weights: exponentials, row sums, dropout and conversion in one pass --------------------------
# The special function unit takes eight cycles for the exponentials of a warp. Other work overlapped
# with them is free, but only if it is interleaved in the code: ptxas leaves what comes after all
# exponentials there. So one function writes exponentials, polynomials, products of dropout and
# conversions in turns.

# 2**f for f in [-1/2, 1/2] with a relative error of 2.7e-6; the constant term first.
POLYNOMIAL = (
    0.9999992847442627,
    0.6931217908859253,
    0.240247443318367,
    0.05591785907745361,
    0.009570101276040077,
)
# A float32 of which this is a summand ends in the bits of round(the rest) + 127: moved up by 23
# they are the float32 2**round(the rest).
MAGIC = 1.5 * 2**23 + 127
LOWEST_POWER = -127.0  # its power is 0
UNIT = 16  # shares of polynomials are multiples of 1 / UNIT


class Drop(NamedTuple):
    """Inputs of dropout for a tile.

    Attributes:
        q_keys, kv_keys: int32, keys of queries and of keys, spread over the tile.
        threshold: core.dropout.threshold of the rate.
    """

    q_keys: Any
    kv_keys: Any
    threshold: int


def is_polynomial(column, share: float):
    """Returns whether elements of a column are polynomials, evenly spread over a thread's own."""
    number, many = column // LANE_COLS * 2 + column % 2, round(share * UNIT)
    return (number + 1) * many // UNIT > number * many // UNIT


def exp2_polynomial(x):
    """Computes 2**x in float32 without the special function unit: x <= 127; 0 from -127 down."""
    x = jnp.maximum(x, LOWEST_POWER)
    rounded = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    f = x - rounded
    total = jnp.full_like(f, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        total = total * f + coefficient
    exponent = lax.convert_element_type(rounded, jnp.int32) + 127
    return total * lax.bitcast_convert_type(exponent << 23, jnp.float32)


def plain(x, polynomials: float):
    """Computes 2**x of a tile in the way of `weights`, for the interpreter."""
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(is_polynomial(column, polynomials), exp2_polynomial(x), jnp.exp2(x))


def _exp2(x, scale, shift):
    return assembly(x.type, "ex2.approx.ftz.f32 $0, $1;", mlir_math.fma(x, scale, shift))


def _exp2_polynomial(x, scale, shift, bounded: bool):
    """Computes exp2_polynomial of x * scale + shift; shift is 0 if `bounded`."""
    f32, magic = ir.F32Type.get(), f32_constant(MAGIC)
    if bounded:  # one instruction fewer than below, and no maximum
        rounded = mlir_math.fma(x, scale, magic)
        f = mlir_math.fma(x, scale, arith.subf(magic, rounded))
    else:
        x = mlir_math.fma(x, scale, shift)
        x = assembly(f32, "max.NaN.f32 $0, $1, $2;", x, f32_constant(LOWEST_POWER))
        rounded = arith.addf(x, magic)
        f = arith.subf(x, arith.subf(rounded, magic))
    total = f32_constant(POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        total = mlir_math.fma(total, f, f32_constant(coefficient))
    power = arith.shli(arith.bitcast(ir.IntegerType.get_signless(32), rounded), i32_constant(23))
    return arith.mulf(total, arith.bitcast(f32, power))


def _after(x, word):
    """Returns x, but not before `word`, a pair of weights, is ready.

    Weights have no sign bits to flip.
    """
    i32 = ir.IntegerType.get_signless(32)
    code = "lop3.b32 $0, $1, $2, 0x80000000, 0x78;"  # x ^ (word & sign)
    return arith.bitcast(x.type, assembly(i32, code, arith.bitcast(i32, x), word))


# The exponentials of a pair wait for the weights of the pair _AHEAD before it. Otherwise ptxas puts
# all of dropout behind all exponentials at head dim 128: the forward is then 25 % slower than
# without dropout, with it 12 % (2 and 4 pairs: 16 and 17 %; one: 37 %).
_AHEAD = 3
_LARGEST_HALF = 0x7C00  # float16 infinity: bits of smaller numbers compare as the numbers do


def _places(shape, layout):
    """Returns (column, row, register index) of all registers, in this order."""
    return sorted([(col, row, index) for index, row, col in coordinates(shape, layout)])


def _mask(drop: Drop, index):
    """Returns i32: 16 bits of ones for each weight of a register that dropout keeps.

    A 32-bit product is as cheap as an addition; mul.wide and mul.hi cost 23 % of the forward.
    """
    first = arith.muli(at(drop.q_keys.registers[index], 0), at(drop.kv_keys.registers[index], 0))
    second = arith.muli(first, i32_constant(dropout.TWIN - (1 << 32)))
    fields = assembly(first.type, "prmt.b32 $0, $1, $2, 0x7632;", first, second)
    both_halves = 0x10001
    if drop.threshold < _LARGEST_HALF:  # a NaN is not below it either
        limit = i32_constant(drop.threshold * both_halves)
        code = "{ .reg .b32 x; abs.f16x2 x, $1; set.geu.u32.f16x2 $0, x, $2; }"
        return assembly(first.type, code, fields, limit)
    # The sum of a field and 2**15 - threshold carries into the top bit where the weight is kept.
    carry = i32_constant((dropout.LEVELS - drop.threshold) * both_halves)
    fields = arith.addi(arith.andi(fields, i32_constant((dropout.LEVELS - 1) * both_halves)), carry)
    return assembly(first.type, "prmt.b32 $0, $1, $1, 0xbb99;", fields)


def _converted(dtype, low, high):
    """Converts two weights to 16 bits each, packed in an i32."""
    code = f"cvt.rn.{'bf16' if dtype == jnp.bfloat16 else 'f16'}x2.f32 $0, $1, $2;"
    return assembly(ir.IntegerType.get_signless(32), code, high, low)


def _weights_body(scale, shares, cap, dtype, threshold, _, x, m, *keys):
    (polynomials, bounded), scale, sums, words = shares, f32_constant(scale), {}, []
    registers = np.empty(x.registers.shape, dtype=object)
    for col, row, index in _places(x.shape, x.layout):
        shift = arith.negf(at(m.registers[index], 0))
        if keys and len(words) >= _AHEAD:
            shift = _after(shift, words[-_AHEAD])
        p = []
        for e in range(2):
            logit = at(x.registers[index], e)
            args = logit if cap is None else cap.element(logit), scale, shift
            if is_polynomial(col + e, polynomials):
                p.append(_exp2_polynomial(*args, bounded))
            else:
                p.append(_exp2(*args))
            place = row, e
            sums[place] = arith.addf(sums[place], p[e]) if place in sums else p[e]
        if dtype == jnp.float32:
            registers[index] = pair(*p)
            continue
        word = _converted(dtype, *p)
        if keys:
            word = arith.andi(word, _mask(Drop(keys[0], keys[1], threshold), index))
        words.append(word)
        half = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        registers[index] = llvm.bitcast(ir.VectorType.get((2,), half), word)
    lanes = filled((x.shape[0], LANE_COLS), x.layout, lambda row, col: sums[row, col])
    return fragmented(registers, x.layout), fragmented(lanes, x.layout)


def weights(
    x,
    m,
    log2_scale: float,
    drop: Drop | None,
    dtype,
    *,
    polynomials: float,
    bounded: bool,
    cap: Cap | None = None,
):
    """Computes (p in dtype, 0 where dropped; row sums of all of p, per thread) of a tile of logits.

    Args:
        x: f32 (64, columns) in the WGMMA layout.
        m: f32, spread over the tile: p is 2**(x * log2_scale - m). 0 if `bounded`.
        log2_scale: a Python float. With a cap, that of the cap.
        drop: None without dropout, and in float32.
        dtype: bfloat16, float16 or float32.
        polynomials: share of the exponentials computed by multiply-add units, not the special
            function unit.
        bounded: all exponents lie between -126 and 127, as none is hidden and logits are capped.
        cap: softcap of logits to which it has not been applied yet, or None.
    """
    keys = () if drop is None else (drop.q_keys, drop.kv_keys)
    threshold = 0 if drop is None else drop.threshold
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,) * (2 + len(keys)),
        return_type=(
            plgpu.ShapeDtypeStruct(x.shape, dtype, WGMMA),
            plgpu.ShapeDtypeStruct((x.shape[0], LANE_COLS), jnp.float32, WGMMA),
        ),
    )(functools.partial(_weights_body, log2_scale, (polynomials, bounded), cap, dtype, threshold))
    return run(x, m, *keys)


def _signed_body(scale, threshold, _, x, shift, row_keys, column_keys):
    # As in inline_modifiers: twice a key of a row moves the field to the top.
    limit = i32_constant(signed_constant(threshold << dropout.FIELD + 1))
    scale, by_place = f32_constant(scale), {}
    for col, row, index in _places(x.shape, x.layout):
        for e in range(2):
            key = at(row_keys.registers[index], e)
            product = arith.muli(arith.addi(key, key), at(column_keys.registers[index], e))
            kept = arith.cmpi(arith.CmpIPredicate.uge, product, limit)
            p = _exp2(at(x.registers[index], e), scale, arith.negf(at(shift.registers[index], e)))
            by_place[row, col + e] = arith.select(kept, p, arith.negf(p))
    registers = filled(x.shape, x.layout, lambda row, col: by_place[row, col])
    return fragmented(registers, x.layout)


def signed(x, shift, keys, log2_scale: float, threshold: int):
    """Computes 2**(x * log2_scale - shift), f32, negative where dropout drops it.

    Args:
        x: f32 (64, columns) in the WGMMA layout.
        shift: f32, spread over the tile.
        keys: int32, dropout's keys of rows and of columns, spread over the tile.
        log2_scale: a Python float.
        threshold: core.dropout.threshold of the rate.
    """
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,) * 4, return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, WGMMA)
    )(functools.partial(_signed_body, log2_scale, threshold))
    return run(x, shift, *keys)


# --- Rows that see one key, where weights are not relative to the largest -------------------------
# Relative to its maximum the one weight of such a row is 1, and O is V to the last bit. A weight
# that is not 1 is rounded to bfloat16 before it multiplies V, but not in the sum that O is divided
# by: O is then V up to one unit in the last place. So that sum is rounded too where it is one
# weight, that is where the bits of all weights, OR-ed, are those of the sum. This costs a quarter
# of an instruction per element; to sum rounded weights would cost two. A row with several keys
# passes for one with a single key only if the others do not show in the bits of the sum.


def several(rows):
    """Returns the bits of rows with more than one weight: NaN."""
    return jnp.full_like(rows, math.nan)


def joined(bits, p, interpret: bool):
    """Returns f32[rows] with the bits of `bits` and of every weight of the row, OR-ed.

    Args:
        bits: f32[rows], of a bfloat16: the sum's if there is one weight.
        p: bfloat16 (rows, columns) in the WGMMA layout.
        interpret: run by the interpreter.
    """
    if interpret:
        as_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
        words = as_bits(p.astype(jnp.float32))
        row_bits = lax.reduce(words, jnp.uint32(0), lax.bitwise_or, (1,))
        return lax.bitcast_convert_type(row_bits | as_bits(bits), jnp.float32)
    run = plgpu.inline_mgpu(
        arg_types=(ROWS, WGMMA), return_type=plgpu.ShapeDtypeStruct(bits.shape, jnp.float32, ROWS)
    )(_joined_body)
    return run(bits, p)


def divisor(bits, l):
    """Returns the divisor of O in place of the row sums l: l, rounded where it is one weight."""
    rounded = l.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(bits == rounded, rounded, l)


def _joined_body(_, bits, p):
    i32, by_row = ir.IntegerType.get_signless(32), {}
    for index, row, _col in coordinates(p.shape, p.layout):
        by_row.setdefault(row, []).append(llvm.bitcast(i32, p.registers[index]))
    registers, joined_registers = bits.registers.copy(), []
    for old, row in zip(registers.flat, sorted(by_row), strict=True):
        word = functools.reduce(arith.ori, by_row[row])
        word = arith.ori(word, arith.shli(word, i32_constant(16)))
        for lanes in (1, 2):  # the other threads of the row
            code = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
            word = arith.ori(word, assembly(i32, code, word))
        word = arith.andi(word, i32_constant(signed_constant(0xFFFF0000)))
        joined = arith.ori(llvm.bitcast(i32, old), word)
        joined_registers.append(llvm.bitcast(old.type, joined))
    registers.flat = joined_registers
    return fragmented(registers, bits.layout)
