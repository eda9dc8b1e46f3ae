"""Shared parts of the two fuzz targets: command line, processes, and provenance of a run."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import results

# Whose compiled programs a process keeps: it grows by 100 MB a minute else.
CALLS_HELD = 8


def parser(program: str, about: str | None, workers: int) -> argparse.ArgumentParser:
    """Builds a parser with the arguments that every target has."""
    found = argparse.ArgumentParser(prog=f"python -m tests.{program}", description=about)
    today = datetime.date.today().toordinal()
    found.add_argument("--seed", type=int, default=today, help="default: the number of today")
    found.add_argument("--count", type=int, default=100, help="calls")
    found.add_argument("--first", type=int, default=0, help="number of the first call")
    found.add_argument(
        "--minutes", type=float, default=math.inf, help="then no further call begins"
    )
    found.add_argument("--workers", type=int, default=workers, help="processes")
    found.add_argument("--json", type=Path, help="write a summary to this file")
    return found


def run(calls: Callable[[int], list], arguments: argparse.Namespace) -> tuple[list, int]:
    """Runs the calls in several processes.

    Returns:
        The results of `calls` for all numbers, in their order; and the count of calls, from the
        first on, for which there was time.
    """
    last = arguments.first + arguments.count
    each = functools.partial(_in_time, calls, time.time() + 60.0 * arguments.minutes)
    apart = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.workers, mp_context=apart) as pool:
        found = [x for x in pool.map(each, range(arguments.first, last)) if x is not None]
    return list(itertools.chain.from_iterable(found)), len(found)


_done = itertools.count(1)  # calls of this process


def _in_time(calls: Callable[[int], list], until: float, number: int) -> list | None:
    """Runs one call; returns None after the time `until`."""
    if time.time() >= until:
        return None
    found = calls(number)
    if next(_done) % CALLS_HELD == 0:
        jax.clear_caches()
    return found


def provenance(arguments: argparse.Namespace, calls: int) -> dict[str, Any]:
    """Returns the seed and numbers of a run's calls, and its jax version, commit and day."""
    numbers = {"seed": arguments.seed, "first": arguments.first, "calls": calls}
    today = datetime.date.today().isoformat()
    return numbers | {"jax": jax.__version__, "commit": results.commit(), "date": today}
