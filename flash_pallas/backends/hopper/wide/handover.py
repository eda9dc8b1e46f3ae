"""Tiles that each warpgroup of one CTA of a pair hands to the same warpgroup of the other.

Rank 0 sends a tile in every step. It goes from registers into the shared memory of rank 1, where
the same threads want the same elements: so every thread writes its own in pieces of 16 bytes, side
by side with those of its neighbours, and nothing is rearranged. There is one slot, and rank 0 may
be one step ahead.

    arrived     an mbarrier of each warpgroup of rank 1, which counts the bytes that come
    read        both warpgroups of rank 1 arrive there once the slot is free, in rank 0 too. Before
                that they announce the bytes of the next tile: none can come before

Rank 0 may not end before it has seen the last tile read: until then rank 1 arrives at its barriers.
Nothing is on its way to rank 1 once that has received its last tile.

The interpreter cannot reach the shared memory of a neighbour. Under it the tiles pass through
device memory, and the barrier `handed` of the cluster stands for `arrived`. There, every barrier
must be waited for in each CTA, which both do where nothing is held up.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.ptx import cluster, tile_words
from ..common import pipeline


class Received(NamedTuple):
    """Shared memory of the CTA that receives, one slot for each warpgroup."""

    words: Any  # int32[warpgroups, WORDS]
    arrived: Any  # int32[warpgroups, 2], an mbarrier each


def received_buffer(warpgroups: int) -> Received:
    """Returns the shared memory for tiles of 16-bit elements."""
    buffer = lambda size: plgpu.SMEM((warpgroups, size), jnp.int32)
    return Received(buffer(tile_words.WORDS), buffer(2))


def stand_in(*places: int, warpgroups: int, dtype) -> jax.ShapeDtypeStruct:
    """Returns the array in device memory that the interpreter uses instead."""
    return jax.ShapeDtypeStruct((*places, warpgroups, *tile_words.TILE), dtype)


@dataclasses.dataclass(frozen=True)
class Handover:
    """The way from a warpgroup of one CTA to that of the other, as either sees it.

    Attributes:
        received: words and mbarrier of this warpgroup's slot.
        handed: barrier of the cluster, at which the warpgroups of rank 0 arrive; interpreted.
        read: barrier of the cluster, at which those of rank 1 arrive.
        stand_in: this warpgroup's tile in device memory; interpreted.
        dtype: dtype of the elements, of 16 bits.
        interpret: run by the interpreter.
    """

    received: Received
    handed: Any
    read: Any
    stand_in: Any
    dtype: Any
    interpret: bool

    # --- rank 0 ----------------------------------------------------------------------------------

    def send(self, tile):
        """Sends a tile in the layout WGMMA, as soon as the one before has been read."""
        plgpu.barrier_wait(self.read)
        if self.interpret:
            self.stand_in[...] = tile
            self._arrive(self.handed)
            return
        tile_words.send(tile, *self.received)

    def drain(self):
        """Waits until the last tile has been read."""
        plgpu.barrier_wait(self.read)

    # --- rank 1 ----------------------------------------------------------------------------------

    def open(self):
        """Initializes the mbarrier, and lets the first tile come."""
        if not self.interpret:
            cluster.init_barrier(self.received.arrived)
        self._offer()

    def receive(self, n):
        """Returns the n-th tile, in the layout WGMMA, and lets the next one come."""
        if self.interpret:
            plgpu.barrier_wait(self.handed)
            tile = self.stand_in[...]
        else:
            tile = tile_words.receive(*self.received, lax.rem(n, jnp.int32(2)), self.dtype)
        self._offer()
        return tile

    def _offer(self):
        """Says that the slot is free, after announcing what comes into it."""
        if not self.interpret:
            cluster.announce(self.received.arrived, 4 * tile_words.WORDS)
        self._arrive(self.read)

    def _arrive(self, barrier):
        pipeline.cluster_arrive(barrier, self.interpret)
        if self.interpret:
            plgpu.barrier_wait(barrier)
