"""A program in the manner of docs/porting.md."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_splash

from flash_pallas.compat import splash
from flash_pallas.compat.flash_attn import flash_attn_with_kvcache
from flash_pallas.compat.flex import (
    AuxOutput,
    AuxRequest,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)
from flash_pallas.compat.torch_sdpa import causal_lower_right, scaled_dot_product_attention


def cached(q: jax.Array, cache: jax.Array, lengths: np.ndarray, wanted: bool) -> jax.Array:
    o, k, v = flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=lengths, causal=True)
    assert_type(v, jax.Array)
    o, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=3, return_softmax_lse=True)
    o, lse, k, v = flash_attn_with_kvcache(q, k, v, q, q, q, q, 3, return_softmax_lse=True)
    assert_type(lse, jax.Array)
    flash_attn_with_kvcache(q, k, v, return_softmax_lse=wanted)
    read = flash_attn_with_kvcache(q, k, v, block_table=lengths, window_size=(None, 0))
    assert_type(read, jax.Array)
    return o + read


def flexible(x: jax.Array) -> jax.Array:
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    near = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 16
    mask = create_block_mask(and_masks(causal, near), None, None, 64, 64)
    assert_type(create_mask(causal, 1, 1, 64, 64), jax.Array)
    o = flex_attention(x, x, x, lambda s, b, h, q, kv: s - (q - kv), mask, enable_gqa=True)
    assert_type(o, jax.Array)
    o, lse = flex_attention(x, x, x, block_mask=mask, return_lse=True)
    assert_type(lse, jax.Array)
    o, aux = flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
    assert_type(aux, AuxOutput)
    return o if aux.lse is None else o + aux.lse.mean()


def torch(x: jax.Array, mask: np.ndarray) -> jax.Array:
    bias = causal_lower_right(16, 64)
    o = scaled_dot_product_attention(x, x, x, bias) + scaled_dot_product_attention(x, x, x, mask)
    return o + scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.2, enable_gqa=True)


def tpu(x: jax.Array) -> jax.Array:
    mask = splash.CausalMask((64, 64)) & splash.LocalMask((64, 64), (31, None), 0)
    kernel = splash.make_splash_mha(splash.MultiHeadMask([mask] * 8))
    splash.make_splash_mha(jax_splash.MultiHeadMask([jax_splash.FullMask((64, 64))] * 8))
    kernel(x, x, x, segment_ids=splash.SegmentIds(x, x))
    assert_type(kernel(x, x, x), jax.Array)
    o, (lse,) = splash.make_splash_mqa(jnp.ones((8, 64, 64), bool), save_residuals=True)(x, x, x)
    assert_type(lse, jax.Array)
    return jax.vmap(kernel)(o, x, x)


def wrong(x: jax.Array) -> None:
    _: tuple[jax.Array, ...] = flash_attn_with_kvcache(x, x, x)  # error
    one: jax.Array = flash_attn_with_kvcache(x, x, x, x, x)  # error
    one.lse  # error
    flash_attn_with_kvcache(x, x, x, cache_lens=3)  # error
    flex_attention(x, x, x, return_lse="yes")  # error
    flex_attention(x, x, x, kernel_options={"BLOCK_M": 64})  # error
    create_block_mask(lambda q, kv: q >= kv, None, None, 64, 64)  # error
    scaled_dot_product_attention(x, x, x, dropout=0.1)  # error
    scaled_dot_product_attention(x, x, x, attn_mask="causal")  # error
    splash.make_splash_mha(splash.CausalMask((64, 64)))  # error
    splash.make_splash_mqa(x, save_residual=True)  # error
