"""Layers whose sequences are cut over devices equal layers that see them whole."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flash_pallas import KVCache
from flash_pallas.nn import linen as fp_linen
from flash_pallas.nn import nnx as fp_nnx
from flash_pallas.nn import segment_positions
from flash_pallas.parallel import ContextParallel, from_zigzag, to_zigzag

B, T, FEATURES = 2, 16, 32
ATOL = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of a few dozen terms of order one
FIELDS = {"num_heads": 4, "num_kv_heads": 2, "causal": True, "rope_theta": 100.0, "use_sinks": True}


@pytest.fixture
def mesh(eight_devices):
    """Mesh of three axes, one of which cuts nothing here."""
    types, names = (AxisType.Auto,) * 3, ("data", "fsdp", "context")
    return jax.make_mesh((2, 2, 2), names, axis_types=types, devices=eight_devices)


def nnx_layer(**fields):
    return fp_nnx.FlashAttention(in_features=FEATURES, **FIELDS, **fields, rngs=nnx.Rngs(0))


def tokens():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, FEATURES)), jnp.float32)
    ids = jnp.asarray([[0] * 3 + [1] * 11 + [-1] * 2, [0] * 16], jnp.int32)
    return x, ids


def output_and_gradients(layer, x, **given):
    """Computes (output, gradients of the parameters, gradient of x), jitted."""
    graph, params = nnx.split(layer, nnx.Param)

    def loss(params, x):
        out = nnx.merge(graph, params)(x, **given)
        return jnp.sum(jnp.sin(out)), out

    grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
    return out, *grads


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **ATOL)


@pytest.mark.thorough
def test_nnx_under_jit_in_zigzag_layout(mesh):
    context = ContextParallel("context", layout="zigzag", batch_axis="data")
    x, _ = tokens()
    with jax.set_mesh(mesh):
        found = output_and_gradients(nnx_layer(context_parallel=context), to_zigzag(x, 2))
    out, params, dx = jax.device_get(found)
    expected = output_and_gradients(nnx_layer(), x)
    assert_close((from_zigzag(out, 2), params, from_zigzag(dx, 2)), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_linen_inside_shard_map(mesh, layout):
    """Runs documents with positions of their own, and rotary positions that count in the whole."""
    context = ContextParallel("context", "all_gather", layout, batch_axis="data")
    there = partial(to_zigzag, shards=2) if layout == "zigzag" else lambda x: x
    x, ids = tokens()
    whole = fp_linen.FlashAttention(**FIELDS, dropout_rate=0.3, deterministic=False)
    cut = whole.clone(context_parallel=context)
    params = whole.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    rngs = {"dropout": jax.random.key(2)}
    spec = P("data", "context")

    def call(layer, x, ids, at):
        both = (layer.apply(params, x, segment_ids=ids, rngs=rngs, positions=p) for p in (at, None))
        return tuple(both)

    local = jax.shard_map(
        partial(call, cut), mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, spec)
    )
    given = x, ids, segment_positions(ids)
    found = jax.jit(local)(*map(there, given))
    assert_close(found, tuple(map(there, call(whole, *given))))


def test_what_contradicts_itself(mesh):
    x, ids = tokens()
    context = ContextParallel("context", mesh=mesh)
    layer = nnx_layer(context_parallel=context)
    with pytest.raises(ValueError, match="context_parallel and kv_lengths, mask, lengths: "):
        layer(x, mask=jnp.ones((B, 1, 1, T), bool), lengths=jnp.array([3, 4], jnp.int32))
    with pytest.raises(ValueError, match=r"the mesh has \(\): call the layer under jax.set_mesh"):
        nnx_layer(context_parallel=ContextParallel("context"))(x, segment_ids=ids)
    with pytest.raises(ValueError, match="replaces attention="):
        nnx_layer(context_parallel=context, attention=lambda *x, **_: x[0])(x)
    with pytest.raises(ValueError, match="flash_decode: leave attention= and context_parallel="):
        layer(x, cache=KVCache.empty(B, T, 2, 8, jnp.float32))
