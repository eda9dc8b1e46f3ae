"""What modifiers of scores do in registers: positions, distances, dropout.

As in inline.py, each function has its plain meaning beside it for the interpreter.
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
from .inline import WGMMA
from .registers import coordinates, f32_constant, fragmented, i32_constant, splat


def _opaque(x):
    """The same i32, of which the compiler knows nothing: sums with it stay where they are used."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [x], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _thread_origin(shape, layout):
    """i32 (row, column) of this thread's first element."""
    i32 = ir.IntegerType.get_signless(32)
    return tuple(arith.index_cast(i32, x) for x in next(iter(layout.thread_idxs(shape))))


def _filled(shape, layout, element_type, value):
    """The registers of a tile of value(row, column of thread 0)."""
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    like = ir.VectorType.get((2,), element_type)
    for index, row, col in coordinates(shape, layout):
        register = llvm.mlir_undef(like)
        for e in range(2):
            register = vector.insert(
                value(row, col + e), register, dynamic_position=[], static_position=[e]
            )
        registers[index] = register
    return registers


def _positions_body(shape, axis, _, start):
    layout = WGMMA.to_mgpu()
    base = _opaque(arith.addi(splat(start), _thread_origin(shape, layout)[axis]))
    registers = _filled(
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
    registers = _filled(
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


def _spread(x):
    """dropout.spread of an i32."""
    x = arith.muli(x, i32_constant(_signed(dropout.FACTORS[0])))
    x = arith.xori(x, arith.shrui(x, i32_constant(dropout.SHIFT)))
    return arith.muli(x, i32_constant(_signed(dropout.FACTORS[1])))


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _kept_body(threshold, kv_axis, _, seeds):
    at = {"dynamic_position": []}
    values = {}
    for index, row, col in coordinates(seeds.shape, seeds.layout):
        for e in range(2):
            values[row, col + e] = functools.partial(
                vector.extract, seeds.registers[index], static_position=[e], **at
            )
    limit = i32_constant(_signed(threshold << 16))
    upper = i32_constant(_signed(0xFFFF0000))
    bits, mixed = ir.IntegerType.get_signless(1), {}
    registers = seeds.registers.copy()
    for index, row, col in coordinates(seeds.shape, seeds.layout):
        found = llvm.mlir_undef(ir.VectorType.get((2,), bits))
        for e in range(2):
            place = [row, col + e]
            high = place[kv_axis] & dropout.PAIR_BIT
            place[kv_axis] -= high
            place = tuple(place)
            if place not in mixed:
                mixed[place] = _spread(values[place]())
            half = mixed[place]
            if not high:  # the low half of fold(x), moved up
                half = arith.xori(arith.shli(half, i32_constant(16)), arith.andi(half, upper))
            keep = arith.cmpi(arith.CmpIPredicate.uge, half, limit)
            found = vector.insert(keep, found, static_position=[e], **at)
        registers[index] = found
    return fragmented(registers, seeds.layout, is_signed=False)


def kept(seeds, threshold: int, kv_axis: int):
    """bool: core.dropout.kept of fold(spread(seeds)), hashed once for two keys eight apart.

    Args:
        seeds: int32, the same for keys that differ in PAIR_BIT; keys start at a multiple of 16.
        threshold: dropout.threshold of the rate.
        kv_axis: along which keys run.
    """
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(seeds.shape, jnp.bool_, WGMMA)
    )(functools.partial(_kept_body, threshold, kv_axis))
    return run(seeds)
