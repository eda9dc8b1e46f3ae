"""Trains a model of MaxText with its own GPU attention and with flash_pallas, in turns.

    python -m benchmarks.run_client --size middle --length 8192 --out results/client.json

All of it is MaxText's (0.2.5, https://github.com/AI-Hypercomputer/maxtext) except one function:
`flash_pallas.integrations.maxtext` replaces `AttentionOp.apply_attention` for one of the programs.
They are compiled in one process, take steps from the same initial weights, whose losses are
compared, and then run in turns on one training state, each round in another order. What MaxText
needs besides jax, flax and optax is in client_wheels.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import results, steps

# The sizes are Llama's way of growing; 1.1 billion parameters is the one of docs/training.md.
SIZES = {
    "tiny": {"base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 16,
             "base_mlp_dim": 128, "base_num_decoder_layers": 2, "vocab_size": 128},
    "small": {"base_emb_dim": 768, "base_num_query_heads": 12, "base_num_kv_heads": 4,
              "head_dim": 64, "base_mlp_dim": 2048, "base_num_decoder_layers": 12,
              "vocab_size": 32000},
    "middle": {"base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 4,
               "head_dim": 128, "base_mlp_dim": 5632, "base_num_decoder_layers": 22,
               "vocab_size": 32000},
}  # fmt: skip
OURS = "flash_pallas"
# MaxText's kernels for GPUs (`attention` of its configuration) and one that runs anywhere.
OWN = {
    "cudnn_flash_jax": "cuDNN by jax",
    "flash": "Pallas on Triton, of Tokamax",
    "dot_product": "einsum and softmax",
}
# cuDNN by jax is called without segment ids: packed documents would see each other.
IGNORES_SEGMENTS = ("cudnn_flash_jax",)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled training step and the compiled making of its first state.

    Attributes:
        provider: `OURS` or the name that MaxText has for its attention.
        start: makes the training state.
        step: takes state and batch, returns the next state and the loss.
        compile_seconds: of tracing, lowering and compiling the step.
        peak_bytes: bytes that the step plans to allocate besides its arguments.
    """

    provider: str
    start: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    compile_seconds: float
    peak_bytes: int


def without_xprof() -> None:
    """Lets Tokamax be imported where xprof is not installed, which reads its profiles."""
    if "xprof" in sys.modules or importlib.util.find_spec("xprof") is not None:
        return
    for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None


def configuration(arguments: argparse.Namespace, attention: str) -> Any:
    """Returns MaxText's configuration of the model."""
    without_xprof()
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # no package of Google Cloud is needed
    import maxtext
    from maxtext.configs import pyconfig

    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    return pyconfig.initialize(
        ["benchmark", base],
        run_name="benchmark",
        base_output_directory=tempfile.gettempdir(),
        decoder_block="llama2",
        attention=attention,
        dtype=arguments.dtype,
        remat_policy=arguments.remat,
        max_target_length=arguments.length,
        per_device_batch_size=arguments.batch,
        dataset_type="synthetic",
        enable_checkpointing=False,
        skip_jax_distributed_system=True,
        log_config=False,
        **SIZES[arguments.size],
    )


def batch_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns tokens [B, T], positions and segment ids (None for one document) of all steps."""
    shape = arguments.batch, arguments.length
    vocabulary = SIZES[arguments.size]["vocab_size"]
    tokens = jax.random.randint(jax.random.key(1), shape, 0, vocabulary, jnp.int32)
    each = -(-arguments.length // arguments.documents)
    index = jnp.arange(arguments.length, dtype=jnp.int32)
    whole = lambda x: jnp.broadcast_to(x, shape)
    ids = None if arguments.documents == 1 else whole(index // each + 1)
    return {"tokens": tokens, "positions": whole(index % each), "segment_ids": ids}


def compile_program(arguments: argparse.Namespace, provider: str, batch: Any) -> Program:
    """Compiles a training step by AdamW with MaxText's attention of this name, or with ours."""
    import optax
    from flax import linen, nnx

    from flash_pallas.integrations import maxtext as integration

    # Ours takes the place of what MaxText calls "flash".
    config = configuration(arguments, "flash" if provider == OURS else provider)
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    optimizer = optax.adamw(arguments.learning_rate)

    def model():
        return models.Transformer(config, mesh, quant=None, rngs=nnx.Rngs(0))

    def start():
        _, parameters, rest = nnx.split(model(), nnx.Param, ...)
        return parameters, rest, optimizer.init(parameters)

    def loss_of(parameters, rest, graph, batch):
        logits = nnx.merge(graph, parameters, rest)(
            decoder_input_tokens=batch["tokens"],
            decoder_positions=batch["positions"],
            decoder_segment_ids=batch["segment_ids"],
            enable_dropout=False,
        )
        logits, targets = logits[:, :-1].astype(jnp.float32), batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(graph, state, batch):
        parameters, rest, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, rest, graph, batch)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), rest, moments), loss

    begin = time.perf_counter()
    attention = integration.installed() if provider == OURS else mesh
    with mesh, linen.logical_axis_rules(config.logical_axis_rules), attention:
        graph, *_ = nnx.split(nnx.eval_shape(model), nnx.Param, ...)
        initial = jax.jit(start).lower().compile()
        state = jax.eval_shape(start)
        stepping = jax.jit(functools.partial(step, graph), donate_argnums=0)
        compiled = stepping.lower(state, batch).compile()
    planned = compiled.memory_analysis().temp_size_in_bytes
    return Program(provider, initial, compiled, time.perf_counter() - begin, planned)


