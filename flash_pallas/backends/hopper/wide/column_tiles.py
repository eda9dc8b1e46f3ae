"""The tiles of columns that a CTA goes through: which they are, in which order, which it masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ....core.problem import Problem
from ..backward.operands import (
    BackwardArrays,
    KvTileList,
    KvTileRange,
    QTileList,
    QTileRange,
    mask_everywhere,
)
from .tiles import CHUNK, COLUMNS


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """The Q tiles of a CTA's keys, for every head of a group, from the last tile to the first.

    The heads of a tile follow each other. So CTAs of different keys read the same tiles at the same
    time, whatever a causal mask leaves of their ranges: from L2. With a head after the other, each
    reads from another head before long (0.6 of the speed at eight heads to one, causal, T=8k).
    """

    found: QTileRange

    @property
    def total(self):
        """Number of tiles of this CTA."""
        return jnp.int32(self.found.per_head * self.found.group)

    @property
    def kv_len(self):
        """Number of keys; None where that hides none."""
        return self.found.kv_len

    def __getitem__(self, n):
        """Returns (head of the group, Q block) of the n-th tile."""
        group = jnp.int32(self.found.group)
        return lax.rem(n, group), self.found.stop - 1 - lax.div(n, group)


def column_tiles(problem: Problem, arrays: BackwardArrays, q_axis: int, at):
    """Returns the tiles of columns of a CTA; `at`: (batch entry, head, block of rows)."""
    (batch, _, block), size = at, (CHUNK, COLUMNS)
    if q_axis:
        loops = {"mask_all": mask_everywhere(problem)}
        if problem.is_listed:
            return QTileList.of(problem, arrays, at, *size, **loops)
        return QueryTiles(QTileRange.of(problem, arrays, (batch, block), *size, **loops))
    if problem.is_listed:
        return KvTileList.of(problem, arrays, at, COLUMNS)
    position = block * CHUNK + arrays.offset(problem, batch)
    return KvTileRange.of(problem, arrays, (batch, block, position), *size)


def loops(problem: Problem, tiles: Any) -> list[tuple[Any, Any, bool]]:
    """Returns [(first step, one past the last, whether the steps mask)] of the loops of a CTA."""
    zero, total = jnp.int32(0), tiles.total
    if isinstance(tiles, KvTileList | QTileList):
        if isinstance(tiles, QTileList) and tiles.mask_all:
            return [(zero, total, True)]
        partial = tiles.listed.masked_steps
        return [(zero, partial, True), (partial, total, False)]
    if isinstance(tiles, QueryTiles):
        found = tiles.found
        if found.masks != "some":
            return [(zero, total, found.masks == "all")]
        # Without a left edge a mask hides nothing of the last queries.
        whole = jnp.int32((found.stop - found.full_start) * found.group)
        return [(zero, whole, False), (whole, total, True)]
    if tiles.everywhere:
        return [(zero, total, True)]
    whole = jnp.int32(tiles.masked_from - tiles.start)
    if problem.spec.mask.is_trivial and tiles.kv_len is None:
        return [(zero, whole, False)]
    # Opaque: a masked step that is known to be one is peeled off, and its registers with it.
    return [(zero, whole, False), (whole, lax.optimization_barrier(total), True)]
