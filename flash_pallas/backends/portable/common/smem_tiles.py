"""Tiles in shared memory, the copies that fill and drain them, and how these are ordered.

A row of a tile is padded by 16 bytes, so that the eight rows that `ldmatrix` reads at once lie in
different banks: a row of a multiple of 32 bytes plus 16 is an odd number of 16-byte units. Copies
are `cp.async` of 16 bytes, which writes zeros where it is told to read nothing: zero padding for
rows past an end, whatever lies there, and for columns that the array does not have.

Under the interpreter a tile is NaN from `start` to `arrived`, so a read that comes too early, or of
a tile that is already being filled again, is a NaN in the result. It cannot show warps that
overtake each other; the barrier that keeps them together is in `arrived` and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.decode import DecodeProblem
from ....core.integers import round_up
from ....core.problem import Problem
from ...gpu.ptx import async_copies, inline
from ...gpu.ptx.threads import UNIT, UNIT_ELEMENTS


class Warpgroups(NamedTuple):
    """All warpgroups of a CTA, as one of them sees them.

    Attributes:
        interpret: run by the interpreter.
        size: number of warpgroups.
        rank: index of this warpgroup.
        barrier: an mbarrier at which all of them arrive. The interpreter has no named barriers.
    """

    interpret: bool
    size: int = 1
    rank: Any = 0
    barrier: Any = None

    def sync(self, bit=None) -> Any:
        """Waits until all warps of all warpgroups have arrived here.

        Args:
            bit: i32, uniform over a warp; only with one warpgroup. If given, the result is 1 if
                some warp arrived with a nonzero bit.
        """
        if bit is not None:
            if self.size > 1:
                raise AssertionError("warps of one warpgroup agree on a bit, no others")
            return inline.barrier_any(inline.FIRST_NAMED_BARRIER, 128, bit, self.interpret)
        if self.size == 1:
            inline.warpgroup_barrier(self.interpret)
        elif self.interpret:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
        else:
            inline.named_barrier("sync", inline.FIRST_NAMED_BARRIER, 128 * self.size)
        return None

    def part(self, count: int):
        """Returns (start, size) of this warpgroup's share of `count` rows or columns."""
        size = count // self.size
        return self.rank * size, size

    def rows(self, tile):
        """Returns (first row, ref) of this warpgroup's share of a tile."""
        if self.size == 1:
            return 0, tile
        first, size = self.part(tile.shape[0])
        return first, tile.at[pl.ds(first, size)]


DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))
HEAD_DIM_MULTIPLE = UNIT_ELEMENTS  # rows are copied in whole units


