"""Matmuls by `mma.sync` on fragments that `ldmatrix` reads from padded tiles in shared memory.

Also how their accumulators reach shared and device memory, and which warp has what of them: Grid.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ..launch import WARPGROUP_ROWS
from . import inline
from .inline import WARP, at, coordinates, fragmented, i32_constant, opaque, origin, pair, splat
from .threads import UNIT, UNIT_ELEMENTS, assembly, less, shared_address, thread, where

WARPS = 4  # of a warpgroup
STEP = 16  # summed elements of one mma
MMA = 16  # rows of an mma, and columns of two that are read together


class Grid(NamedTuple):
    """Arrangement of a warpgroup's warps: `down` of them below each other, the others to the right.

    Attributes:
        down: number of warps below each other: 4, 2 or 1.
        warp_rows: rows of the result from one warp to the one below it.
        block_rows: rows of the result from one block of 16 rows of a warp to its next.
    """

    down: int = WARPS
    warp_rows: int = MMA
    block_rows: int = WARPGROUP_ROWS

    @classmethod
    def of(cls, rows: int, columns: int) -> Grid:
        """Returns the Grid that reads the fewest bytes; each warp has neighbouring rows.

        Args:
            rows: rows of the result, a multiple of 64.
            columns: columns of the result, a multiple of 16.
        """
        fits = [n for n in (4, 2, 1) if columns % (MMA * WARPS // n) == 0]
        down = min(fits, key=lambda n: rows // n + columns // (WARPS // n))
        return cls(down, rows // down, MMA)

    @property
    def across(self) -> int:
        """Number of warps side by side."""
        return WARPS // self.down

    def label(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the shape of the accumulator of a result of this shape."""
        return rows * self.across, columns // self.across

    def row(self, label: int) -> int:
        """Converts a row of the accumulator to one of the result, relative to the warp's first."""
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


class How(NamedTuple):
    """Variant of a matmul: what lies transposed in shared memory.

    Transposed is [columns, summed] on the right and [summed, rows] on the left.
    """

    right_transposed: bool = False
    left_transposed: bool = False
    summed: int | None = None  # None: all that the right operand has
    grid: Grid = WGMMA
    moved: bool = False  # what is summed starts at a column of both; the right one is transposed


def add(variant: How, accumulator, a, b, column, *, in_registers: bool = False):
    """Returns an accumulator with a matmul added.

    Args:
        variant: variant of the matmul.
        accumulator: f32[rows, columns] in registers, rows a multiple of 64.
        a: the left operand of 16 bits: a tile in shared memory, or in registers.
        b: the right operand, a tile in shared memory.
        column: the first column that is read of b, and of a if `variant.moved`.
        in_registers: a is in registers, in the layout of an accumulator.
    """
    a_type: Any = inline.WGMMA if in_registers else plgpu.RefType()
    run = plgpu.inline_mgpu(
        arg_types=(inline.WGMMA, a_type, plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, inline.WGMMA),
    )(functools.partial(_add_body, variant))
    return run(accumulator, a, b, jnp.int32(column))


def put(values, tile, column, grid: Grid, interpret: bool):
    """Writes a 16-bit accumulator of `grid` to columns `column` on of a tile in shared memory."""
    if interpret:
        tile[:, pl.ds(column, values.shape[1])] = values
        return
    body = functools.partial(put_body, grid)
    scalar = plgpu.Layout.WG_SPLAT
    run = plgpu.inline_mgpu(arg_types=(inline.WGMMA, plgpu.RefType(), scalar))(body)
    run(values, tile, jnp.int32(column))


def get(shape, tile, column, interpret: bool):
    """Loads what `put` has written, in 16 bits; each thread reads its own elements."""
    if interpret:
        return tile[:, pl.ds(column, shape[1])]
    body = functools.partial(get_body, shape, inline.WGMMA.to_mgpu())
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(shape, tile.dtype, inline.WGMMA),
    )(body)
    return run(tile, jnp.int32(column))


