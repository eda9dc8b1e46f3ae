"""The oracle: attention in plain jnp, with the whole matrix of scores in memory.

It says what every backend must compute and shares no code with them: mask, scale and softmax are
written out here. Not meant for training: memory grows with T * S.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset=0,
    full_precision: bool = False,
):
    """softmax(scale * q @ k^T + mask) @ v and the log-sum-exp of its rows.

    Differentiable to any order by ordinary autodiff. Everything is computed in float32, in float64
    for float64 inputs.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, S, K, H]; N is a multiple of K.
        v: values [B, S, K, Hv].
        causal: the query at position i sees the keys at positions up to i.
        scale: multiplies the scores; None is 1 / sqrt(H).
        q_offset: position of query 0; an int, or int32[B].
        full_precision: return o as it was computed instead of in q's dtype.

    Returns:
        o [B, T, N, Hv], and lse [B, N, T] (natural logarithm). A row that sees no key has o = 0,
        lse = -inf and gradients of zero.
    """
    exact = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    batch, q_len, q_heads, head_dim = q.shape
    _, kv_len, kv_heads, v_head_dim = v.shape
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    grouped = q.astype(exact).reshape(batch, q_len, kv_heads, q_heads // kv_heads, head_dim)

    scores = scale * jnp.einsum(
        "btkgh,bskh->bkgts", grouped, k.astype(exact), precision=lax.Precision.HIGHEST
    )
    keep = _visible(batch, q_len, kv_len, causal, q_offset)
    # Two wheres: the outer one cuts the gradient of the masked scores, the inner one keeps a row
    # without keys from making a NaN that the outer one could not cut.
    some = jnp.any(keep, axis=-1, keepdims=True)
    scores = jnp.where(keep, scores, -jnp.inf)
    shift = lax.stop_gradient(
        jnp.max(jnp.where(some, scores, 0.0), axis=-1, keepdims=True, initial=-jnp.inf)
    )
    shift = jnp.where(jnp.isfinite(shift), shift, 0.0)
    weights = jnp.where(keep, jnp.exp(jnp.where(keep, scores, 0.0) - shift), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    divisor = jnp.where(some, total, 1.0)
    lse = jnp.where(some, jnp.log(divisor) + shift, -jnp.inf)

    o = jnp.einsum(
        "bkgts,bskh->btkgh", weights / divisor, v.astype(exact), precision=lax.Precision.HIGHEST
    )
    o = o.reshape(batch, q_len, q_heads, v_head_dim)
    return o if full_precision else o.astype(q.dtype), lse.reshape(batch, q_heads, q_len)


def _visible(batch, q_len, kv_len, causal, q_offset):
    """bool[B, 1, 1, T, S]: which keys each query sees."""
    if not causal:
        return jnp.ones((batch, 1, 1, q_len, kv_len), bool)
    offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
    query = offset[:, None] + jnp.arange(q_len, dtype=jnp.int32)[None, :]
    key = jnp.arange(kv_len, dtype=jnp.int32)
    return (key[None, None, :] <= query[:, :, None])[:, None, None]
