"""Tiles of arrays in device memory, loaded into registers; never from outside it."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .inline import WGMMA, coordinates, fragmented, i32_constant, origin, pair, splat


def load(ref, starts, shape, q_axis: int, interpret: bool):
    """Loads a tile in the layout WGMMA, in the dtype of its array.

    Args:
        ref: [T, S] in device memory; beyond an end elements may be anything.
        starts: first (row, column) of the tile, int32.
        shape: (rows, columns) of the tile.
        q_axis: axis of the tile that runs over T.
        interpret: run by the interpreter.
    """
    if interpret:
        index = [jnp.int32(s) + jnp.arange(n) for s, n in zip(starts, shape, strict=True)]
        q_index, kv_index = index[::-1] if q_axis else index
        tile = jnp.take(jnp.take(ref[...], q_index, axis=0, mode="clip"), kv_index, 1, mode="clip")
        return tile.T if q_axis else tile
    scalar = plgpu.Layout.WG_SPLAT
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, WGMMA),
    )(functools.partial(_load_body, shape, q_axis))
    return run(ref, *map(jnp.int32, starts))


class _Axis:
    """Offsets along one axis of an array, kept inside it."""

    def __init__(self, size: int, stride: int, first, step: int) -> None:
        self.last, self.stride, self.first, self.offsets = size - step, stride, first, {}

    def offset(self, index: int):
        """Returns i64: the elements from the array's start to `index` after the first one."""
        if index not in self.offsets:
            i64 = ir.IntegerType.get_signless(64)
            inside = arith.minsi(
                arith.addi(self.first, i32_constant(index)), i32_constant(self.last)
            )
            inside = arith.extsi(i64, inside)
            self.offsets[index] = arith.muli(inside, arith.constant(i64, self.stride))
        return self.offsets[index]


def _load_body(shape, q_axis: int, _, ref, row_start, column_start):
    layout = WGMMA.to_mgpu()
    element = ref.type.element_type
    row, column = origin(shape, layout)
    starts = arith.addi(splat(row_start), row), arith.addi(splat(column_start), column)
    strides, _ = ref.type.get_strides_and_offset()
    order = (1, 0) if q_axis else (0, 1)
    step = (1, 1) if q_axis else (1, 2)  # two neighbours at once where they lie side by side
    rows, columns = (
        _Axis(ref.type.shape[order[i]], strides[order[i]], starts[i], step[i]) for i in (0, 1)
    )
    base = mgpu.utils.memref_ptr(ref)

    def load(kind, row, column):
        offset = arith.addi(rows.offset(row), columns.offset(column))
        return llvm.load(kind, mgpu.utils.getelementptr(base, [offset], element))

    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for index, row, column in coordinates(shape, layout):
        if q_axis:
            registers[index] = pair(load(element, row, column), load(element, row, column + 1))
        else:
            registers[index] = load(ir.VectorType.get((2,), element), row, column)
    return fragmented(registers, layout)
