"""Tiles of the gradient of a bias that is [.., T, S]: which CTA sums which tile, over which scores.

Batch entries and heads may share an entry of the bias: they are its members. Where there would be
too few CTAs, the sum over members is cut into parts, which are added up afterwards.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...core.problem import Problem

SECTION_TILES = 16  # of keys


class BiasTile(NamedTuple):
    """A tile of one sum over members."""

    q_block: Any
    kv_block: Any
    part: Any  # which sum, of (parts, entries of the bias, heads of the bias), heads fastest


@dataclasses.dataclass(frozen=True)
class BiasTiles:
    """The tiles of a bias's gradient in the order in which clusters take them.

    CTAs that run at one time should read the same: those of one sum loop over the same members in
    step. So tiles are the fastest index and sums the slowest, in sections of SECTION_TILES KV tiles
    and all queries, row by row: 132 CTAs read 16 tiles of K and V and 8 or 9 of Q and dO in a step.

    Attributes:
        rows, columns: number of tiles along the queries and, in clusters of `cluster`, the keys.
        cluster: CTAs with neighbouring keys.
    """

    rows: int
    columns: int
    cluster: int = 1

    @classmethod
    def of(cls, problem: Problem, block_q: int, block_kv: int, cluster: int = 1) -> BiasTiles:
        """Returns the tiles of every sum."""
        columns = -(-problem.kv_len // (cluster * block_kv))
        return cls(-(-problem.q_len // block_q), columns, cluster)

    @property
    def clusters(self) -> int:
        """Number of clusters of one sum."""
        return self.rows * self.columns

    def at(self, n, rank: Any = 0) -> BiasTile:
        """Returns the tile of a CTA of the n-th cluster, beyond the last key if none are left."""
        part, n = divide(n, self.clusters)
        wide = SECTION_TILES // self.cluster
        section, n = divide(n, wide * self.rows)
        first = section * wide
        row, column = divide(n, lax.min(jnp.int32(wide), self.columns - first))
        return BiasTile(row, (first + column) * self.cluster + rank, part)


class Members(NamedTuple):
    """Batch entries and heads that one sum goes through, heads faster.

    Attributes:
        batch, head: the first that share the entry of the bias.
        heads: number of heads that share it.
        skipped: number of members in the parts before this one.
        total: number of members in this part.
    """

    batch: Any
    head: Any
    heads: int
    skipped: Any
    total: Any

    def __getitem__(self, n) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns (batch entry, head) of the n-th member."""
        batch, head = n + self.skipped, 0
        if self.heads > 1:
            batch, head = divide(batch, self.heads)
        return self.batch + batch, self.head + head


def members_of(problem: Problem, own: BiasTile, parts: int, size, cluster: int = 1) -> Members:
    """Returns the members whose sum is a tile.

    Every CTA of a cluster has as many: none if none of the cluster's tiles is visible.

    Args:
        problem: what is computed.
        own: the tile.
        parts: number of parts of every sum.
        size: queries and keys of a tile.
        cluster: as in BiasTiles.
    """
    entries, bias_heads = problem.bias_shape[:2]
    part = lax.div(own.part, jnp.int32(entries * bias_heads))
    entry, bias_head = bias_place(problem, own)
    most = -(-sharing(problem) // parts)
    total = jnp.int32(most)
    if parts > 1:
        total = lax.clamp(jnp.int32(0), sharing(problem) - part * most, jnp.int32(most))
    spec, (block_q, block_kv) = problem.spec, size
    if not problem.traced_offset and not spec.mask.is_trivial:
        start, keys = own.q_block * block_q, cluster * block_kv
        kv_blocks = spec.mask.kv_blocks(start + spec.q_offset, block_q, problem.kv_len, keys)
        column = lax.div(own.kv_block, jnp.int32(cluster))
        seen = (column >= kv_blocks.start) & (column < kv_blocks.stop)
        total = lax.select(seen, total, jnp.int32(0))
    heads = problem.q_heads // bias_heads
    batch = entry * (problem.batch // entries)
    return Members(batch, bias_head * heads, heads, part * most, total)


def bias_place(problem: Problem, own: BiasTile):
    """Returns (entry, head) of the bias that a sum belongs to."""
    entries, heads = problem.bias_shape[:2]
    part_entry, head = divide(own.part, heads)
    return divide(part_entry, entries)[1], head


def sharing(problem: Problem) -> int:
    """Returns how many (batch entry, head) pairs share one entry of the bias."""
    entries, heads = problem.bias_shape[:2]
    return (problem.batch // entries) * (problem.q_heads // heads)


def parts_of(problem: Problem, tiles: int, enough: int) -> int:
    """Chooses how many sums the members are split into, so that there are enough CTAs.

    Args:
        problem: what is computed.
        tiles: number of tiles of one entry and head of the bias.
        enough: number of CTAs to aim for.
    """
    entries, heads = problem.bias_shape[:2]
    return max(1, min(sharing(problem), enough // (entries * heads * tiles)))


def divide(a, b):
    """Returns (quotient, remainder)."""
    b = jnp.int32(b)
    return lax.div(a, b), lax.rem(a, b)
