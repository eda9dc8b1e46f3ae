"""Caches in eight bits: what is stored, what is read, what is refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas import KVCache, reference
from flash_pallas.core.decode import QUANTISED

B, T, N, K, H, PAGE = 2, 40, 4, 2, 32, 16
TABLE = jnp.array([[4, 1, 6], [0, 3, 2]], jnp.int32)


def normal(seed: int, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def drawn(dtype: str, paged: bool, kind: str):
    """Draws (empty cache, k, v, arguments); heads, and rows with own scales, differ in size."""
    rows, length = (7, PAGE) if paged else (B, 48)
    zeros = jnp.zeros((rows, length, K, H), dtype)
    cache = KVCache(zeros, zeros, jnp.zeros(B, jnp.int32))
    size = np.array([0.5, 8.0], np.float32)
    most = float(jnp.iinfo(dtype).max) if dtype == "int8" else float(jnp.finfo(dtype).max)
    scales = [size * 4.0 / most, size[::-1] * 4.0 / most]
    if kind == "row":
        scales = [x * np.exp2(np.arange(rows) % 3)[:, None].astype(np.float32) for x in scales]
    k, v = normal(1, B, T, K, H) * size[:, None], normal(2, B, T, K, H) * size[::-1, None]
    arguments = {"k_scale": scales[0], "v_scale": scales[1]}
    return cache, k, v, arguments | ({"page_table": TABLE} if paged else {})


def numbers(x, scale, paged: bool):
    """Dequantizes a cache with its scale to float64[B, T, K, H]."""
    x = np.asarray(x.astype(jnp.float32)).astype(np.float64)
    x *= np.broadcast_to(scale, (len(x), K))[:, None, :, None]
    return (x[TABLE].reshape(B, -1, K, H) if paged else x)[:, :T]


@pytest.mark.thorough(always=["float8_e4m3fn-False-row"])
@pytest.mark.parametrize("kind", ["head", "row"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_round_trip(dtype, paged, kind):
    cache, k, v, arguments = drawn(dtype, paged, kind)
    append = jax.jit(fp.append_kv)
    cache = append(cache, k[:, :13], v[:, :13], **arguments)
    cache = append(cache, k[:, 13:], v[:, 13:], **arguments)
    assert cache.k.dtype == cache.v.dtype == dtype and cache.lengths.tolist() == [T, T]
    stored = [numbers(cache.k, arguments["k_scale"], paged)]
    stored += [numbers(cache.v, arguments["v_scale"], paged)]
    for found, given, name in zip(stored, (k, v), ("k_scale", "v_scale"), strict=True):
        scale = np.max(arguments[name], axis=0) if kind == "row" else arguments[name]
        # Half a step: of integers always the same, of floats of 3 bits a 16th of the number.
        half = 0.5 * scale[:, None] if dtype == "int8" else abs(given) / 16 + scale[:, None] / 512
        clipped = np.clip(given, -4 * np.array([0.5, 8.0]).max(), 32)
        assert (abs(found - clipped) <= half * 1.001).all()
        assert abs(found).max() > 1.0
    for q_dtype, rtol in (("float32", 1e-5), ("bfloat16", 2**-8)):
        q = jnp.asarray(normal(3, B, 3, N, H), q_dtype)
        decode = partial(fp.flash_decode, softcap=20.0, return_lse=True)
        found = jax.jit(decode)(q, *cache[:2], kv_lengths=cache.lengths, **arguments)
        wide = [np.asarray(x).astype(np.float32) for x in (q, *stored)]
        right = reference.attention(*wide, causal=True, q_offset=T - 3, softcap=20.0)
        assert found[0].dtype == q_dtype
        np.testing.assert_allclose(found[0].astype(jnp.float32), right[0], rtol=rtol, atol=2e-5)
        np.testing.assert_allclose(found[1], right[1], rtol=1e-5)


@pytest.mark.thorough(always=["int8"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_does_not_fit_is_clipped(dtype):
    cache = drawn(dtype, False, "head")[0]
    x = jnp.full((B, 1, K, H), 1e6).at[1].set(-1e6)
    found = fp.append_kv(cache, x, x, k_scale=jnp.ones(K), v_scale=jnp.ones(K))
    most = {"int8": 127.0, "float8_e4m3fn": 448.0}[dtype]
    assert found.k[:, 0, 0, 0].astype(jnp.float32).tolist() == [most, -most]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_numbers_of_the_cache_are_written_as_they_are(dtype):
    cache = drawn(dtype, False, "head")[0]
    x = jnp.full((B, 1, K, H), 3, dtype)
    found = fp.append_kv(cache, x, x)
    assert (found.k[:, 0] == x[:, 0]).all()
    q = jnp.ones((B, 1, N, H))
    o = fp.flash_decode(q, found.k, found.v, kv_lengths=found.lengths)
    np.testing.assert_allclose(o, 3.0, rtol=1e-6)


def test_float64():
    with jax.enable_x64(True):
        cache, k, v, arguments = drawn("int8", True, "row")
        cache = fp.append_kv(cache, k, v, **arguments)
        stored = [numbers(getattr(cache, n), arguments[f"{n}_scale"], True) for n in ("k", "v")]
        q = jnp.asarray(normal(3, B, 1, N, H), "float64")
        o = fp.flash_decode(q, cache.k, cache.v, kv_lengths=cache.lengths, **arguments)
        right = reference.attention(q, *stored)[0]
        assert o.dtype == jnp.float64
        np.testing.assert_allclose(o, right, rtol=1e-12)


def test_what_is_refused():
    cache, k, v, arguments = drawn("int8", True, "head")
    q = jnp.ones((B, 1, N, H))
    options = {"kv_lengths": jnp.array([3, 4]), "page_table": TABLE}
    with pytest.raises(TypeError, match="k has dtype float32 and the cache int8: pass k_scale"):
        fp.append_kv(cache, k, v, page_table=TABLE)
    with pytest.raises(TypeError, match="cache int8: leave k_scale out for what has been divided"):
        fp.append_kv(cache, cache.k[:B], cache.v[:B], **arguments)
    with pytest.raises(TypeError, match="k_scale is given and the cache has dtype float32"):
        fp.flash_decode(q, q, q, k_scale=jnp.ones(N))
    with pytest.raises(TypeError, match="v_scale has dtype int32: it must be a float"):
        fp.flash_decode(q, cache.k, cache.v, v_scale=jnp.ones(K, jnp.int32), **options)
    with pytest.raises(ValueError, match=r"k_scale has shape \(3,\): .*\(2,\), or .*\(7, 2\)"):
        fp.flash_decode(q, cache.k, cache.v, k_scale=jnp.ones(3), **options)
    with pytest.raises(TypeError, match="k has dtype int8"):
        fp.flash_decode(q, cache.k, cache.v.astype("float32"), **options)


@pytest.mark.thorough(always=["int8"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_scale_of_zero_stores_and_reads_zero(dtype):
    """Tests a scale of 0, as of a head whose largest number was 0 when scales were made."""
    scale = jnp.array([0.0, 1.0])
    new = normal(0, B, T, K, H).astype(np.float32)
    for dead in (0.0, 1.0):
        k = jnp.asarray(new).at[:, :, 0].multiply(dead)
        cache = fp.KVCache.empty(B, 64, K, H, dtype)
        cache = fp.append_kv(cache, k, k, k_scale=scale, v_scale=scale)
        q = jnp.asarray(normal(1, B, 1, N, H), jnp.float32)
        o = fp.flash_decode(q, *cache[:2], kv_lengths=cache[2], k_scale=scale, v_scale=scale)
        o = o.reshape(B, K, N // K, H)
        assert (o[:, 0] == 0).all() and jnp.isfinite(o[:, 1]).all() and o[:, 1].any()