def store_accumulator(values, target, starts, interpret: bool):
    """Writes an f32 tile to [rows, columns] in device memory, in the dtype of the target.

    Stores go straight from registers: four neighbouring lanes write 8 columns, a sector of 32 bytes
    of float32. Rows and columns that the array does not have are not written. Under the interpreter
    it has all rows.

    Args:
        values: f32 tile in the layout of accumulators.
        target: float32 or of 16 bits, columns a multiple of 2, or of 8 if the tile starts at 0.
        starts: (row, column) where the first element goes; the column is the int 0, or an int32
            that is a multiple of 2.
        interpret: run under the interpreter.
    """
    values = values.astype(target.dtype)
    if interpret:
        rows, columns = values.shape[0], min(values.shape[1], target.shape[1])
        target[pl.ds(starts[0], rows), pl.ds(starts[1], columns)] = values[:, :columns]
        return
    types: Any = (inline.WGMMA, plgpu.RefType(), *(plgpu.Layout.WG_SPLAT,) * 2)
    from_left = isinstance(starts[1], int)
    body = functools.partial(_store_body, values.dtype.itemsize, from_left)
    plgpu.inline_mgpu(arg_types=types)(body)(values, target, *map(jnp.int32, starts))


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
        word = llvm.inline_asm(i32, [address], code, "=r,r", has_side_effects=True)
        registers[index] = llvm.bitcast(kind, word)
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
    """Returns i32, the row and column of the result of this thread's first element."""
    if grid == WGMMA:  # as the layout has it: said as below, 60 bytes of spills in the forward
        return origin(shape, layout)
    me, four = thread(), i32_constant(4)
    lane = arith.remui(me, i32_constant(WARP))
    row, column = arith.divui(lane, four), arith.muli(arith.remui(lane, four), i32_constant(2))
    down, right = grid.starts(me, shape[1])
    row = row if down is None else arith.addi(row, down)
    return row, column if right is None else arith.addi(column, right)


def _store_body(size: int, from_left: bool, _, values, target, first_row, first_column):
    i64 = ir.IntegerType.get_signless(64)
    length, width = target.type.shape
    (stride, _), _ = target.type.get_strides_and_offset()
    row, column = origin(values.shape, values.layout)
    row = opaque(arith.addi(splat(first_row), row))
    column = column if from_left else arith.addi(splat(first_column), column)
    by_row = {}  # of thread 0
    for index, down, right in coordinates(values.shape, values.layout):
        if not from_left or right < width:
            by_row.setdefault(down, []).append((right, values.registers[index]))
    wide = lambda x, bytes: arith.muli(arith.extsi(i64, x), arith.constant(i64, bytes))
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(target))
    base = arith.addi(base, arith.addi(wide(row, size * stride), wide(column, size)))
    ends = None if from_left else (column, width)
    for down, pairs in by_row.items():
        exists = less(row, i32_constant(length - down))
        where(exists, functools.partial(_store_pairs, base, size, stride * down, pairs, ends))


def _store_pairs(base, size: int, offset: int, pairs, ends):
    """Writes a row's pairs; with `ends` (this thread's column, columns) those before the end."""
    for right, register in pairs:
        exists = None
        if ends is not None:
            column, width = ends
            exists = less(column, i32_constant(width - right))
        write = functools.partial(_store_pair, base, size, size * (offset + right), register)
        where(exists, write)


def _store_pair(base, size: int, offset: int, register):
    if size == 4:
        both = [at(register, e) for e in (0, 1)]
        assembly(f"st.global.v2.f32 [$0+{offset}], {{$1, $2}};", "l,f,f", base, *both)
    else:
        both = llvm.bitcast(ir.IntegerType.get_signless(32), register)
        assembly(f"st.global.b32 [$0+{offset}], $1;", "l,r", base, both)


