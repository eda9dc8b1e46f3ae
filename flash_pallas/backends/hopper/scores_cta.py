"""What a CTA of the kernel in backward_scores.py is made of, and the steps that it takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
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


SECTION_TILES = 16  # of 128 keys
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
        along: which field of the tile grows by one with every step; "member" stands for all pairs
            of a batch entry and one of `heads` heads, heads faster.
        heads: how many heads share the bias.
        skipped: members before those of this CTA.
    """

    first: Step
    total: Any
    along: str
    heads: int = 1
    skipped: Any = 0

    def __getitem__(self, n) -> Step:
        """The n-th tile."""
        if self.along != "member":
            return self.first._replace(**{self.along: getattr(self.first, self.along) + n})
        batch, head = n + self.skipped, 0
        if self.heads > 1:
            heads = jnp.int32(self.heads)
            batch, head = lax.div(batch, heads), lax.rem(batch, heads)
        return self.first._replace(batch=self.first.batch + batch, head=self.first.head + head)


class BiasTile(NamedTuple):
    """A tile of one sum over members."""

    q_block: Any
    kv_block: Any
    part: Any  # which sum, of (parts, entries of the bias, heads of the bias), heads fastest


@dataclasses.dataclass(frozen=True)
class BiasTiles:
    """The tiles of a bias's gradient in the order in which clusters take them.

    CTAs that run at one time should read the same: those of one sum go through the same members in
    step. So tiles come first and sums last, in sections of SECTION_TILES key tiles and all queries,
    row by row: 132 CTAs read 16 tiles of K and V and 8 or 9 of Q and dO in a step.

    Attributes:
        rows, columns: how many tiles, of queries and, in clusters of `cluster`, of keys.
    """

    rows: int
    columns: int
    cluster: int

    @classmethod
    def of(cls, problem: Problem, blocks: ScoreBlocks) -> BiasTiles:
        """The tiles of every sum."""
        columns = -(-problem.kv_len // (blocks.cluster * blocks.block_kv))
        return cls(-(-problem.q_len // blocks.block_q), columns, blocks.cluster)

    @property
    def clusters(self) -> int:
        """Of one sum."""
        return self.rows * self.columns

    def __getitem__(self, n) -> BiasTile:
        """What this CTA of the n-th cluster owns; beyond the last key if there are none left."""
        part, n = divide(n, self.clusters)
        wide = SECTION_TILES // self.cluster
        section, n = divide(n, wide * self.rows)
        first = section * wide
        row, column = divide(n, lax.min(jnp.int32(wide), self.columns - first))
        return BiasTile(row, (first + column) * self.cluster + cluster.rank(self.cluster), part)


def divide(a, b):
    """(quotient, remainder)"""
    b = jnp.int32(b)
    return lax.div(a, b), lax.rem(a, b)


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
        return BiasTiles.of(self.sums.problem, self.blocks)[lax.axis_index("cluster")]

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
        """The batch entries and heads whose sum is the tile of this CTA.

        They are as many for every CTA of a cluster: none if none of their tiles is visible.
        """
        problem, blocks, sums, own = self.sums.problem, self.blocks, self.sums, self.owned
        entries, bias_heads = problem.bias_shape[:2]
        part = lax.div(own.part, jnp.int32(entries * bias_heads))
        entry, bias_head = self.bias_place
        most = -(-sums.members // sums.parts(blocks))
        total = jnp.int32(most)
        if sums.parts(blocks) > 1:
            total = lax.clamp(jnp.int32(0), sums.members - part * most, jnp.int32(most))
        spec = problem.spec
        if not problem.traced_offset and not spec.mask.is_trivial:
            start, keys = own.q_block * blocks.block_q, blocks.cluster * blocks.block_kv
            found = spec.mask.kv_blocks(start + spec.q_offset, blocks.block_q, problem.kv_len, keys)
            column = lax.div(own.kv_block, jnp.int32(blocks.cluster))
            seen = (column >= found.start) & (column < found.stop)
            total = lax.select(seen, total, jnp.int32(0))
        heads = problem.q_heads // bias_heads
        first = Step(
            batch=entry * (problem.batch // entries),
            head=bias_head * heads,
            q_block=own.q_block,
            kv_block=own.kv_block,
        )
        return Steps(first, total, "member", heads, part * most)

    @property
    def bias_place(self):
        """(entry, head) of the bias that this CTA's sum is about."""
        entries, heads = self.sums.problem.bias_shape[:2]
        of_part, head = divide(self.owned.part, heads)
        return divide(of_part, entries)[1], head


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
