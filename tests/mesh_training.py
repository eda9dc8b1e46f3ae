"""Training of the model of `make demo` over a mesh, for CPUs and GPUs.

Every size but the length is a power of two, so that in a compiled program an array of a multiple of
three elements has tokens, and a parameter has not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flash_pallas import flash_attention
from flash_pallas.parallel import ContextParallel, to_zigzag

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "model.py"
STEPS, VOCABULARY = 5, 256
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# How parameters are sharded at rest, by the module that has them; other ones are whole. "model" is
# also called "tensor".
SHARDED = {
    "query": ("fsdp", "model", None),
    "key": ("fsdp", "model", None),
    "value": ("fsdp", "model", None),
    "out": ("model", None, "fsdp"),
    "gate": ("fsdp", "model"),
    "up": ("fsdp", "model"),
    "down": ("model", "fsdp"),
    "embed": ("model", "fsdp"),
    "logits": ("fsdp", "model"),
}
ATTENTION = ("query", "key", "value", "out")
HALF = "flash in bfloat16"  # a key of the example's ATTENTIONS, next to "flash"
# Strategy and layout of sequences, by the axis that shards them.
SEQUENCES = {"context": ("ring", "zigzag"), "sequence": ("ulysses", "contiguous")}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model and its data.

    Attributes:
        sizes: layers, d_model, heads, kv_heads and head_dim of the model.
        batch: sequences of a step.
        length: tokens of a sequence, three times a power of two.
    """

    sizes: dict[str, int]
    batch: int
    length: int

    def model(self, attention: str = "flash", backend: str = "auto", context=None):
        """Makes (parameters, (parameters, one-hot tokens) -> logits), in float32."""
        kinds = {"dtype": jnp.float32, "backend": backend, "attention": attention}
        example = _example()
        make = example.Transformer
        model = make(example.ModelConfig(**self.sizes, **kinds), nnx.Rngs(0), context)
        graph, params = nnx.split(model, nnx.Param)

        def apply(params, tokens):
            model = nnx.merge(graph, nnx.State(params))
            x = tokens @ model.embed.embedding[...]
            for block in model.blocks:
                x = block(x)
            return model.logits(model.norm(x))

        return params, apply

    def data(self):
        """Draws (tokens, next tokens) [STEPS, B, T], from a text that repeats."""
        rng = np.random.default_rng(0)
        text = np.tile(rng.integers(0, VOCABULARY, 23), 99)
        starts = rng.integers(0, 1000, (STEPS, self.batch))
        drawn = [[text[s : s + self.length + 1] for s in row] for row in starts]
        drawn = np.stack(drawn).astype(np.int32)
        return drawn[..., :-1], drawn[..., 1:]


@functools.cache
def _example():
    """Loads the module of the model of `make demo`."""
    spec = importlib.util.spec_from_file_location("demo_model", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where its dataclass looks for its names
        spec.loader.exec_module(module)
    module.ATTENTIONS[HALF] = attention_in_bfloat16
    return module


def attention_in_bfloat16(q, k, v, **options):
    """Computes attention of float32 arrays by the kernels for bfloat16."""
    o = flash_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), **options)
    return o.astype(q.dtype)


def module_of(path) -> str:
    """Returns the name of the module whose kernel or embedding this is, or ""."""
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    names = [name for name in names if name != "value"]
    return names[-2] if names[-1] in ("kernel", "embedding") else ""


def shardings(params, mesh):
    """Returns the sharding of every parameter, as it lies at rest."""
    other = {"model": "tensor"} if "tensor" in mesh.axis_names else {}

    def of(path, _):
        axes = (other.get(axis, axis) for axis in SHARDED.get(module_of(path), ()))
        return NamedSharding(mesh, P(*(a if a in mesh.axis_names else None for a in axes)))

    return jax.tree.map_with_path(of, params)


def gather_others(params):
    """Gathers parameters for FSDP on Explicit axes, except attention's, which it gathers itself."""

    def gathered(path, x):
        return x if module_of(path) in ATTENTION else jax.sharding.reshard(x, P())

    return jax.tree.map_with_path(gathered, params)


def gather_fsdp(mesh, params):
    """Gathers on Auto axes what "fsdp" shards, so that XLA does not gather activations instead."""

    def whole(x):
        return NamedSharding(mesh, P(*(None if a == "fsdp" else a for a in x.spec)))

    return jax.lax.with_sharding_constraint(params, jax.tree.map(whole, shardings(params, mesh)))


