"""Decode kernel: a few queries against one split of the keys.

A CTA of four warps owns one split of the keys of one KV head, for 64 rows of queries and heads of
the GQA group, so that a key is read once for all of them. Of more than 256 columns of V it has a
half. It loops over the keys as the forward
does: V is in flight while S is computed, and the next K while O is. The O and log-sum-exp of each
split go to device memory in float32. `softmax.merge` combines them and adds the sinks.

Splits are interleaved: the next KV block of a split lies `num_splits` blocks after the current one.
So the splits of a sequence are equally long whatever its length is, and read neighbouring blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import integers as ints
from ....core import scores, softmax
from ....core.decode import DecodeOperands, DecodeProblem, DraftArrays
from ....core.mask import BlockRange, Mask
from ....core.padding import pad_axis
from ....core.problem import Outputs
from ....core.scores import TileInputs
from ...gpu import score_tile
from ...gpu.launch import float32, launch
from ...gpu.ptx import draft_bits, inline, modifiers
from ...gpu.ptx.dequantize_padded import widen
from ...gpu.ptx.draft_bits import DraftBits
from ...gpu.ptx.mma_sync import store_accumulator
from ...gpu.ptx.online_softmax import far_of, settled
from ...gpu.ptx.sums_of_rows import row_sums
from ...gpu.score_tile import RegisterTile
from ..common.auxiliary_inputs import load_vector
from ..common.kernel import Kernel, Steps
from ..common.smem_tiles import Copy, columns_of
from ..common.softmax import Online, Rows, per_row
from . import tiles as tile_sizes
from .tiles import DecodeSmem, PortableDecodeBlocks, row_tiles


class DecodeArrays(NamedTuple):
    """Arrays in device memory; R is the number of rows of a KV head, rounded up to whole tiles."""

    q: Any  # [B, T, K, group, H]
    k: Any  # [B, S, K, H], or [num_pages, page_size, K, H]
    v: Any  # [B, S, K, Hv], or [num_pages, page_size, K, Hv]; k itself if it has the values
    kv_lengths: Any  # int32[B], or int32[B, K] where heads have page tables
    q_offset: Any  # int32[B], or None: the last query is the last key
    page_table: Any  # int32[B, max_pages], or None: the cache is contiguous
    slopes: Any  # f32[B, K, R], or None
    kv_starts: Any = None  # int32[B], or None: key 0 is the first
    window_left: Any = None  # int32[B], or None: the spec has the window, if there is one
    words: Any = None  # int32[B, 1 or 2, R], the drafts that each row sees; see core/drafts.py
    depths: Any = None  # int32[B, R], where drafts have a window
    k_scale: Any = None  # f32[1, K], f32[B, K] or f32[num_pages, K], of a cache in eight bits
    v_scale: Any = None  # likewise


class DecodeOut(NamedTuple):
    """Results of each split, without sinks."""

    o: Any  # f32[num_splits, B, K, T * group, Hv]
    lse: Any  # f32[num_splits, B, K, R], base 2; EMPTY_ROW: no key seen
    shift: Any  # f32[num_splits, B, K, R], see core/softmax.py; None where no logit can be far


class QueryFragments(NamedTuple):
    """Values of each row that are known before the first key; None: nothing is."""

    position: Any  # int32, of its query; None where nothing depends on it
    first: Any  # int32, the first key that it sees, or None: key 0
    last: Any  # int32, the last one
    slope: Any  # f32, or None
    k_scale: Any = None  # f32 that scores are multiplied by, for all rows
    v_scale: Any = None  # f32 that outputs are multiplied by, likewise
    drafts: DraftBits | None = None  # of a masked block


class DecodeCta(NamedTuple):
    """State of one CTA: its arrays, its rows and its split of the keys."""

    gmem: DecodeArrays
    out: DecodeOut
    smem: DecodeSmem
    batch: Any
    head: Any  # of K and V
    first_row: Any
    split: Any
    length: Any  # keys of the sequence
    position: Any  # of query 0
    mask: Mask  # of the sequence
    start: Any  # its first key; None: key 0
    part: Any = None  # of the columns of V; None: all of them
    first_block: Any = None
    steps: Any = None  # their n-th goes through block first_block + n * num_splits


@dataclasses.dataclass(frozen=True)
class DecodeKernel(Kernel):
    """One launch of the decode kernel; its methods are the phases of a CTA."""

    problem: DecodeProblem
    blocks: PortableDecodeBlocks
    interpret: bool

    @property
    def online(self) -> Online:
        """Online softmax: the update of the rows from one KV block to the next."""
        return Online(self.interpret, self.far)

    @property
    def far(self) -> float:
        """Logit, in base 2, from which on rows are shifted; 0: none can be that large."""
        return far_of(self.problem.spec.attention, self.problem.dtype)

    @property
    def total(self) -> int:
        """Number of rows of a KV head: queries times heads of the group."""
        return self.problem.q_len * self.problem.group

    def __call__(self, gmem: DecodeArrays, out: DecodeOut, smem: DecodeSmem):
        cta = self.seen(self.place(gmem, out, smem))
        own = Copy(gmem.q.at[cta.batch, :, cta.head], smem.q, cta.first_row, self.total)
        self.copies.start(own)
        self.copies.start(*self.load(cta, "k", 0))
        self.copies.arrived(own, pending=1)
        fragments = self.query_fragments(cta)
        zeros = self.matmuls.zeros(self.blocks.rows, columns_of(smem.v))
        no_keys = self.online.no_keys(self.blocks.rows, zeros)
        rows = cta.steps.fold(
            functools.partial(self.step, cta, fragments), no_keys, hides_end=not self.interpret
        )
        self.copies.arrived()
        self.finish(cta, fragments, rows)

    def place(self, gmem: DecodeArrays, out: DecodeOut, smem: DecodeSmem) -> DecodeCta:
        """Returns where this CTA is: its batch entry, split, KV head, rows and sequence length."""
        batch, split, head, tile = (lax.axis_index(x) for x in ("batch", "split", "head", "tile"))
        parts, part = tile_sizes.value_parts(self.problem), None
        if parts > 1:
            tile, part = lax.div(tile, jnp.int32(parts)), lax.rem(tile, jnp.int32(parts))
        own = (batch, head) if self.problem.of_heads else batch
        offset = None if gmem.q_offset is None else gmem.q_offset[batch]
        length, position = self.problem.key_range(gmem.kv_lengths[own], offset)
        mask, start = self.problem.lower_bound(
            gmem.kv_starts, gmem.window_left, batch, (length, position)
        )
        return DecodeCta(
            gmem=gmem,
            out=out,
            smem=smem,
            batch=batch,
            head=head,
            first_row=tile * self.blocks.rows,
            split=split,
            length=length,
            position=position,
            mask=mask,
            start=start,
            part=part,
        )

    def seen(self, cta: DecodeCta) -> DecodeCta:
        """Returns `cta` with the KV blocks of its split that its rows see."""
        mask, group = cta.mask, self.problem.group
        first, last = 0, self.problem.q_len - 1  # query of the tile
        if self.total > self.blocks.rows:
            last_row = cta.first_row + (self.blocks.rows - 1)
            first = ints.floor_div(cta.first_row, group)
            last = ints.minimum(ints.floor_div(last_row, group), last)
        position, number = cta.position + first, last - first + 1
        start, full_start, full_stop, stop = mask.kv_blocks(
            position, number, cta.length, self.blocks.columns, cta.start
        )
        block = cta.split + start
        uses = lambda end: ints.ceil_div(jnp.int32(end) - block, self.blocks.num_splits)
        none = jnp.int32(0)
        low = none if mask.left is None else uses(full_start)
        steps = Steps.of(BlockRange(none, low, uses(full_stop), uses(stop)))
        return cta._replace(first_block=block, steps=steps)

    def first_key(self, cta: DecodeCta, n):
        """Returns the first key of the KV block of the n-th step."""
        block = cta.first_block + n * self.blocks.num_splits
        return block * self.blocks.columns

    def load(self, cta: DecodeCta, name: str, n) -> tuple[Copy, ...]:
        """Returns the copies of the K or V tile of the n-th step, one per piece in one page.

        Pages and rings are multiples of 16 keys, and so are pieces. Page ids are read where they
        are needed: 32 of them are a line of the L1 cache, which the copies of keys bypass.
        """
        source, tile = getattr(cta.gmem, name), getattr(cta.smem, name)
        if self.problem.quantised:
            tile = cta.smem.raw["kv".index(name)]
        if name == "v":
            source = self.own_columns(cta, source)
        first, exists = self.first_key(cta, n), cta.steps[n].exists
        limit, start = jnp.where(exists, jnp.int32(cta.length), jnp.int32(0)), cta.start
        part_len = self.problem.part_len
        if part_len is None:
            return (Copy(source.at[cta.batch, :, cta.head], tile, first, limit, start),)
        copies, rows = [], math.gcd(self.blocks.columns, part_len)
        for below in range(0, self.blocks.columns, rows):
            key = jnp.int32(first + below)
            page, row = self.page(cta, key)
            piece = tile if rows == self.blocks.columns else tile.at[pl.ds(below, rows)]
            # Bounds as rows of the page.
            own = [None if x is None else x - key + row for x in (limit, start)]
            copies.append(Copy(source.at[page, :, cta.head], piece, row, *own))
        return tuple(copies)

    def page(self, cta: DecodeCta, key):
        """Returns (page of a key, row of it in the page); a ring is the sequence's only page."""
        table, part_len = cta.gmem.page_table, jnp.int32(self.problem.part_len or 0)
        if table is None:
            return cta.batch, lax.rem(key, part_len)
        entry = lax.div(key, part_len)
        # Clamped: entries beyond the table's end, and entries never set, name no page.
        own = (cta.batch, cta.head) if self.problem.of_heads else (cta.batch,)
        page = table[(*own, lax.min(entry, jnp.int32(table.shape[-1] - 1)))]
        page = lax.clamp(jnp.int32(0), page, jnp.int32(cta.gmem.k.shape[0] - 1))
        return page, key - entry * part_len

    def widened(self, cta: DecodeCta, name: str):
        """Makes the tile of K or V of a cache in eight bits one of 16, for all threads."""
        if self.problem.quantised:
            widen(cta.smem.raw["kv".index(name)], getattr(cta.smem, name), self.interpret)
            self.copies.sync()

    def page_scales(self, cta: DecodeCta, n) -> tuple:
        """Returns (scales of K, scales of V) of the n-th step, f32 for each piece of one page.

        Each may be None: scales are those of the rows, or 1.
        """
        if "page_scales" not in self.problem.features:
            return None, None
        first, columns = jnp.int32(self.first_key(cta, n)), self.blocks.columns
        rows = math.gcd(columns, self.problem.spec.page_size or 0)
        keys = [first + below for below in range(0, columns, rows)]
        pages = [self.page(cta, key)[0] for key in keys]

        def scales(array):
            if array is None:
                return None
            return [self.page_scale(cta, array, *x, rows) for x in zip(keys, pages, strict=True)]

        return scales(cta.gmem.k_scale), scales(cta.gmem.v_scale)

    def page_scale(self, cta: DecodeCta, scales, key, page, rows: int):
        """Returns the scale of `rows` keys from `key` on; that of padding may be NaN and is 1."""
        exists = key < cta.length
        if cta.start is not None:
            exists = exists & (key + rows > cta.start)
        scale = scales[page if scales.shape[0] > 1 else 0, cta.head]
        return lax.select(exists, scale, jnp.float32(1.0))

    def own_columns(self, cta: DecodeCta, ref):
        """Returns the columns of V or O, the last axis of `ref`, that are this CTA's."""
        columns, leading = (
            tile_sizes.part_columns(self.problem),
            (slice(None),) * (len(ref.shape) - 1),
        )
        if cta.part is None:
            has_all = ref.shape[-1] == columns
            return ref if has_all else ref.at[(*leading, pl.ds(0, columns))]
        return ref.at[(*leading, pl.ds(cta.part * columns, columns))]

    def query_fragments(self, cta: DecodeCta) -> QueryFragments:
        """Returns the positions, key limits and ALiBi slopes of the rows."""
        rows, slope = self.blocks.rows, None
        own = pl.ds(cta.first_row, rows)
        if cta.gmem.depths is not None:
            position = load_vector(cta.gmem.depths.at[cta.batch, own], 0) + cta.position
        elif self.problem.drafts and cta.mask.left is None:
            position = None  # Mosaic finds no layout for a vector that nothing reads.
        else:
            position = (
                queries(cta.first_row, rows, self.problem.group, self.total, self.interpret)
                + cta.position
            )
        if cta.gmem.slopes is not None:
            slope = load_vector(cta.gmem.slopes.at[cta.batch, cta.head, own], 0)
        limits = cta.mask.keys_of(position, cta.length, cta.start)
        return QueryFragments(position, *limits, slope, *self.scales(cta))

    def scales(self, cta: DecodeCta) -> tuple:
        """Returns (scale of K, scale of V); None where there is none, or one for each page."""
        if "page_scales" in self.problem.features:
            return None, None
        scales = cta.gmem.k_scale, cta.gmem.v_scale
        entry = lambda x: cta.batch if x.shape[0] > 1 else 0
        return tuple(None if x is None else x[entry(x), cta.head] for x in scales)

    def draft_bits(self, cta: DecodeCta) -> DraftBits | None:
        """Returns the drafts that the rows see, which few blocks need; None: there are none."""
        words = cta.gmem.words
        if words is None:
            return None
        own = pl.ds(cta.first_row, self.blocks.rows)
        row_words = (load_vector(words.at[cta.batch, i, own], 0) for i in range(words.shape[1]))
        return DraftBits(tuple(row_words), cta.position)

    # --- a block of keys -------------------------------------------------------------------------

    def step(
        self, cta: DecodeCta, fragments: QueryFragments, n, rows: Rows, *, masked: bool
    ) -> Rows:
        """Folds one KV block into the rows."""
        if masked:
            fragments = fragments._replace(drafts=self.draft_bits(cta))
        # Computed before the wait, so that a page id is loaded once for K and V.
        k, v = (self.load(cta, name, n) for name in ("k", "v"))
        self.copies.arrived(*k)
        self.copies.start(*v)
        self.widened(cta, "k")
        k_scales, v_scales = self.page_scales(cta, n)
        zeros = self.matmuls.zeros(self.blocks.rows, self.blocks.columns)
        s = self.matmuls.add(zeros, cta.smem.q, cta.smem.k, transposed=True)
        self.copies.arrived(*v)
        self.copies.start(*self.load(cta, "k", n + 1))
        self.widened(cta, "v")
        scaled = lambda x, scales: (
            x if scales is None else inline.scale_columns(x, scales, self.interpret)
        )
        s = scaled(s, k_scales)
        x, log2_scale = self.logits(fragments, self.first_key(cta, n), s, masked=masked)
        narrowed = lambda p: scaled(p, v_scales).astype(self.problem.dtype)
        weighed = self.online.weigh(rows, x, log2_scale, narrowed)
        rows = self.online.rescaled(rows, weighed)
        return rows._replace(o=self.matmuls.add(rows.o, weighed.p, cta.smem.v))

    def logits(self, fragments: QueryFragments, first, s, *, masked: bool):
        """Returns (x, log2_scale) of a tile of S whose first key is `first`; -inf where hidden."""
        falls = None
        if fragments.k_scale is not None:
            s = s * fragments.k_scale
        if fragments.slope is not None:
            key = modifiers.positions(s.shape, 1, first, self.interpret)
            query = per_row(fragments.position, s.shape)
            falls = score_tile.alibi(query, key, per_row(-fragments.slope, s.shape))
        tile = RegisterTile(0, first, s.shape, interpret=self.interpret)
        tile_logits = scores.logits(self.problem.spec.attention, tile, s, TileInputs(falls=falls))
        x = tile_logits.x
        if masked:
            low = None if fragments.first is None else fragments.first - first
            if fragments.drafts is not None:
                x = inline.hide_outside(x, low, None, self.interpret)
                x = draft_bits.hide(x, fragments.drafts, first, 1, self.interpret)
            else:
                x = inline.hide_outside(x, low, fragments.last - first, self.interpret)
        return x, tile_logits.log2_scale

    # --- the end ---------------------------------------------------------------------------------

    def finish(self, cta: DecodeCta, fragments: QueryFragments, rows: Rows):
        """Divides O by the row sums and writes O and the log-sum-exp of this split."""
        m, shift = settled(rows.maxima)
        inverse, lse, shift = softmax.finish(m, row_sums(rows.l, self.interpret), shift)
        if fragments.v_scale is not None:
            inverse = inverse * fragments.v_scale
        coordinates = cta.split, cta.batch, cta.head
        o = rows.o * per_row(inverse, rows.o.shape)
        target = self.own_columns(cta, cta.out.o.at[coordinates])
        store_accumulator(o, target, (cta.first_row, 0), self.interpret)
        own = (*coordinates, pl.ds(cta.first_row, self.blocks.rows))

        def store_rows():
            cta.out.lse[own] = lse
            if cta.out.shift is not None:
                cta.out.shift[own] = shift

        if cta.part is None:
            store_rows()
        else:
            pl.when(cta.part == 0)(store_rows)


