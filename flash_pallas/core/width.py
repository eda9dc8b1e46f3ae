"""Width of numbers while attention is traced: 32 bits, or 64 for float64 q alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# By a dtype of 64 bits, that which stands for it.
NARROW = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (("float64", "float32"), ("int64", "int32"), ("uint64", "uint32"))
}


def of(dtype) -> contextlib.AbstractContextManager:
    """Returns the context in which a backend computes attention of this dtype.

    With `jax_enable_x64` Python's numbers are int64 and float64 there too, which kernels do not
    have. Within the context they are what they are without it, so a call is lowered to the same
    code either way.
    """
    if dtype == jnp.float64 or not jax.config.jax_enable_x64:
        return contextlib.nullcontext()
    return jax.enable_x64(False)


def of_queries[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function of a backend so that it runs in the context of its first record's q."""

    @functools.wraps(function)
    def narrow(*args: P.args, **kwargs: P.kwargs) -> R:
        operands = next(x for x in args if hasattr(x, "q"))
        with of(operands.q.dtype):
            return function(*args, **kwargs)

    return narrow


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
