"""The producer warpgroup of the decode kernel for caches of eight bits.

Blocks arrive as they lie in memory, several ahead. The producer, whose threads would otherwise
wait, makes them 16-bit blocks in the rings that the compute warpgroup reads, so that one is the
same for all caches. A key is its number times a scale, by which products are multiplied later.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import clearing
from .decode_plan import Cta, Keys, Plan
from .decode_producer import Producer
from .memory import Ring
from .widening import widen


@dataclasses.dataclass(frozen=True)
class WideningProducer:
    """Loads and widens blocks of K and V from the first to the last."""

    plan: Plan

    @property
    def source(self) -> Producer:
        """Who knows where blocks lie."""
        return Producer(self.plan)

    def __call__(self, cta: Cta):
        """All blocks of this CTA."""
        keys, ahead, places = self.plan.keys(cta), self.plan.blocks.stages, self.source.places

        def begin(j, found):
            following = places(cta, j + 1)
            self.fetch(cta, keys, 0, j, found)
            self.fetch(cta, keys, 1, j, found)
            return following

        start = keys.start
        first = places(cta, start)
        coming = lax.fori_loop(start, start + ahead, begin, first)

        def step(j, state):
            # Ids of pages are loaded a block before they are used, and so are scales.
            coming, own, scales = state
            following = (
                places(cta, j + ahead + 1),
                self.own_places(cta, j + 2),
                self.scales(cta, keys, j + 1, own),
            )
            for kind in range(2):
                self.widen(cta, keys, kind, j, scales)
                self.fetch(cta, keys, kind, j + ahead, coming)
            return following

        own = self.own_places(cta, start + 1)
        scales = self.scales(cta, keys, start, first)
        lax.fori_loop(start, keys.stop, step, (coming, own, scales))
        used = keys.stop - start
        cta.k.drain(used)
        cta.v.drain(used)

    def fetch(self, cta: Cta, keys: Keys, kind: int, j, places: tuple):
        """Start the copy of the j-th block of K (kind 0) or V (kind 1), if there is one."""
        slot = self.raw_ring(cta, kind).slot(j - keys.start)
        source = (cta.gmem.k, cta.gmem.v)[kind]
        tile, barrier = cta.smem.raw[kind].at[slot], cta.bars.raw_full[kind].at[slot]
        copy = lambda: self.source.copy(cta, source, tile, barrier, j, places)
        pl.when(j < keys.stop)(copy)

    def widen(self, cta: Cta, keys: Keys, kind: int, j, scales: tuple):
        """Make the j-th block of K or V one that products read."""
        use, block = j - keys.start, self.plan.blocks.block_kv
        raw_ring, ring = self.raw_ring(cta, kind), (cta.k, cta.v)[kind]
        raw = cta.smem.raw[kind].at[raw_ring.slot(use)]
        tile = (cta.smem.k, cta.smem.v)[kind].at[ring.slot(use)]
        swizzles = self.plan.raw_swizzle(kind), self.plan.wide_swizzle(kind)
        raw_ring.wait_full(use)
        ring.wait_empty(use)
        widen(raw, tile, swizzles, self.plan.interpret)
        if kind == 1 and self.plan.problem.kv_dtype.name != "int8":
            # A weight of 0 times a NaN is a NaN.
            valid = keys.length - j * block
            clear = lambda: clearing.clear_from(tile, valid, swizzles[1], self.plan.interpret)
            pl.when(valid < block)(clear)
        for i in range(self.plan.pieces if self.plan.page_scales else 0):
            cta.smem.scales[kind, ring.slot(use), i] = scales[kind][i]
        # Behind its barrier, every thread has read what the next copy overwrites.
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.full.at[ring.slot(use)])

    def raw_ring(self, cta: Cta, kind: int) -> Ring:
        """Of blocks as they arrive; nobody else reads them."""
        return Ring(cta.bars.raw_full[kind], None, self.plan.blocks.stages)

    def own_places(self, cta: Cta, j) -> tuple:
        """Pages of the pieces of the j-th block, if they have scales of their own."""
        return self.source.places(cta, j) if self.plan.page_scales else ()

    def scales(self, cta: Cta, keys: Keys, j, places: tuple) -> tuple:
        """(of K, of V) of each piece of the j-th block, if pages have scales of their own."""
        if not self.plan.page_scales:
            return ()

        def scale(of, i, page):
            if of is None:
                return jnp.float32(1.0)
            found = of[page if of.shape[0] > 1 else 0, cta.head]
            # That of a page beyond the end may be NaN, as its keys may.
            return lax.select(self.source.first_key(j, i) < keys.length, found, jnp.float32(1.0))

        kinds = cta.gmem.k_scale, cta.gmem.v_scale
        return tuple(tuple(scale(of, i, page) for i, page in enumerate(places)) for of in kinds)
