"""Q tiles that stream past a KV tile, in the fused backward.

Q and dO of a tile arrive together, with the vectors of its rows, and are freed together. With two
slots the next tile has a whole step to arrive; with one it has the product that reads neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...common.smem_tiles import Copies, Copy, Vector


class Slot(NamedTuple):
    """Shared memory of one Q tile, or of several."""

    tiles: Any  # [2, columns, width]: dO and Q, see fused.OF_V
    rows: Any  # f32[2, columns]: see backward_arrays.LSE

    def at(self, n) -> Slot:
        """Returns the n-th of several slots."""
        return Slot(self.tiles.at[n], self.rows.at[n])


class Passing(NamedTuple):
    """The order of copies and of the waits for them.

    Attributes:
        copies: how tiles are moved.
        slots: 1 or 2 of them.
        of: returns the copies of the n-th step into a slot; they read nothing if there is no such
            step.
    """

    copies: Copies
    slots: Slot
    of: Callable[[Any, Slot], tuple[Copy | Vector, ...]]

    @property
    def count(self) -> int:
        """Number of slots."""
        return self.slots.tiles.shape[0]

    def slot(self, n) -> Slot:
        """Returns the slot of the n-th step."""
        return self.slots.at(lax.bitwise_and(jnp.int32(n), jnp.int32(self.count - 1)))

    def start(self, n):
        """Starts the copies of the n-th step; called for the first step before the loop."""
        self.copies.start(*self.of(n, self.slot(n)))

    def begin(self, n):
        """Waits until the tile of the n-th step has arrived."""
        self.copies.arrived(*self.of(n, self.slot(n)))

    def ahead(self, n):
        """Starts the copies of the next step if there are two slots, any time after `begin`."""
        if self.count > 1:
            self.start(n + 1)

    def read(self, n):
        """Marks the tile of the n-th step as read: with one slot, the next step's copies start."""
        if self.count == 1:
            self.copies.meet()
            self.start(n + 1)

    def end(self):
        """Waits, after the loop, for what was started for a step that does not exist."""
        self.copies.arrived()
