"""Running row maxima of the online softmax, for logits of any finite size.

Weights are exp2(x * log2_scale - m): one fused multiply-add and one exponential per element. The
product is exact there and m is rounded, so weights are relative to 2**m exactly, whatever the
largest logit is, and the sum that they are divided by is relative to the same. But where m is so
large that its rounding error is worth many factors of two, that overflows. The rows in which a
logit is `far` (core/softmax.py) therefore have weights of exp2((x - shift) * log2_scale), where
`shift` is the largest x so far. One branch per tile, uniform over a warp, spares all other rows the
difference.
"""

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

from ...core import softmax
from ...core.problem import AttentionSpec
from . import inline
from .registers import (
    assembly,
    at,
    coordinates,
    elements,
    f32_constant,
    fragmented,
    i32_constant,
    of_some_lane,
    origin,
    pair,
    splat,
)

# What m is, finite, before a row has seen a key. A tile that hides all keys then has weights of
# exp2(-inf) and needs no second look.
LOWEST = float(np.finfo(np.float32).min)


class Maxima(NamedTuple):
    """Reference of the weights of each row.

    Attributes:
        m: f32[rows], base 2. NaN in a row that has a shift; at most LOWEST before the first key.
        shift: f32[rows], in units of x; 0 in other rows. None: it is a `Kept`, or no logit can be
            far.
    """

    m: Any
    shift: Any = None


class Kept(NamedTuple):
    """The shift of a warpgroup's rows in shared memory, for loops that have no register for it.

    Where m is not a NaN the value is arbitrary, so that it is written only where a far row is
    found. A thread reads what it has written itself.

    Attributes:
        ref: f32[rows].
        interpret: run by the interpreter.
    """

    ref: Any
    interpret: bool

    def load(self):
        """Loads the shift of all rows."""
        return plgpu.load(self.ref, layout=inline.ROWS)

    def store(self, shift):
        """Stores the shift of all rows."""
        self.ref[...] = shift


class Raised(NamedTuple):
    """Maxima after a tile, and how to go on from those before.

    Attributes:
        before: f32[rows], reference of the sums so far: 2**before, with the new shift.
        m: f32[rows], reference of this tile's weights exp2((x - shift) * log2_scale - m).
        shift: f32[rows]; None where no logit can be far.
        maxima: to carry on with.
    """

    before: Any
    m: Any
    shift: Any
    maxima: Maxima


def far_of(spec: AttentionSpec, dtype) -> float:
    """Returns core.softmax.far; 0 where no logit can be so large, as all are capped at less."""
    far = softmax.far(dtype)
    if spec.softcap is None or spec.score_mod is not None:
        return far
    return far if spec.softcap * softmax.LOG2E > far else 0.0


def raised(old: Maxima, top, log2_scale: float, far: float, kept: Kept | None = None) -> Raised:
    """Returns the maxima after a tile, of which some logit may be, or have been, far.

    Args:
        old: maxima before the tile.
        top: f32[rows], the largest x of the tile; -inf where all is hidden.
        log2_scale: x * log2_scale are logits in base 2.
        far: see core.softmax.far; 0 where no logit can be far.
        kept: as of `compared`.
    """
    if not far:
        m = jnp.maximum(old.m, top * log2_scale)
        return Raised(old.m, m, None, Maxima(m, old.shift))
    if kept is not None:
        before = Maxima(old.m, kept.load() if old.shift is None else old.shift)
        found = raised(before, top, log2_scale, far)
        kept.store(found.maxima.shift)
        return found._replace(maxima=Maxima(found.maxima.m))
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
    return Raised(before, m, shift, maxima)


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
    old: Maxima, x, log2_scale: float, far: float, slack: float | None, interpret: bool, kept=None
) -> Compared:
    """Compares a tile with the maxima so far.

    Args:
        old: maxima so far.
        x: f32 in the WGMMA layout, -inf where hidden.
        log2_scale: x * log2_scale are logits in base 2.
        far: see core.softmax.far; 0 where no logit can be far.
        slack: maxima stay as they are unless one grew by more, in base 2; None: they follow at
            once.
        interpret: run by the interpreter.
        kept: where the shift is a `Kept`; None: it is among the maxima.
    """
    top = x.max(axis=1)
    most = jnp.maximum(old.m, top * log2_scale)

    def plain():
        m, grew = most, None
        if slack is not None:
            m, grew = inline.lazy_max(old.m, most, slack, interpret)
        return Compared(x, old.m, m, Maxima(m, None if kept else old.shift), grew)

    def shifted():
        new = raised(old, top, log2_scale, far, kept)
        less = x - lax.broadcast_in_dim(new.shift, x.shape, (0,))
        grew = None if slack is None else jnp.int32(1)
        return Compared(less, new.before, new.m, new.maxima, grew)

    if not far:
        return plain()
    return lax.cond(some_far(most, top, far, interpret) > 0, shifted, plain)


