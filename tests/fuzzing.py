"""Shared parts of the two fuzz targets: command line, processes, and provenance of a run."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import jax

from benchmarks import results

from . import digest, gpus

# Whose compiled programs a process keeps: it grows by 100 MB a minute else.
CALLS_HELD = 8
# Between two writings of the summary.
SECONDS_BETWEEN = 10.0


def parser(program: str, about: str | None, processes: int) -> argparse.ArgumentParser:
    """Builds a parser with the arguments that every target has."""
    found = argparse.ArgumentParser(prog=f"python -m tests.{program}", description=about)
    found.add_argument("--seed", type=int, default=digest.seed(), help="default: that of digest.py")
    found.add_argument("--count", type=int, default=100, help="calls")
    found.add_argument("--first", type=int, default=0, help="number of the first call")
    found.add_argument(
        "--minutes", type=float, default=math.inf, help="then no further call begins"
    )
    found.add_argument("--processes", type=int, default=processes)
    found.add_argument("--limit", type=float, default=180.0, help="seconds of one call")
    found.add_argument("--json", type=Path, help="write a summary to this file")
    return found


@dataclasses.dataclass
class _Worker:
    """A process, the end of its pipe here, and the call that it has had since a time."""

    process: Any
    pipe: Any
    number: int | None = None
    since: float = 0.0

    def give(self, number: int) -> None:
        """Lets it run this call."""
        self.number, self.since = number, time.monotonic()
        self.pipe.send(number)

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(
    calls: Callable[[int], list],
    arguments: argparse.Namespace,
    summary: Callable[[list], dict[str, Any]],
    late: Callable[[int, str], list] | None = None,
    numbers: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Runs the calls in several processes, on all GPUs of the machine.

    The summary is written every few seconds, so that a run that is cut off has one. A process is
    replaced where a call takes longer than its limit, ends it, or has outcomes that are `broken`.

    Args:
        calls: number of a call -> its outcomes.
        arguments: those of `parser`.
        summary: outcomes of all calls so far, in the order of their numbers -> figures.
        late: (number of a call, why its process ended) -> its outcomes; None raises.
        numbers: of the calls; None: those that the arguments name.

    Returns:
        The figures of all calls for which there was time, with the count of these calls and where
        they come from.
    """
    if numbers is None:
        numbers = range(arguments.first, arguments.first + arguments.count)
    left = iter(numbers)
    until = time.monotonic() + 60.0 * arguments.minutes
    source, outcomes = _provenance(arguments), {}
    workers = [_started(calls, n) for n in range(min(arguments.processes, len(numbers)))]
    for worker in workers:  # which import side by side
        worker.pipe.recv()
    written, found = 0.0, {}
    while workers:
        workers = [x for x in workers if _busy(x, left, until)]
        ready = connection.wait([x.pipe for x in workers], timeout=1.0) if workers else []
        for n, worker in enumerate(workers):
            answer, why = _answer(worker, worker.pipe in ready, arguments.limit)
            if why:
                if late is None:
                    raise RuntimeError(f"call {worker.number}: {why}")
                answer = late(worker.number, why)
            if answer is None:
                continue
            outcomes[worker.number] = answer
            worker.number = None
            if why or any(getattr(x, "broken", False) for x in answer):
                worker.end()
                workers[n] = _started(calls, n)
                workers[n].pipe.recv()
        if time.monotonic() - written > SECONDS_BETWEEN or not workers:
            in_order = [x for number in sorted(outcomes) for x in outcomes[number]]
            found = summary(in_order) | {"calls": len(outcomes)} | source
            written = time.monotonic()
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _busy(worker: _Worker, numbers: Iterator[int], until: float) -> bool:
    """Gives the next call to a worker without one; ends it and returns False if there is none."""
    if worker.number is None:
        number = next(numbers, None) if time.monotonic() < until else None
        if number is None:
            worker.end()
            return False
        worker.give(number)
    return True


def _answer(worker: _Worker, ready: bool, limit: float) -> tuple[list | None, str]:
    """Returns (outcomes or None, why the process is to be replaced or "")."""
    if ready:
        try:
            return worker.pipe.recv(), ""
        except EOFError:
            return None, "the process ended"
    if time.monotonic() - worker.since > limit:
        return None, f"not done in {limit:.0f} seconds"
    return None, ""


def _started(calls: Callable[[int], list], number: int) -> _Worker:
    apart = multiprocessing.get_context("spawn")
    here, there = apart.Pipe()
    process = apart.Process(target=_work, args=(calls, there, number), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _work(calls: Callable[[int], list], pipe, number: int) -> None:
    gpus.take(number)
    pipe.send("ready")
    done = 0
    while True:
        try:
            found = calls(pipe.recv())
        except EOFError:
            return
        pipe.send(found)
        done += 1
        if done % CALLS_HELD == 0:
            jax.clear_caches()


def _provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns seed and first number of a run's calls, and its versions, commit and day."""
    numbers = {"seed": arguments.seed, "first": arguments.first}
    today = datetime.date.today().isoformat()
    versions = {"jax": jax.__version__, "versions": results.versions()}
    return numbers | versions | {"commit": results.commit(), "date": today}
