"""Layers with a cache give token by token what one full forward gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx
from flax.core import meta

from flash_pallas import KVCache
from flash_pallas.nn import RingCache, ScaledCache
from flash_pallas.nn.linen import FlashAttention as LinenAttention
from flash_pallas.nn.nnx import FlashAttention as NnxAttention

B, T, FEATURES, PAGE = 3, 44, 32, 16
PROMPTS = np.array([20, 3, 17])
SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "causal": True}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rope_theta": 100.0, "qk_norm": "rms"},
    "window": {"rope_theta": 100.0, "window": (8, 0)},
    "modifiers": {"softcap": 3.0, "alibi": True, "use_sinks": True, "window": 8},
}


def built(kind: str, kernels=None, **options):
    """Builds a layer with random parameters, or the given kernels: (x, **keywords) -> output."""
    x, kernels = jnp.zeros((1, 4, FEATURES)), kernels or {}
    if kind == "nnx":
        layer = NnxAttention(in_features=FEATURES, **SIZES, **options, rngs=nnx.Rngs(0))
        if options.get("use_sinks"):
            layer.sinks[...] = jnp.arange(4.0)
        for name, kernel in kernels.items():
            getattr(layer, name).kernel[...] = kernel
        return layer
    layer = LinenAttention(**SIZES, **options)
    params = meta.unbox(layer.init(jax.random.key(0), x))
    if options.get("use_sinks"):
        params["params"]["sinks"] = jnp.arange(4.0)
    for name, kernel in kernels.items():
        params["params"][name]["kernel"] = kernel
    return lambda x, **given: layer.apply(params, x, **given)


def empty(kind: str):
    """Returns an empty cache and its page table: (cache, page table or None)."""
    heads = (2, FEATURES // 4, jnp.float32)
    if kind == "ring":
        return RingCache.empty(B, 9, *heads), None
    if kind == "contiguous":
        return KVCache.empty(B, 48, *heads), None
    table = jnp.array([[4, 1, 6], [0, 3, 2], [8, 5, 7]], jnp.int32)
    return KVCache.empty(9, PAGE, *heads)._replace(lengths=jnp.zeros(B, jnp.int32)), table


def generated(layer, x, cache, steps, **table):
    """Generates outputs [B, T, features]: prompts of PROMPTS tokens, then steps of given counts."""
    found = np.zeros(x.shape, np.float32)
    call = jax.jit(lambda x, cache, new: layer(x, cache=cache, new_lengths=new, **table))
    done, prompt = np.zeros(B, int), PROMPTS.max()
    for count in (prompt, *steps):
        new = PROMPTS if count == prompt else np.full(B, count)
        inputs = np.full((B, count, FEATURES), 7.0, np.float32)
        for b in range(B):
            inputs[b, : new[b]] = x[b, done[b] : done[b] + new[b]]
        o, cache = call(jnp.asarray(inputs), cache, jnp.asarray(new, jnp.int32))
        for b in range(B):
            found[b, done[b] : done[b] + new[b]] = o[b, : new[b]]
        done += new
        assert cache.lengths.tolist() == done.tolist()
    return found, done


CACHES = [
    *(("contiguous", name) for name in LAYERS),
    *(("paged", name) for name in ("rope", "modifiers")),
    *(("ring", name) for name in ("window", "modifiers")),
]


@pytest.mark.thorough(always=["ring-window-nnx"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize(("cache", "name"), CACHES)
def test_token_by_token_is_one_forward(kind, cache, name):
    layer = built(kind, **LAYERS[name])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, FEATURES)), jnp.float32)
    right = jax.jit(layer)(x)
    start, table = empty(cache)
    steps = (1, 1, 4, 1, 17)  # the last are more than a step takes
    found, done = generated(layer, x, start, steps, page_table=table)
    for b in range(B):
        np.testing.assert_allclose(found[b, : done[b]], right[b, : done[b]], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough(always=["float8_e4m3fn-True-True-linen"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("dtype", "paged", "rows"),
    [("int8", False, False), ("int8", False, True), ("float8_e4m3fn", True, True)],
)
def test_caches_in_eight_bits_of_numbers_that_they_hold(kind, dtype, paged, rows):
    # Each feature of a key or value is one of the inputs, from -3 to 3: a multiple of every scale.
    rng = np.random.default_rng(1)
    chosen = {name: rng.permutation(FEATURES)[:16].reshape(2, 8) for name in ("key", "value")}
    kernels = {name: jnp.eye(FEATURES)[:, order] for name, order in chosen.items()}
    layer = built(kind, kernels, window=(30, 0))
    x = jnp.asarray(rng.integers(-3, 4, (B, T, FEATURES)), jnp.float32)
    right = jax.jit(layer)(x)
    start, table = empty("paged" if paged else "contiguous")
    number = np.arange(len(start.k) * 2).reshape(-1, 2) if rows else np.arange(2)
    scales = [jnp.exp2(-jnp.asarray(number % n, jnp.float32)) for n in (2, 3)]
    eight = ScaledCache(*(x.astype(dtype) for x in start[:2]), start.lengths, *scales)
    steps = (1, 4, 18)  # the last are more than a step takes
    found, done = generated(layer, x, eight, steps, page_table=table)
    for b in range(B):
        np.testing.assert_allclose(found[b, : done[b]], right[b, : done[b]], rtol=1e-4, atol=1e-5)


def test_room_in_eight_bits():
    cache = ScaledCache.empty(2, 16, 2, 8, "int8", jnp.ones(2), jnp.full(2, 0.5))
    assert cache.k.shape == (2, 16, 2, 8) and cache.v.dtype == jnp.int8
    assert cache.lengths.tolist() == [0, 0] and cache.scales["v_scale"].tolist() == [0.5, 0.5]


def test_a_ring_of_which_nothing_older_is_kept():
    ring = RingCache.empty(1, 9, 2, 8, jnp.float32)
    layer = built("nnx", **LAYERS["window"])
    x = jnp.ones((1, 30, FEATURES))
    o, ring = layer(x, cache=ring)
    assert ring.k.shape == (1, 9, 2, 8) and ring.lengths.tolist() == [30]
    again, _ = layer(x[:, :1], cache=ring._replace(k=jnp.full_like(ring.k, jnp.nan)))
    assert jnp.isnan(again).all() and jnp.isfinite(o).all()


def test_a_window_given_as_a_list_takes_a_ring():
    layer = built("nnx", window=[8, 0])
    o, _ = layer(jnp.ones((1, 1, FEATURES)), cache=RingCache.empty(1, 9, 2, 8, jnp.float32))
    assert o.shape == (1, 1, FEATURES)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int32"])
def test_a_ring_without_scales_is_made_of_wide_floats(dtype):
    with pytest.raises(TypeError, match=f"has no scales and dtype is {dtype}: pass the dtype that"):
        RingCache.empty(1, 9, 2, 8, dtype)


@pytest.mark.thorough(always=["bfloat16-contiguous-20-linen", "int8-ring-3-nnx"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("cache", ["ring", "contiguous"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_cache_has_the_dtype_that_the_layer_computes_in(kind, tokens, cache, dtype):
    layer, start = built(kind, window=(8, 0)), empty(cache)[0]
    start = start._replace(k=start.k.astype(dtype), v=start.v.astype(dtype))
    way_out = "make the cache with dtype=float32" if dtype == "bfloat16" else "a ScaledCache"
    with pytest.raises(TypeError, match=f"cache.k has dtype {dtype} and the layer .*{way_out}"):
        layer(jnp.ones((B, tokens, FEATURES)), cache=start)


@pytest.mark.thorough(always=["nnx"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_tokens_beyond_the_room_of_a_cache_are_an_error_where_lengths_are_known(kind):
    layer, x = built(kind), jnp.ones((2, 3, FEATURES))
    cache = KVCache.empty(2, 8, 2, 8, jnp.float32)._replace(lengths=jnp.array([5, 6]))
    with pytest.raises(ValueError, match=r"room for 8 tokens .* would have 9: .*new_lengths=0"):
        layer(x, cache=cache)
    _, full = layer(x, cache=cache, new_lengths=jnp.array([3, 2]))
    assert full.lengths.tolist() == [8, 8]
    _, same = layer(x, cache=full, new_lengths=jnp.array([0, 0]))
    assert same.lengths.tolist() == [8, 8]
    _, crowded = jax.jit(lambda x, cache: layer(x, cache=cache))(x, cache)
    assert crowded.lengths.tolist() == [8, 9]
    with pytest.raises(ValueError, match=r"cache.lengths\[1\] is 9: it must be 0 to 8"):
        layer(x[:, :1], cache=crowded, new_lengths=jnp.array([0, 0]))
    pages, table = empty("paged")
    with pytest.raises(ValueError, match="room for 48 tokens"):
        layer(jnp.ones((B, 49, FEATURES)), cache=pages, page_table=table)


BAD = {
    "no cache": ({}, {"cache": (1, 2, 3)}, TypeError, "a RingCache or a ScaledCache, got tuple"),
    "causal": ({"causal": False}, {}, ValueError, "A cache needs causal=True"),
    "mask": ({}, {"mask": jnp.ones((1, 1, 4, 4))}, ValueError, "with a cache takes no mask"),
    "keys": ({}, {"inputs_kv": jnp.ones((1, 4, FEATURES))}, ValueError, "takes no inputs_kv"),
    "ids": ({}, {"segment_ids": jnp.ones((1, 4), int)}, ValueError, "takes no segment_ids"),
    "function": ({"attention": lambda *x, **y: x[0]}, {}, ValueError, "leave attention= and"),
    "ring": ({}, {"cache": RingCache.empty(1, 9, 2, 8, "float32")}, ValueError, r"window=\(8, 0\)"),
    "heads of the ring": (
        {"window": 8},
        {"cache": RingCache.empty(1, 9, 4, 8, "float32")},
        ValueError,
        "cache.k has 4 heads of 8 and the layer 2 of 8: make it with kv_heads=2, head_dim=8",
    ),
    "nothing": ({}, {"cache": None, "page_table": 1}, ValueError, "page_table without a cache"),
    "pages of a ring": (
        {"window": 8},
        {"cache": RingCache.empty(1, 9, 2, 8, "float32"), "page_table": jnp.zeros((1, 1), int)},
        ValueError,
        "A RingCache has no pages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    options, given, error, message = BAD[name]
    options = {"num_heads": 4, "in_features": FEATURES, "num_kv_heads": 2, "causal": True} | options
    layer = NnxAttention(**options, rngs=nnx.Rngs(0))
    given = {"cache": KVCache.empty(1, 16, 2, 8, jnp.float32)} | given
    with pytest.raises(error, match=message):
        layer(jnp.ones((1, 4, FEATURES)), **given)


def test_rank_and_dropout():
    cache = KVCache.empty(1, 16, 2, 8, jnp.float32)
    layer = built("nnx")
    with pytest.raises(ValueError, match=r"inputs has shape \(4, .*\[batch, length, features\]"):
        layer(jnp.ones((4, FEATURES)), cache=cache)
    layer = built("nnx", dropout_rate=0.5, deterministic=False)
    with pytest.raises(ValueError, match="takes no dropout"):
        layer(jnp.ones((1, 4, FEATURES)), cache=cache)
    layer(jnp.ones((1, 4, FEATURES)), cache=cache, deterministic=True)


PADDING = np.array([0, 17, 3])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("prompt", [20, 10])
def test_prompts_padded_on_the_left(kind, cache, prompt):
    """Prompts end together and begin at PADDING; a prompt of 20 is more than a step takes."""
    layer = built(kind, rope_theta=100.0, softcap=3.0, window=(12, 0))
    starts, length = np.minimum(PADDING, prompt - 1), prompt + 2
    x = np.random.default_rng(0).standard_normal((B, length, FEATURES)).astype(np.float32)
    right = [layer(jnp.asarray(x[b : b + 1, start:])) for b, start in enumerate(starts)]
    for b, start in enumerate(starts):
        x[b, :start] = 1e6  # what padding holds does not matter
    kv, table = empty(cache)
    kv = kv._replace(starts=jnp.asarray(starts))
    call = jax.jit(lambda x, cache: layer(x, cache=cache, page_table=table))
    found = []
    for new in (x[:, :prompt], x[:, prompt : prompt + 1], x[:, prompt + 1 :]):
        o, kv = call(jnp.asarray(new), kv)
        found.append(o)
    whole = jnp.concatenate(found, axis=1)
    np.testing.assert_array_equal(kv.starts, starts)
    for b, start in enumerate(starts):
        np.testing.assert_allclose(whole[b, start:], right[b][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt", [20, 10])
def test_padding_on_the_left_in_eight_bits(prompt):
    # As in test_caches_in_eight_bits_of_numbers_that_they_hold: nothing is rounded.
    kernels = {name: jnp.eye(FEATURES)[:, :16].reshape(FEATURES, 2, 8) for name in ("key", "value")}
    layer = built("nnx", kernels)
    x = jnp.asarray(np.random.default_rng(2).integers(-3, 4, (B, prompt, FEATURES)), jnp.float32)
    starts, start = np.minimum(PADDING, prompt - 1), empty("contiguous")[0]
    eight = (x.astype(jnp.int8) for x in start[:2])
    kv = ScaledCache(*eight, start.lengths, jnp.ones(2), jnp.ones(2), jnp.asarray(starts))
    o, after = layer(x, cache=kv)
    np.testing.assert_array_equal(after.starts, starts)
    for b, first in enumerate(starts):
        right = layer(x[b : b + 1, first:])
        np.testing.assert_allclose(o[b, first:], right[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("starts", "error", "message"),
    [
        (jnp.ones(2, jnp.int32), ValueError, r"cache.starts has shape \(2,\): .*one for each"),
        (jnp.ones(3), TypeError, "cache.starts has dtype float32"),
    ],
)
def test_starts_that_cannot_be(starts, error, message):
    cache = empty("contiguous")[0]._replace(starts=starts)
    with pytest.raises(error, match=message):
        built("nnx")(jnp.ones((B, 1, FEATURES)), cache=cache)
