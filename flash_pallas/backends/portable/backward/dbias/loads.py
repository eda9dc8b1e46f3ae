"""Two pairs of arrays whose tiles stream by; each product of a step reads one pair.

With two slots the tiles of the next step have all of this step to arrive, and warps meet once a
step. With one slot a pair is copied while the other one is worked on, and warps meet three times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .....core.mask import Limits
from .....core.problem import Problem
from .....core.scores import TileInputs
from ....gpu import score_tile
from ....gpu.launch import term
from ....gpu.score_tile import RegisterTile
from ...common.kernel import Kernel
from ...common.smem_tiles import Stream


class Pairs(NamedTuple):
    """Order of the copies of both pairs, and of the waits for them.

    Attributes:
        stream: stream of all tiles.
        first: names of the first pair, which S is computed from.
        second: names of the second pair, which dP is computed from.
        several: there may be more than one step.
    """

    stream: Stream
    first: tuple[str, ...]
    second: tuple[str, ...]
    several: bool = True

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the tiles that are copied as one group, in the sense of Copies.arrived."""
        return (self.stream.names,) if self.stream.slots == 2 else (self.first, self.second)

    def prologue(self):
        """Starts the copies of step 0, before the loop."""
        for names in self.groups:
            self.stream.start(0, *names)

    def _start_next(self, n, *names: str):
        if self.several:
            self.stream.start(n + 1, *names)

    def begin(self, n):
        """Waits until the first pair of the n-th step has arrived; with two slots both pairs."""
        if self.stream.slots == 2:
            self.stream.wait(n)
            self._start_next(n)
        else:
            self.stream.wait(n, *self.first, pending=1)

    def first_read(self, n):
        """Marks the first pair as read, and waits until the second pair has arrived."""
        if self.stream.slots == 1:
            self.stream.wait(n, *self.second)
            self._start_next(n, *self.first)

    def second_read(self, n):
        """Marks the second pair as read."""
        if self.stream.slots == 1 and self.several:
            self.stream.copies.meet()
            self._start_next(n, *self.second)


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
