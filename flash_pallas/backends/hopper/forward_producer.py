"""The producer warpgroup of the forward kernel."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic.launch import WARPGROUP_ROWS
from .clearing import Loader
from .forward_blocks import ForwardBlocks
from .forward_plan import Cta, Plan, Work
from .memory import Ring, rows_of
from .side_inputs import Place


@dataclasses.dataclass(frozen=True)
class Producer:
    """Loads Q of each tile and its KV blocks from last to first, with K one block ahead of V.

    K's slot is freed before V's, because QK^T of a step ends before its PV; so K must not queue
    behind V. What modifiers read of a block travels with its K.
    """

    plan: Plan

    @property
    def blocks(self) -> ForwardBlocks:
        """Tile sizes of the kernel."""
        return self.plan.blocks

    def __call__(self, cta: Cta):
        """Runs the producer warpgroup: loads all tiles of this CTA."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        first = self.plan.work(cta, self.plan.queue.first(cta))
        self.load_q(cta, first, jnp.int32(0))
        self.load_kv(cta, cta.k, first, jnp.int32(0), jnp.int32(0))
        tile = functools.partial(self.tile, cta)
        used = self.plan.queue.each(cta, tile, jnp.int32(0))
        cta.k.drain(used)
        cta.v.drain(used)
        if self.blocks.persistent:
            for wg in range(self.blocks.warpgroups):
                plgpu.barrier_wait(cta.bars.q_empty.at[wg])

    def tile(self, cta: Cta, turn, number, used):
        """Loads the K and V blocks of one tile, and Q and the first K block of the next.

        The tile's own first K block has been loaded with the tile before. Returns (ring position of
        the next tile, (its number, whether it exists)).
        """
        work = self.plan.work(cta, number)

        @pl.loop(jnp.int32(1), work.kv_blocks)
        def _(j):
            self.load_kv(cta, cta.k, work, j, used + j)
            self.load_kv(cta, cta.v, work, j - 1, used + j - 1)

        last, after = work.kv_blocks - 1, used + work.kv_blocks
        number, more = self.plan.queue.claim(cta, turn)
        following = self.plan.work(cta, number)
        if self.blocks.persistent:
            pl.when(more)(lambda: self.load_kv(cta, cta.k, following, jnp.int32(0), after))
        self.load_kv(cta, cta.v, work, last, after - 1)
        if self.blocks.persistent:
            pl.when(more)(lambda: self.load_q(cta, following, turn + 1))
        return after, (number, more)

    def load_q(self, cta: Cta, work: Work, turn):
        """Loads the 64 Q rows of each warpgroup, as soon as it has read its old ones."""
        for wg in range(self.blocks.warpgroups):
            if self.blocks.persistent:
                pl.when(turn > 0)(lambda wg=wg: plgpu.barrier_wait(cta.bars.q_empty.at[wg]))
            self.load_rows(cta, work, wg)

    def load_rows(self, cta: Cta, work: Work, wg):
        """Issues the copy of the 64 Q rows of one warpgroup."""
        batch, head, block = work.at
        rows = pl.ds(block * self.plan.tile_rows + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        source = rows_of(cta.gmem.q, (batch, rows, head), cta.smem.q)
        plgpu.copy_gmem_to_smem(source, cta.smem.q.at[wg], cta.bars.q_full.at[wg])

    def load_kv(self, cta: Cta, ring: Ring, work: Work, j, use):
        """Loads the j-th block of K or V from the right, as the use-th fill of its ring."""
        block, block_kv = work.block(j), self.blocks.block_kv
        start = block * block_kv
        head = lax.div(work.at.head, jnp.int32(self.plan.problem.group))
        keys = (work.at.batch, pl.ds(start, block_kv), head)
        slot = ring.slot(use)
        full = ring.full.at[slot]
        ring.wait_empty(use)
        if ring is cta.v:
            # PV alone sums over keys: what padding holds of K only reaches scores that are hidden.
            source = rows_of(cta.gmem.v, keys, cta.smem.v)
            self.load_v(cta, source, cta.smem.v.at[slot], full, work.at.batch, block)
            return
        source = rows_of(cta.gmem.k, keys, cta.smem.k)
        plgpu.copy_gmem_to_smem(source, cta.smem.k.at[slot], full)
        first_row, tile_rows = work.at.block * self.plan.tile_rows, self.plan.tile_rows
        place = Place(work.at.batch, work.at.head, first_row, start, tile_rows, block_kv)
        self.plan.side.load(cta.gmem.side, cta.smem.side, slot, full, place)

    def load_v(self, cta: Cta, *copy):
        """Loads a block of V and clears its padding, if any; the arguments are those of Loader."""
        width, rows = self.plan.problem.v_head_dim, self.blocks.block_kv
        swizzle = self.plan.products.swizzle(width, cta.gmem.v, summed_rows=rows)
        padding, arrived = cta.gmem.padding, cta.bars.v_arrived
        Loader(padding, arrived, swizzle, self.plan.interpret)(*copy)
