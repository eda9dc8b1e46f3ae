"""Lists in a kernel: which tiles of the other sequence a tile reads; see core/block_lists.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ....core import block_lists
from ....core.block_lists import BlockLists
from ....core.problem import Problem
from ...gpu import auxiliary_arrays


def ordered(lists: BlockLists, batch: int, heads: int) -> BlockLists:
    """Returns the lists of all tiles of so many entries and heads, in one, and the tiles' order."""
    return lists.in_one._replace(order=block_lists.longest_first(lists, batch, heads))


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
    """

    index: Any
    start: Any
    partial: Any
    count: Any

    @classmethod
    def of(cls, problem: Problem, lists: BlockLists, at) -> TileList:
        """Returns the list of a tile.

        Args:
            problem: what is computed.
            lists: `BlockLists.in_one` of a call, in device memory.
            at: (batch entry, head, tile); the head of keys for lists of `block_lists.of_keys`.
        """
        batch, head, tile = at
        of_list = auxiliary_arrays.entry(problem, lists.bounds.shape, batch, head)
        start, whole, stop = (lists.bounds[(*of_list, tile, end)] for end in range(3))
        return cls(lists.index, start, whole - start, stop - start)

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
        return self.index[self.start + n]


def largest(block: int, *sizes: int) -> int:
    """Returns the first of the sizes, of which the last fits any block, that divides a block."""
    return next(size for size in sizes if block % size == 0)
