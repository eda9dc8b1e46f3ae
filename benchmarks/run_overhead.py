"""Compares device time with wall time.

    python -m benchmarks.run_overhead --out results/overhead.json

The wall time of XLA's default, which replays parts of a program as CUDA graphs, is taken by a
process of its own: CUPTI would not see their kernels, so the process that reads the device's time
runs without them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax

from . import gate, overhead, results, suites, tables, timing
from .run import prepare_process, probes

REPEATS = 100  # launches of a reading, at most


class Job(NamedTuple):
    """One thing to launch, compiled, or the reason why it cannot be."""

    shape: suites.Shape
    provider: str
    work: overhead.Work
    launch: timing.Launch | None
    refused: str | None


def compile_job(shape: suites.Shape, provider: str, work: overhead.Work, inputs) -> Job:
    """Compiles a job, unless it is called eagerly."""
    attention = overhead.ATTENTION[provider]
    try:
        if work.function is None:
            q, k, v, _ = inputs
            launch = timing.Launch(lambda: attention(q, k, v), "jax")
            jax.block_until_ready(launch.run())
        else:
            program = jax.jit(work.function).lower(*inputs).compile()
            launch = timing.Launch(lambda: program(*inputs), "jax")
    except Exception as error:  # One that cannot run must not cost the others their numbers.
        return Job(shape, provider, work, None, f"{type(error).__name__}: {error}")
    return Job(shape, provider, work, launch, None)


def jobs(shapes, providers: list[str]) -> list[Job]:
    """Returns everything that is launched, compiled in parallel."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = []
        for shape in shapes:
            inputs = gate.random_inputs(shape)
            for provider in providers:
                for work in overhead.work(overhead.ATTENTION[provider]):
                    found.append(pool.submit(compile_job, shape, provider, work, inputs))
        return [job.result() for job in found]


def wall_us(job: Job, rounds: int) -> float:
    """Returns the microseconds of one call of attention, when one launch follows another."""
    repeats = max(2, REPEATS // job.work.calls)
    timing.synchronize(job.launch.run())
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):
            outputs = job.launch.run()
        timing.synchronize(outputs)
        found.append(time.perf_counter() - begin)
    return statistics.median(found) * 1e6 / repeats / job.work.calls


def key(job: Job) -> list[str]:
    """Returns the names by which both processes identify a job."""
    return [job.shape.label, job.provider, job.work.name]


def row(job: Job, with_graphs: float | None, timer: timing.Timer | None, rounds: int):
    """Returns one row of the results, in microseconds of one call of attention."""
    fields = ("shape", "provider", "work")
    found: dict[str, Any] = dict(zip(fields, key(job), strict=True))
    found |= {"tiles": overhead.tiles(job.shape), "refused": job.refused}
    found |= dict.fromkeys(("wall_us", "wall_us_with_graphs", "device_us", "launches"))
    if job.launch is None:
        return found
    found |= {"wall_us": wall_us(job, rounds), "wall_us_with_graphs": with_graphs}
    if timer is not None:
        samples = [timer.measure(job.launch, max(2, REPEATS // job.work.calls)) for _ in range(3)]
        found["device_us"] = statistics.median(s.ms for s in samples) * 1e3 / job.work.calls
        found["launches"] = samples[-1].launches / job.work.calls
    return found


def judged(found: list[Job]) -> list[Job]:
    """Returns the same jobs; a provider that computes something wrong gets no number."""
    wrong: dict[tuple[suites.Shape, str], str] = {}
    for shape in dict.fromkeys(job.shape for job in found):
        oracle = gate.build_oracle(gate.random_inputs(shape), True)
        for job in found:
            if job.shape == shape and job.work.name == "jit" and job.launch is not None:
                verdict = oracle.check({"o": job.launch.run()})["o"]
                if not verdict.ok:
                    reason = f"wrong result: {verdict.used:.3g} times the allowed error"
                    wrong[shape, job.provider] = reason
    refused = lambda job: wrong.get((job.shape, job.provider))
    return [j._replace(launch=None, refused=refused(j)) if refused(j) else j for j in found]


def with_graphs(arguments) -> dict[tuple[str, ...], float]:
    """Returns the wall times of a process with XLA's default flags."""
    command = [sys.executable, "-m", "benchmarks.run_overhead", "--wall-only"]
    command += ["--providers", ",".join(arguments.providers), "--only", arguments.only]
    command += ["--rounds", str(arguments.rounds)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        print(f"no wall times with CUDA graphs: {ran.stderr[-500:]}", flush=True)
    lines = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))
    return {tuple(name): us for *name, us in lines}


def run(arguments, graphs, timer: timing.Timer | None, log: dict[str, Any]) -> dict[str, Any]:
    """Returns the results with all rows, and saves them at the end."""
    shapes = [shape for shape in overhead.SHAPES if arguments.only in shape.label]
    summary = (
        "us of one call of attention, causal, bfloat16: wall time when one launch follows another "
        "(in parentheses with XLA's default, which makes CUDA graphs), device time, device work "
        f"per call; medians; {timer.name if timer else 'no device timer'}."
    )
    method = {"summary": summary, "timer": timer.name if timer else None, "timer_check": log}
    found = results.header("overhead", method)
    everything = judged(jobs(shapes, arguments.providers))
    found["rows"] = [
        row(job, graphs.get(tuple(key(job))), timer, arguments.rounds) for job in everything
    ]
    results.save(arguments.out, found)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="results, a .json file")
    parser.add_argument("--only", default="", help="shapes whose label has this")
    default = ["flash_pallas", "jax_cudnn"]
    parser.add_argument("--providers", type=lambda s: s.split(","), default=default)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall-only", action="store_true", help="print wall times and nothing")
    arguments = parser.parse_args(argv)
    if arguments.out is None and not arguments.wall_only:
        parser.error("--out is needed")
    return arguments


def main(arguments: argparse.Namespace, graphs: dict[tuple[str, ...], float]) -> None:
    """Runs it and prints the table, or the wall times alone."""
    if arguments.wall_only:
        shapes = [shape for shape in overhead.SHAPES if arguments.only in shape.label]
        for job in jobs(shapes, arguments.providers):
            if job.launch is not None:
                print(json.dumps([*key(job), wall_us(job, arguments.rounds)]), flush=True)
        return
    timer, log = None, {}
    if jax.default_backend() == "gpu":
        timer, log = timing.choose("auto", probes())
    print(tables.render(run(arguments, graphs, timer, log)))


if __name__ == "__main__":
    given = parse(None)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found_with_graphs = {}
    if not given.wall_only:
        found_with_graphs = with_graphs(given)  # before this process changes the flags it inherits
        prepare_process(3600)
    main(given, found_with_graphs)
