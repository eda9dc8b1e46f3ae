"""compat.flash_attn against the formulas that flash-attn's docstrings give, on random calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.compat import flash_attn as compat
from flash_pallas.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache

from . import formulas
from .formulas import assert_as_good, assert_close

CALLS = range(3)


def random_call(seed):
    """Draws (arrays, options): lengths, heads and masks as a caller might have them."""
    rng = np.random.default_rng(seed)
    kv_heads, group = rng.integers(1, 4), rng.integers(1, 4)
    batch, q_len, kv_len = rng.integers(1, 3), rng.integers(1, 40), rng.integers(1, 60)
    q = rng.normal(size=(batch, q_len, kv_heads * group, 16))
    k, v = rng.normal(size=(2, batch, kv_len, kv_heads, 16))
    options = {"causal": bool(rng.integers(2))}
    if rng.integers(2):
        options["window_size"] = tuple(int(rng.choice([-1, 0, 3, 17])) for _ in range(2))
    if rng.integers(2):
        options["softcap"] = float(rng.choice([0.5, 3.0]))
    if rng.integers(2):
        shape = (batch, kv_heads * group) if rng.integers(2) else (kv_heads * group,)
        options["alibi_slopes"] = rng.uniform(0.01, 1.0, shape)
    if rng.integers(2):
        options["softmax_scale"] = 0.3
    return (q, k, v), options


NAMES = {"window_size": "window", "alibi_slopes": "slopes", "softmax_scale": "scale"}


def wanted(options):
    """Returns the options by the names that the formula has for them."""
    return {NAMES.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("call", CALLS)
def test_random_calls(call, seed_of_sources):
    arrays, options = random_call([seed_of_sources, call])
    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, arrays))
        named = {n: jnp.asarray(x) if n == "alibi_slopes" else x for n, x in options.items()}
        o, got = formulas.gradients(lambda *x: flash_attn_func(*x, **named), arrays)
        want = lambda *x: formulas.flash_attn(*x, **wanted(options))[0]
        o_want, pulled = formulas.gradients(want, arrays)
    assert_close(o, o_want)
    for one, other in zip(got, pulled, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype):
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 33, n, 16)), dtype) for n in (4, 2, 2))
    options = {"causal": True, "softcap": 2.0, "window_size": (9, -1)}
    o = flash_attn_func(q, k, v, **options)
    assert o.dtype == dtype
    plain = formulas.flash_attn(q, k, v, **wanted(options))[0].astype(dtype)
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x).astype(np.float64)) for x in (q, k, v))
        exact = formulas.flash_attn(*wide, **wanted(options))[0]
    assert_as_good(o, exact, plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_dtypes(dtype):
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 33, n, 16)), dtype) for n in (4, 2, 2))
    options = {"causal": True, "softcap": 2.0, "window_size": (9, -1)}
    o = flash_attn_func(q, k, v, **options)
    assert o.dtype == dtype
    with jax.enable_x64(True):
        wide = (jnp.asarray(x, jnp.float64) for x in (q, k, v))
        exact = np.asarray(formulas.flash_attn(*wide, **wanted(options))[0])
    plain = formulas.flash_attn(q, k, v, **wanted(options))[0].astype(dtype)
    error = lambda x: np.abs(np.asarray(x, np.float64) - exact).max()
    assert error(o) <= 2 * error(plain)


def test_rows_without_keys_are_zero_as_the_docstring_says():
    q, k = jnp.ones((1, 5, 1, 8)), jnp.ones((1, 2, 1, 8))
    o = np.asarray(flash_attn_func(q, k, k, causal=True))
    assert (o[0, :3] == 0).all() and (o[0, 3:] == 1).all()


def test_packed_arrays():
    qkv = jax.random.normal(jax.random.key(0), (2, 9, 3, 4, 8))
    q, k, v = (qkv[:, :, i] for i in range(3))
    alone = flash_attn_func(q, k, v, 0.0, None, True)
    np.testing.assert_array_equal(compat.flash_attn_qkvpacked_func(qkv, 0.0, None, True), alone)
    packed = compat.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True)
    np.testing.assert_array_equal(packed, alone)
    with pytest.raises(ValueError, match=r"kv has shape .* must be \[batch, length, 2, heads"):
        compat.flash_attn_kvpacked_func(q, qkv)


def test_dropout_needs_a_seed_and_uses_it():
    q = jax.random.normal(jax.random.key(0), (1, 32, 2, 8))
    drop = lambda seed: flash_attn_func(q, q, q, 0.5, dropout_seed=seed)
    np.testing.assert_array_equal(drop(1), drop(1))
    assert not np.array_equal(drop(1), drop(2))
    with pytest.raises(ValueError, match="dropout_seed is None"):
        flash_attn_func(q, q, q, 0.5)


REFUSED = [
    ({"return_attn_probs": True}, "return_attn_probs is True.*flash_attention_with_lse"),
    ({"window_size": 3}, r"window_size is 3: it must be \(left, right\)"),
    ({"softcap": -1.0}, "softcap must be finite and positive, got -1.0"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=[next(iter(x)) for x, _ in REFUSED])
def test_what_is_refused(options, told):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=told):
        flash_attn_func(x, x, x, **options)


# --- flash_attn_varlen_func ----------------------------------------------------------------------

DOCUMENTS = {
    "causal": {"causal": True},
    "window and GQA": {"window_size": (4, 2)},
    "softcap and alibi": {"causal": True, "softcap": 1.5, "alibi_slopes": np.array([0.5, 0.1])},
}


@pytest.mark.thorough(always=["softcap and alibi"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_packed_sequences(name, seed_of_sources):
    rng, options = np.random.default_rng([seed_of_sources, 8]), DOCUMENTS[name]
    # Longer and shorter than their keys; without queries, without keys; padding after the last.
    cu_q = np.cumsum([0, 3, 0, 9, 4, rng.integers(1, 20)])
    cu_k = np.cumsum([0, 10, 5, 4, 0, rng.integers(1, 30)])
    q = rng.normal(size=(cu_q[-1] + 3, 2, 8))
    k, v = rng.normal(size=(2, cu_k[-1] + 2, 1 if "GQA" in name else 2, 8))
    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, (q, k, v)))
        named = {n: jnp.asarray(x) if n == "alibi_slopes" else x for n, x in options.items()}
        places = (jnp.asarray(cu_q), jnp.asarray(cu_k), 20, 30)
        call = lambda *x: compat.flash_attn_varlen_func(*x, *places, **named)
        o, got = formulas.gradients(call, arrays)
        want = lambda *x: formulas.flash_attn_varlen(*x, cu_q, cu_k, **wanted(named))
        o_want, pulled = formulas.gradients(want, arrays)
    assert_close(o, o_want)
    for one, other in zip(got, pulled, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("known", [True, False], ids=["known", "traced"])
def test_packed_sequences_of_pages(known):
    rng = np.random.default_rng(3)
    table, cu_k = np.array([[4, 1], [2, 0], [3, 3]]), np.array([0, 7, 12, 12])
    pages = [jnp.asarray(rng.normal(size=(5, 4, 1, 8)), jnp.float32) for _ in range(2)]
    q, cu_q = jnp.asarray(rng.normal(size=(9, 2, 8)), jnp.float32), jnp.array([0, 3, 8, 9])
    place = np.concatenate([np.arange(7), np.arange(5)])
    page = table[np.repeat([0, 1], [7, 5]), place // 4]
    call = lambda k, v, cu_k, **options: compat.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 7, causal=True, **options
    )
    wanted = call(*(x[page, place % 4] for x in pages), jnp.asarray(cu_k))
    paged = lambda k, v, cu_k: call(k, v, cu_k, block_table=jnp.asarray(table))
    found = (paged if known else jax.jit(paged))(*pages, jnp.asarray(cu_k))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="cu_seqlens_k has a sequence of 9 keys: block_table"):
        paged(*pages, jnp.array([0, 9, 12, 12]))


PACKED_REFUSED = [
    ({"block_table": jnp.ones((1, 2), int)}, "k has shape .*with block_table .*page_size"),
    ({"alibi_slopes": jnp.ones((2, 2))}, r"alibi_slopes has shape \(2, 2\)"),
    ({"return_attn_probs": True}, "return_attn_probs is True"),
]


@pytest.mark.parametrize(("options", "told"), PACKED_REFUSED)
def test_what_packed_sequences_refuse(options, told):
    x, places = jnp.ones((6, 2, 8)), jnp.array([0, 6])
    with pytest.raises(ValueError, match=told):
        compat.flash_attn_varlen_func(x, x, x, places, places, 6, 6, **options)


# --- flash_attn_with_kvcache ---------------------------------------------------------------------

PAGE = 16


def random_cache(seed, paged: bool, q_len: int):
    """Draws (q, caches, new k and v, lengths, table, dense caches of one row per sequence)."""
    rng = np.random.default_rng(seed)
    batch, heads, pages = 2, 2, 4
    dense = rng.normal(size=(2, batch, pages * PAGE, heads, 16))
    lengths = rng.integers(0, pages * PAGE - q_len, batch)
    q = rng.normal(size=(batch, q_len, 2 * heads, 16))
    new = rng.normal(size=(2, batch, q_len, heads, 16))
    if not paged:
        return q, dense, new, lengths, None, dense
    table = rng.permutation(batch * pages).reshape(batch, pages)
    caches = np.zeros((2, batch * pages, PAGE, heads, 16))
    caches[:, table] = dense.reshape(2, batch, pages, PAGE, heads, 16)
    return q, caches, new, lengths, table, dense


def rotated(x, positions, tables, interleaved):
    """Rotates as flash-attn's `apply_rotary_emb` documents: x [T, heads, H] by rows of tables."""
    half = tables[0].shape[1]
    cos, sin = (table[positions][:, None] for table in tables)
    one = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    two = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    found = x.copy()
    found[..., one] = x[..., one] * cos - x[..., two] * sin
    found[..., two] = x[..., two] * cos + x[..., one] * sin
    return found