def buffer(shape, dtype):
    """Allocates shared memory for tiles [..., rows, columns], columns a multiple of 16.

    The dtype has 16 bits, or 8 for what is widened before matmuls read it.
    """
    *outer, columns = shape
    if columns % 16:
        raise AssertionError(f"{shape=}: columns must be a multiple of 16")
    return plgpu.SMEM((*outer, columns + UNIT // jnp.dtype(dtype).itemsize), dtype)


WIDEST_ALONE = 256  # head dim up to which registers of one warpgroup hold 64 rows of O or of dQ


def warpgroups_of(problem: Problem | DecodeProblem) -> int:
    """Returns the number of warpgroups that share the head dims; see common/shares.py."""
    return 1 if max(problem.head_dim, problem.v_head_dim) <= WIDEST_ALONE else 2


def widths(problem: Problem | DecodeProblem) -> tuple[int, int]:
    """Returns the columns of tiles of Q and K, and those of V and O."""
    unit = 16 * warpgroups_of(problem)
    return round_up(problem.head_dim, unit), round_up(problem.v_head_dim, unit)


def columns_of(tile) -> int:
    """Returns the columns of a tile without the padding of its rows."""
    return tile.shape[-1] - UNIT_ELEMENTS


class Copy(NamedTuple):
    """Rows `first` to `first + rows of the tile` of an array, zeros from `limit` on.

    And before `start`, where there is one.

    Attributes:
        source: [length, columns] in device memory; columns are whole units of 16 bytes, not above
            the tile's.
            Or [outer, inner, columns], whose row r is [r // inner, r % inner].
        tile: [rows, columns] in shared memory, of `buffer`.
        first: row of the array, int32.
        limit: int32; rows from there on are not read. Rows of the tile below it exist.
        start: int32; rows before it are not read. None: all are.
    """

    source: Any
    tile: Any
    first: Any
    limit: Any
    start: Any = None


class Vector(NamedTuple):
    """Elements `first` to `first + count` of an array, which a warpgroup copies alone.

    Attributes:
        source: f32[length] in device memory, which starts at a multiple of 16 bytes.
        tile: f32[size] in shared memory, size a multiple of 4 and at most 512.
        first: int32, a multiple of 4.
        count: int32: `size`, or 0 to copy nothing.
    """

    source: Any
    tile: Any
    first: Any
    count: Any


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies between device memory and tiles, by all threads of a CTA.

    Attributes:
        interpret: run by the interpreter.
        warpgroups: those of the CTA, which have equal parts of the rows of each tile.
        hides_offsets: see async_copies.start_copy.
    """

    interpret: bool
    warpgroups: Warpgroups
    hides_offsets: bool = True

    def start(self, *copies: Copy | Vector):
        """Starts copies, which together are one group for `arrived`.

        Every warp must have read what was in the tiles before: the last `arrived` or `sync` comes
        after these reads.
        """
        for copy in map(self._own, copies):
            if self.interpret:
                of_floats = jnp.issubdtype(copy.tile.dtype, jnp.floating)
                wrong = jnp.nan if of_floats else 127
                copy.tile[...] = jnp.full(copy.tile.shape, wrong, copy.tile.dtype)
            elif isinstance(copy, Vector):
                async_copies.start_vector(*copy)
            else:
                async_copies.start_copy(*copy, hides_offset=self.hides_offsets)
        if self.interpret:
            return
        async_copies.commit()

    def arrived(self, *copies: Copy | Vector, pending: int = 0, bit=None):
        """Waits until all but the newest `pending` groups have arrived, for every thread.

        Args:
            copies: those of the groups that now arrive, as they were started.
            pending: groups that were started after them.
            bit: see Warpgroups.sync, whose result is returned.
        """
        if self.interpret:
            for copy in map(self._own, copies):
                _fill(copy)
        else:
            async_copies.wait(pending)
        return self.sync(bit)

    def _own(self, copy):
        if isinstance(copy, Vector):
            return copy
        offset, tile = self.warpgroups.rows(copy.tile)
        return copy._replace(tile=tile, first=copy.first + offset)

    def sync(self, bit=None):
        """Waits until all warps have arrived here; see Warpgroups.sync."""
        return self.warpgroups.sync(bit)

    def store(self, tile, target, first, limit):
        """Copies a tile to rows `first` on of [length, columns] in device memory, up to `limit`.

        Under the interpreter the array has all rows of the tile.
        """
        offset, tile = self.warpgroups.rows(tile)
        first = first + offset
        if self.interpret:
            rows, columns = tile.shape[0], target.shape[1]
            target[pl.ds(first, rows)] = tile[:, pl.ds(0, columns)]
            return
        async_copies.store(target, tile, first, limit, hides_offset=self.hides_offsets)


class Stream(NamedTuple):
    """Prefetch of the tiles that a loop streams past, step by step.

    A kernel's step says when: it waits for the tiles that a matmul reads, and starts the copies of
    later ones where warps have read what lies in their slots. Before the loop the tiles of step 0
    are started, so that copies are always one step ahead.

    Attributes:
        copies: copies of tiles by the warpgroups of the CTA.
        names: names of a step's tiles.
        slots: number of steps, 1 or 2, whose tiles have places in shared memory.
        load: (name, n, slot) -> the copies of a tile of the n-th step to its slot, which read
            nothing if there is no such step.
    """

    copies: Copies
    names: tuple[str, ...]
    slots: int
    load: Callable[[str, Any, Any], tuple[Copy | Vector, ...]]

    def slot(self, n):
        """Returns the slot of the tiles of the n-th step."""
        return lax.bitwise_and(jnp.int32(n), jnp.int32(1)) if self.slots == 2 else 0

    def start(self, n, *names: str):
        """Starts copies of the n-th step as one group: of the tiles `names`, or of all."""
        self.copies.start(*self._copies(n, names))

    def wait(self, n, *names: str, pending: int = 0, bit=None):
        """Waits for tiles of the n-th step, all by default; see Copies.arrived."""
        return self.copies.arrived(*self._copies(n, names), pending=pending, bit=bit)

    def end(self):
        """Waits, after the loop, for what was started for a step that does not exist."""
        self.copies.arrived()

    def _copies(self, n, names: tuple[str, ...]) -> list[Copy | Vector]:
        slot = self.slot(n)
        return [copy for name in names or self.names for copy in self.load(name, n, slot)]


def _fill(copy: Copy | Vector):
    if isinstance(copy, Vector):
        copy.tile[...] = copy.source[pl.ds(copy.first, copy.tile.shape[0])]
        return
    rows, columns = copy.tile.shape[0], copy.source.shape[-1]
    row = jnp.int32(copy.first) + jnp.arange(rows, dtype=jnp.int32)
    values = jnp.take(copy.source[...].reshape(-1, columns), row, axis=0, mode="clip")
    read = row < copy.limit
    if copy.start is not None:
        read = read & (row >= copy.start)
    values = jnp.where(read[:, None], values, jnp.zeros_like(values))
    widths = ((0, 0), (0, copy.tile.shape[1] - columns))
    copy.tile[...] = jnp.pad(values, widths)
