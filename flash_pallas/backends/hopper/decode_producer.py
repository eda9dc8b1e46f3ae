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
        keys = self.plan.keys(cta)

        def load(j, places):
            # The ids of the next block's pages arrive while this block waits for its slot.
            following = self.places(cta, j + 1)
            self.load(cta, keys, j, places)
            return following

        lax.fori_loop(keys.start, keys.stop, load, self.places(cta, keys.start))
        used = keys.stop - keys.start
        cta.k.drain(used)
        cta.v.drain(used)

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

    def load(self, cta: Cta, keys: Keys, j, places: tuple):
        """The j-th block of K and of V."""
        use, block = j - keys.start, self.plan.blocks.block_kv
        slot = cta.k.slot(use)
        cta.k.wait_empty(use)
        self.copy(cta, cta.gmem.k, cta.smem.k.at[slot], cta.bars.k_full.at[slot], j, places)
        cta.v.wait_empty(use)
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
