"""Loading in the forward kernel without a producer warpgroup: for compilers without setmaxnreg.

Three warpgroups get 168 registers a thread each if they cannot trade them, two get 255. So nobody
is there to load only. The warpgroup that comes last in the round of turns releases a slot of K or V
last; at once it fills the slot with the block `stages` further on, which may be one of the next
tile. Every warpgroup loads its own rows of Q.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .forward_plan import Cta, Plan, Work
from .forward_producer import Producer
from .memory import Ring


class Ahead(NamedTuple):
    """The blocks that can be loaded: those of a tile and of the one after it."""

    number: Any  # of the tile
    used: Any  # ring position of its first block
    end: Any  # ring position after its last block
    following: Any = None  # number of the tile after it; None where nobody knows yet
    limit: Any = None  # ring position after that one's last block


@dataclasses.dataclass(frozen=True)
class Feeder:
    """What the compute warpgroups do of a producer's work."""

    plan: Plan

    def start(self, cta: Cta, number) -> Cta:
        """Load what the first tile starts with; the CTA as its first step sees it."""
        work = self.plan.work(cta, number)
        Producer(self.plan).load_rows(cta, work, cta.wg)
        ahead = Ahead(number, jnp.int32(0), work.kv_blocks)

        @pl.when(self.loads(cta))
        def _():
            for use in range(self.plan.blocks.stages):
                self.fill(cta, cta.k, ahead, jnp.int32(use))
                self.fill(cta, cta.v, ahead, jnp.int32(use))

        return self.refilling(cta, ahead)

    def tile(self, cta: Cta, turn, number, work: Work) -> tuple[Cta, Any]:
        """The CTA as the steps of the turn-th tile see it, and what the queue says comes after.

        Slots that were released before this tile, for blocks that nobody knew of then, are filled
        now; only tiles of fewer blocks than there are slots leave any.
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

    def end(self, cta: Cta, used):
        """Observe the releases that no later fill waited for."""

        @pl.when(self.loads(cta))
        def _():
            cta.k.drain(used)
            cta.v.drain(used)

    def next_q(self, cta: Cta, following):
        """Load this warpgroup's rows of the next tile; it has read its last of this one's."""
        number, more = following
        plgpu.barrier_wait(cta.bars.q_empty.at[cta.wg])
        load = lambda: Producer(self.plan).load_rows(cta, self.plan.work(cta, number), cta.wg)
        pl.when(more)(load)

    def loads(self, cta: Cta):
        """This warpgroup is the one that loads K and V."""
        return cta.wg == self.plan.blocks.warpgroups - 1

    def refilling(self, cta: Cta, ahead: Ahead) -> Cta:
        """The CTA with rings that are filled again where they are released."""

        def ring(plain: Ring) -> Ring:
            fill = functools.partial(self.fill, cta, plain, ahead)
            return plain._replace(refill=lambda use: pl.when(self.loads(cta))(lambda: fill(use)))

        return dataclasses.replace(cta, k=ring(cta.k), v=ring(cta.v))

    def fill(self, cta: Cta, ring: Ring, ahead: Ahead, use):
        """The use-th fill of a ring, if its block is known."""
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
            Producer(self.plan).load_kv(cta, ring, work, use - before, use)
