"""The producer warpgroup of the decode kernel for caches in eight bits.

Blocks arrive as they lie in memory, several ahead. The producer, whose threads would otherwise
wait, makes them 16-bit blocks in the rings that the compute warpgroup reads, so the compute
warpgroup is the same for all caches. A key is its number times a scale, by which matmuls are
multiplied later.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..common.pipeline import Ring
from .dequantize import widen
from .loads import DecodeProducer, Pages
from .plan import DecodeCta, DecodePlan, Keys


@dataclasses.dataclass(frozen=True)
class DequantizingProducer:
    """Producer that loads and widens blocks of K and V from the first to the last."""

    plan: DecodePlan

    @property
    def pages(self) -> Pages:
        """Page lookup, which knows where blocks lie."""
        return Pages(self.plan)

    def __call__(self, cta: DecodeCta):
        """Loads and widens all blocks of this CTA, then waits for their release."""
        plan, places, ahead = self.plan, self.pages.places, self.plan.blocks.stages
        guessed = plan.guessed(cta)
        if plan.guesses:
            self.begin(cta, cta.split, guessed)
            keys = plan.keys(cta)
        else:
            keys = plan.keys(cta)
            self.begin(cta, keys.first, lax.min(keys.stop, jnp.int32(ahead)))

        def step(n, state):
            # Ids of pages are loaded a block before they are used, and so are scales.
            coming, own, scales = state
            following = (
                places(cta, keys.block(n + ahead + 1)),
                self.own_places(cta, keys.block(n + 2)),
                self.scales(cta, keys, keys.block(n + 1), own),
            )
            for kind in range(2):
                self.widen(cta, keys, kind, n, scales)
                again = functools.partial(
                    self.fetch, cta, kind, n + ahead, keys.block(n + ahead), coming
                )
                pl.when(n + ahead < keys.stop)(again)
            return following

        first, own = (places(cta, keys.block(n)) for n in (0, 1))
        scales = self.scales(cta, keys, keys.block(0), first)
        own = own if plan.page_scales else ()
        coming = places(cta, keys.block(ahead))
        lax.fori_loop(jnp.int32(0), keys.stop, step, (coming, own, scales))

        @pl.loop(keys.stop, guessed)
        def _(n):  # Blocks that nobody needed arrive all the same.
            for kind in range(2):
                self.raw_ring(cta, kind).wait_full(n)

        cta.k.drain(keys.stop)
        cta.v.drain(keys.stop)

    def begin(self, cta: DecodeCta, block, count):
        """Starts the copies of the first `count` blocks, from `block` on."""

        @pl.loop(jnp.int32(0), count)
        def _(n):
            own = block + n * self.plan.blocks.num_splits
            for kind in range(2):
                self.fetch(cta, kind, n, own, self.pages.places(cta, own))

    def fetch(self, cta: DecodeCta, kind: int, n, block, places: tuple):
        """Starts the copy of the n-th block of K (kind 0) or V (kind 1)."""
        slot = self.raw_ring(cta, kind).slot(n)
        source = (cta.gmem.k, cta.gmem.v)[kind]
        tile, barrier = cta.smem.raw[kind].at[slot], cta.bars.raw_full[kind].at[slot]
        DecodeProducer(self.plan).copy(cta, source, tile, barrier, block, places)

    def widen(self, cta: DecodeCta, keys: Keys, kind: int, use, scales: tuple):
        """Widens a block of K (kind 0) or V (kind 1) to 16 bits, in the slot that matmuls read."""
        raw_ring, ring = self.raw_ring(cta, kind), (cta.k, cta.v)[kind]
        raw = cta.smem.raw[kind].at[raw_ring.slot(use)]
        tile = (cta.smem.k, cta.smem.v)[kind].at[ring.slot(use)]
        swizzles = self.plan.raw_swizzle(kind), self.plan.wide_swizzle(kind)
        raw_ring.wait_full(use)
        ring.wait_empty(use)
        widen(raw, tile, swizzles, self.plan.interpret)
        if kind == 1 and self.plan.problem.kv_dtype.name != "int8":
            first = keys.block(use) * self.plan.blocks.block_kv
            _, padded = self.plan.has_padding(keys, first)

            @pl.when(padded)
            def _():
                plgpu.commit_smem()  # its barrier: other threads widen the rows that one clears
                self.plan.clear_padding(tile, keys, first, swizzles[1])

        for i in range(self.plan.pieces if self.plan.page_scales else 0):
            cta.smem.scales[kind, ring.slot(use), i] = scales[kind][i]
        # Behind its barrier, every thread has read what the next copy overwrites.
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.full.at[ring.slot(use)])

    def raw_ring(self, cta: DecodeCta, kind: int) -> Ring:
        """Returns the ring of blocks as they arrive; nobody else reads them."""
        return Ring(cta.bars.raw_full[kind], None, self.plan.blocks.stages)

    def own_places(self, cta: DecodeCta, j) -> tuple:
        """Returns the pages of the j-th block's pieces if pages have their own scales; else ()."""
        return self.pages.places(cta, j) if self.plan.page_scales else ()

    def scales(self, cta: DecodeCta, keys: Keys, j, places: tuple) -> tuple:
        """Returns Pages.scales of the j-th block if pages have scales of their own; else ()."""
        return self.pages.scales(cta, keys, j, places) if self.plan.page_scales else ()
