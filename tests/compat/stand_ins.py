"""Stand-ins for the libraries of the porting snippets, by the formulas of their documents.

Nothing of flash_pallas is in it. jax.nn and Flax are themselves, and so is what jax has of splash
attention for CPUs. Where torch is installed, `torch_live.py` runs the same texts with it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.experimental.pallas.ops.tpu import splash_attention

from . import formulas, sdpa_cases


def swapped(x):
    return jnp.swapaxes(x, 1, 2)


# --- flash-attn, flash_attn/flash_attn_interface.py of 2.8 ---------------------------------------


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    return formulas.flash_attn(
        q,
        k,
        v,
        causal=causal,
        window=window_size,
        softcap=softcap,
        slopes=alibi_slopes,
        scale=softmax_scale,
    )[0]


def flash_attn_qkvpacked_func(qkv, **options):
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **options)


def flash_attn_varlen_func(q, k, v, cu_q, cu_k, most_q, most_k, **options):
    lengths = [np.diff(np.asarray(x)).max() for x in (cu_q, cu_k)]
    assert lengths == [most_q, most_k]
    return formulas.flash_attn_varlen(q, k, v, np.asarray(cu_q), np.asarray(cu_k), **options)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary_cos=None,
    rotary_sin=None,
    *,
    cache_seqlens,
    block_table=None,
    causal,
    rotary_interleaved=True,
):
    """Computes each sequence by itself, with its keys in one array."""
    found, count = [], q.shape[1]
    for b, length in enumerate(np.asarray(cache_seqlens)):
        rows = [
            x[b] if block_table is None else x[block_table[b]].reshape(-1, *x.shape[2:])
            for x in (k_cache, v_cache)
        ]
        new_q, new_k = q[b], k[b]
        if rotary_cos is not None:
            at = slice(length, length + count)
            tables = rotary_cos[at], rotary_sin[at]
            new_q, new_k = (rotated(x, *tables, rotary_interleaved) for x in (new_q, new_k))
        whole = [
            jnp.concatenate([row[:length], new])[None]
            for row, new in zip(rows, (new_k, v[b]), strict=True)
        ]
        found.append(formulas.flash_attn(new_q[None], *whole, causal=causal)[0])
    return jnp.concatenate(found)


def rotated(x, cos, sin, interleaved: bool):
    """Rotates x [T, heads, H] by tables [T, H / 2]."""
    half = cos.shape[-1]
    one, two = (
        (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    )
    cos, sin = cos[:, None], sin[:, None]
    pair = one * cos - two * sin, two * cos + one * sin
    if interleaved:
        return jnp.stack(pair, axis=-1).reshape(x.shape)
    return jnp.concatenate(pair, axis=-1)


# --- torch ---------------------------------------------------------------------------------------


def causal_lower_right(q_len: int, kv_len: int):
    return jnp.asarray(np.tril(np.ones((q_len, kv_len), bool), kv_len - q_len))


def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device):
    assert (B, H, device) == (None, None, "cpu")
    return mask_mod


def flex_attention(query, key, value, score_mod=None, block_mask=None, return_lse=False):
    where = [jnp.asarray(x) for x in np.indices((*query.shape[:3], key.shape[2]))]
    visible = True if block_mask is None else block_mask(*where)
    change = (lambda x: x) if score_mod is None else lambda x: score_mod(x, *where)
    arrays = (swapped(x) for x in (query, key, value))
    o, lse = formulas.attention(*arrays, visible=visible, change=change)
    return (swapped(o), lse) if return_lse else swapped(o)


# --- Others --------------------------------------------------------------------------------------


def dense(q, k, v, bias=None, is_causal=False, logits_soft_cap=None):
    """Computes attention of [B, T, N, H] as keras and Tokamax define it: bias, cap, mask."""

    def change(score):
        score = score if bias is None else score + bias
        cap = logits_soft_cap
        return score if cap is None else cap * jnp.tanh(score / cap)

    visible = jnp.tril(jnp.ones((1, 1, q.shape[1], k.shape[1]), bool)) if is_causal else True
    return formulas.attention(q, k, v, visible=visible, change=change)[0]


@dataclasses.dataclass(frozen=True)
class BlockDiagonalMask:
    """xFormers' mask of packed sequences."""

    ids: Any

    @classmethod
    def from_seqlens(cls, lengths):
        return cls(np.repeat(np.arange(len(lengths)), lengths))

    def visible(self, q, k):
        assert len(self.ids) == q.shape[1] == k.shape[1]
        return jnp.asarray(self.ids[:, None] == self.ids[None])[None, None]


class LowerTriangularMask:
    """xFormers' causal mask, aligned at the start."""

    def visible(self, q, k):
        return jnp.tril(jnp.ones((1, 1, q.shape[1], k.shape[1]), bool))


def memory_efficient_attention(q, k, v, attn_bias):
    return formulas.attention(q, k, v, visible=attn_bias.visible(q, k))[0]


def make_attn_mask(input_mask, mask_ar):
    """Computes openpi's mask [B, T, S]: valid tokens whose running sum of mask_ar is not above."""
    order = jnp.broadcast_to(jnp.cumsum(mask_ar, axis=-1), input_mask.shape)
    seen = order[:, None, :] <= order[:, :, None]
    return seen & input_mask[:, None, :] & input_mask[:, :, None]


def masked(q, k, v, mask, bias=0.0):
    """Computes attention of [B, T, N, H] with a bias and a mask that broadcast to [B, N, T, S]."""
    mask = mask[:, None] if mask.ndim == 3 else mask
    return formulas.attention(q, k, v, visible=mask, change=lambda score: score + bias)[0]


def of_reference(make: Callable) -> Callable:
    """Returns the maker of a kernel by jax's own reference of splash attention."""

    def made(mask, head_shards: int, q_seq_shards: int):
        kernel = make(mask)
        return lambda q, k, v, segment_ids=None: kernel(q, k, v, segment_ids)

    return made


_TORCH = types.SimpleNamespace(arange=jnp.arange, tanh=jnp.tanh)
_SDPA = types.SimpleNamespace(scaled_dot_product_attention=sdpa_cases.formula)
NAMES: dict[str, dict[str, Any]] = {
    "flash-attn": {
        "flash_attn_func": flash_attn_func,
        "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
    },
    "PyTorch SDPA": {"torch": _TORCH, "F": _SDPA, "causal_lower_right": causal_lower_right},
    "FlexAttention": {
        "torch": _TORCH,
        "flex_attention": flex_attention,
        "create_block_mask": create_block_mask,
    },
    "Splash attention": {
        **vars(splash_attention),
        "make_splash_mha": of_reference(splash_attention.make_masked_mha_reference),
        "make_splash_mqa": of_reference(splash_attention.make_masked_mqa_reference),
    },
    "jax.nn and Flax": {"jax": jax, "nn": linen},
    "Tokamax, keras and xFormers": {
        "tokamax": types.SimpleNamespace(dot_product_attention=dense),
        "keras": types.SimpleNamespace(ops=types.SimpleNamespace(dot_product_attention=dense)),
        "memory_efficient_attention": memory_efficient_attention,
        "LowerTriangularMask": LowerTriangularMask,
        "BlockDiagonalMask": BlockDiagonalMask,
    },
    "openpi and AlphaFold 3": {
        "make_attn_mask": make_attn_mask,
        "attention": masked,
        "dot_product_attention": masked,
    },
}
