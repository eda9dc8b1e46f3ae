"""Sums of which two warpgroups have computed a part each, through shared memory.

A thread of either warpgroup has the same elements of a tile as the other's thread of its index. So
elements lie in the order of threads: no two lanes of a quarter warp meet in a bank.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .inline import WGMMA, at, coordinates, fragmented, pair
from .threads import THREADS, assembly, linear, shared_address, thread

VECTOR = 4  # floats that a thread writes or reads at once
ROUND = THREADS * VECTOR  # floats of one round of all threads


def put(part, tile):
    """Writes a tile in the layout WGMMA to f32[rows, columns] in shared memory."""
    plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))(_put_body)(part, tile)


def added(part, tile):
    """Returns a tile in the layout WGMMA plus what the other warpgroup has `put`."""
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(part.shape, jnp.float32, WGMMA),
    )(_sum_body)
    return run(part, tile)


def _rounds(values, tile):
    """Yields (indices of the registers, address, byte offset) of four floats at a time."""
    address = linear(shared_address(tile), (thread(), 4 * VECTOR))
    indices = [index for index, *_ in coordinates(values.shape, values.layout)]
    for n in range(0, len(indices), 2):
        yield indices[n : n + 2], address, 4 * ROUND * (n // 2)


def _put_body(_, values, tile):
    for indices, address, offset in _rounds(values, tile):
        floats = [at(values.registers[index], e) for index in indices for e in (0, 1)]
        code = f"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
        assembly(code, "r,f,f,f,f", address, *floats)


def _sum_body(_, values, tile):
    f32, four = ir.F32Type.get(), ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    registers = values.registers.copy()
    for indices, address, offset in _rounds(values, tile):
        code = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
        loaded = llvm.inline_asm(four, [address], code, "=f,=f,=f,=f,r", has_side_effects=True)
        floats = [llvm.extractvalue(f32, loaded, [i]) for i in range(VECTOR)]
        for index, summands in zip(indices, (floats[:2], floats[2:]), strict=True):
            registers[index] = arith.addf(registers[index], pair(*summands))
    return fragmented(registers, values.layout)
