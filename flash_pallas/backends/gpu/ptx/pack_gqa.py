"""Packed rows of a few queries, straight from the caller's arrays and straight into the results.

The queries and heads that share a KV head are the rows of one tile: row r is query r // group and
head r % group. A TMA tile starts at a multiple of 8 rows and a group may have any size, so arrays
for TMA would be padded and cut again in launches of their own: 1.0 to 2.4 us each, out of 37 for a
step at S=32k (H200). Here a warpgroup moves the rows in pieces of 16 bytes; there are few of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from ..launch import WARPGROUP_ROWS, tile_transforms
from . import inline
from .inline import PIECE_BYTES, WARPGROUP, fragmented, i32_constant, opaque, splat


@dataclasses.dataclass(frozen=True)
class PackedGqa:
    """The rows of one tile of at most 64.

    Attributes:
        queries: number of queries of a sequence.
        group: number of query heads that share a KV head.
        first: number of the tile's first row, traced; may be None where there is one tile.
        interpret: run by the interpreter.
        size: rows of the tile, padding included, in vectors of one value per row.
        layout: register layout of those vectors.
        at_once: `load` issues all its copies before it waits for one. Through registers they come
            one after the other: 36 times the latency of memory for 64 rows of 576 columns.
    """

    queries: int
    group: int
    first: Any
    interpret: bool
    size: int = WARPGROUP_ROWS
    layout: Any = inline.ROWS
    at_once: bool = False

    @property
    def total(self) -> int:
        """Number of rows of all tiles."""
        return self.queries * self.group

    @property
    def most(self) -> int:
        """Largest number of rows that a tile has."""
        return min(self.total, WARPGROUP_ROWS)

    @property
    def start(self):
        """Number of the tile's first row, as an int32."""
        return jnp.int32(0) if self.total <= WARPGROUP_ROWS else jnp.int32(self.first)

    def load(self, source, tile, swizzle: int):
        """Copies rows into a tile in shared memory, which matmuls see after `commit_smem`.

        Args:
            source: [queries, group, columns] in device memory, a row a multiple of 16 bytes.
            tile: [rows, at least columns] in shared memory; 0 where source has nothing.
            swizzle: swizzle of the tile, in bytes.
        """
        if self.interpret:
            tile[...] = jnp.zeros(tile.shape, tile.dtype)
            columns = pl.ds(0, source.shape[-1])
            self.visit(lambda i, place: _set(tile, (i, columns), source[place]))
            return
        refs = plgpu.RefType(), plgpu.RefType(tile_transforms(swizzle, tile.dtype))
        run = plgpu.inline_mgpu(arg_types=(*refs, plgpu.Layout.WG_SPLAT))
        body = _copy_body if self.at_once else _load_body
        run(functools.partial(body, self))(source, tile, self.start)

    def store(self, tile, target, swizzle: int):
        """Copies the rows and columns of a tile that `target` has; see `load` for the arguments."""
        if self.interpret:
            width = min(tile.shape[-1], target.shape[-1])
            columns = pl.ds(0, width)
            self.visit(lambda i, place: _set(target, (*place, columns), tile[i, columns]))
            return
        refs = plgpu.RefType(tile_transforms(swizzle, tile.dtype)), plgpu.RefType()
        run = plgpu.inline_mgpu(arg_types=(*refs, plgpu.Layout.WG_SPLAT))
        run(functools.partial(_store_body, self))(tile, target, self.start)

    def store_values(self, values, target):
        """Copies one f32 per row, [rows] in shared memory, to [group, queries] in device memory."""
        if self.interpret:
            self.visit(lambda i, place: _set(target, place[::-1], values[i]))
            return
        refs = plgpu.RefType(), plgpu.RefType()
        run = plgpu.inline_mgpu(arg_types=(*refs, plgpu.Layout.WG_SPLAT))
        run(functools.partial(_store_values_body, self))(values, target, self.start)

    def query(self):
        """Returns the query of every row, int32[size]; padding has that of the last row."""
        if self.interpret:
            return self._place()[0]
        run = plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WG_SPLAT,), return_type=self._numbers(jnp.int32)
        )
        return run(functools.partial(_query_body, self))(self.start)

    def per_query(self, source):
        """Returns int32[size], the value of every row's query, from int32[queries] as `per_head`.

        Padding has that of the last row.
        """
        if self.interpret:
            return source[...][self._place()[0]]
        run = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
            return_type=self._numbers(jnp.int32),
        )
        return run(functools.partial(_per_query_body, self))(source, self.start)

    def per_head(self, source):
        """Returns f32[size], the value of every row's head, from f32[group] in device memory."""
        if self.interpret:
            return source[...][self._place()[1]]
        run = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
            return_type=self._numbers(jnp.float32),
        )
        return run(functools.partial(_per_head_body, self))(source, self.start)

    def _numbers(self, dtype):
        return plgpu.ShapeDtypeStruct((self.size,), dtype, self.layout)

    def _place(self):
        """Returns the (query, head) of every row, int32[size] each, for the interpreter."""
        row = lax.min(self.start + jnp.arange(self.size, dtype=jnp.int32), self.total - 1)
        return lax.div(row, jnp.int32(self.group)), lax.rem(row, jnp.int32(self.group))

    def visit(self, copy):
        """Calls copy(i, (query, head)) for every row i that exists."""
        for i in range(self.most):
            row = self.start + i
            place = lax.div(row, jnp.int32(self.group)), lax.rem(row, jnp.int32(self.group))
            pl.when(row < self.total)(functools.partial(copy, i, place))


