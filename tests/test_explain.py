"""Tests of `explain` on any function: layers, jitted functions, gradients, models."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas import explain, flash_attention, flash_decode
from flash_pallas.compat import flash_attn, flex
from flash_pallas.devices import DEVICES, named
from flash_pallas.nn import linen as fp_linen
from flash_pallas.nn import nnx as fp_nnx
from flash_pallas.parallel import context_parallel_attention

X = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
HIDDEN = jnp.zeros((2, 128, 256), jnp.bfloat16)


def loss(x):
    return jnp.sum(jax.jit(flash_attention)(x, x, x), dtype=jnp.float32)


class Block(linen.Module):
    """Two layers of attention, one of them over a window, and dropout."""

    @linen.compact
    def __call__(self, x):
        x = fp_linen.FlashAttention(4, causal=True, dtype=jnp.bfloat16)(x)
        x = linen.Dropout(0.1, deterministic=False)(x)
        return fp_linen.FlashAttention(4, causal=True, window=(31, 0), dtype=jnp.bfloat16)(x)


def test_every_call_of_a_function():
    def model(x, token):
        x = flash_attention(x, x, x, causal=True)
        step = flash_decode(token, x, x, kv_lengths=3)
        return flash_attention(x, x, x), step

    with fp.target("H200"):
        found = explain(model, X, jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.bfloat16))
    texts = [str(call).partition(" on q")[0] for call in found.calls]
    assert texts == ["flash_attention", "flash_decode", "flash_attention"]
    assert [call.problem.spec.mask.right for call in (found.calls[0], found.calls[2])] == [0, None]
    assert found.backend == "hopper" and found.gpu == "NVIDIA H200"
    assert repr(found).count("runs on: hopper") == 3
    with pytest.raises(AttributeError, match=r"the 3 attention calls differ in 'problem': .*calls"):
        found.problem  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        found.colour  # noqa: B018


@pytest.mark.parametrize("function", [loss, jax.jit(loss), jax.grad(loss), jax.jit(jax.grad(loss))])
def test_functions_that_jax_has_cached(function):
    x = jnp.ones(X.shape, X.dtype)[:, :16]
    jax.eval_shape(function, x)
    for gpu, backend in (("H100", "hopper"), ("A100", "portable")):
        with fp.target(gpu):
            found = explain(function, x)
        assert [call.backend for call in found.calls] == [backend]
    assert explain(function, x).backend == "xla"


def test_a_function_without_arguments_does_not_run():
    x, results = jnp.ones((2, 64, 4, 16)), []
    found = explain(lambda: results.append(flash_attention(x, x, x)))
    assert found.backend == "xla" and isinstance(results[0], jax.core.Tracer)


def test_calls_that_are_alike_are_counted():
    def model(x):
        for _ in range(12):
            x = flash_attention(x, x, x, causal=True)
        return x

    found = explain(jax.jit(model), X)
    assert len(found.calls) == 12 and found.backend == "xla"
    assert repr(found).count("flash_attention on") == 1
    assert repr(found).endswith("12 calls like this one")
    scanned = explain(lambda x: jax.lax.scan(lambda x, _: (model(x), None), x, length=3), X)
    assert all(call == found.calls[0] for call in scanned.calls)
    assert repr(explain(jnp.sin, X)) == "no call of flash_pallas was traced"
    with pytest.raises(AttributeError, match="no attention call was traced, so there is no 'blo"):
        explain(jnp.sin, X).blocks  # noqa: B018


def test_layers_and_modules():
    with fp.target("H100"):
        found = explain(Block(), HIDDEN)
        assert [call.problem.spec.mask.left for call in found.calls] == [None, 31]
        assert found.backend == "hopper"
        variables = jax.eval_shape(Block().init, jax.random.key(0), HIDDEN)
        keys = {"dropout": jax.random.key(1)}
        assert explain(Block().apply, variables, HIDDEN, rngs=keys) == found
        layer = fp_nnx.FlashAttention(
            4, 256, dropout_rate=0.1, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), deterministic=False
        )
        count = layer.rngs.count[...] if hasattr(layer.rngs, "count") else None
        of_layer = explain(layer, HIDDEN)
        assert of_layer.backend == "hopper" and of_layer.problem.spec.dropout_rate
        assert explain(nnx.jit(lambda layer, x: layer(x)), layer, HIDDEN) == of_layer
    np.testing.assert_array_equal(
        layer.rngs.count[...] if hasattr(layer.rngs, "count") else None, count
    )


def test_what_is_no_array_stays_as_it_is():
    step = jax.jit(flash_attention, static_argnames=("causal", "window"))
    found = explain(step, X, X, X, causal=True, window=(7, 0))
    assert found == explain(flash_attention, X, X, X, causal=True, window=(7, 0))
    assert found.problem.spec.mask.left == 7


def test_calls_inside_of_vmap_and_of_shards():
    over_heads = jax.vmap(lambda x: flash_attention(x, x, x), in_axes=2, out_axes=2)
    assert explain(over_heads, jax.ShapeDtypeStruct((2, 64, 3, 4, 32), "float32")).backend == "xla"
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 64, 4, 16)), P("data"))
        assert explain(lambda x: x + flash_attention(x, x, x), x).problem.batch == 2
        x = jax.device_put(jnp.ones((2, 64, 4, 16)), P(None, "data"))
        for cut in (x, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)):
            with pytest.raises(ValueError, match="the sequence axis of q is sharded"):
                explain(flash_attention, cut, cut, cut)
        ring = lambda x: context_parallel_attention(x, x, x, mesh=mesh, axis="data", causal=True)
        with fp.target("H100"):
            found = explain(ring, x.astype(jnp.bfloat16))
        assert found.calls and found.backend == "hopper"


@pytest.mark.parametrize(
    ("name", "capability", "like"),
    [
        ("A6000", "8.6", "a10"),
        ("RTX A6000", "8.6", "a10"),
        ("RTX 3090 Ti", "8.6", "a10"),
        ("A40", "8.6", "a10"),
        ("L4", "8.9", "l40s"),
        ("RTX 6000 Ada Generation", "8.9", "l40s"),
        ("NVIDIA GeForce RTX 4070", "8.9", "rtx4090"),
        ("8.9", "8.9", "rtx4090"),
        ("A100-PCIE-40GB", "8.0", "a100"),
        ("NVIDIA A100 80GB PCIe", "8.0", "a100"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "8.0", "a100"),
        ("NVIDIA RTX A1000 6GB Laptop GPU", "8.6", "a10"),
        ("3090", "8.6", "a10"),
        ("RTX 4000 SFF Ada Generation", "8.9", "l40s"),
        ("NVIDIA RTX 5880 Ada Generation", "8.9", "l40s"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0", "h100"),
        ("HGX H100", "9.0", "h100"),
        ("NVIDIA GH200 480GB", "9.0", "h200"),
        ("NVIDIA GH200 144G HBM3e", "9.0", "h200"),
        ("NVIDIA RTX PRO 500 Blackwell Generation Laptop GPU", "12.0", "rtx5090"),
        ("A30", "8.0", "a100"),
        ("GH200", "9.0", "h200"),
        ("H100 PCIe", "9.0", "h100"),
        ("H20", "9.0", "h200"),
        ("9.0", "9.0", "h200"),
        ("GB200", "10.0", "b200"),
        ("GB300", "10.3", "b200"),
        ("10.3", "10.3", "b200"),
        ("RTX PRO 6000 Blackwell", "12.0", "rtx5090"),
        ("DGX Spark", "12.1", "rtx5090"),
    ],
)
def test_any_gpu_has_one_that_stands_for_it(name, capability, like):
    device = named(name)
    assert (device.capability, device.kind) == (capability, DEVICES[like].kind)
    with fp.target(name):
        found = explain(flash_attention, X, X, X)
    spelled = f"compute capability {name}" if name == capability else name
    assert f", on {DEVICES[like].kind}, which stands for {spelled}\n" in repr(found)


@pytest.mark.parametrize(
    "name", ["V100", "T4", "RTX 2080 Ti", "RTX 5000", "H1000", "7.5", "TPU v5", "A1000000", ""]
)
def test_gpus_that_nothing_stands_for(name):
    with pytest.raises(ValueError, match=f"gpu is '{name}': write the name of an NVIDIA GPU"):
        fp.target(name)


def test_what_to_write_instead():
    with pytest.raises(
        TypeError, match=r"first, got an array of shape .*explain\(flash_attention, q"
    ):
        explain(X, X, X)
    with pytest.raises(TypeError, match="explain takes a function first, got 3"):
        explain(3)
    for name, function in (
        ("explain_decode", "flash_decode"),
        ("explain_ragged", "ragged_paged_attention"),
        ("explain_varlen", "flash_attention_varlen"),
    ):
        with pytest.raises(TypeError, match=rf"write explain\({function}, .*instead of {name}\("):
            getattr(fp, name)(X, X, X)
        assert name not in dir(fp)
    with pytest.raises(TypeError, match=r"no argument 'gpu': write `with flash_pallas.target\('H1"):
        explain(flash_attention, X, X, X, gpu="H100")


def test_errors_are_those_of_the_call():
    with pytest.raises(TypeError, match=r"flash_attention\(\).*'casual'; did you mean 'causal'"):
        explain(flash_attention, X, X, X, casual=True)
    with fp.target("A100"), pytest.raises(fp.UnsupportedByBackend, match=r"'hopper': needs"):
        explain(loss, X) and explain(lambda x: flash_attention(x, x, x, backend="hopper"), X)
    with pytest.raises(ValueError, match=r"kv_lengths\[0\] is 9: it must be 0 to 8"):
        x = jnp.ones((1, 8, 2, 16))
        explain(flash_attention, x, x, x, kv_lengths=jnp.array([9]))


IMPORTED = """
import sys
import jax, jax.numpy as jnp
import flash_pallas
x = jnp.ones((1, 16, 2, 16))
jax.jit(flash_pallas.flash_attention)(x, x, x)
jax.grad(lambda x: flash_pallas.flash_attention(x, x, x, causal=True).sum())(x)
kernels = "gpu", "hopper", "portable"
print([name for name in kernels if f"flash_pallas.backends.{name}" in sys.modules])
print("jax.experimental.pallas.mosaic_gpu" in sys.modules)
flash_pallas.compat  # one that imported its modules would lock threads that import these
print([name for name in sys.modules if name.startswith("flash_pallas.compat.")])
"""


def test_what_nobody_asked_for_is_not_imported():
    command = [sys.executable, "-c", IMPORTED]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.splitlines() == ["[]", "False", "[]"]


def test_a_wrapped_function_is_another():
    @functools.wraps(flash_attention)
    def twice(q, k, v, **options):
        return flash_attention(flash_attention(q, k, v, **options), k, v)

    assert len(explain(twice, X, X, X, causal=True).calls) == 2
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    assert not explain(flex.create_block_mask, causal, None, None, 256, 256).calls


def test_methods_change_a_copy():
    layer = fp_nnx.FlashAttention(
        4, 256, dropout_rate=0.1, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), deterministic=False
    )
    before = jax.tree.map(np.asarray, nnx.state(layer, nnx.RngCount))
    assert explain(layer.__call__, HIDDEN) == explain(layer, HIDDEN)
    after = jax.tree.map(np.asarray, nnx.state(layer, nnx.RngCount))
    assert jax.tree.leaves(before) == jax.tree.leaves(after)


def test_caches_are_not_copied(monkeypatch):
    appended = []
    monkeypatch.setattr(
        flash_attn, "append_kv", lambda cache, *new, **_: appended.append(new) or cache
    )
    cache, new = jnp.ones((2, 64, 2, 16)), jnp.ones((2, 1, 2, 16))
    call = functools.partial(
        explain, flash_attn.flash_attn_with_kvcache, new, cache, cache, new, new
    )
    assert call(cache_seqlens=np.array([3, 63])).backend == "xla"
    assert all(isinstance(x, jax.core.Tracer) for x in appended[0])
    with pytest.raises(ValueError, match=r"has room for 64 tokens .* would have 65"):
        call(cache_seqlens=jnp.array([3, 64]))


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_packed_lengths_are_known_as_in_a_call(array):
    x, pages = jax.ShapeDtypeStruct((8, 2, 16), "float32"), jnp.ones((9, 16, 2, 16))
    with pytest.raises(ValueError, match=r"cu_seqlens_q is \[0 5 3\]: it must begin with 0, never"):
        explain(fp.flash_attention_varlen, x, x, x, cu_seqlens_q=array([0, 5, 3]))
    ends, table = (array([0, 3, 8]), array([0, 20, 50])), array([[0, 1, 2], [3, 4, 5]])
    found = explain(flash_attn.flash_attn_varlen_func, x, pages, pages, *ends, block_table=table)
    assert found.problem.kv_len == 50


@pytest.mark.parametrize(
    ("gpu", "head_dim", "first", "second"),
    [
        ("H200", 64, "kernels", "kernels"),
        ("H200", 512, *["blockwise jnp, as hopper has none for head dims above 256"] * 2),
        ("A100", 64, "kernels", "blockwise jnp, as portable has none"),
    ],
)
def test_why_jnp_computes_derivatives_beyond_the_gradient(gpu, head_dim, first, second):
    x = jax.ShapeDtypeStruct((1, 512, 2, head_dim), jnp.bfloat16)
    with fp.target(gpu):
        call = explain(flash_attention, x, x, x, differentiable="any")
    assert call.orders == (
        f"tangents: {first}; Hessian-vector products: {second}; other orders: blockwise jnp"
    )
