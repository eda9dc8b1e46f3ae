"""Masks by position: which pairs attend, which blocks are read, what of a tile is visible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from . import dropout
from . import integers as ints

# --- The mask: one definition for every backend ---------------------------------------------------
# A mask is a band: key position minus query position lies in [-left, right]. Causal is right = 0.
# It answers three questions: is this pair visible, which KV blocks does a Q block read (and which
# of them need no mask), and the same for the Q blocks of a KV block.


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
        known = lambda x: isinstance(x, int)
        none = lambda low, high: known(low) and known(high) and low >= high
        return [zone for zone in zones if not none(*zone[:2])]


@dataclasses.dataclass(frozen=True)
class Mask:
    """Band of keys that a query keeps on either side, in positions; None is unbounded.

    Attributes:
        left: number of keys before the query's own position that are visible; a kernel may have it
            from an array, int32.
        right: number of keys after it that are visible; 0 is causal.
    """

    left: Any = None
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

    def keys_of(self, q_pos, kv_len, kv_start=None):
        """Returns (first, last) key that the queries at q_pos see; first is None if it is key 0.

        They see none where last < first, or last < 0. Keys before kv_start are hidden.
        """
        first = None if self.left is None else q_pos - self.left
        first = _later(first, kv_start)
        end = kv_len - 1
        if self.right is None:
            return first, end
        last = q_pos + self.right
        static = isinstance(last, int) and isinstance(end, int)
        # While jit traces, jnp makes a tracer of two ints.
        return first, min(last, end) if static else jnp.minimum(last, end)

    def kv_blocks(self, q_start, q_rows, kv_len, block_kv: int, kv_start=None) -> BlockRange:
        """Returns the KV blocks read by the queries at positions [q_start, q_start + q_rows).

        A block that reaches past kv_len, or that begins before kv_start where keys are hidden
        before it, is never called full. All but block_kv may be traced.
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
        if kv_start is not None:
            start = ints.maximum(start, ints.floor_div(kv_start, block_kv))
            full_start = ints.maximum(full_start, ints.ceil_div(kv_start, block_kv))
        start = ints.minimum(start, num_blocks)
        stop = ints.maximum(stop, start)
        full_start = ints.clip(full_start, start, stop)
        return BlockRange(start, full_start, ints.clip(full_stop, full_start, stop), stop)

    def q_blocks(self, kv_start, kv_rows: int, q_len: int, block_q: int) -> BlockRange:
        """Returns the Q blocks that read keys [kv_start, kv_start + kv_rows); kv_blocks transposed.

        Positions count from query 0, so a caller with a query offset passes kv_start - q_offset.
        """
        return self.transposed.kv_blocks(kv_start, kv_rows, q_len, block_q)


def _later(first, kv_start):
    """Returns the later of two first keys, of which None is key 0."""
    if kv_start is None:
        return first
    return kv_start if first is None else jnp.maximum(first, kv_start)


@dataclasses.dataclass(frozen=True)
class DraftMask(Mask):
    """Mask of decoding in which bits say which of the last keys, the drafts, a query sees.

    The queries are the drafts too, each at or after the position of the first of them: all see the
    keys before, but for what `left` hides. Bits answer for the drafts, window included; see
    drafts.py.

    Attributes:
        drafts: number of the last keys that are drafts.
        first: int32, the first of them. Those past the last key found no room in the cache.
    """

    drafts: int = 0
    first: Any = 0

    def keys_of(self, q_pos, kv_len, kv_start=None):
        """Returns (first, last) key that the queries at q_pos may see; see Mask.keys_of.

        No draft lies before the first key for any other reason than kv_start.
        """
        first, last = Mask(self.left).keys_of(q_pos, kv_len)
        if first is not None:
            first = jnp.minimum(first, self.first)
        return _later(first, kv_start), last

    def kv_blocks(self, q_start, q_rows, kv_len, block_kv: int, kv_start=None) -> BlockRange:
        """Returns the KV blocks that queries read; wherever in a tree they are: all the same.

        A block that has drafts is never called full.
        """
        blocks = Mask(self.left).kv_blocks(self.first, self.drafts, kv_len, block_kv, kv_start)
        full_stop = ints.minimum(blocks.full_stop, ints.floor_div(self.first, block_kv))
        return blocks._replace(full_stop=ints.maximum(full_stop, blocks.full_start))


# --- Tiles of scores ------------------------------------------------------------------------------


