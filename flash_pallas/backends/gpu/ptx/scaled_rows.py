"""Queries as float16 rows, scaled, for matmuls with a cache in eight bits.

Each row is multiplied by a power of two that brings its largest element between 2**13 and 2**14: no
bfloat16 overflows then, and only what is 2**-28 of the largest and less loses digits. Columns are
in the order of eight_bit_tiles.key_rows.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, scf, vector

from ..launch import tile_transforms
from .eight_bit_tiles import pointer
from .inline import at, i32_constant
from .pack_gqa import PackedGqa, Pieces

LARGEST_BITS = 13  # floor(log2) of a row's largest number
BIAS = 127  # of float32's exponents


def load_scaled(rows: PackedGqa, source, tile, inverse, swizzle: int):
    """Copies scaled rows into a tile, which matmuls see after `commit_smem`.

    Args:
        rows: which rows.
        source: [queries, group, columns] in device memory, a row a multiple of 16 bytes.
        tile: float16 [rows, 64, 128 or 256] in shared memory; 0 where source has nothing.
        inverse: f32[rows] in shared memory: 1 / the power of two.
        swizzle: swizzle of the tile, in bytes.
    """
    if rows.interpret:
        tile[...] = jnp.zeros(tile.shape, tile.dtype)
        inverse[...] = jnp.ones(inverse.shape, inverse.dtype)
        rows.visit(functools.partial(_copy, source, tile, inverse))
        return
    refs = plgpu.RefType(), plgpu.RefType(tile_transforms(swizzle, tile.dtype)), plgpu.RefType()
    run = plgpu.inline_mgpu(arg_types=(*refs, plgpu.Layout.WG_SPLAT))
    run(functools.partial(_load_body, rows))(source, tile, inverse, rows.start)


def _copy(source, tile, inverse, i: int, place):
    row = source[place].astype(jnp.float32)
    most = jnp.max(jnp.abs(row))
    bits = jnp.floor(jnp.log2(jnp.where(most > 0.0, most, 1.0)))
    power = jnp.exp2(jnp.minimum(LARGEST_BITS - bits, BIAS - 1.0))
    tile[i, pl.ds(0, row.shape[0])] = (row * power).astype(tile.dtype)
    inverse[i] = 1.0 / power


def _load_body(rows: PackedGqa, _, source, tile, inverse, first):
    pieces = Pieces(rows, tile, source, first)
    for row, piece, elements in pieces.loaded():
        scaled, back = _scaled(pieces, elements)
        store = functools.partial(_store, pieces, scaled, back, inverse, row, piece)
        pieces.where_tile_has(row, store)


def _scaled(pieces: Pieces, elements):
    """Returns (a piece in float16 times the power of its row, 1 / the power).

    The pieces of a row lie in neighbouring lanes, 8, 16 or 32 of them.
    """
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    wide = arith.extf(ir.VectorType.get((pieces.width,), f32), elements)
    most = functools.reduce(arith.maximumf, [math.absf(at(wide, e)) for e in range(pieces.width)])
    distance = 1
    while distance < pieces.row_pieces:
        most = arith.maximumf(most, mgpu.utils.shfl_bfly(most, distance))
        distance *= 2
    as_float = lambda exponent: arith.bitcast(f32, arith.shli(exponent, i32_constant(23)))
    exponent = arith.shrui(arith.bitcast(i32, most), i32_constant(23))
    # A row of zeros, or nearly, gets the largest power whose inverse is a normal number.
    wanted = arith.subi(i32_constant(LARGEST_BITS + 2 * BIAS), exponent)
    power = arith.minui(wanted, i32_constant(2 * BIAS - 1))
    back = as_float(arith.subi(i32_constant(2 * BIAS), power))
    scaled = arith.mulf(wide, vector.broadcast(wide.type, as_float(power)))
    return arith.truncf(ir.VectorType.get((pieces.width,), pieces.element), scaled), back


def _store(pieces: Pieces, scaled, back, inverse, row, piece):
    """Stores a piece in pairs: the o-th pair of quarter t of the columns goes to column 8 o + 2 t.

    The first piece of a row also stores `back` as the row's inverse.
    """
    quarter = pieces.across * pieces.columns // 4
    first = arith.muli(piece, i32_constant(pieces.width))
    which, order = (f(first, i32_constant(quarter)) for f in (arith.divui, arith.remui))
    column = arith.addi(arith.muli(order, i32_constant(4)), arith.muli(which, i32_constant(2)))
    pair_type = ir.VectorType.get((2,), pieces.element)
    for i in range(0, pieces.width, 2):
        pair = vector.extract_strided_slice(pair_type, scaled, [i], [2], [1])
        place = pointer(pieces.tile, row, arith.addi(column, i32_constant(4 * i)))
        llvm.store(pair, place, alignment=4)
    first_piece = arith.cmpi(arith.CmpIPredicate.eq, piece, i32_constant(0))
    with ir.InsertionPoint(scf.IfOp(first_piece).then_block):
        memref.store(back, inverse, [arith.index_cast(ir.IndexType.get(), row)])
        scf.yield_([])
