"""Base class of all kernels, and the loop over tiles: which ones, and which of them need a mask."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ....core import integers as ints
from ....core.block_lists import BlockLists
from ....core.mask import BlockRange, Limits
from ....core.problem import Problem
from ...gpu import auxiliary_arrays
from ...gpu.ptx import inline
from ...gpu.score_tile import RegisterTile
from .mma import Matmuls
from .shares import ScoreParts, Shares
from .smem_tiles import Copies, Warpgroups


class Kernel:
    """Base class of the dataclasses whose methods are the phases of a CTA.

    Attributes:
        interpret: run under the interpreter.
    """

    interpret: bool

    @property
    def hides_offsets(self) -> bool:
        """Value of Copies.hides_offsets."""
        return True

    @property
    def matmuls(self) -> Matmuls:
        """Matmuls of tiles."""
        return Matmuls(self.interpret)

    @property
    def copies(self) -> Copies:
        """Copies of tiles by a warpgroup that is alone in its CTA."""
        return Copies(self.interpret, Warpgroups(self.interpret), self.hides_offsets)

    def shares(self, scores: ScoreParts | None) -> Shares:
        """Returns the columns of this warpgroup, which is alone unless `scores` are summed."""
        if scores is None:
            return Shares(self.interpret, Warpgroups(self.interpret), None)
        warpgroups = Warpgroups(self.interpret, 2, lax.axis_index("wg"), scores.barrier)
        return Shares(self.interpret, warpgroups, scores)

    def copies_of(self, shares: Shares) -> Copies:
        """Returns the copies of tiles by all warpgroups of a CTA."""
        return Copies(self.interpret, shares.warpgroups, self.hides_offsets)


# --- the tiles that a CTA loops over, and which of them need a mask -------------------------------


def kv_tile_range(
    problem: Problem, coordinates, position, tile: tuple[int, int], bounds, kv_length
) -> BlockRange:
    """Returns the range of KV blocks for the queries of one tile.

    Args:
        problem: what is computed.
        coordinates: (batch entry, Q block).
        position: position of the tile's first query.
        tile: (queries, keys).
        bounds: core.bounds.kv_bounds, or None.
        kv_length: number of keys of the batch entry where arrays give it, or None.
    """
    rows, block_kv = tile
    blocks = problem.spec.mask.kv_blocks(position, rows, problem.kv_len, block_kv)
    if kv_length is not None:
        full_blocks = ints.floor_div(kv_length, block_kv)
        blocks = blocks._replace(full_stop=ints.minimum(blocks.full_stop, full_blocks))
    return _bounded(problem, blocks, bounds, coordinates)


def q_tile_range(
    problem: Problem, coordinates, position, tile: tuple[int, int], bounds
) -> BlockRange:
    """Returns the range of Q blocks for the keys of one tile; arguments are as of `kv_tile_range`.

    Queries past the end need no mask: their weights are 0. Neither do keys past the end: what is
    summed for them is dropped.
    """
    block_q, rows = tile
    padded_len = ints.round_up(problem.q_len, block_q)
    blocks = problem.spec.mask.q_blocks(position, rows, padded_len, block_q)
    blocks = _bounded(problem, blocks, bounds, coordinates)
    if problem.spec.mask.left is None and not problem.hides_by_arrays:
        return blocks._replace(full_stop=blocks.stop)  # the band has no lower edge: no third loop
    return blocks


def _bounded(problem: Problem, blocks: BlockRange, bounds, coordinates) -> BlockRange:
    start, full_start, full_stop, stop = blocks
    if bounds is not None:
        start, stop = (bounds[(*coordinates, i)] for i in (0, 1))
    if problem.hides_by_arrays:
        return BlockRange(start, start, start, stop)
    full_start = ints.clip(full_start, start, ints.maximum(start, stop))
    full_stop = ints.clip(full_stop, full_start, ints.maximum(full_start, stop))
    return BlockRange(start, full_start, full_stop, stop)


def masked_unless(blocks: BlockRange, all_whole) -> BlockRange:
    """Returns the range with all blocks masked, unless the traced `all_whole` holds."""
    if blocks.full_start is blocks.full_stop:
        return blocks  # all of them are masked already
    full_start = jnp.where(all_whole, jnp.int32(blocks.full_start), jnp.int32(blocks.stop))
    if blocks.full_stop is blocks.stop:  # still no third loop
        return blocks._replace(full_start=full_start)
    full_stop = jnp.where(all_whole, jnp.int32(blocks.full_stop), jnp.int32(blocks.stop))
    return blocks._replace(full_start=full_start, full_stop=full_stop)


def kv_limits(problem: Problem, tile: RegisterTile, kv_lengths, length) -> Limits:
    """Returns what positions hide of a tile whose columns are keys.

    Args:
        problem: what is computed.
        tile: positions of the tile.
        kv_lengths: numbers of keys by batch entry, where arrays give them, or None.
        length: number of keys of the tile's batch entry.
    """
    ragged = problem.kv_len % tile.shape[1] or kv_lengths is not None
    return tile.limits(problem.spec.mask, length if ragged else None)


def longest_first(problem: Problem, rows: int, block):
    """Returns the Q tile of the CTA numbered `block`: with a causal edge, the last ones start."""
    if problem.spec.mask.right is None:
        return block
    return ints.ceil_div(problem.q_len, rows) - 1 - block


class Step(NamedTuple):
    """One tile of scores: a query head of a group, and a block."""

    member: Any
    block: Any
    exists: Any

    def limit(self, length):
        """Returns Copy.limit of an array of this length: 0 if there is no such step."""
        return jnp.where(self.exists, jnp.int32(length), jnp.int32(0))


class TileList(NamedTuple):
    """Entries of a list in device memory, which name the blocks of steps; see core/block_lists.py.

    Attributes:
        index: int32[entries], of all lists.
        per_head: number of blocks of a head, where an entry names a member of a GQA group too.
    """

    index: Any
    per_head: int | None

    def __getitem__(self, entry) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns (member of the group, block) of an entry."""
        number = self.index[entry]
        if self.per_head is None:
            return jnp.int32(0), number
        per_head = jnp.int32(self.per_head)
        return lax.div(number, per_head), lax.rem(number, per_head)


