"""Two pairs of arrays whose tiles stream by; each product of a step reads one pair.

With two slots the tiles of the next step have all of this step to arrive, and warps meet once a
step. With one slot a pair is copied while the other one is worked on, and warps meet three times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .....core.mask import Limits
from .....core.problem import Problem
from .....core.scores import TileInputs
from ....gpu import score_tile
from ....gpu.launch import term
from ....gpu.score_tile import RegisterTile
from ...common.kernel import Kernel
from ...common.smem_tiles import Copies, Copy

Pair = tuple[Copy, ...]


class Pairs(NamedTuple):
    """The order of copies and of the waits for them.

    Attributes:
        copies: how tiles are moved.
        slots: slots of every array, 1 or 2.
        tiles: (n, slot) -> the copies of the first and of the second pair of the n-th step, which
            read nothing if there is no such step.
        several: there may be more than one step.
    """

    copies: Copies
    slots: int
    tiles: Callable[[Any, Any], tuple[Pair, Pair]]
    several: bool = True

    def slot(self, n):
        """Returns the slot in which tiles of the n-th step lie."""
        return lax.bitwise_and(jnp.int32(n), jnp.int32(self.slots - 1))

    @property
    def groups(self) -> int:
        """Number of groups that `start` starts, in the sense of Copies.arrived."""
        return 1 if self.slots > 1 else 2

    def _of(self, n) -> tuple[Pair, Pair]:
        return self.tiles(n, self.slot(n))

    def start(self):
        """Starts the copies of step 0, before the loop."""
        first, second = self._of(0)
        if self.slots > 1:
            self.copies.start(*first, *second)
        else:
            self.copies.start(*first)
            self.copies.start(*second)

    def _follow(self, n, *pairs: int):
        """Starts the copies of these pairs (0: the first, 1: the second) of the next step."""
        if self.several:
            found = self._of(n + 1)
            self.copies.start(*(copy for i in pairs for copy in found[i]))

    def begin(self, n):
        """Waits until the first pair of the n-th step has arrived; with two slots both pairs."""
        first, second = self._of(n)
        if self.slots > 1:
            self.copies.arrived(*first, *second)
            self._follow(n, 0, 1)
        else:
            self.copies.arrived(*first, pending=1)

    def first_read(self, n):
        """Marks the first pair as read, and waits until the second pair has arrived."""
        if self.slots == 1:
            self.copies.arrived(*self._of(n)[1])
            self._follow(n, 0)

    def second_read(self, n):
        """Marks the second pair as read."""
        if self.slots == 1 and self.several:
            self.copies.meet()
            self._follow(n, 1)

    def end(self):
        """Waits, after the loop, for what was started for a step that does not exist."""
        self.copies.arrived()


class Given(NamedTuple):
    """Inputs of dS, besides those of score modifiers."""

    s: Any  # f32 tile, q @ k^T
    dp: Any  # f32 tile, dO @ v^T
    lse: Any  # f32 of each query, base 2
    delta: Any  # f32 of each query


class Terms(Kernel):
    """Base class of the kernels that sum dS.

    Attributes:
        problem: what is computed.
        names: names as of `launch` in mosaic.score_grads.
    """

    problem: Problem
    names: tuple[Any, ...]

    def terms(self, tile: RegisterTile, given: Given, inputs: TileInputs, limits: Limits):
        """Computes an f32 tile for each name: what each element adds to its gradient."""
        w = score_tile.weights(self.problem, tile, given.s, given.lse, inputs, limits)
        c = score_tile.centred(self.problem, w.kept, given.dp, tile.per_q(given.delta))
        dz, dparams = w.pull(w.p * c)
        return tuple(term(name, tile, dz, dparams) for name in self.names)
