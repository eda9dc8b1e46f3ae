"""Arithmetic on block indices that are Python ints at trace time or traced int32 scalars.

It does not use jnp because inside a Mosaic kernel a Python int must stay a Python int: a bound
known at trace time removes whole loops from the binary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def minimum(a, b):
    """Returns min(a, b); a Python int if both are."""
    static = isinstance(a, int) and isinstance(b, int)
    return min(a, b) if static else lax.min(jnp.int32(a), jnp.int32(b))


def maximum(a, b):
    """Returns max(a, b); a Python int if both are."""
    static = isinstance(a, int) and isinstance(b, int)
    return max(a, b) if static else lax.max(jnp.int32(a), jnp.int32(b))


def clip(x, low, high):
    """Returns x limited to [low, high]."""
    return minimum(maximum(x, low), high)


def floor_div(x, divisor: int):
    """Returns floor(x / divisor) for x >= 0, else 0: callers clip negative x at 0 anyway."""
    if isinstance(x, int):
        return max(x, 0) // divisor
    return lax.div(lax.max(x, jnp.int32(0)), jnp.int32(divisor))


def ceil_div(x, divisor: int):
    """Returns ceil(x / divisor), or 0 for negative x."""
    if isinstance(x, int):
        return max(-(-x // divisor), 0)
    return lax.div(lax.max(x + (divisor - 1), jnp.int32(0)), jnp.int32(divisor))


def remainder(x, divisor: int):
    """Returns x mod divisor for x >= 0; free for divisor 1."""
    if divisor == 1:
        return 0
    if isinstance(x, int):
        return x % divisor
    if divisor & (divisor - 1) == 0:
        return lax.bitwise_and(x, jnp.int32(divisor - 1))
    return lax.rem(x, jnp.int32(divisor))


def round_up(x: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least x."""
    return -(-x // multiple) * multiple
