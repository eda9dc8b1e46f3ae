"""The producer warpgroup of the forward kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.launch import WARPGROUP_ROWS
from ..common.auxiliary_inputs import Place
from ..common.pipeline import Ring, rows_of
from ..common.zero_padding import Loader
from .plan import ForwardCta, ForwardPlan, Work
from .tiles import ForwardBlocks


@dataclasses.dataclass(frozen=True)
class ForwardProducer:
    """Loads Q of each tile and its KV blocks from last to first, with K one block ahead of V.

    K's slot is freed before V's, because QK^T of a step ends before its PV; so K must not queue
    behind V. What modifiers read of a block travels with its K.
    """

    plan: ForwardPlan

    @property
    def blocks(self) -> ForwardBlocks:
        """Tile sizes of the kernel."""
        return self.plan.blocks

    def __call__(self, cta: ForwardCta):
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

    def tile(self, cta: ForwardCta, turn, number, used):
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

    def load_q(self, cta: ForwardCta, work: Work, turn):
        """Loads the 64 Q rows of each warpgroup, as soon as it has read its old ones."""
        for wg in range(self.blocks.warpgroups):
            if self.blocks.persistent:
                pl.when(turn > 0)(lambda wg=wg: plgpu.barrier_wait(cta.bars.q_empty.at[wg]))
            self.load_rows(cta, work, wg)

    def load_rows(self, cta: ForwardCta, work: Work, wg):
        """Issues the copy of the 64 Q rows of one warpgroup."""
        batch, head, block = work.at
        rows = pl.ds(block * self.plan.tile_rows + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        source = rows_of(cta.gmem.q, (batch, rows, head), cta.smem.q)
        plgpu.copy_gmem_to_smem(source, cta.smem.q.at[wg], cta.bars.q_full.at[wg])

    def load_kv(self, cta: ForwardCta, ring: Ring, work: Work, j, use):
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

    def load_v(self, cta: ForwardCta, *copy):
        """Loads a block of V and clears its padding, if any; the arguments are those of Loader."""
        width, rows = self.plan.problem.v_head_dim, self.blocks.block_kv
        swizzle = self.plan.products.swizzle(width, cta.gmem.v, summed_rows=rows)
        padding, arrived = cta.gmem.padding, cta.bars.v_arrived
        Loader(padding, arrived, swizzle, self.plan.interpret)(*copy)


class Ahead(NamedTuple):
    """The blocks that can be loaded: those of a tile and of the tile after it."""

    number: Any  # of the tile
    used: Any  # ring position of its first block
    end: Any  # ring position after its last block
    following: Any = None  # number of the tile after it; None where nobody knows yet
    limit: Any = None  # ring position after that one's last block


@dataclasses.dataclass(frozen=True)
class ForwardInlineLoads:
    """The part of a producer's work that the compute warpgroups do."""

    plan: ForwardPlan

    def start(self, cta: ForwardCta, number) -> ForwardCta:
        """Loads what the first tile starts with; returns the CTA as its first step sees it."""
        work = self.plan.work(cta, number)
        ForwardProducer(self.plan).load_rows(cta, work, cta.wg)
        ahead = Ahead(number, jnp.int32(0), work.kv_blocks)

        @pl.when(self.loads(cta))
        def _():
            for use in range(self.plan.blocks.stages):
                self.fill(cta, cta.k, ahead, jnp.int32(use))
                self.fill(cta, cta.v, ahead, jnp.int32(use))

        return self.refilling(cta, ahead)

    def tile(self, cta: ForwardCta, turn, number, work: Work) -> tuple[ForwardCta, Any]:
        """Returns the CTA as the steps of the turn-th tile see it, and what the queue says is next.

        The latter is (number, whether it exists), or None where the kernel is not persistent. Slots
        that were released before this tile, for blocks that were not known then, are filled now;
        only tiles with fewer blocks than there are slots leave any.
        """
        queue, following = self.plan.queue, None
        ahead = Ahead(number, work.used, work.used + work.kv_blocks)
        if self.plan.blocks.persistent:
            if self.plan.claims:

                @pl.when(self.loads(cta))
                def _():
                    queue.claim(cta, turn)

            number, more = following = queue.following(cta, turn)
            blocks = jnp.where(more, self.plan.work(cta, number).kv_blocks, 0)
            ahead = ahead._replace(following=number, limit=ahead.end + blocks)

            @pl.when(self.loads(cta))
            def _():
                # The softmax of the tile's first block was part of the tile before.
                released = work.used + self.plan.blocks.stages
                for ring, stop in ((cta.k, released + 1), (cta.v, released)):
                    known, wanted = lax.min(stop, ahead.end), lax.min(stop, ahead.limit)
                    fill = functools.partial(self.fill, cta, ring, ahead)
                    pl.loop(known, wanted)(fill)

        return self.refilling(cta, ahead), following

    def end(self, cta: ForwardCta, used):
        """Waits for the releases that no later fill has waited for."""

        @pl.when(self.loads(cta))
        def _():
            cta.k.drain(used)
            cta.v.drain(used)

    def next_q(self, cta: ForwardCta, following):
        """Loads this warpgroup's Q rows of the next tile, once those of this one have been read."""
        number, more = following
        plgpu.barrier_wait(cta.bars.q_empty.at[cta.wg])
        load = lambda: ForwardProducer(self.plan).load_rows(
            cta, self.plan.work(cta, number), cta.wg
        )
        pl.when(more)(load)

    def loads(self, cta: ForwardCta):
        """Returns whether this warpgroup, the last, is the one that loads K and V."""
        return cta.wg == self.plan.blocks.warpgroups - 1

    def refilling(self, cta: ForwardCta, ahead: Ahead) -> ForwardCta:
        """Returns the CTA with rings whose slots are refilled as they are released."""

        def ring(plain: Ring) -> Ring:
            fill = functools.partial(self.fill, cta, plain, ahead)
            return plain._replace(refill=lambda use: pl.when(self.loads(cta))(lambda: fill(use)))

        return dataclasses.replace(cta, k=ring(cta.k), v=ring(cta.v))

    def fill(self, cta: ForwardCta, ring: Ring, ahead: Ahead, use):
        """Issues the use-th fill of a ring, if its block is known."""
        limit = ahead.end if ahead.limit is None else ahead.limit

        @pl.when(use < limit)
        def _():
            number, before = ahead.number, ahead.used
            if ahead.following is not None:
                inside = use < ahead.end
                number = lax.select(inside, number, ahead.following)
                before = lax.select(inside, before, ahead.end)
            # What follows from the number is found anew: held over the loop it would spill.
            work = self.plan.work(cta, lax.optimization_barrier(number))
            ForwardProducer(self.plan).load_kv(cta, ring, work, use - before, use)
