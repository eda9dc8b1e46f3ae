"""The producer warpgroup of the fused backward: a warp loads, others add dQ into device memory."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from .clearing import WARP, Loader, Padding
from .fused_blocks import FusedBlocks
from .fused_cta import Cta, swizzles_of_k_and_v
from .memory import rows_of
from .side_inputs import SideInputs

LOAD_WARP, STORE_WARP = 0, 1


@dataclasses.dataclass(frozen=True)
class Producer:
    """Everything that a CTA copies between device and shared memory, but for dK and dV."""

    problem: Problem
    blocks: FusedBlocks
    interpret: bool

    def __call__(self, cta: Cta):
        """All tiles of this CTA."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == LOAD_WARP)(lambda: self.load(cta))
            pl.when(warp == STORE_WARP)(lambda: self.store_dq(cta))

    def load(self, cta: Cta):
        """K and V once, then Q, lse, dO and delta of every query tile."""
        keys = (cta.batch, pl.ds(cta.kv_start, self.blocks.block_kv), cta.kv_head)
        block = lax.axis_index("kv")
        load_k, load_v = self.loaders(cta, cta.gmem.kv_padding)
        load_q, load_do = self.loaders(cta, cta.gmem.q_padding)
        at = functools.partial(rows_of, tile=cta.smem.k)  # all four are as wide
        load_k(at(cta.gmem.k, keys), cta.smem.k, cta.bars.kv_full, cta.batch, block)
        load_v(at(cta.gmem.v, keys), cta.smem.v, cta.bars.kv_full, cta.batch, block)
        side = SideInputs(self.problem, q_axis=1)

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            head, rows = cta.query_tile(n, self.blocks.block_q)
            block = cta.walk[n][1]
            tile, row = (cta.batch, rows, head), (cta.batch, head, rows)
            slot = cta.q.slot(n)
            full = cta.bars.q_full.at[slot]
            cta.q.wait_empty(n)
            load_q(at(cta.gmem.q, tile), cta.smem.q.at[slot], full, cta.batch, block)
            plgpu.copy_gmem_to_smem(cta.gmem.lse_log2.at[row], cta.smem.lse.at[slot], full)
            if side.copies:
                place = cta.place(n, cta.kv_start, self.blocks.block_kv, self.blocks.block_q)
                side.load(cta.gmem.side, cta.smem.side, slot, full, place)
            slot = cta.do.slot(n)
            full = cta.bars.do_full.at[slot]
            cta.do.wait_empty(n)
            load_do(at(cta.gmem.do, tile), cta.smem.do.at[slot], full, cta.batch, block)
            plgpu.copy_gmem_to_smem(
                cta.gmem.delta.at[row], cta.smem.delta.at[slot], cta.bars.delta_full.at[slot]
            )

        cta.q.drain(cta.walk.total)
        cta.do.drain(cta.walk.total)

    def loaders(self, cta: Cta, padding: Padding | None) -> list[Loader]:
        """(of Q or K, of dO or V): arrays whose tiles lie differently in shared memory."""
        swizzles = swizzles_of_k_and_v(self.problem, self.blocks, cta.gmem)
        arrived, interpret = cta.bars.arrived, self.interpret
        return [Loader(padding, arrived, swizzle, interpret, WARP) for swizzle in swizzles]

    def store_dq(self, cta: Cta):
        """Add each warpgroup's part of every dQ tile to the float32 buffer."""

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            head, rows = cta.query_tile(n, self.blocks.block_q)
            if self.blocks.alternate:
                for wg in (1, 0):  # as they come
                    self.add_dq(cta, head, rows, wg)
                    self.give_back(cta, n, wg, 0)
            else:
                self.add_dq(cta, head, rows, 0)
                self.add_dq(cta, head, rows, 1)
                self.give_back(cta, n, 0, 1)
                self.give_back(cta, n, 1, 0)

        plgpu.wait_smem_to_gmem(0)

    def add_dq(self, cta: Cta, head, rows, wg: int):
        """Start to add a warpgroup's part of a dQ tile."""
        plgpu.barrier_wait(cta.bars.dq_full.at[wg])
        target = cta.dq.at[self.dq_part(cta, head, rows, wg)]
        plgpu.copy_smem_to_gmem(cta.smem.dq.at[wg], target, reduction_op="add")

    def give_back(self, cta: Cta, n, wg: int, in_flight: int):
        """Shared memory of dQ, once at most so many of the adds are still reading theirs."""
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        pl.when(n + 1 < cta.walk.total)(lambda: plgpu.barrier_arrive(cta.bars.dq_empty.at[wg]))

    def dq_part(self, cta: Cta, head, rows, wg: int):
        """Where a warpgroup's part of a dQ tile lies in the buffer."""
        part = self.blocks.dq_tile(self.problem.head_dim)
        if self.blocks.dq_by_rows:
            return cta.batch, pl.ds(rows.start + wg * part[0], part[0]), head, slice(None)
        return cta.batch, rows, head, pl.ds(wg * part[1], part[1])
