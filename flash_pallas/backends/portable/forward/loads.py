"""Stream of the K and V tiles that pass by in the forward.

With one slot each, V is in flight while S is computed and the next K while O is, and all warps meet
twice a step. With two, both are in flight for a whole step and warps meet once; the room of a
second tile of each is what a second CTA on the SM may need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..common.smem_tiles import Copies, Copy


class KvStream(NamedTuple):
    """Order of the copies of K and V, and of the waits for them.

    Attributes:
        copies: copies of tiles by the warpgroup.
        k: [slots, rows, columns] in shared memory; one slot or two.
        v: [slots, rows, columns] in shared memory; as many slots.
        copy: (name, n, tile in shared memory) -> the Copy of K or V in the n-th step, which reads
            nothing if there is no such step.
    """

    copies: Copies
    k: Any
    v: Any
    copy: Callable[[str, Any, Any], Copy]

    @property
    def ahead(self) -> bool:
        """True if both tiles of the next step have slots of their own."""
        return self.k.shape[0] == 2

    def slot(self, name: str, n):
        """Returns the tile in shared memory that K or V of the n-th step is copied to."""
        ref = getattr(self, name)
        return ref.at[lax.bitwise_and(jnp.int32(n), jnp.int32(1)) if self.ahead else 0]

    def _tile(self, name: str, n) -> Copy:
        return self.copy(name, n, self.slot(name, n))

    def _both(self, n) -> tuple[Copy, Copy]:
        return self._tile("k", n), self._tile("v", n)

    def start(self):
        """Starts, before the loop, the group of copies that the first step waits for."""
        self.copies.start(*(self._both(0) if self.ahead else (self._tile("k", 0),)))

    def begin(self, n):
        """Waits for K of the n-th step and starts the next copies, into what warps have read."""
        if self.ahead:
            self.copies.arrived(*self._both(n))
            self.copies.start(*self._both(n + 1))
        else:
            self.copies.arrived(self._tile("k", n))
            self.copies.start(self._tile("v", n))

    def second(self, n, bit=None) -> Any:
        """Waits for V of the n-th step, after which nobody needs K any more.

        With a bit warps meet in any case, and the bit of Team.meet is returned.
        """
        if self.ahead:
            return None if bit is None else self.copies.meet(bit)
        found = self.copies.arrived(self._tile("v", n), bit=bit)
        self.copies.start(self._tile("k", n + 1))
        return found

    def end(self):
        """Waits, after the loop, for what was started for a step that does not exist."""
        self.copies.arrived()
