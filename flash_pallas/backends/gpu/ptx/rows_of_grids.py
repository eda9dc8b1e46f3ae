"""One number per row, passed through shared memory to the warps of a Grid."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .inline import ROWS, WARP, at, fragmented, i32_constant
from .mma_sync import WGMMA, Grid
from .threads import assembly, linear, shared_address, thread


def put_rows(values, to, interpret: bool):
    """Writes f32[rows] in the layout ROWS to shared memory."""
    if interpret:
        to[...] = values
        return
    plgpu.inline_mgpu(arg_types=(ROWS, plgpu.RefType()))(_put_body)(values, to)


def get_rows(source, rows: int, grid: Grid, interpret: bool):
    """Loads f32[rows] of the rows of an accumulator of `grid`, in the layout ROWS."""
    if interpret:
        return source[...]
    run: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((rows,), jnp.float32, ROWS)
    )(functools.partial(_get_body, grid, rows, ROWS.to_mgpu()))
    return run(source)


def _put_body(_, values, tile):
    for index, place in _places(WGMMA, values.shape[0], values.layout, tile):
        address, offset = place
        register = at(values.registers[index], 0)
        assembly(f"st.shared.f32 [$0+{offset}], $1;", "r,f", address, register)


def _get_body(grid: Grid, rows: int, layout, _, tile):
    f32 = ir.F32Type.get()
    registers = np.empty(layout.registers_shape((rows,)), dtype=object)
    for index, place in _places(grid, rows, layout, tile):
        address, offset = place
        code = f"ld.shared.f32 $0, [$1+{offset}];"
        number = llvm.inline_asm(f32, [address], code, "=f,r", has_side_effects=True)
        registers[index] = vector.broadcast(ir.VectorType.get((1,), f32), number)
    return fragmented(registers, layout)


def _places(grid: Grid, rows: int, layout, tile):
    """Yields (index, (address, bytes)) of each register; the four lanes of a row have the same."""
    me = thread()
    row = arith.divui(arith.remui(me, i32_constant(WARP)), i32_constant(4))
    down, _ = grid.starts(me, 0)
    row = row if down is None else arith.addi(row, down)
    address = linear(shared_address(tile), (row, 4))
    strides = layout.tiling.tile_strides((1,))
    for index in np.ndindex(*layout.registers_shape((rows,))):
        label = sum(i * stride for i, stride in zip(index, strides, strict=True))
        yield index, (address, 4 * grid.row(label))
