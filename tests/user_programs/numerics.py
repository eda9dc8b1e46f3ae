"""A program in the manner of docs/numerics.md."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import flash_attention, flash_attention_with_lse
from flash_pallas.reference import attention


def error(x: jax.Array) -> float:
    exact, _ = attention(x, x, x, causal=True)
    o, lse = flash_attention_with_lse(x, x, x, causal=True, precision=jax.lax.Precision.HIGHEST)
    assert_type(exact, jax.Array)
    return float(jnp.abs(o - exact).max() + lse.max())


def padded(x: np.ndarray, hidden: float) -> jax.Array:
    bias = jnp.full((1, 1, 1, 8), hidden)
    return flash_attention(x, x, x, bias=bias, kv_lengths=5, deterministic=True)


def wrong(x: jax.Array) -> None:
    flash_attention(x, x, x, precision="float32")  # error
    flash_attention(x, x, x, bias=0.5)  # error
    flash_attention(x, x, x, softcap="30")  # error
    attention(x, x)  # error
