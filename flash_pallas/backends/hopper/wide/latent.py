"""Decoding with many heads of one latent cache, whose values are columns of its keys.

Multi-head latent attention with absorbed weights has one head of keys, 576 columns of which the
first 512 are the values (DeepSeek-V2, https://arxiv.org/abs/2405.04434). With 64 query heads or
more it is bound by arithmetic as much as by memory: 64 rows take 139 kFLOP for each key of 1,152
bytes. The decode kernel computes the scores twice, once for each half of the columns of V. Here two
warpgroups share the 64 rows of a CTA, which are 64 heads of one query, so that its keys end in one
place. Each sums half of the columns of V, and computes the scores of every other tile of 64 keys.
A tile is loaded once, and is the right operand of both matmuls.

A step of a warpgroup, with t its own tile and t - 1 that of the other:

    (1) O += P V of tile t - 1, half of the columns; P comes from the other warpgroup
    (2) S = Q K^T of tile t
        softmax; P and the row maxima go to the other warpgroup through shared memory
    (3) O += P V of tile t, half of the columns; P is in registers

    warpgroup 0   | S 0 | softmax | PV 0 |               | PV 1 | S 2 | softmax | PV 2 |
    warpgroup 1                   | PV 0 | S 1 | softmax | PV 1 |               | PV 2 | S 3 |

Both sum the tiles in the same order, relative to the same row maxima. What a tile does to the sums
so far is a factor for each row, which is handed over together with P.

There is room for two tiles, one of each warpgroup, so the next one is on its way only while the
other is worked on. Hence (1) before (2): it gives a tile back as early as it can be. With (2)
first, tensor cores would be busy during softmax, but every tile would wait for the load of the next
one.

There is no producer: a warpgroup loads what it alone reads last. That is its half of the columns of
each tile, of its own tiles after (3) and of the others' after (1), and the columns of its own tiles
that are no values, after (2). No barrier says that a slot is free: who loads has read it, and knows
by P that the other one has. Nor does one say that P has been read: a warpgroup makes the next P of
keys that the other one has loaded after reading the P before.

The columns of Q beyond the values are in registers. Weights take their place in shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import softmax
from ....core.decode import MAX_SPLITS, DecodeOperands, DecodeProblem
from ....core.mask import Limits, Mask
from ....core.problem import AttentionSpec, Outputs, Problem
from ....core.scores import TileInputs
from ...gpu import score_tile
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ...gpu.ptx import inline, online_softmax
from ...gpu.ptx.cleared_rows import clear_from
from ...gpu.ptx.online_softmax import Maxima, far_of
from ...gpu.ptx.pack_gqa import PackedGqa
from ...gpu.score_tile import RegisterTile
from ..common.pipeline import LENGTH_MULTIPLE, Matmuls, fits, hidden, row_buffer, tile_buffer
from ..decode import combine
from ..decode.plan import DecodePlan, DecodeResults
from ..decode.tiles import MIN_KEYS_PER_SPLIT, NEARLY_BEST, DecodeBlocks
from ..forward.softmax import per_row
from .launch import LAZY_RESCALE
from .tiles import SWIZZLED, WARPGROUPS

KEYS = WARPGROUP_ROWS  # of a tile
WIDTH = 256  # columns of V that a warpgroup sums: 128 registers of each thread
REST = WARPGROUPS  # number of the part of a tile that is no values, after both halves
PARTS = REST + 1
SWIZZLE_BYTES = 2 * SWIZZLED  # of 16-bit elements
START_TILES = 4  # the start and the end of a CTA take as much time as so many tiles
ALPHA, M, SHIFT, SUMS = range(4)  # rows that warpgroups hand to each other
LSE = M  # the row in which the log-sum-exp is staged at the end


@dataclasses.dataclass(frozen=True)
class LatentBlocks:
    """Options of the kernel.

    Attributes:
        num_splits: number of ranges into which the keys of a sequence are split.
        lazy_rescale: as of ForwardBlocks.
    """

    num_splits: int = 1
    lazy_rescale: float = LAZY_RESCALE


class LatentGmem(NamedTuple):
    """Operands in device memory."""

    q: Any  # [B, T * N, H]
    k: Any  # [B, S, 1, H] or [num_pages, page_size, 1, H]
    kv_lengths: Any  # int32[B]
    q_offset: Any  # int32[B], or None: the last query is the last key
    page_table: Any  # int32[B, max_pages], or None
    sinks: Any  # f32[B, N], where there is one split; or None


class LatentSmem(NamedTuple):
    """Shared memory of one CTA; tile t is in slot t % 2, and is of that warpgroup."""

    q: Any  # [2, 64, 256], both halves of the columns that K shares with V
    halves: Any  # [2 slots, 2, 64, 256], likewise of K; results in the end
    rest: Any  # [2 slots, 64, columns that are no values], or None
    weights: Any  # [2, 64, 64], P of each warpgroup; the second is the rest of Q at first
    rows: Any  # f32[2, 4, 64], what each warpgroup hands over: ALPHA, M, SHIFT, SUMS


class LatentBarriers(NamedTuple):
    """The mbarriers of one CTA."""

    q: Any
    full: Any  # [2 * PARTS], of the parts of the tile in each slot
    weights: Any  # [2], of the P of each warpgroup and its rows
    sums: Any  # both warpgroups arrive


class Rows(NamedTuple):
    """State of the rows of a CTA. The warpgroups have the same maxima, and sums of their own."""

    maxima: Maxima
    l: Any  # f32[64, 8], sums of each thread's own columns


class Kind(NamedTuple):
    """Kind of a step: which tiles there are besides its own, and whether its own is masked."""

    before: bool  # there is a tile before its own
    masked: bool  # its own may be the last tile
    loads: bool  # there may be tiles after its own


FIRST, MIDDLE, LAST = Kind(False, True, True), Kind(True, False, True), Kind(True, True, False)


class Handed(NamedTuple):
    """Operands by which a tile changes the sums."""

    p: Any  # the weights, an operand
    alpha: Any  # f32[64], factor of the sums so far


@dataclasses.dataclass(frozen=True)
class LatentCta:
    """Refs and place of one CTA, as one of its warpgroups sees them.

    Attributes:
        gmem: operands in device memory.
        out: results in device memory.
        smem: shared memory.
        bars: its mbarriers.
        batch: the batch entry.
        block: number of the block of rows.
        wg: index of the warpgroup.
        first: number of the first tile of keys.
        count: how many tiles there are, at least one; those before the last need no mask.
        end: number of keys that the rows see.
        q_rest: columns of Q beyond the values, an operand in registers; or None.
    """

    gmem: LatentGmem
    out: DecodeResults
    smem: LatentSmem
    bars: LatentBarriers
    batch: Any
    block: Any
    wg: Any
    first: Any
    count: Any
    end: Any
    q_rest: Any = None

    @property
    def other(self):
        """Index of the other warpgroup."""
        return 1 - self.wg

    @property
    def start(self):
        """Index of the first row."""
        return self.block * WARPGROUP_ROWS

    @property
    def rows(self):
        """The CTA's rows, as a slice."""
        return pl.ds(self.start, WARPGROUP_ROWS)

    def key(self, t):
        """Returns the number of the first key of the t-th tile."""
        return (self.first + t) * KEYS


