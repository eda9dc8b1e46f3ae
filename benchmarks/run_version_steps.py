"""Compares versions of this package on decoding, steps of a ring, and a bias under modifiers.

    python -m benchmarks.run_version_steps --packages flash_pallas_earlier flash_pallas \\
        --out benchmarks/results/versions_steps.json

The packages are those of run_versions.py. A version that cannot run a case is left out of its row,
which also says how far results are from the first version's: one that was wrong shows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import json
import pathlib
import statistics
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas.coverage import digests

from . import features, results, steps, timing
from .run import probes

BATCH, KEYS, HEADS, KV_HEADS = 16, 8192, 32, 8
WINDOW = 4096


class Case(NamedTuple):
    """A call.

    Attributes:
        draw: key -> arrays.
        run: (package, *arrays) -> (outputs, the last array for the next call).
        fit: (package, last array) -> the one of that version; not timed.
    """

    draw: Callable[[jax.Array], tuple]
    run: Callable[..., tuple[Any, Any]]
    fit: Callable[[Any, Any], Any] = lambda package, state: state


def _normal(key, *shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def decode(
    tokens: int = 1, head_dim: int = 128, cache: Any = None, backend: str = "hopper", **options
) -> Case:
    """Returns a case of `flash_decode`; `cache`: a dtype of eight bits."""

    def draw(key):
        a, b, c = jax.random.split(key, 3)
        shape = BATCH, KEYS, KV_HEADS
        k, v = _normal(a, *shape, head_dim), _normal(b, *shape, min(head_dim, 512))
        given = {"kv_lengths": jnp.full((BATCH,), KEYS, jnp.int32)}
        if cache is not None:
            k, v = ((16.0 * x.astype(jnp.float32)).astype(cache) for x in (k, v))
            given |= {name: jnp.full((KV_HEADS,), 1 / 16) for name in ("k_scale", "v_scale")}
        if options.get("alibi"):
            given["alibi_slopes"] = jnp.full((HEADS,), 1e-3)
        return _normal(c, BATCH, tokens, HEADS, head_dim), k, v, given

    named = {name: x for name, x in options.items() if name != "alibi"}

    def run(package, q, k, v, given):
        return package.flash_decode(q, k, v, **given, **named, backend=backend), given

    return Case(draw, run)


def ring(drafts: int = 0) -> Case:
    """Returns a step of one token on a full RingCache; a version without drafts has no spare rows.

    The ring is written in place: its buffers are those of the next step.
    """
    layer = types.SimpleNamespace(
        window=(WINDOW - 1, 0), softcap=None, scale=None, precision="default", num_splits="auto",
        backend="hopper",
    )  # fmt: skip

    def draw(key):
        a, b, c = jax.random.split(key, 3)
        new = _normal(a, 2, BATCH, 1, KV_HEADS, 128)
        tokens = _normal(b, 2, BATCH, 2 * WINDOW, KV_HEADS, 128)
        return _normal(c, BATCH, 1, HEADS, 128), new, tokens

    def fit(package, tokens):
        """Returns the ring of a sequence of these tokens."""
        kinds = importlib.import_module(f"{package.__name__}.nn._cached").RingCache
        more = {"drafts": drafts} if "written" in kinds._fields else {}
        room = kinds.empty(1, WINDOW, 1, 1, jnp.bfloat16, **more).k.shape[1]
        place = jnp.argsort(jnp.arange(2 * WINDOW - room, 2 * WINDOW) % room)
        rows = tokens[:, :, -room:][:, :, place]
        counts = (jnp.full((BATCH,), 2 * WINDOW, jnp.int32) for _ in kinds._fields[2:])
        return rows[0], rows[1], *counts

    def run(package, q, new, state):
        cached = importlib.import_module(f"{package.__name__}.nn._cached")
        o, cache = cached.attend(
            layer, cached.RingCache(*state), (q, *new), cached.New(), None, None
        )
        return o, tuple(cache)

    return Case(draw, run, fit)


def biased(head_dim: int, gradient: bool, *, of_keys: bool = False, **options) -> Case:
    """Returns a case of a bias [1, N, T, T] before a softcap or score_mod, or [4, 1, 1, T]."""
    length, heads = 2048, 2048 // head_dim
    options = {"backend": "hopper"} | options

    def draw(key):
        keys = jax.random.split(key, 5)
        arrays = [_normal(k, 4, length, heads, head_dim) for k in keys[:4]]
        shape = (4, 1, 1, length) if of_keys else (1, heads, length, length)
        return *arrays, _normal(keys[4], *shape)

    def run(package, do, q, k, v, bias):
        of = lambda q, k, v, bias: package.flash_attention(q, k, v, bias=bias, **options)
        if not gradient:
            return of(q, k, v, bias), bias
        o, pull = jax.vjp(of, q, k, v, bias)
        return (o, pull(do)), bias

    return Case(draw, run)


CASES = {
    **{f"decode T={n}": decode(n) for n in (4, 16)},
    "decode T=1, window": decode(window=(1023, 0)),
    "decode T=4, window": decode(4, window=(1023, 0)),
    "decode T=1, ALiBi": decode(alibi=True),
    "decode T=1, int8": decode(cache=jnp.int8),
    "decode T=4, int8": decode(4, cache=jnp.int8),
    "decode T=1, float8": decode(cache=jnp.float8_e4m3fn),
    **{
        f"decode T=1, {dim}, portable": decode(head_dim=dim, backend="portable")
        for dim in (128, 256, 288, 512)
    },
    "ring": ring(),
    "ring, 8 drafts": ring(drafts=8),
    **{
        f"{kind}, {name}, {dim}, {'forward' if not gradient else 'forward and backward'}": biased(
            dim, gradient, **asked, **options
        )
        for kind, asked in (
            ("bias", {}),
            ("bias of keys", {"of_keys": True}),
            ("bias, deterministic", {"deterministic": True}),
            ("bias, portable", {"backend": "portable"}),
        )
        for name, options in (
            ("softcap", {"softcap": 30.0}),
            ("score_mod", {"score_mod": features.squashed}),
        )
        for dim in (64, 128)
        for gradient in (False, True)
        if gradient or "deterministic" not in asked  # which only the backward asks for
    },
}


class Version:
    """One version's program of a case, compiled, and the last array of its next call."""

    def __init__(self, package: str, case: Case) -> None:
        module = importlib.import_module(package)
        run, self.fit = (functools.partial(f, module) for f in (case.run, case.fit))
        # The state is given away: a ring is written where it is.
        jitted = jax.jit(lambda fixed, state: run(*fixed, state), donate_argnums=1)
        *fixed, state = jax.eval_shape(case.draw, jax.random.key(0))
        state = jax.eval_shape(self.fit, state)
        lowered = jitted.lower(fixed, state)
        self.digest, self.program = digests.of(lowered), lowered.compile()
        self.fixed, self.state = fixed, state

    def give(self, inputs: tuple) -> None:
        """Gives it arrays."""
        *self.fixed, state = inputs
        self.state = jax.tree.map(jnp.copy, self.fit(state))

    def step(self):
        """Starts one call; returns its outputs."""
        found, self.state = self.program(self.fixed, self.state)
        return found


