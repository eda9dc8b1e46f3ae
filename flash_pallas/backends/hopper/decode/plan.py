"""The plan of a CTA of the decode kernel: its operands, its results and the keys that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ....core import integers as ints
from ....core.decode import DraftArrays
from ....core.mask import Mask
from ...gpu.launch import WARPGROUP_ROWS, float32
from ...gpu.ptx import cleared_rows, inline
from ...gpu.ptx.pack_gqa import PackedGqa
from ..common import pipeline
from ..common.pipeline import Ring
from .tiles import DecodeBarriers, DecodeLayout, DecodeSmem, takes_wide

JOINING_THREADS = 128  # of the warpgroup that joins a row of shares, one element or more each


class DecodeGmem(NamedTuple):
    """Operands in device memory; row r of a KV head is head r % group of query r // group."""

    q: Any  # [B, T, K, group, H], or packed [tokens, K, group, H] where there are `ends`
    k: Any  # [B, S, K, H] or [num_pages, page_size, K, H]
    v: Any  # [B, S, K, Hv] or [num_pages, page_size, K, Hv]
    kv_lengths: Any  # int32[B], or int32[B, K] where heads have page tables
    q_offset: Any  # int32[B], or None: the last query is the last key
    page_table: Any = None  # int32[B, max_pages] or [B, K, max_pages]; None: a contiguous cache
    slopes: Any = None  # f32[B, K, group]
    sinks: Any = None  # f32[B, K, group], natural; where there is one split
    k_scale: Any = None  # f32[1, K], f32[B, K] or f32[num_pages, K], of a cache in eight bits
    v_scale: Any = None  # likewise
    kv_starts: Any = None  # int32[B], or None: key 0 is the first
    window_left: Any = None  # int32[B], or None: the spec has the window, if there is one
    drafts: DraftArrays = DraftArrays()
    ends: Any = None  # int32[B + 1], of Packed


class DecodeResults(NamedTuple):
    """Results in device memory: of each split, or the final ones where there is one split.

    The final o is in q's dtype.
    """

    o: Any  # f32[B, K, splits, T, group, columns]; final [B, T, K, group, Hv], or [tokens, ...]
    lse: Any  # f32[B, K, splits, group, T], or f32[B, K, group, T]; base 2, EMPTY_ROW: no key seen
    shift: Any  # as lse; see core/softmax.py
    counter: Any = None  # int32[1], set to 0 for a launch that follows, where queries are packed


class Packed(NamedTuple):
    """Queries of a batch among the rows of packed arrays, which hold other queries too.

    An entry that has not just one row has no keys and writes no o.
    """

    ends: Any  # int32[B + 1]: entry b has the rows from ends[b] up to ends[b + 1]
    tokens: int  # number of rows of o


def packed_row(ends, entry):
    """Returns (row, exists) of an entry of `Packed`; row 0 where it has not just one."""
    first = ends[entry]
    exists = ends[entry + 1] - first == 1
    return lax.select(exists, first, jnp.int32(0)), exists


class Keys(NamedTuple):
    """The KV blocks that a CTA reads: its n-th is first + n * step, for n in [0, stop).

    Blocks with n in [full_start, full_stop) need no mask.
    """

    first: Any
    step: int
    full_start: Any
    full_stop: Any
    stop: Any
    length: Any  # keys of the sequence
    position: Any  # of query 0
    start: Any  # first key of the sequence; None: key 0
    mask: Mask  # of the sequence

    def block(self, n):
        """Returns the index of the CTA's n-th KV block."""
        return self.first + n * self.step

    def zones(self, windowed: bool):
        """Returns (low, high, masked) of each part; only a window has a masked first part."""
        left = ((jnp.int32(0), self.full_start, True),) * windowed
        rest = (self.full_start, self.full_stop, False), (self.full_stop, self.stop, True)
        return left + rest