def scratch(problem: DecodeProblem) -> tuple[LatentSmem, LatentBarriers]:
    """Returns the shared memory and the barriers of a CTA."""
    tile, rest = lambda *shape: tile_buffer(shape, problem.dtype), _rest(problem)
    smem = LatentSmem(
        q=tile(WARPGROUPS, WARPGROUP_ROWS, WIDTH),
        halves=tile(WARPGROUPS, WARPGROUPS, KEYS, WIDTH),
        rest=tile(WARPGROUPS, KEYS, rest) if rest else None,
        weights=tile(WARPGROUPS, WARPGROUP_ROWS, KEYS),
        rows=row_buffer((WARPGROUPS, SUMS + 1, WARPGROUP_ROWS)),
    )
    bars = LatentBarriers(
        q=plgpu.Barrier(num_arrivals=WARPGROUPS + bool(rest)),
        full=plgpu.Barrier(num_barriers=WARPGROUPS * PARTS),
        weights=plgpu.Barrier(num_barriers=WARPGROUPS),
        sums=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    return smem, bars


def takes(problem: DecodeProblem) -> bool:
    """Returns whether this kernel runs a decode problem that decode/tiles.py does not refuse."""
    p, page_size = problem, problem.spec.page_size
    if not p.shares_kv or p.quantised or p.kv_heads > 1 or p.q_heads % WARPGROUP_ROWS:
        return False
    if p.v_head_dim != WARPGROUPS * WIDTH or _rest(p) not in (0, SWIZZLED):
        return False
    if p.features - {"page_table", "sinks"} or p.spec.window_left is not None:
        return False
    rest = p.kv_len % LENGTH_MULTIPLE if page_size is None else page_size % KEYS
    return not rest and fits(scratch(p))


def choose(problem: DecodeProblem, num_sms: int) -> LatentBlocks:
    """Returns the options with the fewest splits whose modelled time is nearly the least.

    Time is counted in tiles of keys, those of the busiest SM.
    """
    rows = problem.batch * problem.q_len * problem.q_heads // WARPGROUP_ROWS
    tiles = -(-problem.kv_len // KEYS)

    def time(splits: int) -> float:
        return -(-rows * splits // num_sms) * (-(-tiles // splits) + START_TILES)

    numbers = range(1, max(1, min(MAX_SPLITS, problem.kv_len // MIN_KEYS_PER_SPLIT)) + 1)
    best = min(map(time, numbers))
    splits = next(n for n in numbers if time(n) <= NEARLY_BEST * best)
    return LatentBlocks(num_splits=problem.spec.num_splits or splits)


def _rest(problem: DecodeProblem) -> int:
    """Returns the number of columns of keys that are no values."""
    return problem.head_dim - problem.v_head_dim


def _attention(problem: DecodeProblem) -> Problem:
    """Returns the problem of the rows of all queries, which see every key of a length."""
    spec = AttentionSpec(scale=problem.spec.scale, mask=Mask(), softcap=problem.spec.softcap)
    rows = problem.q_len * problem.q_heads
    return Problem(
        batch=problem.batch,
        q_len=rows,
        kv_len=problem.kv_len,
        q_heads=1,
        kv_heads=1,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
        spec=spec,
        features=frozenset(),
    )


@dataclasses.dataclass(frozen=True)
class LatentKernel:
    """One launch; the methods are the phases of a CTA.

    Attributes:
        steps: the decode problem.
        blocks: options.
        interpret: run by the interpreter.
    """

    steps: DecodeProblem
    blocks: LatentBlocks
    interpret: bool

    def __call__(self, gmem: LatentGmem, *refs):
        *out, smem, bars = refs
        batch, block = lax.axis_index("batch"), lax.axis_index("tile")
        first, count, end = self.keys(gmem, batch, block)
        out, wg = DecodeResults(*out), lax.axis_index("wg")
        cta = LatentCta(gmem, out, smem, bars, batch, block, wg, first, count, end)
        self.load_first(cta)
        plgpu.barrier_wait(bars.q)
        if smem.rest is not None:
            rest = self.matmuls.load_parts(smem.weights.at[1], inline.WGMMA)
            cta = dataclasses.replace(cta, q_rest=rest)
        accumulator = plgpu.ACC((WARPGROUP_ROWS, WIDTH), jnp.float32)
        rows, o = pl.run_scoped(functools.partial(self.fold, cta), accumulator)
        self.store(cta, rows, o)

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem of the rows of all queries."""
        return _attention(self.steps)

    @property
    def matmuls(self) -> Matmuls:
        """Matmuls of operands of the call's dtype."""
        return Matmuls(self.problem.dtype, self.interpret)

    @property
    def far(self) -> float:
        """Magnitude of logits (base 2) beyond which rows need a shift; 0: none can be so large."""
        return far_of(self.problem.spec, self.problem.dtype)

    @property
    def splits(self) -> bool:
        """True if there are several ranges of keys."""
        return self.blocks.num_splits > 1

    def query(self, block):
        """Returns (query, first head) of a block of rows."""
        rows = block * WARPGROUP_ROWS
        heads = jnp.int32(self.steps.q_heads)
        return lax.div(rows, heads), lax.rem(rows, heads)

    def keys(self, gmem: LatentGmem, batch, block):
        """Returns (first, count, end), see LatentCta. Where there is no tile, one is hidden."""
        offset = None if gmem.q_offset is None else gmem.q_offset[batch]
        length, offset = self.steps.key_range(gmem.kv_lengths[batch], offset)
        end = lax.clamp(jnp.int32(0), offset + self.query(block)[0] + 1, length)
        count, first = lax.div(end + (KEYS - 1), jnp.int32(KEYS)), jnp.int32(0)
        if self.splits:
            splits = self.blocks.num_splits
            per_split = lax.div(count + (splits - 1), jnp.int32(splits))
            first = lax.axis_index("split") * per_split
            count = lax.min(per_split, count - first)
        return first, lax.max(count, jnp.int32(1)), end

    # --- loads -----------------------------------------------------------------------------------

    def load_first(self, cta: LatentCta):
        """Loads Q, and this warpgroup's parts of the first two tiles."""
        pl.when(cta.wg == 0)(lambda: self.load_q(cta))
        for slot in range(WARPGROUPS):

            @pl.when(slot < cta.count)
            def _(slot=slot):
                place = self.place(cta, jnp.int32(slot))
                self.load(cta, place, slot, cta.wg)
                if cta.smem.rest is not None:
                    pl.when(cta.wg == slot)(lambda: self.load(cta, place, slot, REST))

    def load_q(self, cta: LatentCta):
        """Loads Q, the columns beyond the values to where weights will be."""
        targets = [(half * WIDTH, cta.smem.q.at[half]) for half in range(WARPGROUPS)]
        if cta.smem.rest is not None:
            targets.append((self.steps.v_head_dim, cta.smem.weights.at[1]))
        for column, target in targets:
            source = cta.gmem.q.at[cta.batch, cta.rows, pl.ds(column, target.shape[-1])]
            plgpu.copy_gmem_to_smem(source, target, cta.bars.q)

    def place(self, cta: LatentCta, t):
        """Returns (batch entry or page, row there) of the first key of the t-th tile."""
        key, table, size = cta.key(t), cta.gmem.page_table, self.steps.spec.page_size
        if size is None:
            return cta.batch, key
        most, pages = jnp.int32(table.shape[1] - 1), jnp.int32(cta.gmem.k.shape[0] - 1)
        # What lies beyond the table's end, or in an entry never set, is hidden.
        page = table[cta.batch, lax.min(lax.div(key, jnp.int32(size)), most)]
        return lax.clamp(jnp.int32(0), page, pages), lax.rem(key, jnp.int32(size))

    def load(self, cta: LatentCta, place, slot, part):
        """Starts the copy of a part of the tile at a place into a slot, which is free."""
        entry, row = place
        if part is REST:
            target, column = cta.smem.rest.at[slot], self.steps.v_head_dim
        else:
            target, column = cta.smem.halves.at[slot, part], part * WIDTH
        columns = pl.ds(column, target.shape[-1])
        source = cta.gmem.k.at[entry, pl.ds(row, KEYS), 0, columns]
        plgpu.copy_gmem_to_smem(source, target, cta.bars.full.at[slot * PARTS + part])

    def reload(self, cta: LatentCta, t, place, slot, part):
        """Loads a part of the t-th tile, if there is one, in place of what has been read."""
        inline.warpgroup_barrier(self.interpret)  # every warp has read it
        pl.when(t < cta.count)(lambda: self.load(cta, place, slot, part))

    # --- the steps -------------------------------------------------------------------------------

    def fold(self, cta: LatentCta, o_acc):
        """Folds all tiles into the rows; returns (Rows, half of O before the division)."""
        zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), inline.ROWS)
        sums = jnp.zeros((WARPGROUP_ROWS, inline.LANE_COLS), jnp.float32)
        maxima = Maxima(zeros - jnp.inf, zeros if self.far else None)
        rows = Rows(maxima, plgpu.layout_cast(sums, inline.WGMMA))
        step, last = functools.partial(self.step, cta, o_acc), cta.count - 1
        has_last = jnp.int32(lax.rem(last, jnp.int32(2)) == cta.wg)
        most, odd = lax.div(cta.count - 2 + cta.wg, jnp.int32(2)), 2 - cta.wg
        # Loops of one step at most stand for branches, in which there are to be no matmuls.
        rows = lax.fori_loop(0, 1 - cta.wg, lambda _, rows: step(FIRST, jnp.int32(0), rows), rows)
        rows = lax.fori_loop(0, most, lambda i, rows: step(MIDDLE, odd + 2 * i, rows), rows)
        runs_last = lax.min(has_last, last)  # a first tile is no last one
        rows = lax.fori_loop(0, runs_last, lambda _, rows: step(LAST, last, rows), rows)
        final = lambda _, rows: self.other_tile(cta, o_acc, last, rows, final=True)
        rows = lax.fori_loop(0, 1 - has_last, final, rows)
        return rows, plgpu.wgmma_accumulator_load(o_acc, wait_n=0)

    def step(self, cta: LatentCta, o_acc, kind: Kind, t, rows: Rows) -> Rows:
        """Sums values of the other warpgroup's tile t - 1, and all of this one's tile t.

        Args:
            cta: the CTA.
            o_acc: the sums.
            kind: whether it is the first step, the last or another.
            t: number of the tile.
            rows: state of the rows.
        """
        places = self.place(cta, t + 1), self.place(cta, t + 2)
        weigh = functools.partial(self.weigh, cta, o_acc, kind, t, rows, places[0])
        handed, rows = pl.run_scoped(weigh, plgpu.ACC((WARPGROUP_ROWS, KEYS), jnp.float32))
        self.hand_over(cta, handed, rows)
        self.rescale(o_acc, handed.alpha)
        if kind.masked:
            self.clear(cta, t, cta.wg)
        self.matmuls.multiply(o_acc, handed.p, self.values(cta, cta.wg))
        if kind.loads and cta.q_rest is not None:
            # Not before P: the other warpgroup waits for that. The warps have met since S.
            pl.when(t + 2 < cta.count)(lambda: self.load(cta, places[1], cta.wg, REST))
        plgpu.wgmma_wait(0)
        if kind.loads:
            self.reload(cta, t + 2, places[1], cta.wg, cta.wg)
        return rows

    def other_tile(self, cta: LatentCta, o_acc, t, rows: Rows, *, final: bool = False) -> Rows:
        """Issues the sum of values of the other warpgroup's t-th tile, `final` if it is the last.

        Returns the state of the rows after it.
        """
        plgpu.barrier_wait(cta.bars.full.at[cta.other * PARTS + cta.wg])
        plgpu.barrier_wait(cta.bars.weights.at[cta.other])
        row = lambda i: plgpu.load(cta.smem.rows.at[cta.other, i], layout=inline.ROWS)
        alpha, maxima = row(ALPHA), Maxima(row(M), row(SHIFT) if self.far else None)
        self.rescale(o_acc, alpha)
        if final:
            self.clear(cta, t, cta.other)
        p = cta.smem.weights.at[hidden(cta.other)]
        self.matmuls.multiply(o_acc, p, self.values(cta, cta.other))
        return Rows(maxima, rows.l * per_row(alpha, rows.l.shape))

    def weigh(self, cta: LatentCta, o_acc, kind: Kind, t, rows: Rows, place, s_acc):
        """Issues the sum of tile t - 1, computes the scores of tile t and what they do to the rows.

        Returns (Handed, Rows); `place` is that of tile t + 1.
        """
        if kind.before:
            rows = self.other_tile(cta, o_acc, t - 1, rows)
        self.multiply_rest(cta, s_acc)
        if kind.before:
            plgpu.wgmma_wait(0 if cta.q_rest is None else self.matmuls.count)
            if kind.loads:
                self.reload(cta, t + 1, place, cta.other, cta.wg)
        self.multiply_halves(cta, s_acc)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
        spec, shape = self.problem.spec, (WARPGROUP_ROWS, KEYS)
        tile = RegisterTile(jnp.int32(0), cta.key(t), shape, interpret=self.interpret)
        limits = tile.limits(spec.mask, cta.end) if kind.masked else Limits()
        z = score_tile.logits(spec, tile, s, TileInputs(), limits)
        slack = self.blocks.lazy_rescale or None
        compared = online_softmax.compared(
            rows.maxima, z.x, z.log2_scale, self.far, slack, self.interpret
        )
        m = jnp.where(compared.m == -jnp.inf, jnp.zeros_like(compared.m), compared.m)
        p = jnp.exp2(compared.x * z.log2_scale - per_row(m, shape))
        alpha = jnp.exp2(compared.before - m)
        sums = inline.lane_sums(p, self.interpret)
        rows = Rows(compared.maxima, rows.l * per_row(alpha, sums.shape) + sums)
        return Handed(self.matmuls.split(p), alpha), rows

    def multiply_rest(self, cta: LatentCta, s_acc):
        """Issues S = Q K^T over the columns that are no values, which have come before others.

        It follows the sum of tile t - 1, so that tensor cores have work while that tile is given
        back.
        """
        if cta.q_rest is not None:
            plgpu.barrier_wait(cta.bars.full.at[cta.wg * PARTS + REST])
            right = cta.smem.rest.at[hidden(cta.wg)]
            self.matmuls.multiply(s_acc, cta.q_rest, right, transposed=True)

    def multiply_halves(self, cta: LatentCta, s_acc):
        """Issues S += Q K^T over the other columns, in the order in which they were asked for."""
        for part in (cta.wg, cta.other):
            plgpu.barrier_wait(cta.bars.full.at[cta.wg * PARTS + part])
            left, right = cta.smem.q.at[hidden(part)], cta.smem.halves.at[hidden(cta.wg), part]
            self.matmuls.multiply(s_acc, left, right, transposed=True)

    def hand_over(self, cta: LatentCta, handed: Handed, rows: Rows):
        """Hands what a tile does to the sums to the other warpgroup, with the new maxima."""
        maxima = rows.maxima
        self.matmuls.store(cta.smem.weights.at[cta.wg], handed.p)
        for i, x in ((ALPHA, handed.alpha), (M, maxima.m), (SHIFT, maxima.shift)):
            if x is not None:
                cta.smem.rows[cta.wg, i] = plgpu.layout_cast(x, inline.ROWS)
        plgpu.commit_smem()
        plgpu.barrier_arrive(cta.bars.weights.at[cta.wg])

    def rescale(self, o_acc, alpha):
        """Multiplies the sums by a factor for each row, unless all of a warp's are 1."""
        old = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        scaled = lambda: old * per_row(alpha, old.shape)
        differs = inline.some_differ(alpha, 1.0, self.interpret)
        o_acc[...] = lax.cond(differs > 0, scaled, lambda: old)

    def values(self, cta: LatentCta, slot):
        """Returns this warpgroup's half of the values of the tile in a slot."""
        return cta.smem.halves.at[hidden(slot), cta.wg]

    def clear(self, cta: LatentCta, t, slot):
        """Zeroes this warpgroup's values past the last key: a weight of 0 times a NaN is a NaN.

        The scores of the tile have been computed.
        """
        valid = cta.end - cta.key(t)

        @pl.when(valid < KEYS)
        def _():
            values = cta.smem.halves.at[slot, cta.wg]
            clear_from(values, lax.max(valid, jnp.int32(0)), SWIZZLE_BYTES, self.interpret)
            plgpu.commit_smem()

    # --- results ---------------------------------------------------------------------------------

    def store(self, cta: LatentCta, rows: Rows, o):
        """Divides O by the sums of both warpgroups, and writes all results."""
        l = self.joined_sums(cta, rows)
        m, shift = online_softmax.settled(rows.maxima)
        sinks, sink = cta.gmem.sinks, None
        if sinks is not None:
            heads = pl.ds(self.query(cta.block)[1], WARPGROUP_ROWS)
            sink = plgpu.load(sinks.at[cta.batch, heads], layout=inline.ROWS, optimized=False)
        inverse, lse, shift = softmax.finish(m, l, shift, sink, self.problem.unit)
        index = (cta.batch, lax.axis_index("split")) if self.splits else (cta.batch,)

        @pl.when(cta.wg == 0)
        def _():
            staged = cta.smem.rows.at[0, LSE], cta.smem.rows.at[0, SHIFT]
            for staging, x in zip(staged, (lse, shift), strict=True):
                staging[...] = plgpu.layout_cast(x, inline.ROWS)
            plgpu.commit_smem()
            packed = PackedGqa(self.steps.q_len, self.steps.q_heads, cta.start, self.interpret)
            for staging, out in zip(staged, (cta.out.lse, cta.out.shift), strict=True):
                packed.store_values(staging, out.at[index])

        o = o * per_row(inverse, o.shape)
        target = cta.out.o.at[(*index, cta.rows, pl.ds(cta.wg * WIDTH, WIDTH))]
        if self.splits:
            target[...] = o
        else:
            staging = cta.smem.halves.at[0, cta.wg]
            self.matmuls.store(staging, o)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, target)
        plgpu.wait_smem_to_gmem(0)

    def joined_sums(self, cta: LatentCta, rows: Rows):
        """Returns the sums of both warpgroups' weights, f32[64]."""
        l = plgpu.layout_cast(rows.l.sum(axis=1), inline.ROWS)
        cta.smem.rows[cta.wg, SUMS] = l
        plgpu.barrier_arrive(cta.bars.sums)
        plgpu.barrier_wait(cta.bars.sums)
        return l + plgpu.load(cta.smem.rows.at[cta.other, SUMS], layout=inline.ROWS)


def decode(
    problem: DecodeProblem, blocks: LatentBlocks, operands: DecodeOperands, interpret: bool
) -> Outputs:
    """Launches the kernel, and the combine kernel if there are several splits.

    Args:
        problem: a problem that `takes` takes.
        blocks: options.
        operands: arrays as in core.decode; page ids need not be in range.
        interpret: run by the interpreter.
    """
    p, splits = problem, blocks.num_splits
    rows = p.q_len * p.q_heads
    split_axis = (splits,) if splits > 1 else ()
    shape = p.batch, *split_axis, rows, p.v_head_dim
    o = jax.ShapeDtypeStruct(shape, jnp.float32 if split_axis else p.dtype)
    row_shape = float32((p.batch, *split_axis, p.q_heads, p.q_len))
    run = launch(
        LatentKernel(p, blocks, interpret),
        out=(o, row_shape, row_shape),
        scratch=scratch(p),
        # The rows of a sequence read the same keys at the same time.
        grid={"batch": p.batch, "split": splits, "tile": rows // WARPGROUP_ROWS},
        threads=WARPGROUPS,
        name="flash_pallas_decode_latent",
        interpret=interpret,
    )
    gmem = LatentGmem(
        q=operands.q.reshape(p.batch, rows, p.head_dim),
        k=operands.k,
        kv_lengths=operands.kv_lengths,
        q_offset=operands.q_offset,
        page_table=operands.page_table,
        sinks=None if split_axis else operands.sinks,
    )
    parts = DecodeResults(*run(gmem))
    if not split_axis:
        o = parts.o.reshape(p.batch, p.q_len, p.q_heads, p.v_head_dim)
        return Outputs(o, parts.lse, parts.shift)
    plan = DecodePlan(p, DecodeBlocks(num_splits=splits), interpret)
    shares = jax.tree.map(lambda x, shape: x.reshape(shape.shape), parts, plan.result_shapes())
    return combine.combine(plan, shares, operands.sinks)