def compiled(arguments) -> dict[str, dict[str, Version]]:
    """Compiles every case for every version, side by side."""
    names = [name for name in CASES if arguments.only in name]
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        jobs = {
            (name, package): pool.submit(Version, package, CASES[name])
            for name in names
            for package in arguments.packages
        }
    made: dict[str, dict[str, Version]] = {name: {} for name in names}
    for (name, package), job in jobs.items():
        if error := job.exception():
            print(f"{name}: {package}: {steps.reason(error)}", flush=True)
        else:
            made[name][package] = job.result()
    return made


def distance(found, first) -> float:
    """Returns the largest difference of two versions' results, over the largest element."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(first), strict=True)
    pairs = [[np.asarray(x, np.float32) for x in pair] for pair in pairs]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def compare(name: str, made: dict[str, Version], timer: timing.Timer, arguments) -> dict[str, Any]:
    """Returns the row of a case: medians in ms, and each version's time over the first one's."""
    inputs = CASES[name].draw(jax.random.key(0))
    for version in made.values():
        version.give(inputs)
    first = next(iter(made))
    outputs = {package: version.step() for package, version in made.items()}
    launches = {p: timing.Launch(version.step, "jax") for p, version in made.items()}
    samples, failures = timing.interleave(timer, launches, arguments.rounds, arguments.reading_ms)
    if failures:
        raise RuntimeError(f"{name}: {failures}")
    ratios = {
        p: [x.ms / y.ms for x, y in zip(found, samples[first], strict=True)]
        for p, found in samples.items()
    }
    row = {
        "case": name,
        "ms": {p: statistics.median(x.ms for x in found) for p, found in samples.items()},
        "time_ratio": {p: statistics.median(found) for p, found in ratios.items()},
        "distance": {p: distance(found, outputs[first]) for p, found in outputs.items()},
        "same_kernels": {p: v.digest == made[first].digest for p, v in made.items()},
    }
    told = "  ".join(
        f"{p} {ratio:.3f}{' same kernels' * row['same_kernels'][p]}"
        for p, ratio in row["time_ratio"].items()
        if p != first
    )
    print(f"{name:<45} {row['ms'][first]:7.4f} ms  {told}", flush=True)
    return row


def main() -> None:
    """Parses the command line, and writes the results after every case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run_version_steps", description=__doc__
    )
    parser.add_argument("--packages", nargs="+", required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--reading-ms", type=float, default=8.0)
    parser.add_argument("--workers", type=int, default=12, help="threads that compile")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    timer, log = timing.HostTimer(), {"host": "no GPU"}
    if jax.default_backend() == "gpu":
        timer, log = timing.choose("auto", probes())
    about = {
        "summary": f"device time over that of {arguments.packages[0]}, median of "
        f"{arguments.rounds} interleaved rounds of {arguments.reading_ms} ms, bfloat16",
        "timer": timer.name,
        "timer_check": log,
    }
    found = results.header("versions of steps", about) | {"rows": []}
    made = compiled(arguments)
    for name in list(made):
        found["rows"].append(compare(name, made.pop(name), timer, arguments))
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
