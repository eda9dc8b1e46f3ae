"""The softmax of rows of queries whose keys come block by block, in registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import inline
from . import row_sums

# O is rescaled where a row's maximum grew by more, in base 2. Weights stay below 2**8, which
# float16 holds, and most steps save a multiplication per element of O.
SLACK = 8.0

# The largest logit before the first key. -inf would have to be told from a number in every step, as
# -inf - -inf is a NaN: 8 instructions, and 4 registers with 128 rows. No sum tells the two apart.
LOWEST = float(jnp.finfo(jnp.float32).min)


class Rows(NamedTuple):
    """What is known of each query after some key blocks."""

    o: Any  # f32[rows, Hv], relative to m
    m: Any  # f32[rows], largest logit, base 2; LOWEST where none was seen
    l: Any  # f32[rows], the sum of exp2(logit - m); see row_sums


class Weighed(NamedTuple):
    """What a key block weighs."""

    p: Any  # weights
    m: Any  # f32[rows], what they are relative to
    sums: Any  # f32[rows], of them; see row_sums
    grew: Any  # i32, uniform over a warp: 1 if m is another than before in some row


@dataclasses.dataclass(frozen=True)
class Online:
    """How rows change from block to block.

    Attributes:
        interpret: run by the interpreter.
        slack: see SLACK; 0: m is the largest logit.
    """

    interpret: bool
    slack: float = SLACK

    def no_keys(self, rows: int, zeros) -> Rows:
        """Before the first key block; `zeros` is O."""
        lowest = jnp.full((rows,), LOWEST, jnp.float32)
        if not self.interpret:
            lowest = plgpu.layout_cast(lowest, inline.ROWS)
        return Rows(zeros, lowest, row_sums.none(rows, self.interpret))

    def weigh(self, rows: Rows, x, log2_scale, narrowed: Callable[[Any], Any]) -> Weighed:
        """The weights of a key block.

        Args:
            rows: so far.
            x: of core.scores.Logits, with -inf where hidden.
            log2_scale: likewise.
            narrowed: from weights in float32 to what V is multiplied by.
        """
        most = jnp.maximum(rows.m, x.max(axis=1) * log2_scale)
        m, grew = inline.lazy_max(rows.m, most, self.slack, self.interpret)
        p = jnp.exp2(x * log2_scale - per_row(m, x.shape))
        sums = row_sums.parts(p, self.interpret)
        return Weighed(narrowed(p), m, sums, grew)

    @staticmethod
    def rescaled(rows: Rows, found: Weighed) -> Rows:
        """Rows to which the product of weights and V is to be added."""

        def relative():
            alpha = jnp.exp2(rows.m - found.m)
            return rows.o * per_row(alpha, rows.o.shape), rows.l * alpha

        o, l = lax.cond(found.grew > 0, relative, lambda: (rows.o, rows.l))
        return Rows(o, found.m, l + found.sums)


def per_row(x, shape):
    """One value of each row, spread over a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))
