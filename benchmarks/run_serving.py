"""Times the mixes of serving.py: ragged_paged_attention, its parts, and what could run instead.

    python -m benchmarks.run_serving --out results/serving.json

Every program must first agree with the same attention in float32, within twice the error of jnp in
bfloat16. Times are of one layer.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import results, serving, timing
from .run import prepare_process, probes
from .run_decode import gate
from .serving import LAYERS, MIXES, Arrays, Mix

WHOLE = "all in one call"


def programs(mix: Mix, backend: str) -> dict[str, tuple[Callable, dict[str, Any]]]:
    """Returns what is timed, by name: (function of Arrays, integers of its call)."""
    kinds = {queries == 1 for queries, _ in mix.sequences}
    whole = functools.partial(serving.ragged, backend=backend)
    found = {WHOLE: (whole, mix.integers())}
    decode = functools.partial(serving.steps, backend=backend)
    if kinds == {True}:
        found["flash_decode"] = (decode, mix.integers())
    elif kinds == {False} and len(set(mix.sequences)) == 1:
        run = functools.partial(serving.contiguous, mix, backend=backend)
        found["flash_attention"] = (run, mix.integers())
    else:
        found["its steps alone"] = (whole, mix.integers(lambda queries: queries == 1))
        found["its chunks alone"] = (whole, mix.integers(lambda queries: queries > 1))
    if mix.prefix:
        for name, given in (("found", "auto"), ("given", mix.prefix)):
            shares = functools.partial(whole, shared_prefix=given)
            found[f"prefix shared, {name}"] = (shares, mix.integers())
        if kinds == {True}:
            shares = functools.partial(decode, shared_prefix="auto")
            found["flash_decode, prefix shared"] = (shares, mix.integers())
    return found


@jax.jit
def references(arrays: Arrays):
    """Computes the first layer: (in float32, by jnp in the dtype of the arrays)."""
    layer = Arrays(*(x[:1] for x in arrays[:3]), arrays.integers)
    wide = Arrays(*(x.astype(jnp.float32) for x in layer[:3]), arrays.integers)
    with jax.default_matmul_precision("highest"):
        exact = serving.ragged(wide, backend="xla")
    return exact[0], serving.ragged(layer, backend="xla")[0]


def admit(name: str, run: Callable, arrays: Arrays) -> tuple[timing.Launch, float]:
    """Compiles and checks a program; returns (the launch to time, share of the allowed error).

    Raises:
        ValueError: a wrong result.
    """
    compiled = jax.jit(run).lower(arrays).compile()
    used = 0.0
    if name != "flash_attention":  # its keys lie elsewhere, and others check it
        count = int(arrays.integers["cu_q_lens"][-1])
        outputs = compiled(arrays)[0], *references(arrays)
        used = float(gate(*(x[:count] for x in outputs)))
        if not used <= 1.0:
            raise ValueError(f"wrong result: {used:.3g} times the allowed error")
    return timing.Launch(lambda: compiled(arrays), "jax"), used


def run_mix(mix: Mix, backend: str, timer: timing.Timer, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each program of a mix."""
    arrays, contestants, said, refused = mix.arrays(), {}, {}, {}
    asked = programs(mix, backend)
    for name, (run, integers) in asked.items():
        try:
            contestants[name], said[name] = admit(name, run, arrays._replace(integers=integers))
        except Exception as error:  # One's failure must not cost the others their numbers.
            refused[name] = f"{type(error).__name__}: {error}"[:300]
    samples, failures = timing.interleave(timer, contestants, rounds)
    rows = []
    for name in asked:
        row = {"mix": mix.name, "sequences": len(mix.sequences), "tokens": mix.tokens}
        row |= {"page_size": mix.page_size, "call": name, "gate": said.get(name)}
        row |= {"refused": refused.get(name) or failures.get(name), "ms": None}
        if own := samples.get(name):
            ms, spread = timing.median_and_spread([sample.ms / LAYERS for sample in own])
            row |= {"ms": ms, "spread": spread, "launches": own[-1].launches / LAYERS}
            row |= {"speed": timing.speed_ratio(samples[WHOLE], own) if WHOLE in samples else None}
            if name in (WHOLE, "flash_attention", "flash_decode"):
                row |= {"tflops": mix.flops / ms / 1e9, "gb_per_s": mix.kv_bytes / ms / 1e6}
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """Formats one row for a terminal."""
    head = f"{row['mix']:<24} {row['call']:<22}"
    if row["ms"] is None:
        return f"{head} {row['refused']}"[:200]
    text = f"{head} {row['ms'] * 1e3:9.1f} us  speed {row['speed'] or 0:5.2f}"
    if "tflops" in row:
        text += f"  {row['tflops']:5.0f} TFLOP/s  {row['gb_per_s']:5.0f} GB/s"
    return f"{text}  launches {row['launches']:.1f}  gate {row['gate']:.2f}"


def run(arguments, timer: timing.Timer, log: dict[str, Any]) -> None:
    """Times all mixes; the file is saved after each of them."""
    begin = time.monotonic()
    summary = (
        f"us of device time for one of {LAYERS} layers, and the speed as a ratio to all in one "
        f"call; bfloat16; {timer.name}; median of {arguments.rounds} interleaved rounds."
    )
    method = {"summary": summary, "timer": timer.name, "timer_check": log}
    found: dict[str, Any] = results.header("serving", method) | {"rows": []}
    for mix in MIXES:
        if not any(part in mix.name for part in arguments.only):
            continue
        if time.monotonic() - begin > arguments.time_limit:
            print(f"time is up before {mix.name}")
            break
        rows = run_mix(mix, arguments.backend, timer, arguments.rounds)
        found["rows"] += rows
        print("\n".join(map(line, rows)), flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Parses the command line, chooses a timer and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="*", default=[""], help="mixes whose name contains one")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds; no mix after")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    prepare_process(arguments.time_limit + 300)
    timer, log = timing.choose("auto", probes())
    print(f"timer: {timer.name}\n{log}", flush=True)
    run(arguments, timer, log)


if __name__ == "__main__":
    main()
