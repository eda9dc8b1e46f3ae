"""Places of the blocks of a KV cache, and the scales of the pages that they lie in."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..common.pipeline import rows_of
from .plan import DecodeCta, DecodePlan, Keys


class ScalesAhead(NamedTuple):
    """Scales of the pages of blocks to come, as loaded: see Pages.loaded_scales."""

    places: tuple  # of the block after the next one
    own: tuple
    following: tuple


@dataclasses.dataclass(frozen=True)
class Pages:
    """Page lookup of a paged cache; without pages all pieces lie in the sequence's own cache."""

    plan: DecodePlan

    def places(self, cta: DecodeCta, j) -> tuple:
        """Returns the first cache index of each piece of the j-th block: batch entry or page."""
        table = cta.gmem.page_table
        if table is None:
            return (cta.batch,) * self.plan.pieces
        most, pages = jnp.int32(table.shape[-1] - 1), jnp.int32(cta.gmem.k.shape[0] - 1)
        entry = (cta.batch, cta.head) if self.plan.problem.of_heads else (cta.batch,)
        page_ids = (
            table[(*entry, lax.min(self.page(j, i), most))] for i in range(self.plan.pieces)
        )
        # What the last block reads beyond the table's end, or of an entry never set, is hidden.
        return tuple(lax.clamp(jnp.int32(0), page_id, pages) for page_id in page_ids)

    def page(self, j, piece: int):
        """Returns which of the sequence's pages a piece of a block lies in."""
        return lax.div(self.first_key(j, piece), jnp.int32(self.plan.problem.spec.page_size or 0))

    def first_key(self, j, piece: int):
        """Returns the number of the first key of a piece of a block."""
        return j * self.plan.blocks.block_kv + piece * self.plan.piece_rows

    def first_scales(self, cta: DecodeCta, keys: Keys) -> ScalesAhead | None:
        """Loads the scales of the first two blocks; None where pages have none."""
        if not self.plan.page_scales:
            return None
        own, following, last = (self.places(cta, keys.block(n)) for n in range(3))
        return ScalesAhead(last, self.loaded_scales(cta, own), self.loaded_scales(cta, following))

    def next_scales(
        self, cta: DecodeCta, keys: Keys, n, ahead: ScalesAhead | None
    ) -> ScalesAhead | None:
        """Returns the scales of the blocks from n + 1 on; `ahead` has those from n on.

        The compute warpgroup would load scales a block ahead, and a busy memory takes longer than a
        block to answer. Here they are under way for two blocks, and the page ids that say where
        they are for another one.
        """
        if ahead is None:
            return None
        last = self.loaded_scales(cta, ahead.places)
        return ScalesAhead(self.places(cta, keys.block(n + 3)), ahead.following, last)

    def loaded_scales(self, cta: DecodeCta, places: tuple) -> tuple:
        """Loads (scales of K, scales of V) of a block, f32, one for each piece."""

        def scale(scales, page):
            if scales is None:
                return jnp.float32(1.0)
            return scales[page if scales.shape[0] > 1 else 0, cta.head]

        kinds = cta.gmem.k_scale, cta.gmem.v_scale
        return tuple(tuple(scale(scales, page) for page in places) for scales in kinds)

    def hand_over(self, cta: DecodeCta, keys: Keys, n, slot, scales: tuple, kinds=range(2)):
        """Puts the n-th block's scales of K (kind 0) and V (1) next to it."""
        for kind in kinds:
            for i, scale in enumerate(scales[kind]):
                first = self.first_key(keys.block(n), i)
                exists = first < keys.length
                if keys.start is not None:
                    exists = exists & (first + self.plan.piece_rows > keys.start)
                # The scale of a page of padding may be NaN, as its keys may.
                cta.smem.scales[kind, slot, i] = lax.select(exists, scale, jnp.float32(1.0))