ROTARY_POSITIONS = 100
TABLES = tuple(
    np.stack([f(np.arange(ROTARY_POSITIONS) * 0.7**i) for i in range(4)], axis=1)
    for f in (np.cos, np.sin)
)
CACHES = {
    "causal": ({"causal": True}, 1),
    "paged": ({"causal": True, "block_table": True}, 2),
    "window": ({"causal": True, "window_size": (5, -1), "softcap": 2.0}, 3),
    "not causal": ({"block_table": True}, 3),
    "two-sided window": ({"window_size": (20, 1), "block_table": True}, 4),
    "twenty queries": ({"causal": True, "block_table": True}, 20),
    "alibi": ({"causal": True, "alibi_slopes": np.array([1.0, 0.5, 0.25, 0.1])}, 2),
    "softcap and alibi": ({"softcap": 1.0, "alibi_slopes": np.array([1.0, 0.5, 0.2, 0.1])}, 1),
    "rotary": ({"causal": True, "rotary": True}, 2),
    "rotary halves": ({"causal": True, "rotary": True, "rotary_interleaved": False}, 2),
    "rotary, one position": ({"rotary": True}, 2),
}


@pytest.mark.thorough(always=["causal", "rotary", "rotary, one position"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache(name, seed_of_sources):
    options, q_len = dict(CACHES[name][0]), CACHES[name][1]
    paged = bool(options.pop("block_table", False))
    q, caches, new, lengths, table, dense = random_cache([seed_of_sources, q_len], paged, q_len)
    turned, keys = q.copy(), new[0].copy()
    formula_options = {k: x for k, x in options.items() if "rotary" not in k}
    given = dict(options)
    if given.pop("rotary", False):
        given |= {"rotary_cos": TABLES[0], "rotary_sin": TABLES[1]}
        inter = options.get("rotary_interleaved", True)
        for b, start in enumerate(lengths):
            at = start + np.arange(q_len)
            keys[b] = rotated(keys[b], at, TABLES, inter)
            at = at if options.get("causal") else np.full(q_len, start)
            turned[b] = rotated(turned[b], at, TABLES, inter)
    with jax.enable_x64(True):
        given = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}
        o, lse, *found = flash_attn_with_kvcache(
            *map(jnp.asarray, (q, *caches, *new)),
            cache_seqlens=jnp.asarray(lengths),
            block_table=None if table is None else jnp.asarray(table),
            return_softmax_lse=True,
            **given,
        )
        for b, start in enumerate(lengths):
            whole = [
                np.concatenate([cache[b, :start], x[b]])[None]
                for cache, x in zip(dense, (keys, new[1]), strict=True)
            ]
            want = formulas.flash_attn(turned[b][None], *whole, **wanted(formula_options))
            assert_close(o[b], want[0][0])
            assert_close(lse[b], want[1][0])
            for cache, x in zip(found, whole, strict=True):
                row = cache[b] if table is None else cache[table[b]].reshape(dense[0, b].shape)
                assert_close(row[: start + q_len], x[0])


def test_a_cache_that_has_the_keys_already():
    q, cache = jnp.ones((2, 1, 2, 8)), jax.random.normal(jax.random.key(0), (2, 24, 1, 8))
    o = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7, num_splits=2)
    want = flash_attn_func(q, cache[:, :7], cache[:, :7])
    np.testing.assert_allclose(o, want, rtol=0, atol=4 * np.finfo(np.float32).eps)
    whole = flash_attn_with_kvcache(q, cache, cache)
    want = flash_attn_func(q, cache, cache)
    np.testing.assert_allclose(whole, want, rtol=0, atol=4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("tokens", [2, 18])  # the latter are no step
def test_rows_of_a_cache_and_left_padding(tokens):
    rng = np.random.default_rng(5)
    q, new = rng.normal(size=(2, tokens, 4, 8)), rng.normal(size=(2, 2, tokens, 2, 8))
    caches, rows = rng.normal(size=(2, 5, 10 + tokens, 2, 8)), np.array([4, 1])
    starts, lengths = np.array([3, 0]), np.array([7, 10])
    with jax.enable_x64(True):
        o, *found = flash_attn_with_kvcache(
            *map(jnp.asarray, (q, *caches, *new)),
            cache_seqlens=jnp.asarray(lengths),
            cache_batch_idx=jnp.asarray(rows),
            cache_leftpad=jnp.asarray(starts),
            causal=True,
        )
        for b, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            caches[:, row, length : length + tokens] = new[:, b]
            seen = caches[:, row, None, start : length + tokens]
            assert_close(o[b], formulas.flash_attn(q[None, b], *seen, causal=True)[0][0])
    np.testing.assert_array_equal(np.stack(found), caches)


CACHE_REFUSED = [
    ({"cache_batch_idx": jnp.arange(2), "block_table": jnp.ones((2, 1), int)}, "both given"),
    ({"rotary_cos": jnp.ones((9, 2))}, "need the new k and v"),
    ({"k": jnp.ones((2, 1, 1, 8))}, "v is None and the other is not"),
    ({"cache_seqlens": jnp.ones((2, 1), int)}, r"cache_seqlens has shape \(2, 1\)"),
    ({"k": jnp.ones((2, 1, 1, 8)), "v": jnp.ones((2, 1, 1, 8))}, "cache_seqlens is None"),
    ({"window_size": (2, 2), "num_splits": 2}, "num_splits is 2.*up to 16 causal queries"),
]


@pytest.mark.parametrize(("options", "told"), CACHE_REFUSED)
def test_what_a_cache_refuses(options, told):
    q, cache = jnp.ones((2, 2, 2, 8)), jnp.ones((2, 24, 1, 8))
    with pytest.raises(ValueError, match=told):
        flash_attn_with_kvcache(q, cache, cache, **options)
