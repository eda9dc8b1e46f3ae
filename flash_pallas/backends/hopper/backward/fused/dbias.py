"""The gradient of a bias inside the fused backward: dS summed over batch entries that share it.

The CTAs of a cluster work on the same keys and queries of as many batch entries, tile by tile. dS^T
of each lies in shared memory anyway, in 16 bits, for dQ = dS K. One more warpgroup of every CTA
owns a part of the keys. It sends the other CTAs their parts, receives its own from them, adds them
up in float32, and adds that to the sum in device memory, a float32 array as large as the bias.

    ds          the slots of the kernel; a slot may be written again once all CTAs of the
                cluster have added up what they got from it (summed_empty)
    received    one slot; others may write to it once all have added up the tile before

Compared with computing S and dP once more (backward/dbias), this saves two of seven matmuls
and half of the exponentials. The order of the last additions differs from run to run.

The interpreter cannot reach the shared memory of a neighbour. Under it every CTA adds the whole
tile of its own batch entry, with the same barriers, so that races are still found.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .....core.problem import Problem
from ....gpu.launch import tile_transforms
from ....gpu.ptx.inline import WARPGROUP, at, i32_constant, splat
from ...common import cluster, pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs
from .launches import FusedCta


def gradient_of_bias(problem: Problem, sums, first_key: int = 0):
    """Returns the gradient of a bias, or of some of its heads and keys.

    It has the shape of the bias (or of that part) and its dtype. `sums`: f32[Bb, Nb, S, T], up to
    whole tiles, of the keys from `first_key` on.
    """
    whole = sums[:, :, : problem.kv_len - first_key, : problem.q_len]
    return whole.swapaxes(2, 3).astype(problem.bias_dtype)


def sum_dbias(cta: FusedCta):
    """Runs the warpgroup that sums the gradient of a bias over a cluster, for all KV tiles."""
    plgpu.set_max_registers(cta.blocks.summing_registers, action="decrease")
    if not cta.interpret:
        init(cta.smem.arrived)
    pipeline.cluster_arrive(cta.smem.receives, cta.interpret)
    plgpu.barrier_wait(cta.smem.receives)
    cta.visit(_sum_kv_tile)


def _sum_kv_tile(cta: FusedCta, kv_index):
    """Adds up dS of all Q tiles of one KV tile."""
    cta = cta.at(kv_index)

    @pl.loop(jnp.int32(0), cta.q_tiles.total)
    def _(n):
        cta.sums.wait_full(n)
        _add_tile(cta, n)
        pipeline.cluster_release(cta.blocks.bias_cluster, cta.sums, n, cta.interpret)
        plgpu.barrier_wait(cta.sums.empty.at[cta.sums.slot(n)])


def _add_tile(cta: FusedCta, n):
    """Adds this CTA's part of dS of the n-th tile, summed over the cluster, to device memory."""
    smem, target = cta.smem, _target(cta, n)
    tile, size = smem.ds.at[cta.sums.slot(n)], cta.blocks.bias_cluster
    if cta.interpret:
        smem.received[...] = tile[...].astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.received, target, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)
        return
    exchange = Exchange(size, cta.swizzles[0], pipeline.cluster_rank(size))
    exchange(tile, smem.received, smem.arrived, lax.rem(cta.count(n), jnp.int32(2)))
    exchange.add(tile, smem.received, target)


def _target(cta: FusedCta, n):
    """Returns where in device memory the sum of the n-th tile lies."""
    problem, place, out = cta.problem, cta.place(n), cta.results["dbias"]
    entry, head = AuxiliaryInputs(problem, q_axis=1).entry(problem.bias_shape, place)
    if out.shape[1] != problem.bias_shape[1]:  # of the heads of this launch
        head = head - cta.gmem.origin[1] * problem.group
    first, skipped = place.row_start, cta.launch.first_block if cta.blocks.kv_launches > 1 else 0
    if skipped:  # of the keys of this launch
        first = first - skipped * cta.blocks.block_kv
    keys, queries = pl.ds(first, place.rows), pl.ds(place.column_start, place.columns)
    return out.at[entry, head, keys, queries]


PIECE = 8  # bytes that a thread reads at once; adding them up, two threads fill a sector of L2
UNIT = 16  # bytes that a swizzle moves together


def init(arrived):
    """Initializes the mbarrier of an `Exchange`, of one arrival, in 8 bytes of shared memory."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(cluster.init_body)(arrived)


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
            arrived: mbarrier from `init`.
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
    at = lambda ref, i: arith.addi(cluster.address(ref), arith.muli(i, i32_constant(part)))
    place = arith.addi(arith.subi(rank, thread), i32_constant(size - 1))
    place = arith.andi(place, i32_constant(size - 1))
    cluster.run(
        "{ .reg .pred others, own; .reg .b32 to, full;"
        f" setp.eq.s32 own, $0, $1; setp.lt.s32 others, $0, {size}; @own setp.ne.s32 others, 0, 0;"
        f" @own mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], {(size - 1) * part};"
        " mapa.shared::cluster.u32 to, $3, $0; mapa.shared::cluster.u32 full, $4, $0;"
        " @others cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        f" [to], [$2], {part}, [full]; }}",
        thread,
        rank,
        at(tile, thread),
        at(received, place),
        cluster.address(barrier),
    )
    cluster.wait(barrier, parity)


def _add_body(size: int, swizzle: int, _, tile, received, target, rank):
    """Adds a CTA's rows of a tile, summed over the cluster, to the array in device memory."""
    i64 = ir.IntegerType.get_signless(64)
    part, of_row = _part(tile, size), tile.type.shape[1]
    within = arith.muli(cluster.thread(), i32_constant(PIECE))
    own = arith.addi(arith.muli(splat(rank), i32_constant(part)), within)
    mine = arith.addi(cluster.address(tile), own)
    theirs = arith.addi(cluster.address(received), within)
    stride = ir.MemRefType(target.type).get_strides_and_offset()[0][0]
    row, column = _coordinates(own, swizzle, of_row)
    offset = arith.addi(arith.muli(row, i32_constant(stride)), column)
    out = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(target))
    out = arith.addi(out, arith.extui(i64, arith.muli(offset, i32_constant(4))))
    at_once = WARPGROUP * PIECE
    for i, start in enumerate(range(0, part, at_once)):
        loaded = [_load_word(theirs, other * part + start) for other in range(size - 1)]
        total = _sum([_load_word(mine, start), *loaded], tile.type.element_type)
        # Eight rows of dS^T take one or two rounds, each as many columns.
        down, right = divmod(i, 8 * of_row * swizzle // at_once)
        _add(out, 8 * down * stride + right * at_once // 16, total)


def _load_word(address, offset: int):
    """Loads two 32-bit registers from shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    found = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 2),
        [address],
        f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {offset}];",
        "=r,=r,r",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, found, [i]) for i in range(2)]


def _sum(loaded, element):
    """Sums pairs of registers, each register with two 16-bit elements; returns four f32.

    `loaded` has one pair from each CTA.
    """
    f32, halves = ir.VectorType.get((2,), ir.F32Type.get()), ir.VectorType.get((2,), element)
    widened = [[arith.extf(f32, llvm.bitcast(halves, x)) for x in part] for part in loaded]
    total = [functools.reduce(arith.addf, parts) for parts in zip(*widened, strict=True)]
    return [at(x, e) for x in total for e in range(2)]


def _coordinates(offset, swizzle: int, of_row: int):
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
    if of_row == 1:
        return arith.addi(times(piece, 8), row), column
    down, right = (f(piece, i32_constant(of_row)) for f in (arith.divui, arith.remui))
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
