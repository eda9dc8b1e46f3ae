"""Queries that see no key: jax.nn averages all values for them, this package returns zeros."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ...core.problem import AttentionSpec, Operands


def seeing(spec: AttentionSpec, operands: Operands):
    """Returns bool[B or 1, N or 1, T or 1]: which queries see a key; None if all do.

    A causal mask or a window alone hides no query, as there are at most as many queries as keys.
    Where a length is 0, cuDNN is told that one key is there.
    """
    if operands.kv_lengths is not None:
        return (operands.kv_lengths > 0)[:, None, None]
    seen = operands.mask
    if operands.bias is not None:
        seen = operands.bias > -jnp.inf
    if seen is None:
        return None
    if spec.mask.right == 0:
        row, column = (lax.broadcasted_iota(jnp.int32, seen.shape, axis) for axis in (2, 3))
        seen &= column <= row
    seen = seen.any(-1)
    return seen if len(seen) == 1 else jnp.repeat(seen, len(operands.q) // len(seen), axis=0)


def cleared(sees, x):
    """Returns x [B, T, N, H] with 0 for the queries that see no key."""
    if sees is None:
        return x
    return jnp.where(jnp.swapaxes(sees, 1, 2)[..., None], x, lax.full_like(x, 0))
