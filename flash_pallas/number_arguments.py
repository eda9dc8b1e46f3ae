"""Static numbers among the arguments of `flash_attention`, checked."""

from __future__ import annotations

import math

import jax
import numpy as np

# Beyond these, scale / softcap and what is computed with it leave the range of float32.
MAX_SCALE, SOFTCAPS = 1e30, (1e-6, 1e30)


def scale(value, head_dim: int) -> float:
    """Checks the factor of the scores; None becomes 1 / sqrt(head_dim)."""
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    factor = _number("scale", value)
    if abs(factor) > MAX_SCALE:
        raise ValueError(f"scale is {value}: its magnitude must be at most {MAX_SCALE}")
    return factor


def softcap(value) -> float | None:
    """Checks the bound of the logits; None is no bound."""
    if value is None:
        return None
    cap = _number("softcap", value)
    if cap <= 0.0:
        raise ValueError(f"softcap must be finite and positive, got {value}; None is no cap")
    if not SOFTCAPS[0] <= cap <= SOFTCAPS[1]:
        raise ValueError(
            f"softcap is {value}: it must be in [{SOFTCAPS[0]}, {SOFTCAPS[1]}], because float32 "
            "loses scores divided by one that is larger; None is no cap"
        )
    return cap


def _number(name: str, value) -> float:
    if isinstance(value, jax.core.Tracer):
        way_out = "multiply q by it instead and pass scale=1.0, or " if name == "scale" else ""
        raise TypeError(
            f"{name} is traced, but it must be static: {way_out}list it in static_argnames"
        )
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    if not is_number or isinstance(value, bool) or np.ndim(value) or not np.isrealobj(value):
        raise TypeError(f"{name} must be a Python number or None, got {value!r}")
    if not math.isfinite(value):
        default = "None is 1 / sqrt(head_dim)" if name == "scale" else "None is no cap"
        raise ValueError(f"{name} must be finite, got {value}; {default}")
    return float(value)
