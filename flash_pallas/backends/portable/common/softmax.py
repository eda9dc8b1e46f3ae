"""Online softmax in registers, for Q rows whose keys arrive block by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.ptx.inline import ROWS
from ...gpu.ptx.online_softmax import LOWEST, Maxima, compared
from ...gpu.ptx.sums_of_rows import partial_sums

# O is rescaled where a row's maximum grew by more, in base 2. Weights stay below 2**8, which
# float16 holds, and most steps save a multiplication per element of O.
SLACK = 8.0


class Rows(NamedTuple):
    """Softmax state of each query after some KV blocks."""

    o: Any  # f32[rows, Hv], relative to the maxima
    # The largest logits; LOWEST where none was seen. -inf would have to be told from a number in
    # every step, as -inf - -inf is a NaN: 8 instructions, and 4 registers with 128 rows.
    maxima: Maxima
    l: Any  # f32[rows], the sum of the weights; see sums_of_rows


class Weighed(NamedTuple):
    """Weights of a KV block, and what the sums before it need."""

    p: Any  # weights
    alpha: Any  # () -> f32[rows]: what sums before are to be multiplied by
    maxima: Maxima  # what they are relative to
    sums: Any  # f32[rows], of them; see sums_of_rows
    grew: Any  # i32, uniform over a warp: 1 if alpha is not 1 in some row


@dataclasses.dataclass(frozen=True)
class Online:
    """Update of the softmax state from KV block to KV block.

    Attributes:
        interpret: run by the interpreter.
        far: see core.softmax.far; 0 where no logit can be far.
        slack: see SLACK; with 0, m is the largest logit.
    """

    interpret: bool
    far: float
    slack: float = SLACK

    def no_keys(self, rows: int, zeros) -> Rows:
        """Returns the state before the first KV block; `zeros` is O."""
        full = lambda value: jnp.full((rows,), value, jnp.float32)
        cast = lambda x: x if self.interpret else plgpu.layout_cast(x, ROWS)
        maxima = Maxima(cast(full(LOWEST)), cast(full(0.0)) if self.far else None)
        return Rows(zeros, maxima, no_sums(rows, self.interpret))

    def weigh(self, rows: Rows, x, log2_scale, narrowed: Callable[[Any], Any]) -> Weighed:
        """Computes the weights of a KV block.

        Args:
            rows: the state so far.
            x: x of core.scores.Logits, with -inf where hidden.
            log2_scale: log2_scale of core.scores.Logits.
            narrowed: converts float32 weights to what V is multiplied by.
        """
        tile = compared(rows.maxima, x, log2_scale, self.far, self.slack, self.interpret)
        p = jnp.exp2(tile.x * log2_scale - per_row(tile.m, x.shape))
        sums = partial_sums(p, self.interpret)
        alpha = lambda: jnp.exp2(tile.before - tile.m)
        return Weighed(narrowed(p), alpha, tile.maxima, sums, tile.grew)

    @staticmethod
    def rescaled(rows: Rows, weighed: Weighed) -> Rows:
        """Returns the state to which the matmul of weights and V is to be added."""

        def relative():
            alpha = weighed.alpha()
            return rows.o * per_row(alpha, rows.o.shape), rows.l * alpha

        o, l = lax.cond(weighed.grew > 0, relative, lambda: (rows.o, rows.l))
        return Rows(o, weighed.maxima, l + weighed.sums)


def per_row(x, shape):
    """Spreads one value per row over a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))


def no_sums(rows: int, interpret: bool):
    """Returns the sums of no tile: zeros, f32[rows]."""
    zeros = jnp.zeros((rows,), jnp.float32)
    return zeros if interpret else plgpu.layout_cast(zeros, ROWS)
