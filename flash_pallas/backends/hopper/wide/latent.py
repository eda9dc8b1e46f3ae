"""Decoding with many heads of one latent cache, whose values are columns of its keys.

Multi-head latent attention with absorbed weights has one head of keys, 576 columns of which the
first 512 are the values (DeepSeek-V2, https://arxiv.org/abs/2405.04434). With 64 query heads or
more it is bound by arithmetic: 64 rows take 139 kFLOP for each key of 1,152 bytes. The decode
kernel computes the scores twice, once for each half of the columns of V; this is the forward for
wide heads, which computes them once, on a cache. The rows of a CTA are 64 heads of one query, so
its keys end in one place. A key is loaded twice, for scores and for sums, the second time from L2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import softmax
from ....core.decode import MAX_SPLITS, DecodeOperands, DecodeProblem
from ....core.mask import Mask
from ....core.problem import AttentionSpec, Outputs, Problem
from ...gpu import inline, online_softmax
from ...gpu.auxiliary_arrays import AuxiliaryGmem
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ...gpu.score_tile import RegisterTile
from ..backward.operands import KvTileRange
from ..common.pipeline import clear_from, fits, hidden
from ..common.wgmma import LENGTH_MULTIPLE
from ..decode import combine
from ..decode.plan import DecodePlan, DecodeResults
from ..decode.tiles import MIN_KEYS_PER_SPLIT, NEARLY_BEST, DecodeBlocks
from ..forward.softmax import per_row
from .forward import ForwardKernel, Rows
from .kernel import FLIGHT, WideCta
from .launch import LAZY_RESCALE
from .tiles import COLUMNS, FORWARD, NARROW, SWIZZLED, WARPGROUPS, WideBlocks, scratch

WIDTH = 2 * SWIZZLED  # columns of a chunk: halves of 512 columns are two
CHUNKS = 4  # of a warpgroup in flight, next to 64 rows of 640 columns
SWIZZLE_BYTES = 2 * SWIZZLED  # of 16-bit elements
START_TILES = 2  # that the start and the end of a CTA take as much time as


@dataclasses.dataclass(frozen=True)
class LatentBlocks:
    """Options of the kernel.

    Attributes:
        num_splits: number of ranges into which the keys of a sequence are split.
        chunks: how many chunks of 64 keys and 128 columns each warpgroup has in flight.
        lazy_rescale: as of ForwardBlocks.
    """

    num_splits: int = 1
    chunks: int = CHUNKS
    lazy_rescale: float = LAZY_RESCALE

    @property
    def wide(self) -> WideBlocks:
        """The same options for the kernels for wide heads."""
        return WideBlocks(WIDTH, self.chunks, lazy_rescale=self.lazy_rescale)


class LatentGmem(NamedTuple):
    """Operands in device memory."""

    q: Any  # [B, T * N, 1, H]
    k: Any  # [B, S, 1, H] or [num_pages, page_size, 1, H]
    kv_lengths: Any  # int32[B]
    q_offset: Any  # int32[B], or None: the last query is the last key
    page_table: Any  # int32[B, max_pages], or None
    sinks: Any  # f32[B, N], where there is one split; or None
    auxiliary: AuxiliaryGmem = AuxiliaryGmem()


class HalfTile(NamedTuple):
    """64 keys that a chunk has the columns of."""

    key: Any  # the first of them
    at: Any  # batch entry or page
    row: Any  # the first one's there


def takes(problem: DecodeProblem) -> bool:
    """Returns whether this kernel runs a decode problem that decode/tiles.py does not refuse."""
    p, page_size = problem, problem.spec.page_size
    if not p.shares_kv or p.quantised or p.kv_heads > 1 or p.q_heads % WARPGROUP_ROWS:
        return False
    if p.v_head_dim <= NARROW or p.v_head_dim % (2 * WIDTH) or p.head_dim % SWIZZLED:
        return False
    if p.features - {"page_table", "sinks"} or p.spec.window_left is not None:
        return False
    whole = p.kv_len % LENGTH_MULTIPLE if page_size is None else page_size % WARPGROUP_ROWS
    return not whole and fits(scratch(_attention(p), (FORWARD,), LatentBlocks().wide))


def choose(problem: DecodeProblem, num_sms: int) -> LatentBlocks:
    """Returns the options with the fewest splits whose modelled time is nearly the least.

    Time is counted in tiles of 128 keys, those of the busiest SM.
    """
    rows = problem.batch * problem.q_len * problem.q_heads // WARPGROUP_ROWS
    tiles = -(-problem.kv_len // COLUMNS)

    def time(splits: int) -> float:
        return -(-rows * splits // num_sms) * (-(-tiles // splits) + START_TILES)

    numbers = range(1, max(1, min(MAX_SPLITS, problem.kv_len // MIN_KEYS_PER_SPLIT)) + 1)
    best = min(map(time, numbers))
    splits = next(n for n in numbers if time(n) <= NEARLY_BEST * best)
    return LatentBlocks(num_splits=problem.spec.num_splits or splits)


def _attention(problem: DecodeProblem) -> Problem:
    """Returns the problem of the rows of all queries, which see every key of a length."""
    spec = AttentionSpec(scale=problem.spec.scale, mask=Mask(), softcap=problem.spec.softcap)
    rows = problem.q_len * problem.q_heads
    sizes = problem.batch, rows, problem.kv_len, 1, 1, problem.head_dim, problem.v_head_dim
    return Problem(*sizes, dtype=problem.dtype, spec=spec, features=frozenset())


@dataclasses.dataclass(frozen=True)
class LatentKernel(ForwardKernel):
    """One launch; see WideKernel.

    Attributes:
        steps: the decode problem.
        num_splits: number of ranges of keys.
        ends: keys may end before the values that are summed.
    """

    steps: DecodeProblem
    num_splits: int
    ends: bool = False

    def __call__(self, gmem: LatentGmem, *refs):
        out, (smem, bars) = refs[:-2], refs[-2:]
        batch, block = lax.axis_index("batch"), lax.axis_index("tile")
        cta = WideCta(
            gmem=gmem,
            out=out,
            smem=smem,
            bars=bars,
            batch=batch,
            head=jnp.int32(0),
            block=block,
            tiles=self.tiles(gmem, batch, block),
            wg=lax.axis_index("wg"),
        )
        self.run(cta)

    @property
    def splits(self) -> bool:
        """True if there are several ranges of keys."""
        return self.num_splits > 1

    def query(self, block):
        """Returns (query, first head) of a block of rows."""
        rows = block * WARPGROUP_ROWS
        heads = jnp.int32(self.steps.q_heads)
        return lax.div(rows, heads), lax.rem(rows, heads)

    def tiles(self, gmem: LatentGmem, batch, block) -> KvTileRange:
        """Returns this CTA's tiles of keys, one that is masked where it has none."""
        room = jnp.int32(self.steps.kv_len)
        length = lax.clamp(jnp.int32(0), gmem.kv_lengths[batch], room)
        offset = length - self.steps.q_len if gmem.q_offset is None else gmem.q_offset[batch]
        end = lax.clamp(jnp.int32(0), offset + self.query(block)[0] + 1, length)
        count = lax.div(end + (COLUMNS - 1), jnp.int32(COLUMNS))
        start = jnp.int32(0)
        if self.splits:
            each = lax.div(count + (self.num_splits - 1), jnp.int32(self.num_splits))
            start = lax.axis_index("split") * each
            count = lax.min(start + each, count)
        stop = lax.max(count, start + 1)
        whole = lax.clamp(start, lax.div(end, jnp.int32(COLUMNS)), stop)
        return KvTileRange(start, whole, stop, end, everywhere=False)

    # --- loads -----------------------------------------------------------------------------------

    def at_step(self, cta: WideCta, n) -> WideCta:
        last = cta.tiles.total - 1
        steps = lax.max(n - 1, jnp.int32(0)), lax.min(n, last), lax.min(n + 1, last)
        near = tuple(self.half_tiles(cta, cta.tiles[step]) for step in steps)
        return dataclasses.replace(cta, near=near, first=self.first_slot(n))

    def half_tiles(self, cta: WideCta, tile) -> tuple[HalfTile, HalfTile]:
        """Returns both halves of a tile of keys."""
        keys = [tile * COLUMNS + half * WARPGROUP_ROWS for half in range(WARPGROUPS)]
        table, size = cta.gmem.page_table, self.steps.spec.page_size
        if size is None:
            first, second = (HalfTile(key, cta.batch, key) for key in keys)
            return first, second
        most, pages = jnp.int32(table.shape[1] - 1), jnp.int32(cta.gmem.k.shape[0] - 1)

        def half(key):
            # What lies beyond the table's end, or in an entry never set, is hidden.
            page = table[cta.batch, lax.min(lax.div(key, jnp.int32(size)), most)]
            page = lax.clamp(jnp.int32(0), page, pages)
            return HalfTile(key, page, lax.rem(key, jnp.int32(size)))

        first, second = map(half, keys)
        return first, second

    def chunk_of(self, cta: WideCta, name: str, head, row, chunk):
        assert name == "q", "keys are found by `copy`"
        rows, columns = pl.ds(row, WARPGROUP_ROWS), pl.ds(head + chunk * WIDTH, WIDTH)
        return cta.gmem.q.at[cta.batch, rows, 0, columns]

    def copy(self, cta: WideCta, n, later: int, place: int):
        slot = self.slot(cta, place + later * self.chunks.total)
        if place in self.chunks.summed:
            half, chunk = divmod(place - self.chunks.summed.start, self.chunks.results)
            _, at, row = cta.near[later][half]
            chunk = cta.wg * self.chunks.results + chunk
        else:
            both, chunk = cta.near[1 + later], cta.batch * 0 + place
            _, at, row = (lax.select(cta.wg == 0, *pair) for pair in zip(*both, strict=True))
        rows, columns = pl.ds(row, WARPGROUP_ROWS), pl.ds(chunk * WIDTH, WIDTH)
        source = cta.gmem.k.at[at, rows, 0, columns]
        plgpu.copy_gmem_to_smem(source, cta.smem.ring.at[cta.wg, slot], self.full(cta, slot))

    # --- a step ----------------------------------------------------------------------------------

    def multiply_scores(self, cta: WideCta, n, pair: int, accumulator):
        own, count = cta.smem.own[pair], self.chunks.of("q")
        flight = min(FLIGHT, max(self.blocks.chunks // 3, 1))
        for chunk in range(count):
            right, left = self.arrived(cta, chunk), own.at[hidden(chunk)]
            if (rest := self.problem.head_dim - chunk * WIDTH) < WIDTH:
                left, right = (x.at[:, pl.ds(0, rest)] for x in (left, right))
            self.matmuls.multiply(accumulator, left, right, transposed=True)
            if chunk >= flight:
                plgpu.wgmma_wait(flight)
                self.reload(cta, n, chunk - flight)

        def reload():
            for chunk in range(max(count - flight, 0), count):
                self.reload(cta, n, chunk)

        return reload

    def step(self, cta: WideCta, given, accumulators, n, rows: Rows) -> Rows:
        # The first step sums values of the first tile, with weights of 0.
        own: ForwardKernel = dataclasses.replace(self, ends=given[1])
        return ForwardKernel.step(own, cta, given, accumulators, n, rows)

    def last_sums(self, cta: WideCta, n, accumulators):
        return dataclasses.replace(self, ends=True).sums(cta, n, accumulators)

    def summed_chunk(self, cta: WideCta, position: int):
        """Returns a chunk of values, 0 past the last key: a weight of 0 times a NaN is a NaN."""
        values = self.arrived(cta, position)
        if self.ends:
            half = (position - self.chunks.summed.start) // self.chunks.results
            valid = cta.tiles.kv_len - cta.near[0][half].key

            @pl.when(valid < WARPGROUP_ROWS)
            def _():
                clear_from(values, lax.max(valid, jnp.int32(0)), SWIZZLE_BYTES, self.interpret)
                plgpu.commit_smem()
                inline.warpgroup_barrier(self.interpret)

        return values

    def tile(self, cta: WideCta, block) -> RegisterTile:
        column = block * COLUMNS + cta.wg * WARPGROUP_ROWS
        shape = WARPGROUP_ROWS, WARPGROUP_ROWS
        return RegisterTile(cta.start, column, shape, interpret=self.interpret)

    # --- results ---------------------------------------------------------------------------------

    def store(self, cta: WideCta, state: Rows, found):
        l = self.joined_sums(cta, state)
        m, shift = online_softmax.settled(state.maxima)
        rows, sinks, sink = pl.ds(cta.start, WARPGROUP_ROWS), cta.gmem.sinks, None
        if sinks is not None:
            heads = pl.ds(self.query(cta.block)[1], WARPGROUP_ROWS)
            sink = plgpu.load(sinks.at[cta.batch, heads], layout=inline.ROWS, optimized=False)
        inverse, lse, shift = softmax.finish(m, l, shift, sink, self.problem.unit)
        o, *others = cta.out
        share = (cta.batch, lax.axis_index("split")) if self.splits else (cta.batch,)

        @pl.when(cta.wg == 0)
        def _():
            for out, x in zip(others, (lse, shift), strict=True):
                self.write_rows(cta, out.at[(*share, rows)], x)

        found = [x * per_row(inverse, x.shape) for x in found]
        if not self.splits:
            self.store_chunks(cta, o, found)
            return
        for i, x in enumerate(found):
            first = (cta.wg * len(found) + i) * WIDTH
            o.at[(*share, rows, pl.ds(first, WIDTH))][...] = x
        plgpu.wait_smem_to_gmem(0)


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
    several = (splits,) if splits > 1 else ()
    if splits > 1:
        o = float32((p.batch, splits, rows, p.v_head_dim))
    else:
        o = jax.ShapeDtypeStruct((p.batch, rows, 1, p.v_head_dim), p.dtype)
    of_rows = float32((p.batch, *several, rows))
    attention = _attention(p)
    kernel = LatentKernel(attention, blocks.wide, FORWARD, interpret, p, splits)
    run = launch(
        kernel,
        out=(o, of_rows, of_rows),
        scratch=scratch(attention, (FORWARD,), blocks.wide),
        # The rows of a sequence read the same keys at the same time.
        grid={"batch": p.batch, "split": splits, "tile": rows // WARPGROUP_ROWS},
        threads=WARPGROUPS,
        name="flash_pallas_decode_latent",
        interpret=interpret,
    )
    gmem = LatentGmem(
        q=operands.q.reshape(p.batch, rows, 1, p.head_dim),
        k=operands.k,
        kv_lengths=operands.kv_lengths,
        q_offset=operands.q_offset,
        page_table=operands.page_table,
        sinks=None if several else operands.sinks,
    )
    o, *others = run(gmem)
    others = [
        jnp.swapaxes(x.reshape(p.batch, *several, p.q_len, p.q_heads), -1, -2) for x in others
    ]
    if not several:
        return Outputs(o.reshape(p.batch, p.q_len, p.q_heads, p.v_head_dim), *others)
    o = o.reshape(p.batch, 1, splits, p.q_len, p.q_heads, p.v_head_dim)
    plan = DecodePlan(p, DecodeBlocks(num_splits=splits), interpret)
    return combine.combine(plan, DecodeResults(o, *(x[:, None] for x in others)), operands.sinks)
