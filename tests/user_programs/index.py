"""A program in the manner of docs/index.md."""

from typing import assert_type

import jax
import jax.numpy as jnp

from flash_pallas import flash_attention


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash_attention(q, k, v, causal=True)


def mean(q: jax.Array, kv: jax.Array) -> float:
    o = attend(q, kv, kv)
    assert_type(o, jax.Array)
    return float(jnp.mean(o))


def wrong(q: jax.Array) -> None:
    flash_attention(q, q)  # error
    flash_attention(q, q, q, True)  # error
    flash_attention(q, q, q, casual=True)  # error
    flash_attention([1.0], q, q)  # error
