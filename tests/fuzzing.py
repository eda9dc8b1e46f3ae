"""Shared parts of the two fuzz targets: command line, processes, and provenance of a run."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import results

from . import digest, gpus

# Whose compiled programs a process keeps: it grows by 100 MB a minute else.
CALLS_HELD = 8


def parser(program: str, about: str | None, workers: int) -> argparse.ArgumentParser:
    """Builds a parser with the arguments that every target has."""
    found = argparse.ArgumentParser(prog=f"python -m tests.{program}", description=about)
    found.add_argument("--seed", type=int, default=digest.seed(), help="default: that of digest.py")
    found.add_argument("--count", type=int, default=100, help="calls")
    found.add_argument("--first", type=int, default=0, help="number of the first call")
    found.add_argument(
        "--minutes", type=float, default=math.inf, help="then no further call begins"
    )
    found.add_argument("--workers", type=int, default=workers, help="processes")
    found.add_argument("--json", type=Path, help="write a summary to this file")
    return found


def run(
    calls: Callable[[int], list],
    arguments: argparse.Namespace,
    summary: Callable[[list], dict[str, Any]],
) -> dict[str, Any]:
    """Runs the calls in several processes, on all GPUs of the machine.

    The summary is written after every call, so that a run that is cut off has one of the calls
    before.

    Args:
        calls: number of a call -> its outcomes.
        arguments: those of `parser`.
        summary: outcomes of all calls so far, in the order of their numbers -> figures.

    Returns:
        The figures of all calls for which there was time, with the count of these calls and where
        they come from.
    """
    last = arguments.first + arguments.count
    each = functools.partial(_in_time, calls, time.time() + 60.0 * arguments.minutes)
    apart = multiprocessing.get_context("spawn")
    source = _provenance(arguments)
    outcomes: list = []
    found: dict[str, Any] = {}
    with concurrent.futures.ProcessPoolExecutor(
        arguments.workers, apart, _take_gpu, (apart.Value("i", 0),)
    ) as pool:
        done = (x for x in pool.map(each, range(arguments.first, last)) if x is not None)
        for calls_done, one in enumerate(done, 1):
            outcomes += one
            found = summary(outcomes) | {"calls": calls_done} | source
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _take_gpu(workers) -> None:
    with workers.get_lock():
        workers.value += 1
        gpus.take(workers.value)


_done = itertools.count(1)  # calls of this process


def _in_time(calls: Callable[[int], list], until: float, number: int) -> list | None:
    """Runs one call; returns None after the time `until`."""
    if time.time() >= until:
        return None
    found = calls(number)
    if next(_done) % CALLS_HELD == 0:
        jax.clear_caches()
    return found


def _provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns seed and first number of a run's calls, and its jax version, commit and day."""
    numbers = {"seed": arguments.seed, "first": arguments.first}
    today = datetime.date.today().isoformat()
    return numbers | {"jax": jax.__version__, "commit": results.commit(), "date": today}
