"""Inputs that Flax's modules pass to flash_pallas.nn.attention_fn: masks, bias, caches, dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flash_pallas.nn import attention_fn, causal_attention_fn

from .nn_tools import assert_no_worse, quadratic_arrays

BATCH, HEADS, FEATURES, LENGTH = 2, 4, 24, 10
FULL = (BATCH, HEADS, LENGTH, LENGTH)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def mask_of(*shape, dtype=jnp.float32):
    """Makes 0/1 masks like Flax; the last key is visible, so no row is empty."""
    return (normal(7, *shape) > 0.0).at[..., -1].set(True).astype(dtype)


def of_rank_four(x):
    return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)


@pytest.mark.usefixtures("optimized")
@pytest.mark.thorough(always=["heads"])
@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (mask_of(BATCH, 1, LENGTH, LENGTH), None),
        (mask_of(LENGTH, LENGTH, dtype=jnp.int32), normal(9, HEADS, 1, LENGTH)),
        (mask_of(BATCH, 1, 1, LENGTH, dtype=bool), normal(9, LENGTH, LENGTH)),
        (mask_of(1, HEADS, LENGTH, LENGTH, dtype=jnp.bfloat16), normal(9, BATCH, 1, LENGTH, 1)),
        (2.0 * mask_of(LENGTH), normal(9, *FULL)),
    ],
    ids=["batch", "lower rank", "padding", "heads", "full bias"],
)
def test_masks_and_biases_of_every_shape_equal_flax(mask, bias):
    qkv = tuple(normal(i, BATCH, LENGTH, HEADS, 8) for i in range(3))
    bias = jnp.zeros((1, 1, 1, 1)) if bias is None else bias
    ours = lambda qkv, bias: attention_fn(*qkv, bias=bias, mask=mask)
    default = linen.dot_product_attention
    plain = lambda qkv, bias: default(*qkv, bias=of_rank_four(bias), mask=of_rank_four(mask))
    assert_no_worse(ours, plain, qkv, bias)


def test_a_mask_that_does_not_fit_is_refused():
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    with pytest.raises(ValueError, match=r"mask has shape \(10, 9\)"):
        attention_fn(x, x, x, mask=jnp.ones((LENGTH, LENGTH - 1)))
    with pytest.raises(ValueError, match=r"mask has shape \(1, 2, 4, 10, 10\)"):
        attention_fn(x, x, x, mask=jnp.ones((1, *FULL)))


def test_a_mask_of_padding_says_which_axes_it_lacks():
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    mask = jnp.ones((BATCH, LENGTH))
    with pytest.raises(
        ValueError, match=r"as in mask\[:, None, None, :\] if it is \[batch, kv_length\]$"
    ):
        attention_fn(x, x, x, mask=mask)
    assert attention_fn(x, x, x, mask=mask[:, None, None, :]).shape == x.shape


def test_a_row_without_keys_gives_zero():
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    mask = jnp.ones((LENGTH, LENGTH)).at[3].set(0.0)
    out = attention_fn(x, x, x, mask=mask)
    assert not out[:, 3].any()
    whole = attention_fn(x, x, x, mask=jnp.ones((LENGTH, LENGTH)))
    np.testing.assert_array_equal(np.delete(out, 3, 1), np.delete(whole, 3, 1))


def test_is_causal_and_a_mask_hide_together():
    qkv = [normal(i, BATCH, LENGTH, HEADS, 8) for i in range(3)]
    mask = mask_of(BATCH, 1, 1, LENGTH).at[..., 0].set(1.0)
    both = linen.combine_masks(mask, linen.make_causal_mask(jnp.ones((BATCH, LENGTH))))
    expected = attention_fn(*qkv, mask=both)
    causal = attention_fn(*qkv, mask=mask, is_causal=True)
    for found in (causal, causal_attention_fn(*qkv, mask=mask)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_modules_pass_their_masks_on():
    x = normal(0, BATCH, LENGTH, FEATURES)
    mask = linen.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    # normalize_qk: the gradient of a bias of keys is 0 without it, where no relative rule can hold.
    make = lambda f: linen.MultiHeadDotProductAttention(HEADS, attention_fn=f, normalize_qk=True)
    ours, default = make(attention_fn), make(linen.dot_product_attention)
    params = ours.init(jax.random.key(1), x)
    with_mask = lambda module: lambda p, x: module.apply(p, x, mask=mask)
    assert_no_worse(with_mask(ours), with_mask(default), params, x)
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
    )
    found, expected = layer(x, mask=mask), layer(x, is_causal=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [attention_fn, causal_attention_fn])
def test_linen_decodes_token_by_token(function):
    x = normal(0, BATCH, LENGTH, FEATURES)
    whole = linen.MultiHeadDotProductAttention(HEADS, attention_fn=causal_attention_fn)
    decoding = linen.MultiHeadDotProductAttention(HEADS, attention_fn=function, decode=True)
    variables = decoding.init(jax.random.key(1), x)
    cache, params = variables["cache"], variables["params"]
    step = jax.jit(lambda c, x: decoding.apply({"params": params, "cache": c}, x, mutable="cache"))
    outputs = []
    for i in range(LENGTH):
        out, updated = step(cache, x[:, i : i + 1])
        cache = updated["cache"]
        outputs.append(out)
    expected = whole.apply({"params": params}, x)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(always=["causal_attention_fn"])
@pytest.mark.parametrize("function", [attention_fn, causal_attention_fn])
def test_nnx_decodes_token_by_token(function):
    x = normal(0, BATCH, LENGTH, FEATURES)
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, num_kv_heads=2, decode=False, attention_fn=function, rngs=nnx.Rngs(0)
    )
    expected = layer(x, is_causal=True)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    outputs = [step(layer, x[:, i : i + 1]) for i in range(LENGTH)]
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), expected, rtol=1e-5, atol=1e-6)


def test_the_mask_of_decoding_is_not_expanded():
    length = 2048
    shape = lambda t: jax.ShapeDtypeStruct((BATCH, t, HEADS, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((BATCH, 1, 1, length), jnp.float32)
    count = lambda f: quadratic_arrays(
        jax.make_jaxpr(f)(shape(length), shape(length), shape(length), mask=mask).jaxpr, length
    )
    assert count(attention_fn) == 0
    assert count(linen.dot_product_attention) > 0


def kept(function=attention_fn, batch=3, **arguments):
    """Reads off the output which weights dropout keeps: bool[batch, queries, heads, keys]."""
    v = jnp.broadcast_to(jnp.eye(64)[None, :, None], (batch, 64, HEADS, 64))
    keyword = {"dropout_rng": jax.random.key(3), "dropout_rate": 0.25, **arguments}
    out = function(jnp.zeros((batch, 64, HEADS, 8)), jnp.zeros((batch, 64, HEADS, 8)), v, **keyword)
    return np.asarray(out) > 0.0


def test_dropout_drops_its_share_and_scales_the_rest():
    v = jnp.broadcast_to(jnp.eye(64)[:, None], (64, HEADS, 64))
    zeros, key = jnp.zeros((64, HEADS, 8)), jax.random.key(3)
    out = np.asarray(attention_fn(zeros, zeros, v, dropout_rng=key, dropout_rate=0.25))
    share = np.mean(out == 0.0)
    deviation = np.sqrt(0.25 * 0.75 / 64**2)  # one mask for all heads by default
    assert abs(share - 0.25) < 5 * deviation
    np.testing.assert_allclose(out[out > 0.0], 1 / 64 / 0.75, rtol=1e-5)


def test_broadcast_dropout_is_one_mask_for_all():
    found = kept()
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1, :, :1], found.shape))
    own = kept(broadcast_dropout=False)
    assert (own[0, :, 0] != own[1, :, 0]).mean() > 0.2
    assert (own[0, :, 0] != own[0, :, 1]).mean() > 0.2


@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
def test_the_key_decides(raw):
    make = lambda seed: jax.random.PRNGKey(seed) if raw else jax.random.key(seed)
    first, again, other = (kept(dropout_rng=make(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.2


@pytest.mark.thorough(always=["attention_fn"])
@pytest.mark.parametrize("function", [attention_fn, causal_attention_fn])
def test_deterministic_switches_dropout_off(function):
    x = normal(0, LENGTH, HEADS, 8)
    key = jax.random.key(0)
    out = function(x, x, x, dropout_rate=0.5, dropout_rng=key, deterministic=True)
    np.testing.assert_array_equal(out, function(x, x, x))
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5 needs dropout_rng"):
        function(x, x, x, dropout_rate=0.5)


@pytest.mark.thorough(always=["False"])
@pytest.mark.parametrize("shared", [True, False])
def test_modules_pass_their_dropout_on(shared):
    x = jnp.broadcast_to(normal(0, 1, LENGTH, FEATURES), (BATCH, LENGTH, FEATURES))
    fields = {"dropout_rate": 0.5, "broadcast_dropout": shared, "attention_fn": attention_fn}
    module = linen.MultiHeadDotProductAttention(HEADS, deterministic=False, **fields)
    params = module.init(jax.random.key(1), x)
    in_linen = lambda seed: module.apply(params, x, rngs={"dropout": jax.random.key(seed)})
    layer = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **fields)
    in_nnx = lambda seed: layer(x, deterministic=False, rngs=nnx.Rngs(dropout=seed))
    for call in (in_linen, in_nnx):
        first, again, other = call(2), call(2), call(3)
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)
        # Equal entries of the batch stay equal exactly if they share their dropout.
        assert np.array_equal(first[0], first[1]) == shared
