"""Registers of a tile in the WGMMA layout, for code that is written into the kernel as MLIR."""

from __future__ import annotations

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector


def coordinates(shape, layout):
    """(register index, row, column) of thread 0's first element in every register of a tile."""
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tile_strides = layout.tiling.tile_strides(tuple(strides))
    for index in np.ndindex(*layout.registers_shape(shape)):
        linear = sum(i * s for i, s in zip(index, tile_strides, strict=True))
        yield index, linear // shape[1], linear % shape[1]


def i32_constant(x: int):
    """An i32 constant."""
    return arith.constant(ir.IntegerType.get_signless(32), x)


def f32_constant(x: float):
    """An f32 constant."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))


def elements(register) -> int:
    """How many elements a register holds."""
    return ir.VectorType(register.type).shape[0]


def splat(array):
    """The one value of a scalar or splat array."""
    return array.registers[()] if array.registers.shape == () else array.registers.flat[0]


def fragmented(registers, layout, is_signed=None):
    """A FragmentedArray of these registers."""
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def at(register, element: int):
    """One element of a register."""
    return vector.extract(register, dynamic_position=[], static_position=[element])
