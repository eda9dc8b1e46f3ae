"""Two arrays whose tiles pass by, in the deterministic kernels.

The first is read by the first and by the last product of a step, so its next tile goes to another
slot; the second is free before that product, which hides the copy of its next tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .tiles import Copies, Copy

SLOTS = 2  # of the first array


class Tiles(NamedTuple):
    """What one step reads, in device memory.

    Attributes:
        first, second: [length, columns].
        row: of both, where the tile starts.
        limit: rows from there on are not read.
    """

    first: Any
    second: Any
    row: Any
    limit: Any


class Stream(NamedTuple):
    """The order of copies and of what waits for them.

    Attributes:
        copies: how tiles are moved.
        first: [SLOTS, rows, columns] in shared memory.
        second: [rows, columns] in shared memory.
        tiles: the Tiles of the n-th step, of which nothing is read if there is no such step.
    """

    copies: Copies
    first: Any
    second: Any
    tiles: Callable[[Any], Tiles]

    def slot(self, n):
        """Where the first array's tile of the n-th step lies."""
        return self.first.at[lax.bitwise_and(jnp.int32(n), jnp.int32(SLOTS - 1))]

    def _first(self, n) -> Copy:
        found = self.tiles(n)
        return Copy(found.first, self.slot(n), found.row, found.limit)

    def _second(self, n) -> Copy:
        found = self.tiles(n)
        return Copy(found.second, self.second, found.row, found.limit)

    def start(self):
        """Before the loop: the tiles of step 0."""
        self.copies.start(self._first(0))
        self.copies.start(self._second(0))

    def begin(self, n):
        """The first tile of the n-th step has arrived; that of the next is on its way."""
        self.copies.arrived(self._first(n), pending=1)
        self.copies.start(self._first(n + 1))

    def second_arrived(self, n):
        """So has the second."""
        self.copies.arrived(self._second(n), pending=1)

    def second_read(self, n):
        """Nobody needs it any more; the next one is on its way."""
        self.copies.meet()
        self.copies.start(self._second(n + 1))

    def end(self):
        """After the loop: what was started for a step that does not exist."""
        self.copies.arrived()
