"""vmap of flash_decode: the axis becomes part of the batch, for every kind of cache."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.frontend import dispatch

from .interpreter import race_checked

V, B, T, N, K, H, S, PAGE = 3, 2, 2, 4, 2, 16, 64, 16


def test_no_members():
    q, k = jnp.zeros((0, B, T, N, H)), jnp.zeros((B, S, K, H))
    o, lse = jax.vmap(lambda q: fp.flash_decode(q, k, k, return_lse=True))(q)
    assert o.shape == q.shape and lse.shape == (0, B, N, T)


def drawn(paged: bool, quantised: bool) -> dict[str, Any]:
    """Draws every array with a leading axis of V members."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    rows, length = (5, PAGE) if paged else (B, S)
    found: dict[str, Any] = {
        "q": normal(V, B, T, N, H),
        "k": normal(V, rows, length, K, H),
        "v": normal(V, rows, length, K, H),
        "kv_lengths": rng.integers(T, S, (V, B)).astype(np.int32),
        "sinks": normal(V, B, N),
        "alibi_slopes": rng.uniform(0, 0.1, (V, N)).astype(np.float32),
    }
    if paged:
        found["page_table"] = rng.integers(0, rows, (V, B, S // PAGE)).astype(np.int32)
    if quantised:
        found |= {name: (found[name] * 40).astype(np.int8) for name in ("k", "v")}
        found["k_scale"] = rng.uniform(0.01, 0.03, (V, rows, K)).astype(np.float32)
        found["v_scale"] = rng.uniform(0.01, 0.03, (V, K)).astype(np.float32)
    found["kv_starts"] = rng.integers(0, S // 2, (V, B)).astype(np.int32)
    found["window"] = rng.integers(1, S, (V, B)).astype(np.int32)
    return jax.tree.map(jnp.asarray, found)


def decode(arrays, **options):
    rest = {name: x for name, x in arrays.items() if name not in ("q", "k", "v")}
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    return fp.flash_decode(q, k, v, return_lse=True, **options, **rest)


def one_by_one(arrays, shared, **options):
    """Computes the expected result of vmap; arrays named in `shared` have no member axis."""
    members = [{n: x if n in shared else x[i] for n, x in arrays.items()} for i in range(V)]
    return jax.tree.map(lambda *x: jnp.stack(x), *(decode(m, **options) for m in members))


SHARED = ((), ("k", "v"), ("k", "v", "k_scale", "v_scale"), ("q", "kv_lengths"), ("page_table",))


@pytest.mark.thorough(always=["False-True-k-v"])
@pytest.mark.parametrize("shared", SHARED, ids="-".join)
@pytest.mark.parametrize(("paged", "quantised"), [*itertools.product((False, True), repeat=2)])
def test_vmap(paged, quantised, shared):
    arrays = drawn(paged, quantised)
    shared = [name for name in shared if name in arrays]
    arrays |= {name: arrays[name][0] for name in shared}
    axes = {name: None if name in shared else 0 for name in arrays}
    found = jax.jit(jax.vmap(decode, in_axes=(axes,)))(arrays)
    for a, b in zip(found, one_by_one(arrays, shared), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_two_axes():
    arrays = drawn(paged=True, quantised=False)
    twice = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), arrays)
    found = jax.vmap(jax.vmap(decode))(twice)
    right = one_by_one(arrays, ())
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(a[1], b[::-1], rtol=1e-5, atol=1e-5)


def test_shared_pages_are_not_repeated():
    arrays = drawn(paged=True, quantised=False)
    arrays |= {"k": jnp.zeros((512, 256, K, H)), "v": jnp.zeros((512, 256, K, H))}
    axes = {name: None if name in ("k", "v") else 0 for name in arrays}
    compiled = jax.jit(jax.vmap(decode, in_axes=(axes,))).lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < arrays["k"].nbytes / 2


@pytest.mark.thorough
@pytest.mark.interpret
def test_the_kernel_sees_one_batch(monkeypatch):
    backend = HopperBackend(interpret=True, num_sms=2)
    monkeypatch.setattr(dispatch, "BACKENDS", dispatch.BACKENDS | {"hopper": backend})
    arrays = drawn(paged=True, quantised=False)
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
    with race_checked():
        found = jax.jit(jax.vmap(partial(decode, backend="hopper", num_splits=2)))(arrays)
    for a, b in zip(found, one_by_one(arrays, (), backend="xla"), strict=True):
        assert jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() < 2**-6
