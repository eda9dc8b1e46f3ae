"""CTAs of the kernel in backward_scores.py, and the steps that they take."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..mosaic.bias_tiles import BiasTile, BiasTiles, Members, bias_place, members_of
from . import cluster
from .arrays import BackwardArrays
from .key_walk import KeyWalk
from .memory import Ring
from .query_walk import QueryWalk
from .score_blocks import ScoreBlocks, Sums
from .scores_layout import Barriers, Smem


class Step(NamedTuple):
    """Place of one tile of scores."""

    batch: Any
    head: Any
    q_block: Any
    kv_block: Any


@dataclasses.dataclass(frozen=True)
class Steps:
    """The tiles that a CTA goes through.

    Attributes:
        first: the tile of step 0.
        total: number of tiles.
        along: which field of the tile grows by one with every step, "q_block" or "kv_block".
        members: batch entries and heads of the tiles, where it is these that change.
    """

    first: Step
    total: Any
    along: str = ""
    members: Members | None = None

    def __getitem__(self, n) -> Step:
        """Returns the n-th tile."""
        if self.members is not None:
            batch, head = self.members[n]
            return self.first._replace(batch=batch, head=head)
        return self.first._replace(**{self.along: getattr(self.first, self.along) + n})


@dataclasses.dataclass(frozen=True)
class Cta:
    """The refs and the place of one CTA, as one of its warpgroups sees them."""

    sums: Sums
    blocks: ScoreBlocks
    gmem: BackwardArrays
    bias: Any
    out: tuple
    smem: Smem
    bars: Barriers
    wg: Any
    refill: Any = None  # of the ring

    @property
    def owned(self) -> BiasTile:
        """The tile of the bias that this CTA owns, where it owns one."""
        blocks = self.blocks
        size = blocks.block_q, blocks.block_kv, blocks.cluster
        tiles = BiasTiles.of(self.sums.problem, *size)
        return tiles.at(lax.axis_index("cluster"), cluster.rank(blocks.cluster))

    @property
    def ring(self) -> Ring:
        """Ring of the stages."""
        return Ring(self.bars.full, self.bars.empty, self.blocks.stages, self.refill)

    def steps(self) -> Steps:
        """Returns the tiles of this CTA."""
        problem, blocks = self.sums.problem, self.blocks
        if self.sums.axes == "tile":
            return self.members()
        x, y, z = (lax.axis_index(name) for name in ("x", "y", "z"))
        if self.sums.axes == "rows":
            position = x * blocks.block_q + self.gmem.offset(problem, z)
            at = (z, x, position)
            walk = KeyWalk.of(problem, self.gmem, at, blocks.block_q, blocks.block_kv)
            return Steps(Step(z, y, x, walk.start), walk.total, "kv_block")
        at, size = (z, x), (blocks.block_kv, blocks.block_q)
        walk = QueryWalk.of(problem, self.gmem, at, *size, mask_all=True)
        return Steps(Step(z, y, walk.start, x), jnp.int32(walk.per_head), "q_block")

    def members(self) -> Steps:
        """Returns the tile of this CTA, once for every batch entry and head that shares it."""
        blocks, own = self.blocks, self.owned
        size, parts = (blocks.block_q, blocks.block_kv), self.sums.parts(blocks)
        found = members_of(self.sums.problem, own, parts, size, blocks.cluster)
        first = Step(found.batch, found.head, own.q_block, own.kv_block)
        return Steps(first, found.total, members=found)

    @property
    def bias_place(self):
        """Place in the bias, (entry, head), of what this CTA sums."""
        return bias_place(self.sums.problem, self.owned)
