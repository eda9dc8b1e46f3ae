"""Texts of caches, for a reader."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import is_known, known

# Arrays of so many numbers at most are shown by their values.
SHOWN = 16


def readable(cache: Any) -> str:
    """Returns a cache as text: arrays by dtype and shape, lengths by their values."""
    fields = (f"{name}={_shown(x)}" for name, x in zip(cache._fields, cache, strict=True))
    return f"{type(cache).__name__}({', '.join(fields)})"


def _shown(x) -> str:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return repr(x)
    shows_values = isinstance(x, (np.ndarray, jax.Array)) and is_known(x)
    if shows_values and x.ndim == 1 and x.size <= SHOWN:
        return str(known(x).tolist())
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
