"""Compares versions of this package with each other, in one process.

    python -m benchmarks.run_versions --out benchmarks/results/versions.json \\
        --packages flash_pallas_earlier flash_pallas_copy flash_pallas

The others are divided by the first. One of them should be a copy of it: its distance from 1 says
how far a reading can be trusted. Each package is a folder `flash_pallas` of some commit, copied
under this name to where Python finds it. Readings are short and rounds many, so that the card's
drift is the same for all. With `--blocks` tile sizes of flash_pallas are further versions:

    --blocks 'lockstep={"fused": {"ping_pong": false}}'

With `--peers fa3` providers of providers.py are timed in the same process. `--cells` has cells of
its own, as `--cells 4,4096,32,32,64 8,2048,16,16,128`, each with and without the causal mask. The
row of a cell has the largest difference of its results from the first version's, as a share of
their largest element.

With `--features` the calls of features.py are compared whose group, sizes and name have one of the
texts, instead of the cells of a suite. A version that cannot run a call is left out of its rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import itertools
import json
import multiprocessing
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import (
    feature_programs,
    features,
    gate,
    providers,
    results,
    steps,
    suites,
    timing,
    tracing,
)
from .run import DIRECTIONS, probes


def versions(arguments) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns (package, keyword arguments) of each version by its name."""
    call = arguments.call | {"backend": arguments.backend}
    found = {package: (package, call) for package in arguments.packages}
    for name, _, blocks in (given.partition("=") for given in arguments.blocks):
        found[name] = "flash_pallas", call | {"blocks": json.loads(blocks)}
    return found


def export(package: str, call: dict[str, Any], cell: suites.Cell) -> tracing.Programs:
    """Traces one version's programs for a cell in a worker process; `call`: keyword arguments."""
    attention = providers.flash_pallas_attention(cell, importlib.import_module(package), **call)
    return tracing.export(attention, gate.input_shapes(cell.shape, jnp.dtype(jnp.bfloat16)))


def make_peer(name: str, cell: suites.Cell) -> Callable[[gate.Inputs], tracing.Runner]:
    """Returns a function from inputs to a provider's Runner; programs of jax compile here."""
    provider = providers.PROVIDERS[name]
    if provider.attention is None:
        return functools.partial(provider.runner, cell)
    like = gate.input_shapes(cell.shape, jnp.dtype(jnp.bfloat16))
    return tracing.compiled(tracing.lower(provider.attention(cell), like))


def compile_all(arguments, cells: list[suites.Cell]):
    """Compiles all programs in parallel; returns functions from inputs to a Runner, by job."""
    named, workers = versions(arguments), arguments.workers
    apart = multiprocessing.get_context("spawn")
    finish = lambda t: tracing.compiled(tracing.lower_exported(t.result()))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=apart) as processes:
        jobs = itertools.product(named, cells)
        traced = {(n, cell): processes.submit(export, *named[n], cell) for n, cell in jobs}
        with concurrent.futures.ThreadPoolExecutor(2 * workers) as pool:
            made = {job: pool.submit(finish, t) for job, t in traced.items()}
            peers = itertools.product(arguments.peers, cells)
            made |= {job: pool.submit(make_peer, *job) for job in peers}
            return {job: future.result() for job, future in made.items()}


def compare(
    makers: dict[str, Any], cell: suites.Cell, timer: timing.Timer, arguments
) -> list[dict[str, Any]]:
    """Returns a row per direction: medians in ms, and each version's time over the first one's."""
    inputs = gate.random_inputs(cell.shape, jnp.dtype(jnp.bfloat16))
    runners = {package: make(inputs) for package, make in makers.items()}
    differ = differences({name: runner.results() for name, runner in runners.items()})
    rows = timed(runners, cell.label, timer, arguments)
    of = {"forward": ("o",), "backward": ("dq", "dk", "dv")}
    for row in rows:
        row["differs"] = {p: {x: d[x] for x in of[row["direction"]]} for p, d in differ.items()}
    return rows


