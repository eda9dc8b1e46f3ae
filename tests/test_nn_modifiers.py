"""The layers of flash_pallas.nn: windows, softcap, ALiBi, sinks, documents, lengths, dropout."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flash_pallas.nn import _options, alibi_slopes, segment_positions
from flash_pallas.nn import linen as fp_linen
from flash_pallas.nn import nnx as fp_nnx

from .nn_tools import assert_no_worse, dense_layer

FEATURES, LENGTH = 24, 10
ROPE = {"rope_theta": 100.0, "qk_norm": "rms"}
GROUPED = {"num_heads": 4, "num_kv_heads": 2, "causal": True, **ROPE}
PLACE = np.arange(LENGTH)
DISTANCE = np.abs(PLACE[:, None] - PLACE[None, :])
IDS = np.array([[0, 0, 0, 0, 7, 7, 3, 3, 3, -1], [5, 5, 5, 5, 5, 5, 5, 5, 1, 1]], np.int32)
SAME_ID = (IDS[:, :, None] == IDS[:, None, :]) & (IDS[:, :, None] >= 0)
COUNTS = np.array([LENGTH, 6], np.int32)
VALID = COUNTS[:, None] > PLACE
WITHIN = VALID[:, :, None] & VALID[:, None, :]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def bias_of(seed, *shape):
    return np.asarray(normal(seed, *shape))


# (fields, arguments of the call, what `dense_layer` is told).
CASES = {
    "window, softcap, sinks": (
        {**GROUPED, "window": (3, 0), "softcap": 2.0, "use_sinks": True},
        {},
        {**ROPE, "keep": DISTANCE[None, None] <= 3, "causal": True, "softcap": 2.0},
    ),
    "ALiBi": (
        {"num_heads": 4, "alibi": True, "qk_norm": "rms"},
        {},
        {"bias": -alibi_slopes(4)[:, None, None][None] * DISTANCE[None, None], "qk_norm": "rms"},
    ),
    "documents": (
        {**GROUPED, "alibi": (0.5, 0.25, 1.0, 0.0)},
        {"segment_ids": IDS, "positions": segment_positions(IDS)},
        {
            **ROPE,
            "causal": True,
            "keep": SAME_ID[:, None],
            "positions": segment_positions(IDS),
            "bias": -np.array([0.5, 0.25, 1.0, 0.0])[:, None, None][None] * DISTANCE[None, None],
        },
    ),
    "lengths, mask, bias": (
        {"num_heads": 4, "use_qkv_bias": False, "window": 4},
        {
            "lengths": COUNTS,
            "mask": (bias_of(3, LENGTH, LENGTH) > -1.0).astype(np.float32),
            "bias": bias_of(4, 4, 1, LENGTH),
        },
        {
            "keep": WITHIN[:, None]
            & (bias_of(3, LENGTH, LENGTH) > -1.0)
            & (DISTANCE <= 4)[None, None],
            "bias": bias_of(4, 1, 4, 1, LENGTH),
        },
    ),
}
each_case = pytest.mark.parametrize(("fields", "call", "told"), CASES.values(), ids=CASES)


def make_linen(fields, x, *other):
    """Returns (module, params without boxes), all random: zeros would hide mistakes."""
    module = fp_linen.FlashAttention(**fields)
    params = linen.meta.unbox(module.init(jax.random.key(1), x, *other))["params"]
    leaves, tree = jax.tree.flatten(params)
    noise = [0.3 * normal(100 + i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return module, jax.tree.unflatten(tree, [a + b for a, b in zip(leaves, noise, strict=True)])


def make_nnx(fields, params, **sizes):
    """Returns the nnx layer with the given parameters, which must be exactly its own."""
    module = fp_nnx.FlashAttention(**{"in_features": FEATURES, **sizes}, **fields, rngs=nnx.Rngs(0))
    own = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, params)
    nnx.update(module, params)
    return module


@pytest.mark.thorough(always=["ALiBi"])
@each_case
def test_layers_equal_the_dense_layer(fields, call, told):
    x = normal(0, 2, LENGTH, FEATURES)
    module, params = make_linen(fields, x)
    ours = lambda p, x: module.apply({"params": p}, x, **call)
    told = {name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in told.items()}
    assert_no_worse(ours, lambda p, x: dense_layer(p, x, **told), params, x)
    layer = make_nnx(fields, params)
    np.testing.assert_array_equal(layer(x, **call), module.apply({"params": params}, x, **call))


@pytest.mark.thorough
def test_packed_documents_equal_the_documents_alone():
    x = normal(0, LENGTH, FEATURES)
    ids = IDS[0]
    module, params = make_linen({**GROUPED, "window": (2, 0)}, x)
    apply = lambda x, **call: module.apply({"params": params}, x, **call)
    packed = apply(x, segment_ids=ids, positions=segment_positions(ids))
    for document in (0, 7, 3):
        own = ids == document
        np.testing.assert_allclose(packed[own], apply(x[own]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed[9], params["out"]["bias"], rtol=1e-6)


def test_keys_have_their_own_side_in_cross_attention():
    x, other = normal(0, 2, LENGTH, FEATURES), normal(1, 2, 7, 12)
    module, params = make_linen({"num_heads": 4}, x, other)
    layer = make_nnx({"num_heads": 4}, params, in_kv_features=12)
    apply = lambda **call: module.apply({"params": params}, x, other, **call)
    kv_ids = np.array([[0, 0, 0, 7, 7, 3, -1], [5, 5, 5, 1, 1, 1, 1]], np.int32)
    sides = [
        {"segment_ids": IDS, "kv_segment_ids": kv_ids},
        {"kv_lengths": np.array([7, 2], np.int32)},
        {"lengths": COUNTS},
    ]
    whole = apply()
    for call in sides:
        np.testing.assert_array_equal(layer(x, other, **call), apply(**call))
        assert np.abs(apply(**call) - whole).max() > 1e-3
    mask = ((IDS[:, :, None] == kv_ids[:, None, :]) & (kv_ids >= 0)[:, None])[:, None]
    np.testing.assert_allclose(apply(**sides[0]), apply(mask=mask), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(apply(lengths=COUNTS)[0], whole[0])
    with pytest.raises(ValueError, match="kv_segment_ids is None"):
        apply(segment_ids=IDS)


def test_sinks_are_parameters_with_an_axis():
    x = normal(0, 2, LENGTH, FEATURES)
    fields = {"num_heads": 4, "use_sinks": True}
    boxed = fp_linen.FlashAttention(**fields).init(jax.random.key(1), x)["params"]
    assert tuple(linen.get_partition_spec(boxed)["sinks"]) == ("heads",)
    sinks = linen.meta.unbox(boxed)["sinks"]
    assert sinks.shape == (4,) and not sinks.any()
    layer = fp_nnx.FlashAttention(in_features=FEATURES, **fields, rngs=nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    assert specs == linen.get_partition_spec(boxed)


@pytest.mark.thorough(always=["False"])
@pytest.mark.parametrize("shared", [True, False])
def test_dropout_takes_its_key_as_flax_does(shared):
    x = jnp.broadcast_to(normal(0, 1, LENGTH, FEATURES), (2, LENGTH, FEATURES))
    fields = {"num_heads": 4, "dropout_rate": 0.5, "broadcast_dropout": shared}
    module, params = make_linen({**fields, "deterministic": True}, x)
    module = fp_linen.FlashAttention(**fields)
    layer = make_nnx(fields, params)
    draw = lambda seed: {"dropout": jax.random.key(seed)}
    apply = lambda seed, **call: module.apply({"params": params}, x, rngs=draw(seed), **call)
    in_linen = lambda seed: apply(seed, deterministic=False)
    in_nnx = lambda seed: layer(x, deterministic=False, rngs=nnx.Rngs(dropout=seed))
    for call in (in_linen, in_nnx):
        first, again, other = call(2), call(2), call(3)
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)
        assert np.array_equal(first[0], first[1]) == shared
    without = fp_linen.FlashAttention(num_heads=4).apply({"params": params}, x)
    np.testing.assert_array_equal(apply(2, deterministic=True), without)
    np.testing.assert_array_equal(layer(x, deterministic=True), without)


def test_the_nnx_layer_has_a_stream_of_its_own_and_modes():
    x = normal(0, 2, LENGTH, FEATURES)
    layer = fp_nnx.FlashAttention(4, FEATURES, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=1))
    layer.train()
    assert not np.array_equal(layer(x), layer(x))
    viewed = nnx.view(layer, deterministic=True)
    layer.eval()
    np.testing.assert_array_equal(layer(x), layer(x))
    np.testing.assert_array_equal(layer(x), viewed(x))


def test_dropout_must_be_told_whether_it_is_training():
    x = normal(0, 2, LENGTH, FEATURES)
    module = fp_linen.FlashAttention(num_heads=4, dropout_rate=0.5)
    with pytest.raises(ValueError, match="deterministic"):
        module.init(jax.random.key(0), x)
    layer = fp_nnx.FlashAttention(4, FEATURES, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="say deterministic="):
        layer(x)


def test_what_is_asked_for_reaches_the_attention():
    seen = []

    def attention(q, k, v, **settings):
        seen.append(settings)
        return q

    x = normal(0, 2, LENGTH, FEATURES)
    fields = {
        "num_heads": 4,
        "window": 3,
        "softcap": 5.0,
        "dropout_rate": 0.5,
        "deterministic": False,
        "broadcast_dropout": True,
        "attention": attention,
    }
    module, params = make_linen(fields, x)
    seen.clear()
    call = {"lengths": COUNTS, "kv_lengths": COUNTS - 1}
    module.apply({"params": params}, x, rngs={"dropout": jax.random.key(0)}, **call)
    make_nnx(fields, params)(x, **call)
    always = {"causal": False, "scale": None, "deterministic": False, "backend": "auto"}
    for settings in seen:
        assert jax.dtypes.issubdtype(settings.pop("dropout_seed").dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(settings.pop("q_lengths"), COUNTS)
        np.testing.assert_array_equal(settings.pop("kv_lengths"), COUNTS - 1)
        asked = {"window": 3, "softcap": 5.0, "dropout_rate": 0.5, "broadcast_dropout": True}
        assert settings == always | asked
    assert len(seen) == 2


def test_slopes():
    np.testing.assert_array_equal(alibi_slopes(8), 2.0 ** -np.arange(1.0, 9.0))
    expected = np.concatenate([2.0 ** -np.arange(2.0, 9.0, 2.0), [0.5, 0.125]])
    np.testing.assert_array_equal(alibi_slopes(6), expected.astype(np.float32))
    assert alibi_slopes(1) == np.float32(1 / 256)
    with pytest.raises(ValueError, match=r"num_heads is 0: .*positive"):
        alibi_slopes(0)
    with pytest.raises(ValueError, match=r"alibi is \(0\.5, .*4 heads"):
        fp_nnx.FlashAttention(4, FEATURES, alibi=(0.5, 0.25, 0.1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"alibi is 0\.5: .*4 heads"):
        fp_linen.FlashAttention(4, alibi=0.5).init(jax.random.key(0), normal(0, 3, FEATURES))


def test_positions_from_ids():
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, 4, (2, 3, 40)).astype(np.int32)
    found = jax.jit(segment_positions)(ids)
    assert found.shape == ids.shape and found.dtype == jnp.int32
    for row, positions in zip(ids.reshape(-1, 40), found.reshape(-1, 40), strict=True):
        for i, one in enumerate(row):
            assert positions[i] == (0 if one < 0 else np.sum(row[:i] == one))
    assert segment_positions(np.zeros((3, 0), np.int32)).shape == (3, 0)
    with pytest.raises(TypeError, match="float32: it must be int32"):
        segment_positions(jnp.zeros(3))


def test_examples():
    results = doctest.testmod(_options)
    assert results.attempted == 5 and results.failed == 0


def test_nnx_layers_with_dropout_and_sinks_are_scanned_rematerialized_and_trained():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        fields = {"dropout_rate": 0.5, "use_sinks": True, "deterministic": False}
        return fp_nnx.FlashAttention(4, FEATURES, **fields, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def run(x, layer):
        return x + layer(x)

    layers, x = make(nnx.Rngs(0, dropout=1)), normal(0, 2, LENGTH, FEATURES)
    gradient = nnx.jit(nnx.value_and_grad(lambda layers, x: jnp.sum(jnp.square(run(x, layers)))))
    first, grads = gradient(layers, x)
    assert nnx.to_pure_dict(grads)["sinks"].shape == (2, 4)
    assert all(leaf.any() for leaf in jax.tree.leaves(nnx.to_pure_dict(grads)["sinks"]))
    assert gradient(layers, x)[0] != first  # the streams went on
    layers.eval()
    assert gradient(layers, x)[0] == gradient(layers, x)[0]


def test_linen_layers_with_dropout_are_scanned_and_rematerialized():
    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x, deterministic):
            layer = linen.remat(fp_linen.FlashAttention)
            layer = layer(num_heads=4, dropout_rate=0.5, deterministic=deterministic, name="layer")
            split = {"params": True, "dropout": True}
            step = linen.scan(
                lambda layer, x, _: (x + layer(x), None),
                variable_axes={"params": 0},
                split_rngs=split,
                length=2,
                metadata_params={linen.PARTITION_NAME: "layers"},
            )
            return step(layer, x, None)[0]

    x = normal(0, 2, LENGTH, FEATURES)
    params = Stack().init(jax.random.key(1), x, True)
    loss = lambda params, seed: jnp.sum(
        jnp.square(Stack().apply(params, x, False, rngs={"dropout": jax.random.key(seed)}))
    )
    gradient = jax.jit(jax.value_and_grad(loss))
    first, again, other = gradient(params, 2), gradient(params, 2), gradient(params, 3)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first[0] != other[0]
    # The rematerialized forward draws what the first one drew: along the gradient the loss falls as
    # the gradient says, here by a thousandth, but for terms of second order.
    value, slope = float(first[0]), sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(first[1]))
    moved = jax.tree.map(lambda p, g: p - 1e-3 * value / slope * g, params, first[1])
    fell = value - float(gradient(moved, 2)[0])
    assert 0.9e-3 * value < fell < 1.1e-3 * value
