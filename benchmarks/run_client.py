"""Times training steps of MaxText with its own attention kernels for GPUs and with flash_pallas.

    python -m benchmarks.run_client --out benchmarks/results/client_speed.json
    python -m benchmarks.run_client --size tiny --kernels dot_product --steps 2

One process; every kernel has a model of the same size and the same optimizer, compiled before the
first reading. Readings are interleaved: each round times a few steps of every kernel, in an order
that changes, and the first round is dropped. A reading is wall time, which is what a user of
MaxText waits for; the result is the median of the rounds.

"flash" is MaxText's kernel of Pallas and Triton (from Tokamax), "cudnn_flash_jax" cuDNN through
JAX. In MaxText the latter drops segment ids, so each row of the batch is one document.

The machine needs maxtext and what it imports, which benchmarks/README.md lists, and no GPU for
"dot_product" and flash_pallas.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from flash_pallas.integrations import maxtext as integration

from . import results, timing
from .maxtext_model import TINY, model_of

OURS = "flash_pallas"
# 1.1 billion parameters in the middle one, that of the training tables.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "middle": {
        "base_emb_dim": 2048,
        "base_mlp_dim": 5632,
        "base_num_query_heads": 16,
        "base_num_kv_heads": 16,
        "base_num_decoder_layers": 22,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_target_length": 8192,
        "per_device_batch_size": 1.0,
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "remat_policy": "full",
        "float32_logits": False,
        "float32_qk_product": False,
    },
}


class Trained(NamedTuple):
    """A model in training.

    Attributes:
        step: compiled: (params, state) -> (params, state, loss).
        params: of the model.
        state: of the optimizer.
        losses: of the steps so far.
    """

    step: Callable
    params: Any
    state: Any
    losses: list[float]

    def steps(self, count: int) -> tuple[Trained, float]:
        """Runs steps; returns the model after them and the seconds that they took."""
        params, state, losses = self.params, self.state, list(self.losses)
        jax.block_until_ready(params)
        start, found = time.perf_counter(), []
        for _ in range(count):
            params, state, loss = self.step(params, state)
            found.append(loss)
        jax.block_until_ready((params, found))
        seconds = time.perf_counter() - start
        return Trained(self.step, params, state, losses + [float(x) for x in found]), seconds


def trained(kernel: str, sizes: dict[str, Any]) -> Trained:
    """Builds and compiles a model with one kernel, ours among them."""
    import optax
    from flax import nnx

    if kernel == OURS:
        integration.install()
    try:
        model, loss = model_of(attention="flash" if kernel == OURS else kernel, **sizes)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        optimizer = optax.sgd(1e-2, momentum=0.9)
        state = optimizer.init(params)

        def step(params, state):
            value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p, rest, copy=True)))(
                params
            )
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile()
    finally:
        integration.uninstall()
    return Trained(program, params, state, [])


def measured(kernels: list[str], sizes: dict[str, Any], steps: int, rounds: int) -> list[dict]:
    """Returns a row for every kernel: tokens per second and losses, or why it cannot run."""
    models, failed = {}, {}
    for kernel in kernels:
        try:
            models[kernel] = trained(kernel, sizes)
        except Exception as error:  # One that cannot run must not cost the others their numbers.
            failed[kernel] = f"{type(error).__name__}: {error}"
    seconds: dict[str, list[float]] = {kernel: [] for kernel in models}
    names = list(models)
    for turn in range(rounds + 1):
        for index in timing.order(len(names), turn):
            models[names[index]], took = models[names[index]].steps(steps)
            if turn:
                seconds[names[index]].append(took / steps)
    tokens = tokens_of(sizes)
    rows = [
        {
            "kernel": kernel,
            "tokens_per_second": tokens / statistics.median(taken),
            "step_ms": 1e3 * statistics.median(taken),
            "step_ms_of_rounds": [1e3 * x for x in taken],
            "losses": models[kernel].losses,
            "refused": None,
        }
        for kernel, taken in seconds.items()
    ]
    return rows + [{"kernel": kernel, "refused": why} for kernel, why in failed.items()]


def tokens_of(sizes: dict[str, Any]) -> int:
    """Returns the tokens of a step."""
    fields = TINY | sizes
    return int(fields["per_device_batch_size"]) * fields["max_target_length"]


def main() -> None:
    """Measures what the command line names, prints it and writes it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_client", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="middle")
    parser.add_argument("--length", type=int, help="tokens a row, in place of the size's own")
    parser.add_argument("--kernels", nargs="+", default=["flash", "cudnn_flash_jax"])
    parser.add_argument("--steps", type=int, default=5, help="steps of a reading")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    sizes = dict(SIZES[given.size])
    if given.length is not None:
        sizes["max_target_length"] = given.length
    rows = measured([OURS, *given.kernels], sizes, given.steps, given.rounds)
    method = {"sizes": TINY | sizes, "steps": given.steps, "rounds": given.rounds}
    found = results.header("client", method) | {"rows": rows}
    found["versions"] |= {name: importlib.metadata.version(name) for name in ("maxtext", "flax")}
    for row in rows:
        said = (
            row["refused"] or f"{row['tokens_per_second']:,.0f} tokens/s, {row['step_ms']:.2f} ms"
        )
        print(f"{row['kernel']}: {said}")
    if given.out is not None:
        results.save(given.out, found)


if __name__ == "__main__":
    main()