def train(apply, params, data, prepare=lambda params: params, rows=None):
    """Trains a step on each batch.

    Args:
        apply: (parameters, one-hot tokens) -> logits.
        params: parameters.
        data: tokens and next tokens, [STEPS, B, T] each.
        prepare: transforms the parameters before a step reads them.
        rows: sharding of the batch in the loss, or None.

    Returns:
        Parameters, losses, and the text of the compiled step.

    Raises:
        AssertionError: a loss is not below the one before.
    """
    # Not Adam, which would make much of gradients that are nothing but rounding. At ten times this
    # rate the loss grows, and errors of the same size with it, by chance (benchmarks/NOTES.md).
    optimizer = optax.sgd(0.05, momentum=0.9)

    def loss(params, tokens, targets):
        logits = apply(prepare(params), jax.nn.one_hot(tokens, VOCABULARY))
        if rows is not None:
            logits = jax.sharding.reshard(logits, rows)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(params, state, tokens, targets):
        found, grads = jax.value_and_grad(loss)(params, tokens, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, found

    state, losses = optimizer.init(params), []
    # Parameters stay as they lie; an optimizer on one device has no sharding to keep.
    placed = [jax.tree.map(lambda x: x.sharding, tree) for tree in (params, state)]
    tokens, targets = data
    program = jax.jit(step, out_shardings=(*placed, None))
    program = program.lower(params, state, tokens[0], targets[0]).compile()
    for tokens, targets in zip(*data, strict=True):
        params, state, found = program(params, state, tokens, targets)
        losses.append(float(found))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1.0, losses
    return params, losses, program.as_text()


def train_on(setting: Setting, axes: dict[str, int], types, devices, **kinds: Any):
    """Trains over a mesh of these axes; returns what `train` does.

    Args:
        setting: sizes.
        axes: sizes of the axes of the mesh, by name.
        types: kind of the axes.
        devices: as many as the mesh has, or more.
        **kinds: attention and backend of the model.
    """
    number = int(np.prod(list(axes.values())))
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), (types,) * len(axes), devices=devices[:number]
    )
    batch = tuple(a for a in axes if a in ("data", "fsdp")) or None
    sequence = next((a for a in axes if a in SEQUENCES), None)
    context, data = None, setting.data()
    if sequence is not None:
        strategy, layout = SEQUENCES[sequence]
        heads = next((a for a in axes if a in ("model", "tensor")), None)
        context = ContextParallel(sequence, strategy, layout, batch_axis=batch, head_axis=heads)
        if layout == "zigzag":
            data = tuple(np.asarray(to_zigzag(x, axes[sequence], axis=2)) for x in data)
    rows = P(batch, sequence)
    explicit = types == AxisType.Explicit
    with jax.set_mesh(mesh):
        params, apply = setting.model(context=context, **kinds)
        placed = jax.device_put(params, shardings(params, mesh))
        cut = jax.device_put(data, NamedSharding(mesh, P(None, *rows)))
        how = {"prepare": functools.partial(gather_fsdp, mesh)}
        how = {"prepare": gather_others, "rows": rows} if explicit else how
        return train(apply, placed, cut, **how)


def gathered_tokens(text: str) -> list[tuple[int, ...]]:
    """Returns what a compiled step gathers from several devices and has tokens: sizes, sorted.

    XLA may transpose. An operation that only starts has its operands among its results, in front.
    """
    found = []
    for line, start in re.findall(r"= (.*?) all-gather(-start)?\(", text):
        shapes = re.findall(r"\w+\[([\d,]+)\]", line)
        found += shapes[len(shapes) // 2 if start else 0 :]
    sizes = (tuple(sorted(int(n) for n in shape.split(","))) for shape in found)
    return [each for each in sizes if math.prod(each) % 3 == 0]


def assert_local(setting: Setting, axes: dict[str, int], text: str) -> None:
    """Asserts that attention's kernels run on each shard: a step gathers no q, k or v.

    The gradient of v may be gathered where heads are sharded, once a layer: XLA sends less so than
    by summing the gradient of the layer's input, which is wider.
    """
    gathered = gathered_tokens(text)
    if "model" in axes or "tensor" in axes:
        rows = setting.batch // math.prod(axes.get(name, 1) for name in ("data", "fsdp"))
        tokens = setting.length // math.prod(axes.get(name, 1) for name in SEQUENCES)
        widths = setting.sizes["kv_heads"], setting.sizes["head_dim"]
        values = [x for x in gathered if x == tuple(sorted((rows, tokens, *widths)))]
        if len(values) <= setting.sizes["layers"]:
            gathered = [x for x in gathered if x not in values]
    assert not gathered, f"a step over {axes} gathers {gathered}"
