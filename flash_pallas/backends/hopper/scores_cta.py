"""What a CTA of the kernel in backward_scores.py is made of, and the steps that it takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .arrays import BackwardArrays
from .key_walk import KeyWalk
from .memory import WARPGROUP_ROWS, Ring, row_buffer, tile_buffer
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
    """mbarriers; the empty one counts warpgroups."""

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

    @property
    def ring(self) -> Ring:
        """Of the stages."""
        return Ring(self.bars.full, self.bars.empty, self.blocks.stages)

    def steps(self) -> Steps:
        """The tiles of this CTA."""
        problem, blocks = self.sums.problem, self.blocks
        x, y, z = (lax.axis_index(name) for name in ("x", "y", "z"))
        if self.sums.axes == "rows":
            position = x * blocks.block_q + self.gmem.offset(problem, z)
            at = (z, x, position)
            walk = KeyWalk.of(problem, self.gmem, at, blocks.block_q, blocks.block_kv)
            return Steps(Step(z, y, x, walk.start), walk.total, "kv_block")
        if self.sums.axes == "columns":
            at, size = (z, x), (blocks.block_kv, blocks.block_q)
            walk = QueryWalk.of(problem, self.gmem, at, *size, mask_all=True)
            return Steps(Step(z, y, walk.start, x), jnp.int32(walk.per_head), "q_block")
        return self.members(x, y, z)

    def members(self, x, y, z) -> Steps:
        """The batch entries and heads whose sum is tile (y, x) of part z of the bias's gradient."""
        problem, blocks, sums = self.sums.problem, self.blocks, self.sums
        entries, bias_heads = problem.bias_shape[:2]
        part = lax.div(z, jnp.int32(entries * bias_heads))
        entry, bias_head = self.bias_place(z)
        most = -(-sums.members // sums.parts(blocks))
        total = jnp.int32(most)
        if sums.parts(blocks) > 1:
            total = lax.clamp(jnp.int32(0), sums.members - part * most, jnp.int32(most))
        spec = problem.spec
        if not problem.traced_offset and not spec.mask.is_trivial:
            start = y * blocks.block_q + spec.q_offset
            found = spec.mask.kv_blocks(start, blocks.block_q, problem.kv_len, blocks.block_kv)
            seen = (x >= found.start) & (x < found.stop)
            total = lax.select(seen, total, jnp.int32(0))
        heads = problem.q_heads // bias_heads
        first = Step(entry * (problem.batch // entries), bias_head * heads, y, x)
        return Steps(first, total, "member", heads, part * most)

    def bias_place(self, z):
        """(entry, head) of the bias that part z is about."""
        entries, heads = self.sums.problem.bias_shape[:2]
        return lax.rem(lax.div(z, jnp.int32(heads)), jnp.int32(entries)), lax.rem(
            z, jnp.int32(heads)
        )


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
        empty=bar(num_arrivals=blocks.warpgroups, num_barriers=stages),
    )
    return smem, bars