def decode(
    problem: DecodeProblem, blocks: PortableDecodeBlocks, operands: DecodeOperands, interpret: bool
) -> Outputs:
    """Launches the decode kernel and merges the splits.

    Args:
        problem: one for which `tiles.unsupported` returns None.
        blocks: tile sizes and the number of splits.
        operands: those of core.decode; page ids need not be in range.
        interpret: run under the interpreter.

    Returns:
        Outputs: o [B, T, N, Hv] in q's dtype and lse_log2 f32[B, N, T].
    """
    heads, tiles = (problem.kv_heads, problem.group), row_tiles(problem)
    rows = tiles * blocks.rows
    lead, total = (blocks.num_splits, problem.batch, problem.kv_heads), problem.q_len * heads[1]
    out = DecodeOut(
        o=float32((*lead, rows if interpret else total, problem.v_head_dim)),
        lse=float32((*lead, rows)),
        shift=float32((*lead, rows)) if far_of(problem.spec.attention, problem.dtype) else None,
    )
    drafts = DraftArrays.of(problem, operands)
    run = launch(
        DecodeKernel(problem, blocks, interpret),
        out=(out,),
        scratch=(tile_sizes.decode_layout(problem, blocks),),
        # Heads vary faster than splits: what runs at one time reads all heads of a key, which are
        # neighbours.
        grid={
            "batch": problem.batch,
            "split": blocks.num_splits,
            "head": problem.kv_heads,
            "tile": tiles * tile_sizes.value_parts(problem),
        },
        threads=1,
        name="flash_pallas_portable_decode",
        interpret=interpret,
    )
    (outputs,) = run(
        DecodeArrays(
            q=operands.q.reshape(*operands.q.shape[:2], *heads, problem.head_dim),
            k=operands.k,
            v=operands.k if operands.v is None else operands.v,
            kv_lengths=operands.kv_lengths,
            q_offset=operands.q_offset,
            page_table=operands.page_table,
            slopes=_of_rows(problem, operands.alibi_slopes, rows),
            kv_starts=operands.kv_starts,
            window_left=operands.window_left,
            words=_of_queries(problem, drafts.words, rows),
            depths=_of_queries(problem, drafts.depths, rows),
            k_scale=operands.k_scale,
            v_scale=operands.k_scale if operands.v is None else operands.v_scale,
        )
    )
    shift = jnp.zeros_like(outputs.lse) if outputs.shift is None else outputs.shift
    parts = DecodeOut(outputs.o[..., :total, :], outputs.lse[..., :total], shift[..., :total])
    return _joined(problem, parts, operands.sinks)


