"""Copies of the dK/dV kernel from device into shared memory, with or without a producer."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from ..mosaic.launch import WARPGROUP_ROWS
from .dkv_cta import Cta
from .memory import Ring, rows_of
from .side_inputs import Place, SideInputs
from .split_blocks import DkvBlocks


@dataclasses.dataclass(frozen=True)
class Loads:
    """Loads of one CTA: K and V once, Q with lse and dO with delta through two rings."""

    problem: Problem
    blocks: DkvBlocks

    @property
    def side(self) -> SideInputs:
        """Side inputs, which modifiers read."""
        return SideInputs(self.problem, q_axis=1)

    def place(self, cta: Cta, member, block) -> Place:
        """Returns the place of the tile of a query block of one head of the group."""
        head, columns = cta.kv_head * self.problem.group + member, self.blocks.block_q
        start = block * columns
        return Place(cta.batch, head, cta.kv_start, start, WARPGROUP_ROWS, columns)

    def __call__(self, cta: Cta):
        """Runs the producer: loads K, then Q and dO of every tile; V between the first two."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        self.load_k(cta)

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            self.load_q(cta, n)
            pl.when(n == 0)(lambda: self.load_v(cta))
            self.load_do(cta, n)

        self.drain(cta)

    def drain(self, cta: Cta):
        """Observes the releases that no later fill waited for."""
        cta.q.drain(cta.walk.total)
        cta.do.drain(cta.walk.total)

    def feed(self, cta: Cta) -> Cta:
        """Loads what the walk starts with, in warpgroup 1, where there is no producer.

        Returns the CTA with a ring of Q that this warpgroup fills again where it releases it; it is
        the last to do so.
        """
        tiles = cta.walk.total
        for n in range(max(self.blocks.stages, self.blocks.do_stages)):
            if n < self.blocks.stages:
                pl.when(n < tiles)(lambda n=n: self.load_q(cta, jnp.int32(n)))
            if n == 0:
                self.load_v(cta)
            if n < self.blocks.do_stages:
                pl.when(n < tiles)(lambda n=n: self.load_do(cta, jnp.int32(n)))
        refill = lambda n: pl.when(n < tiles)(lambda: self.load_q(cta, n))
        return dataclasses.replace(cta, q=cta.q._replace(refill=refill))

    def refill_do(self, cta: Cta, n):
        """Loads dO in warpgroup 1 at the start of its n-th tile, where there is no producer.

        The slot is that of the tile before, which warpgroup 0 releases in its own n-th tile.
        """
        following = n + self.blocks.do_stages - 1
        wanted = (n > 0) & (following < cta.walk.total)
        pl.when(wanted)(lambda: self.load_do(cta, following))

    def at(self, cta: Cta, n):
        """Returns (head in the group, query block, index of the row vectors) of the n-th tile."""
        member, block = cta.walk[n]
        head, rows = cta.kv_head * self.problem.group + member, self.blocks.block_q
        return member, block, (cta.batch, head, pl.ds(block * rows, rows))

    def load_q(self, cta: Cta, n):
        """Loads Q of the n-th tile, its lse and its streamed side inputs."""
        member, block, row = self.at(cta, n)
        batch, head, rows = row
        cta.q.wait_empty(n)
        self.load(cta.q, n, rows_of(cta.gmem.q, (batch, rows, head), cta.smem.q), cta.smem.q)
        self.load(cta.q, n, cta.gmem.lse_log2.at[row], cta.smem.lse)
        if self.side.copies:
            slot = cta.q.slot(n)
            place = self.place(cta, member, block)
            self.side.load(cta.gmem.side, cta.smem.side, slot, cta.q.full.at[slot], place)

    def load_do(self, cta: Cta, n):
        """Loads dO and delta of the n-th tile."""
        _, _, row = self.at(cta, n)
        batch, head, rows = row
        cta.do.wait_empty(n)
        self.load(cta.do, n, rows_of(cta.gmem.do, (batch, rows, head), cta.smem.do), cta.smem.do)
        self.load(cta.do, n, cta.gmem.delta.at[row], cta.smem.delta)

    def load_k(self, cta: Cta):
        """Loads the CTA's K tile by TMA, which arrives at `k_full`."""
        k = rows_of(cta.gmem.k, cta.keys, cta.smem.k)
        plgpu.copy_gmem_to_smem(k, cta.smem.k, cta.bars.k_full)

    def load_v(self, cta: Cta):
        """Loads the CTA's V tile by TMA, which arrives at `v_full`."""
        v = rows_of(cta.gmem.v, cta.keys, cta.smem.v)
        plgpu.copy_gmem_to_smem(v, cta.smem.v, cta.bars.v_full)

    def load(self, ring: Ring, n, source, buffer):
        """Issues one of the copies of the n-th fill of a ring."""
        slot = ring.slot(n)
        plgpu.copy_gmem_to_smem(source, buffer.at[slot], ring.full.at[slot])
