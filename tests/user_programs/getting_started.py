"""A program in the manner of docs/getting-started.md."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp
from flash_pallas import dot_product_attention, flash_attention_with_lse
from flash_pallas.typing import BackendName, Precision


def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return fp.flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()


def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    return value + sum(g.sum() for g in gradients)


def merged(q: jax.Array, k: np.ndarray, v: np.ndarray) -> jax.Array:
    halves = [flash_attention_with_lse(q, k[i : i + 64], v[i : i + 64]) for i in (0, 64)]
    assert_type(halves[0], tuple[jax.Array, jax.Array])
    total = jnp.logaddexp(halves[0][1], halves[1][1])
    return jnp.stack([o * jnp.exp(lse - total).T[..., None] for o, lse in halves]).sum(0)


def configured(x: jax.Array, backend: BackendName, precision: Precision | None) -> jax.Array:
    return fp.flash_attention(x, x, x, backend=backend, precision=precision)


def switched(x: jax.Array, wanted: bool) -> jax.Array:
    assert_type(dot_product_attention(x, x, x), jax.Array)
    o, lse = dot_product_attention(x, x, x, is_causal=True, return_residual=True)
    assert_type(lse, jax.Array)
    either = dot_product_attention(x, x, x, return_residual=wanted)
    return o if isinstance(either, tuple) else either


def wrong(x: jax.Array, name: str) -> None:
    fp.flash_attention(x, x, x, backend="tpu")  # error
    fp.flash_attention(x, x, x, backend=name)  # error
    fp.flash_attention(x, x, x, q_offset="end")  # error
    dot_product_attention(x, x, x, causal=True)  # error
    dot_product_attention(x, x, x, implementation="flash")  # error
    _: jax.Array = dot_product_attention(x, x, x, return_residual=True)  # error
    flash_attention_with_lse(x, x, x).lse()  # error
