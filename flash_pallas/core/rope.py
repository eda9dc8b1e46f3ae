"""Rotary position embedding (arXiv:2104.09864), the half-rotation form."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def wide_dtype(dtype):
    """float32, or float64 for float64: what statistics and angles are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def apply_rope(x, positions, theta: float):
    """Rotates each head's pairs (x[i], x[i + H/2]) by positions * theta^(-2i/H).

    Angles and products are float32 (float64 for float64 x): bfloat16 cannot tell position 257 from
    256.

    Args:
        x: [*batch, length, heads, H], H even.
        positions: [length] or [*batch, length], integers or floats.
        theta: the base; the slowest pair turns once in about 2 * pi * theta positions.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: positions do not fit x, or H is odd.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import apply_rope
        >>> apply_rope(jnp.ones((2, 5, 4, 64)), jnp.arange(5), 10_000.0).shape
        (2, 5, 4, 64)
    """
    length, _, head_dim = x.shape[-3:]
    lead = x.shape[:-3]
    if head_dim % 2:
        raise ValueError(f"x has head_dim {head_dim}: a rotation needs pairs, an even number")
    if positions.shape not in ((length,), (*lead, length)):
        raise ValueError(
            f"positions must have shape {(length,)} or {(*lead, length)}, got {positions.shape}."
        )
    dtype = wide_dtype(x.dtype)
    half = head_dim // 2
    frequencies = np.power(float(theta), -np.arange(half) / half).astype(dtype)
    # [length or *batch + length, 1 for heads, half], with 1 for batch dimensions that are absent.
    per_token = (*(1,) * (x.ndim - 2 - positions.ndim), *positions.shape, 1, 1)
    angles = positions.astype(dtype).reshape(per_token) * frequencies.reshape(
        (1,) * (x.ndim - 1) + (half,)
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rotate_query_key(query, key, positions, key_positions, theta: float | None):
    """Both sides rotated; positions count from 0 where None; theta None is no rotation.

    Raises:
        ValueError: positions without a theta would be ignored, or do not fit.
    """
    if theta is None:
        if positions is not None or key_positions is not None:
            raise ValueError("positions need rope_theta: without it they would have no effect.")
        return query, key
    return tuple(
        apply_rope(x, jnp.arange(x.shape[-3]) if at is None else jnp.asarray(at), theta)
        for x, at in ((query, positions), (key, key_positions))
    )
