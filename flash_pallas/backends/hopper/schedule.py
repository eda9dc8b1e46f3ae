"""Schedules: which CTA works on which Q tile, and in which order."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...core import integers as ints
from ...core.problem import Problem

# K and V of the heads worked on at one time should stay in the 50 MB L2; 16 MB measured best on
# H200 for causal attention (all 16 heads at once, 33 MB at T = 4k: 5 % slower).
SECTION_BYTES = 16 << 20

# Above this many tiles the list schedule is not worth its size: round-robin over tiles sorted by
# length is then within one tile of balanced.
MAX_TABLE_TILES = 1 << 16


class QueryTile(NamedTuple):
    """One unit of work of the forward and dQ kernels."""

    batch: Any
    head: Any
    block: Any  # index of the query tile


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Maps tile numbers to Q tiles.

    Attributes:
        batch, heads, q_tiles: number of each.
        section: number of heads worked on together (their K and V stay in L2).
        longest_first: causal: tiles of one section run from the last Q tile to the first.
    """

    batch: int
    heads: int
    q_tiles: int
    section: int
    longest_first: bool

    @classmethod
    def of(cls, problem: Problem, tile_rows: int) -> TileOrder:
        """Chooses the order of a problem's tiles.

        Q tiles are fastest where most cost the same. If causal, heads are fastest, and the longest
        tiles come first.
        """
        q_tiles = -(-problem.q_len // tile_rows)
        mask = problem.spec.mask
        # Neighbouring tiles of a window read the same keys, and all but the first as many.
        windowed = mask.left is not None and 2 * mask.left < problem.kv_len
        if mask.right is None or windowed:
            return cls(problem.batch, problem.q_heads, q_tiles, 1, False)
        heads = problem.batch * problem.q_heads
        kv_bytes = problem.kv_len * (problem.head_dim + problem.v_head_dim) * 2
        section = max(problem.group, min(heads, SECTION_BYTES // max(kv_bytes, 1)))
        while heads % section:
            section -= 1
        return cls(problem.batch, problem.q_heads, q_tiles, section, True)

    @property
    def total(self) -> int:
        """Number of tiles."""
        return self.batch * self.heads * self.q_tiles

    def __getitem__(self, tile) -> QueryTile:
        """Returns the Q tile with this number (Python int or traced int32)."""
        per_section = self.section * self.q_tiles
        section, within = ints.floor_div(tile, per_section), ints.remainder(tile, per_section)
        block = ints.floor_div(within, self.section)
        if self.longest_first:
            block = self.q_tiles - 1 - block
        head = section * self.section + ints.remainder(within, self.section)
        return QueryTile(ints.floor_div(head, self.heads), ints.remainder(head, self.heads), block)


def list_schedule(costs: np.ndarray, workers: int) -> np.ndarray:
    """Assigns tiles in order, each to the worker that is free first, as a dynamic scheduler would.

    Returns int32[workers, longest + 3]: column 0 is the worker's number of tiles, then their
    numbers, then padding (a kernel reads up to two entries past the end).
    """
    free_at = [(0.0, worker) for worker in range(workers)]
    lists: list[list[int]] = [[] for _ in range(workers)]
    for tile, cost in enumerate(costs):
        time, worker = heapq.heappop(free_at)
        lists[worker].append(tile)
        heapq.heappush(free_at, (time + float(cost), worker))
    table = np.zeros((workers, max(map(len, lists)) + 3), np.int32)
    for worker, tiles in enumerate(lists):
        table[worker, 0] = len(tiles)
        table[worker, 1 : 1 + len(tiles)] = tiles
    return table


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Tiles of each CTA: from a table in memory (causal), or every `ctas`-th one."""

    order: TileOrder
    ctas: int
    uses_table: bool

    @classmethod
    def persistent(cls, order: TileOrder, num_sms: int) -> Assignment:
        """Assigns the tiles to persistent CTAs, one per SM, each of which walks a list of tiles."""
        small = order.total <= MAX_TABLE_TILES
        return cls(order, min(num_sms, order.total), order.longest_first and small)

    @classmethod
    def one_each(cls, order: TileOrder) -> Assignment:
        """Assigns one tile to each CTA."""
        return cls(order, order.total, False)

    def table(self, cost_of_block) -> np.ndarray:
        """Returns the table, an operand of the kernel; cost_of_block(Q tile) is in KV blocks."""
        if not self.uses_table:
            return np.zeros((1, 1), np.int32)
        per_block = np.array([cost_of_block(i) for i in range(self.order.q_tiles)])
        costs = [per_block[self.order[t].block] + 1.0 for t in range(self.order.total)]
        return list_schedule(np.array(costs), self.ctas)

    def count(self, table, cta):
        """Returns how many tiles this CTA has."""
        if self.uses_table:
            return table[cta, 0]
        whole, rest = divmod(self.order.total, self.ctas)
        return jnp.int32(whole) + (cta < rest).astype(jnp.int32) if rest else jnp.int32(whole)

    def tile(self, table, cta, turn):
        """Returns the number of its turn-th tile (anything past its last one is not to be used)."""
        if self.uses_table:
            return table[cta, turn + 1]
        return lax.min(turn * self.ctas + cta, jnp.int32(self.order.total - 1))
