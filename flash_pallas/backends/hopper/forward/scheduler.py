"""The tile scheduler: which CTA works on which Q tile, and in which order.

A CTA that is not persistent has one tile. A persistent one has every `num_ctas`-th tile; if causal,
the tiles of a table that is computed at trace time; where arrays decide what a tile costs, those
that it claims from a counter in device memory. Where lists of keys say what a tile costs, tiles
with long lists come first: see longest_first in core/block_lists.py.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import integers as ints
from ....core.block_lists import BlockLists
from ....core.problem import Problem
from ...gpu.ptx import tile_claims
from ..common import tile_lists

# K and V of the heads worked on at one time should stay in the 50 MB L2; 16 MB measured best on
# H200 for causal attention (all 16 heads at once, 33 MB at T = 4k: 5 % slower).
SWIZZLE_BYTES = 16 << 20

# Above this many tiles the list schedule is not worth its size: round-robin over tiles sorted by
# length is then within one tile of balanced.
MAX_TABLE_TILES = 1 << 16

# Slots for the numbers of claimed tiles. One is written again two tiles later: by then its readers
# have released the Q of its tile.
SLOTS = 2


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """Numbers the Q tiles and gives each of them to a CTA.

    Attributes:
        batch, heads, q_tiles: number of each.
        swizzle_heads: number of heads worked on together (their K and V stay in L2).
        longest_first: causal: tiles of these heads run from the last Q tile to the first.
        num_ctas: number of CTAs.
        uses_table: CTAs go through the lists of `table`.
        dynamic: CTAs claim tiles instead of going through a list.
        has_lists: the tiles have lists of keys, with an order that is followed.
        interpret: run by the interpreter, where every CTA claims every `num_ctas`-th tile.
    """

    batch: int
    heads: int
    q_tiles: int
    swizzle_heads: int
    longest_first: bool
    num_ctas: int
    uses_table: bool
    dynamic: bool
    interpret: bool
    has_lists: bool = False

    @classmethod
    def of(
        cls, problem: Problem, tile_rows: int, num_ctas: int | None, dynamic: bool, interpret: bool
    ) -> TileScheduler:
        """Chooses the schedule of a problem's tiles.

        Q tiles are fastest where most cost the same. If causal, heads are fastest, and the longest
        tiles come first.

        Args:
            problem: a problem with native head dims.
            tile_rows: number of query rows in a tile.
            num_ctas: number of persistent CTAs, of which some may be teams of one; None: a CTA for
                each tile.
            dynamic: CTAs claim tiles.
            interpret: run by the interpreter.
        """
        q_tiles, heads = -(-problem.q_len // tile_rows), problem.batch * problem.q_heads
        num_tiles, mask = heads * q_tiles, problem.spec.mask
        # Neighbouring tiles of a window share keys, and all but the first have equally many.
        windowed = mask.left is not None and 2 * mask.left < problem.kv_len
        longest_first = not (mask.right is None or windowed or problem.is_listed)
        swizzle_heads = 1
        if longest_first:
            kv_bytes = problem.kv_len * (problem.head_dim + problem.v_head_dim) * 2
            swizzle_heads = max(problem.group, min(heads, SWIZZLE_BYTES // max(kv_bytes, 1)))
            while heads % swizzle_heads:
                swizzle_heads -= 1
        return cls(
            batch=problem.batch,
            heads=problem.q_heads,
            q_tiles=q_tiles,
            swizzle_heads=swizzle_heads,
            longest_first=longest_first,
            num_ctas=num_tiles if num_ctas is None else min(num_ctas, num_tiles),
            uses_table=num_ctas is not None and longest_first and num_tiles <= MAX_TABLE_TILES,
            dynamic=dynamic,
            interpret=interpret,
            has_lists=problem.is_listed,
        )

    @property
    def num_tiles(self) -> int:
        """Number of tiles, of all batch entries and heads."""
        return self.batch * self.heads * self.q_tiles

    def tile(self, number) -> tuple[Any, Any, Any]:
        """Returns (batch, head, Q block) of a tile; its number is a Python int or traced int32."""
        swizzle = self.swizzle_heads * self.q_tiles
        first, within = ints.floor_div(number, swizzle), ints.remainder(number, swizzle)
        block = ints.floor_div(within, self.swizzle_heads)
        if self.longest_first:
            block = self.q_tiles - 1 - block
        head = first * self.swizzle_heads + ints.remainder(within, self.swizzle_heads)
        return ints.floor_div(head, self.heads), ints.remainder(head, self.heads), block

    def table(self, cost_of_block: Callable) -> np.ndarray:
        """Returns the table, an operand of the kernel; cost_of_block(Q block) is in KV blocks."""
        if not self.uses_table:
            return np.zeros((1, 1), np.int32)
        per_block = np.array([cost_of_block(i) for i in range(self.q_tiles)])
        costs = [per_block[self.tile(number)[2]] + 1.0 for number in range(self.num_tiles)]
        return list_schedule(np.array(costs), self.num_ctas)

    def ordered(self, lists: BlockLists) -> BlockLists:
        """Returns the lists of all tiles, with their order; one past the last can be claimed."""
        lists = tile_lists.ordered(lists, self.batch, self.heads)
        past = jnp.full(self.num_ctas, self.num_tiles, jnp.int32)
        return lists._replace(order=jnp.concatenate([lists.order, past]))

    # --- in the kernel: `cta` is a ForwardCta, and its n-th tile is counted from 0 ----------------

    def count(self, cta):
        """Returns how many tiles are listed for this CTA."""
        if self.uses_table:
            return cta.gmem.table[cta.index, 0]
        least, rest = divmod(self.num_tiles, self.num_ctas)
        return jnp.int32(least) + (cta.index < rest).astype(jnp.int32) if rest else jnp.int32(least)

    def listed(self, cta, n):
        """Returns the number of the CTA's n-th tile; of any tile where it has fewer."""
        if self.uses_table:
            return cta.gmem.table[cta.index, n + 1]
        number = lax.min(n * self.num_ctas + cta.index, jnp.int32(self.num_tiles - 1))
        return cta.gmem.lists.order[number] if self.has_lists else number

    def after(self, cta, n):
        """Returns (number of the tile after the n-th of the list, whether there is one)."""
        n, count = n + 1, self.count(cta)
        return self.listed(cta, n), n < count

    def first(self, cta):
        """Returns the number of the CTA's first tile."""
        if self.dynamic and not self.has_lists:
            return jnp.int32(cta.index)
        return self.listed(cta, jnp.int32(0))

    def exists(self, cta, number):
        """Returns whether there is a tile with this number; one past the last can be claimed."""
        return number < self.num_tiles

    def claim(self, cta, n):
        """Claims (producer) the tile after the n-th; returns (its number, whether it exists)."""
        if not self.dynamic:
            return self.after(cta, n)
        slot = lax.rem(n + 1, jnp.int32(SLOTS))
        target = cta.smem.tile_numbers.at[slot]
        if self.interpret:
            number = jnp.int32((n + 1) * self.num_ctas + cta.index)
            if self.has_lists:
                number = cta.gmem.lists.order[number]
            cta.smem.tile_numbers[slot] = jnp.full((1,), number)
        else:
            order = cta.gmem.lists.order if self.has_lists else None
            number = tile_claims.claim(self.num_ctas, cta.counter, target, order)
            if not self.has_lists:
                number = number + jnp.int32(self.num_ctas)
        plgpu.barrier_arrive(cta.smem.tile_full.at[slot])
        return number, self.exists(cta, number)

    def claim_ahead(self, cta, n):
        """Does nothing; a subclass may claim here, before it loads the n-th tile, for `claimed`."""

    def claimed(self, cta, n):
        """Returns what `claim` returns; called when the n-th tile has been loaded."""
        return self.claim(cta, n)

    def following(self, cta, n):
        """Waits for what the producer's `claim` returns, in a compute warpgroup once per tile."""
        if not self.dynamic:
            return self.after(cta, n)
        slot = lax.rem(n + 1, jnp.int32(SLOTS))
        plgpu.barrier_wait(cta.smem.tile_full.at[slot])
        number = cta.smem.tile_numbers[slot, 0]
        if not self.interpret and not self.has_lists:
            number = number + jnp.int32(self.num_ctas)
        return number, self.exists(cta, number)

    def each(self, cta, body: Callable, carry):
        """Runs carry, (number, _) = body(n, number, carry) for each tile; returns the last carry.

        body's (number, _) are those of `claim` or `following`.
        """
        if not self.dynamic:
            count = self.count(cta)
            step = lambda n, carry: body(n, self.listed(cta, n), carry)[0]
            return lax.fori_loop(jnp.int32(0), count, step, carry)

        def claimed(state):
            n, number, carry = state
            carry, (number, _) = body(n, number, carry)
            return n + 1, number, carry

        more = lambda state: self.exists(cta, state[1])
        return lax.while_loop(more, claimed, (jnp.int32(0), self.first(cta), carry))[2]


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


def with_counter(kernel: Callable, results):
    """Calls kernel(counter) with a new counter in device memory, int32[1] that starts at 0.

    Args:
        kernel: function that returns arrays.
        results: shapes and dtypes of these arrays, a pytree.
    """

    return with_state(kernel, jnp.zeros((1,), jnp.int32), results)[1]


def with_state(kernel: Callable, state, results):
    """Calls kernel(refs of `state`), which may change it in place.

    Args:
        kernel: function that returns arrays.
        state: arrays, a pytree.
        results: shapes and dtypes of what the kernel returns, a pytree.

    Returns:
        (`state` after the call, what the kernel returned).
    """

    def run(refs):
        changed, out = refs
        arrays = jax.tree.leaves(kernel(changed))
        for ref, array in zip(jax.tree.leaves(out), arrays, strict=True):
            ref[...] = array

    # The results are overwritten, and XLA drops their zeros.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
    return pl.run_state(run)((state, zeros))
