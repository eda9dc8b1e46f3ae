"""Integers of every dtype in every function: known values that do not fit raise, others clip."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.frontend.arguments import as_int32
from flash_pallas.nn import segment_positions
from flash_pallas.parallel import context_parallel_attention

T = 12
DTYPES = (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, K, V = draw(0, 2, T, 4, 8), draw(1, 2, T, 2, 8), draw(2, 2, T, 2, 8)
IDS = np.repeat([[0, 1]], [7, 5], axis=1).repeat(2, axis=0)


def packed(ids, attend=fp.flash_attention, **options):
    return attend(Q, K, V, causal=True, q_segment_ids=ids, kv_segment_ids=ids, **options)


@pytest.mark.thorough(always=["-uint32", "x64-int64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
def test_every_integer_dtype_is_taken(dtype, x64):
    lengths = np.array([9, 4])
    table = np.array([[0, 1], [1, 0]])
    cut = partial(fp.flash_attention, Q, K, V)
    with jax.enable_x64(x64):
        for place in (lambda x: x, jnp.asarray):
            cast = lambda x, place=place: place(x.astype(dtype))
            pages = {"page_table": cast(table), "kv_lengths": cast(lengths)}
            cache = fp.KVCache(draw(3, 2, 32, 2, 8), draw(4, 2, 32, 2, 8), cast(lengths))
            with jax.numpy_dtype_promotion("strict"):
                found = (
                    packed(cast(IDS)),
                    cut(kv_lengths=cast(lengths), q_lengths=cast(lengths)),
                    cut(causal=True, q_offset=cast(lengths)),
                    fp.flash_decode(Q[:, :1], cache.k[:, :16], cache.v[:, :16], **pages),
                    fp.append_kv(cache, K, V, new_lengths=cast(lengths)),
                )
            int32 = lambda x: jnp.asarray(x, jnp.int32)
            pages = {"page_table": int32(table), "kv_lengths": int32(lengths)}
            cache = cache._replace(lengths=int32(lengths))
            right = (
                packed(int32(IDS)),
                cut(kv_lengths=int32(lengths), q_lengths=int32(lengths)),
                cut(causal=True, q_offset=int32(lengths)),
                fp.flash_decode(Q[:, :1], cache.k[:, :16], cache.v[:, :16], **pages),
                fp.append_kv(cache, K, V, new_lengths=int32(lengths)),
            )
            jax.tree.map(np.testing.assert_array_equal, found, right)


WIDE = [(np.int64, 2**32), (np.uint32, 2**31 + 7), (np.uint64, 2**63), (np.int64, -(2**31) - 1)]


@pytest.mark.parametrize(("dtype", "value"), WIDE, ids=str)
def test_known_values_that_do_not_fit_are_refused(dtype, value):
    wide = np.array([3, value], dtype)
    ids = IDS.astype(dtype)
    ids[:, 7:] = value
    cache = fp.KVCache(K, V, np.array([3, 4]))
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    calls = {
        "q_segment_ids": lambda: packed(ids),
        "kv_lengths": lambda: fp.flash_attention(Q, K, V, kv_lengths=wide),
        "q_lengths": lambda: fp.explain(fp.flash_attention, Q, K, V, q_lengths=wide),
        "new_lengths": lambda: fp.append_kv(cache, K, V, new_lengths=wide),
        "cache.lengths": lambda: fp.append_kv(cache._replace(lengths=wide), K, V),
        "page_table": lambda: fp.gather_pages(draw(3, 8, 16, 2, 8), wide[None]),
        "segment_ids": lambda: segment_positions(ids),
        "q_segment_ids ": lambda: packed(
            ids, context_parallel_attention, mesh=mesh, axis="context"
        ),
        "kv_lengths ": lambda: fp.flash_decode(Q[:, :1], K, V, kv_lengths=wide),
        "page_table ": lambda: fp.check_pages(wide[None], np.array([20]), 4, 16),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name.strip()} contains {value}: .*fit int32"):
            call()


def test_known_values_of_jax_arrays_are_looked_at_too():
    with pytest.raises(ValueError, match="kv_lengths contains 2147483655"):
        fp.flash_attention(Q, K, V, kv_lengths=jnp.array([3, 2**31 + 7], jnp.uint32))


def test_an_int_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"kv_lengths is 1099511627776: .*fit int32"):
        fp.flash_attention(Q, K, V, kv_lengths=2**40)
    with pytest.raises(ValueError, match=r"q_offset is 2147483648: .*2\*\*30"):
        fp.flash_attention(Q, K, V, causal=True, q_offset=np.array([0, 2**31]))


def test_traced_lengths_clip_to_what_fits():
    whole = fp.flash_attention(Q, K, V)
    cut = jax.jit(lambda n: fp.flash_attention(Q, K, V, kv_lengths=n))
    np.testing.assert_allclose(cut(jnp.uint32(2**32 - 1)), whole, rtol=1e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(cut(jnp.int64(2**32)), whole, rtol=1e-6)
        assert not cut(jnp.int64(-(2**32))).any()


def test_traced_ids_that_do_not_fit_are_one_document_and_no_padding():
    ids = jnp.asarray(IDS.astype(np.uint32)) * jnp.uint32(2**31 + 7)
    low = np.where(IDS == 1, 2**31 - 1, 0)
    np.testing.assert_array_equal(jax.jit(packed)(ids), jax.jit(packed)(jnp.asarray(low)))


@pytest.mark.thorough(always=["2147483647"])
@pytest.mark.parametrize("offset", [2**31 - 1, 2**30, -(2**30), -(2**31)])
def test_offsets_far_away_hide_and_show_what_they_mean(offset):
    whole, none = fp.flash_attention(Q, K, V), jnp.zeros_like(Q)
    before, after = (none, whole) if offset > 0 else (whole, none)
    bands = [({"causal": True}, after), ({"window": (None, 3)}, after), ({"window": 3}, none)]
    for band, right in [*bands, ({"window": (3, None)}, before)]:
        attend = lambda offset, band=band: fp.flash_attention(Q, K, V, q_offset=offset, **band)
        for call in (attend, jax.jit(attend)):
            np.testing.assert_allclose(call(jnp.int32(offset)), right, rtol=1e-5, atol=1e-6)


def test_decoding_at_the_last_position_that_there_is():
    decode = jax.jit(lambda n: fp.flash_decode(Q[:, :2], K, V, q_offset=n))
    np.testing.assert_allclose(
        decode(jnp.int32(2**31 - 1)), fp.flash_attention(Q[:, :2], K, V), rtol=1e-5, atol=1e-6
    )


def test_what_is_no_integer():
    for value in (1.5, True, "3", None, [3]):
        with pytest.raises(TypeError, match="n must be an integer or an array of integers"):
            as_int32("n", value)
    with pytest.raises(TypeError, match="n has dtype bool: it must be int32"):
        as_int32("n", jnp.ones(3, bool))
