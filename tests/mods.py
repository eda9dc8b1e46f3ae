"""Score and mask functions as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp


class ScoreMod(NamedTuple):
    """A score_mod over a float array.

    Attributes:
        captured: axes of that array, letters of "BN"; "" for a scalar.
        make: array -> score_mod.
    """

    captured: str
    make: Callable


def _relative(per_head):
    """Returns a score_mod that adds a bias by distance, with a size for each head."""

    def score_mod(score, b, n, i, j):
        distance = (i - j).astype(score.dtype)
        return score + per_head[n].astype(score.dtype) * jnp.tanh(0.125 * distance)

    return score_mod


def _square(strength):
    """Returns a score_mod that is not linear: every element has a different derivative."""

    def score_mod(score, b, n, i, j):
        return score - 0.125 * strength.astype(score.dtype) * score * score

    return score_mod


def _per_entry(per_entry):
    """Reads every index, and uses integer arithmetic of its own."""

    def score_mod(score, b, n, i, j):
        factor = 1.0 + per_entry[b, n].astype(score.dtype)
        return jnp.where((i + 2 * j + b + n) % 3 == 0, score * factor, score)

    return score_mod


def _hiding(per_head):
    """Hides keys with a large negative number, and all keys of every fifth query."""

    def score_mod(score, b, n, i, j):
        hidden = (i % 5 == 0) | ((i + j) % 7 == 0)
        return jnp.where(
            hidden, jnp.full_like(score, -1e9), score * per_head[n].astype(score.dtype)
        )

    return score_mod


def _falling(strength):
    """Returns a quotient, whose denominator's derivative matters too; of -inf it makes NaN."""

    def score_mod(score, b, n, i, j):
        factor = 0.125 * strength.astype(score.dtype)
        return score / (1.0 + factor * factor * score * score)

    return score_mod


SCORE_MODS = {
    "relative": ScoreMod("N", _relative),
    "square": ScoreMod("", _square),
    "per_entry": ScoreMod("BN", _per_entry),
    "hiding": ScoreMod("N", _hiding),
    "falling": ScoreMod("", _falling),
}


def _stripes(_):
    return lambda b, n, i, j: (i + 2 * j + n) % 3 != 0


def _prefix(lengths):
    """Returns a mask_mod: everyone sees a prefix of each entry's own length; causal after it."""
    return lambda b, n, i, j: (j < lengths[b]) | (j <= i)


def blockwise(b, n, i, j):
    """Says what is visible by places in squares of 64: some empty, some whole, some partial."""
    return ((i // 64 + j // 64 + n + 2 * b) % 3 != 0) & ((j <= i) | (j // 64 % 2 == 0))


MASK_MODS = {"stripes": _stripes, "prefix": _prefix}
