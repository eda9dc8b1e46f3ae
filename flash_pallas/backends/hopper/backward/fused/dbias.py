"""The gradient of a bias inside the fused backward: dS summed over batch entries that share it.

The CTAs of a cluster work on the same keys and queries of as many batch entries, tile by tile. dS^T
of each lies in shared memory anyway, in 16 bits, for dQ = dS K. One more warpgroup of every CTA
owns a part of the keys. It sends the other CTAs their parts, receives its own from them, adds them
up in float32, and adds that to the sum in device memory, a float32 array as large as the bias.

    ds          the slots of the kernel; a slot may be written again once all CTAs of the
                cluster have added up what they got from it (sums_ring)
    received    one slot; others may write to it once all have added up the tile before

Compared with computing S and dP once more (backward/dbias), this saves two of seven matmuls
and half of the exponentials. The order of the last additions differs from run to run.

The interpreter cannot reach the shared memory of a neighbour. Under it every CTA adds the whole
tile of its own batch entry, with the same barriers, so that races are still found.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Problem
from ....gpu.ptx import cluster
from ....gpu.ptx.cluster_sums import Exchange
from ...common import pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs
from .launches import FusedCta, PairCta


def gradient_of_bias(problem: Problem, sums):
    """Returns the gradient of a bias in its shape and dtype.

    `sums`: f32[Bb, Nb, S, T], up to whole tiles.
    """
    unpadded = sums[:, :, : problem.kv_len, : problem.q_len]
    return unpadded.swapaxes(2, 3).astype(problem.bias_dtype)


def sum_dbias(cta: FusedCta):
    """Runs the warpgroup that sums the gradient of a bias over a cluster, for all KV tiles."""
    plgpu.set_max_registers(cta.blocks.summing_registers, action="decrease")
    if not cta.interpret:
        cluster.init_barrier(cta.smem.arrived)
    pipeline.cluster_arrive(cta.smem.receives, cta.interpret)
    plgpu.barrier_wait(cta.smem.receives)
    if isinstance(cta, PairCta):
        cta.visit(_sum_kv_tile)
    else:
        _sum_kv_tile(cta)


def _sum_kv_tile(cta: FusedCta):
    """Adds up dS of all Q tiles of one KV tile."""

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
    problem, place, sums = cta.problem, cta.place(n), cta.results["dbias"]
    entry, head = AuxiliaryInputs(problem, q_axis=1).entry(problem.bias_shape, place)
    keys, queries = (
        pl.ds(place.row_start, place.rows),
        pl.ds(place.column_start, place.columns),
    )
    return sums.at[entry, head, keys, queries]
