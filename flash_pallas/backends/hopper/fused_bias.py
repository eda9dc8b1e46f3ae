"""The gradient of a bias inside the fused backward: dS summed over batch entries that share it.

The CTAs of a cluster work on the same keys and queries of as many batch entries, tile by tile. dS^T
of each lies in shared memory anyway, in 16 bits, for dQ = dS K. One more warpgroup of every CTA
owns a part of the keys. It sends the other CTAs their parts, receives its own from them, adds them
up in float32, and adds that to the sum in device memory, a float32 array as large as the bias.

    ds          the slots of fused_finish.py; a slot may be written again once all CTAs of the
                cluster have added up what they got from it (summed_empty)
    received    one slot; others may write to it once all have added up the tile before

Compared with computing S and dP once more (backward_scores.py), this saves two of seven products
and half of the exponentials. The order of the last additions differs from run to run.

The interpreter cannot reach the shared memory of a neighbour. Under it every CTA adds the whole
tile of its own batch entry, with the same barriers, so that races are still found.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from . import cluster, inline_exchange
from .fused_blocks import FusedBlocks
from .fused_cta import Cta
from .side_inputs import SideInputs


def gradient_of_bias(problem: Problem, sums, first_key: int = 0) -> Any:
    """Returns the gradient of a bias, or of some of its heads and keys; None without sums.

    It has the shape of the bias (or of that part) and its dtype. `sums`: f32[Bb, Nb, S, T], up to
    whole tiles, of the keys from `first_key` on.
    """
    if sums is None:
        return None
    whole = sums[:, :, : problem.kv_len - first_key, : problem.q_len]
    return whole.swapaxes(2, 3).astype(problem.bias_dtype)


@dataclasses.dataclass(frozen=True)
class BiasSums:
    """The warpgroup that sums the gradient of a bias over a cluster.

    Attributes:
        problem: the attention problem that is computed.
        blocks: tile sizes.
        swizzle: swizzle of dS in shared memory, in bytes.
        interpret: run by the interpreter.
        first_key: first of the keys that the sums in device memory cover.
    """

    problem: Problem
    blocks: FusedBlocks
    swizzle: int
    interpret: bool
    first_key: int = 0

    def __call__(self, cta: Cta):
        """Runs the summing warpgroup over all tiles of this CTA."""
        plgpu.set_max_registers(self.blocks.summing_registers, action="decrease")
        if not self.interpret:
            inline_exchange.init(cta.smem.arrived)
        cluster.arrive(cta.bars.receives, self.interpret)
        plgpu.barrier_wait(cta.bars.receives)
        cta.visit(self.add_walk)

    def add_walk(self, cta: Cta):
        """Adds up all tiles of one KV block."""

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            cta.sums.wait_full(n)
            self.add(cta, n)
            cluster.release(self.blocks.bias_cluster, cta.sums, n, self.interpret)
            plgpu.barrier_wait(cta.sums.empty.at[cta.sums.slot(n)])

    def add(self, cta: Cta, n):
        """Adds this CTA's part of the n-th tile, summed over the cluster, to device memory."""
        smem, target = cta.smem, self.target(cta, n)
        tile, size = smem.ds.at[cta.sums.slot(n)], self.blocks.bias_cluster
        if self.interpret:
            smem.received[...] = tile[...].astype(jnp.float32)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.received, target, reduction_op="add")
            plgpu.wait_smem_to_gmem(0)
            return
        exchange = inline_exchange.Exchange(size, self.swizzle, cluster.rank(size))
        exchange(tile, smem.received, smem.arrived, lax.rem(cta.count(n), jnp.int32(2)))
        exchange.add(tile, smem.received, target)

    def target(self, cta: Cta, n):
        """Returns where in device memory the sum of the n-th tile lies."""
        place = cta.place(n, cta.keys.start, self.blocks.block_kv, self.blocks.block_q)
        entry, head = SideInputs(self.problem, q_axis=1).entry(self.problem.bias_shape, place)
        if cta.results.dbias.shape[1] != self.problem.bias_shape[1]:  # of the heads of this launch
            head = head - cta.gmem.origin[1] * self.problem.group
        first = place.row_start if self.first_key == 0 else place.row_start - self.first_key
        keys, queries = pl.ds(first, place.rows), pl.ds(place.column_start, place.columns)
        return cta.results.dbias.at[entry, head, keys, queries]
