"""Caches without room for all new tokens: what fits is right, known numbers are errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas import KVCache
from flash_pallas.compat.flash_attn import flash_attn_with_kvcache
from flash_pallas.frontend import arguments

ROOM, PAGE, B, N, K, H = 32, 16, 3, 4, 2, 8
BEFORE = np.array([30, 32, 5], np.int32)  # of the new tokens 2, none and all have room
TABLE = jnp.array([[4, 1], [0, 3], [5, 2]], jnp.int32)
SLOPES = np.array([0.1, 0.2, 0.3, 0.05], np.float32)


def drawn(count: int):
    """Draws (q, k, v) of the new tokens and (k, v) of the cache, contiguous."""
    rng = np.random.default_rng(count)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    new = normal(B, count, N, H), normal(B, count, K, H), normal(B, count, K, H)
    return new, (normal(B, ROOM, K, H), normal(B, ROOM, K, H))


def paged(x):
    """Returns the same keys in the pages of TABLE."""
    return jnp.zeros((6, PAGE, K, H), x.dtype).at[TABLE].set(x.reshape(B, 2, PAGE, K, H))


def right(new, cache, count: int, window: int | None):
    """Computes o in float64, each query where it would be in a longer cache; ALiBi with SLOPES."""
    q, k, v = (np.asarray(x, np.float64) for x in new)
    o = np.zeros((B, count, N, H))
    for b, before in enumerate(BEFORE):
        keys, values = (
            np.concatenate([np.asarray(old[b, :before], np.float64), x[b]])[:ROOM]
            for old, x in zip(cache, (k, v), strict=True)
        )
        for t in range(count):
            distance = before + t - np.arange(len(keys))
            seen = (distance >= 0) & (distance <= (ROOM * 9 if window is None else window))
            for n in range(N):
                score = keys[:, n // 2] @ q[b, t, n] / np.sqrt(H) - SLOPES[n] * np.abs(distance)
                p = np.exp(np.where(seen, score, -np.inf) - score[seen].max(initial=0.0))
                o[b, t, n] = p @ values[:, n // 2] / max(p.sum(), 1e-300)
    return o


def appended_and_decoded(new, cache, lengths, window, table=None):
    q, k, v = new
    cache = fp.append_kv(KVCache(*cache, lengths), k, v, page_table=table)
    options = {"alibi_slopes": SLOPES, "window": window, "kv_lengths": cache.lengths}
    return fp.flash_decode(q, cache.k, cache.v, page_table=table, **options)


def in_pages(new, cache, lengths, window):
    return appended_and_decoded(new, tuple(map(paged, cache)), lengths, window, TABLE)


def by_flash_attn(new, cache, lengths, window):
    window = (-1, -1) if window is None else (window, 0)
    options = {"causal": True, "window_size": window, "alibi_slopes": SLOPES}
    return flash_attn_with_kvcache(new[0], *cache, *new[1:], cache_seqlens=lengths, **options)[0]


def ragged(step_tokens: int):
    def call(new, cache, lengths, window):
        count = new[0].shape[1]
        q, k, v = (x.reshape(B * count, *x.shape[2:]) for x in new)
        ends = jnp.arange(B + 1, dtype=jnp.int32) * count
        o, _ = fp.ragged_paged_attention(
            *(q, *map(paged, cache)),
            **{"kv_lengths": lengths + count, "page_table": TABLE, "cu_q_lens": ends},
            **{"new_k": k, "new_v": v, "window": window, "alibi_slopes": SLOPES},
            step_tokens=step_tokens,
        )
        return o.reshape(B, count, N, H)

    return call


CALLS = {
    "append_kv": appended_and_decoded,
    "pages": in_pages,
    "flash_attn": by_flash_attn,
    "ragged steps": ragged(20),
    "ragged chunks": ragged(1),
}


@pytest.mark.thorough(always=["append_kv-None-", "pages-6-x64", "ragged chunks-None-"])
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("call", CALLS)
def test_tokens_that_fit_are_right(call, window, x64):
    # 20 new tokens are more than flash_attn_with_kvcache gives to flash_decode.
    for count in (1, 4, 20):
        new, cache = drawn(count)
        with jax.enable_x64(x64):
            run = jax.jit(lambda *x: CALLS[call](*x, window))
            found = run(new, cache, jnp.asarray(BEFORE))
        wanted = right(new, cache, count, window)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=str(count))


def test_lengths_count_tokens_without_room_and_these_change_nothing_later():
    (_, k, v), cache = drawn(4)
    step = jax.jit(lambda cache, k, v: fp.append_kv(cache, k, v))
    once = step(KVCache(*cache, jnp.asarray(BEFORE)), k, v)
    assert once.lengths.tolist() == [34, 36, 9]
    twice = step(once, k + 1, v + 1)
    assert twice.lengths.tolist() == [38, 40, 13]
    np.testing.assert_array_equal(twice.k[:2], once.k[:2])
    back = step(once._replace(lengths=jnp.asarray(BEFORE)), k + 1, v + 1)  # drafts rejected
    np.testing.assert_array_equal(back.k[0, 30:], k[0, :2] + 1)


X = jnp.ones((2, 3, 2, 8))
CACHE = jnp.ones((2, 8, 2, 8))
PAGES = jnp.ones((4, 16, 2, 8))
PLACES = {"page_table": jnp.array([[0], [1]]), "cu_q_lens": jnp.array([0, 3, 6])}


def numbers(*given):
    return jax.block_until_ready(jnp.array(given))


def kv_cache(lengths=(0, 0), starts=None):
    starts = None if starts is None else numbers(*starts)
    return KVCache(CACHE, CACHE, numbers(*lengths), starts)


def of_pages(**given):
    rows = X.reshape(6, 2, 8)
    return fp.ragged_paged_attention(rows, PAGES, PAGES, **PLACES, **given)


KNOWN: dict[str, tuple[Any, str]] = {
    "kv_lengths": (
        lambda: fp.flash_attention(X, X, X, kv_lengths=numbers(3, 400)),
        r"kv_lengths\[1\] is 400: it must be 0 to 3, .*jnp.clip\(kv_lengths, 0, 3\)",
    ),
    "q_lengths": (lambda: fp.flash_attention(X, X, X, q_lengths=-1), "q_lengths is -1: it must"),
    "decode": (
        lambda: fp.flash_decode(X, CACHE, CACHE, kv_lengths=np.array([9, 3])),
        r"kv_lengths\[0\] is 9: it must be 0 to 8",
    ),
    "starts": (
        lambda: fp.flash_decode(X, CACHE, CACHE, kv_starts=numbers(0, -1)),
        r"kv_starts\[1\] is -1: it must be 0 to 8",
    ),
    "prefix": (
        lambda: fp.flash_decode(
            X, PAGES, PAGES, kv_lengths=9, page_table=PLACES["page_table"], shared_prefix=17
        ),
        "shared_prefix is 17: it must be 0 to 16",
    ),
    "pages": (lambda: of_pages(kv_lengths=numbers(3, 17)), r"kv_lengths\[1\] is 17: .* 0 to 16"),
    "starts of pages": (
        lambda: of_pages(kv_lengths=numbers(3, 16), kv_starts=-2),
        "kv_starts is -2: it must be 0 to 16",
    ),
    "ragged append": (
        lambda: fp.append_ragged_kv(
            (PAGES, PAGES), *[X.reshape(6, 2, 8)] * 2, **PLACES, kv_lengths=numbers(-3, 3)
        ),
        r"kv_lengths\[0\] is -3: it must be 0 to 16",
    ),
    "new_lengths": (
        lambda: fp.append_kv(kv_cache(), X, X, new_lengths=numbers(4, 0)),
        r"new_lengths\[0\] is 4: it must be 0 to 3, the number of new tokens",
    ),
    "cache": (
        lambda: fp.append_kv(kv_cache((9, 0)), X, X, new_lengths=numbers(0, 0)),
        r"cache.lengths\[0\] is 9: it must be 0 to 8",
    ),
    "starts of a cache": (
        lambda: fp.append_kv(kv_cache(starts=(0, 9)), X, X),
        r"cache.starts\[1\] is 9: it must be 0 to 8",
    ),
    "too many": (lambda: fp.append_kv(kv_cache((6, 0)), X, X), "room for 8 .* would have 9: make"),
    "cache_seqlens": (
        lambda: flash_attn_with_kvcache(X, CACHE, CACHE, cache_seqlens=9),
        "cache_seqlens is 9: it must be 0 to 8",
    ),
    "cache_seqlens and k": (
        lambda: flash_attn_with_kvcache(X, CACHE, CACHE, X, X, cache_seqlens=6),
        "cache_seqlens and the new ones together, would have 9: give k_cache and v_cache more",
    ),
    "cache_leftpad": (
        lambda: flash_attn_with_kvcache(X, CACHE, CACHE, cache_leftpad=numbers(-1, 0)),
        r"cache_leftpad\[0\] is -1",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_numbers_beyond_the_room_are_errors(name):
    call, message = KNOWN[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_not_computed_yet_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(arguments, "known", None)
    ready = type(jnp.array(0)).is_ready
    monkeypatch.setattr(type(jnp.array(0)), "is_ready", lambda _: False)
    fp.append_kv(kv_cache((9, 0)), X, X, new_lengths=numbers(4, 0))
    fp.flash_decode(X, CACHE, CACHE, kv_lengths=numbers(9, -1), kv_starts=numbers(-1, 9))
    monkeypatch.setattr(type(jnp.array(0)), "is_ready", ready)


def test_offsets_are_free_and_so_are_sequences_that_are_not_there():
    o = fp.flash_decode(X, CACHE, CACHE, q_offset=numbers(-2, 100))
    assert jnp.isfinite(o).all()
    fp.flash_attention(X, X, X, causal=True, q_offset=-2)
    places = {"page_table": jnp.zeros((3, 1), int), "cu_q_lens": jnp.array([0, 3, 6, -1])}
    rows = X.reshape(6, 2, 8)
    given = {"kv_lengths": numbers(3, 16, 99), "kv_starts": numbers(0, 3, -5)}
    o = fp.ragged_paged_attention(rows, PAGES, PAGES, num_seqs=2, **places, **given)
    assert jnp.isfinite(o).all()