@dataclasses.dataclass(frozen=True)
class DecodeCta:
    """The refs of one CTA, and its place in the grid."""

    gmem: DecodeGmem
    out: DecodeResults
    smem: DecodeSmem
    bars: DecodeBarriers
    k: Ring
    v: Ring
    batch: Any
    head: Any  # of K and V
    tile: Any  # of rows
    split: Any
    part: Any = None  # of the columns of V: the compute warpgroup's, where there are several


def combined_columns(v_head_dim: int) -> int:
    """Returns the row length of a share's O: 1, 2 or 4 elements for each thread of a warpgroup."""
    columns = ints.round_up(v_head_dim, JOINING_THREADS)
    return columns if columns <= 2 * JOINING_THREADS else 4 * JOINING_THREADS


@dataclasses.dataclass(frozen=True)
class DecodePlan(DecodeLayout):
    """One launch of the decode kernel: its rows, its results and the blocks of each CTA.

    Attributes:
        skips: entries without keys write no results, and nobody reads them.
    """

    skips: bool = False

    @property
    def rows(self) -> int:
        """Number of rows: all queries and heads that share a KV head."""
        return self.problem.q_len * self.problem.group

    def packed(self, tile) -> PackedGqa:
        """Returns the (query, head) pairs that are the rows of a tile."""
        first = tile * WARPGROUP_ROWS
        layout = inline.COLS if self.blocks.upright else inline.ROWS
        q_len, group, at_once = self.problem.q_len, self.problem.group, takes_wide(self.problem)
        return PackedGqa(q_len, group, first, self.interpret, self.tile_rows, layout, at_once)

    def by_key_head(self, x, axis: int):
        """Reshapes the axis [N] of x to [K, group], without a copy; None stays None."""
        if x is None:
            return None
        heads = self.problem.kv_heads, self.problem.group
        return x.reshape(*x.shape[:axis], *heads, *x.shape[axis + 1 :])

    def result_shapes(self, tokens: int | None = None) -> DecodeResults:
        """Returns the shapes and dtypes of what the launch returns; of packed o with `tokens`."""
        problem = self.problem
        lead, last = (problem.batch, problem.kv_heads), (problem.q_len, problem.group)
        if self.several:
            lead = (*lead, self.blocks.num_splits)
            o = float32((*lead, *last, combined_columns(self.head_dims[1])))
        else:
            rows = (problem.batch, problem.q_len) if tokens is None else (tokens,)
            shape = (*rows, *lead[1:], problem.group, problem.v_head_dim)
            o = jax.ShapeDtypeStruct(shape, problem.dtype)
        per_row = float32((*lead, *last[::-1]))
        counter = None if tokens is None else jax.ShapeDtypeStruct((1,), jnp.int32)
        return DecodeResults(o, per_row, per_row, counter)

    def results(self, cta: DecodeCta) -> DecodeResults:
        """Returns where the CTA's rows go: o [T, group, columns], lse and shift [group, T]."""
        if self.several:
            return DecodeResults(*(x.at[cta.batch, cta.head, cta.split] for x in cta.out[:3]))
        rows = (x.at[cta.batch, cta.head] for x in (cta.out.lse, cta.out.shift))
        return DecodeResults(self.of_entry(cta, cta.out.o), *rows)

    def of_entry(self, cta: DecodeCta, x):
        """Returns q or o of the CTA's entry and head, [T, group, columns]; row 0 if it has none."""
        if cta.gmem.ends is None:
            return x.at[cta.batch, :, cta.head]
        row, _ = packed_row(cta.gmem.ends, cta.batch)
        return x.at[pl.ds(row, 1), cta.head]

    def where_row(self, cta: DecodeCta, run: Callable[[], None]):
        """Calls `run` unless it would write the final o of an entry without a row."""
        if cta.gmem.ends is None or self.several:
            run()
        else:
            _, exists = packed_row(cta.gmem.ends, cta.batch)
            pl.when(exists)(run)

    def q_swizzle(self, gmem: DecodeGmem) -> int:
        """Returns the swizzle of Q in bytes: that of K, with which Q is multiplied."""
        return self.k_swizzle(*self.copied(gmem.k))

    def slot(self, ring: Ring, use):
        """Returns the slot of a block that matmuls read.

        ptxas does not know it where there is one: it would keep the descriptors of a wide block, 36
        of K alone, through the loop.
        """
        slot = ring.slot(use)
        return pipeline.hidden(slot) if self.stages_over_q else slot

    def queries(self, tile):
        """Returns (first, last) query of a tile of rows."""
        if self.rows <= WARPGROUP_ROWS:
            return 0, self.problem.q_len - 1
        first = tile * WARPGROUP_ROWS
        group, last = self.problem.group, first + (WARPGROUP_ROWS - 1)
        most = self.problem.q_len - 1
        return ints.floor_div(first, group), ints.minimum(ints.floor_div(last, group), most)

    @property
    def guesses(self) -> bool:
        """True if a CTA knows its first blocks before it knows the length."""
        return self.blocks.guesses and not self.problem.bounded_below

    def guessed(self, cta: DecodeCta):
        """Returns how many of the first `stages` blocks there is room for, whatever the length.

        It is 0 where the plan does not guess, and for an entry without a row: eight prompts, which
        are no steps, would have 128 CTAs copy 8 MB for nothing.
        """
        if not self.guesses:
            return jnp.int32(0)
        room = -(-self.problem.kv_len // self.blocks.block_kv)
        count = lax.min(self._uses(cta.split, room), jnp.int32(self.blocks.stages))
        if cta.gmem.ends is None:
            return count
        _, exists = packed_row(cta.gmem.ends, cta.batch)
        return lax.select(exists, count, jnp.int32(0))

    def where_v_has(self, n, run: Callable[[], None]):
        """Calls `run` if there is a slot for the n-th of the blocks of V that are guessed."""
        if self.v_slots == self.slots:
            run()
        else:
            pl.when(n < self.v_slots)(run)

    def keys(self, cta: DecodeCta) -> Keys:
        """Returns the CTA's share of the KV blocks that its rows see: every num_splits-th.

        That way all CTAs read neighbouring blocks at one time.
        """
        entry = (cta.batch, cta.head) if self.problem.of_heads else cta.batch
        ends, offset = cta.gmem.ends, cta.gmem.q_offset
        length, position = self.problem.key_range(
            cta.gmem.kv_lengths[entry],
            None if offset is None else offset[cta.batch],
            None if ends is None else packed_row(ends, cta.batch)[1],
        )
        first, last = self.queries(cta.tile)
        mask, start = self.problem.lower_bound(
            cta.gmem.kv_starts, cta.gmem.window_left, cta.batch, (length, position)
        )
        kv_range = mask.kv_blocks(
            position + first, last - first + 1, length, self.blocks.block_kv, start
        )
        block = cta.split if mask.left is None else kv_range.start + cta.split
        return Keys(
            first=block,
            step=self.blocks.num_splits,
            full_start=self._uses(block, kv_range.full_start),
            full_stop=self._uses(block, kv_range.full_stop),
            stop=self._uses(block, kv_range.stop),
            length=length,
            position=position,
            start=start,
            mask=mask,
        )

    def has_padding(self, keys: Keys, first):
        """Returns (full, padded), bools: whether a block from key `first` on has only keys."""
        valid, block = keys.length - first, self.blocks.block_kv
        full, padded = valid >= block, valid < block
        if keys.start is None:
            return full, padded
        return full & (keys.start <= first), padded | (keys.start > first)

    def clear_padding(self, tile, keys: Keys, first, swizzle: int):
        """Zeroes the rows of a block of V, from key `first` on, that are no keys of the sequence.

        A weight of 0 times a NaN is a NaN, so padding is not multiplied.
        """
        valid = keys.length - first
        if keys.start is None:
            cleared_rows.clear_from(tile, valid, swizzle, self.interpret)
        else:
            cleared_rows.clear_outside(tile, keys.start - first, valid, swizzle, self.interpret)

    def _uses(self, block, end):
        """Returns how many of block, block + num_splits, ... lie before `end`."""
        return ints.ceil_div(jnp.int32(end - block), self.blocks.num_splits)
