"""flash_pallas.nn.attention_fn inside Flax's own attention modules."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flash_pallas.nn import attention_fn, causal_attention_fn

from .nn_tools import assert_no_worse

HEADS, FEATURES, LENGTH = 4, 24, 10
FUNCTIONS = [attention_fn, causal_attention_fn]


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def linen_modules(causal, **fields):
    """Returns (ours, Flax's default) with the same fields."""
    make = lambda f: linen.MultiHeadDotProductAttention(HEADS, attention_fn=f, **fields)
    return make(causal_attention_fn if causal else attention_fn), make(linen.dot_product_attention)


@pytest.mark.usefixtures("optimized")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("batch", "causal"), [((2,), False), ((2,), True), ((), True), ((2, 3), False)]
)
def test_linen_drop_in_equals_default(batch, causal):
    ours, default = linen_modules(causal, normalize_qk=True)
    x = normal(0, *batch, LENGTH, FEATURES)
    params = ours.init(jax.random.key(1), x)
    mask = linen.make_causal_mask(jnp.ones((*batch, LENGTH))) if causal else None
    assert_no_worse(ours.apply, lambda p, x: default.apply(p, x, mask=mask), params, x)


def test_linen_drop_in_has_tangents_of_gradients():
    any_order = functools.partial(attention_fn, differentiable="any")
    ours = linen.MultiHeadDotProductAttention(HEADS, attention_fn=any_order)
    default = linen.MultiHeadDotProductAttention(HEADS)
    x, step = normal(0, 2, LENGTH, FEATURES), normal(1, 2, LENGTH, FEATURES)
    params = ours.init(jax.random.key(1), x)
    loss = lambda module: lambda x: jnp.sum(module.apply(params, x) ** 2)
    product = lambda module: jax.jvp(jax.grad(loss(module)), (x,), (step,))[1]
    np.testing.assert_allclose(product(ours), product(default), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_linen_cross_attention():
    ours, default = linen_modules(False)
    x, other = normal(0, 2, LENGTH, FEATURES), normal(1, 2, 7, FEATURES)
    params = ours.init(jax.random.key(1), x, other)
    both = lambda module: lambda p, pair: module.apply(p, *pair)
    assert_no_worse(both(ours), both(default), params, (x, other))


@pytest.mark.usefixtures("optimized")
@pytest.mark.thorough(always=["batch0-False-4"])
@pytest.mark.parametrize(
    ("batch", "causal", "kv_heads"),
    [((2,), False, 4), ((2,), True, 2), ((2,), True, 1), ((), True, 4), ((2, 3), False, 2)],
)
def test_nnx_drop_in_equals_default(batch, causal, kv_heads):
    x = normal(0, *batch, LENGTH, FEATURES)
    functions = []
    for f in (attention_fn, nnx.dot_product_attention):
        module = nnx.MultiHeadAttention(
            HEADS,
            FEATURES,
            num_kv_heads=kv_heads,
            normalize_qk=True,
            decode=False,
            attention_fn=f,
            rngs=nnx.Rngs(0),
        )
        graph, params = nnx.split(module, nnx.Param)
        functions.append(lambda p, x, graph=graph: nnx.merge(graph, p)(x, is_causal=causal))
    assert_no_worse(*functions, params, x)


def test_causal_attention_fn_in_nnx_is_causal_unasked():
    x = normal(0, 2, LENGTH, FEATURES)
    outputs = [
        nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, attention_fn=f, rngs=nnx.Rngs(0))(
            x, is_causal=causal
        )
        for f, causal in ((causal_attention_fn, False), (attention_fn, True))
    ]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("ours", FUNCTIONS)
@pytest.mark.parametrize("theirs", [linen.dot_product_attention, nnx.dot_product_attention])
def test_every_keyword_of_flax_is_named(ours, theirs):
    parameters = inspect.signature(ours).parameters
    assert set(inspect.signature(theirs).parameters) <= set(parameters)
    kinds = {p.kind for p in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "name",
    [
        "module",
        "einsum_dot_general",
        "qk_attn_weights_einsum",
        "attn_weights_value_einsum",
        "input_positions",
    ],
)
def test_refuses_by_name(function, name):
    x = normal(0, LENGTH, HEADS, 8)
    with pytest.raises(NotImplementedError, match=rf"attention_fn: {name} .*use"):
        function(x, x, x, **{name: jnp.ones((1, LENGTH, LENGTH))})


def test_modules_pass_on_what_must_be_refused():
    x = normal(0, 2, LENGTH, FEATURES)
    module, _ = linen_modules(True)
    params = module.init(jax.random.key(1), x)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        module.apply(params, x, sow_weights=True)
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
    )
    with pytest.raises(NotImplementedError, match="sow_weights"):
        module(x, sow_weights=True)
    with pytest.raises(NotImplementedError, match="input_positions"):
        module(x, input_positions=jnp.arange(LENGTH))


def test_dtype_is_what_is_computed_in():
    x = normal(0, LENGTH, HEADS, 8)
    low = x.astype(jnp.bfloat16)
    assert attention_fn(x, x, x).dtype == jnp.float32
    out = attention_fn(x, x, x, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, attention_fn(low, low, low))


def test_promote_dtype_is_called():
    x = normal(0, LENGTH, HEADS, 8)
    seen = []

    def promote(arrays, dtype):
        seen.append(dtype)
        return tuple(2.0 * a for a in arrays)

    out = attention_fn(x, x, x, promote_dtype=promote, dtype=jnp.float32)
    assert seen == [jnp.float32]
    np.testing.assert_array_equal(out, attention_fn(2.0 * x, 2.0 * x, 2.0 * x))


def test_equal_modules_are_traced_once():
    x = normal(0, 2, LENGTH, FEATURES)
    traces = []

    def apply(module, params, x):
        traces.append(module)
        return module.apply(params, x)

    jitted = jax.jit(apply, static_argnums=0)
    params = linen_modules(True)[0].init(jax.random.key(1), x)
    for _ in range(3):
        jitted(linen_modules(True)[0], params, x)
    assert len(traces) == 1


@pytest.mark.thorough(always=["nnx"])
@pytest.mark.parametrize("layer", ["linen", "nnx"])
def test_flax_is_needed_only_by_the_layers(layer):
    code = f"""
import sys
sys.modules["flax"] = None
import flash_pallas
from flash_pallas.nn import attention_fn, causal_attention_fn
try:
    import flash_pallas.nn.{layer}
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs Flax: pip install 'flash_pallas[flax]'" in found.stdout
