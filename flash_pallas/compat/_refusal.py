"""Refusal of arguments of other libraries that have no counterpart here."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def refuse(name: str, value: Any, default: Any, way_out: str) -> None:
    """Raises ValueError, with what to do instead, unless an argument has its default."""
    if value is default or (type(value) is type(default) and value == default):
        return
    raise ValueError(f"{name} is {value!r}, which has no counterpart here: {way_out}")


def check_heads(q, k, enable_gqa: bool) -> None:
    """Raises ValueError where q and k [..., length, heads, E] differ in heads without a flag."""
    heads, kv_heads = (jnp.shape(x)[-2] if jnp.ndim(x) > 2 else None for x in (q, k))
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}: pass enable_gqa=True, or check the "
            "layout, [batch, heads, length, head_dim]"
        )