@dataclasses.dataclass(frozen=True)
class _Fragments:
    """Source of ldmatrix.x4: four 8 x 8 matrices of a tile at a time; each lane addresses one row.

    Attributes:
        address: i32 address of this lane's row and unit in the first four matrices.
        pitch: bytes of a row.
        transposed: each matrix is transposed on the way into registers.
    """

    address: Any
    pitch: int
    transposed: bool

    @classmethod
    def of(cls, tile, me, *, transposed: bool, units_first: bool, row=None, column=None):
        """Returns the source whose matrices come in the order that a fragment wants them.

        Args:
            tile: [rows, columns] in shared memory.
            me: i32, the thread.
            transposed: each matrix is transposed on the way into registers.
            units_first: the second of the four matrices lies to the right of the first, and the
                third below it; else the other way round.
            row: i32, the row of the tile that counts as row 0; None: row 0.
            column: i32, the column of the tile that counts as column 0; None: column 0.
        """
        pitch = 2 * tile.type.shape[1]
        lane = arith.remui(me, i32_constant(WARP))
        matrix, within = arith.divui(lane, i32_constant(8)), arith.remui(lane, i32_constant(8))
        odd, high = arith.remui(matrix, i32_constant(2)), arith.divui(matrix, i32_constant(2))
        below, right = (high, odd) if units_first else (odd, high)
        within = arith.addi(within, arith.muli(below, i32_constant(8)))
        if row is not None:
            within = arith.addi(within, row)
        offset = arith.addi(
            arith.muli(within, i32_constant(pitch)), arith.muli(right, i32_constant(UNIT))
        )
        if column is not None:
            offset = arith.addi(offset, arith.muli(column, i32_constant(2)))
        return cls(arith.addi(shared_address(tile), offset), pitch, transposed)

    def load(self, row: int, column: int):
        """Loads four registers of two elements each, from this row and column on."""
        i32 = ir.IntegerType.get_signless(32)
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        offset = row * self.pitch + column // UNIT_ELEMENTS * UNIT
        matrices = llvm.inline_asm(
            four,
            [self.address],
            f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if self.transposed else ''}.shared.b16 "
            f"{{$0, $1, $2, $3}}, [$4+{offset}];",
            "=r,=r,=r,=r,r",
            has_side_effects=True,
        )
        return [llvm.extractvalue(i32, matrices, [i]) for i in range(4)]


def _left(a, me, variant: How, row, column):
    """Returns a function (row after a warp's first, summed element) -> left fragment of an mma."""
    if variant.left_transposed:  # rows of the result are columns of the tile
        fragments = _Fragments.of(a, me, transposed=True, units_first=True, column=row)
        return lambda row, k: fragments.load(k, row)
    if not hasattr(a, "registers"):
        from_column = column if variant.moved else None
        starts = {"row": row, "column": from_column}
        return _Fragments.of(a, me, transposed=False, units_first=False, **starts).load
    i32 = ir.IntegerType.get_signless(32)
    by_place = {(r, c): a.registers[index] for index, r, c in coordinates(a.shape, a.layout)}

    def fragment(row, column):
        places = [(row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)]
        return [llvm.bitcast(i32, by_place[place]) for place in places]

    return fragment


def _right(b, me, variant: How, column):
    """Returns (first summed element, column after a warp's first) -> two adjacent fragments."""
    if variant.right_transposed:  # columns of the result are rows of the tile
        from_column = column if variant.moved else None
        fragments = _Fragments.of(b, me, transposed=False, units_first=True, column=from_column)
        return lambda k, column: fragments.load(column, k)
    return _Fragments.of(b, me, transposed=True, units_first=False, column=column).load


def _add_body(variant: How, _, accumulator, a, b, column):
    rows, columns = accumulator.shape
    me = thread()
    down, right = variant.grid.starts(me, columns)
    right = splat(column) if right is None else arith.addi(right, splat(column))
    left, right = _left(a, me, variant, down, splat(column)), _right(b, me, variant, right)
    summed = b.type.shape[1] - UNIT_ELEMENTS if variant.right_transposed else b.type.shape[0]
    kind = "bf16" if isinstance(b.type.element_type, ir.BF16Type) else "f16"
    layout = accumulator.layout
    by_place = {
        (row, column): accumulator.registers[index]
        for index, row, column in coordinates(accumulator.shape, layout)
    }
    blocks = range(0, rows, WARPGROUP_ROWS)
    for k in range(0, variant.summed or summed, STEP):
        lefts = [left(variant.grid.row(block), k) for block in blocks]
        for column in range(0, columns, 16):
            first, second, third, fourth = right(k, column)
            for next_8, right_fragment in ((0, (first, second)), (8, (third, fourth))):
                for block, left_fragment in zip(blocks, lefts, strict=True):
                    _step(by_place, (block, column + next_8), left_fragment, right_fragment, kind)
    registers = accumulator.registers.copy()
    for index, row, column in coordinates(accumulator.shape, layout):
        registers[index] = by_place[row, column]
    return fragmented(registers, layout)


def _step(by_place, place, left_fragment, right_fragment, kind: str):
    """Issues one mma into the accumulator's registers of rows `row` and `row + 8`."""
    row, column = place
    places = (row, column), (row + 8, column)
    before = [at(by_place[place], e) for place in places for e in (0, 1)]
    f32 = ir.F32Type.get()
    sums = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        [*left_fragment, *right_fragment, *before],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
    )
    values = [llvm.extractvalue(f32, sums, [i]) for i in range(4)]
    by_place[places[0]], by_place[places[1]] = pair(*values[:2]), pair(*values[2:])
