"""Two ways for P of a KV block to reach the warps that accumulate O += P V.

Reads of shared memory dominate a step of a wide head: every warp loads its own operands. A warp
that has 16 rows of P in registers and accumulates all columns of O for them reads all of V. Through
shared memory any warp can have any rows: with 64 rows and 256 columns a warp has all rows and a
quarter of the columns, and reads 16 KB instead of 32 KB for a product of 64 keys (common/grid.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ...gpu.inline import ROWS, at, fragmented, i32_constant
from ..common.grid import WGMMA, Grid
from ..common.kernel import Kernel
from ..common.smem_tiles import buffer
from ..common.softmax import Online, Rows, Weighed, per_row
from ..common.threads import WARP, assembly, linear, shared_address, thread


@dataclasses.dataclass(frozen=True)
class OwnRows(Kernel):
    """Accumulation with P in registers: the warp of a row's scores has all of its columns of O."""

    interpret: bool

    def zeros(self, rows: int, columns: int):
        """Returns O before the first KV block."""
        return self.products.zeros(rows, columns)

    def fold(self, rows: Rows, weigh: Callable[[Rows], Weighed], wait: Callable, v) -> Rows:
        """Adds a KV block whose scores are known.

        Args:
            rows: the rows so far.
            weigh: computes the weights from the scores.
            wait: waits for V; see ForwardKernel.wait_for_v.
            v: the V tile, [columns, Hv] in shared memory.
        """
        wait()
        found = weigh(rows)
        rows = Online.rescaled(rows, found)
        return rows._replace(o=self.products.add(rows.o, found.p, v))

    def put(self, o, inverse, tile):
        """Writes O times one factor per row to shared memory, in 16 bits."""
        self.copies.put(o * per_row(inverse, o.shape), tile)


class Exchange(NamedTuple):
    """Shared memory that P passes through."""

    weights: Any  # [rows, columns]
    factors: Any  # f32[rows], of O

    @classmethod
    def scratch(cls, rows: int, columns: int, dtype) -> Exchange:
        """Returns the shared memory to allocate."""
        return cls(buffer((rows, columns), dtype), plgpu.SMEM((rows,), jnp.float32))


@dataclasses.dataclass(frozen=True)
class SharedWeights(Kernel):
    """Accumulation with P in shared memory: parts of O are as square as they can be.

    Attributes:
        exchange: shared memory that P passes through.
        grid: arrangement of the warps over O.
        interpret: run under the interpreter.
    """

    exchange: Exchange
    grid: Grid
    interpret: bool

    def zeros(self, rows: int, columns: int):
        """Returns O before the first KV block; see OwnRows."""
        return self.products.zeros(rows, columns, self.grid)

    def fold(self, rows: Rows, weigh: Callable[[Rows], Weighed], wait: Callable, v) -> Rows:
        """Adds a KV block whose scores are known; see OwnRows.

        All warps meet when V has arrived, and with the same barrier tell each other whether a row
        max grew. P is in shared memory by then, and is overwritten only after the next barrier.
        """
        found, exchange = weigh(rows), self.exchange
        alpha = found.alpha()
        self.copies.put(found.p, exchange.weights)
        put_rows(alpha, exchange.factors, self.interpret)
        grew = wait(found.grew)

        def rescaled():
            return self._scaled(rows.o)

        o = lax.cond(grew > 0, rescaled, lambda: rows.o)
        o = self.products.add_part(o, exchange.weights, v, 0, self.grid)
        return Rows(o, found.maxima, rows.l * alpha + found.sums)

    def put(self, o, inverse, tile):
        """Writes O times one factor per row to shared memory, in 16 bits; see OwnRows."""
        put_rows(inverse, self.exchange.factors, self.interpret)
        self.copies.meet()
        self.copies.put(self._scaled(o), tile, 0, self.grid)

    def _scaled(self, o):
        """Returns O times the factors in shared memory."""
        get = get_rows(self.exchange.factors, o.shape[0], self.grid, self.interpret)
        return o * per_row(get, o.shape)


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


# --- what is written into the kernel -------------------------------------------------------------


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
        found = llvm.inline_asm(f32, [address], code, "=f,r", has_side_effects=True)
        registers[index] = vector.broadcast(ir.VectorType.get((1,), f32), found)
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
