"""A program in the manner of docs/training.md."""

from typing import assert_type

import jax
import jax.numpy as jnp
from flax import nnx

from flash_pallas import autotune, flash_attention, save_attention
from flash_pallas.nn.nnx import FlashAttention


class Block(nnx.Module):
    def __init__(self, features: int, rngs: nnx.Rngs):
        self.attention = FlashAttention(
            8, features, causal=True, qk_norm="rms", dropout_rate=0.1, rngs=rngs
        )

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        return x + self.attention(x, segment_ids=segment_ids, deterministic=False)


def loss(x: jax.Array) -> jax.Array:
    attend = jax.checkpoint(lambda x: flash_attention(x, x, x), policy=save_attention)
    return jnp.square(attend(x)).mean()


def tuned(x: jax.Array) -> dict[str, float]:
    tuning = autotune(x, x, x, causal=True)
    assert_type(tuning.gain, dict[str, float])
    return tuning.gain


def wrong(x: jax.Array, rngs: nnx.Rngs) -> None:
    FlashAttention(8, 64, causal=True)  # error
    FlashAttention(8, 64, qk_norm="rmsnorm", rngs=rngs)  # error
    FlashAttention(8, 64, differentiable="twice", rngs=rngs)  # error
    flash_attention(x, x, x, deterministic="yes")  # error
    flash_attention(x, x, x, precision="bfloat16")  # error
    autotune(x, x, x, is_causal=True)  # error