def settled(maxima: Maxima, kept: Kept | None = None):
    """Returns (m, shift) of finished rows for `softmax.finish`; `kept` as of `compared`."""
    m, shift = maxima
    zero = jnp.zeros_like(m)
    if kept is not None:
        shift = jnp.where(m != m, kept.load(), zero)
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


def tell_far(ref, m, l, far: float, interpret: bool):
    """Writes 1 to `ref` if some row was computed without the shift that it needs.

    Args:
        ref: int32[1] in device memory.
        m: f32[rows], maxima in base 2; at most LOWEST in a row without a key.
        l: f32[rows, 8], sums of weights. NaN or infinite where an earlier maximum was far.
        far: see core.softmax.far.
        interpret: run by the interpreter.
    """
    if interpret:
        some = ((jnp.abs(m) > far) & (m > LOWEST)).any() | (~(l < jnp.inf)).any()
        ref[...] = lax.max(ref[...], jnp.full((1,), some.astype(jnp.int32)))
        return
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.ROWS, inline.WGMMA))
    run(functools.partial(_tell_far_body, far))(ref, m, l)


def spoiled(alpha, m, far: float):
    """Returns alpha; NaN in rows whose sums so far are relative to a maximum m that was far."""
    return jnp.where((jnp.abs(m) > far) & (m > LOWEST), math.nan, alpha)


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
        found = llvm.load(ir.VectorType.get((many,), f32), pointer)
        return [at(found, e) for e in range(many)]

    registers, by_place = x.registers.copy(), {}
    for index, row, col in coordinates(x.shape, x.layout):
        by_place.setdefault((row, col)[q_axis], []).append(index)
    if q_axis:
        values = _shared_by_quads(load, sorted(by_place))
    else:
        values = {row: load(i32_constant(row), 1) * 2 for row in by_place}
    for offset, indices in by_place.items():
        for i in indices:
            less = (arith.subf(at(registers[i], e), values[offset][e]) for e in (0, 1))
            registers[i] = pair(*less)
    return fragmented(registers, x.layout)


def _shared_by_quads(load, columns):
    """Returns the pair of values of each of these columns, of which a quad reads an eighth."""
    lane = arith.remui(mgpu.utils.thread_idx(), i32_constant(32))
    quad, within = (op(lane, i32_constant(4)) for op in (arith.divui, arith.remui))
    many, step = -(-len(columns) // _QUADS), columns[1] - columns[0]
    found = {}
    for turn in range(many):
        number = arith.addi(arith.muli(quad, i32_constant(many)), i32_constant(turn))
        number = arith.minui(number, i32_constant(len(columns) - 1))
        own = load(arith.muli(number, i32_constant(step)), 2)
        for i in range(turn, len(columns), many):
            source = arith.addi(within, i32_constant(4 * (i // many)))
            code = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
            found[columns[i]] = [assembly(x.type, code, x, source) for x in own]
    return found


def _tell_far_body(far, _, ref, m, l):
    kinds, bits = arith.CmpFPredicate, []
    for register in m.registers.flat:
        large = arith.cmpf(kinds.OGT, mlir_math.absf(at(register, 0)), f32_constant(far))
        seen = arith.cmpf(kinds.OGT, at(register, 0), f32_constant(LOWEST))
        bits.append(arith.andi(large, seen))
    for register in l.registers.flat:
        for e in range(elements(register)):
            bits.append(arith.cmpf(kinds.UGE, at(register, e), f32_constant(math.inf)))
    pointer = mgpu.utils.memref_ptr(ref)
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [arith.extui(ir.IntegerType.get_signless(32), functools.reduce(arith.ori, bits)), pointer],
        "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.b32 [$1], 1; }",
        "r,l",
        has_side_effects=True,
    )


def _some_far_body(far, _, m, top):
    found = None
    compare, kinds = arith.cmpf, arith.CmpFPredicate
    seen = arith.constant(ir.IntegerType.get_signless(1), True)
    for of_m, of_top in zip(m.registers.flat, top.registers.flat, strict=True):
        m_, top_ = at(of_m, 0), at(of_top, 0)
        is_far = compare(kinds.UGT, mlir_math.absf(m_), f32_constant(far))
        hidden = compare(kinds.OEQ, top_, f32_constant(-math.inf))
        unseen = arith.andi(compare(kinds.OLE, m_, f32_constant(LOWEST)), hidden)
        bit = arith.andi(is_far, arith.xori(unseen, seen))
        found = bit if found is None else arith.ori(found, bit)
    return mgpu.FragmentedArray.splat(of_some_lane(found), (), is_signed=True)
