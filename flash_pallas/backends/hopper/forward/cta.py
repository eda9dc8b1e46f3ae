"""The Q tiles of a CTA: how it gets them, and its refs and KV blocks for one of them.

A CTA that is not persistent has one tile. A persistent one has every `num_ctas`-th tile; if causal,
the tiles of a table that is computed at trace time; where arrays decide what a tile costs, those
that it claims from a counter in device memory. Where lists of keys say what a tile costs, tiles
with long lists come first: see longest_first in core/block_lists.py.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import block_lists, bounds
from ....core import integers as ints
from ....core.mask import Limits, Mask
from ....core.problem import Operands, Outputs, Problem
from ....core.scores import TileInputs
from ...gpu import auxiliary_arrays
from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.ptx import tile_claims
from ...gpu.ptx.online_softmax import far_of
from ...gpu.score_tile import RegisterTile
from ..common import tile_lists
from ..common.auxiliary_inputs import AuxiliaryInputs, Place
from ..common.pipeline import Matmuls, Padding, Ring, loader, rows_of
from ..common.tile_lists import TileList
from .tiles import SLOTS, ForwardBlocks, ForwardSmem, claims_tiles

# --- The order of the tiles -----------------------------------------------------------------------

# K and V of the heads worked on at one time should stay in the 50 MB L2; 16 MB measured best on
# H200 for causal attention (all 16 heads at once, 33 MB at T = 4k: 5 % slower).
SWIZZLE_BYTES = 16 << 20

# Above this many tiles the list schedule is not worth its size: round-robin over tiles sorted by
# length is then within one tile of balanced.
MAX_TABLE_TILES = 1 << 16


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


# --- The plan of a launch, the refs of a CTA, its Q tiles and the KV blocks they read -------------


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """Everything about a launch that is known at trace time; `of` makes it.

    Attributes:
        problem: the attention problem that is computed.
        blocks: tile sizes, with the options that the problem can have.
        interpret: run by the interpreter, where every CTA claims every `num_ctas`-th tile.
        aux: the auxiliary inputs: what modifiers read besides Q, K and V.
        matmuls: products of operands of the call's dtype.
        far: magnitude of logits (base 2) beyond which rows need a shift; 0: none can be so large.
        q_tiles: number of Q tiles of a head.
        num_tiles: number of those of all batch entries and heads.
        num_ctas: number of CTAs, or of teams where a CTA has several.
        longest_first: causal: tiles of these heads run from the last Q tile to the first.
        swizzle_heads: number of heads worked on together (their K and V stay in L2).
        uses_table: CTAs go through the lists of `table`.
        claims: CTAs claim tiles instead of going through a list.
        claims_ahead: a tile is claimed before the one before it is loaded.
        tangent_aux: AuxiliaryInputs of the tangents of `aux`; None but in tangent/kernel.py.
    """

    problem: Problem
    blocks: ForwardBlocks
    interpret: bool
    aux: AuxiliaryInputs
    matmuls: Matmuls
    far: float
    q_tiles: int
    num_tiles: int
    num_ctas: int
    longest_first: bool
    swizzle_heads: int
    uses_table: bool
    claims: bool
    claims_ahead: bool = False
    tangent_aux: Any = None

    @classmethod
    def of(
        cls,
        problem: Problem,
        blocks: ForwardBlocks,
        interpret: bool,
        most_ctas: int | None = None,
        **others: Any,
    ) -> Self:
        """Plans a launch.

        Q tiles are fastest where most cost the same. If causal, heads are fastest, and the longest
        tiles come first.

        Args:
            problem: a problem with native head dims.
            blocks: tile sizes, with the options that the problem can have.
            interpret: run by the interpreter.
            most_ctas: number of persistent CTAs, of which some may be teams of one; None: a CTA for
                each tile.
            **others: the fields with defaults.
        """
        q_tiles, heads = -(-problem.q_len // blocks.tile_rows), problem.batch * problem.q_heads
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
            problem,
            blocks,
            interpret,
            aux=AuxiliaryInputs(problem, q_axis=0),
            matmuls=Matmuls(problem.dtype, interpret),
            far=far_of(problem.spec, problem.dtype),
            q_tiles=q_tiles,
            num_tiles=num_tiles,
            num_ctas=num_tiles if most_ctas is None else min(most_ctas, num_tiles),
            longest_first=longest_first,
            swizzle_heads=swizzle_heads,
            uses_table=most_ctas is not None and longest_first and num_tiles <= MAX_TABLE_TILES,
            claims=claims_tiles(problem, blocks),
            **others,
        )

    def tile(self, number) -> tuple[Any, Any, Any]:
        """Returns (batch, head, Q block) of a tile; its number is a Python int or traced int32."""
        swizzle, heads = self.swizzle_heads * self.q_tiles, self.problem.q_heads
        first, within = ints.floor_div(number, swizzle), ints.remainder(number, swizzle)
        block = ints.floor_div(within, self.swizzle_heads)
        if self.longest_first:
            block = self.q_tiles - 1 - block
        head = first * self.swizzle_heads + ints.remainder(within, self.swizzle_heads)
        return ints.floor_div(head, heads), ints.remainder(head, heads), block

    def table(self) -> np.ndarray:
        """Returns the `list_schedule` of all CTAs; a tile costs its number of KV blocks."""
        if not self.uses_table:
            return np.zeros((1, 1), np.int32)
        starts = range(0, self.q_tiles * self.blocks.tile_rows, self.blocks.tile_rows)
        offset = self.problem.spec.q_offset
        per_block = np.array([self.kv_tile_range(start + offset)[1] for start in starts])
        costs = [per_block[self.tile(number)[2]] + 1.0 for number in range(self.num_tiles)]
        return list_schedule(np.array(costs), self.num_ctas)

    def arrays(self, operands: Operands) -> ForwardGmem:
        """Returns the operands as the kernel reads them, but for `padding`."""
        problem, sizes = self.problem, (self.blocks.tile_rows, self.blocks.block_kv)
        lists = kv_bounds = kv_whole = None
        if problem.is_listed:
            lists = block_lists.of_queries(problem, operands, sizes)
            lists = tile_lists.ordered(lists, problem.batch, problem.q_heads)
            past = jnp.full(self.num_ctas, self.num_tiles, jnp.int32)  # these can be claimed too
            lists = lists._replace(order=jnp.concatenate([lists.order, past]))
        elif problem.is_dynamic:
            kv_bounds = bounds.kv_bounds(problem, operands, *sizes)
            if problem.hides_by_arrays:
                kv_whole = bounds.kv_whole(operands, WARPGROUP_ROWS, sizes[1])
        return ForwardGmem(
            operands.q,
            operands.k,
            operands.v,
            table=jnp.asarray(self.table()),
            q_offset=operands.q_offset,
            kv_bounds=kv_bounds,
            kv_whole=kv_whole,
            lists=lists,
            aux=self.aux.arrays(operands),
        )

    def kv_tile_range(self, position):
        """Returns (first, count) of the KV blocks of a tile whose first query is at `position`."""
        kv_len, block_kv, mask = self.problem.kv_len, self.blocks.block_kv, self.problem.spec.mask
        kv_range = mask.kv_blocks(position, self.blocks.tile_rows, kv_len, block_kv)
        if mask.left is None:
            return 0, ints.maximum(kv_range.stop, 1)
        start = ints.minimum(kv_range.start, -(-kv_len // block_kv) - 1)
        return start, ints.maximum(kv_range.stop - start, 1)

    def whole_kv_tiles(self, position):
        """Returns (first, one past the last) of the KV blocks that a warpgroup sees whole.

        The first query of the warpgroup is at `position`. The end of the keys does not count as an
        edge: where the keys end, the block is the tile's last, which is masked anyway.
        """
        block_kv = self.blocks.block_kv
        kv_len = ints.round_up(self.problem.kv_len, block_kv)
        kv_range = self.problem.spec.mask.kv_blocks(position, WARPGROUP_ROWS, kv_len, block_kv)
        return kv_range.full_start, kv_range.full_stop

    def masked_edges(self) -> tuple[bool, bool]:
        """Returns whether some warpgroup masks KV blocks (left, right) of those that it sees whole.

        The tile's last block does not count, because it is always masked.
        """
        spec, rows = self.problem.spec, self.blocks.tile_rows
        if self.problem.traced_offset:
            return spec.mask.left is not None, spec.mask.right is not None
        left = right = False
        for row in range(0, self.problem.q_len, WARPGROUP_ROWS):
            start, count = self.kv_tile_range(row // rows * rows + spec.q_offset)
            full_start, full_stop = self.whole_kv_tiles(row + spec.q_offset)
            last = start + count - 1
            left |= min(full_start, last) > start
            right |= full_stop < last
        return left, right


PER_ROW = ("lse_log2", "shift", "max_logit")  # the results of one value a row


class ForwardGmem(NamedTuple):
    """Operands in device memory."""

    q: Any  # [B, T, N, H], an operand of Matmuls, as are k and v
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    table: Any  # int32, see ForwardPlan.table
    q_offset: Any = None  # int32[B]; None unless it is traced
    kv_bounds: Any = None  # int32[B, Q tiles, 2], see core/bounds.py; None where arithmetic says
    kv_whole: Any = None  # int32[B, T / 64, 2], see core/bounds.py, where problem.hides_by_arrays
    lists: Any = None  # BlockLists of Q tiles, in place of both; None unless problem.is_listed
    padding: Padding | None = None  # of the keys
    aux: auxiliary_arrays.AuxiliaryGmem = auxiliary_arrays.AuxiliaryGmem()
    tangents: Any = None  # TangentTiles of these operands; None but in tangent/kernel.py
    ragged: Any = None  # RaggedGmem; None but in ragged/kernel.py


class TangentTiles(NamedTuple):
    """Tangents of a call's operands, which are loaded with them; in device or in shared memory."""

    q: Any
    k: Any
    v: Any
    aux: Any  # AuxiliaryGmem or Streamed; what of it has no tangent is None


