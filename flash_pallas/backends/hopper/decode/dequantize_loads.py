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

from ...gpu.ptx.eight_bit_tiles import widen
from .loads import DecodeProducer, Pages
from .plan import DecodeCta, DecodePlan, Keys
from .tiles import takes_wide

# Of `widen` above head dim 256: all 36 of 64 keys of 576 columns would spill, and the producer may
# have 56 registers.
WIDE_PIECES = 6


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
            # Ids of pages are loaded a block before they are used.
            places_ahead, scales = state
            following = (
                places(cta, keys.block(n + ahead + 1)),
                self.pages.next_scales(cta, keys, n, scales),
            )
            for kind in self.plan.kinds:
                self.widen(cta, keys, kind, n, scales)
                fetch = functools.partial(
                    self.fetch, cta, kind, n + ahead, keys.block(n + ahead), places_ahead
                )
                pl.when(n + ahead < keys.stop)(fetch)
            return following

        first = places(cta, keys.block(ahead)), self.pages.first_scales(cta, keys)
        lax.fori_loop(jnp.int32(0), keys.stop, step, first)

        @pl.loop(keys.stop, guessed)
        def _(n):  # Blocks that nobody needed arrive all the same.
            for kind in plan.kinds:
                cta.bars.raw[kind].wait_full(n)

        cta.k.drain(keys.stop)
        if not plan.shares:
            cta.v.drain(keys.stop)

    def begin(self, cta: DecodeCta, block, count):
        """Starts the copies of the first `count` blocks, from `block` on."""

        @pl.loop(jnp.int32(0), count)
        def _(n):
            nth = block + n * self.plan.blocks.num_splits
            places = self.pages.places(cta, nth)
            for kind in self.plan.kinds:
                self.fetch(cta, kind, n, nth, places)

    def fetch(self, cta: DecodeCta, kind: int, n, block, places: tuple):
        """Starts the copy of the n-th block of K (kind 0) or V (kind 1)."""
        ring, source = cta.bars.raw[kind], (cta.gmem.k, cta.gmem.v)[kind]
        slot = ring.slot(n)
        tile, barrier = cta.smem.raw[kind].at[slot], ring.full.at[slot]
        DecodeProducer(self.plan).copy(cta, source, tile, barrier, block, places)

    def widen(self, cta: DecodeCta, keys: Keys, kind: int, use, scales):
        """Widens a block of K (kind 0) or V (kind 1) to 16 bits, in the slot that matmuls read."""
        raw_ring, ring = cta.bars.raw[kind], (cta.k, cta.v)[kind]
        raw = cta.smem.raw[kind].at[raw_ring.slot(use)]
        tile = (cta.smem.k, cta.smem.v)[kind].at[ring.slot(use)]
        raw_ring.wait_full(use)
        ring.wait_empty(use)
        tiles = self.tiles(kind, raw, tile)
        swizzle = (self.plan.k_swizzle, self.plan.v_swizzle)[kind]()
        swizzles = self.plan.raw_swizzle(kind), swizzle
        most = WIDE_PIECES if takes_wide(self.plan.problem) else None
        for source, target in tiles:
            widen(source, target, swizzles, self.plan.interpret, most)
        if kind == 1 and self.clears:
            first = keys.block(use) * self.plan.blocks.block_kv
            _, padded = self.plan.has_padding(keys, first)

            @pl.when(padded)
            def _():
                plgpu.commit_smem()  # its barrier: other threads widen the rows that one clears
                for _, target in tiles:
                    self.plan.clear_padding(target, keys, first, swizzle)

        if scales is not None:
            kinds = self.handed_with(kind)
            self.pages.hand_over(cta, keys, use, ring.slot(use), scales.own, kinds)
        # Behind its barrier, every thread has read what the next copy overwrites.
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.full.at[ring.slot(use)])

    def handed_with(self, kind: int) -> range:
        """Returns the kinds whose scales are handed over with K (kind 0) or V (kind 1)."""
        if self.plan.blocks.upright or self.plan.shares:
            return range(2 if kind == 0 else 0)
        return range(kind, kind + 1)

    @property
    def clears(self) -> bool:
        """True if V can have NaN in its padding, and nobody clears it later: int8 has none."""
        return self.plan.problem.kv_dtype.name != "int8" and not self.plan.blocks.upright

    def tiles(self, kind: int, raw, tile) -> list[tuple]:
        """Returns pairs (eight bits, 16 bits) that together are a block of K (kind 0) or V (1)."""
        if kind == 0 or self.plan.parts == 1:
            return [(raw, tile)]
        columns = self.plan.part_columns
        part = lambda i: (raw.at[:, pl.ds(i * columns, columns)], tile.at[i])
        return [part(i) for i in range(self.plan.parts)]
