"""What the two fuzz targets have in common: their command line, processes, and what a run is of."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import results


def parser(program: str, about: str | None, workers: int) -> argparse.ArgumentParser:
    """With the arguments that every target has."""
    found = argparse.ArgumentParser(prog=f"python -m tests.{program}", description=about)
    today = datetime.date.today().toordinal()
    found.add_argument("--seed", type=int, default=today, help="default: the number of today")
    found.add_argument("--count", type=int, default=100, help="calls")
    found.add_argument("--first", type=int, default=0, help="number of the first call")
    found.add_argument("--workers", type=int, default=workers, help="processes")
    found.add_argument("--json", type=Path, help="write a summary to this file")
    return found


def run(share: Callable[[range], list], arguments: argparse.Namespace) -> list:
    """What `share` returns of all calls, in the order of their numbers; each has a `number`."""
    workers, last = arguments.workers, arguments.first + arguments.count
    shares = [range(arguments.first + i, last, workers) for i in range(workers)]
    apart = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=apart) as pool:
        found = [each for part in pool.map(share, shares) for each in part]
    return sorted(found, key=lambda each: each.number)


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Which calls a run was of, and its version of jax, its commit and its day."""
    calls = {"seed": arguments.seed, "first": arguments.first, "calls": arguments.count}
    today = datetime.date.today().isoformat()
    return calls | {"jax": jax.__version__, "commit": results.commit(), "date": today}
