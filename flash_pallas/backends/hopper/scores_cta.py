"""What a CTA of the kernel in backward_scores.py is made of, and the steps that it takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic.bias_tiles import BiasTile, BiasTiles, Members, bias_place, members_of
from ..mosaic.launch import WARPGROUP_ROWS
from . import cluster
from .arrays import BackwardArrays
from .key_walk import KeyWalk
from .memory import Ring, row_buffer, tile_buffer
from .products import Products
from .query_walk import QueryWalk
from .score_blocks import ScoreBlocks, Sums
from .side_inputs import Streamed


class Smem(NamedTuple):
    """Shared memory of one CTA; q, do, k and v are operands of products.py."""

    q: Any  # [stages, block_q, D]
    do: Any  # [stages, block_q, Dv]
    k: Any  # [stages, block_kv, D]
    v: Any  # [stages, block_kv, Dv]
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[stages, block_q]
    side: Streamed
    bias: Any  # [block_q, block_kv]; None unless Sums.holds_bias
    sums: Any  # staging; tile: f32[block_q, block_kv], or None: in place of the bias, if there is
    # one part; columns: f32[warpgroups, 64, block_kv]; rows: None
    vectors: Any  # rows: f32[names, block_q]; columns: f32[warpgroups, block_kv]; else None


class Barriers(NamedTuple):
    """mbarriers; the empty ones count the warpgroups of a cluster."""

    bias: Any
    full: Any
    empty: Any


LOADED = ("q", "do", "k", "v", "lse", "delta")  # in every step


class Step(NamedTuple):
    """Where one tile lies."""

    batch: Any
    head: Any
    q_block: Any
    kv_block: Any


@dataclasses.dataclass(frozen=True)
class Steps:
    """The tiles that a CTA goes through.

    Attributes:
        first: the tile of step 0.
        total: how many.
        along: which field of the tile grows by one with every step, "q_block" or "kv_block".
        members: whose tiles they are, where it is batch entry and head that change.
    """

    first: Step
    total: Any
    along: str = ""
    members: Members | None = None

    def __getitem__(self, n) -> Step:
        """The n-th tile."""
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
        """The tile of this CTA, where it owns one of the bias."""
        blocks = self.blocks
        size = blocks.block_q, blocks.block_kv, blocks.cluster
        tiles = BiasTiles.of(self.sums.problem, *size)
        return tiles.at(lax.axis_index("cluster"), cluster.rank(blocks.cluster))

    @property
    def ring(self) -> Ring:
        """Of the stages."""
        return Ring(self.bars.full, self.bars.empty, self.blocks.stages, self.refill)

    def steps(self) -> Steps:
        """The tiles of this CTA."""
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
        """The tile of this CTA, of every batch entry and head that shares it."""
        blocks, own = self.blocks, self.owned
        size, parts = (blocks.block_q, blocks.block_kv), self.sums.parts(blocks)
        found = members_of(self.sums.problem, own, parts, size, blocks.cluster)
        first = Step(found.batch, found.head, own.q_block, own.kv_block)
        return Steps(first, found.total, members=found)

    @property
    def bias_place(self):
        """(entry, head) of the bias that this CTA's sum is about."""
        return bias_place(self.sums.problem, self.owned)


def scratch(sums: Sums, blocks: ScoreBlocks, arrays: BackwardArrays) -> tuple[Smem, Barriers]:
    """What to allocate."""
    problem, stages = sums.problem, blocks.stages
    rows, columns = blocks.block_q, blocks.block_kv
    tile = lambda length, dim, x: Products(problem.dtype).buffer((stages, length, dim), x)
    staging, vectors = None, None
    if sums.axes == "tile" and sums.parts(blocks) > 1:
        staging = tile_buffer((rows, columns), jnp.float32)
    elif sums.axes == "columns":
        staging = tile_buffer((blocks.warpgroups, WARPGROUP_ROWS, columns), jnp.float32)
        vectors = row_buffer((blocks.warpgroups, columns))
    elif sums.axes == "rows":
        vectors = row_buffer((len(sums.names), rows))
    smem = Smem(
        q=tile(rows, problem.head_dim, arrays.q),
        do=tile(rows, problem.v_head_dim, arrays.do),
        k=tile(columns, problem.head_dim, arrays.k),
        v=tile(columns, problem.v_head_dim, arrays.v),
        lse=row_buffer((stages, rows)),
        delta=row_buffer((stages, rows)),
        side=sums.side.buffers(stages, rows, columns),
        bias=tile_buffer((rows, columns), problem.bias_dtype) if sums.holds_bias else None,
        sums=staging,
        vectors=vectors,
    )
    bar = plgpu.Barrier
    bars = Barriers(
        bias=bar() if sums.holds_bias else None,
        full=bar(num_arrivals=len(LOADED) + sums.side.copies, num_barriers=stages),
        empty=cluster.empty_barrier(blocks.cluster, blocks.warpgroups, stages),
    )
    return smem, bars