@dataclasses.dataclass(frozen=True)
class DecodeProducer:
    """Producer that loads blocks of K and V from the first to the last."""

    plan: DecodePlan

    @property
    def pages(self) -> Pages:
        """Page lookup, which knows where blocks lie."""
        return Pages(self.plan)

    def __call__(self, cta: DecodeCta):
        """Loads all blocks of this CTA, then waits for their release."""
        guessed, first = self.plan.guessed(cta), None
        if cta.gmem.ends is not None and self.plan.guesses:
            # Loads the ids of the first pages together with what says whether there is a row.
            first = self.pages.places(cta, cta.split)
            guessed, first = lax.optimization_barrier((guessed, first))
        pl.when(guessed > 0)(lambda: self.guess(cta, guessed, first))
        keys = self.plan.keys(cta)
        if self.plan.v_slots < self.plan.slots:
            self.load_keys_ahead(cta, keys, guessed)
        else:
            self.load_all(cta, keys, guessed)
        cta.k.drain(keys.stop)
        if not self.plan.shares:
            cta.v.drain(keys.stop)

    def load_all(self, cta: DecodeCta, keys: Keys, guessed):
        """Loads all blocks, one after the other, and hands scales of their pages over with K."""
        pages, arrived = self.pages, lambda n: cta.k.full.at[cta.k.slot(n)]

        def load(n, state):
            places, scales = state
            # The ids of the next block's pages arrive while this block waits for its slot.
            following = pages.places(cta, keys.block(n + 1))
            coming = pages.next_scales(cta, keys, n, scales)
            self.load(cta, keys, guessed, n, places)
            if scales is not None:
                pages.hand_over(cta, keys, n, cta.k.slot(n), scales.own)
                plgpu.barrier_arrive(arrived(n))
            return following, coming

        first = pages.places(cta, keys.block(0)), pages.first_scales(cta, keys)
        lax.fori_loop(jnp.int32(0), keys.stop, load, first)
        if self.plan.page_scales:
            # Blocks that were guessed, and that nobody needed, have no scales.
            pl.loop(keys.stop, guessed)(lambda n: plgpu.barrier_arrive(arrived(n)))

    def load_keys_ahead(self, cta: DecodeCta, keys: Keys, guessed):
        """Loads all blocks, each of K before the block of V that precedes it.

        V has a slot fewer than K: while it is multiplied, two blocks of K are under way.
        """
        places = lambda n: self.pages.places(cta, keys.block(n))

        def load(n, ahead):
            own, following = ahead
            last = places(n + 2)
            new = (n + 1 < keys.stop) & (n + 1 >= guessed)
            pl.when(new)(lambda: self.load_k(cta, keys, n + 1, following))
            new = n >= lax.min(guessed, self.plan.v_slots)
            pl.when(new)(lambda: self.load_v(cta, keys, n, own))
            return following, last

        first, new = places(0), (keys.stop > 0) & (guessed == 0)
        pl.when(new)(lambda: self.load_k(cta, keys, jnp.int32(0), first))
        lax.fori_loop(jnp.int32(0), keys.stop, load, (first, places(1)))

    def guess(self, cta: DecodeCta, count, first: tuple | None):
        """Issues the copies of the first blocks before the length is known.

        Sequences are seldom so short that they have no keys there, and the length takes as long to
        arrive as a block. If not upright, the producer clears the end of V before it hands V over,
        so blocks of V wait for the length. `first` are the places of the first block, if known.
        """

        def copy(n, places=None):
            block = cta.split + n * self.plan.blocks.num_splits
            places = self.pages.places(cta, block) if places is None else places
            self.copy_k(cta, n, block, places)
            if self.plan.blocks.upright and not self.plan.shares:
                self.plan.where_v_has(n, lambda: self.copy_v(cta, n, block, places))

        if first is not None:
            copy(jnp.int32(0), first)
        pl.loop(jnp.int32(first is not None), count)(copy)

    def copy_k(self, cta: DecodeCta, n, block, places: tuple):
        """Issues the copy of a block of K into the slot of the n-th block."""
        slot = cta.k.slot(n)
        self.copy(cta, cta.gmem.k, cta.smem.k.at[slot], cta.k.full.at[slot], block, places)

    def copy_v(self, cta: DecodeCta, n, block, places: tuple):
        """Issues the copy of a block of V into the slot of the n-th block."""
        slot = cta.v.slot(n)
        self.copy_values(cta, cta.smem.v.at[slot], cta.v.full.at[slot], block, places)

    def copy_values(self, cta: DecodeCta, tile, barrier, block, places: tuple):
        """Issues the copies of all parts of a block of V into `tile`."""
        columns = self.plan.part_columns
        if self.plan.parts == 1:
            self.copy(cta, cta.gmem.v, tile, barrier, block, places)
            return
        for part in range(self.plan.parts):
            column = part * columns
            self.copy(cta, cta.gmem.v, tile.at[part], barrier, block, places, column)

    def load(self, cta: DecodeCta, keys: Keys, guessed, n, places: tuple):
        """Loads the n-th block of K and V, unless it was guessed."""

        @pl.when(n >= guessed)
        def _():
            self.load_k(cta, keys, n, places)
            if self.plan.blocks.upright and not self.plan.shares:
                self.load_v(cta, keys, n, places)

        if not (self.plan.blocks.upright or self.plan.shares):
            self.load_cleared(cta, keys, n, places)

    def load_k(self, cta: DecodeCta, keys: Keys, n, places: tuple):
        """Waits until the slot of the n-th block of K is empty, and issues its copy."""
        cta.k.wait_empty(n)
        self.copy_k(cta, n, keys.block(n), places)

    def load_v(self, cta: DecodeCta, keys: Keys, n, places: tuple):
        """Waits until the slot of the n-th block of V is empty, and issues its copy."""
        cta.v.wait_empty(n)
        self.copy_v(cta, n, keys.block(n), places)

    def load_cleared(self, cta: DecodeCta, keys: Keys, n, places: tuple):
        """Loads the n-th block of V, with zeros in place of padding."""
        block = self.plan.blocks.block_kv
        first = keys.block(n) * block
        full, padded = self.plan.has_padding(keys, first)
        cta.v.wait_empty(n)
        pl.when(full)(lambda: self.copy_v(cta, n, keys.block(n), places))

        @pl.when(padded)
        def _():
            slot, arrived = cta.v.slot(n), cta.bars.v_arrived.at[0]
            v = cta.smem.v.at[slot]
            self.copy_values(cta, v, arrived, keys.block(n), places)
            plgpu.barrier_wait(arrived)
            parts, swizzle = self.plan.parts, self.plan.v_swizzle(cta.gmem.v)
            for tile in [v] if parts == 1 else [v.at[part] for part in range(parts)]:
                self.plan.clear_padding(tile, keys, first, swizzle)
            for _ in range(self.plan.pieces * parts):
                plgpu.barrier_arrive(cta.v.full.at[slot])

    def copy(self, cta: DecodeCta, source, tile, barrier, j, places: tuple, column=None):
        """Issues the copies of a block into `tile`, one for each of its pieces.

        `column` is the first of the columns that are copied, where the tile has a part of them.
        """
        rows, part_len = self.plan.piece_rows, self.plan.problem.part_len
        for i, place in enumerate(places):
            first = self.pages.first_key(j, i)
            if part_len is not None:
                first = lax.rem(first, jnp.int32(part_len))
            piece = tile if len(places) == 1 else tile.at[pl.ds(i * rows, rows)]
            index = (place, pl.ds(first, rows), cta.head)
            plgpu.copy_gmem_to_smem(rows_of(source, index, tile, column), piece, barrier)
