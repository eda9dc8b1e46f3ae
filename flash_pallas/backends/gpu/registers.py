"""Registers of a tile in the WGMMA layout, for code that is written into the kernel as MLIR."""

from __future__ import annotations

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


def coordinates(shape, layout):
    """Yields (register index, row, column) of thread 0's first element in every register."""
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tile_strides = layout.tiling.tile_strides(tuple(strides))
    for index in np.ndindex(*layout.registers_shape(shape)):
        linear = sum(i * s for i, s in zip(index, tile_strides, strict=True))
        yield index, linear // shape[1], linear % shape[1]


def origin(shape, layout):
    """Returns the i32 (row, column) of this thread's first element."""
    i32 = ir.IntegerType.get_signless(32)
    return tuple(arith.index_cast(i32, x) for x in next(iter(layout.thread_idxs(shape))))


def i32_constant(x: int):
    """Returns an i32 constant."""
    return arith.constant(ir.IntegerType.get_signless(32), x)


def signed_constant(bits: int) -> int:
    """Returns the int32 that has these 32 bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def f32_constant(x: float):
    """Returns an f32 constant."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))


def opaque(x):
    """Returns the same i32 or i64, unknown to LLVM: sums with it stay where they are."""
    wide = x.type == ir.IntegerType.get_signless(64)
    code, constraints = ("mov.b64 $0, $1;", "=l,l") if wide else ("mov.b32 $0, $1;", "=r,r")
    return llvm.inline_asm(x.type, [x], code, constraints, has_side_effects=True)


def elements(register) -> int:
    """Returns how many elements a register holds."""
    return ir.VectorType(register.type).shape[0]


def splat(array):
    """Returns the one value of a scalar or splat array."""
    return array.registers[()] if array.registers.shape == () else array.registers.flat[0]


def fragmented(registers, layout, is_signed=None):
    """Wraps these registers in a FragmentedArray."""
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def at(register, element: int):
    """Extracts one element of a register."""
    return vector.extract(register, dynamic_position=[], static_position=[element])


def pair(*values):
    """Packs two elements into a register."""
    register = llvm.mlir_undef(ir.VectorType.get((2,), values[0].type))
    for e, value in enumerate(values):
        register = vector.insert(value, register, dynamic_position=[], static_position=[e])
    return register


def of_some_lane(bit):
    """Returns i32, uniform over a warp: 1 if the i1 is set in some lane."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        i32,
        [arith.extui(i32, bit)],
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
        " selp.b32 $0, 1, 0, p; }",
        "=r,r",
        has_side_effects=True,
    )


def filled(shape, layout, value):
    """Returns the registers of a tile whose elements are value(row, column of thread 0)."""
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for index, row, col in coordinates(shape, layout):
        registers[index] = pair(value(row, col), value(row, col + 1))
    return registers


def assembly(result_type, code: str, *operands):
    """Emits PTX without side effects: `code` makes $0 of $1, $2, ..., all of 32 bits."""
    letter = lambda t: "f" if isinstance(t, ir.F32Type) else "r"
    constraints = ",".join([f"={letter(result_type)}", *(letter(x.type) for x in operands)])
    return llvm.inline_asm(result_type, list(operands), code, constraints, has_side_effects=False)


def _use_zero_body(_):
    zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get_f32(0.0))
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [zero], "// zero $0", "f", has_side_effects=True)


def use_zero(interpret: bool):
    """Keeps a register that holds 0.0 alive up to here.

    LLVM gives the register from which accumulators get their zeros to the last accumulator. ptxas
    then waits for the product before it, where that is in flight (C7517): in nested loops, out of
    which LLVM does not hoist the constant. With a use of the zero after the first product of the
    last accumulator, ptxas does not wait.
    """
    if not interpret:
        plgpu.inline_mgpu()(_use_zero_body)()
