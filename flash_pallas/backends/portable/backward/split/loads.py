"""Two arrays whose tiles stream by, in the deterministic kernels.

The first is read by the first and by the last product of a step, so its next tile goes to another
slot. The second is free before the last product, which hides the copy of its next tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...common.smem_tiles import Copies, Copy

SLOTS = 2  # of the first array


class Tiles(NamedTuple):
    """Tiles in device memory that one step reads.

    Attributes:
        first, second: [length, columns].
        row: row of both at which the tile starts.
        limit: rows from there on are not read.
    """

    first: Any
    second: Any
    row: Any
    limit: Any


class Stream(NamedTuple):
    """The order of copies and of the waits for them.

    Attributes:
        copies: how tiles are moved.
        first: [SLOTS, rows, columns] in shared memory.
        second: [rows, columns] in shared memory.
        tiles: returns the Tiles of the n-th step; nothing of them is read if there is no such step.
    """

    copies: Copies
    first: Any
    second: Any
    tiles: Callable[[Any], Tiles]

    def slot(self, n):
        """Returns the shared memory of the first array's tile of the n-th step."""
        return self.first.at[lax.bitwise_and(jnp.int32(n), jnp.int32(SLOTS - 1))]

    def _first(self, n) -> Copy:
        found = self.tiles(n)
        return Copy(found.first, self.slot(n), found.row, found.limit)

    def _second(self, n) -> Copy:
        found = self.tiles(n)
        return Copy(found.second, self.second, found.row, found.limit)

    def start(self):
        """Starts the copies of step 0, before the loop."""
        self.copies.start(self._first(0))
        self.copies.start(self._second(0))

    def begin(self, n):
        """Waits for the first tile of the n-th step, then starts the copy of the next step's."""
        self.copies.arrived(self._first(n), pending=1)
        self.copies.start(self._first(n + 1))

    def second_arrived(self, n):
        """Waits for the second tile of the n-th step."""
        self.copies.arrived(self._second(n), pending=1)

    def second_read(self, n):
        """Marks the second tile as read, and starts the copy of the next step's."""
        self.copies.meet()
        self.copies.start(self._second(n + 1))

    def end(self):
        """Waits, after the loop, for what was started for a step that does not exist."""
        self.copies.arrived()