class QTile(NamedTuple):
    """A Q tile and the KV blocks that it reads."""

    batch: Any
    head: Any
    block: Any  # index of the Q tile
    position: Any  # of the tile's first query
    kv_start: Any  # first of its KV blocks; the int 0 where all tiles start there
    kv_blocks: Any  # how many; at least one, so that every tile writes its output
    used: Any = 0  # uses of the K and V rings before its first block
    fragments: Any = None  # TileInputs, the auxiliary inputs of a warpgroup's rows
    listed: TileList | None = None  # its KV blocks, where lists say which they are
    ragged: Any = None  # TileRow of ragged/tiles.py; None but in ragged/kernel.py
    # Of a step:
    step_block: Any = None  # its KV block; with lists it is looked up early
    inputs: Any = None  # TileInputs of that block
    edges: str = "last"  # what may hide its keys, as for ForwardCta.limits

    @property
    def kv_stop(self):
        """One past the last KV block of the tile."""
        return self.kv_blocks if isinstance(self.kv_start, int) else self.kv_start + self.kv_blocks

    def kv_block(self, j):
        """Returns the index of the j-th KV block: from the right, or in the order of its list."""
        if self.listed is None:
            return self.kv_stop - 1 - j
        return self.listed[j] if self.step_block is None else self.step_block


