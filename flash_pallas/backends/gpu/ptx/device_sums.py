"""Sums in device memory: reductions of accumulators into it, and loads of what they made.

The reduction of a warp adds to consecutive bytes: element f of thread t lies at
[f // vector, t, f % vector], where one instruction adds `vector` floats.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .inline import WGMMA, at, coordinates, fragmented, pair
from .threads import THREADS, device_address, thread


def add(values, target, vector: int):
    """Adds a tile in the layout WGMMA to one in device memory.

    Args:
        values: f32 tile in registers.
        target: f32[elements of a thread / vector, threads, vector] in device memory.
        vector: number of floats that one instruction adds.
    """
    run = plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))(
        functools.partial(_add_body, vector)
    )
    run(values, target)


def load(source, shape, vector: int):
    """Loads a tile of this shape that `add` has added to."""
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, WGMMA),
    )(functools.partial(_load_body, shape, vector))
    return run(source)


def _add_body(vector: int, _, values, target):
    void = ir.Type.parse("!llvm.void")
    address = device_address(target, thread(), 4 * vector)
    floats = [
        at(values.registers[index], e)
        for index, *_ in coordinates(values.shape, values.layout)
        for e in (0, 1)
    ]
    kind = f"v{vector}." if vector > 1 else ""
    placeholders = ", ".join(f"${i + 1}" for i in range(vector))
    placeholders = f"{{{placeholders}}}" if vector > 1 else placeholders
    for n in range(0, len(floats), vector):
        code = f"red.global.add.{kind}f32 [$0+{4 * THREADS * n}], {placeholders};"
        constraints = ",".join(["l", *["f"] * vector])
        operands = [address, *floats[n : n + vector]]
        llvm.inline_asm(void, operands, code, constraints, has_side_effects=True)


def _load_body(shape, vector: int, _, source):
    layout, (rows, columns) = WGMMA.to_mgpu(), shape
    address = device_address(source, thread(), 4 * vector)
    floats = _floats(address, rows * columns // THREADS, vector)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for n, (index, *_) in enumerate(coordinates(shape, layout)):
        registers[index] = pair(*floats[2 * n : 2 * n + 2])
    return fragmented(registers, layout)


def _floats(address, count: int, vector: int) -> list:
    """Loads `count` floats of a thread from device memory."""
    f32, floats = ir.F32Type.get(), []
    for n in range(0, count, vector):
        place = f"[${vector}+{4 * THREADS * n}]"
        if vector == 1:
            code, kind = f"ld.global.f32 $0, {place};", f32
        else:
            results = ", ".join(f"${i}" for i in range(vector))
            code = f"ld.global.v{vector}.f32 {{{results}}}, {place};"
            kind = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * vector)})>")
        constraints = ",".join([*["=f"] * vector, "l"])
        x = llvm.inline_asm(kind, [address], code, constraints, has_side_effects=True)
        floats += [x] if vector == 1 else [llvm.extractvalue(f32, x, [i]) for i in range(vector)]
    return floats
