"""Lists of blocks that a call makes of its mask_mod, where that reads positions alone."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.core import block_mask

T = 2048


def window_and_global(b, n, i, j):
    return (j <= i) & ((i - j < 256) | (j < 64))


def prefix(b, n, i, j):
    return (j <= i) | (j < 512)


def stripes(b, n, i, j):
    return (i + j) & 3 > 0


@functools.cache
def inputs(batch: int = 1, dtype: str = "float32"):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (batch, T, 2, 16), (batch, T, 1, 16), (batch, T, 1, 16)
    return [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


def problem(mod, length: int = T, **options):
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    return fp.explain(fp.flash_attention, x, x, x, mask_mod=mod, **options).problem


def results(mod, **options):
    """Returns (o, gradients) of a call in one program."""

    @jax.jit
    def run(q, k, v):
        call = lambda *x: fp.flash_attention(*x, mask_mod=mod, **options)
        o, pull = jax.vjp(call, q, k, v)
        return o, pull(jnp.cos(o))

    return run(*inputs())


@pytest.fixture
def unlisted(monkeypatch):
    """Returns what calls compute that make no lists."""

    def run(function, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(block_mask, "LEAST_EMPTY", 2.0)
            return function(*args, **options)

    return run


@pytest.mark.thorough(always=["causal-window_and_global"])
@pytest.mark.parametrize("mod", [window_and_global, prefix])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=["alone", "causal"])
def test_outputs_and_gradients_are_those_without_lists(mod, options, unlisted):
    assert problem(mod, **options).is_listed
    found, plain = results(mod, **options), unlisted(results, mod, **options)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_blocks_that_are_whole_for_the_function_may_be_hidden_by_a_mask(unlisted):
    mask = jnp.asarray(np.random.default_rng(0).random((1, 1, T, T)) < 0.5)
    found = fp.flash_attention(*inputs(), mask=mask, mask_mod=prefix)
    plain = unlisted(fp.flash_attention, *inputs(), mask=mask, mask_mod=prefix)
    np.testing.assert_allclose(found, plain, rtol=2e-5, atol=2e-5)


def test_what_makes_no_lists():
    weights = jnp.ones(2)
    documents = jnp.zeros(T, int)
    assert not problem(stripes).is_listed  # which hides no block
    assert not problem(prefix, length=1024).is_listed  # short
    assert not problem(prefix, q_offset=3).is_listed
    assert not problem(prefix, q_positions=jnp.zeros((1, T), int)).is_listed
    assert not problem(lambda b, n, i, j: (j <= i) & (weights[n] > 0)).is_listed
    assert not problem(lambda b, n, i, j: (j <= i) & (n > 0)).is_listed
    assert not problem(lambda b, n, i, j: documents[i] == documents[j]).is_listed


def test_what_is_too_long_for_a_cpu(monkeypatch):
    assert not problem(prefix, length=2**16).is_listed
    monkeypatch.setattr(block_mask, "MOST_PAIRS", {})
    assert not problem(window_and_global).is_listed


def test_lists_are_as_long_as_they_must_be_and_made_once():
    block_mask.lists_of_positions.cache_clear()
    for _ in range(3):
        shape = problem(window_and_global)
    assert shape.is_listed and block_mask.lists_of_positions.cache_info().misses == 1
    mod = shape.spec.mask_mod
    lists, empty = block_mask.lists_of_positions(mod, T, T)
    assert lists.shape == (1, 1, T // 128, 2 + 4) and lists.dtype == np.int32
    made = fp.BlockMask.from_mask_mod(window_and_global, 1, 1, T, T)
    np.testing.assert_array_equal(lists, made.lists[..., : lists.shape[-1]])
    assert empty == pytest.approx(made.sparsity)


def test_explain_says_that_blocks_are_skipped():
    q, k, v = inputs()
    says = "skips blocks of 128 queries and 128 keys"
    assert says in str(fp.explain(fp.flash_attention, q, k, v, mask_mod=prefix))
    assert says not in str(fp.explain(fp.flash_attention, q, k, v, mask_mod=stripes))


@pytest.mark.thorough
def test_inside_of_transformations(unlisted):
    """Maps over a batch axis, inside of jit, of a scan and of checkpoint."""

    def layers(x, count):
        layer = lambda x, _: (x + fp.flash_attention(x, x, x, mask_mod=prefix), None)
        return jax.lax.scan(jax.checkpoint(layer), x, length=count)[0].sum()

    x = jnp.stack([inputs()[0]] * 2)
    grad = lambda: jax.jit(jax.vmap(jax.grad(functools.partial(layers, count=2))))(x)
    block_mask.lists_of_positions.cache_clear()
    found = grad()
    assert block_mask.lists_of_positions.cache_info().currsize == 1
    jax.clear_caches()
    np.testing.assert_allclose(found, unlisted(grad), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(devices, types):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(types,) * 2, devices=devices)
    block_mask.lists_of_positions.cache_clear()
    attend = jax.jit(lambda q, k, v: fp.flash_attention(q, k, v, mask_mod=prefix))
    q, k, v = inputs(2)
    k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
    spec = P("data", None, "model")
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec))
        found = attend(*map(place, (q, k, v)))
    np.testing.assert_allclose(found, attend(q, k, v), rtol=2e-5, atol=2e-5)


def test_inside_of_a_shard_map(devices):
    mesh = jax.make_mesh((2,), ("data",), devices=devices[:2])
    block_mask.lists_of_positions.cache_clear()
    attend = lambda q, k, v: fp.flash_attention(q, k, v, mask_mod=prefix)
    spec = P("data")
    mapped = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in inputs(2)]
    np.testing.assert_allclose(mapped(*placed), attend(*inputs(2)), rtol=2e-5, atol=2e-5)


def test_nobody_is_told_to_make_what_has_been_made(caplog):
    caplog.set_level(logging.INFO, logger="flash_pallas")
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    for mod in (prefix, stripes):
        jax.eval_shape(lambda x, mod=mod: fp.flash_attention(x, x, x, mask_mod=mod), x)
    assert not caplog.records


def test_numbers_of_the_source_are_positions_alone():
    """Divides by numbers, whose parts jnp computes in the traced function."""
    diffusion = lambda b, n, i, j: (i // 256 >= j // 256) & (jnp.abs(i - j) % 4096 < 300)
    assert problem(diffusion).is_listed and "mask_params" not in problem(diffusion).features
    other = lambda b, n, i, j: (i // 512 >= j // 512) & (jnp.abs(i - j) % 4096 < 300)
    assert problem(diffusion).spec.mask_mod != problem(other).spec.mask_mod
    with_head = lambda b, n, i, j: i // 256 >= (j + n) // 256
    assert not problem(with_head).is_listed
    expected = fp.flash_attention(
        *inputs(), mask_mod=lambda b, n, i, j: (i // 512 >= (j + 0 * n) // 512) & (j >= 0)
    )
    found = fp.flash_attention(*inputs(), mask_mod=lambda b, n, i, j: i // 512 >= j // 512)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_wide_numbers_of_the_source():
    """Computes in float64 where the function does, with lists that are made in another thread."""
    wave = lambda b, n, i, j: jnp.cos((i - j).astype(float) / 1024) > 0.8
    block_mask.lists_of_positions.cache_clear()
    with jax.enable_x64(True):
        q, k, v = (np.asarray(x, np.float64) for x in inputs())
        found = fp.flash_attention(q, k, v, mask_mod=wave)
        place = np.arange(T)
        mask = np.cos((place[:, None] - place[None]) / 1024) > 0.8
        expected = fp.flash_attention(q, k, v, mask=mask[None, None])
    assert found.dtype == np.float64 and block_mask.lists_of_positions.cache_info().currsize == 1
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