def _of_rows(problem: DecodeProblem, x, rows: int):
    """Spreads one number per head, [B, N], over the rows: f32[B, K, rows]; None stays None."""
    if x is None:
        return None
    sizes = problem.batch, problem.kv_heads, problem.q_len, problem.group
    spread = jnp.broadcast_to(x.reshape(*sizes[:2], 1, sizes[3]), sizes)
    return pad_axis(spread.reshape(*sizes[:2], -1), 2, rows)


def _of_queries(problem: DecodeProblem, x, rows: int):
    """Spreads one number per query, [..., T], over the rows: [..., rows]; None stays None."""
    if x is None:
        return None
    return pad_axis(jnp.repeat(x, problem.group, axis=-1), x.ndim - 1, rows)


def _joined(problem: DecodeProblem, parts: DecodeOut, sinks) -> Outputs:
    """Merges the results of all splits into those of all keys."""
    p, sinks = problem, _of_rows(problem, sinks, parts.lse.shape[-1])
    o, *rows = softmax.merge(parts.o, parts.lse, parts.shift, sinks, p.unit)
    o = o.reshape(p.batch, p.kv_heads, p.q_len, p.group, p.v_head_dim).transpose(0, 2, 1, 3, 4)
    o = o.reshape(p.batch, p.q_len, p.q_heads, p.v_head_dim).astype(p.dtype)

    def by_head(x):
        x = x.reshape(p.batch, p.kv_heads, p.q_len, p.group).transpose(0, 1, 3, 2)
        return x.reshape(p.batch, p.q_heads, p.q_len)

    return Outputs(o, *map(by_head, rows))


def queries(first, rows: int, group: int, total: int, interpret: bool):
    """Returns int32[rows]: the query of each row from `first` on, or the last one past the end."""
    row = lax.broadcasted_iota(jnp.int32, (rows,), 0)
    if not interpret:
        row = plgpu.layout_cast(row, inline.ROWS)
    row = lax.min(row + first, jnp.full_like(row, total - 1))
    return row if group == 1 else lax.div(row, jnp.full_like(row, group))
