"""Numbers of 64 bits, and those of 32 that stand for them unless q is float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

# The dtype of 32 bits that stands for each dtype of 64 bits.
NARROW = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (("float64", "float32"), ("int64", "int32"), ("uint64", "uint32"))
}


def narrowed(x):
    """Casts an array of 64-bit numbers to 32 bits; others are returned as they are.

    What is finite stays so: integers out of range become the nearest, and float64's smallest
    number, which masks add to scores, float32's.
    """
    dtype = NARROW.get(np.dtype(x.dtype)) if isinstance(x.dtype, np.dtype) else None
    if dtype is None:
        return x
    xp: Any = np if isinstance(x, np.ndarray | np.generic) else jnp
    info = jnp.finfo(dtype) if dtype.kind == "f" else jnp.iinfo(dtype)
    near = xp.clip(x, np.asarray(info.min, x.dtype), np.asarray(info.max, x.dtype))
    return (xp.where(xp.isinf(x), x, near) if dtype.kind == "f" else near).astype(dtype)
