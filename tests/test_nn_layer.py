"""flash_pallas.nn.linen.FlashAttention and flash_pallas.nn.nnx.FlashAttention."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flash_pallas
from flash_pallas import apply_rope
from flash_pallas.nn import linen as fp_linen
from flash_pallas.nn import nnx as fp_nnx

from .nn_tools import assert_no_worse, dense_layer, quadratic_arrays

FEATURES, LENGTH = 24, 10
MODERN = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "causal": True,
    "rope_theta": 100.0,
    "qk_norm": "rms",
    "use_qkv_bias": False,
    "use_out_bias": False,
}
LAYERS = {
    "plain": {"num_heads": 4},
    "modern": MODERN,
    "layer norm, one kv head": {"num_heads": 4, "num_kv_heads": 1, "qk_norm": "layer"},
    "scale, RoPE, wide heads": {"num_heads": 2, "head_dim": 16, "scale": 0.1, "rope_theta": 1e4},
}
each_layer = pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def make_linen(fields, x, *other):
    """Returns (module, params without boxes), all random: zero biases would hide mistakes."""
    module = fp_linen.FlashAttention(**fields)
    params = linen.meta.unbox(module.init(jax.random.key(1), x, *other))["params"]
    leaves, tree = jax.tree.flatten(params)
    noise = [0.1 * normal(100 + i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return module, jax.tree.unflatten(tree, [a + b for a, b in zip(leaves, noise, strict=True)])


def make_nnx(fields, params, **sizes):
    """Returns the nnx layer with the given parameters, which must be exactly its own."""
    module = fp_nnx.FlashAttention(**{"in_features": FEATURES, **sizes}, **fields, rngs=nnx.Rngs(0))
    own = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, params)
    nnx.update(module, params)
    return module


def pick(fields):
    """Picks the fields that the dense layer is told; it reads the rest from the parameters."""
    told = ("causal", "rope_theta", "qk_norm", "scale")
    return {name: fields[name] for name in told if name in fields}


@pytest.mark.thorough(always=["scale, RoPE, wide heads"])
@each_layer
def test_linen_equals_dense_layer(fields):
    x = normal(0, 2, LENGTH, FEATURES)
    module, params = make_linen(fields, x)
    ours = lambda p, x: module.apply({"params": p}, x)
    assert_no_worse(ours, lambda p, x: dense_layer(p, x, **pick(fields)), params, x)


@pytest.mark.thorough(always=["modern-None"])
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, None) for name in LAYERS), ("modern", jnp.bfloat16)]
)
def test_nnx_equals_linen_bit_by_bit(name, dtype):
    x = normal(0, 2, LENGTH, FEATURES)
    fields = {**LAYERS[name], "dtype": dtype}
    module, params = make_linen(fields, x)
    graph, state = nnx.split(make_nnx(fields, params), nnx.Param)

    @jax.jit
    def of_linen(params, x):
        out, pull = jax.vjp(lambda p, x: module.apply({"params": p}, x), params, x)
        return out, *pull(out)

    @jax.jit
    def of_nnx(state, x):
        out, pull = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), state, x)
        return out, *pull(out)

    out, grads, dx = of_linen(params, x)
    other_out, other_grads, other_dx = of_nnx(state, x)
    assert out.dtype == (dtype or jnp.float32)
    jax.tree.map(
        np.testing.assert_array_equal,
        (out, grads, dx),
        (other_out, nnx.to_pure_dict(other_grads), other_dx),
    )


@pytest.mark.thorough
def test_cross_attention_in_both():
    x, other = normal(0, 2, LENGTH, FEATURES), normal(1, 2, 7, 12)
    fields = {**MODERN, "causal": False, "out_features": 5}
    module, params = make_linen(fields, x, other)
    out = module.apply({"params": params}, x, other, kv_positions=3 + jnp.arange(7))
    assert out.shape == (2, LENGTH, 5)
    layer = make_nnx(fields, params, in_kv_features=12)
    np.testing.assert_array_equal(layer(x, other, kv_positions=3 + jnp.arange(7)), out)
    shifted = layer(x, other, positions=LENGTH - jnp.arange(LENGTH))
    assert np.abs(shifted - out).max() > 1e-3


def test_inputs_without_an_axis_of_tokens():
    x = normal(0, 2, LENGTH, FEATURES)
    module, params = make_linen(MODERN, x)
    for call in (lambda *a: module.apply({"params": params}, *a), make_nnx(MODERN, params)):
        with pytest.raises(ValueError, match=r"inputs has shape \(\d+,\): it must be \[\*batch"):
            call(x[0, 0])
        with pytest.raises(ValueError, match="inputs_kv has shape"):
            call(x, x[0, 0])


@pytest.mark.thorough(always=["batch1"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_batch_dimensions(batch):
    x = normal(0, *batch, LENGTH, FEATURES)
    module, params = make_linen(MODERN, x)
    out = module.apply({"params": params}, x)
    flat = module.apply({"params": params}, x.reshape(-1, LENGTH, FEATURES))
    np.testing.assert_array_equal(out.reshape(flat.shape), flat)


@pytest.mark.thorough(always=["None-None"])
@pytest.mark.parametrize(("kind", "suffix"), [(None, None), ("layer", "ln")])
def test_weights_of_flax_load(kind, suffix):
    x = normal(0, 2, LENGTH, FEATURES)
    theirs = linen.MultiHeadDotProductAttention(4, normalize_qk=kind == "layer")
    params = theirs.init(jax.random.key(1), x)
    assert (f"query_{suffix}" in params["params"]) == (kind == "layer")
    ours = fp_linen.FlashAttention(4, qk_norm=kind)
    assert_no_worse(ours.apply, theirs.apply, params, x)


def test_rope_depends_on_relative_positions_only():
    q, k = normal(0, 1, 16), normal(1, 1, 16)
    at = lambda x, position: apply_rope(x[None], jnp.asarray([position]), 100.0)[0]
    score = lambda i, j: float(jnp.vdot(at(q, i), at(k, j)))
    eps = float(jnp.finfo(jnp.float32).eps)
    norms = float(jnp.linalg.norm(q) * jnp.linalg.norm(k))
    for shift in (1, 64, 1000):
        # Of the four angles, two are up to `furthest` and two up to 10, each rounded to half an
        # eps of itself; cosine, sine, products and the sum of 16 take up to 16 eps more.
        furthest = 10 + shift
        allowed = (furthest + 10 + 16) * eps * norms
        assert abs(score(10, 3) - score(10 + shift, 3 + shift)) <= allowed
        assert abs(score(10, 3) - score(10 + shift, 3)) > allowed


def test_explicit_positions():
    x = normal(0, 2, LENGTH, FEATURES)
    module, params = make_linen(MODERN, x)
    apply = lambda positions: module.apply({"params": params}, x, positions=positions)
    default, counted = apply(None), jnp.arange(LENGTH)
    np.testing.assert_array_equal(apply(counted), default)
    np.testing.assert_array_equal(apply(jnp.stack([counted, counted])), default)
    packed = jnp.stack([counted, counted % 4])
    dense = lambda p, x: dense_layer(p, x, **pick(MODERN), positions=packed)
    ours = lambda p, x: module.apply({"params": p}, x, positions=packed)
    assert_no_worse(ours, dense, params, x)
    assert np.abs(apply(packed)[1] - default[1]).max() > 1e-3


def test_logical_axes_are_the_same_in_both():
    x = normal(0, 2, LENGTH, FEATURES)
    fields = {"num_heads": 4, "num_kv_heads": 2, "qk_norm": "rms"}
    boxed = fp_linen.FlashAttention(**fields).init(jax.random.key(1), x)["params"]
    specs = linen.get_partition_spec(boxed)
    assert tuple(specs["query"]["kernel"]) == ("embed", "heads", "kv")
    assert tuple(specs["value"]["kernel"]) == ("embed", "kv_heads", "kv")
    assert tuple(specs["key"]["bias"]) == ("kv_heads", "kv")
    assert tuple(specs["out"]["kernel"]) == ("heads", "kv", "embed")
    assert tuple(specs["out"]["bias"]) == ("embed",)
    assert tuple(specs["key_norm"]["scale"]) == ("kv",)
    layer = fp_nnx.FlashAttention(in_features=FEATURES, **fields, rngs=nnx.Rngs(0))
    assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer))) == specs


@pytest.mark.thorough
def test_parameters_are_placed_by_the_rules(devices):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    rules = (("embed", None), ("heads", "model"), ("kv_heads", "model"), ("kv", None))
    x = normal(0, 4, LENGTH, FEATURES)
    module, params = make_linen(MODERN, x)
    alone = make_nnx(MODERN, params)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        layer = fp_nnx.FlashAttention(in_features=FEATURES, **MODERN, rngs=nnx.Rngs(0))
        axes = linen.get_partition_spec(module.init(jax.random.key(1), x)["params"])
    shardings = linen.logical_to_mesh_sharding(axes, mesh, rules)
    assert tuple(shardings["value"]["kernel"].spec) == (None, "model", None)
    # nnx has placed its parameters already, linen's are placed by the caller.
    made = nnx.to_pure_dict(nnx.state(layer))
    same = lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert jax.tree.all(jax.tree.map(same, made, shardings))

    apply = jax.jit(lambda p, x: module.apply({"params": p}, x))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    placed = apply(jax.device_put(params, shardings), jax.device_put(x, rows))
    # The heads' shares of each output are now added on two devices, in another order.
    terms = MODERN["num_heads"] * MODERN["head_dim"]
    allowed = (
        terms * float(jnp.finfo(jnp.float32).eps) * np.abs(params["out"]["kernel"]).sum((0, 1))
    )
    assert np.all(np.abs(placed - alone(x)) <= allowed[None, None])


@pytest.mark.thorough(always=["None"])
@pytest.mark.parametrize("policy", [None, flash_pallas.save_attention])
def test_linen_remat(policy):
    x = normal(0, 2, LENGTH, FEATURES)
    _, params = make_linen(MODERN, x)
    remat = linen.remat(fp_linen.FlashAttention, policy=policy)(**MODERN)
    ours = lambda p, x: remat.apply({"params": p}, x)
    assert_no_worse(ours, lambda p, x: dense_layer(p, x, **pick(MODERN)), params, x)


@pytest.mark.thorough
def test_linen_scan_over_layers():
    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x):
            step = lambda layer, x, _: (x + layer(x), None)
            scan = linen.scan(
                step,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
                metadata_params={linen.PARTITION_NAME: "layers"},
            )
            return scan(fp_linen.FlashAttention(**MODERN, name="layer"), x, None)[0]

    # Two layers and a sum of squares make the largest error a matter of few numbers: with a batch
    # of 2 a leaf's is 0.6 to 3.4 times the plain version's, as the compiler rounds; of 8, to 2.4.
    x = normal(0, 8, LENGTH, FEATURES)
    boxed = Stack().init(jax.random.key(1), x)
    specs = linen.get_partition_spec(boxed)["params"]["layer"]
    assert tuple(specs["query"]["kernel"]) == ("layers", "embed", "heads", "kv")
    assert_no_worse(Stack().apply, dense_stack, linen.meta.unbox(boxed), x)


def dense_stack(variables, x):
    for index in range(2):
        params = jax.tree.map(lambda leaf, i=index: leaf[i], variables["params"]["layer"])
        x = x + dense_layer(params, x, **pick(MODERN))
    return x


@pytest.mark.thorough
def test_nnx_scan_remat_jit_and_grad():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        return fp_nnx.FlashAttention(in_features=FEATURES, **MODERN, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def run(x, layer):
        return x + layer(x)

    layers, x = make(nnx.Rngs(0)), normal(0, 2, LENGTH, FEATURES)
    graph, params = nnx.split(layers, nnx.Param)
    params = nnx.to_pure_dict(params)

    def ours(variables, x):
        state = nnx.state(layers)
        nnx.replace_by_pure_dict(state, variables["params"]["layer"])
        return run(x, nnx.merge(graph, state))

    variables = {"params": {"layer": params}}
    assert_no_worse(ours, dense_stack, variables, x)
    loss = lambda layers, x: jnp.sum(jnp.square(run(x, layers)))
    grads = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(layers, x))
    expected = jax.jit(jax.grad(lambda v: jnp.sum(jnp.square(ours(v, x)))))(variables)
    jax.tree.map(np.testing.assert_array_equal, grads, expected["params"]["layer"])


def test_no_array_is_quadratic_in_the_length():
    length = 2048
    fields = {**MODERN, "num_heads": 2, "num_kv_heads": 1}
    x = jax.ShapeDtypeStruct((1, length, FEATURES), jnp.float32)
    _, params = make_linen(fields, normal(0, 1, LENGTH, FEATURES))
    module = fp_linen.FlashAttention(**fields)
    ours = jax.grad(lambda p, x: jnp.sum(module.apply({"params": p}, x)))
    dense = jax.grad(lambda p, x: jnp.sum(dense_layer(p, x, **pick(fields))))
    count = lambda f: quadratic_arrays(jax.make_jaxpr(f)(params, x).jaxpr, length)
    assert count(dense) > 0
    assert count(ours) == 0


def test_settings_reach_the_attention():
    seen = []

    def attention(q, k, v, **settings):
        seen.append((q.shape, k.shape, v.shape, settings))
        return q

    x = normal(0, 2, LENGTH, FEATURES)
    fields = {
        **MODERN,
        "scale": 0.25,
        "backend": "xla",
        "deterministic_backward": True,
        "attention": attention,
    }
    _, params = make_linen(fields, x)
    make_nnx(fields, params)(x)
    kv = (2, LENGTH, 2, 8)
    settings = {"causal": True, "scale": 0.25, "deterministic": True, "backend": "xla"}
    assert seen == [((2, LENGTH, 4, 8), kv, kv, settings)] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, r"num_heads \(4\) .* num_kv_heads \(3\)"),
        ({"num_heads": 5}, r"features \(24\) must be a multiple of num_heads \(5\)"),
        ({"num_heads": 4, "head_dim": 3, "rope_theta": 1e4}, "even head_dim, got 3"),
        ({"num_heads": 4, "rope_theta": 0.0}, r"rope_theta is 0\.0: .*positive"),
        ({"num_heads": 4, "qk_norm": "batch"}, "qk_norm must be None, 'rms' or 'layer'"),
    ],
)
def test_contradicting_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        fp_linen.FlashAttention(**fields).init(jax.random.key(0), normal(0, LENGTH, FEATURES))
    with pytest.raises(ValueError, match=message):
        fp_nnx.FlashAttention(in_features=FEATURES, **fields, rngs=nnx.Rngs(0))


def test_positions_that_cannot_be_meant():
    x = normal(0, 2, LENGTH, FEATURES)
    module, params = make_linen(MODERN, x)
    with pytest.raises(ValueError, match=r"positions must have shape \(10,\) or \(2, 10\)"):
        module.apply({"params": params}, x, positions=jnp.arange(LENGTH + 1))
    unrotated = make_nnx({**MODERN, "rope_theta": None}, params)
    with pytest.raises(ValueError, match="positions need rope_theta"):
        unrotated(x, positions=jnp.arange(LENGTH))


def test_a_linen_layer_and_its_parameters_can_be_pickled():
    x = normal(0, 2, LENGTH, FEATURES)
    module, params = make_linen(MODERN, x)
    again, same = pickle.loads(pickle.dumps((module, params)))
    assert again == module
    np.testing.assert_array_equal(
        again.apply({"params": same}, x), module.apply({"params": params}, x)
    )


@pytest.mark.parametrize(
    "make", [jax.random.key, jax.random.PRNGKey, int], ids=["key", "raw", "int"]
)
def test_nnx_takes_a_key_or_a_seed_for_its_rngs(make):
    fields = {"num_heads": 4, "in_features": FEATURES, "dropout_rate": 0.5}
    layer = fp_nnx.FlashAttention(**fields, rngs=make(3))
    right = fp_nnx.FlashAttention(**fields, rngs=nnx.Rngs(make(3)))
    x = normal(0, 2, LENGTH, FEATURES)
    np.testing.assert_array_equal(layer.query.kernel[...], right.query.kernel[...])
    found = layer(x, deterministic=False, rngs=make(5))
    np.testing.assert_array_equal(found, right(x, deterministic=False, rngs=nnx.Rngs(make(5))))
    with pytest.raises(TypeError, match=r"rngs must be an nnx.Rngs, a key or a seed, got dict"):
        fp_nnx.FlashAttention(**fields, rngs={"params": make(3)})
