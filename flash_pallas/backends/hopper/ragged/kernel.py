"""The forward kernel over packed queries, with K and V in pages: chunks of prompts.

The loops, the softmax, the ping-pong and the epilogues are those of forward/kernel.py. What differs
is where things lie, and who says which tiles there are:

    tiles      a table in device memory, made of cu_q_lens; a persistent CTA claims them one by one
    K, V       a block is some pages or a part of one; a copy each, which arrive on one barrier
    results    by TMA where all rows of a warpgroup are its sequence's; others row by row
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import ragged
from ....core.integers import round_up
from ....core.mask import Limits, Mask
from ....core.padding import pad_axis
from ....core.problem import Operands, Outputs
from ....core.ragged import RaggedBlocks, RaggedOperands, RaggedProblem, RaggedSpec
from ....core.scores import TileInputs
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ...gpu.ptx import inline
from ...gpu.ptx.cleared_rows import clear_from, clear_outside
from ...gpu.ptx.some_rows import Some
from ..common.pipeline import LENGTH_MULTIPLE
from ..decode.combine import CombineKernel
from ..decode.kernel import decode_packed, launched
from ..decode.plan import DecodePlan, DecodeResults, Packed
from ..decode.shared import decode_shared
from ..forward.cta import (
    PER_ROW,
    ForwardCta,
    ForwardGmem,
    ForwardPlan,
    QTile,
    with_state,
)
from ..forward.kernel import forward_teams
from ..forward.tiles import ForwardBlocks, claims_tiles
from .tiles import (
    EMPTY,
    TileRow,
    as_forward,
    chunk_tiles,
    most_tiles,
    piece_rows,
    scratch,
)

WARPS = 4  # of a warpgroup

# --- The launch -----------------------------------------------------------------------------------


def ragged_chunks(
    blocks: ForwardBlocks,
    problem: RaggedProblem,
    operands: RaggedOperands,
    num_sms: int,
    interpret: bool,
) -> Outputs:
    """Computes the rows of the sequences with more than `step_tokens` queries.

    Args:
        blocks: tile sizes, from `choose_chunk_blocks`.
        problem: a problem that has chunks and is not `unsupported_chunks`.
        operands: operands `in_range`.
        num_sms: number of SMs, for a persistent kernel.
        interpret: run by the interpreter.

    Returns:
        Outputs: o [tokens, N, Hv], 0 in rows of no sequence, lse_log2 and shift f32[N, tokens]. In
        other rows anything.
    """
    into = Into(None, jnp.zeros((1,), jnp.int32))
    return chunks_after_steps(blocks, problem, operands, num_sms, interpret, into)[0]


class Into(NamedTuple):
    """Arrays that the launch before this one leaves to it."""

    o: Any  # [tokens up to a LENGTH_MULTIPLE, N, Hv], to write into; None: a new one is made
    counter: Any  # int32[1], 0
    steps: StepShares | None = None  # that this launch joins; None: there are none


class StepShares(NamedTuple):
    """Results of steps of one token, of each split of their keys."""

    parts: DecodeResults
    sinks: Any  # f32[S, N], or None
    ends: Any  # int32[S + 1]: cu_q_lens


def chunks_after_steps(
    blocks: ForwardBlocks,
    problem: RaggedProblem,
    operands: RaggedOperands,
    num_sms: int,
    interpret: bool,
    into: Into,
    joins: CombineKernel | None = None,
) -> tuple[Outputs, Any]:
    """Does what `ragged_chunks` does after a launch for steps, whose shares it may have to join.

    Args:
        blocks: tile sizes, from `choose_chunk_blocks`.
        problem: as in `ragged_chunks`.
        operands: as in `ragged_chunks`.
        num_sms: number of SMs, for a persistent kernel.
        interpret: run by the interpreter.
        into: what the launch before leaves.
        joins: how to join `into.steps`.

    Returns:
        (Outputs as of `ragged_chunks`, with the rows of `into.o` or of the steps; None or with
        `joins` DecodeResults without o: f32[S, N, 1], anything for sequences that are no steps).
    """
    plan = RaggedPlan.of_chunks(problem, blocks, operands, num_sms, interpret, joins)
    forward, blocks = plan.problem, plan.blocks
    q = plan.matmuls.operand(operands.q[None], forward.head_dim)
    of_all = lambda x: None if x is None else pad_axis(x, 0, len(x) + EMPTY)
    aux_operands = Operands(
        *(q, None, None),
        sinks=of_all(operands.sinks),
        alibi_slopes=of_all(operands.alibi_slopes),
    )
    gmem = ForwardGmem(
        q,
        operands.k,
        operands.v,
        table=None,
        aux=plan.aux.arrays(aux_operands),
        ragged=RaggedGmem(
            operands.page_table,
            chunk_tiles(problem, operands, blocks.tile_rows),
            into.steps,
        ),
    )
    per_row = float32((1, forward.q_heads, q.shape[1]))
    o = jax.ShapeDtypeStruct((*q.shape[:3], forward.v_head_dim), forward.dtype)
    out = Outputs(
        o=o if into.o is None else None,
        lse_log2=per_row,
        shift=per_row if plan.far else None,
    )
    of_step = float32((problem.num_seqs, forward.q_heads, 1))
    rows = None if joins is None else DecodeResults(None, of_step, of_step)
    call = functools.partial(
        launch,
        out=(out, rows),
        scratch=(scratch(forward, blocks, plan.page_size, q, operands.v, o),),
        grid={"cta": plan.num_ctas},
        threads=blocks.warpgroups + blocks.producer,
        name="flash_pallas_ragged",
        interpret=interpret,
    )
    run = lambda state: call(functools.partial(ragged_cta, plan, state))(gmem)
    state = Into(
        None if into.o is None else into.o.reshape(o.shape),
        into.counter if plan.claims else None,
    )
    state, (outputs, rows) = with_state(run, state, (out, rows))
    all_o = outputs.o if state.o is None else state.o
    of_rows = lambda x: None if x is None else x[0, :, : problem.tokens]
    outputs = Outputs(all_o[0, : problem.tokens], of_rows(outputs.lse_log2), of_rows(outputs.shift))
    return outputs, rows


def attend_packed(
    blocks: RaggedBlocks, spec: RaggedSpec, operands: RaggedOperands, num_sms: int, interpret: bool
) -> Outputs | None:
    """Computes steps of one token and chunks of prompts, both in the rows of packed q and o.

    The chunks come second: by then the launch of the steps has set their counter to 0.

    Args:
        blocks: tile sizes, of `DecodeBlocks` and `ForwardBlocks`.
        spec: one with a step of one token.
        operands: the arrays of the call.
        num_sms: number of SMs.
        interpret: run by the interpreter.

    Returns:
        Outputs as of core.ragged.attend; None: these kernels do not share the prefixes.
    """
    step_operands = ragged.decode_operands(operands, operands.q)  # the kernel clips their lengths
    operands = ragged.in_range(operands)
    problem = ragged.describe(operands, spec)
    packed = Packed(operands.cu_q_lens, round_up(problem.tokens, LENGTH_MULTIPLE))
    plan = DecodePlan(problem.steps, blocks.steps, interpret)
    join, steps = CombineKernel(plan), None
    if spec.decode.shares_prefix:
        step_operands = step_operands._replace(prefix_lengths=operands.prefix_lengths)
        shared = decode_shared(spec.decode, step_operands, num_sms, interpret, packed)
        if shared is None:
            return None
        steps, counter = shared
    elif not join.joins_elsewhere:
        steps, counter = decode_packed(
            problem.steps, blocks.steps, step_operands, packed, interpret
        )
    chunks = functools.partial(
        chunks_after_steps, blocks.chunks, problem, operands, num_sms, interpret
    )
    if steps is not None:
        chunks, _ = chunks(Into(steps.o, counter))
    else:
        parts = launched(plan, step_operands, packed)
        shares = StepShares(parts._replace(counter=None), step_operands.sinks, packed.ends)
        chunks, rows = chunks(Into(None, parts.counter, shares), join)
        steps = Outputs(None, rows.lse, rows.shift)
    step_o = jnp.zeros((problem.num_seqs, 1, *chunks.o.shape[1:]), chunks.o.dtype)  # XLA drops it
    return ragged.join(spec, operands, steps._replace(o=step_o), chunks)._replace(o=chunks.o)


def joined(spec: RaggedSpec, operands: RaggedOperands, steps: Outputs, chunks: Outputs) -> Outputs:
    """Returns what ragged.join does, with the rows of steps written into the o of the chunks.

    A select between two arrays of all rows reads and writes as much as attention does.
    """
    number, tokens = spec.step_tokens, len(operands.q)
    first, count = ragged.rows_of(operands, least=1, most=number)
    token = jnp.arange(-number, 0, dtype=jnp.int32)
    place = (first + count)[:, None] + token[None]
    beyond = tokens + jnp.arange(place.size, dtype=jnp.int32)  # which are dropped
    place = jnp.where(token[None] >= -count[:, None], place, beyond.reshape(place.shape))
    rows = steps.o.reshape(-1, *steps.o.shape[2:])
    o = chunks.o.at[place.reshape(-1)].set(rows, mode="drop", unique_indices=True)
    return ragged.join(spec, operands, steps, chunks)._replace(o=o)  # XLA drops the other o


def ragged_cta(plan: RaggedPlan, state: Into, gmem: ForwardGmem, out: Outputs, rows, smem):
    """Runs a CTA, if there are so many tiles; see ForwardCta for the arguments."""
    counter, out = state.counter, out if state.o is None else out._replace(o=state.o)
    if plan.joins is not None:
        join_steps(plan, plan.joins, gmem.ragged.steps, rows._replace(o=out.o.at[0]))
    exists = lax.axis_index("cta") < gmem.ragged.tiles[0, 0]
    team = functools.partial(forward_teams, cta_type=RaggedCta)
    pl.when(exists)(lambda: team(plan, counter, gmem, out, smem))


def join_steps(plan: RaggedPlan, kernel: CombineKernel, steps: StepShares, out: DecodeResults):
    """Joins shares of steps in consumer warpgroups, whose first tile is on its way meanwhile."""
    wg, warpgroups = lax.axis_index("wg"), plan.blocks.warpgroups
    rows = jnp.int32(math.prod(out.lse.shape))

    @pl.when(wg < warpgroups)
    def _():
        first = lax.axis_index("cta") * warpgroups + wg
        join = functools.partial(kernel.join_packed, *steps, out)
        pl.loop(first, rows, step=jnp.int32(plan.num_ctas * warpgroups))(join)


# --- The plan of a launch, and the refs of a CTA --------------------------------------------------


class RaggedGmem(NamedTuple):
    """Operands in device memory that the dense forward has not."""

    page_table: Any  # int32[S, max_pages]
    tiles: Any  # int32[1 + tiles, 9], of `chunk_tiles`
    steps: StepShares | None


class Keys(NamedTuple):
    """Place of a KV block in the pages."""

    page: Any  # its first one, among those of the sequence
    place: Any  # of that page among all pages
    row: Any  # of its first key in the page
    seq: Any
    head: Any
    before: Any  # its first rows that come before the sequence's first key; None: there are none
    valid: Any  # how many of its rows come before the end of the sequence


@dataclasses.dataclass(frozen=True)
class RaggedPlan(ForwardPlan):
    """The plan of the forward, and what is known of the pages and the sequences at trace time.

    Attributes:
        page_size: keys of a page.
        starts: sequences have first keys of their own.
        windows: sequences have windows of their own.
        joins: how a CTA joins shares of steps before its first tile; None: it does not.
    """

    page_size: int = 16
    starts: bool = False
    windows: bool = False
    joins: CombineKernel | None = None

    @classmethod
    def of_chunks(
        cls,
        problem: RaggedProblem,
        blocks: ForwardBlocks,
        operands: RaggedOperands,
        num_sms: int,
        interpret: bool,
        joins: CombineKernel | None,
    ) -> RaggedPlan:
        """Plans a launch over the tiles of `chunk_tiles`, at most `num_tiles`.

        A tile is claimed while the one before is loaded: of prompts of 1k some have two KV blocks,
        in which the counter, then the table, then the page table do not answer.
        """
        forward = as_forward(problem)
        blocks = blocks.possible(forward)
        tiles = most_tiles(problem, blocks.tile_rows) * forward.q_heads
        plan = cls.of(
            forward,
            blocks,
            interpret,
            claims_ahead=claims_tiles(forward, blocks),
            page_size=problem.steps.spec.page_size or 0,
            starts=operands.kv_starts is not None,
            windows=operands.window_left is not None,
            joins=joins,
        )
        num_ctas = min(num_sms, tiles) if blocks.persistent else tiles
        return dataclasses.replace(plan, num_tiles=tiles, num_ctas=num_ctas)

    def masked_edges(self) -> tuple[bool, bool]:
        """Returns whether some warpgroup may mask KV blocks (left, right); arrays decide which."""
        return self.starts or self.windows or self.problem.spec.mask.left is not None, True

    @property
    def piece_rows(self) -> int:
        """Number of keys of a piece of a KV block."""
        return piece_rows(self.blocks.block_kv, self.page_size)

    @property
    def pieces(self) -> int:
        """Number of pieces of a KV block."""
        return self.blocks.block_kv // self.piece_rows


@dataclasses.dataclass(frozen=True)
class RaggedCta(ForwardCta):
    """One CTA, as one of its warpgroups sees it: `out` has one batch entry of packed rows."""

    plan: RaggedPlan

    # --- tiles ------------------------------------------------------------------------------------

    def exists(self, number):
        """Returns whether there is a tile with this number; one past the last can be claimed."""
        return number < self.gmem.ragged.tiles[0, 0]

    def q_tile(self, number) -> QTile:
        """Returns the Q tile with this number; for a number past the last one, any."""
        table = self.gmem.ragged.tiles
        # Otherwise addresses that are needed again after the loop over keys would be held over it.
        number = lax.optimization_barrier(number)
        entry = lax.min(number, jnp.int32(self.plan.num_tiles - 1)) + 1
        rows = TileRow(*(table[entry, i] for i in range(len(TileRow._fields))))
        kv_range = self.kv_blocks(rows, rows.position, self.plan.blocks.tile_rows)
        start = kv_range.start if self.plan.masked_edges()[0] else 0
        count = lax.max(jnp.int32(kv_range.stop - start), jnp.int32(1))
        return QTile(rows.seq, rows.head, entry, rows.position, start, count, ragged=rows)

    def kv_blocks(self, rows: TileRow, position, number: int, *, whole_blocks: bool = False):
        """Returns the BlockRange of so many queries from this position on.

        With `whole_blocks` the keys are taken to end where their last block does.
        """
        block_kv, length = self.plan.blocks.block_kv, rows.length
        if whole_blocks:
            length = lax.div(length + (block_kv - 1), jnp.int32(block_kv)) * block_kv
        start = rows.start if self.plan.starts else None
        return self.mask(rows).kv_blocks(position, number, length, block_kv, start)

    def whole_kv_tiles(self, tile: QTile):
        """Returns (first, one past the last) of the KV blocks that this warpgroup sees whole."""
        position = tile.position + self.wg * WARPGROUP_ROWS
        kv_range = self.kv_blocks(tile.ragged, position, WARPGROUP_ROWS, whole_blocks=True)
        return kv_range.full_start, kv_range.full_stop

    def mask(self, rows: TileRow) -> Mask:
        """Returns the mask of a tile's sequence, without its first key."""
        return Mask(rows.left, 0) if self.plan.windows else self.plan.problem.spec.mask

    def limits(self, tile: QTile, kv_block, edges: str) -> Limits:
        """Returns what ForwardCta.limits does; first keys are hidden by `row_fragments`."""
        if not self.plan.windows or edges == "none":
            return super().limits(tile, kv_block, edges)
        length = self.ragged_len(tile) if edges == "last" else None
        return self.score_tile(tile, kv_block).limits(self.mask(tile.ragged), length)

    def ragged_len(self, tile: QTile):
        """Returns the number of keys of the tile's sequence, which may end anywhere in a block."""
        return tile.ragged.length

    def row_fragments(self, tile: QTile) -> TileInputs:
        """Loads what ForwardCta.row_fragments does, and the first key as that of every row."""
        fragments = super().row_fragments(tile)
        if not self.plan.starts:
            return fragments
        first = lax.broadcast_in_dim(tile.ragged.start, (WARPGROUP_ROWS,), ())
        return fragments._replace(q_first=plgpu.layout_cast(first, inline.ROWS))

    # --- where Q rows, keys and results lie -------------------------------------------------------

    def rows_at(self, tile: QTile, wg):
        """Returns the index of a warpgroup's rows in q and o: (0, rows, head)."""
        first_row = pl.multiple_of(tile.ragged.row, LENGTH_MULTIPLE) + wg * WARPGROUP_ROWS
        return 0, pl.ds(first_row, WARPGROUP_ROWS), tile.head

    def keys_at(self, tile: QTile, block) -> Keys:
        """Returns where a KV block lies; read before the wait for its slot, which hides that.

        What the producer can read anew it does not hold: it has 24 registers.
        """
        plan, seq = self.plan, tile.batch
        page, row, first = block * plan.pieces, 0, block * plan.blocks.block_kv
        if plan.pieces == 1:
            blocks = jnp.int32(plan.page_size // plan.piece_rows)  # of a page
            page, row = lax.div(block, blocks), lax.rem(block, blocks) * plan.piece_rows
        return Keys(
            page=page,
            place=self.place(seq, page),
            row=row,
            seq=seq,
            head=lax.div(tile.head, jnp.int32(plan.problem.group)),
            before=tile.ragged.start - first if plan.starts else None,
            valid=tile.ragged.length - first,
        )

    def place(self, seq, page):
        """Returns where a page of a sequence lies among all pages."""
        table = self.gmem.ragged.page_table
        last, most = (jnp.int32(size - 1) for size in table.shape)
        pages = jnp.int32(self.gmem.k.shape[0] - 1)
        # What the last block reads beyond the table's end, or of an entry never set, is hidden.
        page_id = table[lax.min(seq, last), lax.min(page, most)]
        return lax.min(lax.max(page_id, jnp.int32(0)), pages)

    def copy_k(self, keys: Keys, slot, full):
        """Issues the copies of a block of K, at `keys_at`, into its slot."""
        self.copy(self.gmem.k, keys, self.smem.k.at[slot], full)

    def copy_v(self, tile: QTile, block, keys: Keys, slot, full):
        """Issues the copies of a block of V into its slot; zeroes what are no keys in it."""
        plan, target = self.plan, self.smem.v.at[slot]
        padded = keys.valid < plan.blocks.block_kv
        if plan.starts:
            padded = padded | (keys.before > 0)
        pl.when(~padded)(lambda: self.copy(self.gmem.v, keys, target, full))

        @pl.when(padded)
        def _():
            self.copy(self.gmem.v, keys, target, self.smem.v_arrived)
            plgpu.barrier_wait(self.smem.v_arrived)
            width, rows = plan.problem.v_head_dim, plan.blocks.block_kv
            swizzle = plan.matmuls.swizzle(width, self.gmem.v, summed_rows=rows)
            if plan.starts:
                clear_outside(target, keys.before, keys.valid, swizzle, plan.interpret)
            else:
                clear_from(target, keys.valid, swizzle, plan.interpret)
            for _ in range(plan.pieces):
                plgpu.barrier_arrive(full)

    def copy(self, source, keys: Keys, target, barrier):
        """Issues the copies of a block's pieces; each arrives once.

        Four or more are shared between the warps, as a copy takes some 25 instructions, which wait
        for one another. Fewer are a loop, in which the place of the next page is read before a copy
        is issued. Each warp has places of its own, but the first is read before the wait for the
        slot, which brings all of a block's into the L1.
        """
        size, pieces = self.plan.piece_rows, self.plan.pieces
        if pieces == 1:
            rows = source.at[keys.place, pl.ds(keys.row, size), keys.head]
            plgpu.copy_gmem_to_smem(rows, target, barrier)
            return

        def issue(n, place):
            piece = target.at[pl.ds(n * size, size)]
            plgpu.copy_gmem_to_smem(source.at[place, :, keys.head], piece, barrier)

        if pieces % WARPS == 0:
            per_warp = pieces // WARPS

            @plgpu.warp_map
            def _(warp):
                for i in range(per_warp):
                    n = warp * per_warp + i
                    place = self.place(keys.seq, keys.page + n)
                    issue(n, place if i else lax.select(n == 0, keys.place, place))

            return

        def issue_one(n, place):
            following = self.place(keys.seq, keys.page + n + 1)
            issue(n, place)
            return following

        lax.fori_loop(jnp.int32(0), jnp.int32(pieces), issue_one, keys.place)

    def store_rows(self, tile: QTile, wg, staging):
        """Copies the results of a warpgroup's rows, those that are of the tile's sequence."""
        first = wg * WARPGROUP_ROWS
        low, high = tile.ragged.low - first, tile.ragged.high - first
        stores_all = (low <= 0) & (high >= WARPGROUP_ROWS)
        pl.when(stores_all)(functools.partial(super().store_rows, tile, wg, staging))

        @pl.when(~stores_all)
        def _():
            plan, row = self.plan, tile.ragged.row + first
            swizzle = plan.matmuls.swizzle(plan.problem.v_head_dim, self.out.o)
            if self.smem.o is None:
                swizzle = plan.matmuls.swizzle(plan.problem.head_dim, self.gmem.q, self.out.o)
            target = self.out.o.at[0, :, tile.head]
            own_rows = Some(row, low, high, plan.interpret)
            own_rows.store(staging.at[wg], target, swizzle)
            for name in PER_ROW:
                buffer, target = getattr(self.smem, name), getattr(self.out, name)
                if buffer is not None:
                    own_rows.store_values(buffer.at[wg], target.at[0, tile.head])
            # The next tile's results overwrite what other threads read here.
            inline.warpgroup_barrier(plan.interpret)
