"""Operands of the backward kernels, and the range of tiles that a CTA visits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ....core import block_lists, bounds, padding
from ....core import integers as ints
from ....core.block_lists import BlockLists
from ....core.integers import round_up
from ....core.padding import pad_axis
from ....core.problem import Cotangents, Operands, Problem
from ....core.softmax import EMPTY_ROW
from ...gpu.auxiliary_arrays import AuxiliaryGmem, with_shift
from ..common import tile_lists
from ..common.auxiliary_inputs import AuxiliaryInputs
from ..common.pipeline import Matmuls, Padding
from ..common.tile_lists import TileList

# --- The operands of every backward kernel, padded for TMA ----------------------------------------

ROW_MULTIPLE = 128  # of lse and delta: the widest Q tile


class BackwardArrays(NamedTuple):
    """Operands of a backward kernel in device memory.

    T8 and S8 are the sequence lengths rounded up to a multiple of 8. D and Dv are the head dims
    that a kernel runs or, where TMA fills its tiles up with zeros, those of the call. Padding is 0
    except in lse_log2, where it is core.softmax.EMPTY_ROW, so that padded queries get P = 0. q, k,
    v and do have the operand form of Matmuls, and so have the gradients of q, k and v.
    """

    q: Any  # [B, T8, N, D]
    k: Any  # [B, S8, K, D]
    v: Any  # [B, S8, K, Dv]
    do: Any  # [B, T8, N, Dv]
    lse_log2: Any  # f32[B, N, T up to a multiple of 128]
    delta: Any  # f32[B, N, T up to a multiple of 128]
    q_offset: Any = None  # int32[B], where problem.traced_offset
    bounds: Any = None  # int32[B, own blocks, 2], where arrays decide which blocks a CTA reads
    q_whole: Any = None  # int32[B, own blocks, 2], bounds.q_whole, where problem.hides_by_arrays
    lists: Any = None  # BlockLists of own blocks, in place of bounds and q_whole; if is_listed
    states: Any = None  # int32 of every pair of blocks of these lists; for backward/dbias
    auxiliary: AuxiliaryGmem = AuxiliaryGmem()  # what modifiers read
    q_padding: Padding | None = None  # that is to be cleared; for kernels that can
    kv_padding: Padding | None = None
    shift: Any = None  # f32[B, N, as delta], of lse_log2; None where it is 0

    @classmethod
    def of(
        cls,
        problem: Problem,
        operands: Operands,
        cotangents: Cotangents,
        summed_rows: tuple[tuple[int, ...], ...],
    ) -> BackwardArrays:
        """Makes the arrays for the head dims of `problem`; copies only what is padded or split.

        `summed_rows`: of all tiles of Q and K, and of V and dO, as Matmuls.operand takes them.
        """
        tile = Matmuls(problem.dtype).operand
        qk_summed_rows, v_summed_rows = summed_rows
        rows = round_up(problem.q_len, ROW_MULTIPLE)
        return cls(
            q=tile(operands.q, problem.head_dim, *qk_summed_rows),
            k=tile(operands.k, problem.head_dim, *qk_summed_rows),
            v=tile(operands.v, problem.v_head_dim, *v_summed_rows),
            do=tile(cotangents.do, problem.v_head_dim, *v_summed_rows),
            lse_log2=pad_axis(cotangents.lse_log2, 2, rows, EMPTY_ROW),
            delta=pad_axis(cotangents.delta, 2, rows),
            q_offset=operands.q_offset,
            shift=None if cotangents.shift is None else pad_axis(cotangents.shift, 2, rows),
        )

    def auxiliary_of(self, problem: Problem, operands: Operands, q_axis: int) -> AuxiliaryGmem:
        """Returns what modifiers read, with the shift of each row and the groups that have one."""
        auxiliary = AuxiliaryInputs(problem, q_axis).arrays(operands)
        return with_shift(auxiliary, self.shift, problem.kv_heads)

    def for_rows(self, problem: Problem, operands: Operands, q_axis: int, tile) -> BackwardArrays:
        """Adds what a kernel reads whose rows are queries (q_axis 0) or keys (1).

        Args:
            problem: what is computed.
            operands: operands as the backend got them.
            q_axis: axis of the kernel's tiles that runs over queries.
            tile: (queries, keys) of one step of a CTA.
        """
        if problem.is_listed:
            lists = lists_of(problem, operands, q_axis, tile)
            auxiliary = self.auxiliary_of(problem, operands, q_axis)
            return self._replace(lists=lists, auxiliary=auxiliary)
        find = bounds.q_bounds if q_axis else bounds.kv_bounds
        hides = q_axis == 1 and problem.hides_by_arrays
        return self._replace(
            q_whole=bounds.q_whole(operands, *tile) if hides else None,
            bounds=find(problem, operands, *tile) if problem.is_dynamic else None,
            auxiliary=self.auxiliary_of(problem, operands, q_axis),
        )

    def for_any_tile(self, problem: Problem, operands: Operands) -> BackwardArrays:
        """Adds what a kernel reads that goes through all tiles, whether lists name them or not."""
        lists, keys = operands.block_lists, problem.list_block[1]
        states = block_lists.states_of(lists, -(-problem.kv_len // keys))
        return self._replace(
            states=states.astype(jnp.int32), auxiliary=self.auxiliary_of(problem, operands, 0)
        )

    def with_padding(self, operands: Operands, block_q: int, block_kv: int) -> BackwardArrays:
        """Adds the padding of Q and KV tiles of these sizes, for a kernel that clears it itself."""
        return self._replace(
            q_padding=Padding.of(padding.valid_queries(operands), block_q),
            kv_padding=Padding.of(padding.valid_keys(operands), block_kv),
        )

    def with_rows_past(self, rows: int) -> BackwardArrays:
        """Pads what has one value a row by `rows` rows past the last query, which see no key."""
        longer = self.lse_log2.shape[2] + rows
        return self._replace(
            lse_log2=pad_axis(self.lse_log2, 2, longer, EMPTY_ROW),
            delta=pad_axis(self.delta, 2, longer),
            shift=None if self.shift is None else pad_axis(self.shift, 2, longer),
        )

    def scaled(self, factor: float) -> BackwardArrays:
        """Rescales the LSE so that kernels make factor * P of it, and delta to go with such a P."""
        lse_log2 = self.lse_log2 - math.log2(factor)
        return self._replace(lse_log2=lse_log2, delta=self.delta / factor)

    def with_any_far(self) -> BackwardArrays:
        """Adds whether some row of the call is far, for launches of which one computes nothing."""
        # With the barrier these are two launches, otherwise four.
        most = jnp.max(lax.optimization_barrier(self.auxiliary.far), keepdims=True)
        return self._replace(auxiliary=self.auxiliary._replace(any_far=most.reshape(1)))

    def offset(self, problem: Problem, batch):
        """Returns the position of query 0 of a batch entry."""
        return self.q_offset[batch] if problem.traced_offset else problem.spec.q_offset

    def kv_len(self, problem: Problem, batch, block_kv: int):
        """Returns the number of keys of a batch entry; None where all KV tiles are whole."""
        if self.auxiliary.kv_lengths is not None:
            return self.auxiliary.kv_lengths[batch]
        return problem.kv_len if problem.kv_len % block_kv else None


def lists_of(problem: Problem, operands: Operands, q_axis: int, tile) -> BlockLists:
    """Returns the lists of tiles, in their order, for `BackwardArrays.for_rows`.

    Those of queries are not rotated: see STREAMED_BYTES.
    """
    if not q_axis:
        lists = block_lists.of_queries(problem, operands, tile)
        return tile_lists.ordered(lists, problem.batch, problem.q_heads)
    size, widths = problem.dtype.itemsize, problem.head_dim + problem.v_head_dim
    lists = block_lists.of_keys(problem, operands, tile, problem.group)
    lists = tile_lists.ordered(lists, problem.batch, problem.kv_heads)
    blocks = pl.cdiv(problem.q_len, tile[0]) * problem.group
    streamed = problem.q_len * (size * widths + 4 * problem.head_dim)
    return tile_lists.rotated(lists, problem.kv_heads, blocks, streamed)


# --- Which tile a CTA of backward/split owns ------------------------------------------------------


def own_grid(problem: Problem, axes: dict[str, int]) -> dict[str, int]:
    """Returns the grid of CTAs that each own a block, of axes "batch", "head" and "block".

    Where blocks have lists it has one axis, and CTAs follow the order of the lists.
    """
    return {"cta": math.prod(axes.values())} if problem.is_listed else axes


def own_place(
    problem: Problem, arrays: BackwardArrays, heads: int
) -> tuple[Any, Any, Callable[[], Any]]:
    """Returns (batch entry, block, function that returns the head) of this CTA in an `own_grid`.

    ptxas orders other instructions by where the head is read: callers read it where they need it.
    """
    if problem.is_listed:
        batch, head, block = tile_lists.place(arrays.lists, lax.axis_index("cta"), heads)
        return batch, block, lambda: head
    batch, block = lax.axis_index("batch"), lax.axis_index("block")
    return batch, block, lambda: lax.axis_index("head")


# --- KV tiles that a query-stationary CTA of the backward reads, and which of them it masks -----


class KvTileRange(NamedTuple):
    """Range of KV tiles, start to stop, at least one; all are masked from `masked_from` on."""

    start: Any
    masked_from: Any
    stop: Any  # after start; with `everywhere` it need not be, and one block is read all the same
    kv_len: Any  # number of keys; None where no tile reaches past the last one
    everywhere: bool  # `mask_everywhere` of the problem

    @classmethod
    def of(
        cls, problem: Problem, arrays: BackwardArrays, own_tile, rows: int, block_kv: int
    ) -> KvTileRange:
        """Makes the range of a CTA's queries.

        It is the same for all its warpgroups: they release blocks together.

        Args:
            problem: what is computed.
            arrays: operands in device memory.
            own_tile: (batch entry, Q block, position of its first query).
            rows: number of queries in a block.
            block_kv: number of keys in a block.
        """
        batch, block, position = own_tile
        mask = problem.spec.mask
        kv_blocks = mask.kv_blocks(position, rows, problem.kv_len, block_kv)
        start, full_stop, stop = kv_blocks.start, kv_blocks.full_stop, kv_blocks.stop
        if arrays.bounds is not None:
            start, stop = arrays.bounds[batch, block, 0], arrays.bounds[batch, block, 1]
        elif mask.left is not None:
            start = ints.minimum(start, -(-problem.kv_len // block_kv) - 1)
        if not mask_everywhere(problem):
            stop = ints.maximum(stop, start + 1)
        if arrays.auxiliary.kv_lengths is not None:
            whole_blocks = ints.floor_div(arrays.auxiliary.kv_lengths[batch], block_kv)
            full_stop = ints.minimum(full_stop, whole_blocks)
        everywhere, kv_len = mask_everywhere(problem), arrays.kv_len(problem, batch, block_kv)
        if everywhere:
            full_stop = start
        elif arrays.bounds is not None:
            full_stop = ints.clip(full_stop, start, stop)
        return cls(start, full_stop, stop, kv_len, everywhere)

    @property
    def total(self):
        """Number of blocks."""
        # Written like this, LLVM sees that the loop runs at least once. Otherwise ptxas ends dQ
        # before every step, as its registers might be needed after the loop (C7517).
        if self.everywhere:
            return jnp.int32(ints.maximum(self.stop - self.start, 1))
        return jnp.int32(self.stop - self.start)

    def __getitem__(self, n):
        """Returns the n-th block."""
        return self.start + n

    def visit(self, step, *, masks: bool, far=None, far_step: Any = None):
        """Calls step(n, masked=) for every block; without `masks` none is masked.

        The masked ones are a loop of their own. `far` and `far_step` are as in QTileRange.visit.
        """
        if far is None:
            self._visit(step, masks, lambda end, start: end)
            return
        self._visit(step, masks, lambda end, start: lax.select(far > 0, start, end))
        ends = jnp.int32(0), lax.select(far > 0, self.total, jnp.int32(0))
        pl.loop(*ends)(functools.partial(far_step, masked=masks))

    def _visit(self, step, masks: bool, until):
        """Runs the loops; each ends at until(end, start)."""
        masked = functools.partial(step, masked=True)
        if self.everywhere:
            pl.loop(jnp.int32(0), until(self.total, jnp.int32(0)))(masked)
            return
        unmasked = jnp.int32(self.masked_from - self.start)
        pl.loop(jnp.int32(0), until(unmasked, jnp.int32(0)))(functools.partial(step, masked=False))
        if masks:
            # With known bounds a single masked block is peeled off, and its registers next to those
            # of the loop make ptxas serialise every wgmma (C7512, head dim 128).
            total = until(lax.optimization_barrier(self.total), unmasked)
            pl.loop(unmasked, total)(masked)


class KvTileList(NamedTuple):
    """The KV tiles of a query-stationary CTA that a list names, in place of a KvTileRange."""

    listed: TileList
    kv_len: Any  # how many keys there are; 0 where the list is empty

    @classmethod
    def of(cls, problem: Problem, arrays: BackwardArrays, own_tile, block_kv: int) -> KvTileList:
        """Makes the list of a CTA's queries; `own_tile`: (batch entry, head, Q block)."""
        listed = TileList.of(problem, arrays.lists, own_tile)
        return cls(listed, _keys_seen(problem, arrays, own_tile[0], listed, block_kv))

    @property
    def total(self):
        """Number of tiles, at least one."""
        return self.listed.steps

    def __getitem__(self, n):
        """Returns the n-th block."""
        return self.listed[n]

    def visit(self, step, *, masks: bool, far=None, far_step: Any = None):
        """Calls step(n, masked=) for every block, as KvTileRange.visit does; `masks` is True."""
        until = lambda end, start: end if far is None else lax.select(far > 0, start, end)
        partial, zero = self.listed.masked_steps, jnp.int32(0)
        pl.loop(zero, until(partial, zero))(functools.partial(step, masked=masks))
        pl.loop(partial, until(self.total, partial))(functools.partial(step, masked=False))
        if far is not None:
            ends = zero, lax.select(far > 0, self.total, zero)
            pl.loop(*ends)(functools.partial(far_step, masked=masks))


