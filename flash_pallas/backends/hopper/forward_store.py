"""The end of a query tile in the forward kernel."""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import inline
from ..mosaic.launch import WARPGROUP_ROWS
from .forward_plan import Cta, Rows, Work
from .forward_scores import Scores, per_row
from .memory import rows_of


def store(scores: Scores, cta: Cta, work: Work, o, rows: Rows):
    """Divide by the row sums and write O and the log-sum-exp."""
    batch, head, block = work.at
    # Not to be hoisted: addresses made from it would be held over the loops, in local memory.
    wg = lax.optimization_barrier(cta.wg)
    found = scores.finish(cta, work, rows.maxima, rows.l.sum(axis=1))
    staging = cta.smem.q if cta.smem.o is None else cta.smem.o
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    scores.plan.products.store(staging.at[wg], o * per_row(found.inverse, o.shape))
    smem, out = cta.smem, cta.out
    vectors = [(found.lse, smem.lse, out.lse)]
    if out.shift is not None:
        shift = plgpu.layout_cast(found.shift, inline.ROWS)  # zeros of Part.NEAR have no layout
        vectors.append((shift, smem.shift, out.shift))
    if out.most is not None:
        vectors.append((found.most, smem.most, out.most))
    for values, buffer, _ in vectors:
        buffer[wg] = values
    plgpu.commit_smem()
    row = block * scores.plan.tile_rows + wg * WARPGROUP_ROWS
    rows_at = pl.ds(row, WARPGROUP_ROWS)
    o_at = rows_of(cta.out.o, (batch, rows_at, head), staging)
    plgpu.copy_smem_to_gmem(staging.at[wg], o_at)
    for _, buffer, target in vectors:
        plgpu.copy_smem_to_gmem(buffer.at[wg], target.at[batch, head, rows_at])
