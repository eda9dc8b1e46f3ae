"""What modifiers of scores do in registers: positions, distances, dropout.

As in inline.py, each function has its plain meaning beside it for the interpreter.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from ...core import dropout
from .inline import WGMMA
from .registers import (
    assembly,
    at,
    coordinates,
    f32_constant,
    filled,
    fragmented,
    i32_constant,
    splat,
)


def _opaque(x):
    """The same i32, of which the compiler knows nothing: sums with it stay where they are used."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [x], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _thread_origin(shape, layout):
    """i32 (row, column) of this thread's first element."""
    i32 = ir.IntegerType.get_signless(32)
    return tuple(arith.index_cast(i32, x) for x in next(iter(layout.thread_idxs(shape))))


def _positions_body(shape, axis, _, start):
    layout = WGMMA.to_mgpu()
    base = _opaque(arith.addi(splat(start), _thread_origin(shape, layout)[axis]))
    registers = filled(
        shape,
        layout,
        ir.IntegerType.get_signless(32),
        lambda row, col: arith.addi(base, i32_constant((row, col)[axis])),
    )
    return fragmented(registers, layout, is_signed=True)


def positions(shape, axis: int, start, interpret: bool):
    """int32[shape]: start + index along the axis.

    Plain iota is the same in every step, so the compiler computes it once and keeps its 32 to 64
    registers alive through the loop; here every value is a sum of one register and an immediate.
    """
    if interpret:
        return jnp.int32(start) + lax.broadcasted_iota(jnp.int32, shape, axis)
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, WGMMA),
    )(functools.partial(_positions_body, shape, axis))
    return run(jnp.int32(start))


def _distance_body(shape, _, shift):
    layout, f32 = WGMMA.to_mgpu(), ir.F32Type.get()
    row0, col0 = _thread_origin(shape, layout)
    base = arith.sitofp(f32, _opaque(arith.addi(splat(shift), arith.subi(row0, col0))))
    registers = filled(
        shape,
        layout,
        f32,
        lambda row, col: math.absf(arith.addf(base, f32_constant(float(row - col)))),
    )
    return fragmented(registers, layout)


def distance(shape, shift, interpret: bool):
    """f32[shape]: |row - column + shift|, exact below 2**24; one conversion for the whole tile."""
    if interpret:
        row, col = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return lax.convert_element_type(lax.abs(row - col + jnp.int32(shift)), jnp.float32)
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, WGMMA),
    )(functools.partial(_distance_body, shape))
    return run(jnp.int32(shift))


def verdicts(q_key, kv_key, threshold: int):
    """i32: bits 15 and 31 tell whether dropout keeps the weights of two keys, eight apart.

    core.dropout.pair_bits, in three instructions for two weights: the field of each half is below
    2**15, so adding 2**15 - threshold carries into its top bit, and no further, where it is kept.
    """
    carry = (dropout.LEVELS - threshold) * 0x10001
    # Written out: from a 64-bit product in MLIR ptxas makes one addition of 0 more.
    code = (
        "{ .reg .b64 wide; .reg .b32 low, high; mul.wide.u32 wide, $1, $2;"
        " mov.b64 {low, high}, wide; lop3.b32 low, low, high, 0x7fff7fff, 0x28;"  # (x ^ y) & z
        f" add.u32 $0, low, {carry}; }}"
    )
    return assembly(q_key.type, code, q_key, kv_key)


def _kept_body(threshold, kv_axis, _, q_keys, kv_keys):
    zero, found = i32_constant(0), {}
    for index, row, col in coordinates(q_keys.shape, q_keys.layout):
        for e in range(2):
            if not (row, col + e)[kv_axis] & dropout.PAIR_BIT:
                q_key, kv_key = (at(keys.registers[index], e) for keys in (q_keys, kv_keys))
                found[row, col + e] = verdicts(q_key, kv_key, threshold)

    def keep(row, col):
        high = (row, col)[kv_axis] & dropout.PAIR_BIT
        bits = found[(row - high, col) if kv_axis == 0 else (row, col - high)]
        if high:
            return arith.cmpi(arith.CmpIPredicate.slt, bits, zero)
        low = arith.andi(bits, i32_constant(dropout.LEVELS))
        return arith.cmpi(arith.CmpIPredicate.ne, low, zero)

    bits = ir.IntegerType.get_signless(1)
    registers = filled(q_keys.shape, q_keys.layout, bits, keep)
    return fragmented(registers, q_keys.layout, is_signed=False)


def kept(q_keys, kv_keys, threshold: int, kv_axis: int):
    """bool: core.dropout.kept, one product for two keys eight apart.

    Args:
        q_keys: int32, spread over a tile whose keys start at a multiple of 16.
        kv_keys: likewise.
        threshold: dropout.threshold of the rate.
        kv_axis: along which keys run.
    """
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA),
        return_type=plgpu.ShapeDtypeStruct(q_keys.shape, jnp.bool_, WGMMA),
    )(functools.partial(_kept_body, threshold, kv_axis))
    return run(q_keys, kv_keys)
