"""A program in the manner of docs/several-gpus.md."""

from functools import partial
from typing import assert_type

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from flash_pallas import flash_attention
from flash_pallas.nn.nnx import FlashAttention
from flash_pallas.parallel import (
    ContextParallel,
    context_parallel_attention,
    from_zigzag,
    sharded_attention,
    to_zigzag,
    zigzag_positions,
)
from flash_pallas.typing import Layout, Strategy


def on_shards(x: jax.Array, mesh: Mesh) -> jax.Array:
    local = partial(flash_attention, dropout_rate=0.1, dropout_seed=7, shard_axes=("data", None))
    return jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x, x, x)


def ring(x: jax.Array, mesh: Mesh, strategy: Strategy, layout: Layout) -> jax.Array:
    x = to_zigzag(x, 2)
    o = context_parallel_attention(
        x, x, x, mesh=mesh, axis="context", strategy=strategy, layout=layout, causal=True
    )
    assert_type(o, jax.Array)
    o, lse = context_parallel_attention(
        x, x, x, mesh=mesh, axis=("a", "b"), batch_axis="data", return_lse=True
    )
    assert_type(lse, jax.Array)
    return from_zigzag(o, 2) + zigzag_positions(64, 2).sum()


def inside(x: jax.Array) -> jax.Array:
    o, lse = sharded_attention(x, x, x, axis="context", window=(3, None), return_lse=True)
    return sharded_attention(o, x, x, axis="context", strategy="ulysses") + lse.mean()


def layer(x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
    context = ContextParallel("context", layout="zigzag", head_axis=("model",))
    return x + FlashAttention(4, 64, causal=True, context_parallel=context, rngs=rngs)(x)


def wrong(x: jax.Array, mesh: Mesh, rngs: nnx.Rngs) -> None:
    context_parallel_attention(x, x, x, mesh=mesh, axis="context", strategy="rings")  # error
    context_parallel_attention(x, x, x, mesh=mesh, axis="context", layout="striped")  # error
    context_parallel_attention(x, x, x, mesh=mesh, axis="context", kv_lengths=x)  # error
    context_parallel_attention(x, x, x, axis="context")  # error
    sharded_attention(x, x, x)  # error
    ContextParallel("context", strategy="all-gather")  # error
    FlashAttention(4, 64, context_parallel="context", rngs=rngs)  # error
    _: jax.Array = sharded_attention(x, x, x, axis="context", return_lse=True)  # error
    flash_attention(x, x, x, shard_axes="data")  # error
