"""Caches of keys and values: appending, donation, page tables that are wrong."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas import KVCache, reference
from flash_pallas.nn import RingCache


def normal(seed: int, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def appended(cache, k, v, new_lengths, table=None):
    """Computes the expected result of `append_kv`, token by token."""
    k_cache, v_cache, lengths = (np.array(x) for x in cache[:3])
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    for b, new in enumerate(new_lengths):
        for t in range(new):
            lengths[b] += 1  # those without room count
            if lengths[b] > room:
                continue
            row, column = b, lengths[b] - 1
            if table is not None:
                row, column = table[b, column // k_cache.shape[1]], column % k_cache.shape[1]
            if 0 <= row < len(k_cache):
                k_cache[row, column], v_cache[row, column] = k[b, t], v[b, t]
    return KVCache(k_cache, v_cache, lengths)


def assert_same(found: KVCache, right: KVCache):
    for name in ("k", "v", "lengths"):
        np.testing.assert_array_equal(getattr(found, name), getattr(right, name), err_msg=name)


@pytest.mark.parametrize("new_lengths", [None, [5, 0, 3, 5, 2]])
def test_appending_to_a_contiguous_cache(new_lengths):
    # The last two have no room for all five: what is beyond is dropped.
    lengths = np.array([0, 4, 11, 13, 16], np.int32)
    cache = KVCache(normal(0, 5, 16, 2, 8), normal(1, 5, 16, 2, 4), lengths)
    k, v = normal(2, 5, 5, 2, 8), normal(3, 5, 5, 2, 4)
    new = None if new_lengths is None else np.array(new_lengths)
    found = jax.jit(fp.append_kv)(cache, k, v, new_lengths=new)
    assert_same(found, appended(cache, k, v, new_lengths or [5] * 5))


def test_appending_to_pages():
    # Pages in no order; the second sequence crosses into a page with a bad id, the third into one
    # that would count from the end, the fourth has room for one token.
    table = np.array([[7, 0, 1], [3, 99, 2], [5, -1, 4], [8, 6, 9]], np.int32)
    lengths = np.array([15, 14, 14, 47], np.int32)
    cache = KVCache(normal(0, 10, 16, 2, 8), normal(1, 10, 16, 2, 8), lengths)
    k, v = normal(2, 4, 3, 2, 8), normal(3, 4, 3, 2, 8)
    found = jax.jit(fp.append_kv)(cache, k, v, page_table=table)
    assert_same(found, appended(cache, k, v, [3] * 4, table))


def test_lengths_out_of_range_never_wrap():
    cache = (jnp.zeros((2, 4, 1, 2)), jnp.zeros((2, 4, 1, 2)), jnp.array([-1, 2**31 - 1]))
    x = jnp.ones((2, 1, 1, 2))
    found = jax.jit(fp.append_kv)(cache, x, x)
    assert found.lengths.tolist() == [1, 2**30]
    assert found.k[:, :, 0, 0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("paged", [False, True])
def test_donated_caches_are_updated_in_place(paged):
    cache = KVCache(*jnp.zeros((2, 2, 4096, 2, 8)), lengths=jnp.zeros(2, jnp.int32))
    table = jnp.array([[1], [0]], jnp.int32) if paged else None
    x = jnp.ones((2, 1, 2, 8))
    step = jax.jit(lambda cache, x: fp.append_kv(cache, x, x, page_table=table), donate_argnums=0)
    compiled = step.lower(cache, x).compile()
    header = compiled.as_text().splitlines()[0]
    for index in range(3):
        assert f"{{{index}}}: ({index}, {{}}" in header
    assert compiled.memory_analysis().temp_size_in_bytes < cache.k.nbytes / 4
    step(cache, x)
    assert cache.k.is_deleted() and cache.v.is_deleted()


@pytest.mark.thorough(always=["True"])
@pytest.mark.parametrize("paged", [False, True])
def test_token_by_token_is_attention_to_the_whole(paged):
    B, T, prompt = 2, 20, 11
    q, k, v = normal(0, B, T, 4, 8), normal(1, B, T, 2, 8), normal(2, B, T, 2, 8)
    right = jax.jit(partial(reference.attention, causal=True))(q, k, v)[0]
    shape, table = ((B, 32, 2, 8), None)
    if paged:
        shape, table = (5, 16, 2, 8), jnp.array([[4, 1], [0, 3]], jnp.int32)
    lengths = jnp.zeros(B, jnp.int32)
    cache = KVCache(jnp.full(shape, jnp.nan), jnp.full(shape, jnp.nan), lengths)
    cache = fp.append_kv(cache, k[:, :prompt], v[:, :prompt], page_table=table)

    @jax.jit
    def step(cache, q, k, v):
        cache = fp.append_kv(cache, k, v, page_table=table)
        options = {"kv_lengths": cache.lengths, "page_table": table}
        return cache, fp.flash_decode(q, cache.k, cache.v, **options)

    for start in range(prompt, T, 3):  # three tokens at a time
        cut = slice(start, start + 3)
        cache, o = step(cache, q[:, cut], k[:, cut], v[:, cut])
        np.testing.assert_allclose(o, right[:, cut], rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [T, T]


X = jnp.ones((2, 3, 2, 8))
CACHE = KVCache(jnp.ones((2, 16, 2, 8)), jnp.ones((2, 16, 2, 8)), jnp.zeros(2, jnp.int32))
BAD = {
    "no tuple": ([X, X, 0], X, {}, TypeError, "cache must be a KVCache or a tuple.*got list"),
    "no array": (CACHE._replace(v=1.0), X, {}, TypeError, "cache.v must be an array, got float"),
    "rank": (CACHE._replace(k=X[0]), X, {}, ValueError, r"cache.k has shape \(3, 2, 8\)"),
    "k and v": (CACHE._replace(k=X), X, {}, ValueError, r"\(2, 3, 2, 8\) and cache.v \(2, 16"),
    "lengths": (CACHE._replace(lengths=X[0, 0, 0]), X, {}, TypeError, "lengths has dtype float32"),
    "batch": (CACHE._replace(lengths=jnp.ones(1, int)), X[:1], {}, ValueError, "1 sequences: pass"),
    "ring": (RingCache.empty(2, 16, 2, 8, X.dtype), X, {}, TypeError, "got RingCache; layers take"),
    "dtype": (CACHE, X.astype("bfloat16"), {}, TypeError, r"bfloat16.*k.astype\(cache.k.dtype\)"),
    "heads": (CACHE, X[:, :, :1], {}, ValueError, r"k has shape \(2, 3, 1, 8\).*\(2, 8\) of the"),
    "new": (CACHE, X, {"new_lengths": jnp.ones(2)}, TypeError, "new_lengths has dtype float32"),
    "table": (
        CACHE,
        X,
        {"page_table": jnp.zeros((3, 1), jnp.int32)},
        ValueError,
        r"page_table has shape \(3, 1\): it must be \[batch, max_pages\] for 2 sequences",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    cache, x, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        fp.append_kv(cache, x, x, **options)


def test_each_key_needs_its_value():
    with pytest.raises(ValueError, match=r"k has shape .* and v .*each key needs its value"):
        fp.append_kv(CACHE, X, X[:, :2])


def test_check_pages():
    table, lengths = jnp.array([[3, 0], [1, -1]]), jnp.array([128, 64])
    fp.check_pages(table, lengths, num_pages=4, page_size=64)
    with pytest.raises(ValueError, match=r"page_table\[1, 1\] is -1: .*\[0, 4\).* is 65 \(2 pages"):
        fp.check_pages(table, lengths.at[1].set(65), num_pages=4, page_size=64)
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is 3: it must be in \[0, 3\)"):
        fp.check_pages(table, lengths, num_pages=3, page_size=64)
    with pytest.raises(ValueError, match=r"kv_lengths\[0\] is 128: it must be in \[0, 96\]"):
        fp.check_pages(table, lengths, num_pages=4, page_size=48)
    with pytest.raises(ValueError, match=r"kv_lengths\[1\] is -1: it must be in"):
        fp.check_pages(table, lengths.at[1].set(-1), num_pages=4, page_size=64)
    with pytest.raises(TypeError, match="kv_lengths is traced: check_pages needs values"):
        jax.jit(lambda n: fp.check_pages(table, n, num_pages=4, page_size=64))(lengths)
    with pytest.raises(TypeError, match="page_table has dtype float32: it must be int32"):
        fp.check_pages(jnp.ones((2, 2)), lengths, num_pages=4, page_size=64)


@pytest.mark.thorough
@pytest.mark.parametrize("paged", [False, True])
def test_keys_are_rotated_by_their_positions(paged):
    B, T = 2, 9
    q, k, v = normal(0, B, T, 4, 8), normal(1, B, T, 2, 8), normal(2, B, T, 2, 8)
    shape, table = ((B, 16, 2, 8), None) if not paged else ((3, 16, 2, 8), jnp.array([[2], [0]]))
    cache = KVCache(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(B, jnp.int32))
    append = partial(fp.append_kv, page_table=table, rope_theta=100.0)
    starts = np.array([5, 3])
    cache = append(cache, k[:, :5], v[:, :5], new_lengths=starts)
    new = [np.stack([x[b, n : n + 4] for b, n in enumerate(starts)]) for x in (q, k, v)]
    cache = append(cache, *new[1:])
    places = starts[:, None] + np.arange(4)
    rotated = fp.apply_rope(new[0], places, 100.0)
    o = fp.flash_decode(rotated, *cache[:2], kv_lengths=cache.lengths, page_table=table)
    turned = [fp.apply_rope(x, jnp.arange(T), 100.0) for x in (q, k)]
    right = reference.attention(*turned, v, causal=True)[0]
    for b, n in enumerate(starts):
        np.testing.assert_allclose(o[b], right[b, n : n + 4], rtol=1e-5, atol=1e-5)


def test_a_rotation_that_cannot_be():
    with pytest.raises(ValueError, match="rope_theta is 0: it must be None or a positive number"):
        fp.append_kv(CACHE, X, X, rope_theta=0)
    small = KVCache(*(x.astype(jnp.int8) for x in CACHE[:2]), CACHE.lengths)
    with pytest.raises(TypeError, match="k has dtype int8: to be rotated"):
        fp.append_kv(small, X.astype(jnp.int8), X.astype(jnp.int8), rope_theta=10.0)
    with pytest.raises(ValueError, match="rope_theta is inf"):
        fp.append_kv(CACHE, X, X, rope_theta=float("inf"))


HEADS, PLACES = jnp.ones((1, 2, 3, 8)), jnp.arange(2)
BAD_ROTATIONS = {
    "odd": ((HEADS[..., :7], PLACES, 10.0), ValueError, "x has head_dim 7: a rotation needs pairs"),
    "places": ((HEADS, [0, 1], 10.0), TypeError, "positions must be an array, got list: convert"),
    "list": (([1.0], PLACES, 10.0), TypeError, "x must be an array, got list"),
    "ints": ((HEADS.astype(int), PLACES, 10.0), TypeError, "x has dtype int32: it must be a float"),
    "rank": ((HEADS[0, 0], PLACES, 10.0), ValueError, r"x has shape \(3, 8\).*x\[:, None, :\]"),
    "zero": ((HEADS, PLACES, 0.0), ValueError, r"theta is 0\.0: it must be a positive number"),
    "inf": ((HEADS, PLACES, np.inf), ValueError, "theta is inf: it must be a positive number"),
    "None": ((HEADS, PLACES, None), ValueError, "theta is None"),
}


@pytest.mark.parametrize("name", BAD_ROTATIONS)
def test_bad_arguments_of_a_rotation(name):
    arguments, error, message = BAD_ROTATIONS[name]
    with pytest.raises(error, match=message):
        fp.apply_rope(*arguments)


def test_a_traced_base_of_a_rotation():
    with pytest.raises(TypeError, match="theta is traced, but it must be static"):
        jax.jit(fp.apply_rope)(HEADS, PLACES, 10.0)


@pytest.mark.parametrize(
    ("name", "value"), [("page_size", 0), ("num_pages", -1), ("page_size", 2.0)]
)
def test_sizes_of_pages_that_cannot_be(name, value):
    sizes = {"num_pages": 4, "page_size": 16} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}: it must be a positive int"):
        fp.check_pages([[3, 0]], [20], **sizes)


def test_a_prompt_that_continues_pages():
    B, T, before = 2, 40, 13
    q, k, v = normal(0, B, T, 4, 8), normal(1, B, T, 2, 8), normal(2, B, T, 2, 8)
    table = jnp.array([[4, 1, 7], [0, 3, 5]], jnp.int32)
    cache = KVCache.empty(8, 16, 2, 8, jnp.float32)._replace(lengths=jnp.zeros(B, jnp.int32))
    cache = fp.append_kv(cache, k[:, :before], v[:, :before], page_table=table)
    cache = fp.append_kv(cache, k[:, before:], v[:, before:], page_table=table)
    whole = (fp.gather_pages(x, table) for x in cache[:2])
    options = {"q_offset": before, "kv_lengths": cache.lengths}
    found = fp.flash_attention(q[:, before:], *whole, causal=True, **options)
    right = reference.attention(q, k, v, causal=True)[0]
    np.testing.assert_allclose(found, right[:, before:], rtol=1e-5, atol=1e-5)


def test_pages_that_cannot_be_gathered():
    with pytest.raises(ValueError, match=r"pages has shape \(4, 16, 2\): it must be \[num_pages"):
        fp.gather_pages(jnp.ones((4, 16, 2)), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(TypeError, match="page_table has dtype float32"):
        fp.gather_pages(jnp.ones((4, 16, 2, 8)), jnp.zeros((1, 1)))
    # Out of range, which would be another page or none, is clipped.
    found = fp.gather_pages(jnp.arange(4.0).reshape(4, 1, 1, 1), jnp.array([[-1, 9]]))
    assert found.ravel().tolist() == [0.0, 3.0]


def test_the_text_of_a_cache():
    cache = fp.KVCache.empty(2, 64, 4, 32, jnp.bfloat16)._replace(lengths=jnp.array([3, 5]))
    arrays = "k=bfloat16[2, 64, 4, 32], v=bfloat16[2, 64, 4, 32]"
    assert repr(cache) == f"KVCache({arrays}, lengths=[3, 5], starts=None)"
    shapes = jax.eval_shape(lambda: cache)
    assert str([shapes]) == f"[KVCache({arrays}, lengths=int32[2], starts=None)]"
    ring = fp.nn.RingCache.empty(32, 64, 4, 32, jnp.bfloat16)
    assert repr(ring).endswith("lengths=int32[32], written=int32[32])")
