"""Trains a small byte-level transformer on long packed documents, on all devices at hand.

    python examples/train_long_context.py

The batch is sharded over the mesh axis "data" and every sequence over the axis "context", whose
devices send K and V round in a ring (`--strategy`). Parameters and the optimizer's state are
sharded over all devices and gathered one block at a time (FSDP). A CPU pretends to be four devices.
With several processes, on one machine or on many, start it once for each:

    python examples/train_long_context.py --coordinator localhost:9876 --processes 2 --process 0 &
    python examples/train_long_context.py --coordinator localhost:9876 --processes 2 --process 1
"""

from __future__ import annotations

import argparse
import functools
import math
import time

import jax
import jax.numpy as jnp
import optax
from data import PackedDocuments, documents
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model import ModelConfig, Transformer

from flash_pallas import save_attention
from flash_pallas.parallel import ContextParallel, zigzag_positions

_DEFAULTS = {
    "cpu": {
        "steps": 30,
        "batch": 4,
        "seq_len": 1024,
        "layers": 2,
        "d_model": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "max_bytes": 2_000_000,
    },
    "gpu": {
        "steps": 100,
        "batch": 1,
        "seq_len": 131_072,
        "layers": 12,
        "d_model": 1024,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "max_bytes": 16_000_000,
    },
}


def parse_arguments() -> argparse.Namespace:
    """Parses the flags; `start` fills in the sizes that depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in _DEFAULTS["cpu"]:
        sizes = " or ".join(f"{found[name]:,} on a {device}" for device, found in _DEFAULTS.items())
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=f"default {sizes}")
    parser.add_argument("--context", type=int, default=2, help="devices that share a sequence")
    parser.add_argument("--strategy", default="ring", help="ring, all_gather or ulysses")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    backends = ("auto", "hopper", "cudnn", "portable", "xla")
    parser.add_argument("--backend", choices=backends, default="auto", help="of flash_pallas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-devices", type=int, default=4, help="to pretend, in each process")
    parser.add_argument("--coordinator", help="address of process 0; None is a single process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="number of this one")
    return parser.parse_args()


def start(arguments: argparse.Namespace) -> jax.sharding.Mesh:
    """Joins the other processes and returns the mesh of all devices."""
    jax.config.update("jax_num_cpu_devices", arguments.cpu_devices)
    if arguments.coordinator is not None:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
    device = "gpu" if jax.default_backend() == "gpu" else "cpu"
    for name, default in _DEFAULTS[device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    shape = (jax.device_count() // arguments.context, arguments.context)
    return jax.make_mesh(shape, ("data", "context"), axis_types=(AxisType.Auto,) * 2)


def make_model(arguments: argparse.Namespace, mesh: jax.sharding.Mesh) -> Transformer:
    """Makes the model, whose sequences lie in zigzag layout."""
    context = ContextParallel("context", arguments.strategy, "zigzag", batch_axis="data", mesh=mesh)
    config = ModelConfig(
        layers=arguments.layers,
        d_model=arguments.d_model,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        dtype=jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32,
        backend=arguments.backend,
        attention="flash",
    )
    return Transformer(config, nnx.Rngs(arguments.seed), context_parallel=context)


def cut(mesh: jax.sharding.Mesh, x) -> NamedSharding:
    """Returns a sharding that splits, over all devices, the longest axis that they divide."""
    fitting = [i for i, size in enumerate(x.shape) if size % mesh.size == 0]
    spec = [None] * x.ndim
    if fitting:
        spec[max(fitting, key=lambda i: x.shape[i])] = mesh.axis_names
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_loss(graph, mesh: jax.sharding.Mesh):
    """Returns (params, batch) -> nats per byte.

    Each block gathers its parameters, in the forward and again in the backward.
    """

    def gathered(graph, params):
        whole = NamedSharding(mesh, PartitionSpec())
        return nnx.merge(graph, jax.lax.with_sharding_constraint(params, whole))

    @functools.partial(jax.checkpoint, policy=save_attention, static_argnums=0)
    def block(graph, params, x, packed):
        return gathered(graph, params)(x, **packed)

    def loss(params, batch):
        model = nnx.merge(graph, params)
        packed = {name: batch[name] for name in ("segment_ids", "positions")}
        x = gathered(*nnx.split(model.embed))(batch["tokens"])
        for one in model.blocks:
            x = block(*nnx.split(one), x, packed)
        x = gathered(*nnx.split(model.norm))(x)
        logits = gathered(*nnx.split(model.logits))(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return loss


def make_step(loss, optimizer, shardings):
    """Returns (params, state, batch) -> (params, state, bits per byte before the step)."""

    def step(params, state, batch):
        nats, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, nats / math.log(2.0)

    # Lets what the ring sends overlap with attention; on two H200 no faster, nor slower.
    scheduler = {"xla_gpu_enable_latency_hiding_scheduler": True}
    options = scheduler if jax.default_backend() == "gpu" else None
    placed = (*shardings, None)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=placed, compiler_options=options)


def train(arguments: argparse.Namespace, mesh: jax.sharding.Mesh) -> None:
    """Trains, and prints on the way."""
    say = print if jax.process_index() == 0 else lambda *_: None
    make = lambda: nnx.state(make_model(arguments, mesh), nnx.Param)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make_model(arguments, mesh)), nnx.Param)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(arguments.learning_rate, b2=0.95)
    )
    of_all = functools.partial(jax.tree.map, functools.partial(cut, mesh))
    shardings = of_all(shapes), of_all(jax.eval_shape(optimizer.init, shapes))
    params = jax.jit(make, out_shardings=shardings[0])()
    state = jax.jit(optimizer.init, out_shardings=shardings[1])(params)
    step = make_step(make_loss(graph, mesh), optimizer, shardings)

    size = sum(x.size for x in jax.tree.leaves(params))
    local = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(params))
    say(f"{jax.device_count()} devices in {jax.process_count()} processes: {dict(mesh.shape)}")
    say(f"{size:,} parameters, {local:,} of them on each device")
    batches = PackedDocuments(
        documents(arguments.max_bytes), arguments.batch, arguments.seq_len, arguments.seed
    )
    order = zigzag_positions(arguments.seq_len, arguments.context)
    placed = NamedSharding(mesh, PartitionSpec("data", "context"))
    # Every process has the whole batch and gives away what its devices hold.
    place = lambda x: jax.make_array_from_callback(x.shape, placed, lambda part: x[part])
    since = 0.0
    for number in range(1, arguments.steps + 1):
        batch = {name: place(x[:, order]) for name, x in batches.next().items()}
        params, state, bits = step(params, state, batch)
        if number in (1, arguments.steps) or number % max(1, arguments.steps // 10) == 0:
            say(f"step {number:4d}  {float(bits):.4f} bits/byte")
        since = time.perf_counter() if number == 1 else since  # which compiled
    tokens = (arguments.steps - 1) * arguments.batch * arguments.seq_len
    say(f"{tokens / (time.perf_counter() - since):,.0f} tokens/s")


def main() -> None:
    """Parses the flags, joins the other processes and trains."""
    arguments = parse_arguments()
    train(arguments, start(arguments))


if __name__ == "__main__":
    main()
