"""Queries that see no key: jax.nn averages all values for them, this package returns zeros."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ...core.problem import AttentionSpec, Operands


def seeing(spec: AttentionSpec, operands: Operands):
    """Returns bool[B, N, T], every axis full or 1: which queries see a key; None if all do.

    A causal mask or a window alone hides no query, as there are at most as many queries as keys.
    Nor do lengths: cuDNN is told that one key is there, which holds zeros.
    """
    seen = operands.mask
    if operands.bias is not None:
        seen = operands.bias > -jnp.inf
    if seen is None:
        return None
    if spec.mask.right == 0:
        row, column = (lax.broadcasted_iota(jnp.int32, seen.shape, axis) for axis in (2, 3))
        seen &= column <= row
    return seen.any(-1)


def cleared(sees, x):
    """Returns x [B, T, N, H] with 0 for the queries that see no key, in bool[B, N, T]."""
    if sees is None:
        return x
    entries = sees if len(sees) == 1 else jnp.repeat(sees, len(x) // len(sees), axis=0)
    return jnp.where(jnp.swapaxes(entries, 1, 2)[..., None], x, lax.full_like(x, 0))
