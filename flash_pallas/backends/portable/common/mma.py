"""Matmuls of tiles: `mma.sync` on fragments that `ldmatrix` reads from shared memory.

The accumulator of m16n8k16 has the register layout of a wgmma accumulator, with one warp for 16 of
64 rows, so everything in backends/gpu works on it. Converted to 16 bits it is the left operand
of the next matmul as it is: each element is already in the lane that needs it.

A warp reads both operands of its part of a matmul, (rows + columns) x summed elements, so a square
part is read with the fewest bytes. A Grid says which rows and columns of the result a warp has. So
an accumulator of a Grid has a shape of its own, its label, with as many elements as the result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.ptx import inline, mma_sync
from ...gpu.ptx.mma_sync import WGMMA, Grid, How
from .smem_tiles import columns_of


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """Matmuls of a warpgroup.

    Attributes:
        interpret: run by the interpreter.
    """

    interpret: bool

    def zeros(self, rows: int, columns: int, grid: Grid = WGMMA):
        """Returns a zero accumulator, f32, for a result of this shape."""
        if self.interpret:
            return jnp.zeros((rows, columns), jnp.float32)
        zeros = jnp.zeros(grid.label(rows, columns), jnp.float32)
        return plgpu.layout_cast(zeros, inline.WGMMA)

    def add(
        self,
        accumulator,
        a,
        b,
        *,
        transposed: bool = False,
        summed: int | None = None,
        column: Any = 0,
    ):
        """Returns accumulator + a @ b, or accumulator + a @ b^T.

        Args:
            accumulator: f32[rows, columns] in registers, rows a multiple of 64.
            a: 16-bit [rows, summed]: a tile in shared memory, or in registers like `accumulator`.
            b: a tile in shared memory: [summed, columns], or if `transposed` [columns, summed].
            transposed: see b.
            summed: number of columns to use of a transposed b, a multiple of 16; None: all.
            column: the first column to use of b, and of a if `transposed`: int32, a multiple of 16.
        """
        in_registers = not hasattr(a, "at") or isinstance(a, jnp.ndarray)
        if self.interpret:
            count = accumulator.shape[1]
            if transposed:
                count = columns_of(b) if summed is None else summed
            b = b[:, pl.ds(column, count)]
            if not in_registers:
                a = a[:, pl.ds(column if transposed else 0, b.shape[1 if transposed else 0])]
            return accumulator + _dot(a, b, transposed=transposed)
        moved = transposed and not isinstance(column, int)
        variant = How(right_transposed=transposed, summed=summed, moved=moved)
        return mma_sync.add(variant, accumulator, a, b, column, in_registers=in_registers)

    def add_part(self, accumulator, a, b, column, grid: Grid, *, transposed: bool = False):
        """Returns accumulator + a @ some columns of b, or accumulator + a^T @ them.

        Args:
            accumulator: f32[rows, columns] in registers, rows a multiple of 64, of `grid`.
            a: a tile in shared memory: [rows, summed], or if `transposed` [summed, rows].
            b: a tile in shared memory: [summed, columns and more].
            column: the first of these columns of b, int32, a multiple of 8.
            grid: arrangement of the warps.
            transposed: see a.
        """
        if self.interpret:
            a, b = _values(a), b[:, pl.ds(column, accumulator.shape[1])]
            return accumulator + _dot(a.T if transposed else a, b, transposed=False)
        variant = How(left_transposed=transposed, grid=grid)
        return mma_sync.add(variant, accumulator, a, b, column)

    def put(self, values, tile, column=0, grid: Grid = WGMMA):
        """Writes an f32 tile in registers to [rows, columns] in shared memory, in 16 bits.

        Args:
            values: f32[rows, up to so many columns] in registers.
            tile: the target.
            column: column of the tile where the first column of the values goes.
            grid: arrangement of the warps of the accumulator `values`.
        """
        values = values.astype(tile.dtype)
        mma_sync.put(values, tile, column, grid, self.interpret)

    def get(self, shape, tile, column=0):
        """Loads the values of `put`, f32; every thread must have written those that it reads."""
        return mma_sync.get(shape, tile, column, self.interpret).astype(jnp.float32)


def _values(tile):
    return tile[...][:, : columns_of(tile)]


def _dot(a, b, *, transposed: bool):
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision="highest", preferred_element_type=jnp.float32
    )
