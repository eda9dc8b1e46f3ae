"""The epilogue of a Q tile in the forward kernel.

The per-row results (log-sum-exp, shift, largest logit) and O go to shared memory and from there to
device memory. Where rows keep their shift in shared memory, all but O is staged under the last
products of the tile: between those and the store of O, a persistent CTA does the softmax of its
next tile, which has a shift of its own.
"""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import inline
from ..mosaic.launch import WARPGROUP_ROWS
from .forward_plan import Cta, Rows, Work
from .forward_scores import Finished, Scores, per_row
from .memory import rows_of

VECTORS = ("lse", "shift", "most")  # the results of one value a row


def begin(scores: Scores, cta: Cta, work: Work, rows: Rows) -> Finished:
    """Finishes the rows, and waits until the previous tile's results have left shared memory."""
    found = scores.finish(cta, work, rows)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return found


def stage_rows(cta: Cta, found: Finished):
    """Writes the per-row results, those of one value a row, to shared memory."""
    wg = lax.optimization_barrier(cta.wg)  # as in `store`
    for name in VECTORS:
        buffer = getattr(cta.smem, name)
        if buffer is not None:  # the zeros of Part.NEAR have no layout
            buffer[wg] = plgpu.layout_cast(getattr(found, name), inline.ROWS)


def store(scores: Scores, cta: Cta, work: Work, o, found: Finished, *, staged: bool):
    """Divides O by the row sums and issues the copies of all results.

    `staged`: `stage_rows` has already run for this tile.
    """
    batch, head, block = work.at
    # Not to be hoisted: addresses made from it would be held over the loops, in local memory.
    wg = lax.optimization_barrier(cta.wg)
    smem, out = cta.smem, cta.out
    staging = smem.q if smem.o is None else smem.o
    scores.plan.products.store(staging.at[wg], o * per_row(found.inverse, o.shape))
    if not staged:
        stage_rows(cta, found)
    plgpu.commit_smem()
    rows_at = pl.ds(block * scores.plan.tile_rows + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
    o_at = rows_of(out.o, (batch, rows_at, head), staging)
    plgpu.copy_smem_to_gmem(staging.at[wg], o_at)
    for name in VECTORS:
        buffer, target = getattr(smem, name), getattr(out, name)
        if buffer is not None:
            plgpu.copy_smem_to_gmem(buffer.at[wg], target.at[batch, head, rows_at])
