"""The tiles of a launch: blocks of rows on the grid, and the columns that a CTA goes through."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ....core.problem import Problem
from ...gpu.launch import WARPGROUP_ROWS
from ..backward.operands import (
    BackwardArrays,
    KvTileList,
    KvTileRange,
    QTileList,
    QTileRange,
    mask_everywhere,
    own_grid,
)
from .tiles import COLUMNS, Role


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """The Q tiles of a CTA's keys, for every head of a group, from the last tile to the first.

    The heads of a tile follow each other. So CTAs of different keys read the same tiles at the same
    time, whatever a causal mask leaves of their ranges: from L2. With a head after the other, each
    reads from another head before long (0.6 of the speed at eight heads to one, causal, T=8k).
    """

    q_range: QTileRange

    @property
    def total(self):
        """Number of tiles of this CTA."""
        return jnp.int32(self.q_range.per_head * self.q_range.group)

    @property
    def kv_len(self):
        """Number of keys; None where that hides none."""
        return self.q_range.kv_len

    def __getitem__(self, n):
        """Returns (head of the group, Q block) of the n-th tile."""
        group = jnp.int32(self.q_range.group)
        return lax.rem(n, group), self.q_range.stop - 1 - lax.div(n, group)


def column_tiles(problem: Problem, arrays: BackwardArrays, q_axis: int, place):
    """Returns the tiles of columns of a CTA; `place`: (batch entry, head, block of rows)."""
    (batch, _, block), size = place, (WARPGROUP_ROWS, COLUMNS)
    if q_axis:
        mask_all = mask_everywhere(problem)
        if problem.is_listed:
            return QTileList.of(problem, arrays, place, *size, mask_all=mask_all)
        q_range = QTileRange.of(problem, arrays, (batch, block), *size, mask_all=mask_all)
        return QueryTiles(q_range)
    if problem.is_listed:
        return KvTileList.of(problem, arrays, place, COLUMNS)
    position = block * WARPGROUP_ROWS + arrays.offset(problem, batch)
    return KvTileRange.of(problem, arrays, (batch, block, position), *size)


def masks(problem: Problem, tiles: Any) -> bool:
    """Returns whether the steps of a CTA mask: all of them do or none.

    In the backward a loop of its own for whole tiles spills 12 to 200 bytes; the forward has two,
    see `loops`.
    """
    if isinstance(tiles, KvTileList | QTileList):
        return True
    if isinstance(tiles, QueryTiles):
        return tiles.q_range.masks != "none"
    return tiles.everywhere or not problem.spec.mask.is_trivial or tiles.kv_len is not None


def loops(problem: Problem, tiles: Any) -> list[tuple[Any, Any, bool]]:
    """Returns the loops over the tiles of a CTA of the forward, as (start, stop, masked).

    Whole tiles come first, without masks: 1.03 causal, without spills.
    """
    start, stop = jnp.int32(0), tiles.total
    if isinstance(tiles, KvTileList) or tiles.everywhere or not masks(problem, tiles):
        return [(start, stop, True)]
    masked_start = jnp.int32(tiles.masked_from - tiles.start)
    return [(start, masked_start, False), (masked_start, stop, True)]


def grid_of(problem: Problem, role: Role) -> dict[str, int]:
    """Returns the grid of a launch, an axis for each name.

    The blocks of one head run side by side: what they stream is read from device memory once.
    """
    heads, length = problem.q_heads, problem.q_len
    if role.q_axis:
        heads, length = problem.kv_heads, problem.kv_len
    axes = {"batch": problem.batch, "head": heads, "block": -(-length // WARPGROUP_ROWS)}
    return own_grid(problem, axes)
