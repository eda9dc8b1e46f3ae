"""The end of a query tile in the forward kernel.

What is kept of each row goes to shared memory before the last products of the tile, and O after
them. Between the two a persistent CTA takes the softmax of its next tile, when registers are rare.
"""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import inline
from ..mosaic.launch import WARPGROUP_ROWS
from .forward_plan import Cta, Rows, Work
from .forward_scores import Scores, per_row
from .memory import rows_of

VECTORS = ("lse", "shift", "most")  # the results of one value a row


def store_rows(scores: Scores, cta: Cta, work: Work, rows: Rows):
    """Writes the results of one value a row; returns what O is to be multiplied by."""
    found = scores.finish(cta, work, rows)
    wg = lax.optimization_barrier(cta.wg)  # as in `store`
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for name in VECTORS:
        buffer, values = getattr(cta.smem, name), getattr(found, name)
        if buffer is not None:  # the zeros of Part.NEAR have no layout
            buffer[wg] = plgpu.layout_cast(values, inline.ROWS)
    return found.inverse


def store(scores: Scores, cta: Cta, work: Work, o, inverse):
    """Divides O by the row sums and sends it off with what `store_rows` has written."""
    batch, head, block = work.at
    # Not to be hoisted: addresses made from it would be held over the loops, in local memory.
    wg = lax.optimization_barrier(cta.wg)
    smem, out = cta.smem, cta.out
    staging = smem.q if smem.o is None else smem.o
    scores.plan.products.store(staging.at[wg], o * per_row(inverse, o.shape))
    plgpu.commit_smem()
    rows_at = pl.ds(block * scores.plan.tile_rows + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
    o_at = rows_of(out.o, (batch, rows_at, head), staging)
    plgpu.copy_smem_to_gmem(staging.at[wg], o_at)
    for name in VECTORS:
        buffer, target = getattr(smem, name), getattr(out, name)
        if buffer is not None:
            plgpu.copy_smem_to_gmem(buffer.at[wg], target.at[batch, head, rows_at])
