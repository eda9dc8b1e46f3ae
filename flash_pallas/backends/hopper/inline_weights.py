"""From logits to weights in registers: exponentials, row sums and dropout in one pass.

The special function unit takes eight cycles for a warp's exponentials, so other work is free beside
it, if it stands beside it: ptxas keeps the order of what it is given. Hence one function in which
exponentials, polynomials, sums, hashes and conversions take turns.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from ...core import dropout
from .inline import LANE_COLS, WGMMA
from .inline_modifiers import verdicts
from .registers import at, coordinates, f32_constant, fragmented, i32_constant

# 2**f for f in [-1/2, 1/2], relative error 2.7e-6; constant term first.
POLYNOMIAL = (
    0.9999992847442627,
    0.6931217908859253,
    0.240247443318367,
    0.05591785907745361,
    0.009570101276040077,
)
# Added to x, its last bits are round(x) + 127: moved up by 23 they are 2**round(x).
MAGIC = 1.5 * 2**23 + 127
LOWEST = -127.0  # its power is 0

CUBIC = (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105)
VARIANT = {"backward": 0.0, "lag": 4, "always": False, "fraction": 0.0, "coefficients": POLYNOMIAL}


def exp2_polynomial(x):
    """2**x without the special function unit; 0 up to -127, for x up to 127."""
    x = jnp.maximum(x, LOWEST)
    rounded = x + np.float32(MAGIC)
    f = x - (rounded - np.float32(MAGIC))
    total = jnp.full_like(f, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        total = total * f + np.float32(coefficient)
    scale = lax.bitcast_convert_type(rounded, jnp.int32) << 23
    return total * lax.bitcast_convert_type(scale, jnp.float32)


def _asm(result, code: str, operands, constraints: str):
    return llvm.inline_asm(result, operands, code, constraints, has_side_effects=False)


def _exp2(x):
    return _asm(x.type, "ex2.approx.ftz.f32 $0, $1;", [x], "=f,f")


def _exp2_polynomial(x, scale, shift, finite):
    """exp2_polynomial(x * scale + shift); where `finite`, of numbers between -126 and 127."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    magic = f32_constant(MAGIC)
    if finite:
        rounded = math.fma(x, scale, magic)
        f = math.fma(x, scale, arith.subf(magic, rounded))
    else:
        x = math.fma(x, scale, shift)
        x = _asm(f32, "max.NaN.f32 $0, $1, $2;", [x, f32_constant(LOWEST)], "=f,f,f")
        rounded = arith.addf(x, magic)
        f = arith.subf(x, arith.subf(rounded, magic))
    coefficients = VARIANT["coefficients"]
    total = f32_constant(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = math.fma(total, f, f32_constant(coefficient))
    power = arith.shli(arith.bitcast(i32, rounded), i32_constant(23))
    return arith.mulf(total, arith.bitcast(f32, power))


def _packed(low, high, dtype):
    i32 = ir.IntegerType.get_signless(32)
    name = {"bfloat16": "bf16x2", "float16": "f16x2"}[str(jnp.dtype(dtype))]
    return _asm(i32, f"cvt.rn.{name}.f32 $0, $1, $2;", [high, low], "=r,f,f")


def _tied(x, word):
    """x, but not before `word`, a pair of weights: of numbers that are not negative."""
    i32 = ir.IntegerType.get_signless(32)
    bits = _asm(i32, "lop3.b32 $0, $1, $2, 0x80000000, 0x78;", [arith.bitcast(i32, x), word], "=r,r,r")
    return arith.bitcast(x.type, bits)


def _permuted(a, b, selector: int):
    return _asm(a.type, f"prmt.b32 $0, $1, $2, {selector};", [a, b], "=r,r,r")


def _groups(shape, layout):
    """Register indices in pairs whose columns are eight apart: (row, [(index, col), ...])."""
    at_place = {(row, col): index for index, row, col in coordinates(shape, layout)}
    for (row, col), index in sorted(at_place.items(), key=lambda x: (x[0][1] // 16, x[0])):
        if not col & dropout.PAIR_BIT:
            yield row, col, index, at_place[row, col + dropout.PAIR_BIT]


def _weights_body(scale, dtype, threshold, has_m, finite, _, x, *more):
    m, keys = (more[0], more[1:]) if has_m else (None, more)
    fraction = VARIANT["fraction"]
    f32, done, used = ir.F32Type.get(), 0, 0
    sums, registers = {}, np.empty(x.registers.shape, dtype=object)
    packed_type = ir.VectorType.get((2,), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())
    history = []
    for row, col, *indices in _groups(x.shape, x.layout):
        words = []
        shift = f32_constant(0.0) if m is None else arith.negf(at(m.registers[indices[0]], 0))
        if VARIANT["lag"] and (keys or VARIANT["always"]) and len(history) >= VARIANT["lag"]:
            shift = _tied(shift, history[-VARIANT["lag"]])
        for index in indices:
            pair = []
            for e in range(2):
                args = at(x.registers[index], e), f32_constant(scale), shift
                done += 1
                if int(done * fraction) > used:
                    used += 1
                    p = _exp2_polynomial(*args, finite)
                else:
                    p = _exp2(math.fma(*args))
                lane = (row, e)
                sums[lane] = arith.addf(sums[lane], p) if lane in sums else p
                pair.append(p)
            words.append(_packed(*pair, dtype))
        if keys:
            q_keys, kv_keys = (k.registers[indices[0]] for k in keys)
            z = [verdicts(at(q_keys, e), at(kv_keys, e), threshold) for e in range(2)]
            masks = (_permuted(*z, 0xDD99), _permuted(*z, 0xFFBB))
            words = [arith.andi(w, mask) for w, mask in zip(words, masks, strict=True)]
        history.append(words[-1])
        for index, word in zip(indices, words, strict=True):
            registers[index] = llvm.bitcast(packed_type, word)
    out_shape = (x.shape[0], LANE_COLS)
    lanes = np.empty(x.layout.registers_shape(out_shape), dtype=object)
    for index, row, _ in coordinates(out_shape, x.layout):
        register = llvm.mlir_undef(ir.VectorType.get((2,), f32))
        for e in range(2):
            register = vector.insert(
                sums[row, e], register, dynamic_position=[], static_position=[e]
            )
        lanes[index] = register
    return fragmented(registers, x.layout), fragmented(lanes, x.layout)


def weights(x, m, scale: float, dtype, threshold: int = 0, keys=(), finite=False):
    """(p in dtype, without what dropout drops; row sums of all of p, per thread).

    Args:
        x: logits, f32 (64, columns); their product with scale is in base 2.
        m: row maxima, spread over the tile; or None for 0.
        scale: a Python float.
        dtype: of the weights.
        threshold: of core.dropout.
        keys: int32 keys of queries and keys spread over the tile, or nothing without dropout.
    """
    tiles = (x, *keys) if m is None else (x, m, *keys)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,) * len(tiles),
        return_type=(
            plgpu.ShapeDtypeStruct(x.shape, dtype, WGMMA),
            plgpu.ShapeDtypeStruct((x.shape[0], LANE_COLS), jnp.float32, WGMMA),
        ),
    )(functools.partial(_weights_body, scale, dtype, threshold, m is not None, finite))
    return run(*tiles)


def _powers_body(fraction, _, x):
    done, used = 0, 0
    registers = x.registers.copy()
    for index, _, _ in coordinates(x.shape, x.layout):
        for e in range(2):
            done += 1
            t = at(x.registers[index], e)
            if int(done * fraction) > used:
                used += 1
                p = _exp2_polynomial(t, f32_constant(1.0), f32_constant(0.0), False)
            else:
                p = _exp2(t)
            registers[index] = vector.insert(
                p, registers[index], dynamic_position=[], static_position=[e]
            )
    return fragmented(registers, x.layout)


def powers(x):
    """2**x of a tile, part of it as polynomials."""
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, WGMMA)
    )(functools.partial(_powers_body, VARIANT["backward"]))
    return run(x)