def first_losses(program: Program, batch: Any, count: int) -> list[float]:
    """Returns the losses of the first steps from the initial weights."""
    state, found = program.start(), []
    for _ in range(count):
        state, loss = program.step(state, batch)
        found.append(float(loss))
    return found


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row of results for each provider; one that cannot run has the reason instead."""
    batch, programs, refused = batch_of(arguments), [], []
    for provider in (OURS, *arguments.own):
        try:
            programs.append(compile_program(arguments, provider, batch))
        except Exception as error:  # One that cannot run must not cost the others their numbers.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            refused.append({"provider": provider, "refused": reason})
    losses = {p.provider: first_losses(p, batch, arguments.check_steps) for p in programs}
    stepping = {p.provider: p.step for p in programs}
    state = programs[0].start() if programs else None
    seconds = steps.in_turns(stepping, state, batch, arguments.rounds, arguments.steps)
    found = []
    for program in programs:
        name, tokens = program.provider, arguments.batch * arguments.length
        readings = seconds[name]
        found.append(
            {
                "provider": name,
                "refused": None,
                "kernel": OWN.get(name),
                "tokens_per_second": tokens / statistics.median(readings),
                "step_ms": statistics.median(readings) * 1e3,
                "spread": (max(readings) - min(readings)) / statistics.median(readings),
                "step_ms_of_rounds": [reading * 1e3 for reading in readings],
                "compile_seconds": program.compile_seconds,
                "peak_bytes": program.peak_bytes,
                "first_losses": losses[name],
            }
        )
    return found + refused


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    parser.add_argument("--size", choices=SIZES, default="middle")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--documents", type=int, default=1, help="packed into each sequence")
    parser.add_argument("--own", type=lambda s: s.split(","), default=None, help=", ".join(OWN))
    parser.add_argument("--dtype", default="bfloat16", help="of activations; weights are float32")
    parser.add_argument("--remat", default="full", help="remat_policy of MaxText")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--check-steps", type=int, default=5, help="whose losses are kept")
    parser.add_argument("--steps", type=int, default=5, help="of a reading")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args(argv)
    if arguments.own is None:
        arguments.own = ["cudnn_flash_jax", "flash"] if arguments.documents == 1 else ["flash"]
    for name in arguments.own:
        if name not in OWN:
            parser.error(f"--own {name}: choose among {', '.join(OWN)}")
        if arguments.documents > 1 and name in IGNORES_SEGMENTS:
            parser.error(f"--own {name} ignores segment ids: leave it out, or --documents 1")
    return arguments


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs it, saves the results and returns them."""
    keys = ("size", "length", "batch", "documents", "dtype", "remat", "steps", "rounds")
    method = {name: getattr(arguments, name) for name in keys} | {
        "model": SIZES[arguments.size],
        "client": {name: importlib.metadata.version(name) for name in ("maxtext", "flax")},
        "summary": "training steps of MaxText (forward, backward, AdamW), wall time; the programs "
        "run in turns on one training state, medians over rounds",
    }
    found = results.header("client", method)
    found["rows"] = rows(arguments)
    results.save(arguments.out, found)
    return found


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for row in main(parse(None))["rows"]:
        name = f"{row['provider']:>16}"
        if row["refused"]:
            print(f"{name}  {row['refused']}")
        else:
            losses = " ".join(f"{loss:.4f}" for loss in row["first_losses"])
            speed = f"{row['tokens_per_second']:.0f} tokens/s"
            print(f"{name}  {speed}, step {row['step_ms']:.1f} ms, losses {losses}")
