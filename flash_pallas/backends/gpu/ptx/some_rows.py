"""Results of a tile that holds rows of other sequences too: only its own are written.

A TMA copy moves a multiple of 8 rows. Here a warpgroup moves them in pieces of 16 bytes; a sequence
has at most two such tiles for each head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from ..launch import WARPGROUP_ROWS, tile_transforms
from .inline import PIECE_BYTES, WARPGROUP, i32_constant, opaque, splat
from .pack_gqa import TilePieces, own_thread


@dataclasses.dataclass(frozen=True)
class Some:
    """Rows [low, high) of a warpgroup's 64.

    Attributes:
        first: int32, where row 0 lies in device memory.
        low, high: int32, in any order and range.
        interpret: run by the interpreter.
    """

    first: Any
    low: Any
    high: Any
    interpret: bool

    def store(self, tile, target, swizzle: int):
        """Copies the rows of a tile, which were committed.

        Args:
            tile: [64, columns] in shared memory.
            target: [rows, columns] in device memory.
            swizzle: swizzle of the tile, in bytes.
        """
        if self.interpret:
            self._copy_rows(tile, target)
            return
        refs = plgpu.RefType(tile_transforms(swizzle, tile.dtype)), plgpu.RefType()
        plgpu.inline_mgpu(arg_types=(*refs, *_SPLATS))(_store_body)(tile, target, *self._bounds)

    def store_values(self, values, target):
        """Copies one f32 per row, [64] in shared memory, to [rows] in device memory."""
        if self.interpret:
            self._copy_rows(values, target)
            return
        refs = plgpu.RefType(), plgpu.RefType()
        run = plgpu.inline_mgpu(arg_types=(*refs, *_SPLATS))(_store_values_body)
        run(values, target, *self._bounds)

    @property
    def _bounds(self):
        return tuple(jnp.int32(x) for x in (self.first, self.low, self.high))

    def _copy_rows(self, source, target):
        least, most = jnp.int32(0), jnp.int32(WARPGROUP_ROWS)

        @pl.loop(lax.max(self.low, least), lax.min(self.high, most))
        def _(i):
            target[self.first + i] = source[i]


_SPLATS = (plgpu.Layout.WG_SPLAT,) * 3


def _within(row, low, high):
    at_least, less = arith.CmpIPredicate.sge, arith.CmpIPredicate.slt
    return arith.andi(arith.cmpi(at_least, row, splat(low)), arith.cmpi(less, row, splat(high)))


class _Rows(TilePieces):
    """Pieces of a tile whose array is [rows, columns]."""

    def in_array(self, row, piece):
        """Returns a pointer to the piece in device memory."""
        i64 = ir.IntegerType.get_signless(64)
        wide = lambda x: arith.extsi(i64, x)
        (row_stride, _), _ = self.array.type.get_strides_and_offset()
        start = arith.muli(wide(arith.addi(self.first, row)), arith.constant(i64, row_stride))
        offset = arith.addi(start, wide(arith.muli(piece, i32_constant(self.width))))
        pointer = mgpu.utils.memref_ptr(self.array)
        return mgpu.utils.getelementptr(pointer, [offset], self.element)


def _store_body(_, tile, target, first, low, high):
    pieces = _Rows(tile, target, first)
    row_pieces = i32_constant(pieces.row_pieces)
    end = i32_constant(WARPGROUP_ROWS * pieces.row_pieces)
    # A loop, as the state of the next tile takes most registers here.
    loop = scf.ForOp(pieces.thread, end, i32_constant(WARPGROUP))
    with ir.InsertionPoint(loop.body):
        number = opaque(loop.induction_variable)
        row, piece = arith.divui(number, row_pieces), arith.remui(number, row_pieces)
        branch = scf.IfOp(_within(row, low, high))
        with ir.InsertionPoint(branch.then_block):
            elements = vector.load(pieces.type, tile, pieces.in_tile(row, piece))
            llvm.store(elements, pieces.in_array(row, piece), alignment=PIECE_BYTES)
            scf.yield_([])
        scf.yield_([])


def _store_values_body(_, values, target, first, low, high):
    index = ir.IndexType.get()
    thread = own_thread()
    exists = arith.cmpi(arith.CmpIPredicate.slt, thread, i32_constant(WARPGROUP_ROWS))
    branch = scf.IfOp(arith.andi(exists, _within(thread, low, high)))
    with ir.InsertionPoint(branch.then_block):
        number = memref.load(values, [arith.index_cast(index, thread)])
        place = arith.addi(splat(first), thread)
        memref.store(number, target, [arith.index_cast(index, place)])
        scf.yield_([])
