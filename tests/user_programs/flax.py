"""A program in the manner of docs/flax.md."""

from typing import assert_type

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from flash_pallas import KVCache
from flash_pallas.nn import (
    RingCache,
    ScaledCache,
    alibi_slopes,
    attention_fn,
    causal_attention_fn,
    segment_positions,
)
from flash_pallas.nn.linen import FlashAttention as Linen
from flash_pallas.nn.nnx import FlashAttention as Nnx
from flash_pallas.typing import BackendName


class LinenBlock(nn.Module):
    heads: int
    backend: BackendName = "auto"

    @nn.compact
    def __call__(self, x: jax.Array, cache: KVCache | None = None) -> jax.Array:
        layer = Linen(num_heads=self.heads, causal=True, window=(15, 0), backend=self.backend)
        x = x + layer(x)
        if cache is not None:
            o, cache = layer(x, cache=cache, new_lengths=jnp.array([3, 4]))
            assert_type(cache, KVCache)
            x = x + o
        return x + nn.MultiHeadDotProductAttention(4, attention_fn=causal_attention_fn)(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = Nnx(4, 64, num_kv_heads=2, causal=True, alibi=True, rngs=rngs)
        self.flax = nnx.MultiHeadAttention(4, 64, attention_fn=attention_fn, rngs=rngs)

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        positions = segment_positions(ids)
        o = self.attention(x, segment_ids=ids, positions=positions, rngs=nnx.Rngs(0))
        assert_type(o, jax.Array)
        return x + o + self.attention(x, x, kv_lengths=ids.sum(-1), mask=ids[:, None, None] > 0)

    def step(self, x: jax.Array, ring: RingCache) -> tuple[jax.Array, RingCache]:
        return self.attention(x, cache=ring)

    def quantised(self, x: jax.Array, cache: ScaledCache) -> jax.Array:
        o, cache = self.attention(x, cache=cache)
        assert_type(cache.k, jax.Array)
        assert_type(cache.lengths, jax.Array)
        return o


def either(layer: Nnx, x: jax.Array, cache: KVCache | None) -> jax.Array:
    out = layer(x, segment_ids=None, cache=cache)
    return out[0] if isinstance(out, tuple) else out


def rings() -> tuple[RingCache, ScaledCache]:
    ring = RingCache.empty(batch=2, window=16, kv_heads=4, head_dim=32, dtype="bfloat16", drafts=4)
    ring = ring._replace(lengths=ring.lengths - 1)
    scale = jnp.full(4, 0.02)
    return ring, ScaledCache.empty(2, 64, 4, 32, jnp.int8, k_scale=scale, v_scale=scale)


def wrong(x: jax.Array, rngs: nnx.Rngs, cache: KVCache, latent: KVCache[None]) -> None:
    Linen(num_heads=4, backend="gpu")  # error
    Linen(num_heads=4, window=(15, "0"))  # error
    Linen(heads=4)  # error
    Nnx(4, 64, num_splits="all", rngs=rngs)  # error
    layer = Nnx(4, 64, rngs=rngs)
    layer(x, segment_id=x)  # error
    layer(x, cache=(x, x, x))  # error
    layer(x, cache=latent)  # error
    _: jax.Array = layer(x, cache=cache)  # error
    pair: tuple[jax.Array, KVCache] = layer(x)  # error
    pair[0].lengths  # error
    alibi_slopes("4")  # error
    RingCache.empty(2, 16, 4, 32)  # error
