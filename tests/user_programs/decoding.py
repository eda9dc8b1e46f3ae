"""A program in the manner of docs/decoding.md."""

import functools
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import (
    KVCache,
    append_kv,
    apply_rope,
    check_pages,
    flash_attention,
    flash_decode,
    gather_pages,
)


@functools.partial(jax.jit, donate_argnums=0)
def step(cache: KVCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[KVCache, jax.Array]:
    cache = append_kv(cache, k, v, rope_theta=10_000.0)
    q = apply_rope(q, cache.lengths[:, None] - 1, 10_000.0)
    return cache, flash_decode(q, cache.k, cache.v, kv_lengths=cache.lengths)


def attend(q: jax.Array, cache: KVCache) -> jax.Array:
    return flash_decode(q, cache.k, cache.v, kv_lengths=cache.lengths, kv_starts=cache.starts)


def merged(q: jax.Array, cache: KVCache, wanted: bool) -> jax.Array:
    o, lse = flash_decode(q, cache.k, cache.v, num_splits=4, window=jnp.int32(31), return_lse=True)
    assert_type(lse, jax.Array)
    either = flash_decode(q, cache.k, cache.v, num_splits="auto", return_lse=wanted)
    return o if isinstance(either, tuple) else either


def pages(q: jax.Array, k: jax.Array, table: np.ndarray, lengths: np.ndarray) -> jax.Array:
    check_pages(table, lengths, num_pages=8, page_size=16)
    cache = append_kv(KVCache(k, k, jnp.asarray(lengths)), q, q, page_table=table)
    assert_type(cache, KVCache)
    whole = gather_pages(cache.k, table), gather_pages(cache.v, table)
    o = flash_attention(q, *whole, causal=True, kv_lengths=cache.lengths)
    prefix = flash_decode(q, k, k, page_table=table, kv_lengths=lengths, shared_prefix="auto")
    return o + prefix + flash_decode(q, k, k, page_table=table, shared_prefix=np.array([16, 0]))


def drafts(q: jax.Array, cache: KVCache, mask: np.ndarray) -> KVCache:
    proposed = append_kv(cache, q, q, new_lengths=jnp.array([3, 1]))
    flash_decode(q, proposed.k, proposed.v, kv_lengths=proposed.lengths, draft_mask=mask)
    return proposed._replace(lengths=cache.lengths + jnp.array([4, 1]))


def latent(q: jax.Array, rows: jax.Array) -> jax.Array:
    cache = KVCache.empty(2, 64, kv_heads=1, head_dim=192, dtype=rows.dtype, shared=True)
    assert_type(cache, KVCache[None])
    cache = append_kv(cache, rows)
    return flash_decode(q, cache.k, v_head_dim=128, kv_lengths=cache.lengths)


def wrong(q: jax.Array, cache: KVCache) -> None:
    KVCache.empty(2, 64, kv_heads=4, head_dim=64)  # error
    append_kv(q, q, q)  # error
    append_kv(cache, q, q, lengths=q)  # error
    flash_decode(q, cache)  # error
    flash_decode(q, cache.k, cache.v, num_splits="many")  # error
    flash_decode(q, cache.k, cache.v, shared_prefix="yes")  # error
    flash_decode(q, cache.k, cache.v, backend="tpu")  # error
    flash_decode(q, cache.k, cache.v, kv_length=cache.lengths)  # error
    flash_decode(q, cache.k, cache.v, kv_lengths=[3, 4])  # error
    _: jax.Array = flash_decode(q, cache.k, cache.v, return_lse=True)  # error
    flash_decode(q, cache.k, cache.v).lse()  # error
    print(cache.length)  # error
