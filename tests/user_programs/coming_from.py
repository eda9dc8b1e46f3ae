"""A program in the manner of docs/coming-from.md."""

from typing import assert_type

import jax
import numpy as np

from flash_pallas import flash_attention, flash_attention_varlen
from flash_pallas.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)


def ours(q: jax.Array, k: jax.Array, lengths: np.ndarray) -> jax.Array:
    o = flash_attention(q, k, k, causal=True, window=(31, 0), q_offset=8 - 3, scale=1.0)
    return o + flash_attention_varlen(
        q, k, k, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, alignment="end", causal=True
    )


def theirs(q: jax.Array, qkv: jax.Array, lengths: np.ndarray) -> jax.Array:
    o = flash_attn_func(q, q, q, 0.1, None, True, window_size=(-1, 0), dropout_seed=3)
    assert_type(o, jax.Array)
    o += flash_attn_qkvpacked_func(qkv, 0.0, causal=True, return_attn_probs=False)
    o += flash_attn_kvpacked_func(q, qkv, softcap=30.0, alibi_slopes=q[0, 0, :, 0])
    return o + flash_attn_varlen_func(q, q, q, lengths, lengths, 16, 16, causal=True)


def wrong(q: jax.Array, lengths: np.ndarray) -> None:
    flash_attention(q, q, q, window_size=(31, 0))  # error
    flash_attention(q, q, q, cu_seqlens_q=lengths)  # error
    flash_attn_func(q, q, q, window=(31, 0))  # error
    flash_attn_func(q, q, q, return_attn_probs=True)  # error
    flash_attn_qkvpacked_func(q, is_causal=True)  # error
    flash_attn_varlen_func(q, q, q)  # error
    flash_attn_func(q, q, q, return_attn_probs=True)[0].probs  # error
