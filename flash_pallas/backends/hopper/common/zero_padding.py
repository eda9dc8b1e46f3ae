"""Loads of tiles whose padding may hold NaN: its rows are overwritten with 0 in shared memory.

Only tiles that hold padding pay: the loading threads wait for the copy, write zeros and then arrive
themselves. A copy of the whole array with padding cleared would be as large as the array (20 % of
the forward at T = 32k with packed documents).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, scf, vector

from ....core.padding import pad_axis
from ...gpu.auxiliary_arrays import within_reach
from ...gpu.registers import i32_constant, splat
from .pipeline import tile_transforms

PIECE_BYTES = 16  # of one store
WARP, WARPGROUP = 32, 128  # threads


class Padding(NamedTuple):
    """Padding of one axis, in device memory."""

    valid: Any  # int32[B, length, and further ones]: 0 for padding
    tiles: Any  # int32[B, tiles]: 1 for those that hold padding

    @classmethod
    def of(cls, valid, tile: int) -> Padding | None:
        """Makes the record from bool[B, length], for tiles of `tile` rows.

        Returns None where `valid` is None.
        """
        if valid is None:
            return None
        whole = pad_axis(valid, 1, -(-valid.shape[1] // tile) * tile, True)
        holes = ~jnp.all(whole.reshape(len(valid), -1, tile), axis=-1)
        # Beyond the end TMA delivers zeros.
        length = within_reach(valid.shape[1])
        return cls(pad_axis(valid, 1, length, True).astype(jnp.int32), holes.astype(jnp.int32))


class Loader(NamedTuple):
    """Loader of the tiles of one array, which clears the padding in them.

    Attributes:
        padding: padding of the array's rows; None for plain copies.
        arrived: mbarrier of one arrival that nobody else uses; None without padding.
        swizzle: swizzle of the tile in shared memory, in bytes.
        interpret: run under the interpreter.
        threads: number of threads that load together, WARP or WARPGROUP.
    """

    padding: Padding | None
    arrived: Any
    swizzle: int
    interpret: bool
    threads: int = WARPGROUP

    def __call__(self, source, destination, full, batch, tile):
        """Starts the copy of a tile, which arrives once on `full`.

        Where rows are padding, waits for the copy, zeroes them and then arrives.

        Args:
            source: the tile in device memory.
            destination: [rows, columns] in shared memory.
            full: the barrier.
            batch: the batch entry.
            tile: number of the tile along the axis that may hold padding.
        """
        copy = lambda barrier: plgpu.copy_gmem_to_smem(source, destination, barrier)
        padding = self.padding
        if padding is None:
            copy(full)
            return
        holes = padding.tiles[batch, tile]
        pl.when(holes == 0)(lambda: copy(full))

        @pl.when(holes != 0)
        def _():
            copy(self.arrived)
            plgpu.barrier_wait(self.arrived)
            rows = destination.shape[0]
            self.clear(destination, padding.valid.at[batch, pl.ds(tile * rows, rows)])
            plgpu.barrier_arrive(full)

    def clear(self, tile, valid):
        """Zeroes the rows whose `valid` is 0; wgmma sees the zeros after an arrival."""
        if self.interpret:
            keep = valid[...][:, None] != 0
            tile[...] = jnp.where(keep, tile[...], jnp.zeros(tile.shape, tile.dtype))
            plgpu.commit_smem()
            return
        transforms = tile_transforms(self.swizzle, tile.dtype)
        run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType()))
        run(functools.partial(_clear_body, self.threads))(tile, valid)


def clear_from(tile, first, swizzle: int, interpret: bool, threads: int = WARPGROUP):
    """Zeroes the rows of a tile from `first` on; wgmma sees the zeros after an arrival.

    Args:
        tile: [rows, columns] in shared memory, with this swizzle in bytes.
        first: int32, at least 0.
        swizzle: swizzle of the tile, in bytes.
        interpret: run under the interpreter.
        threads: number of threads that clear together.
    """
    if interpret:
        keep = lax.broadcasted_iota(jnp.int32, tile.shape, 0) < first
        tile[...] = jnp.where(keep, tile[...], jnp.zeros(tile.shape, tile.dtype))
        plgpu.commit_smem()
        return
    refs = plgpu.RefType(tile_transforms(swizzle, tile.dtype))
    run = plgpu.inline_mgpu(arg_types=(refs, plgpu.Layout.WG_SPLAT))
    run(functools.partial(_clear_from_body, threads))(tile, jnp.int32(first))


def _clear_body(threads: int, _, tile, valid):
    i32 = ir.IntegerType.get_signless(32)
    equal = arith.CmpIPredicate.eq
    is_padding = lambda row: arith.cmpi(equal, memref.load(valid, [row]), arith.constant(i32, 0))
    _clear_rows(threads, tile, is_padding)


def _clear_from_body(threads: int, _, tile, first):
    i32, bound = ir.IntegerType.get_signless(32), splat(first)
    after = arith.CmpIPredicate.sge
    _clear_rows(threads, tile, lambda row: arith.cmpi(after, arith.index_cast(i32, row), bound))


def _clear_rows(threads: int, tile, is_padding: Callable):
    """Zeroes padding, whole rows in each thread: a swizzle only permutes pieces within a row."""
    index = ir.IndexType.get()
    at = lambda x: arith.constant(index, x)
    row_pieces, column_pieces, _, columns = tile.type.shape
    element = tile.type.element_type
    piece = ir.VectorType.get((PIECE_BYTES * 8 // element.width,), element)
    zeros = arith.constant(
        piece, ir.DenseElementsAttr.get_splat(piece, ir.FloatAttr.get(element, 0.0))
    )
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(threads))
    loop = scf.ForOp(arith.index_cast(index, thread), at(8 * row_pieces), at(threads))
    with ir.InsertionPoint(loop.body):
        row = loop.induction_variable
        branch = scf.IfOp(is_padding(row))
        with ir.InsertionPoint(branch.then_block):
            outer, inner = arith.divui(row, at(8)), arith.remui(row, at(8))
            for c in range(column_pieces):
                for x in range(0, columns, piece.shape[0]):
                    vector.store(zeros, tile, [outer, at(c), inner, at(x)])
            scf.yield_([])
        scf.yield_([])
    # Each thread orders its own stores before the copies and products of others; it then arrives.
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
