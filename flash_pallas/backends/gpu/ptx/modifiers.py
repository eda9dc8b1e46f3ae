"""Register-level code of score modifiers: positions, distances, dropout.

As in inline.py, `positions` and `distance` have their plain jnp form next to the inlined one, for
the interpreter.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math

from ....core import dropout
from .inline import (
    WGMMA,
    assembly,
    at,
    coordinates,
    f32_constant,
    filled,
    fragmented,
    i32_constant,
    opaque,
    origin,
    pair,
    signed_constant,
    splat,
)


def _positions_body(shape, axis, _, start):
    layout = WGMMA.to_mgpu()
    base = opaque(arith.addi(splat(start), origin(shape, layout)[axis]))
    registers = filled(
        shape,
        layout,
        lambda row, col: arith.addi(base, i32_constant((row, col)[axis])),
    )
    return fragmented(registers, layout, is_signed=True)


def positions(shape, axis: int, start, interpret: bool):
    """Returns int32[shape]: start + index along the axis.

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
    row0, col0 = origin(shape, layout)
    base = arith.sitofp(f32, opaque(arith.addi(splat(shift), arith.subi(row0, col0))))
    registers = filled(
        shape,
        layout,
        lambda row, col: math.absf(arith.addf(base, f32_constant(float(row - col)))),
    )
    return fragmented(registers, layout)


def distance(shape, shift, interpret: bool):
    """Computes f32[shape]: |row - column + shift|, exact below 2**24; one conversion per tile."""
    if interpret:
        row, col = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return lax.convert_element_type(lax.abs(row - col + jnp.int32(shift)), jnp.float32)
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, WGMMA),
    )(functools.partial(_distance_body, shape))
    return run(jnp.int32(shift))


def _kept_body(threshold, _, row_keys, column_keys):
    # Twice a key of a row is computed once for all its columns, and moves the field to the top.
    limit = i32_constant(signed_constant(threshold << dropout.FIELD + 1))
    by_place = {}
    for index, row, col in coordinates(row_keys.shape, row_keys.layout):
        for e in range(2):
            row_key, column_key = (at(x.registers[index], e) for x in (row_keys, column_keys))
            product = arith.muli(arith.addi(row_key, row_key), column_key)
            by_place[row, col + e] = arith.cmpi(arith.CmpIPredicate.uge, product, limit)
    registers = filled(row_keys.shape, row_keys.layout, lambda row, col: by_place[row, col])
    return fragmented(registers, row_keys.layout, is_signed=False)


def kept(row_keys, column_keys, threshold: int):
    """Returns the dropout mask, bool: core.dropout.kept of the products of keys.

    Args:
        row_keys: int32, spread over a tile.
        column_keys: int32, spread over a tile.
        threshold: dropout.threshold of the rate.
    """
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA),
        return_type=plgpu.ShapeDtypeStruct(row_keys.shape, jnp.bool_, WGMMA),
    )(functools.partial(_kept_body, threshold))
    return run(row_keys, column_keys)


def _quotient_body(_, x, y):
    registers, code = x.registers.copy(), "div.full.ftz.f32 $0, $1, $2;"
    for index in np.ndindex(*registers.shape):
        terms = [(at(registers[index], e), at(y.registers[index], e)) for e in (0, 1)]
        registers[index] = pair(
            *(assembly(ir.F32Type.get(), code, *operands) for operands in terms)
        )
    return fragmented(registers, x.layout)


def quotient(x, y):
    """Computes x / y of two f32 tiles, right to 2 ulp, except that numbers below 2^-126 are 0.

    The division that Pallas lowers to scales denominators and quotients as small as these: 9
    instructions, here 6.
    """
    tile = plgpu.ShapeDtypeStruct(x.shape, x.dtype, WGMMA)
    x, y = (plgpu.layout_cast(z, WGMMA) for z in (x, y))  # one of them may be a scalar's
    return plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=tile)(_quotient_body)(x, y)