class ForwardRows(NamedTuple):
    """State of its rows that a warpgroup carries from step to step."""

    p: Any  # Matmuls.split of the weights of the block whose PV is still to be issued
    maxima: Any  # Maxima of 64 rows; None in a bounded softmax
    l: Any  # f32[64, 8] running sums of each thread's own columns
    # f32[64], bits of gpu/ptx/online_softmax.py; None unless the softmax is bounded
    only: Any = None


@dataclasses.dataclass(frozen=True)
class ForwardCta:
    """One CTA, as one of its warpgroups sees it: the plan and all refs.

    With several teams, each of them is a ForwardCta.

    Attributes:
        plan: the plan of the launch.
        gmem: operands in device memory.
        out: results in device memory, their rows those of whole tiles: o [B, T, N, Hv], an operand
            of Matmuls, the others f32[B, N, rows] or None.
        smem: shared memory and barriers.
        k, v: the rings of K and V.
        index: index of the CTA.
        wg: index of the warpgroup.
        counter: int32[1] in device memory, of tiles claimed beyond the first of each CTA; or None.
    """

    plan: ForwardPlan
    gmem: ForwardGmem
    out: Outputs
    smem: ForwardSmem
    k: Ring
    v: Ring
    index: Any
    wg: Any
    counter: Any

    @property
    def running_shift(self):
        """This warpgroup's shift in shared memory; None: it is in registers, or there is none."""
        kept = self.smem.running_shift
        return None if kept is None else kept.at[self.wg]

    # --- which tiles are its own: the n-th is counted from 0 --------------------------------------

    def num_listed(self):
        """Returns how many tiles are listed for this CTA."""
        plan = self.plan
        if plan.uses_table:
            return self.gmem.table[self.index, 0]
        least, rest = divmod(plan.num_tiles, plan.num_ctas)
        fewest = jnp.int32(least)
        return fewest + (self.index < rest).astype(jnp.int32) if rest else fewest

    def listed_tile(self, n):
        """Returns the number of the n-th tile; of any tile where there are fewer."""
        plan = self.plan
        if plan.uses_table:
            return self.gmem.table[self.index, n + 1]
        number = lax.min(n * plan.num_ctas + self.index, jnp.int32(plan.num_tiles - 1))
        return self.gmem.lists.order[number] if plan.problem.is_listed else number

    def first_tile(self):
        """Returns the number of the first tile."""
        if self.plan.claims and not self.plan.problem.is_listed:
            return jnp.int32(self.index)
        return self.listed_tile(jnp.int32(0))

    def exists(self, number):
        """Returns whether there is a tile with this number; one past the last can be claimed."""
        return number < self.plan.num_tiles

    def claim(self, n):
        """Claims (producer) the tile after the n-th; returns (its number, whether it exists)."""
        plan, smem, lists = self.plan, self.smem, self.gmem.lists
        if not plan.claims:
            return self.following(n)
        slot = lax.rem(n + 1, jnp.int32(SLOTS))
        target = smem.tile_numbers.at[slot]
        if plan.interpret:
            number = jnp.int32((n + 1) * plan.num_ctas + self.index)
            if lists is not None:
                number = lists.order[number]
            smem.tile_numbers[slot] = jnp.full((1,), number)
        else:
            order = None if lists is None else lists.order
            number = tile_claims.claim(plan.num_ctas, self.counter, target, order)
            if lists is None:
                number = number + jnp.int32(plan.num_ctas)
        plgpu.barrier_arrive(smem.tile_full.at[slot])
        return number, self.exists(number)

    def following(self, n, *, wait: bool = True):
        """Returns what the producer's `claim` returns: (number of the tile, whether it exists).

        A compute warpgroup waits for it, once per tile. The producer does not.
        """
        if not self.plan.claims:
            n, count = n + 1, self.num_listed()
            return self.listed_tile(n), n < count
        slot = lax.rem(n + 1, jnp.int32(SLOTS))
        if wait:
            plgpu.barrier_wait(self.smem.tile_full.at[slot])
        number = self.smem.tile_numbers[slot, 0]
        if not self.plan.interpret and self.gmem.lists is None:
            number = number + jnp.int32(self.plan.num_ctas)
        return number, self.exists(number)

    def each_tile(self, body: Callable, carry, acc=None):
        """Runs carry, (number, _) = body(n, number, carry) for each tile.

        Args:
            body: what runs; its (number, _) are those of `claim` or `following`.
            carry: of the first tile.
            acc: an accumulator, whose ref each call of `body` gets as well; None: there is none.

        Returns:
            The carry after the last tile.
        """
        if not self.plan.claims:

            def listed(n, carry):
                call = functools.partial(body, n, self.listed_tile(n), carry)
                return (call() if acc is None else pl.run_scoped(call, acc))[0]

            return lax.fori_loop(jnp.int32(0), self.num_listed(), listed, carry)

        def claimed(state):
            n, number, carry = state
            call = functools.partial(body, n, number, carry)
            carry, (number, _) = call() if acc is None else pl.run_scoped(call, acc)
            return n + 1, number, carry

        more = lambda state: self.exists(state[1])
        return lax.while_loop(more, claimed, (jnp.int32(0), self.first_tile(), carry))[2]

    # --- what it reads and sees of a tile ---------------------------------------------------------

    def q_tile(self, number) -> QTile:
        """Returns the Q tile with this number; for a number past the last one, any."""
        plan = self.plan
        if plan.claims:
            number = lax.min(number, jnp.int32(plan.num_tiles - 1))
        # Traced: a static start past the array's end would be refused.
        batch, head, block = map(jnp.int32, plan.tile(number))
        offset = plan.problem.spec.q_offset
        if plan.problem.traced_offset:
            offset = self.gmem.q_offset[batch]
        position, listed = block * plan.blocks.tile_rows + offset, None
        if plan.problem.is_listed:
            listed = TileList.of(plan.problem, self.gmem.lists, (batch, head, block))
            start, count = 0, listed.steps
        elif plan.problem.is_dynamic:
            start, stop = (self.gmem.kv_bounds[batch, block, end] for end in (0, 1))
            count = lax.max(stop - start, jnp.int32(1))
        else:
            start, count = plan.kv_tile_range(position)
        return QTile(
            batch, head, block, jnp.int32(position), start, jnp.int32(count), listed=listed
        )

    def zones(self, tile: QTile):
        """Returns the loops over KV blocks, from the right: [(edges, first, one past the last)].

        `edges` says what may hide keys of these blocks, as for `limits`.
        """
        first, last = jnp.int32(1), tile.kv_blocks
        if tile.listed is not None:
            plain = lax.clamp(first, tile.listed.partial, last)
            return [("all", first, plain), ("none", plain, last)]
        if self.plan.problem.hides_by_arrays:
            return self.zones_by_arrays(tile)
        left, right = self.plan.masked_edges()
        if not left and not right:
            return [("none", first, last)]
        full_start, full_stop = map(jnp.int32, self.whole_kv_tiles(tile))
        zones, plain = [], first
        if right:
            plain = lax.clamp(first, tile.kv_stop - full_stop, last)
            zones.append(("right", first, plain))
        if not left:
            return [*zones, ("none", plain, last)]
        masked = lax.clamp(plain, tile.kv_stop - full_start, last)
        return [*zones, ("none", plain, masked), ("left", masked, last)]

    def zones_by_arrays(self, tile: QTile):
        """Returns `zones` where arrays hide keys: only blocks of bounds.kv_whole are not masked."""
        first, last = jnp.int32(1), tile.kv_blocks
        # The last warpgroups of the last tile may have no rows.
        rows = lax.min(
            tile.block * self.plan.blocks.warpgroups + self.wg,
            jnp.int32(self.gmem.kv_whole.shape[1] - 1),
        )
        start, stop = (self.gmem.kv_whole[tile.batch, rows, end] for end in (0, 1))
        if not self.plan.problem.spec.mask.is_trivial:
            full_start, full_stop = map(jnp.int32, self.whole_kv_tiles(tile))
            start, stop = lax.max(start, full_start), lax.min(stop, full_stop)
        plain = lax.clamp(first, tile.kv_stop - stop, last)
        masked = lax.clamp(plain, tile.kv_stop - start, last)
        return [("all", first, plain), ("none", plain, masked), ("all", masked, last)]

    def whole_kv_tiles(self, tile: QTile):
        """Returns `ForwardPlan.whole_kv_tiles` of this warpgroup's rows."""
        return self.plan.whole_kv_tiles(tile.position + self.wg * WARPGROUP_ROWS)

    def row_fragments(self, tile: QTile) -> TileInputs:
        """Loads the auxiliary inputs that this warpgroup's rows of a Q tile keep in registers."""
        blocks = self.plan.blocks
        row = tile.block * blocks.tile_rows + self.wg * WARPGROUP_ROWS
        place = Place(tile.batch, tile.head, row, 0, WARPGROUP_ROWS, blocks.block_kv)
        return self.plan.aux.fragments(self.gmem.aux, place)

    def score_tile(self, tile: QTile, kv_block) -> RegisterTile:
        """Returns the place of this warpgroup's scores [64, block_kv] of a KV block."""
        plan, block_kv = self.plan, self.plan.blocks.block_kv
        q_start = tile.position + self.wg * WARPGROUP_ROWS
        kv_start, shape = kv_block * block_kv, (WARPGROUP_ROWS, block_kv)
        precise = plan.problem.dtype == jnp.float32
        return RegisterTile(q_start, kv_start, shape, interpret=plan.interpret, precise=precise)

    def limits(self, tile: QTile, kv_block, edges: str) -> Limits:
        """Returns the limits of what this warpgroup's rows see of a KV block.

        Args:
            tile: the Q tile.
            kv_block: index of the KV block.
            edges: what may hide keys of the block: "last" (it may reach past the last key), "left",
                "right", "all" (arrays and both edges) or "none".
        """
        place, mask = self.score_tile(tile, kv_block), self.plan.problem.spec.mask
        if edges == "none":
            return Limits()
        if edges == "last":
            kv_len = self.ragged_len(tile)
            if tile.listed is not None:
                kv_len = self.plan.problem.kv_len if kv_len is None else kv_len
                kv_len = tile.listed.keys_seen(kv_len)
            return place.limits(mask, kv_len)
        if edges == "all":  # the last block may stand anywhere in a list
            return place.limits(mask, None if tile.listed is None else self.ragged_len(tile))
        # A band wider than a tile's diagonals never hides keys of one tile on both its sides.
        left, right = mask.left, mask.right
        if left is not None and right is not None and left + right >= sum(place.shape):
            mask = Mask(left=left) if edges == "left" else Mask(right=right)
        return place.limits(mask)

    def ragged_len(self, tile: QTile):
        """Returns where the keys end; None if that is at the end of a block."""
        kv_len = self.plan.problem.kv_len
        if "kv_lengths" in self.plan.problem.features:
            return lax.min(self.gmem.aux.kv_lengths[tile.batch], jnp.int32(kv_len))
        return kv_len if kv_len % self.plan.blocks.block_kv else None

    def moving(self, name: str) -> list[tuple[Any, Any]]:
        """Returns the refs (device memory, shared memory) of q, k or v, and of its tangent."""
        pairs = [(self.gmem, self.smem), (self.gmem.tangents, self.smem.tangents)]
        return [
            (getattr(gmem, name), getattr(smem, name)) for gmem, smem in pairs if gmem is not None
        ]

    # --- where Q rows, keys and results lie -------------------------------------------------------

    def rows_at(self, tile: QTile, wg):
        """Returns the index of a warpgroup's rows in q and o: (batch, rows, head)."""
        first_row = tile.block * self.plan.blocks.tile_rows + wg * WARPGROUP_ROWS
        return tile.batch, pl.ds(first_row, WARPGROUP_ROWS), tile.head

    def keys_at(self, tile: QTile, block):
        """Returns the index of a KV block in k and v: (batch, keys, head)."""
        block_kv = self.plan.blocks.block_kv
        keys = pl.ds(block * block_kv, block_kv)
        return tile.batch, keys, lax.div(tile.head, jnp.int32(self.plan.problem.group))

    def copy_k(self, keys, slot, full):
        """Issues the copies of a block of K, at `keys_at`, into its slot."""
        for source, target in self.moving("k"):
            plgpu.copy_gmem_to_smem(rows_of(source, keys, target), target.at[slot], full)

    def copy_v(self, tile: QTile, block, keys, slot, full):
        """Issues the copies of a block of V, at `keys_at`, into its slot; zeroes its padding."""
        plan = self.plan
        width, rows = plan.problem.v_head_dim, plan.blocks.block_kv
        swizzle = plan.matmuls.swizzle(width, self.gmem.v, summed_rows=rows)
        load = loader(self.gmem.padding, self.smem.v_arrived, swizzle, plan.interpret)
        for source, target in self.moving("v"):
            load(rows_of(source, keys, target), target.at[slot], full, tile.batch, block)

    def store_rows(self, tile: QTile, wg, staging):
        """Issues the copies of a warpgroup's results: O, which is in `staging`, and its rows."""
        batch, rows, head = index = self.rows_at(tile, wg)
        plgpu.copy_smem_to_gmem(staging.at[wg], rows_of(self.out.o, index, staging))
        for name in PER_ROW:
            buffer, target = getattr(self.smem, name), getattr(self.out, name)
            if buffer is not None:
                plgpu.copy_smem_to_gmem(buffer.at[wg], target.at[batch, head, rows])

    def wait_pv(self, o_acc, use):
        """Waits for PV of the block before ring position `use`, releases its V, and returns O."""
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        self.v.release(use - 1)
        return o
