"""The softmax of rows of queries whose keys come block by block, in registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import inline
from ..mosaic.row_maxima import LOWEST, Maxima, compared
from . import row_sums

# O is rescaled where a row's maximum grew by more, in base 2. Weights stay below 2**8, which
# float16 holds, and most steps save a multiplication per element of O.
SLACK = 8.0


class Rows(NamedTuple):
    """What is known of each query after some key blocks."""

    o: Any  # f32[rows, Hv], relative to the maxima
    # The largest logits; LOWEST where none was seen. -inf would have to be told from a number in
    # every step, as -inf - -inf is a NaN: 8 instructions, and 4 registers with 128 rows.
    maxima: Maxima
    l: Any  # f32[rows], the sum of the weights; see row_sums


class Weighed(NamedTuple):
    """What a key block weighs."""

    p: Any  # weights
    alpha: Any  # () -> f32[rows]: what sums before are to be multiplied by
    maxima: Maxima  # what they are relative to
    sums: Any  # f32[rows], of them; see row_sums
    grew: Any  # i32, uniform over a warp: 1 if alpha is not 1 in some row


@dataclasses.dataclass(frozen=True)
class Online:
    """How rows change from block to block.

    Attributes:
        interpret: run by the interpreter.
        far: see core.softmax.far; 0 where no logit can be.
        slack: see SLACK; 0: m is the largest logit.
    """

    interpret: bool
    far: float
    slack: float = SLACK

    def no_keys(self, rows: int, zeros) -> Rows:
        """Before the first key block; `zeros` is O."""
        full = lambda value: jnp.full((rows,), value, jnp.float32)
        cast = lambda x: x if self.interpret else plgpu.layout_cast(x, inline.ROWS)
        maxima = Maxima(cast(full(LOWEST)), cast(full(0.0)) if self.far else None)
        return Rows(zeros, maxima, row_sums.none(rows, self.interpret))

    def weigh(self, rows: Rows, x, log2_scale, narrowed: Callable[[Any], Any]) -> Weighed:
        """The weights of a key block.

        Args:
            rows: so far.
            x: of core.scores.Logits, with -inf where hidden.
            log2_scale: likewise.
            narrowed: from weights in float32 to what V is multiplied by.
        """
        found = compared(rows.maxima, x, log2_scale, self.far, self.slack, self.interpret)
        p = jnp.exp2(found.x * log2_scale - per_row(found.m, x.shape))
        sums = row_sums.parts(p, self.interpret)
        alpha = lambda: jnp.exp2(found.before - found.m)
        return Weighed(narrowed(p), alpha, found.maxima, sums, found.grew)

    @staticmethod
    def rescaled(rows: Rows, found: Weighed) -> Rows:
        """Rows to which the product of weights and V is to be added."""

        def relative():
            alpha = found.alpha()
            return rows.o * per_row(alpha, rows.o.shape), rows.l * alpha

        o, l = lax.cond(found.grew > 0, relative, lambda: (rows.o, rows.l))
        return Rows(o, found.maxima, l + found.sums)


def per_row(x, shape):
    """One value of each row, spread over a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))