def _keys_seen(problem: Problem, arrays: BackwardArrays, batch, listed: TileList, block_kv: int):
    kv_len = arrays.kv_len(problem, batch, block_kv)
    return listed.keys_seen(problem.kv_len if kv_len is None else kv_len)


def mask_everywhere(problem: Problem) -> bool:
    """Returns whether tiles may need masks anywhere: a left edge, or arrays that hide keys."""
    return problem.spec.mask.left is not None or problem.hides_by_arrays


def unshared(x):
    """Returns a number from which the compiler computes nothing that others share, or holds."""
    return x if isinstance(x, int) else lax.optimization_barrier(x)


# Heads of a group up to which `QTileRange.subtracts`: 7 subtractions are 14 instructions.
MOST_SUBTRACTED = 8


@dataclasses.dataclass(frozen=True)
class QTileRange:
    """The Q tiles that one CTA of a KV-stationary kernel reads, for every head of a GQA group.

    Attributes:
        start, full_start, full_stop, stop: bounds in Q blocks; blocks outside [full_start,
            full_stop) need the mask.
        q_offset: position of query 0.
        kv_len: number of keys, or None where that hides none.
        group: number of query heads that read these keys, one after the other.
        masks: "none" (no tile is masked), "all" (one loop masks all tiles) or "some": tiles that
            need no mask come first, in a loop of their own; a head's other tiles follow in order,
            from the start again when the end is reached.
        shift: which tile of a head comes first, counted from its first one, unless masks is "some".
        opaque: hides from ptxas where the loop begins. Otherwise it peels off the first step of the
            fused kernel with ping-pong warpgroups, and then waits for every wgmma at once (C7512).
        subtracts: a tile's place among those of its head is found by subtractions in place of a
            division, which takes 27 instructions. H200, causal, groups of 4 at head dim 128: 0.96
            of the time; groups of 8 at 64: 1.01; not timed at 96.
        part: (first tile, number of tiles) where other CTAs have the rest; None: all are its own.
    """

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any
    q_offset: Any
    kv_len: Any
    group: int
    masks: str
    shift: Any = 0
    opaque: bool = False
    subtracts: bool = False
    part: tuple[Any, Any] | None = None

    @classmethod
    def of(
        cls,
        problem: Problem,
        arrays: BackwardArrays,
        own_tile,
        kv_rows: int,
        block_q: int,
        *,
        mask_all: bool,
        shift: Any = 0,
    ) -> QTileRange:
        """Makes the range of a CTA.

        It has at least one tile per head, which is wholly masked if the head's queries see none of
        the keys.

        Args:
            problem: what is computed.
            arrays: arrays in device memory.
            own_tile: (batch entry, KV tile).
            kv_rows: number of keys in a block.
            block_q: number of queries in a tile.
            mask_all: one loop masks all tiles, if any tile is masked.
            shift: number of tiles after the first at which to start; takes one loop.
        """
        batch, block = own_tile
        kv_start, offset = block * kv_rows, arrays.offset(problem, batch)
        padded_len = ints.round_up(problem.q_len, block_q)  # rows past the end have P = 0: no mask
        q_blocks = problem.spec.mask.q_blocks(kv_start - offset, kv_rows, padded_len, block_q)
        if arrays.bounds is None:
            start = ints.minimum(q_blocks.start, padded_len // block_q - 1)
            stop = ints.maximum(q_blocks.stop, start + 1)
        else:
            start = arrays.bounds[batch, block, 0]
            stop = ints.maximum(arrays.bounds[batch, block, 1], start + 1)
        full_start, full_stop = q_blocks.full_start, q_blocks.full_stop
        if arrays.q_whole is not None:
            full_start = ints.maximum(full_start, arrays.q_whole[batch, block, 0])
            full_stop = ints.minimum(full_stop, arrays.q_whole[batch, block, 1])
        full_start = ints.maximum(full_start, start)
        kv_len = arrays.kv_len(problem, batch, kv_rows)
        if kv_len is not None:  # the last keys lie past the end: mask every tile
            ragged = kv_start + kv_rows > kv_len
            full_start = lax.select(ragged, jnp.int32(stop), jnp.int32(full_start))
        masks = "all" if mask_all else "some"
        if not mask_everywhere(problem) and isinstance(full_start, int) and full_start == 0:
            masks = "none"
        shifted = not (isinstance(shift, int) and shift == 0)
        if shifted and masks == "some":
            raise ValueError("stagger of the fused backward with this mask: only with mask_all")
        full_start = ints.minimum(full_start, stop)
        ends = (start, full_start, ints.clip(full_stop, full_start, stop), stop)
        if masks == "some" and arrays.bounds is None:
            # A number of steps that is known, at short lengths say, makes ptxas peel off one or end
            # every wgmma at once (C7512). So does this barrier where the number is unknown (with a
            # window, GQA and segment ids together).
            ends = lax.optimization_barrier(tuple(map(jnp.int32, ends)))
        start, full_start, full_stop, stop = ends
        subtracts = problem.head_dim > 96 and problem.group <= MOST_SUBTRACTED
        return cls(
            *(start, full_start, full_stop, stop, offset, kv_len, problem.group, masks, shift),
            subtracts=subtracts,
        )

    def apart(self) -> QTileRange:
        """Returns this range with numbers from which nothing is shared with another loop."""
        names = ("start", "full_start", "full_stop", "stop", "q_offset")
        return dataclasses.replace(self, **{n: unshared(getattr(self, n)) for n in names})

    @classmethod
    def whole(
        cls, problem: Problem, arrays: BackwardArrays, batch, kv_rows: int, block_q: int
    ) -> QTileRange:
        """Makes the range of all Q tiles of a batch entry, in one loop."""
        stop = -(-problem.q_len // block_q)
        offset, kv_len = arrays.offset(problem, batch), arrays.kv_len(problem, batch, kv_rows)
        masks = "none" if problem.spec.mask.is_trivial and kv_len is None else "all"
        return cls(0, 0, 0, stop, offset, kv_len, problem.group, masks)

    @property
    def per_head(self):
        """Number of tiles of one head."""
        return self.stop - self.start

    @property
    def total(self):
        """Number of tiles of this CTA: those of the group, or of its part of them."""
        return jnp.int32(self.per_head * self.group) if self.part is None else self.part[1]

    def cut(self, index, parts: int) -> QTileRange:
        """Returns one of `parts` equal parts (but for one tile) of the range; it may be empty."""
        if parts == 1:
            return self
        if self.masks == "some":
            raise ValueError("split_q of the fused backward with this mask: only with mask_all")
        first, end = (lax.div(self.total * i, jnp.int32(parts)) for i in (index, index + 1))
        return dataclasses.replace(self, part=(first, end - first))

    def __getitem__(self, n):
        """Returns (head of the group, Q block) of the n-th tile."""
        if self.part is not None:
            n = n + self.part[0]
        if self.group == 1:
            return 0, self.block(n)
        per_head = jnp.int32(self.per_head)
        if not self.subtracts:
            return lax.div(n, per_head), self.block(lax.rem(n, per_head))
        own = n
        for _ in range(self.group - 1):
            own = lax.select(own >= per_head, own - per_head, own)
        return lax.div(n, per_head), self.block(own)

    def block(self, i):
        """Returns the i-th Q block of a head, in the order of the range."""
        if self.masks != "some":
            if not (isinstance(self.shift, int) and self.shift == 0):
                i = lax.rem(i + self.shift, jnp.int32(self.per_head))
            return self.start + i
        block = jnp.int32(self.full_start + i)
        return lax.select(block < self.stop, block, jnp.int32(block - self.per_head))

    def visit(self, step, far=None, far_step: Any = None, *, in_one_loop: bool = False):
        """Calls step(block_of, n, masked=) for every tile; block_of(n) is its Q block.

        The loops count in n: a block index kept alive next to it costs the fused kernel 100 bytes
        of spills.

        Args:
            step: function to call.
            far: i32: where it is positive, all tiles are far_step's, in a loop of their own that
                masks what may be masked. None: there is no such loop.
            far_step: function that is called as step is.
            in_one_loop: step gets all tiles in such a loop.
        """
        until = lambda end, start: end if far is None else lax.select(far > 0, start, end)
        zero, masked = jnp.int32(0), self.masks != "none"
        block_of = lambda n: self[n][1]
        if self.masks == "some" and not in_one_loop:
            one_head = functools.partial(self._visit_head, step, until)
            if self.group == 1:
                one_head(jnp.int32(0))
            else:
                pl.loop(zero, jnp.int32(self.group))(one_head)
        else:
            ends = zero, until(self.total, zero)
            ends = lax.optimization_barrier(ends) if self.opaque and not in_one_loop else ends
            pl.loop(*ends)(functools.partial(step, block_of, masked=masked))
        if far is not None:
            ends = zero, lax.select(far > 0, self.total, zero)
            ends = lax.optimization_barrier(ends) if self.opaque else ends
            pl.loop(*ends)(functools.partial(far_step, block_of, masked=masked))

    def _visit_head(self, step, until, head):
        """Runs the loops over the tiles of a head, each of which ends at until(end, start).

        Tiles that need no mask come first.
        """
        first = head * self.per_head
        masked_from = first + (self.full_stop - self.full_start)
        unmasked = lambda n: self.full_start + (n - first)
        pl.loop(first, until(masked_from, first))(functools.partial(step, unmasked, masked=False))
        block_of, end = lambda n: self.block(n - first), first + self.per_head
        masked = functools.partial(step, block_of, masked=True)
        pl.loop(masked_from, until(end, masked_from))(masked)


@dataclasses.dataclass(frozen=True)
class QTileList:
    """The Q tiles of all query heads of a group that a list names, in place of a QTileRange.

    Attributes:
        listed: the list; of member m of the group it has Q tile i as m * per_head + i.
        per_head: number of Q tiles of a head.
        q_offset: position of query 0.
        kv_len: number of keys; 0 where the list is empty.
        group: number of query heads that read these keys.
        mask_all: one loop has all tiles; otherwise whole ones have a loop of their own.
        opaque: as of QTileRange.
    """

    listed: TileList
    per_head: int
    q_offset: Any
    kv_len: Any
    group: int
    mask_all: bool
    opaque: bool = False

    @classmethod
    def of(
        cls,
        problem: Problem,
        arrays: BackwardArrays,
        own_tile,
        kv_rows: int,
        block_q: int,
        *,
        mask_all: bool,
    ) -> QTileList:
        """Makes the list of a CTA; `own_tile`: (batch entry, KV head, KV tile)."""
        batch, listed = own_tile[0], TileList.of(problem, arrays.lists, own_tile)
        kv_len = _keys_seen(problem, arrays, batch, listed, kv_rows)
        per_head, offset = -(-problem.q_len // block_q), arrays.offset(problem, batch)
        return cls(listed, per_head, offset, kv_len, problem.group, mask_all)

    @property
    def total(self):
        """Number of tiles of this CTA, at least one, which is wholly masked for an empty list."""
        return self.listed.steps

    def __getitem__(self, n):
        """Returns (head of the group, Q block) of the n-th tile."""
        number = self.listed[n]
        if self.group == 1:
            return 0, number
        return lax.div(number, jnp.int32(self.per_head)), lax.rem(number, jnp.int32(self.per_head))

    def apart(self) -> QTileList:
        """Returns this list with numbers from which nothing is shared with another loop."""
        own = {n: x for n, x in self.listed._asdict().items() if n != "index" and x is not None}
        listed = self.listed._replace(**{n: unshared(x) for n, x in own.items()})
        kv_len, offset = unshared(self.kv_len), unshared(self.q_offset)
        return dataclasses.replace(self, listed=listed, kv_len=kv_len, q_offset=offset)

    def visit(self, step, far=None, far_step: Any = None, *, in_one_loop: bool = False):
        """Calls step(block_of, n, masked=) for every tile, as QTileRange.visit does."""
        until = lambda end, start: end if far is None else lax.select(far > 0, start, end)
        block_of, zero = lambda n: self[n][1], jnp.int32(0)
        hide = lambda ends: lax.optimization_barrier(ends) if self.opaque else ends
        if self.mask_all or in_one_loop:
            ends = hide((zero, until(self.total, zero)))
            pl.loop(*ends)(functools.partial(step, block_of, masked=True))
        else:
            partial = self.listed.masked_steps
            ends = hide((zero, until(partial, zero)))
            pl.loop(*ends)(functools.partial(step, block_of, masked=True))
            ends = hide((partial, until(self.total, partial)))
            pl.loop(*ends)(functools.partial(step, block_of, masked=False))
        if far is not None:
            ends = hide((zero, lax.select(far > 0, self.total, zero)))
            pl.loop(*ends)(functools.partial(far_step, block_of, masked=True))


@dataclasses.dataclass(frozen=True)
class QTilePairs:
    """The Q tiles of a list, two of them side by side in every step, in place of a QTileList.

    The second tile of a step may be missing. Its scores are then those of the first one, with a
    log-sum-exp from past the last row, so that their weights are 0. No tile is masked.

    Attributes:
        tiles: the list.
        per_step: i32, number of tiles in a step, 2; 1 where rows may have a shift, which is loaded
            for one tile.
        past: number of a tile of rows that do not exist.
    """

    tiles: QTileList
    per_step: Any
    past: int

    q_offset, kv_len = 0, None

    @classmethod
    def of(
        cls, problem: Problem, arrays: BackwardArrays, own_tile, kv_rows: int, far
    ) -> QTilePairs:
        """Makes the list of a CTA.

        Args:
            problem: what is computed.
            arrays: arrays in device memory.
            own_tile: (batch entry, KV head, KV tile).
            kv_rows: number of keys in a tile.
            far: i32 of the group of heads, not 0 if rows of it are shifted; None: none can be.
        """
        rows = problem.list_block[0]
        tiles = QTileList.of(problem, arrays, own_tile, kv_rows, rows, mask_all=False)
        per_step = jnp.int32(2) if far is None else lax.select(far > 0, jnp.int32(1), jnp.int32(2))
        return cls(tiles, per_step, arrays.lse_log2.shape[2] // rows - 1)

    @property
    def total(self):
        """Number of steps, at least one."""
        return lax.div(self.tiles.total + self.per_step - 1, self.per_step)

    def __getitem__(self, n):
        """Returns (head of the group, Q block) of the first tile of the n-th step."""
        return self.tiles[n * self.per_step]

    def both(self, n):
        """Returns (head of the group, Q block, Q block of its log-sum-exp) of both tiles."""
        first, count = n * self.per_step, self.tiles.listed.count
        second = first + 1
        has_second = (self.per_step == 2) & (second < count)
        pair = self.tiles[first], self.tiles[lax.select(has_second, second, first)]
        row_of = lambda seen, block: lax.select(seen, block, jnp.int32(self.past))
        seen = first < count, has_second
        return [(*x, row_of(s, x[1])) for x, s in zip(pair, seen, strict=True)]

    def visit(self, step, *, in_one_loop: bool = False):
        """Calls step(block_of, n, masked=False) for every step, as QTileRange.visit does."""
        del in_one_loop
        run = functools.partial(step, lambda n: self[n][1], masked=False)
        pl.loop(jnp.int32(0), self.total)(run)
