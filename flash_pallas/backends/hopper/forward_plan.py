"""What a CTA of the forward kernel is made of, and what it has to do."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.integers import maximum
from ...core.problem import Problem
from ...core.tile import Limits, Tile
from .blocks import ForwardBlocks
from .memory import WARPGROUP_ROWS, Ring, row_buffer, tile_buffer
from .schedule import Assignment, QueryTile


class Gmem(NamedTuple):
    """Operands and results in device memory."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, H]
    table: Any  # int32, see schedule.py
    q_offset: Any  # int32[B]
    o: Any  # [B, T, N, H]
    lse: Any  # f32[B, N, whole tiles of T], base 2


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    q: Any  # [warpgroups, 64, H]
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, H]
    o: Any  # [warpgroups, 64, H], or None: O is staged in q
    lse: Any  # f32[warpgroups, 64]


class Barriers(NamedTuple):
    """mbarriers: q one per warpgroup, k and v one per stage."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Work(NamedTuple):
    """A query tile and the key blocks it reads."""

    at: QueryTile
    position: Any  # of the tile's first query
    kv_blocks: Any  # how many; at least one, so that every tile writes its output
    used: Any = 0  # uses of the K and V rings before its first block


class Rows(NamedTuple):
    """What a warpgroup carries from step to step."""

    p: Any  # 16-bit weights of the block whose PV is still to be issued
    m: Any  # f32[64] running maximum, base 2
    l: Any  # f32[64, 8] running sums of each thread's own columns


@dataclasses.dataclass(frozen=True)
class Cta:
    """The refs of one CTA, as one of its warpgroups sees them."""

    gmem: Gmem
    smem: Smem
    k: Ring
    v: Ring
    bars: Barriers
    index: Any
    wg: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which key blocks each query tile reads, and which of them it must mask.

    Attributes:
        problem: what is computed.
        blocks: tile sizes.
        assignment: query tiles of each CTA.
    """

    problem: Problem
    blocks: ForwardBlocks
    assignment: Assignment

    @property
    def tile_rows(self) -> int:
        """Query rows of a CTA's tile."""
        return self.blocks.warpgroups * WARPGROUP_ROWS

    @property
    def masked_blocks(self) -> int | Any:
        """The most key blocks that some warpgroup masks; -1 if a traced offset decides it."""
        spec = self.problem.spec
        if self.problem.traced_offset and not spec.mask.is_trivial:
            return -1
        most = 1
        for row in range(0, self.problem.q_len, WARPGROUP_ROWS):
            tile = row // self.tile_rows * self.tile_rows
            visited = self.visited(tile + spec.q_offset)
            most = max(most, visited - min(visited, self.unmasked(row + spec.q_offset)))
        return most

    def visited(self, position):
        """Key blocks read by the tile whose first query is at `position`."""
        mask, blocks = self.problem.spec.mask, self.blocks
        stop = mask.kv_blocks(position, self.tile_rows, self.problem.kv_len, blocks.block_kv).stop
        return maximum(stop, 1)

    def unmasked(self, position):
        """Leading key blocks that the warpgroup whose first query is at `position` sees whole."""
        mask, blocks = self.problem.spec.mask, self.blocks
        kv_len = -(-self.problem.kv_len // blocks.block_kv) * blocks.block_kv  # tail: peeled block
        return mask.kv_blocks(position, WARPGROUP_ROWS, kv_len, blocks.block_kv).full_stop

    def turns(self, cta: Cta):
        """How many query tiles this CTA works on."""
        return self.assignment.count(cta.gmem.table, cta.index)

    def work(self, cta: Cta, turn) -> Work:
        """This CTA's turn-th piece of work."""
        at = self.assignment.order[self.assignment.tile(cta.gmem.table, cta.index, turn)]
        at = jax.tree.map(jnp.int32, at)  # a static start past the array's end would be refused
        offset = self.problem.spec.q_offset
        if self.problem.traced_offset:
            offset = cta.gmem.q_offset[at.batch]
        position = at.block * self.tile_rows + offset
        return Work(at, jnp.int32(position), jnp.int32(self.visited(position)))

    def limits(self, cta: Cta, work: Work, kv_block, *, tail) -> Limits:
        """What this warpgroup's rows see of a key block; `tail`: it may reach past the last key."""
        shape = (WARPGROUP_ROWS, self.blocks.block_kv)
        q_start = work.position + cta.wg * WARPGROUP_ROWS
        tile = Tile(q_start, kv_block * self.blocks.block_kv, shape)
        ragged = tail and self.problem.kv_len % self.blocks.block_kv != 0
        return tile.limits(self.problem.spec.mask, self.problem.kv_len if ragged else None)

    def scratch(self) -> tuple[Smem, Barriers]:
        """What a CTA allocates."""
        blocks, head_dim, dtype = self.blocks, self.problem.head_dim, self.problem.dtype
        wgs, stages = blocks.warpgroups, blocks.stages
        bar = plgpu.Barrier
        rows = tile_buffer((wgs, WARPGROUP_ROWS, head_dim), dtype)
        smem = Smem(
            q=rows,
            k=tile_buffer((stages, blocks.block_kv, head_dim), dtype),
            v=tile_buffer((stages, blocks.block_kv, head_dim), dtype),
            o=rows if blocks.persistent else None,
            lse=row_buffer((wgs, WARPGROUP_ROWS)),
        )
        bars = Barriers(
            q_full=bar(num_barriers=wgs),
            q_empty=bar(num_barriers=wgs) if blocks.persistent else None,
            k_full=bar(num_barriers=stages),
            k_empty=bar(num_arrivals=wgs, num_barriers=stages),
            v_full=bar(num_barriers=stages),
            v_empty=bar(num_arrivals=wgs, num_barriers=stages),
        )
        return smem, bars
