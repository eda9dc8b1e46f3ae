"""Training that is sharded by batch, parameters, heads or sequences equals that of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flash_pallas.nn.linen import FlashAttention

from . import mesh_training
from .mesh_training import TYPES

SIZES = {"layers": 2, "d_model": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
SETTING = mesh_training.Setting(SIZES, batch=8, length=48)
WAYS = [
    {"data": 2},
    {"fsdp": 2},
    {"model": 2},
    {"context": 2},
    {"sequence": 2},
    {"data": 4},
    {"context": 4},
    {"data": 2, "fsdp": 2},
    {"data": 2, "tensor": 2},
    {"fsdp": 2, "model": 2},
    {"fsdp": 2, "context": 2},
    {"data": 2, "sequence": 2},
    {"context": 2, "model": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]
# Parameters are of order one. Five steps add float32 sums of up to 4,096 terms in another order.
ATOL = 1e-5


def name(axes) -> str:
    return " ".join(f"{axis}{size}" for axis, size in axes.items())


@functools.cache
def on_one_device():
    """Trains on one device; returns parameters and how far the five steps have moved them."""
    params, apply = SETTING.model()
    found, *_ = mesh_training.train(apply, params, SETTING.data())
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), found, params)
    assert min(jax.tree.leaves(moved)) > 1e-3
    return jax.device_get(found)


def assert_close(found, expected):
    close = functools.partial(np.testing.assert_allclose, rtol=0.0, atol=ATOL)
    jax.tree.map(lambda a, b: close(jax.device_get(a), b), found, expected)


@pytest.mark.thorough(always=["fsdp2 context2-explicit"])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("axes", WAYS, ids=name)
def test_five_steps(eight_devices, axes, types):
    found, _, text = mesh_training.train_on(SETTING, axes, TYPES[types], eight_devices)
    assert_close(found, on_one_device())
    mesh_training.assert_local(SETTING, axes, text)


def test_a_gathered_query_is_seen():
    ours, rest = "f32[4,48,4,8]{3,2,1,0}", "replica_groups=[1,2]<=[2], dimensions={0}"
    text = f"  %x = {ours} all-gather(%y), {rest}\n  %w = f32[64,256] all-gather(%z), {rest}"
    assert mesh_training.gathered_tokens(text) == [(4, 4, 8, 48)]
    started = f"  %x = (f32[4,48,2,8]{{3,2,1,0}}, {ours}) all-gather-start(%y), {rest}"
    assert mesh_training.gathered_tokens(started) == [(4, 4, 8, 48)]
    with pytest.raises(AssertionError, match="gathers"):
        mesh_training.assert_local(SETTING, {"data": 2}, text)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 0, 3)])
def test_gradients_of_values_may_be_gathered_once_a_layer(order):
    whole = SETTING.batch, SETTING.length, SIZES["kv_heads"], SIZES["head_dim"]
    part = *whole[:2], 1, whole[3]
    both = (",".join(str(sizes[i]) for i in order) for sizes in (part, whole))
    line = "  %x = (f32[{}]{{3,2,1,0}}, f32[{}]{{3,2,1,0}}) all-gather-start(%y)\n".format(*both)
    mesh_training.assert_local(SETTING, {"model": 2}, line * SIZES["layers"])
    with pytest.raises(AssertionError, match="gathers"):
        mesh_training.assert_local(SETTING, {"model": 2}, line * (SIZES["layers"] + 1))


WIDTH = 32


class LinenModel(linen.Module):
    """A transformer whose attention has biases and sinks."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Dense(WIDTH, use_bias=False, name="embed")(tokens)
        x = x + FlashAttention(
            num_heads=4, num_kv_heads=2, causal=True, rope_theta=1e4, use_sinks=True
        )(linen.RMSNorm()(x))
        y = linen.silu(linen.Dense(4 * WIDTH, name="gate")(linen.RMSNorm()(x)))
        x = x + linen.Dense(WIDTH, name="down")(y)
        return linen.Dense(mesh_training.VOCABULARY, name="logits")(x)


@pytest.mark.thorough
@pytest.mark.parametrize("types", TYPES)
def test_five_steps_of_linen(eight_devices, types):
    model = LinenModel()
    tokens = jnp.zeros((1, SETTING.length, mesh_training.VOCABULARY))
    params = linen.meta.unbox(model.init(jax.random.key(0), tokens))
    data = SETTING.data()
    expected, *_ = mesh_training.train(model.apply, params, data)
    kinds = (TYPES[types],) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), kinds, devices=eight_devices)
    rows = P(("data", "fsdp"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, mesh_training.shardings(params, mesh))
        cut = jax.device_put(data, NamedSharding(mesh, P(None, *rows)))
        explicit = TYPES[types] == AxisType.Explicit
        how = {"prepare": mesh_training.gather_others, "rows": rows} if explicit else {}
        found, *_ = mesh_training.train(model.apply, placed, cut, **how)
    assert_close(found, expected)
