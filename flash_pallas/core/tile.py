"""Positions of a tile of scores, and the part of it that is visible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from . import dropout
from .mask import Mask


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
    """

    q_start: Any
    kv_start: Any
    shape: tuple[int, int]
    q_axis: int = 0

    @property
    def q_pos(self):
        """Position of each element's query, int32[shape]."""
        return lax.broadcasted_iota(jnp.int32, self.shape, self.q_axis) + self.q_start

    @property
    def kv_pos(self):
        """Position of each element's key, int32[shape]."""
        return lax.broadcasted_iota(jnp.int32, self.shape, 1 - self.q_axis) + self.kv_start

    def call(self, function: Callable, *args):
        """Calls function(*args), which works on tiles of this shape."""
        return function(*args)

    def tanh(self, x):
        """Computes tanh of each element."""
        return jnp.tanh(x)

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
