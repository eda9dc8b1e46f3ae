"""Rotary position embedding (arXiv:2104.09864) in the half-rotation form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..typing import AnyArray, Array, Float


def wide_dtype(dtype):
    """Returns the dtype of statistics and angles: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def apply_rope(
    x: Float[AnyArray, "*B T N H"], positions: AnyArray, theta: float
) -> Float[Array, "*B T N H"]:
    """Rotates each head's pairs (x[i], x[i + H/2]) by positions * theta^(-2i/H).

    Angles and products are float32 (float64 for float64 x), because bfloat16 cannot distinguish
    position 257 from 256.

    Args:
        x: [*batch, length, heads, H], with an even H.
        positions: [length] or [*batch, length], integers or floats.
        theta: the base; the slowest pair turns once in about 2 * pi * theta positions.

    Returns:
        An array of x's shape and dtype.

    Raises:
        TypeError: x or positions is not an array, x is not a float of 16 bits or more, or theta is
            traced.
        ValueError: positions do not fit x, H is odd, or theta is not positive and finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import apply_rope
        >>> apply_rope(jnp.ones((2, 5, 4, 64)), jnp.arange(5), 10_000.0).shape
        (2, 5, 4, 64)
    """
    _check_kinds(x, positions, theta)
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


def _check_kinds(x, positions, theta):
    for name, array in (("x", x), ("positions", positions)):
        if not hasattr(array, "dtype"):
            raise TypeError(
                f"{name} must be an array, got {type(array).__name__}: convert it with "
                f"jnp.asarray({name})"
            )
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        raise TypeError(f"x has dtype {x.dtype}: it must be a float of at least 16 bits")
    if x.ndim < 3:
        raise ValueError(
            f"x has shape {x.shape}: it must be [*batch, length, heads, head_dim]; for one head "
            "insert its axis, as in x[:, None, :]"
        )
    if isinstance(theta, jax.core.Tracer):
        raise TypeError("theta is traced, but it must be static: list it in static_argnames")
    number = isinstance(theta, (int, float, np.number, np.ndarray, jax.Array))
    if not number or isinstance(theta, bool) or np.ndim(theta) or not 0 < theta < np.inf:
        raise ValueError(f"theta is {theta!r}: it must be a positive number, as in 10_000.0")


def rotate_query_key(query, key, positions, key_positions, theta: float | None):
    """Rotates queries and keys. Without positions they count from 0; without theta nothing rotates.

    Raises:
        ValueError: positions without a theta would be ignored, or do not fit.
    """
    if theta is None:
        if positions is not None or key_positions is not None:
            raise ValueError("positions need rope_theta: without it they would have no effect.")
        return query, key
    return tuple(
        apply_rope(x, jnp.arange(x.shape[-3]) if pos is None else jnp.asarray(pos), theta)
        for x, pos in ((query, positions), (key, key_positions))
    )
