"""Sums of a tile's rows: each lane sums its own columns, and what it has is reduced at the end."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from .inline import ROWS, WGMMA, at, coordinates, fragmented


def partial_sums(tile, interpret: bool):
    """Computes f32[rows]: each lane sums its own columns; the interpreter sums all columns."""
    if interpret:
        return tile.sum(axis=1)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape[:1], jnp.float32, ROWS),
    )(_partial_sums_body)
    return run(tile)


def row_sums(sums, interpret: bool):
    """Reduces the partial sums of the lanes to the row sums, f32[rows]."""
    if interpret:
        return sums
    run = plgpu.inline_mgpu(
        arg_types=(ROWS,), return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, ROWS)
    )(_row_sums_body)
    return run(sums)


def _partial_sums_body(_, tile):
    layout, by_row = ROWS.to_mgpu(), {}
    for index, row, _ in coordinates(tile.shape, tile.layout):
        register = tile.registers[index]
        by_row.setdefault(row, []).extend(at(register, e) for e in (0, 1))
    registers = np.empty(layout.registers_shape(tile.shape[:1]), dtype=object)
    strides = layout.tiling.tile_strides((1,))
    for index in np.ndindex(*registers.shape):
        row = sum(i * stride for i, stride in zip(index, strides, strict=True))
        registers[index] = _single(functools.reduce(arith.addf, by_row[row]))
    return fragmented(registers, layout)


def _row_sums_body(_, sums):
    registers = sums.registers.copy()
    for index in np.ndindex(*registers.shape):
        total = at(registers[index], 0)
        for distance in (1, 2):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        registers[index] = _single(total)
    return fragmented(registers, sums.layout)


def _single(x):
    return vector.broadcast(ir.VectorType.get((1,), x.type), x)
