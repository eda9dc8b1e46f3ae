"""Logits to weights in registers: exponentials, row sums, dropout and conversion in one pass.

The special function unit takes eight cycles for the exponentials of a warp. Other work overlapped
with them is free, but only if it is interleaved in the code: ptxas leaves what comes after all
exponentials there. So one function writes exponentials, polynomials, products of dropout and
conversions in turns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from ...core import dropout
from .inline import LANE_COLS, WGMMA
from .registers import (
    assembly,
    at,
    coordinates,
    f32_constant,
    filled,
    fragmented,
    i32_constant,
    pair,
    signed_constant,
)
from .softcap import Cap

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
LOWEST = -127.0  # its power is 0
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


class Powers(NamedTuple):
    """Method by which 2**x is computed.

    Attributes:
        polynomials: share of the elements computed by multiply-add units, not the special function
            unit.
        bounded: all x lie between -126 and 127, as none is hidden and logits are capped.
        cap: softcap of logits to which it has not been applied yet, or None.
    """

    polynomials: float
    bounded: bool
    cap: Cap | None = None


def is_polynomial(column, share: float):
    """Returns whether elements of a column are polynomials, evenly spread over a thread's own."""
    number, many = column // LANE_COLS * 2 + column % 2, round(share * UNIT)
    return (number + 1) * many // UNIT > number * many // UNIT


def exp2_polynomial(x):
    """Computes 2**x in float32 without the special function unit: x <= 127; 0 from -127 down."""
    x = jnp.maximum(x, LOWEST)
    whole = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    f = x - whole
    total = jnp.full_like(f, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        total = total * f + coefficient
    exponent = lax.convert_element_type(whole, jnp.int32) + 127
    return total * lax.bitcast_convert_type(exponent << 23, jnp.float32)


def plain(x, powers: Powers):
    """Computes 2**x of a tile in the way of `weights`, for the interpreter."""
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(is_polynomial(column, powers.polynomials), exp2_polynomial(x), jnp.exp2(x))


def _exp2(x, scale, shift):
    return assembly(x.type, "ex2.approx.ftz.f32 $0, $1;", math.fma(x, scale, shift))


def _exp2_polynomial(x, scale, shift, bounded: bool):
    """Computes exp2_polynomial of x * scale + shift; shift is 0 if `bounded`."""
    f32, magic = ir.F32Type.get(), f32_constant(MAGIC)
    if bounded:  # one instruction fewer than below, and no maximum
        rounded = math.fma(x, scale, magic)
        f = math.fma(x, scale, arith.subf(magic, rounded))
    else:
        x = math.fma(x, scale, shift)
        x = assembly(f32, "max.NaN.f32 $0, $1, $2;", x, f32_constant(LOWEST))
        rounded = arith.addf(x, magic)
        f = arith.subf(x, arith.subf(rounded, magic))
    total = f32_constant(POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        total = math.fma(total, f, f32_constant(coefficient))
    power = arith.shli(arith.bitcast(ir.IntegerType.get_signless(32), rounded), i32_constant(23))
    return arith.mulf(total, arith.bitcast(f32, power))


def _after(x, word):
    """Returns x, but not before `word`, a pair of weights, is ready.

    Weights have no sign bits to flip.
    """
    i32 = ir.IntegerType.get_signless(32)
    code = "lop3.b32 $0, $1, $2, 0x80000000, 0x78;"  # x ^ (word & sign)
    return arith.bitcast(x.type, assembly(i32, code, arith.bitcast(i32, x), word))


# Exponentials begin when the weights of so many pairs before them are done. Without this ptxas puts
# all of dropout behind all exponentials at head dim 128: the forward is then 25 % slower than
# without dropout, with it 12 % (2 and 4 pairs: 16 and 17 %; one: 37 %).
_AHEAD = 3
_LARGEST_HALF = 0x7C00  # float16 infinity: bits of smaller numbers compare as the numbers do


def _places(shape, layout):
    """Returns (row, column, register index) of all registers, columns in order."""
    found = ((row, col, index) for index, row, col in coordinates(shape, layout))
    return sorted(found, key=lambda place: (place[1], place[0]))


def _mask(drop: Drop, index):
    """Returns i32: 16 bits of ones for each weight of a register that dropout keeps.

    A 32-bit product is as cheap as an addition; mul.wide and mul.hi cost 23 % of the forward.
    """
    first = arith.muli(at(drop.q_keys.registers[index], 0), at(drop.kv_keys.registers[index], 0))
    second = arith.muli(first, i32_constant(dropout.TWIN - (1 << 32)))
    fields = assembly(first.type, "prmt.b32 $0, $1, $2, 0x7632;", first, second)
    both = 0x10001
    if drop.threshold < _LARGEST_HALF:  # a NaN is not below it either
        limit = i32_constant(drop.threshold * both)
        code = "{ .reg .b32 x; abs.f16x2 x, $1; set.geu.u32.f16x2 $0, x, $2; }"
        return assembly(first.type, code, fields, limit)
    # The sum of a field and 2**15 - threshold carries into the top bit where the weight is kept.
    carry = i32_constant((dropout.LEVELS - drop.threshold) * both)
    fields = arith.addi(arith.andi(fields, i32_constant((dropout.LEVELS - 1) * both)), carry)
    return assembly(first.type, "prmt.b32 $0, $1, $1, 0xbb99;", fields)


def _converted(dtype, low, high):
    """Converts two weights to 16 bits each, packed in an i32."""
    code = f"cvt.rn.{'bf16' if dtype == jnp.bfloat16 else 'f16'}x2.f32 $0, $1, $2;"
    return assembly(ir.IntegerType.get_signless(32), code, high, low)


def _weights_body(scale, powers, dtype, threshold, _, x, m, *keys):
    cap, scale, sums, words = powers.cap, f32_constant(scale), {}, []
    registers = np.empty(x.registers.shape, dtype=object)
    for row, col, index in _places(x.shape, x.layout):
        shift = arith.negf(at(m.registers[index], 0))
        if keys and len(words) >= _AHEAD:
            shift = _after(shift, words[-_AHEAD])
        p = []
        for e in range(2):
            logit = at(x.registers[index], e)
            args = logit if cap is None else cap.element(logit), scale, shift
            if is_polynomial(col + e, powers.polynomials):
                p.append(_exp2_polynomial(*args, powers.bounded))
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


def weights(x, m, log2_scale: float, powers: Powers, drop: Drop | None, dtype):
    """Computes (p in dtype, 0 where dropped; row sums of all of p, per thread) of a tile of logits.

    Args:
        x: f32 (64, columns) in the WGMMA layout.
        m: f32, spread over the tile: p is 2**(x * log2_scale - m). 0 if powers.bounded.
        log2_scale: a Python float. With a cap, that of the cap.
        powers: method of the exponentials.
        drop: None without dropout, and in float32.
        dtype: bfloat16, float16 or float32.
    """
    keys = () if drop is None else (drop.q_keys, drop.kv_keys)
    threshold = 0 if drop is None else drop.threshold
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,) * (2 + len(keys)),
        return_type=(
            plgpu.ShapeDtypeStruct(x.shape, dtype, WGMMA),
            plgpu.ShapeDtypeStruct((x.shape[0], LANE_COLS), jnp.float32, WGMMA),
        ),
    )(functools.partial(_weights_body, log2_scale, powers, dtype, threshold))
    return run(x, m, *keys)


