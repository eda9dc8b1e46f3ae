"""A program in the manner of docs/masks-and-modifiers.md."""

from functools import partial
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import (
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_max_logit,
)
from flash_pallas.typing import Window


def layers(x: jax.Array, windows: jax.Array) -> jax.Array:
    def layer(x: jax.Array, left: jax.Array) -> tuple[jax.Array, None]:
        return x + flash_attention(x, x, x, causal=True, window=(left, 0)), None

    return jax.lax.scan(layer, x, windows)[0]


def windows(x: jax.Array, left: int | None) -> list[jax.Array]:
    kinds: list[Window | None] = [None, 3, np.int32(3), (left, 0), (None, left), jnp.int32(4)]
    return [flash_attention(x, x, x, window=window) for window in kinds]


def packed(x: jax.Array, ids: np.ndarray, cu_seqlens: np.ndarray) -> jax.Array:
    o = flash_attention(x, x, x, causal=True, q_segment_ids=ids, kv_segment_ids=ids)
    o += flash_attention(x, x, x, q_lengths=np.int64(3), kv_lengths=jnp.array([3, 4]))
    o += flash_attention_varlen(x[0], x[0], x[0], cu_seqlens_q=cu_seqlens, causal=True)
    pair = flash_attention_varlen(x[0], x[0], x[0], cu_seqlens_q=cu_seqlens, return_lse=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    return o


def modified(x: jax.Array, decay: jax.Array, key: jax.Array) -> jax.Array:
    def score_mod(score: jax.Array, b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array):
        return score - decay[n] * jnp.log1p(jnp.abs(i - j).astype(jnp.float32))

    seen = partial(lambda first, b, n, i, j: (j <= i) | (j < first), 4)
    o = flash_attention(x, x, x, score_mod=score_mod, mask_mod=seen, dropout_seed=key)
    return o + flash_attention(x, x, x, mask_mod=lambda b, n, i, j: j <= i, empty_rows="mean")


def clipped(x: jax.Array) -> jax.Array:
    o, lse, largest = flash_attention_with_max_logit(x, x, x, softcap=30.0, sinks=jnp.zeros(4))
    assert_type(o, jax.Array)
    assert_type(lse, jax.Array)
    return largest.max((0, 2))


def wrong(x: jax.Array, cu_seqlens: jax.Array) -> None:
    flash_attention(x, x, x, window="a")  # error
    flash_attention(x, x, x, window=(3, 0, 1))  # error
    flash_attention(x, x, x, window=("3", 0))  # error
    flash_attention(x, x, x, empty_rows="nan")  # error
    flash_attention(x, x, x, mask=True)  # error
    flash_attention(x, x, x, alibi_slopes=[0.5, 0.25])  # error
    flash_attention(x, x, x, mask_mod=lambda i, j: j <= i)  # error
    flash_attention(x, x, x, score_mod=lambda score, i, j: score)  # error
    flash_attention_varlen(x, x, x, causal=True)  # error
    flash_attention_varlen(x, x, x, cu_seqlens_q=cu_seqlens, alignment="left")  # error
    _, _ = flash_attention_with_max_logit(x, x, x)  # error
