"""Schedules: which CTA works on which Q tile, and in which order."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf

from ....core import integers as ints
from ....core.problem import Problem
from ...gpu.inline import i32_constant
from ..common.pipeline import WARPGROUP

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


SLOTS = 2  # that of the tile before last has been read: its reader has since released its Q


@dataclasses.dataclass(frozen=True)
class TileQueue:
    """The tiles of a CTA, one after the other.

    Attributes:
        assignment: the list of tiles, or the order in which they are claimed.
        claims: tiles are claimed, not listed.
        interpret: run by the interpreter, where every CTA claims every `ctas`-th tile.
    """

    assignment: Assignment
    claims: bool
    interpret: bool

    def first(self, cta):
        """Returns the number of the CTA's first tile."""
        if self.claims:
            return jnp.int32(cta.index)
        return self.assignment.tile(cta.gmem.table, cta.index, jnp.int32(0))

    def claim(self, cta, turn):
        """Claims (producer) the tile after the turn-th; returns (its number, whether it exists)."""
        if not self.claims:
            return self.listed(cta, turn + 1)
        slot, total = lax.rem(turn + 1, jnp.int32(SLOTS)), self.assignment.order.total
        place = cta.smem.tiles.at[slot]
        if self.interpret:
            number = jnp.int32((turn + 1) * self.assignment.ctas + cta.index)
            cta.smem.tiles[slot] = jnp.full((1,), number)
        else:
            run = plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.RefType()),
                return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
            )
            number = run(_claim_body)(cta.counter, place) + jnp.int32(self.assignment.ctas)
        plgpu.barrier_arrive(cta.bars.tile_full.at[slot])
        return number, number < total

    def following(self, cta, turn):
        """Waits for what the producer's `claim` returns, in a compute warpgroup once per turn."""
        if not self.claims:
            return self.listed(cta, turn + 1)
        slot = lax.rem(turn + 1, jnp.int32(SLOTS))
        plgpu.barrier_wait(cta.bars.tile_full.at[slot])
        number = cta.smem.tiles[slot, 0]
        if not self.interpret:
            number = number + jnp.int32(self.assignment.ctas)
        return number, number < self.assignment.order.total

    def listed(self, cta, turn):
        """Returns (number of the turn-th tile of the list, whether there is one)."""
        turns = self.assignment.count(cta.gmem.table, cta.index)
        return self.assignment.tile(cta.gmem.table, cta.index, turn), turn < turns

    def each(self, cta, body: Callable, carry):
        """Runs carry, (number, _) = body(turn, number, carry) per tile; returns the last carry."""
        if not self.claims:
            turns = self.assignment.count(cta.gmem.table, cta.index)
            step = lambda turn, carry: body(turn, self.listed(cta, turn)[0], carry)[0]
            return lax.fori_loop(jnp.int32(0), turns, step, carry)

        def claimed(state):
            turn, number, carry = state
            carry, (number, _) = body(turn, number, carry)
            return turn + 1, number, carry

        more = lambda state: state[1] < self.assignment.order.total
        return lax.while_loop(more, claimed, (jnp.int32(0), self.first(cta), carry))[2]


def with_counter(kernel: Callable, results):
    """Calls kernel(counter) with a new counter in device memory, int32[1] that starts at 0.

    Args:
        kernel: function that returns arrays.
        results: shapes and dtypes of these arrays.
    """

    def run(refs):
        counter, *out = refs
        for ref, result in zip(out, kernel(counter), strict=True):
            ref[...] = result

    # Only the counter is set to 0: the results are overwritten, and XLA drops their zeros.
    zeros = [jnp.zeros(x.shape, x.dtype) for x in results]
    return pl.run_state(run)((jnp.zeros((1,), jnp.int32), *zeros))[1:]


def _claim_body(_, counter, place):
    """Adds 1 to the counter and returns what it was, to all threads and in shared memory."""
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    zero = arith.constant(index, 0)
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, thread, i32_constant(0)))
    with ir.InsertionPoint(branch.then_block):
        pointer = mgpu.utils.memref_ptr(counter)
        old = llvm.inline_asm(
            i32, [pointer], "atom.global.add.u32 $0, [$1], 1;", "=r,l", has_side_effects=True
        )
        memref.store(old, place, [zero])
        scf.yield_([])
    mgpu.utils.warpgroup_barrier()
    number = memref.load(place, [zero])
    return mgpu.FragmentedArray.splat(number, (), is_signed=True)
