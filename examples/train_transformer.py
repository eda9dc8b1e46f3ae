"""Trains a small byte-level transformer on the source of the Python standard library.

    python examples/train_transformer.py

On a CPU it takes a few minutes; on a GPU the same command trains a larger model in bfloat16. It
writes loss.csv, loss.png, sample.txt and a checkpoint, from which generate.py goes on. To compare
with JAX's own attention from the same seed:

    python examples/train_transformer.py --attention cudnn --out-dir runs/cudnn
    python examples/plot.py runs/flash/loss.csv runs/cudnn/loss.csv
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import pathlib
import time

import checkpoint
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import Windows, standard_library
from flax import nnx
from model import ATTENTIONS, ModelConfig, Transformer
from plot import plot_losses
from sample import generate
from tqdm import tqdm

from flash_pallas import explain, flash_attention

# The run on a CPU ends in about two and a half minutes on two slow cores.
_DEFAULTS = {
    "cpu": {
        "steps": 300,
        "batch": 16,
        "seq_len": 128,
        "layers": 3,
        "d_model": 128,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "learning_rate": 4e-3,
        "max_bytes": 4_000_000,
        "sample_bytes": 400,
    },
    "gpu": {
        "steps": 1000,
        "batch": 16,
        "seq_len": 2048,
        "layers": 12,
        "d_model": 768,
        "heads": 12,
        "kv_heads": 4,
        "head_dim": 64,
        "learning_rate": 1e-3,
        "max_bytes": 16_000_000,
        "sample_bytes": 1000,
    },
}

_VALIDATION_BATCHES = 4
_EVALUATIONS = 10
_LN2 = math.log(2.0)


def parse_arguments() -> argparse.Namespace:
    """Parses the flags, whose defaults depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "gpu" if jax.default_backend() == "gpu" else "cpu"
    for name, default in _DEFAULTS[device].items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help="default %(default)s")
    parser.add_argument("--attention", choices=sorted(ATTENTIONS), default="flash")
    backends = ("auto", "hopper", "cudnn", "portable", "xla")
    parser.add_argument("--backend", choices=backends, default="auto", help="of flash_pallas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out-dir", type=pathlib.Path, default=pathlib.Path("runs/flash"))
    arguments = parser.parse_args()
    if arguments.attention == "cudnn" and device != "gpu":
        parser.error(
            f"--attention cudnn needs an NVIDIA GPU and JAX runs on {jax.default_backend()} here: "
            "take --attention flash or xla-jax"
        )
    arguments.dtype = jnp.bfloat16 if device == "gpu" else jnp.float32
    return arguments


def make_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    """Returns AdamW with warm-up and cosine decay, gradients clipped; only matrices decay."""
    warmup = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=peak / warmup,
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=peak / 20,
    )
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_steps(graph, optimizer):
    """Returns (train, evaluate), jitted; train takes over the buffers of parameters and state."""

    def loss(params, window):
        logits = nnx.merge(graph, params)(window[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, state, window):
        nats, grads = jax.value_and_grad(loss)(params, window)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, nats / _LN2

    return train, jax.jit(lambda params, window: loss(params, window) / _LN2)


def describe_attention(arguments: argparse.Namespace) -> str:
    """Names the implementation of attention that runs."""
    if arguments.attention != "flash":
        return f"jax.nn.dot_product_attention, {arguments.attention}"
    shape = lambda heads: (arguments.batch, arguments.seq_len, heads, arguments.head_dim)
    query = jnp.zeros(shape(arguments.heads), arguments.dtype)
    key = jnp.zeros(shape(arguments.kv_heads), arguments.dtype)
    backend = arguments.backend
    return str(explain(flash_attention, query, key, key, causal=True, backend=backend))


def model_config(arguments: argparse.Namespace) -> ModelConfig:
    """Returns the sizes that were asked for."""
    return ModelConfig(
        **{name: getattr(arguments, name) for name in ModelConfig.__dataclass_fields__}
    )


def train(arguments: argparse.Namespace, csv_path: pathlib.Path):
    """Trains, and writes csv_path on the way.

    Returns:
        (graph, params, bits per byte on the validation text, tokens per second).
    """
    training, validation = standard_library(arguments.max_bytes)
    graph, params = nnx.split(
        Transformer(model_config(arguments), nnx.Rngs(arguments.seed)), nnx.Param
    )
    size = sum(x.size for x in jax.tree.leaves(params))
    print(f"{size:,} parameters; {len(training):,} bytes to train on, {len(validation):,} held out")
    optimizer = make_optimizer(arguments.steps, arguments.learning_rate)
    state = optimizer.init(params)
    train_step, evaluate = make_steps(graph, optimizer)
    windows = Windows(training, arguments.batch, arguments.seq_len, arguments.seed)
    held_out = Windows(validation, arguments.batch, arguments.seq_len, seed=0)
    held_out = [held_out.next() for _ in range(_VALIDATION_BATCHES)]

    every = max(1, arguments.steps // _EVALUATIONS)
    log_every = max(1, every // 5)
    clock = _Clock(arguments.batch * arguments.seq_len)
    with csv_path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "train_bits", "validation_bits", "tokens_per_second"])
        bar = tqdm(range(1, arguments.steps + 1), desc="training", unit="step", mininterval=1.0)
        for step in bar:
            params, state, bits = train_step(params, state, windows.next())
            clock.step()
            last = step == arguments.steps
            if step > 1 and not last and step % log_every and step % every:
                continue
            bits = float(bits)
            clock.stop()
            validation_bits = None
            if last or step % every == 0:
                validation_bits = float(np.mean([evaluate(params, w) for w in held_out]))
                tqdm.write(
                    f"step {step:5d}  training {bits:.3f}  validation {validation_bits:.3f} "
                    f"bits/byte  {clock.rate():,.0f} tokens/s"
                )
            rows.writerow([step, bits, validation_bits, clock.rate()])
            bar.set_postfix_str(f"{bits:.2f} bits/byte, {clock.rate():,.0f} tokens/s")
            clock.start()
    return graph, params, validation_bits, clock.rate()


class _Clock:
    """Time spent training: neither evaluation nor the first step, which compiles, counts."""

    def __init__(self, tokens: int):
        self._tokens, self._steps, self._seconds, self._since = tokens, 0, 0.0, None

    def start(self):
        self._since = time.perf_counter()

    def step(self):
        self._steps += self._since is not None

    def stop(self):
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def rate(self) -> float:
        return self._tokens * self._steps / self._seconds if self._steps else 0.0


def main() -> None:
    """Trains, then writes the picture, a checkpoint and a sample."""
    arguments = parse_arguments()
    begin = time.perf_counter()
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    print(f"device: {jax.devices()[0].device_kind}\n{describe_attention(arguments)}")
    csv_path = arguments.out_dir / "loss.csv"
    graph, params, bits, rate = train(arguments, csv_path)

    checkpoint.save(arguments.out_dir / "checkpoint", model_config(arguments), params)
    picture = arguments.out_dir / "loss.png"
    plot_losses({arguments.attention: csv_path}, picture)
    key = jax.random.key(arguments.seed)
    text = generate(graph, params, b"def ", arguments.sample_bytes, arguments.seq_len, key)
    sample_path = arguments.out_dir / "sample.txt"
    sample_path.write_bytes(text)
    print(f"\nsample:\n{text.decode(errors='replace')}\n")
    print(
        f"{bits:.3f} bits/byte on held-out files, {rate:,.0f} tokens/s, "
        f"{time.perf_counter() - begin:.0f} s in all\nwrote {csv_path}, {picture}, {sample_path}"
    )


if __name__ == "__main__":
    main()