def differences(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns how far results are from those of the first: 0.0 where all bits are the same."""
    first, *others = (
        {k: np.asarray(x, np.float32) for k, x in r.items()} for r in results.values()
    )
    far = lambda x, of: float(np.abs(x - of).max() / np.abs(of).max())
    return {
        name: {key: far(found[key], x) for key, x in first.items() if key in found}
        for name, found in zip([*results][1:], others, strict=True)
    }


def cells_of(arguments) -> list[suites.Cell]:
    """Returns the cells of the command line."""
    if not arguments.cells:
        return [cell for cell in suites.SUITES[arguments.suite] if arguments.only in cell.label]
    sizes = [suites.Shape(*map(int, text.split(","))) for text in arguments.cells]
    return [suites.Cell(*cell) for cell in itertools.product(sizes, (False, True))]


def compare_cells(arguments, timer: timing.Timer):
    """Yields the rows of each cell, all of which are compiled first."""
    cells = cells_of(arguments)
    made = compile_all(arguments, cells)
    for cell in cells:
        makers = {name: made[name, cell] for name in (*versions(arguments), *arguments.peers)}
        yield compare(makers, cell, timer, arguments)


def timed(
    runners: dict[str, Any], label: str, timer: timing.Timer, arguments
) -> list[dict[str, Any]]:
    """Returns the rows of `compare` for programs, each with `launches` by direction."""
    first, rows = next(iter(runners)), []
    for direction in arguments.directions:
        launches = {package: runner.launches[direction] for package, runner in runners.items()}
        samples, failures = timing.interleave(
            timer, launches, arguments.rounds, arguments.reading_ms
        )
        if failures:
            raise RuntimeError(f"{label} {direction}: {failures}")
        ratios = {
            package: [x.ms / y.ms for x, y in zip(found, samples[first], strict=True)]
            for package, found in samples.items()
        }
        row = {"cell": label, "direction": direction}
        row["ms"] = {p: statistics.median(x.ms for x in found) for p, found in samples.items()}
        row["time_ratio"] = {p: statistics.median(found) for p, found in ratios.items()}
        row["spread"] = {p: timing.median_and_spread(found)[1] for p, found in ratios.items()}
        rows.append(row)
        print(line(row), flush=True)
    return rows


FeatureCall = tuple[features.Group, features.Variant]


def feature_calls(texts: list[str]) -> dict[str, FeatureCall]:
    """Returns the calls of features.py that have one of these texts, by group, sizes and name."""
    every = ((group, variant) for group in features.GROUPS for variant in group.variants)
    named = {f"{g.name} {g.sizes.label} {v.name}": (g, v) for g, v in every}
    return {name: call for name, call in named.items() if any(text in name for text in texts)}


def export_call(name: str, package: str, backend: str) -> tracing.Programs:
    """Traces one version's programs of a call, in a worker process."""
    group, variant = feature_calls([name])[name]
    return feature_programs.export(group.sizes, variant, package, backend=backend)


def compare_features(arguments, timer: timing.Timer):
    """Yields the rows of each call, all of which are compiled first."""
    calls, apart = feature_calls(arguments.features), multiprocessing.get_context("spawn")
    finish = lambda job: tracing.compiled(tracing.lower_exported(job.result()))
    made: dict[str, dict[str, Any]] = {name: {} for name in calls}
    processes: concurrent.futures.Executor = concurrent.futures.ThreadPoolExecutor(1)
    if arguments.workers:
        processes = concurrent.futures.ProcessPoolExecutor(arguments.workers, mp_context=apart)
    with processes:
        traced = {
            (name, package): processes.submit(export_call, name, package, arguments.backend)
            for name, package in itertools.product(calls, arguments.packages)
        }
        with concurrent.futures.ThreadPoolExecutor(2 * arguments.workers or 1) as pool:
            jobs = {key: pool.submit(finish, job) for key, job in traced.items()}
    for (name, package), job in jobs.items():
        if error := job.exception():  # An earlier version may not have this feature.
            print(f"{name}: {package}: {steps.reason(error)}", flush=True)
        else:
            made[name][package] = job.result()
    for name, makers in made.items():
        if len(makers) > 1:
            group, variant = calls[name]
            inputs = feature_programs.inputs_of(group.sizes, variant)
            runners = {package: make(inputs) for package, make in makers.items()}
            yield timed(runners, name, timer, arguments)


def line(row: dict[str, Any]) -> str:
    """Formats a row as one line for a terminal."""
    first, *others = row["ms"]
    parts = [f"{p} {100 * (row['time_ratio'][p] - 1):+.1f} %" for p in others]
    return f"{row['cell']:<24} {row['direction']:<9} {row['ms'][first]:7.4f} ms  " + "  ".join(
        parts
    )


def main() -> None:
    """Parses the command line, runs the comparison and writes the results after every cell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_versions", description=__doc__)
    parser.add_argument("--packages", nargs="+", required=True)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--call", type=json.loads, default={}, help='as {"softcap": 50.0}')
    parser.add_argument("--blocks", nargs="+", default=[], metavar="NAME=JSON", help="tile sizes")
    parser.add_argument("--features", nargs="+", default=[], metavar="TEXT", help="not a suite")
    parser.add_argument("--suite", default="h200", choices=sorted(suites.SUITES))
    parser.add_argument("--only", default="", help="cells whose label contains this")
    parser.add_argument("--cells", nargs="+", default=[], metavar="B,T,N,K,H", help="not a suite")
    parser.add_argument("--peers", nargs="+", default=[], choices=list(providers.PROVIDERS))
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--reading-ms", type=float, default=8.0)
    parser.add_argument("--workers", type=int, default=12, help="processes that trace")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    of_cells = "call", "blocks", "only", "cells", "peers"
    if arguments.features and any(getattr(arguments, name) for name in of_cells):
        refused = ", ".join(f"--{name}" for name in of_cells)
        parser.error(f"--features has calls of its own: leave out {refused}")
    if arguments.cells and arguments.only:
        parser.error("--only chooses among the cells of a suite: leave it out with --cells")
    timer, log = timing.HostTimer(), {"host": "no GPU"}
    if jax.default_backend() == "gpu":
        timer, log = timing.choose("auto", probes())
    compare_them = compare_features if arguments.features else compare_cells
    about = {
        "summary": f"device time over that of {arguments.packages[0]}, median of "
        f"{arguments.rounds} interleaved rounds of {arguments.reading_ms} ms, bfloat16",
        "call": arguments.call,
        "blocks": arguments.blocks,
        "timer": timer.name,
        "timer_check": log,
    }
    subject = "features" if arguments.features else " ".join(arguments.cells) or arguments.suite
    found = results.header(f"versions of {subject}", about) | {"rows": []}
    for some in compare_them(arguments, timer):
        found["rows"] += some
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
