"""The producer warpgroup of the decode kernel."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import clearing
from .decode_plan import Cta, Keys, Plan
from .memory import rows_of


@dataclasses.dataclass(frozen=True)
class Producer:
    """Loads blocks of K and V from the first to the last."""

    plan: Plan

    def __call__(self, cta: Cta):
        """All blocks of this CTA."""
        guessed = self.plan.guessed(cta)
        pl.when(guessed > 0)(lambda: self.guess(cta, guessed))
        keys = self.plan.keys(cta)

        def load(n, places):
            # The ids of the next block's pages arrive while this block waits for its slot.
            following = self.places(cta, keys.block(n + 1))
            self.load(cta, keys, guessed, n, places)
            return following

        lax.fori_loop(jnp.int32(0), keys.stop, load, self.places(cta, keys.block(0)))
        cta.k.drain(keys.stop)
        cta.v.drain(keys.stop)

    def guess(self, cta: Cta, count):
        """Start on the first blocks of K. Sequences are seldom so short that they have none there.

        The length takes as long to arrive as a block.
        """

        @pl.loop(jnp.int32(0), count)
        def _(n):
            block = cta.split + n * self.plan.blocks.num_splits
            self.copy_k(cta, n, block, self.places(cta, block))

    def places(self, cta: Cta, j) -> tuple:
        """First index into the cache of every piece of a block: batch entry or page."""
        table = cta.gmem.page_table
        if table is None:
            return (cta.batch,)
        most, pages = jnp.int32(table.shape[1] - 1), jnp.int32(cta.gmem.k.shape[0] - 1)
        found = (table[cta.batch, lax.min(self.page(j, i), most)] for i in range(self.plan.pieces))
        # What the last block reads beyond the table's end, or of an entry never set, is hidden.
        return tuple(lax.clamp(jnp.int32(0), page, pages) for page in found)

    def page(self, j, piece: int):
        """Which of the sequence's pages a piece of a block lies in."""
        return lax.div(self.first_key(j, piece), jnp.int32(self.plan.problem.spec.page_size or 0))

    def first_key(self, j, piece: int):
        """Of a piece of a block."""
        return j * self.plan.blocks.block_kv + piece * self.plan.piece_rows

    def copy_k(self, cta: Cta, n, block, places: tuple):
        """A block of K into the slot of the n-th."""
        slot = cta.k.slot(n)
        self.copy(cta, cta.gmem.k, cta.smem.k.at[slot], cta.bars.k_full.at[slot], block, places)

    def load(self, cta: Cta, keys: Keys, guessed, n, places: tuple):
        """The n-th block of K, unless it was guessed, and of V."""
        j, block, slot = keys.block(n), self.plan.blocks.block_kv, cta.v.slot(n)

        @pl.when(n >= guessed)
        def _():
            cta.k.wait_empty(n)
            self.copy_k(cta, n, j, places)

        cta.v.wait_empty(n)
        v, full = cta.smem.v.at[slot], cta.bars.v_full.at[slot]
        valid = keys.length - j * block
        whole = lambda: self.copy(cta, cta.gmem.v, v, full, j, places)
        pl.when(valid >= block)(whole)

        @pl.when(valid < block)
        def _():
            # A weight of 0 times a NaN is a NaN, so what lies past the length is not multiplied.
            arrived = cta.bars.v_arrived.at[0]
            self.copy(cta, cta.gmem.v, v, arrived, j, places)
            plgpu.barrier_wait(arrived)
            width = self.plan.head_dims[1]
            swizzle = self.plan.products.swizzle(width, cta.gmem.v, summed_rows=block)
            clearing.clear_from(v, valid, swizzle, self.plan.interpret)
            for _ in range(self.plan.pieces):
                plgpu.barrier_arrive(full)

    def copy(self, cta: Cta, source, tile, barrier, j, places: tuple):
        """A block into `tile`, one copy for each of its pieces."""
        rows, page_size = self.plan.piece_rows, self.plan.problem.spec.page_size
        for i, place in enumerate(places):
            first = self.first_key(j, i)
            if page_size is not None:
                first = lax.rem(first, jnp.int32(page_size))
            piece = tile if len(places) == 1 else tile.at[pl.ds(i * rows, rows)]
            at = (place, pl.ds(first, rows), cta.head)
            plgpu.copy_gmem_to_smem(rows_of(source, at, tile), piece, barrier)
