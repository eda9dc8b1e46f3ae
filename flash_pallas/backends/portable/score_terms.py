"""Recomputes dS of a tile of scores and what it adds to the gradients of score modifiers."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.problem import Problem
from ...core.scores import TileInputs
from ...core.tile import Limits
from ..mosaic import recompute
from ..mosaic.register_tile import RegisterTile
from ..mosaic.score_grads import term
from .kernel import Kernel


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
        w = recompute.weights(self.problem, tile, given.s, given.lse, inputs, limits)
        c = recompute.centred(self.problem, w.kept, given.dp, tile.per_q(given.delta))
        dz, dparams = w.pull(w.p * c)
        return tuple(term(name, tile, dz, dparams) for name in self.names)