class Steps(NamedTuple):
    """Blocks that all heads of a GQA group go through, numbered from 0 on.

    Blocks that need a mask have a loop of their own, and so have those that need none; each loop
    goes through all heads, because a loop around these loops would cost registers: 60 at head dim
    256.

    Attributes:
        zones: (low, high, masked) of consecutive blocks.
        group: heads.
        shift: with a single zone, offset from its first block of the block that comes first; the
            order wraps around. None: the first block.
        listed: the list whose entries the zones are made of, those of all heads in one; None: zones
            are made of blocks.
    """

    zones: list
    group: int = 1
    shift: Any = None
    listed: TileList | None = None

    @classmethod
    def of(cls, blocks: BlockRange, group: int = 1) -> Steps:
        """Returns the steps of a block range, without zones that are known to be empty."""
        return cls([zone for zone in blocks.zones() if zone[0] is not zone[1]], group)

    @classmethod
    def of_list(
        cls, problem: Problem, lists: BlockLists, coordinates, per_head: int | None = None
    ) -> Steps:
        """Returns the steps of one tile's list: partial blocks, then those in which all is seen.

        Args:
            problem: what is computed.
            lists: in device memory, of `BlockLists.in_one`.
            coordinates: (batch entry, head, tile); the head of keys where a list is for a GQA
                group.
            per_head: number of blocks of a head, where a list is for a GQA group.
        """
        batch, head, tile = coordinates
        list_entry = auxiliary_arrays.entry(problem, lists.bounds.shape, batch, head)
        start, whole_start, stop = (lists.bounds[(*list_entry, tile, end)] for end in range(3))
        zones = [(start, whole_start, True), (whole_start, stop, False)]
        return cls(zones, listed=TileList(lists.index, per_head))

    def all_masked(self) -> Steps:
        """Returns the steps of a list in one zone, which is masked."""
        return self._replace(zones=[(self.zones[0][0], self.zones[-1][1], True)])

    def _starts(self) -> list:
        """Computes the number of the first step of each zone, and the end of the last zone."""
        starts = [jnp.int32(0)]
        for low, high, _ in self.zones:
            length = lax.max(jnp.int32(high) - jnp.int32(low), jnp.int32(0))
            starts.append(starts[-1] + length * self.group)
        return starts

    def __getitem__(self, n) -> Step:
        """Returns the n-th step; numbers past the end give a step that does not exist."""
        starts, n = self._starts(), jnp.int32(n)
        exists = n < starts[-1]
        if self.listed is not None:  # a list can be read one entry past its end
            return Step(*self.listed[self.zones[0][0] + n], exists)
        if (self.group == 1 and self.shift is None) or not self.zones:
            first = jnp.int32(self.zones[0][0]) if self.zones else n
            return Step(jnp.int32(0), first + n, exists)
        chosen = jnp.int32(0), jnp.int32(0)
        for start, stop, (low, high, _) in reversed(
            list(zip(starts[:-1], starts[1:], self.zones, strict=True))
        ):
            length = lax.max(jnp.int32(high) - jnp.int32(low), jnp.int32(1))
            member = lax.div(n - start, length)
            within = n - start - member * length
            if self.shift is not None:
                within = lax.rem(within + self.shift, length)
            block = jnp.int32(low) + within
            chosen = jnp.where(n < stop, member, chosen[0]), jnp.where(n < stop, block, chosen[1])
        return Step(*chosen, exists)

    def fold(self, step, carry: Any, *, hides_end: bool):
        """Runs step(n, carry, masked=) for each step in turn, and returns the last carry.

        Args:
            step: the loop body.
            carry: the first.
            hides_end: hides the number of steps from the compiler. A single ragged step, unrolled
                into the end of a kernel, spilled 8 to 100 bytes of dQ at head dim 256. Hiding the
                end from the fused backward, which has a single loop, costs it 4 to 12 bytes; with
                lists it has two, and hiding their ends saves 4 to 20.
        """
        starts = self._starts()
        for start, stop, (_, _, masked) in zip(starts[:-1], starts[1:], self.zones, strict=True):
            body = functools.partial(step, masked=masked)
            stop = inline.unknown(stop, interpret=False) if hides_end else stop
            carry = lax.fori_loop(start, stop, body, carry)
        return carry
