"""Lists in a kernel: which tiles of the other sequence a tile reads; see core/block_lists.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ....core import block_lists
from ....core.block_lists import BlockLists
from ....core.problem import Problem
from ...gpu import auxiliary_arrays

# Bytes that a head of the backward reads of Q and dO and adds to dQ: more does not stay in L2.
# bf16, 109,632 tokens (112 MB), 7 heads, each block of queries with 64 blocks of keys: with rotated
# lists 1.50 times as fast with blocks of 128, whose dQ, dO and Q were all read from device memory
# (H100), and dK/dV 1.03 with blocks of 64 (H200). 32k tokens (34 MB): 0.98 to 1.00. Lists of keys
# have none: dQ is 0.98 and the forward 0.97 to 0.98 times as fast. They are equally long there, so
# that CTAs which begin together stay together without.
STREAMED_BYTES = 50 << 20
AT_ONCE = 132  # CTAs: as many SMs as an H100 or H200 has


def ordered(lists: BlockLists, batch: int, heads: int) -> BlockLists:
    """Returns the lists of all tiles, for `batch` entries and `heads` heads, with their order."""
    return lists.in_one._replace(order=block_lists.longest_first(lists, batch, heads))


def rotated(lists: BlockLists, heads: int, blocks: int, streamed: int) -> BlockLists:
    """Returns `ordered` lists, with rotations where they pay.

    Args:
        lists: of all tiles, in their order.
        heads: number of heads.
        blocks: number of tiles of the other sequence that a list may name.
        streamed: bytes of the other sequence.
    """
    if streamed < STREAMED_BYTES:
        return lists
    return lists._replace(rotation=block_lists.rotations(lists, heads, blocks, AT_ONCE))


def place(lists: BlockLists, n, heads: int):
    """Returns (batch entry, head, tile) of the n-th tile in the order of the lists."""
    number, tiles = lists.order[n], jnp.int32(lists.bounds.shape[2])
    head, heads = lax.div(number, tiles), jnp.int32(heads)
    return lax.div(head, heads), lax.rem(head, heads), lax.rem(number, tiles)


class TileList(NamedTuple):
    """The tiles that one tile reads: first partial ones, then whole ones.

    Attributes:
        index: int32 of `BlockLists.in_one`, in device memory.
        start: place of the first in `index`.
        partial: number of partial tiles.
        count: number of tiles.
        rotation: which whole tile comes first; after the last one the first follows. None: 0.
    """

    index: Any
    start: Any
    partial: Any
    count: Any
    rotation: Any = None

    @classmethod
    def of(cls, problem: Problem, lists: BlockLists, own_tile) -> TileList:
        """Returns the list of a tile.

        Args:
            problem: what is computed.
            lists: `BlockLists.in_one` of a call, in device memory.
            own_tile: (batch entry, head, tile); the head of keys for lists of
                `block_lists.of_keys`.
        """
        batch, head, tile = own_tile
        list_entry = auxiliary_arrays.entry(problem, lists.bounds.shape, batch, head)
        start, whole_start, stop = (lists.bounds[(*list_entry, tile, end)] for end in range(3))
        rotation = None
        if lists.rotation is not None:
            tiles = lists.bounds.shape[2]
            heads = lists.rotation.shape[0] // (problem.batch * tiles)
            rotation = lists.rotation[(batch * heads + head) * tiles + tile]
        return cls(lists.index, start, whole_start - start, stop - start, rotation)

    @property
    def steps(self):
        """Number of steps, at least one: that of an empty list sees nothing."""
        return lax.max(self.count, jnp.int32(1))

    @property
    def masked_steps(self):
        """Number of the first steps that mask."""
        return lax.select(self.count == 0, jnp.int32(1), self.partial)

    def keys_seen(self, kv_len):
        """Returns where the keys end: at 0 for an empty list."""
        return lax.select(self.count == 0, jnp.int32(0), jnp.int32(kv_len))

    def __getitem__(self, n):
        """Returns the number of the n-th tile."""
        if self.rotation is not None:
            later = n + self.rotation
            later = lax.select(later < self.count, later, later - (self.count - self.partial))
            n = lax.select(n < self.partial, jnp.int32(n), later)
        return self.index[self.start + n]


def largest(block: int, *sizes: int) -> int:
    """Returns the first of the sizes, of which the last fits any block, that divides a block."""
    return next(size for size in sizes if block % size == 0)
