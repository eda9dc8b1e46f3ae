"""A decoder-only transformer over bytes, on flash_pallas.nn.nnx.FlashAttention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_pallas import flash_attention
from flash_pallas.nn.nnx import FlashAttention

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        layers: how many blocks.
        d_model: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of a head.
        dtype: to compute in; parameters are float32.
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

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
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
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.gate = linear(width, hidden)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width, kernel_init=small)

    def __call__(self, x):
        """x and the result: [batch, length, d_model]."""
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.d_model
        self.embed = nnx.Embed(VOCABULARY, width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.logits = nnx.Linear(width, VOCABULARY, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens):
        """float32[batch, length, VOCABULARY] from int32[batch, length]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x)).astype(jnp.float32)
