"""The end of a query tile in the forward kernel."""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic.launch import WARPGROUP_ROWS
from .forward_plan import Cta, Rows, Work
from .forward_scores import Scores, per_row
from .memory import rows_of


def store(scores: Scores, cta: Cta, work: Work, o, rows: Rows):
    """Divide by the row sums and write O and the log-sum-exp."""
    batch, head, block = work.at
    # Not to be hoisted: addresses made from it would be held over the loops, in local memory.
    wg = lax.optimization_barrier(cta.wg)
    inverse, lse = scores.finish(cta, work, rows.m, rows.l.sum(axis=1))
    staging = cta.smem.q if cta.smem.o is None else cta.smem.o
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    scores.plan.products.store(staging.at[wg], o * per_row(inverse, o.shape))
    cta.smem.lse[wg] = lse
    if cta.smem.most is not None:
        cta.smem.most[wg] = rows.m
    plgpu.commit_smem()
    row = block * scores.plan.tile_rows + wg * WARPGROUP_ROWS
    rows_at = pl.ds(row, WARPGROUP_ROWS)
    o_at = rows_of(cta.out.o, (batch, rows_at, head), staging)
    plgpu.copy_smem_to_gmem(staging.at[wg], o_at)
    plgpu.copy_smem_to_gmem(cta.smem.lse.at[wg], cta.out.lse.at[batch, head, rows_at])
    if cta.smem.most is not None:
        plgpu.copy_smem_to_gmem(cta.smem.most.at[wg], cta.out.most.at[batch, head, rows_at])