class Limits(NamedTuple):
    """Part of a tile that is kept, in the tile's own coordinates; None is no limit.

    An element is kept where low <= col - row <= high, row < rows and col < cols. A backend applies
    this with the cheapest instructions it has; `keep` is the meaning.
    """

    low: Any = None
    high: Any = None
    rows: Any = None
    cols: Any = None

    @property
    def is_trivial(self) -> bool:
        """True if everything is kept."""
        return all(x is None for x in self)

    def cuts(self, shape):
        """Returns whether an element of a tile of this shape is not kept, without the tile."""
        rows, cols = shape
        cut = jnp.bool_(False)
        if self.low is not None:
            cut |= self.low > 1 - rows
        if self.high is not None:
            cut |= self.high < cols - 1
        if self.rows is not None:
            cut |= self.rows < rows
        if self.cols is not None:
            cut |= self.cols < cols
        return cut

    def keep(self, shape):
        """Returns the limits as a bool array of the tile's shape, True where an element is kept."""
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        col = lax.broadcasted_iota(jnp.int32, shape, 1)
        kept = jnp.ones(shape, bool)
        if self.low is not None:
            kept &= col - row >= self.low
        if self.high is not None:
            kept &= col - row <= self.high
        if self.rows is not None:
            kept &= row < self.rows
        if self.cols is not None:
            kept &= col < self.cols
        return kept


@dataclasses.dataclass(frozen=True)
class Tile:
    """A [block_q, block_kv] tile of scores, or its transpose if q_axis == 1 (dK/dV kernels).

    Attributes:
        q_start: position of its first query (index plus query offset).
        kv_start: position of its first key.
        shape: shape of the tile as held.
        q_axis: the axis that runs over queries.
        positions: positions of each element's query and key, int32[shape], where arrays give them;
            None where they follow each other.
    """

    q_start: Any
    kv_start: Any
    shape: tuple[int, int]
    q_axis: int = 0
    positions: tuple[Any, Any] = (None, None)

    @property
    def q_pos(self):
        """Position of each element's query, int32[shape]."""
        positions = self.positions[0]
        return self.counted(self.q_axis, self.q_start) if positions is None else positions

    @property
    def kv_pos(self):
        """Position of each element's key, int32[shape]."""
        positions = self.positions[1]
        return self.counted(1 - self.q_axis, self.kv_start) if positions is None else positions

    def counted(self, axis: int, start):
        """Returns int32[shape]: start + index along the axis."""
        return lax.broadcasted_iota(jnp.int32, self.shape, axis) + start

    def call(self, function: Callable, *args):
        """Calls function(*args), which works on tiles of this shape."""
        return function(*args)

    def tanh(self, x):
        """Computes tanh of each element."""
        return jnp.tanh(x)

    def with_infinite(self, x, capped):
        """Returns capped logits of x, but x where it is infinite: a bias of -inf hides its key."""
        return lax.select(lax.is_finite(x) | (x != x), capped, x)

    def distance(self, dtype):
        """Computes |query position - key position| of each element in this dtype."""
        return lax.convert_element_type(lax.abs(self.q_pos - self.kv_pos), dtype)

    def kept(self, q_keys, kv_keys, rate: float):
        """Returns the dropout mask, bool of the tile's shape, from keys as in scores.TileInputs."""
        products = self.per_q(q_keys) * self.per_kv(kv_keys)
        return dropout.kept(lax.convert_element_type(products, jnp.uint32), rate)

    def per_q(self, x):
        """Spreads one value per query over the tile."""
        return lax.broadcast_in_dim(x, self.shape, (self.q_axis,))

    def per_kv(self, x):
        """Spreads one value per key over the tile."""
        return lax.broadcast_in_dim(x, self.shape, (1 - self.q_axis,))

    def limits(self, mask: Mask, kv_len=None) -> Limits:
        """Returns what `mask` keeps of this tile and, given kv_len, which keys lie before it.

        kv_len may be traced.
        """
        band = mask if self.q_axis == 0 else mask.transposed
        first_row, first_col = (
            (self.q_start, self.kv_start) if self.q_axis == 0 else (self.kv_start, self.q_start)
        )
        tail = None if kv_len is None else jnp.int32(kv_len) - self.kv_start
        shift = first_row - first_col
        return Limits(
            low=None if band.left is None else shift - band.left,
            high=None if band.right is None else shift + band.right,
            rows=tail if self.q_axis == 1 else None,
            cols=tail if self.q_axis == 0 else None,
        )
