"""Queries on their way past a block of keys, in the fused backward.

Q and dO of a tile arrive together, with what is known of its rows, and are free together. With two
slots the next tile has a whole step to arrive; with one it has the product that reads neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .tiles import Copies, Copy
from .vectors import Vector


class Slot(NamedTuple):
    """Shared memory of one tile of queries, or of several."""

    tiles: Any  # [2, columns, width]: dO and Q, see fused.OF_V
    rows: Any  # f32[2, columns]: see backward_arrays.LSE

    def at(self, n) -> Slot:
        """The n-th of several."""
        return Slot(self.tiles.at[n], self.rows.at[n])


class Passing(NamedTuple):
    """The order of copies and of what waits for them.

    Attributes:
        copies: how tiles are moved.
        slots: 1 or 2 of them.
        of: what is copied for the n-th step into a slot; nothing is read if there is no such step.
    """

    copies: Copies
    slots: Slot
    of: Callable[[Any, Slot], tuple[Copy | Vector, ...]]

    @property
    def count(self) -> int:
        """Of slots."""
        return self.slots.tiles.shape[0]

    def slot(self, n) -> Slot:
        """Of the n-th step."""
        return self.slots.at(lax.bitwise_and(jnp.int32(n), jnp.int32(self.count - 1)))

    def start(self, n):
        """The tile of the n-th step is on its way; that of one before the loop."""
        self.copies.start(*self.of(n, self.slot(n)))

    def begin(self, n):
        """The tile of the n-th step has arrived."""
        self.copies.arrived(*self.of(n, self.slot(n)))

    def ahead(self, n):
        """With two slots the tile of the next step is on its way, at any time after `begin`."""
        if self.count > 1:
            self.start(n + 1)

    def read(self, n):
        """Nobody needs it any more: with one slot the next is on its way."""
        if self.count == 1:
            self.copies.meet()
            self.start(n + 1)

    def end(self):
        """After the loop: what was started for a step that does not exist."""
        self.copies.arrived()
