"""flash-attn's modifiers of a score, in the terms of this package."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Window = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Modifiers of a score, in the terms of this package.

    Attributes:
        scale: number, None is the default.
        causal: hides the keys after the query.
        window: (left, right), None is unbounded.
        softcap: number or None.
        slopes: ALiBi's, [N] or [B, N], or None.
    """

    scale: Any
    causal: bool
    window: Window
    softcap: float | None
    slopes: Any

    @classmethod
    def of(cls, softmax_scale, causal, window_size, softcap, alibi_slopes) -> Scores:
        """Returns the modifiers of a call, from flash-attn's arguments."""
        # flash-attn's 0.0 is no softcap.
        cap = None if softcap is None or softcap == 0.0 else softcap
        return cls(softmax_scale, causal, _window(window_size), cap, alibi_slopes)

    @property
    def caps_before_alibi(self) -> bool:
        """True if flash-attn's order on a score shows: its cap comes before ALiBi."""
        return self.softcap is not None and self.slopes is not None

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `flash_attention`."""
        window = None if self.window == (None, None) else self.window
        options = {"scale": self.scale, "causal": self.causal, "window": window}
        options["softcap"] = self.softcap
        if self.caps_before_alibi:
            return {**options, "score_mod": _alibi(jnp.asarray(self.slopes))}
        return {**options, "alibi_slopes": self.slopes}


def _alibi(slopes):
    """Returns ALiBi as a score_mod, which comes after the softcap."""

    def score_mod(score, b, n, i, j):
        slope = slopes[n] if slopes.ndim == 1 else slopes[b, n]
        distance = jnp.abs(i - j).astype(score.dtype)
        return score - slope.astype(score.dtype) * distance

    return score_mod


def _window(window_size) -> Window:
    """Returns (left, right) with None for unbounded, which is negative in flash-attn."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size is {window_size!r}: it must be (left, right), where -1 is unbounded"
        )
    if any(isinstance(side, jax.core.Tracer) for side in window_size):
        raise TypeError("window_size is traced, but it must be static: list it in static_argnames")
    if any(isinstance(side, (float, str)) for side in window_size):
        raise TypeError(
            f"window_size is {window_size!r}: it must be (left, right), ints, where -1 or None is "
            "unbounded"
        )
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return left, right