def _set(ref, index, value):
    ref[index] = value


def own_thread():
    """Returns the i32 index of the thread in its warpgroup, unknown to the compiler.

    Otherwise the compiler keeps what `load` and `store` make of it alive through the loop between
    them: 130 registers, where two CTAs have room with 128.
    """
    return opaque(arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP)))


class TilePieces:
    """Pieces of 16 bytes of a tile in shared memory whose row 0 is row `first` of an array."""

    def __init__(self, tile, array, first) -> None:
        self.tile, self.array, self.first = tile, array, splat(first)
        self.element = tile.type.element_type
        self.width = PIECE_BYTES * 8 // self.element.width  # elements of a piece
        outer, self.across, inner, self.columns = tile.type.shape
        self.tile_rows = outer * inner
        self.row_pieces = self.across * self.columns // self.width
        self.type = ir.VectorType.get((self.width,), self.element)
        self.thread = own_thread()

    def in_tile(self, row, piece):
        """Returns the indices of a piece in the tile; the swizzle permutes the pieces of a row."""
        index, constant = ir.IndexType.get(), i32_constant
        in_row = self.columns // self.width  # pieces that the swizzle permutes: 2, 4 or 8
        inner, outer = arith.remui(row, constant(8)), arith.divui(row, constant(8))
        turned = arith.xori(
            arith.remui(piece, constant(in_row)), arith.divui(inner, constant(8 // in_row))
        )
        column = arith.muli(turned, constant(self.width))
        indices = outer, arith.divui(piece, constant(in_row)), inner, column
        return [arith.index_cast(index, x) for x in indices]


class Pieces(TilePieces):
    """Pieces of a tile of packed rows, and which of them this thread moves."""

    def __init__(self, rows: PackedGqa, tile, array, first) -> None:
        super().__init__(tile, array, first)
        self.rows = rows

    def places(self, rows: int):
        """Yields (first row of the turn, row, piece) of each turn, in which a thread moves one."""
        for start in range(0, rows * self.row_pieces, WARPGROUP):
            number = arith.addi(self.thread, i32_constant(start))
            row_pieces = i32_constant(self.row_pieces)
            yield (
                start // self.row_pieces,
                arith.divui(number, row_pieces),
                arith.remui(number, row_pieces),
            )

    def exists(self, row, piece):
        """Returns an i1: true if the array in device memory has this piece."""
        less = arith.CmpIPredicate.ult
        own = min(self.array.type.shape[-1] // self.width, self.row_pieces)
        some_row = arith.cmpi(less, arith.addi(self.first, row), i32_constant(self.rows.total))
        return arith.andi(some_row, arith.cmpi(less, piece, i32_constant(own)))

    def loaded(self):
        """Yields (row, piece, elements of the array or zeros) for all pieces of the tile."""
        element = self.array.type.element_type
        kind, zero = ir.VectorType.get((self.width,), element), ir.FloatAttr.get(element, 0.0)
        zeros = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, zero))
        for start, row, piece in self.places(self.tile_rows):
            elements = zeros
            if start < self.rows.most:
                branch = scf.IfOp(self.exists(row, piece), [kind], has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    pointer = self.in_array(row, piece)
                    scf.yield_([llvm.load(kind, pointer, alignment=PIECE_BYTES)])
                otherwise: Any = branch.else_block  # there is one; the type says perhaps
                with ir.InsertionPoint(otherwise):
                    scf.yield_([zeros])
                elements = branch.results[0]
            yield row, piece, elements

    def where_tile_has(self, row, store):
        """Emits `store` for the threads whose row is one of the tile."""
        if self.tile_rows * self.row_pieces % WARPGROUP == 0:
            store()
            return
        less, last = arith.CmpIPredicate.ult, i32_constant(self.tile_rows)
        with ir.InsertionPoint(scf.IfOp(arith.cmpi(less, row, last)).then_block):
            store()
            scf.yield_([])

    def in_array(self, row, piece):
        """Returns a pointer to the piece in device memory."""
        (query_stride, head_stride, _), _ = self.array.type.get_strides_and_offset()
        row = arith.addi(self.first, row)
        group = i32_constant(self.rows.group)
        terms = (
            (arith.divui(row, group), query_stride),
            (arith.remui(row, group), head_stride),
            (piece, self.width),
        )
        places = [arith.muli(x, i32_constant(stride)) for x, stride in terms]
        offset = functools.reduce(arith.addi, places)
        pointer = mgpu.utils.memref_ptr(self.array)
        return mgpu.utils.getelementptr(pointer, [offset], self.element)


def _load_body(rows: PackedGqa, _, source, tile, first):
    pieces = Pieces(rows, tile, source, first)
    for row, piece, elements in pieces.loaded():
        put = functools.partial(vector.store, elements, tile, pieces.in_tile(row, piece))
        pieces.where_tile_has(row, put)


def _copy_body(rows: PackedGqa, _, source, tile, first):
    """Does what `_load_body` does by cp.async, which writes zeros where it is to read nothing."""
    pieces, void = Pieces(rows, tile, source, first), ir.Type.parse("!llvm.void")
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(tile))
    strides, _ = tile.type.get_strides_and_offset()
    for start, row, piece in pieces.places(pieces.tile_rows):
        size = i32_constant(0)
        if start < rows.most:
            size = arith.select(pieces.exists(row, piece), i32_constant(PIECE_BYTES), size)
        places = zip(pieces.in_tile(row, piece), strides, strict=True)
        terms = [arith.muli(arith.index_cast(i32, x), i32_constant(2 * s)) for x, s in places]
        to = functools.reduce(arith.addi, terms, base)
        operands = to, llvm.ptrtoint(i64, pieces.in_array(row, piece)), size
        code = f"cp.async.cg.shared.global [$0], [$1], {PIECE_BYTES}, $2;"
        copy = functools.partial(
            llvm.inline_asm, void, operands, code, "r,l,r", has_side_effects=True
        )
        pieces.where_tile_has(row, copy)
    llvm.inline_asm(void, [], "cp.async.wait_all;", "", has_side_effects=True)


def _store_body(rows: PackedGqa, _, tile, target, first):
    pieces = Pieces(rows, tile, target, first)
    for _, row, piece in pieces.places(rows.most):
        branch = scf.IfOp(pieces.exists(row, piece))
        with ir.InsertionPoint(branch.then_block):
            elements = vector.load(pieces.type, tile, pieces.in_tile(row, piece))
            llvm.store(elements, pieces.in_array(row, piece), alignment=PIECE_BYTES)
            scf.yield_([])


def _store_values_body(rows: PackedGqa, _, values, target, first):
    index, group = ir.IndexType.get(), i32_constant(rows.group)
    thread = own_thread()
    row = arith.addi(splat(first), thread)
    less = arith.CmpIPredicate.ult
    inside = arith.cmpi(less, thread, i32_constant(rows.most))
    exists = arith.andi(inside, arith.cmpi(less, row, i32_constant(rows.total)))
    branch = scf.IfOp(exists)
    with ir.InsertionPoint(branch.then_block):
        number = memref.load(values, [arith.index_cast(index, thread)])
        place = arith.remui(row, group), arith.divui(row, group)
        memref.store(number, target, [arith.index_cast(index, x) for x in place])
        scf.yield_([])


def _each_row(rows: PackedGqa, first, dtype, value):
    """Returns (registers of value(row) for all rows of a tile, their layout)."""
    layout, shape = rows.layout.to_mgpu(), (rows.size,)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    i32, last = ir.IntegerType.get_signless(32), i32_constant(rows.total - 1)
    for index, (row,) in zip(np.ndindex(*registers.shape), layout.thread_idxs(shape), strict=True):
        row = arith.addi(splat(first), arith.index_cast(i32, row))
        row_numbers = [arith.addi(row, i32_constant(e)) for e in range(layout.vector_length)]
        values = [value(arith.minui(x, last)) for x in row_numbers]
        registers[index] = vector.from_elements(
            ir.VectorType.get((len(row_numbers),), dtype), values
        )
    return registers, layout


def _query_body(rows: PackedGqa, _, first):
    query = lambda row: arith.divui(row, i32_constant(rows.group))
    i32 = ir.IntegerType.get_signless(32)
    return fragmented(*_each_row(rows, first, i32, query), is_signed=True)


def _per_query_body(rows: PackedGqa, _, source, first):
    def value(row):
        query = arith.divui(row, i32_constant(rows.group))
        return memref.load(source, [arith.index_cast(ir.IndexType.get(), query)])

    i32 = ir.IntegerType.get_signless(32)
    return fragmented(*_each_row(rows, first, i32, value), is_signed=True)


def _per_head_body(rows: PackedGqa, _, source, first):
    def value(row):
        head = arith.remui(row, i32_constant(rows.group))
        return memref.load(source, [arith.index_cast(ir.IndexType.get(), head)])

    return fragmented(*_each_row(rows, first, ir.F32Type.get(), value))
