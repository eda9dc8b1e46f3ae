"""Loading in the forward kernel without a producer warpgroup, for compilers without setmaxnreg.

Warpgroups that cannot trade registers get 168 a thread if there are three of them, and 255 if there
are two. So there is no warpgroup that only loads. The warpgroup that comes last in the round of
turns is the last to release a slot of K or V, and at once refills it with the block `stages`
further on, which may belong to the next tile. Every warpgroup loads its own rows of Q.
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
    """The blocks that can be loaded: those of a tile and of the tile after it."""

    number: Any  # of the tile
    used: Any  # ring position of its first block
    end: Any  # ring position after its last block
    following: Any = None  # number of the tile after it; None where nobody knows yet
    limit: Any = None  # ring position after that one's last block


@dataclasses.dataclass(frozen=True)
class Feeder:
    """The part of a producer's work that the compute warpgroups do."""

    plan: Plan

    def start(self, cta: Cta, number) -> Cta:
        """Loads what the first tile starts with; returns the CTA as its first step sees it."""
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

    def end(self, cta: Cta, used):
        """Waits for the releases that no later fill has waited for."""

        @pl.when(self.loads(cta))
        def _():
            cta.k.drain(used)
            cta.v.drain(used)

    def next_q(self, cta: Cta, following):
        """Loads this warpgroup's Q rows of the next tile, once those of this one have been read."""
        number, more = following
        plgpu.barrier_wait(cta.bars.q_empty.at[cta.wg])
        load = lambda: Producer(self.plan).load_rows(cta, self.plan.work(cta, number), cta.wg)
        pl.when(more)(load)

    def loads(self, cta: Cta):
        """Returns whether this warpgroup, the last, is the one that loads K and V."""
        return cta.wg == self.plan.blocks.warpgroups - 1

    def refilling(self, cta: Cta, ahead: Ahead) -> Cta:
        """Returns the CTA with rings whose slots are refilled as they are released."""

        def ring(plain: Ring) -> Ring:
            fill = functools.partial(self.fill, cta, plain, ahead)
            return plain._replace(refill=lambda use: pl.when(self.loads(cta))(lambda: fill(use)))

        return dataclasses.replace(cta, k=ring(cta.k), v=ring(cta.v))

    def fill(self, cta: Cta, ring: Ring, ahead: Ahead, use):
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
            Producer(self.plan).load_kv(cta, ring, work, use - before, use)
