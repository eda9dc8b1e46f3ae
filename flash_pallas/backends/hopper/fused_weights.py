"""P^T and dS^T from scores in the fused backward: the work before dP^T is there, and after.

Values that lie between the two stay in registers, next to dP^T, dK and dV. At head dim 64 and 128
queries there is room for one tile, so dropout and softcap, which need several, have a class each
that encodes them in one.
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
        inputs: inputs of the modifiers.
        limits: part of the tile that positions leave visible.
    """

    s: Any
    lse: Any
    inputs: TileInputs
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Weights(abc.ABC):
    """Base class of the two halves, each of which runs once per tile.

    Attributes:
        problem: what is computed.
        blocks: tile sizes.
    """

    problem: Problem
    blocks: FusedBlocks

    @property
    def factor(self) -> float:
        """Factor of P for which lse and delta must be made: see `BackwardArrays.scaled`."""
        return 1.0

    @abc.abstractmethod
    def early(self, tile: RegisterTile, scores: Scores):
        """Computes the tiles of registers that `late` needs, before dP^T has arrived."""

    @abc.abstractmethod
    def late(self, tile: RegisterTile, held, lse, dp, delta) -> tuple[Any, Any]:
        """Returns (keep * P, dS), f32, from what `early` has made, and lse, dP^T and delta."""

    def finished(self, dv):
        """Returns dV from the sum of products with keep * P."""
        return recompute.gained(self.problem, dv)


class General(Weights):
    """P, pull(P) and the dropout mask in separate tiles, which serve every modifier."""

    def early(self, tile: RegisterTile, scores: Scores):
        """Returns (P without what dropout drops, pull(P), dropout mask)."""
        given = (scores.s, scores.lse, scores.inputs, scores.limits)
        w = recompute.weights(self.problem, tile, *given, polynomials=self.blocks.polynomials)
        p, through = lax.optimization_barrier(
            (recompute.dropped(self.problem, w), recompute.pulled(w))
        )
        return p, through, w.kept

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Computes dS with a subtraction and a product."""
        p, through, kept = held
        return p, through * recompute.centred(self.problem, kept, dp, tile.per_q(delta))


class Signed(Weights):
    """P that is negative where dropout drops it, for problems without other modifiers."""

    @property
    def factor(self) -> float:
        """Factor of P that goes with the sign."""
        return recompute.sign_factor(self.problem)

    def early(self, tile: RegisterTile, scores: Scores):
        """Returns P times `factor`, f32, negative where dropout drops it."""
        return recompute.signed(self.problem, tile, *scores)

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Returns (keep * gain * P, dS): signs become zeros."""
        return recompute.of_signed(held, dp, tile.per_q(delta))

    def finished(self, dv):
        """Returns dv as it is, because `late` has multiplied by the gain."""
        return dv


class Deferred(Weights):
    """Logits over the cap, whose exponentials wait for dP^T, for problems with a softcap alone."""

    def early(self, tile: RegisterTile, scores: Scores):
        """Computes hyperbolic tangents: the logits over the cap."""
        return recompute.capped(self.problem, tile, scores.s, scores.inputs, scores.limits)

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Computes the exponentials, and dS from them."""
        spread = tile.per_q(lse), dp, tile.per_q(delta)
        share = self.blocks.polynomials
        return recompute.of_capped(tile, held, *spread, polynomials=share)


def weights_of(problem: Problem, blocks: FusedBlocks) -> Weights:
    """Returns the way that the blocks ask for, where the problem allows it; else General."""
    if blocks.signs and recompute.may_sign(problem):
        return Signed(problem, blocks)
    if blocks.defer and recompute.may_defer(problem):
        return Deferred(problem, blocks)
    return General(problem, blocks)
