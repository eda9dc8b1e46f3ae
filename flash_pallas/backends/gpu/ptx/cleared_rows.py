"""Rows of a tile in shared memory that become zeros, which wgmma sees.

As in inline.py, each function has its plain form next to the inlined one, for the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, scf, vector

from ..launch import tile_transforms
from .inline import PIECE_BYTES, WARPGROUP, i32_constant, splat


def clear_padding(tile, valid, swizzle: int, interpret: bool, threads: int):
    """Zeroes the rows whose `valid`, int32[rows], is 0; see clear_from."""
    if interpret:
        keep = valid[...][:, None] != 0
        tile[...] = jnp.where(keep, tile[...], jnp.zeros(tile.shape, tile.dtype))
        plgpu.commit_smem()
        return
    transforms = tile_transforms(swizzle, tile.dtype)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType()))
    run(functools.partial(_clear_padding_body, threads))(tile, valid)


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


def clear_outside(tile, low, high, swizzle: int, interpret: bool):
    """Zeroes the rows of a tile before `low` and from `high` on, int32 each; see clear_from."""
    if interpret:
        row = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
        keep = (row >= low) & (row < high)
        tile[...] = jnp.where(keep, tile[...], jnp.zeros(tile.shape, tile.dtype))
        plgpu.commit_smem()
        return
    bound, refs = plgpu.Layout.WG_SPLAT, plgpu.RefType(tile_transforms(swizzle, tile.dtype))
    run = plgpu.inline_mgpu(arg_types=(refs, bound, bound))(_clear_outside_body)
    run(tile, jnp.int32(low), jnp.int32(high))


def _clear_padding_body(threads: int, _, tile, valid):
    i32 = ir.IntegerType.get_signless(32)
    equal = arith.CmpIPredicate.eq
    is_padding = lambda row: arith.cmpi(equal, memref.load(valid, [row]), arith.constant(i32, 0))
    _clear_rows(threads, tile, is_padding)


def _clear_from_body(threads: int, _, tile, first):
    i32, bound = ir.IntegerType.get_signless(32), splat(first)
    after = arith.CmpIPredicate.sge
    _clear_rows(threads, tile, lambda row: arith.cmpi(after, arith.index_cast(i32, row), bound))


def _clear_outside_body(_, tile, low, high):
    i32, (low, high) = ir.IntegerType.get_signless(32), (splat(low), splat(high))

    def is_padding(row):
        row = arith.index_cast(i32, row)
        before = arith.cmpi(arith.CmpIPredicate.slt, row, low)
        return arith.ori(before, arith.cmpi(arith.CmpIPredicate.sge, row, high))

    _clear_rows(WARPGROUP, tile, is_padding)


def _clear_rows(threads: int, tile, is_padding: Callable):
    """Zeroes padding, whole rows in each thread: a swizzle only permutes pieces within a row."""
    index = ir.IndexType.get()
    constant = lambda x: arith.constant(index, x)
    row_pieces, column_pieces, _, columns = tile.type.shape
    element = tile.type.element_type
    piece = ir.VectorType.get((PIECE_BYTES * 8 // element.width,), element)
    zeros = arith.constant(
        piece, ir.DenseElementsAttr.get_splat(piece, ir.FloatAttr.get(element, 0.0))
    )
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(threads))
    loop = scf.ForOp(arith.index_cast(index, thread), constant(8 * row_pieces), constant(threads))
    with ir.InsertionPoint(loop.body):
        row = loop.induction_variable
        branch = scf.IfOp(is_padding(row))
        with ir.InsertionPoint(branch.then_block):
            outer, inner = arith.divui(row, constant(8)), arith.remui(row, constant(8))
            for c in range(column_pieces):
                for x in range(0, columns, piece.shape[0]):
                    vector.store(zeros, tile, [outer, constant(c), inner, constant(x)])
            scf.yield_([])
        scf.yield_([])
    # Each thread orders its own stores before the copies and matmuls of others; it then arrives.
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
