"""Tiles in shared memory that the CTAs of a cluster add up, each a part of the rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ..launch import tile_transforms
from . import cluster
from .inline import WARPGROUP, at, i32_constant, splat

PIECE = 8  # bytes that a thread reads at once; adding them up, two threads fill a sector of L2
UNIT = 16  # bytes that a swizzle moves together


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchange of tiles between one warpgroup of every CTA of a cluster, and their sum.

    Attributes:
        size: number of CTAs in the cluster, a power of two.
        swizzle: swizzle of a tile in shared memory, in bytes.
        rank: rank of this CTA.
    """

    size: int
    swizzle: int
    rank: Any

    def __call__(self, tile, received, arrived, parity):
        """Sends the others their parts, and waits for this CTA's part from each of them.

        Args:
            tile: [rows, columns] of 16 bits in shared memory.
            received: [rows - rows / size, columns]: the parts from the CTAs of rank r + 1, r + 2,
                ... (modulo the size), which lie as they do in their tiles.
            arrived: mbarrier from `cluster.init_barrier`.
            parity: parity of the number of exchanges before this one.
        """
        tiled, scalar = self.tiled(tile.dtype), plgpu.Layout.WG_SPLAT
        run = plgpu.inline_mgpu(arg_types=(tiled, tiled, plgpu.RefType(), scalar, scalar))
        run(functools.partial(_exchange_body, self.size))(
            tile, received, arrived, self.rank, parity
        )

    def add(self, tile, received, target):
        """Adds the sum of all parts to its rows of f32[rows, columns] in device memory."""
        tiled, scalar = self.tiled(tile.dtype), plgpu.Layout.WG_SPLAT
        run = plgpu.inline_mgpu(arg_types=(tiled, tiled, plgpu.RefType(), scalar))
        run(functools.partial(_add_body, self.size, self.swizzle))(
            tile, received, target, self.rank
        )

    def tiled(self, dtype):
        """Describes how tiles lie in shared memory."""
        return plgpu.RefType(tile_transforms(self.swizzle, dtype))


def _part(tile, size: int) -> int:
    """Returns how many bytes of a tile of 16-bit elements a CTA adds up."""
    return math.prod(tile.type.shape) * 2 // size


def _exchange_body(size: int, _, tile, received, barrier, rank, parity):
    """Sends the i-th CTA its part from thread i; waits for the parts that this CTA gets.

    CTA r keeps the part from CTA i at place (i - r - 1) modulo the number of CTAs.
    """
    part, thread, rank = _part(tile, size), cluster.thread(), splat(rank)
    part_address = lambda ref, i: arith.addi(
        cluster.address(ref), arith.muli(i, i32_constant(part))
    )
    place = arith.addi(arith.subi(rank, thread), i32_constant(size - 1))
    place = arith.andi(place, i32_constant(size - 1))
    cluster.emit(
        "{ .reg .pred others, own; .reg .b32 to, full;"
        f" setp.eq.s32 own, $0, $1; setp.lt.s32 others, $0, {size}; @own setp.ne.s32 others, 0, 0;"
        f" @own mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], {(size - 1) * part};"
        " mapa.shared::cluster.u32 to, $3, $0; mapa.shared::cluster.u32 full, $4, $0;"
        " @others cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        f" [to], [$2], {part}, [full]; }}",
        thread,
        rank,
        part_address(tile, thread),
        part_address(received, place),
        cluster.address(barrier),
    )
    cluster.emit_wait(barrier, parity)


def _add_body(size: int, swizzle: int, _, tile, received, target, rank):
    """Adds a CTA's rows of a tile, summed over the cluster, to the array in device memory."""
    i64 = ir.IntegerType.get_signless(64)
    part, row_length = _part(tile, size), tile.type.shape[1]
    within = arith.muli(cluster.thread(), i32_constant(PIECE))
    own = arith.addi(arith.muli(splat(rank), i32_constant(part)), within)
    mine = arith.addi(cluster.address(tile), own)
    theirs = arith.addi(cluster.address(received), within)
    stride = ir.MemRefType(target.type).get_strides_and_offset()[0][0]
    row, column = _coordinates(own, swizzle, row_length)
    offset = arith.addi(arith.muli(row, i32_constant(stride)), column)
    out = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(target))
    out = arith.addi(out, arith.extui(i64, arith.muli(offset, i32_constant(4))))
    at_once = WARPGROUP * PIECE
    for i, start in enumerate(range(0, part, at_once)):
        loaded = [_load_word(theirs, sender * part + start) for sender in range(size - 1)]
        total = _sum([_load_word(mine, start), *loaded], tile.type.element_type)
        # Eight rows of dS^T take one or two rounds, each as many columns.
        down, right = divmod(i, 8 * row_length * swizzle // at_once)
        _add(out, 8 * down * stride + right * at_once // 16, total)


def _load_word(address, offset: int):
    """Loads two 32-bit registers from shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    words = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 2),
        [address],
        f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {offset}];",
        "=r,=r,r",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, words, [i]) for i in range(2)]


def _sum(loaded, element):
    """Sums pairs of registers, each register with two 16-bit elements; returns four f32.

    `loaded` has one pair from each CTA.
    """
    f32, halves = ir.VectorType.get((2,), ir.F32Type.get()), ir.VectorType.get((2,), element)
    widened = [[arith.extf(f32, llvm.bitcast(halves, x)) for x in part] for part in loaded]
    total = [functools.reduce(arith.addf, parts) for parts in zip(*widened, strict=True)]
    return [at(x, e) for x in total for e in range(2)]


def _coordinates(offset, swizzle: int, row_length: int):
    """Returns (row, column) of the element at a byte of a tile: pieces of 8 rows by a swizzle."""
    and_ = lambda x, mask: arith.andi(x, i32_constant(mask))
    shifted = lambda x, bits: arith.shrui(x, i32_constant(bits))
    times = lambda x, factor: arith.muli(x, i32_constant(factor))
    # Of each 16 bytes the number within a row is xored with bits 7 and up.
    mask = swizzle - UNIT
    logical = arith.xori(offset, and_(arith.shrui(offset, i32_constant(3)), mask))
    inside, piece = and_(logical, 8 * swizzle - 1), shifted(logical, (8 * swizzle).bit_length() - 1)
    row = shifted(inside, swizzle.bit_length() - 1)
    column = shifted(and_(inside, swizzle - 1), 1)
    if row_length == 1:
        return arith.addi(times(piece, 8), row), column
    down, right = (f(piece, i32_constant(row_length)) for f in (arith.divui, arith.remui))
    return (
        arith.addi(times(down, 8), row),
        arith.addi(times(right, swizzle // 2), column),
    )


def _add(address, offset: int, values):
    """Adds four f32 to device memory, `offset` elements after an address."""
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [address, *values],
        f"red.relaxed.gpu.global.add.v4.f32 [$0 + {4 * offset}], {{$1, $2, $3, $4}};",
        "l,f,f,f,f",
        has_side_effects=True,
    )
