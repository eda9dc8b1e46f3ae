"""Part of a product that each warp of a warpgroup computes; its way to shared memory and back.

A warp reads both operands of its part, (rows + columns) x summed elements, so a square part is read
with the fewest bytes. Accumulators have the register layout of wgmma, in which warp w has rows 16 w
to 16 w + 16 of each 64. A Grid says which rows and columns of the product these are. So an
accumulator of a Grid has a shape of its own, its label, with as many elements as the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ...gpu.inline import coordinates, fragmented, i32_constant, origin, splat
from ...gpu.launch import WARPGROUP_ROWS
from .threads import WARP, shared_address, thread

WARPS = 4  # of a warpgroup
MMA = 16  # rows of a product of a warp, and columns of two that are read together


class Grid(NamedTuple):
    """Arrangement of a warpgroup's warps: `down` of them below each other, the others to the right.

    Attributes:
        down: number of warps below each other: 4, 2 or 1.
        warp_rows: rows of the product from one warp to the one below it.
        block_rows: rows of the product from one block of 16 rows of a warp to its next.
    """

    down: int = WARPS
    warp_rows: int = MMA
    block_rows: int = WARPGROUP_ROWS

    @classmethod
    def of(cls, rows: int, columns: int) -> Grid:
        """Returns the Grid that reads the fewest bytes; each warp has neighbouring rows.

        Args:
            rows: rows of the product, a multiple of 64.
            columns: columns of the product, a multiple of 16.
        """
        fits = [n for n in (4, 2, 1) if columns % (MMA * WARPS // n) == 0]
        down = min(fits, key=lambda n: rows // n + columns // (WARPS // n))
        return cls(down, rows // down, MMA)

    @property
    def across(self) -> int:
        """Number of warps side by side."""
        return WARPS // self.down

    def label(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the shape of the accumulator of a product of this shape."""
        return rows * self.across, columns // self.across

    def row(self, label: int) -> int:
        """Converts a row of the accumulator to one of the product, relative to the warp's first."""
        block, row = divmod(label, WARPGROUP_ROWS)
        return block * self.block_rows + row

    def starts(self, me, columns: int) -> tuple[Any, Any]:
        """Returns i32, the first row and column of the warp of thread `me`; None stands for 0.

        Args:
            me: i32, the thread of the warpgroup.
            columns: number of columns of the accumulator.
        """
        warp, down = arith.divui(me, i32_constant(WARP)), i32_constant(self.down)
        row = arith.remui(warp, down) if self.across > 1 else warp
        row = arith.muli(row, i32_constant(self.warp_rows)) if self.down > 1 else None
        if self.across == 1:
            return row, None
        return row, arith.muli(arith.divui(warp, down), i32_constant(columns))


WGMMA = Grid()  # accumulators as they are labelled


# --- what is written into the kernel -------------------------------------------------------------


def put_body(grid: Grid, _, values, tile, first):
    """Writes a 16-bit accumulator to columns `first` on of a tile in shared memory."""
    void = ir.Type.parse("!llvm.void")
    for index, place in _places(grid, values.shape, values.layout, tile, first):
        address, offset = place
        register = llvm.bitcast(ir.IntegerType.get_signless(32), values.registers[index])
        code = f"st.shared.b32 [$0+{offset}], $1;"
        llvm.inline_asm(void, [address, register], code, "r,r", has_side_effects=True)


def get_body(shape, layout, _, tile, first):
    """Loads what `put_body` has written in the layout WGMMA; each thread reads its own elements."""
    i32, kind = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), tile.type.element_type)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for index, place in _places(WGMMA, shape, layout, tile, first):
        address, offset = place
        code = f"ld.shared.b32 $0, [$1+{offset}];"
        found = llvm.inline_asm(i32, [address], code, "=r,r", has_side_effects=True)
        registers[index] = llvm.bitcast(kind, found)
    return fragmented(registers, layout)


def _places(grid: Grid, shape, layout, tile, first):
    """Yields (index, (address, byte offset)) of each register of an accumulator of this shape."""
    pitch = 2 * tile.type.shape[1]
    row, column = _first(grid, shape, layout)
    column = arith.addi(column, splat(first))
    address = arith.addi(
        shared_address(tile),
        arith.addi(arith.muli(row, i32_constant(pitch)), arith.muli(column, i32_constant(2))),
    )
    for index, label, column in coordinates(shape, layout):
        yield index, (address, grid.row(label) * pitch + 2 * column)


def _first(grid: Grid, shape, layout):
    """Returns i32, the row and column of the product of this thread's first element."""
    if grid == WGMMA:  # as the layout has it: said as below, 60 bytes of spills in the forward
        return origin(shape, layout)
    me, four = thread(), i32_constant(4)
    lane = arith.remui(me, i32_constant(WARP))
    row, column = arith.divui(lane, four), arith.muli(arith.remui(lane, four), i32_constant(2))
    down, right = grid.starts(me, shape[1])
    row = row if down is None else arith.addi(row, down)
    return row, column if right is None else arith.addi(column, right)
