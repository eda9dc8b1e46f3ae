"""Places of the blocks of a KV cache, and the scales of the pages that they lie in."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from .decode_plan import Cta, Keys, Plan


@dataclasses.dataclass(frozen=True)
class Pages:
    """Page lookup of a paged cache, or of a contiguous one, whose blocks are one piece each."""

    plan: Plan

    def places(self, cta: Cta, j) -> tuple:
        """Returns the first cache index of each piece of the j-th block: batch entry or page."""
        table = cta.gmem.page_table
        if table is None:
            return (cta.batch,)
        most, pages = jnp.int32(table.shape[1] - 1), jnp.int32(cta.gmem.k.shape[0] - 1)
        found = (table[cta.batch, lax.min(self.page(j, i), most)] for i in range(self.plan.pieces))
        # What the last block reads beyond the table's end, or of an entry never set, is hidden.
        return tuple(lax.clamp(jnp.int32(0), page, pages) for page in found)

    def page(self, j, piece: int):
        """Returns which of the sequence's pages a piece of a block lies in."""
        return lax.div(self.first_key(j, piece), jnp.int32(self.plan.problem.spec.page_size or 0))

    def first_key(self, j, piece: int):
        """Returns the number of the first key of a piece of a block."""
        return j * self.plan.blocks.block_kv + piece * self.plan.piece_rows

    def scales(self, cta: Cta, keys: Keys, j, places: tuple) -> tuple:
        """Returns (scales of K, scales of V) of the j-th block, f32, one for each piece."""

        def scale(of, i, page):
            if of is None:
                return jnp.float32(1.0)
            found = of[page if of.shape[0] > 1 else 0, cta.head]
            # That of a page beyond the end may be NaN, as its keys may.
            return lax.select(self.first_key(j, i) < keys.length, found, jnp.float32(1.0))

        kinds = cta.gmem.k_scale, cta.gmem.v_scale
        return tuple(tuple(scale(of, i, page) for i, page in enumerate(places)) for of in kinds)
