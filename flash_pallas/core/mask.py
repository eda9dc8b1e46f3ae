"""Static attention mask: which (query, key) pairs may attend. One definition for every backend.

A mask is a band: key position minus query position lies in [-left, right]. Causal is right = 0.
It answers three questions: is this pair visible, which KV blocks does a Q block read (and which of
them need no mask), and the same for the Q blocks of a KV block.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from . import integers as ints


class BlockRange(NamedTuple):
    """Consecutive blocks: partial up to full_start, fully visible up to full_stop, then partial."""

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any

    def zones(self):
        """Returns (low, high, masked) of each of the three parts, less those known to be empty."""
        zones = (
            (self.start, self.full_start, True),
            (self.full_start, self.full_stop, False),
            (self.full_stop, self.stop, True),
        )
        return [
            z for z in zones if not (ints.is_static(z[0]) and ints.is_static(z[1]) and z[0] >= z[1])
        ]


@dataclasses.dataclass(frozen=True)
class Mask:
    """Band of keys that a query keeps on either side, in positions; None is unbounded.

    Attributes:
        left: number of keys before the query's own position that are visible.
        right: number of keys after it that are visible; 0 is causal.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def causal(cls) -> Mask:
        """Returns the mask that keeps every key up to and including the query's own position."""
        return cls(right=0)

    @property
    def is_trivial(self) -> bool:
        """True if nothing is hidden."""
        return self.left is None and self.right is None

    @property
    def transposed(self) -> Mask:
        """The same mask seen from the keys."""
        return Mask(left=self.right, right=self.left)

    def visible(self, q_pos, kv_pos):
        """Returns True where the query at q_pos may read the key at kv_pos (they broadcast).

        It returns None for a trivial mask.
        """
        keep = None
        if self.left is not None:
            keep = kv_pos - q_pos >= -self.left
        if self.right is not None:
            below = kv_pos - q_pos <= self.right
            keep = below if keep is None else keep & below
        return keep

    def keys_of(self, q_pos, kv_len):
        """Returns (first, last) key that the queries at q_pos see; first is None if it is key 0.

        They see none where last < first, or last < 0.
        """
        first = None if self.left is None else q_pos - self.left
        end = kv_len - 1
        return first, end if self.right is None else jnp.minimum(q_pos + self.right, end)

    def kv_blocks(self, q_start, q_rows, kv_len, block_kv: int) -> BlockRange:
        """Returns the KV blocks read by the queries at positions [q_start, q_start + q_rows).

        A block that reaches past kv_len is never called full. All but block_kv may be traced.
        """
        num_blocks = ints.ceil_div(kv_len, block_kv)
        start, full_start, stop = 0, 0, num_blocks
        full_stop = ints.floor_div(kv_len, block_kv)
        if self.left is not None:
            start = ints.floor_div(q_start - self.left, block_kv)
            full_start = ints.ceil_div(q_start + (q_rows - 1 - self.left), block_kv)
        if self.right is not None:
            stop = ints.minimum(stop, ints.ceil_div(q_start + (q_rows + self.right), block_kv))
            full_stop = ints.minimum(
                full_stop, ints.floor_div(q_start + (self.right + 1), block_kv)
            )
        start = ints.minimum(start, num_blocks)
        stop = ints.maximum(stop, start)
        full_start = ints.clip(full_start, start, stop)
        return BlockRange(start, full_start, ints.clip(full_stop, full_start, stop), stop)

    def q_blocks(self, kv_start, kv_rows: int, q_len: int, block_q: int) -> BlockRange:
        """Returns the Q blocks that read keys [kv_start, kv_start + kv_rows); kv_blocks transposed.

        Positions count from query 0, so a caller with a query offset passes kv_start - q_offset.
        """
        return self.transposed.kv_blocks(kv_start, kv_rows, q_len, block_q)
