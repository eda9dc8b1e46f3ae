"""Accumulation of dQ by the fused backward: float32 in device memory, in an order of its own.

Of each Q tile a warpgroup has half of the columns, and a thread of it has the registers of an
accumulator of `grid`. The reduction of a warp adds to consecutive bytes: element f of thread t lies
at [f // vector, t, f % vector], where one instruction adds `vector` floats. Before 9.0 that is 1. A
second launch reads the tiles in the same order and writes dQ in 16 bits.

Under the interpreter a part of a tile is [rows, columns], and copy_smem_to_gmem adds it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .....core.problem import Problem
from ....gpu import inline
from ....gpu.inline import at, coordinates, fragmented, pair
from ....gpu.launch import launch
from ...common.grid import Grid
from ...common.kernel import Kernel
from ...common.smem_tiles import buffer
from ...common.threads import THREADS, device_address, thread

PARTS = 2  # of a tile's columns, one for each warpgroup


@dataclasses.dataclass(frozen=True)
class DqSums:
    """Buffer in device memory that dQ is accumulated in.

    Attributes:
        rows: number of queries in a tile.
        width: number of columns of a tile.
        vector: number of floats that one instruction adds.
        interpret: run under the interpreter.
    """

    rows: int
    width: int
    vector: int
    interpret: bool

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of a tile."""
        return self.rows, self.width // PARTS

    @property
    def grid(self) -> Grid:
        """Arrangement of a warpgroup's warps over its part of a tile."""
        return Grid.of(*self.part)

    @property
    def tile(self) -> tuple[int, ...]:
        """Shape of a tile in device memory: both parts."""
        rows, columns = self.part
        if self.interpret:
            return PARTS, rows, columns
        return PARTS, rows * columns // THREADS // self.vector, THREADS, self.vector

    def zeros(self, problem: Problem):
        """Returns zeros for all tiles: f32[B, N, tiles, *tile]."""
        tiles = pl.cdiv(problem.q_len, self.rows)
        return jnp.zeros((problem.batch, problem.q_heads, tiles, *self.tile), jnp.float32)

    def scratch(self):
        """Returns the shared memory that `add` stages both parts in, or None on a GPU."""
        return plgpu.SMEM((PARTS, *self.part), jnp.float32) if self.interpret else None

    def add(self, values, target, scratch, rank):
        """Adds one part to a tile in device memory.

        Args:
            values: f32[part], an accumulator of `grid`.
            target: the tile in device memory.
            scratch: what `scratch` asks for.
            rank: rank of this warpgroup.
        """
        target = target.at[rank]
        if self.interpret:
            scratch[rank] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch.at[rank], target, reduction_op="add")
            plgpu.wait_smem_to_gmem(0)
            return
        types: Any = (inline.WGMMA, plgpu.RefType())
        run = plgpu.inline_mgpu(arg_types=types)(functools.partial(_add_body, self.vector))
        run(values, target)

    def load(self, source):
        """Loads one part of a tile from device memory as an accumulator of `grid`."""
        if self.interpret:
            return source[...]
        shape = self.grid.label(*self.part)
        run = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, inline.WGMMA),
        )(functools.partial(_load_body, shape, self.vector))
        return run(source)


@dataclasses.dataclass(frozen=True)
class Narrow(Kernel):
    """One launch that scales the sums and writes dQ in 16 bits; a CTA has one tile."""

    problem: Problem
    sums: DqSums
    interpret: bool

    def __call__(self, found, dq, staging):
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "q"))
        for part in range(PARTS):
            values = self.sums.load(found.at[batch, head, block, part])
            column = part * self.sums.part[1]
            self.copies.put(values * self.problem.spec.scale, staging, column, self.sums.grid)
        self.copies.meet()
        target = dq.at[batch, :, head]
        self.copies.store(staging, target, block * self.sums.rows, self.problem.q_len)


def narrowed(problem: Problem, sums: DqSums, found):
    """Launches Narrow and returns dQ [B, T, N, H] from the tiles."""
    blocks = found.shape[2]
    rows = blocks * sums.rows if sums.interpret else problem.q_len
    shape = problem.batch, rows, problem.q_heads, problem.head_dim
    run = launch(
        Narrow(problem, sums, sums.interpret),
        out=jax.ShapeDtypeStruct(shape, problem.dtype),
        scratch=(buffer((sums.rows, sums.width), problem.dtype),),
        grid={"batch": problem.batch, "head": problem.q_heads, "q": blocks},
        threads=1,
        name="flash_pallas_portable_narrow",
        interpret=sums.interpret,
    )
    return run(found)[:, : problem.q_len]


# --- what is written into the kernel -------------------------------------------------------------


def _add_body(vector: int, _, values, target):
    void = ir.Type.parse("!llvm.void")
    address = device_address(target, thread(), 4 * vector)
    floats = [
        at(values.registers[index], e)
        for index, *_ in coordinates(values.shape, values.layout)
        for e in (0, 1)
    ]
    kind = f"v{vector}." if vector > 1 else ""
    given = ", ".join(f"${i + 1}" for i in range(vector))
    given = f"{{{given}}}" if vector > 1 else given
    for n in range(0, len(floats), vector):
        code = f"red.global.add.{kind}f32 [$0+{4 * THREADS * n}], {given};"
        constraints = ",".join(["l", *["f"] * vector])
        operands = [address, *floats[n : n + vector]]
        llvm.inline_asm(void, operands, code, constraints, has_side_effects=True)


def _load_body(shape, vector: int, _, source):
    layout, (rows, columns) = inline.WGMMA.to_mgpu(), shape
    address = device_address(source, thread(), 4 * vector)
    found = _floats(address, rows * columns // THREADS, vector)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for n, (index, *_) in enumerate(coordinates(shape, layout)):
        registers[index] = pair(*found[2 * n : 2 * n + 2])
    return fragmented(registers, layout)


def _floats(address, count: int, vector: int) -> list:
    """Loads `count` floats of a thread from device memory."""
    f32, found = ir.F32Type.get(), []
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
        found += [x] if vector == 1 else [llvm.extractvalue(f32, x, [i]) for i in range(vector)]
    return found
