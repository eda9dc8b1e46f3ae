"""From scores to P^T and dS^T in the fused backward: what comes before dP^T is there, and after.

What lies between the two stays in registers beside dP^T, dK and dV. At head dim 64 and 128 queries
there is room for one tile, so whoever needs several has a way of its own to say all with one.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

from jax import lax

from ...core.problem import Problem
from ...core.scores import TileInputs
from ...core.tile import Limits
from ..mosaic import recompute
from ..mosaic.register_tile import RegisterTile
from .fused_blocks import FusedBlocks


class Scores(NamedTuple):
    """A tile of scores and what belongs to it.

    Attributes:
        s: K Q^T, f32.
        lse: log-sum-exp of each query, base 2.
        inputs: what modifiers read.
        limits: what positions leave visible.
    """

    s: Any
    lse: Any
    inputs: TileInputs
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Weights(abc.ABC):
    """The two halves; both run once per tile.

    Attributes:
        problem: what is computed.
        blocks: tile sizes.
    """

    problem: Problem
    blocks: FusedBlocks

    @property
    def factor(self) -> float:
        """What lse and delta must be made for: `BackwardArrays.scaled`."""
        return 1.0

    @abc.abstractmethod
    def early(self, tile: RegisterTile, scores: Scores):
        """Before dP^T has arrived: what `late` needs, tiles of registers."""

    @abc.abstractmethod
    def late(self, tile: RegisterTile, held, lse, dp, delta) -> tuple[Any, Any]:
        """(keep * P, dS), f32, from what `early` has made and dP^T; delta of each query."""

    def finished(self, dv):
        """dV from the sum of products with keep * P."""
        return recompute.gained(self.problem, dv)


class General(Weights):
    """P, pull(P) and what dropout keeps: for every modifier."""

    def early(self, tile: RegisterTile, scores: Scores):
        """(P without what dropout drops, pull(P), what dropout keeps)."""
        given = (scores.s, scores.lse, scores.inputs, scores.limits)
        w = recompute.weights(self.problem, tile, *given, polynomials=self.blocks.polynomials)
        p, through = lax.optimization_barrier(
            (recompute.dropped(self.problem, w), recompute.pulled(w))
        )
        return p, through, w.kept

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """A subtraction and a product."""
        p, through, kept = held
        return p, through * recompute.centred(self.problem, kept, dp, tile.per_q(delta))


class Signed(Weights):
    """Dropout alone: P, negative where it is dropped."""

    @property
    def factor(self) -> float:
        """Of P."""
        return recompute.sign_factor(self.problem)

    def early(self, tile: RegisterTile, scores: Scores):
        """P with signs."""
        return recompute.signed(self.problem, tile, *scores)

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Signs become zeros."""
        return recompute.of_signed(held, dp, tile.per_q(delta))

    def finished(self, dv):
        """`late` has multiplied by the gain."""
        return dv


class Deferred(Weights):
    """A cap alone: logits over the cap."""

    def early(self, tile: RegisterTile, scores: Scores):
        """Tangents."""
        return recompute.capped(self.problem, tile, scores.s, scores.inputs, scores.limits)

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Exponentials."""
        spread = tile.per_q(lse), dp, tile.per_q(delta)
        share = self.blocks.polynomials
        return recompute.of_capped(tile, held, *spread, polynomials=share)


def weights_of(problem: Problem, blocks: FusedBlocks) -> Weights:
    """The way that the blocks ask for, where the problem has it."""
    if blocks.signs and recompute.may_sign(problem):
        return Signed(problem, blocks)
    if blocks.defer and recompute.may_defer(problem):
        return Deferred(problem, blocks)
    return General(problem, blocks)
