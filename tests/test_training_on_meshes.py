"""Training whose batch, parameters and heads are sharded gives the parameters of one device."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flash_pallas.nn.linen import FlashAttention

pytestmark = pytest.mark.usefixtures("quickly")

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "model.py"
BATCH, LENGTH, STEPS, WIDTH, VOCABULARY = 8, 16, 5, 32, 256
MESHES = {"2 x 2": {"data": 2, "tensor": 2}, "8 devices": {"data": 2, "fsdp": 2, "tensor": 2}}
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# How parameters are sharded at rest, by the module that has them; other ones are whole.
SHARDED = {
    "query": ("fsdp", "tensor", None),
    "key": ("fsdp", "tensor", None),
    "value": ("fsdp", "tensor", None),
    "out": ("tensor", None, "fsdp"),
    "gate": ("fsdp", "tensor"),
    "up": ("fsdp", "tensor"),
    "down": ("tensor", "fsdp"),
    "embed": ("tensor", "fsdp"),
    "logits": ("fsdp", "tensor"),
}
# Parameters are of order one. Five steps add float32 sums of up to 2,048 terms in another order.
ATOL = 1e-5
ATTENTION = ("query", "key", "value", "out")


def nnx_model():
    """Loads the model of `make demo`: (parameters, (parameters, one-hot tokens) -> logits)."""
    spec = importlib.util.spec_from_file_location("demo_model", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where its dataclass looks for its names
        spec.loader.exec_module(module)
    sizes = {"layers": 2, "d_model": WIDTH, "heads": 4, "kv_heads": 2, "head_dim": 8}
    kinds = {"dtype": jnp.float32, "backend": "auto", "attention": "flash"}
    model = module.Transformer(module.ModelConfig(**sizes, **kinds), nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)

    def apply(params, tokens):
        model = nnx.merge(graph, nnx.State(params))
        x = tokens @ model.embed.embedding[...]
        for block in model.blocks:
            x = block(x)
        return model.logits(model.norm(x))

    return params, apply


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
        return linen.Dense(VOCABULARY, name="logits")(x)


def linen_model():
    model = LinenModel()
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH, VOCABULARY)))
    return linen.meta.unbox(params), model.apply


MODELS = {"linen": linen_model, "nnx": nnx_model}


def module_of(path) -> str:
    """Returns the name of the module whose kernel or embedding this is, or ""."""
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    names = [name for name in names if name != "value"]
    return names[-2] if names[-1] in ("kernel", "embedding") else ""


def shardings(params, mesh):
    """Returns the sharding of every parameter, as it lies at rest."""

    def of(path, _):
        axes = SHARDED.get(module_of(path), ())
        return NamedSharding(mesh, P(*(a if a in mesh.axis_names else None for a in axes)))

    return jax.tree.map_with_path(of, params)


def batches():
    """Draws tokens of every step, from a text that repeats, so that there is something to learn."""
    rng = np.random.default_rng(0)
    text = np.tile(rng.integers(0, VOCABULARY, 23), 99)
    starts = rng.integers(0, 1000, (STEPS, BATCH))
    return np.stack([[text[s : s + LENGTH + 1] for s in row] for row in starts]).astype(np.int32)


def train(apply, params, batches, prepare=lambda params: params, rows=None):
    """Trains a step on every batch; returns the parameters and the losses.

    Args:
        prepare: transforms the parameters before a step reads them.
        rows: sharding of the batch in the loss, or None.
    """
    # Not Adam, which would make much of gradients that are nothing but rounding.
    optimizer = optax.sgd(0.5, momentum=0.9)

    def loss(params, tokens):
        logits = apply(prepare(params), jax.nn.one_hot(tokens[:, :-1], VOCABULARY))
        if rows is not None:
            logits = jax.sharding.reshard(logits, rows)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(params, state, tokens):
        found, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, found

    state, losses = optimizer.init(params), []
    for tokens in batches:
        params, state, found = step(params, state, tokens)
        losses.append(float(found))
    return params, losses


def gather_others(params):
    """Gathers parameters for FSDP on Explicit axes, except attention's, which it gathers itself."""

    def gathered(path, x):
        return x if module_of(path) in ATTENTION else jax.sharding.reshard(x, P())

    return jax.tree.map_with_path(gathered, params)


@pytest.mark.thorough(always=["nnx-2 x 2-explicit"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_five_steps(eight_devices, model, sizes, types):
    number = int(np.prod(list(sizes.values())))
    kinds = (types,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=eight_devices[:number])
    params, apply = model()
    expected, losses = train(apply, params, batches())
    assert losses[-1] < losses[0] - 0.5
    rows = P(tuple(a for a in sizes if a != "tensor"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        cut = jax.device_put(batches(), NamedSharding(mesh, P(None, *rows)))
        explicit = types == AxisType.Explicit
        how = {"prepare": gather_others, "rows": rows} if explicit else {}
        found, _ = train(apply, placed, cut, **how)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), expected, params)
    assert min(jax.tree.leaves(moved)) > 1e-3
    close = partial(np.testing.assert_allclose, rtol=0.0, atol=ATOL)
    jax.tree.map(lambda a, b: close(jax.device_get(a), b), found, expected)
