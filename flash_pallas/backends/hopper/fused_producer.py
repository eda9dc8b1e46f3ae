"""The producer warpgroup of the fused backward: a warp loads, others add dQ into device memory."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from .fused_blocks import FusedBlocks
from .fused_cta import WARPGROUPS, Cta
from .side_inputs import SideInputs

LOAD_WARP, STORE_WARP = 0, 1


@dataclasses.dataclass(frozen=True)
class Producer:
    """Everything that a CTA copies between device and shared memory, but for dK and dV."""

    problem: Problem
    blocks: FusedBlocks

    def __call__(self, cta: Cta):
        """All tiles of this CTA."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        every = tuple(range(WARPGROUPS))

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == LOAD_WARP)(lambda: self.load(cta))
            stores = [(wg,) for wg in every] if self.blocks.store_warps else [every]
            for i, parts in enumerate(stores):
                pl.when(warp == STORE_WARP + i)(lambda parts=parts: self.store_dq(cta, parts))

    def load(self, cta: Cta):
        """K and V once, then Q, lse, dO and delta of every query tile."""
        keys = (cta.batch, pl.ds(cta.kv_start, self.blocks.block_kv), cta.kv_head)
        plgpu.copy_gmem_to_smem(cta.gmem.k.at[keys], cta.smem.k, cta.bars.kv_full)
        plgpu.copy_gmem_to_smem(cta.gmem.v.at[keys], cta.smem.v, cta.bars.kv_full)
        side = SideInputs(self.problem, q_axis=1)

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            head, rows = cta.query_tile(n, self.blocks.block_q)
            tile, row = (cta.batch, rows, head), (cta.batch, head, rows)
            slot = cta.q.slot(n)
            arrived = cta.bars.q_full.at[slot]
            cta.q.wait_empty(n)
            plgpu.copy_gmem_to_smem(cta.gmem.q.at[tile], cta.smem.q.at[slot], arrived)
            plgpu.copy_gmem_to_smem(cta.gmem.lse_log2.at[row], cta.smem.lse.at[slot], arrived)
            if side.copies:
                place = cta.place(n, cta.kv_start, self.blocks.block_kv, self.blocks.block_q)
                side.load(cta.gmem.side, cta.smem.side, slot, arrived, place)
            slot = cta.do.slot(n)
            cta.do.wait_empty(n)
            plgpu.copy_gmem_to_smem(
                cta.gmem.do.at[tile], cta.smem.do.at[slot], cta.bars.do_full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                cta.gmem.delta.at[row], cta.smem.delta.at[slot], cta.bars.delta_full.at[slot]
            )

        cta.q.drain(cta.walk.total)
        cta.do.drain(cta.walk.total)

    def store_dq(self, cta: Cta, parts: tuple[int, ...]):
        """Add some warpgroups' parts of every dQ tile to the float32 buffer."""

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            head, rows = cta.query_tile(n, self.blocks.block_q)
            for wg in parts:
                plgpu.barrier_wait(cta.bars.dq_full.at[wg])
                target = cta.dq.at[self.dq_part(cta, head, rows, wg)]
                plgpu.copy_smem_to_gmem(cta.smem.dq.at[wg], target, reduction_op="add")
            for i, wg in enumerate(parts):
                plgpu.wait_smem_to_gmem(len(parts) - 1 - i, wait_read_only=True)
                pl.when(n + 1 < cta.walk.total)(
                    lambda wg=wg: plgpu.barrier_arrive(cta.bars.dq_empty.at[wg])
                )

        plgpu.wait_smem_to_gmem(0)

    def dq_part(self, cta: Cta, head, rows, wg: int):
        """Where a warpgroup's part of a dQ tile lies in the buffer."""
        part = self.blocks.dq_tile(self.problem.head_dim)
        if self.blocks.dq_by_rows:
            return cta.batch, pl.ds(rows.start + wg * part[0], part[0]), head, slice(None)
        return cta.batch, rows, head, pl.ds(wg * part[1], part[1])
