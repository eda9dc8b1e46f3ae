"""A decoder-only transformer over bytes, on flash_pallas.nn.nnx.FlashAttention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_pallas import KVCache, flash_attention
from flash_pallas.nn.nnx import FlashAttention
from flash_pallas.parallel import ContextParallel

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        layers: number of blocks.
        d_model: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: size of a head.
        dtype: dtype to compute in; parameters are float32.
        backend: as in flash_attention.
        attention: a key of ATTENTIONS.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    backend: str
    attention: str


def _jax_attention(q, k, v, *, causal, scale, implementation, **_):
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, implementation=implementation
    )


# What --attention chooses from: ours, and JAX's own to compare loss curves with.
ATTENTIONS = {
    "flash": flash_attention,
    "cudnn": functools.partial(_jax_attention, implementation="cudnn"),
    "xla-jax": functools.partial(_jax_attention, implementation="xla"),
}


class Block(nnx.Module):
    """Pre-norm attention, then a pre-norm gated MLP."""

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        context_parallel: ContextParallel | None = None,
    ):
        width, hidden, dtype = config.d_model, 4 * config.d_model, config.dtype
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        # Scaled down by depth, so that the sum of all MLPs does not outgrow the embedding.
        small = nnx.initializers.variance_scaling(1 / (2 * config.layers), "fan_in", "normal")
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = FlashAttention(
            config.heads,
            width,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            causal=True,
            rope_theta=10_000.0,
            qk_norm="rms",
            use_qkv_bias=False,
            use_out_bias=False,
            dtype=dtype,
            backend=config.backend,
            attention=ATTENTIONS[config.attention],
            context_parallel=context_parallel,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.gate = linear(width, hidden)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width, kernel_init=small)

    def __call__(self, x, cache=None, new_lengths=None, **packed):
        """Applies the block to x [batch, length, d_model]; with a cache returns the new one too.

        Without one, `packed` may be the segment_ids and positions of packed documents.
        """
        normed = self.attention_norm(x)
        if cache is None:
            attended = self.attention(normed, **packed)
        else:
            attended, cache = self.attention(normed, cache=cache, new_lengths=new_lengths)
        x = x + attended
        y = self.mlp_norm(x)
        x = x + self.down(nnx.silu(self.gate(y)) * self.up(y))
        return x if cache is None else (x, cache)


class Transformer(nnx.Module):
    """Maps bytes to the logits of the next byte."""

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        context_parallel: ContextParallel | None = None,
    ):
        width, block = config.d_model, functools.partial(Block, config, rngs, context_parallel)
        self.cache_sizes = config.kv_heads, config.head_dim, config.dtype
        self.embed = nnx.Embed(VOCABULARY, width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([block() for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.logits = nnx.Linear(width, VOCABULARY, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens, caches=None, new_lengths=None):
        """Returns logits float32[batch, length, VOCABULARY] of tokens int32[batch, length].

        Args:
            tokens: all tokens there are, or with caches the new ones.
            caches: one for each block, of the tokens before; then the new caches are returned too.
            new_lengths: number of new tokens of each sequence; those after them are padding.
        """
        x, new_caches = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache, new_lengths)
            if cache is not None:
                x, cache = x
                new_caches.append(cache)
        logits = self.logits(self.norm(x)).astype(jnp.float32)
        return logits if caches is None else (logits, new_caches)

    def empty_caches(self, batch: int, length: int) -> list[KVCache]:
        """Returns one cache per block, with room for `length` tokens of each sequence."""
        return [KVCache.empty(batch, length, *self.cache_sizes) for _ in self.blocks]
