"""Shared memory: how much there is, tiles as TMA and wgmma want them, rings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import integers as ints
from ...gpu.launch import WARPGROUP_ROWS, shared_memory

SMEM_LIMIT = 232_448  # bytes a CTA may use on Hopper
SWIZZLES = (128, 64, 32)  # bytes; a row of a tile in shared memory is a multiple of one of them


class Ring(NamedTuple):
    """Ring of slots that a producer fills and consumers empty, in turn."""

    full: Any
    empty: Any
    slots: int
    refill: Any = None  # called with the use that a released slot is free for
    before: Any = 0  # uses before the one that is counted as number 0

    def use(self, n):
        """Returns the number of the n-th use among all uses."""
        return n if ints.is_static(self.before) and self.before == 0 else n + self.before

    def slot(self, n):
        """Returns the slot of the n-th use."""
        return ints.remainder(self.use(n), self.slots)

    def wait_full(self, n):
        """Waits, as a consumer, until the n-th fill has arrived."""
        plgpu.barrier_wait(self.full.at[self.slot(n)])

    def release(self, n):
        """Releases, as a consumer, the n-th fill, which has been read; calls `refill`."""
        plgpu.barrier_arrive(self.empty.at[self.slot(n)])
        if self.refill is not None:
            self.refill(n + self.slots)

    def wait_empty(self, n):
        """Waits, as the producer, until the slot of the n-th fill may be overwritten."""
        later = self.use(n) >= self.slots
        pl.when(later)(lambda: plgpu.barrier_wait(self.empty.at[self.slot(n)]))

    def drain(self, uses):
        """Observes, as the producer at the end, the releases that no later fill waited for."""

        @pl.loop(lax.max(jnp.int32(0), uses - self.slots), uses)
        def _(n):
            plgpu.barrier_wait(self.empty.at[self.slot(n)])


def swizzles(width: int, dtype, *columns: int) -> list[int]:
    """Returns the swizzles, in bytes, that a tile with rows of `width` elements can have.

    The widest comes first. A row is a multiple of the swizzle, and TMA can copy arrays with these
    numbers of columns into the tile and out of it. They may have fewer than the tile: TMA reads 0
    past an array's end and writes nothing there. But it copies rows in pieces as wide as the
    swizzle, and where an array has several it knows the end of none, only how many there are; and
    rows start at multiples of 16 bytes.

    The widest is to be taken, but narrower ones cost less than padded copies. bf16, H200, causal,
    B=4, T=4096, 16 heads, forward and backward: at head dim 128, 64 bytes cost 2 and 2 % and 32
    bytes 16 and 8 %; head dim 80 with 32 bytes is 1.27 and 1.07 times as fast as with copies padded
    to 96 and 128, and 96 with 64 bytes 1.18 times as fast in the backward, which runs it as 128.

    Both operands of a wgmma must have the same swizzle if both lie in shared memory.
    """
    size = jnp.dtype(dtype).itemsize

    def fills(row: int, swizzle: int) -> bool:
        return row % 16 == 0 if row <= swizzle else row % swizzle == 0

    return [
        s for s in SWIZZLES if width * size % s == 0 and all(fills(c * size, s) for c in columns)
    ]


def tile_buffer(shape, dtype, swizzle: int | None = None):
    """Returns the shared memory of a tile for TMA and wgmma.

    Rows are whole multiples of the swizzle, which is the widest unless told (in bytes).
    """
    swizzle = swizzle or swizzles(shape[-1], dtype)[0]
    columns = swizzle // jnp.dtype(dtype).itemsize
    if shape[-1] % columns:
        raise AssertionError(f"{shape=}: rows of {dtype} must be multiples of {columns} elements")
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(swizzle, dtype))


def tile_transforms(swizzle: int, dtype) -> tuple:
    """Returns how a tile lies in shared memory: in pieces of 8 rows by `swizzle` bytes."""
    tiling: Any = plgpu.TilingTransform  # abstract to pyright, as is the next
    swizzled: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // jnp.dtype(dtype).itemsize)), swizzled(swizzle)


def fits(scratch) -> bool:
    """Says whether a CTA that allocates this finds room for it."""
    return shared_memory(scratch) <= SMEM_LIMIT


def row_buffer(shape):
    """Returns shared memory for one float32 per row."""
    return plgpu.SMEM(shape, jnp.float32)


def warpgroup_rows(warpgroup):
    """Returns the rows of a tile that belong to one warpgroup, as a slice."""
    return pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)


def rows_of(ref, at, tile):
    """Returns ref.at[at] in rows as long as those of `tile`.

    The array's may be shorter: see `swizzles`.
    """
    if ref.shape[-1] == tile.shape[-1]:
        return ref.at[at]
    zero = at[0] * 0  # traced: JAX refuses a static slice past the array's end
    return ref.at[(*at, pl.ds(zero, tile.shape[-1]))]
