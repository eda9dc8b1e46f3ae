"""K and V, whose tiles pass by in the forward.

With one slot each, V is on its way while S is computed and the next K while O is, and every warp
meets the others twice a step. With two, both are on their way for a whole step and warps meet once;
the room of a second tile of each is what a second block on a multiprocessor may need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .tiles import Copies, Copy


class KeyStream(NamedTuple):
    """The order of copies and of what waits for them.

    Attributes:
        copies: how tiles are moved.
        k: [slots, rows, columns] in shared memory; one slot or two.
        v: likewise.
        copy: (name, n, tile in shared memory) -> the Copy of K or V in the n-th step, of which
            nothing is read if there is no such step.
    """

    copies: Copies
    k: Any
    v: Any
    copy: Callable[[str, Any, Any], Copy]

    @property
    def ahead(self) -> bool:
        """Whether both tiles of the next step have slots of their own."""
        return self.k.shape[0] == 2

    def slot(self, name: str, n):
        """Where the tile of the n-th step lies."""
        ref = getattr(self, name)
        return ref.at[lax.bitwise_and(jnp.int32(n), jnp.int32(1)) if self.ahead else 0]

    def _tile(self, name: str, n) -> Copy:
        return self.copy(name, n, self.slot(name, n))

    def _both(self, n) -> tuple[Copy, Copy]:
        return self._tile("k", n), self._tile("v", n)

    def start(self):
        """Before the loop: one group of copies, what the first step waits for."""
        self.copies.start(*(self._both(0) if self.ahead else (self._tile("k", 0),)))

    def begin(self, n):
        """K of the n-th step has arrived; every warp has read what the next copies overwrite."""
        if self.ahead:
            self.copies.arrived(*self._both(n))
            self.copies.start(*self._both(n + 1))
        else:
            self.copies.arrived(self._tile("k", n))
            self.copies.start(self._tile("v", n))

    def second(self, n, bit=None) -> Any:
        """So has V; nobody needs K any more.

        With a bit warps meet in any case; see Team.meet.
        """
        if self.ahead:
            return None if bit is None else self.copies.meet(bit)
        found = self.copies.arrived(self._tile("v", n), bit=bit)
        self.copies.start(self._tile("k", n + 1))
        return found

    def end(self):
        """After the loop: what was started for a step that does not exist."""
        self.copies.arrived()