def _powers_body(scale, share, _, x, shift):
    scale, found = f32_constant(scale), {}
    for row, col, index in _places(x.shape, x.layout):
        for e in range(2):
            args = at(x.registers[index], e), scale, arith.negf(at(shift.registers[index], e))
            by_hand = is_polynomial(col + e, share)
            found[row, col + e] = _exp2_polynomial(*args, False) if by_hand else _exp2(*args)
    registers = filled(x.shape, x.layout, lambda row, col: found[row, col])
    return fragmented(registers, x.layout)


def powers(x, shift, log2_scale: float, share: float, interpret: bool):
    """Computes 2**(x * log2_scale - shift), f32, some of them by polynomials.

    Args:
        x: f32 (64, columns) in the WGMMA layout.
        shift: f32, spread over the tile.
        log2_scale: a Python float.
        share: share of the columns that are polynomials.
        interpret: run by the interpreter.
    """
    if interpret:
        return plain(x * log2_scale - shift, Powers(share, bounded=False))
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, WGMMA)
    )(functools.partial(_powers_body, log2_scale, share))
    return run(x, shift)


def _signed_body(scale, threshold, _, x, shift, row_keys, column_keys):
    # As in inline_modifiers: twice a key of a row moves the field to the top.
    limit = i32_constant(signed_constant(threshold << dropout.FIELD + 1))
    scale, found = f32_constant(scale), {}
    for row, col, index in _places(x.shape, x.layout):
        for e in range(2):
            key = at(row_keys.registers[index], e)
            product = arith.muli(arith.addi(key, key), at(column_keys.registers[index], e))
            kept = arith.cmpi(arith.CmpIPredicate.uge, product, limit)
            p = _exp2(at(x.registers[index], e), scale, arith.negf(at(shift.registers[index], e)))
            found[row, col + e] = arith.select(kept, p, arith.negf(p))
    registers = filled(x.shape, x.layout, lambda row, col: found[row, col])
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
