"""Copies of tiles in shared memory to the same place of another CTA of the cluster."""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu

from ..launch import WARPGROUP_ROWS, tile_transforms
from . import cluster
from .inline import splat

TILE = WARPGROUP_ROWS, WARPGROUP_ROWS
TILE_BYTES = 2 * WARPGROUP_ROWS**2


def send(tile, barrier, other_rank, swizzle: int):
    """Starts the copy of a tile to the same place of the other CTA, where its bytes are counted.

    Args:
        tile: [64, 64] of 16 bits in shared memory.
        barrier: an mbarrier in shared memory; that of the other CTA counts.
        other_rank: rank of the other CTA, int32.
        swizzle: swizzle of the tile, in bytes.
    """
    refs = plgpu.RefType(tile_transforms(swizzle, tile.dtype)), plgpu.RefType()
    run = plgpu.inline_mgpu(arg_types=(*refs, plgpu.Layout.WG_SPLAT))
    run(_send_body)(tile, barrier, other_rank)


def _send_body(_, tile, barrier, other_rank):
    cluster.emit(
        "{ .reg .pred first; .reg .b32 to, full; setp.eq.s32 first, $2, 0;"
        " mapa.shared::cluster.u32 to, $0, $3; mapa.shared::cluster.u32 full, $1, $3;"
        " @first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        f" [to], [$0], {TILE_BYTES}, [full]; }}",
        cluster.address(tile),
        cluster.address(barrier),
        cluster.thread(),
        splat(other_rank),
    )
