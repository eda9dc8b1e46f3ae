"""Times a MeanFlow step of a diffusion transformer of 130 million parameters.

    python -m benchmarks.run_mean_flow --out results/mean_flow.json

Three steps of one model, examples/mean_flow.py, in turns: with the derivative along the flow by
flash_attention, the same by dense jnp, and without the derivative (plain flow matching), which says
what the derivative costs. A step is the loss and its gradient; bfloat16 but for the parameters.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from examples import mean_flow
from flash_pallas import flash_attention

from . import results, steps, tables, timing
from .run import prepare_process, probes

# That of DiT-B (arXiv:2212.09748).
LAYERS, WIDTH, HEADS = 12, 768, 12


def dense(q, k, v, **_):
    """Computes attention as jax.nn does without a kernel; heads of [B, T, N, H]."""
    return jax.nn.dot_product_attention(q, k, v, implementation="xla")


def flow_matching_loss(velocity, params, x, noise, times):
    """Computes the loss of mean_flow_loss for r = t: without the derivative along the flow."""
    _, t = times
    wide = t[:, None, None]
    u = velocity(params, (1 - wide) * x + wide * noise, t, t)
    return jnp.mean((u - (noise - x)) ** 2)


def steps_of(layers: int, width: int, heads: int):
    """Returns the steps by name: functions of (params, x, noise, times), and the model."""
    model = functools.partial(mean_flow.MeanVelocity, layers=layers, width=width, heads=heads)
    half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    def step(loss, attention):
        apply = model(attention=attention).apply
        of = lambda params, *batch: loss(apply, half(params), *batch)
        return jax.value_and_grad(of)

    with_jvp = lambda *args: mean_flow.mean_flow_loss(*args)[0]
    return {
        "MeanFlow, flash_attention": step(with_jvp, flash_attention),
        "MeanFlow, dense jnp": step(with_jvp, dense),
        "flow matching, flash_attention": step(flow_matching_loss, flash_attention),
    }, model()


def rows(arguments, timer) -> list[dict[str, Any]]:
    """Returns the rows of one batch and length."""
    found, model = steps_of(arguments.layers, arguments.width, arguments.heads)
    shape = arguments.batch, arguments.length, arguments.channels
    keys = jax.random.split(jax.random.key(0), 3)
    x, noise = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    times = jnp.full(shape[0], 0.2, jnp.bfloat16), jnp.full(shape[0], 0.7, jnp.bfloat16)
    params = jax.jit(model.init)(keys[2], noise, *times)
    count = sum(p.size for p in jax.tree.leaves(params))
    found, samples = steps.compare(found, (params, x, noise, times), timer, arguments.rounds)
    usual = samples.get("flow matching, flash_attention")
    for row in found:
        ratio, own = None, samples.get(row["step"])
        if usual and own:
            ratio = timing.speed_ratio(own, usual)
        row["shape"], row["parameters"] = ",".join(map(str, shape)), count
        row["times_flow_matching"] = ratio
        print(row, flush=True)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    sizes = {"batch": 4, "length": 4096, "channels": 16, "rounds": 8}
    sizes |= {"layers": LAYERS, "width": WIDTH, "heads": HEADS}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    return parser.parse_args(argv)


def main(arguments: argparse.Namespace) -> None:
    """Runs it and prints the table."""
    timer, log = timing.choose("cupti", probes())
    summary = (
        "ms of the loss and its gradient, GiB besides parameters, data and results; a diffusion "
        f"transformer in bfloat16; {timer.name}; median of {arguments.rounds} interleaved rounds."
    )
    found = results.header("mean_flow", {"summary": summary, "timer_check": log})
    found["rows"] = rows(arguments, timer)
    results.save(arguments.out, found)
    print(tables.render(found))


if __name__ == "__main__":
    given = parse(None)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepare_process(3600)
    main(given)
