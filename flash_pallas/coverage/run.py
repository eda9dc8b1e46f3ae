"""Runs rows in processes that are watched.

A row that takes too long, or ends its process, costs that process and nothing else. Results are
appended to a file of lines as they come, so that a run that ends early goes on where it stopped:
rows that have run with these sources are left out, and those whose kernels are the same only lower.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._version import __version__
from .calls import Row
from .check import FAILS, HANGS, RIGHT, WRONG, Result
from .rows import Target

LIMIT = 120.0  # seconds of a row, most of which its compilation takes
START = 120.0  # seconds in which a process is ready
ROWS_HELD = 16  # whose compiled programs a process keeps
PROCESSES = 14
# Set before jax is imported: several processes share a GPU, and each has a core.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "FLASH_PALLAS_COMPILE_AHEAD": "0",
    "FLASH_PALLAS_CACHE_DIR": os.path.join(os.sep, "dev", "null"),  # no tiles of the user's own
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
XLA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1"


# --- A process that runs rows ---------------------------------------------------------------------


def serve(connection) -> None:
    """Runs rows as they come: receives (row, target, digest before) and sends a Result or None.

    None says that the row has run before, with the same kernels.
    """
    import jax

    from . import check

    connection.send("ready")
    for count in range(1, sys.maxsize):
        row, target, before = connection.recv()
        if row is None:
            return
        begin = time.monotonic()
        try:
            known = before is not None and check.digest(row, target) == before
            result = None if known else check.run(row, target)
        except Exception as error:  # at any stage: the row has not run
            text = f"{type(error).__name__}: {error}".strip()[:300]
            result = Result(row.key, "", FAILS, None, text)
        if result is not None:
            result = dataclasses.replace(result, seconds=round(time.monotonic() - begin, 1))
        connection.send(result)
        if count % ROWS_HELD == 0:
            jax.clear_caches()


class Worker:
    """A process that runs rows, and the row that it is at."""

    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self.connection, child_end = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(child_end,), daemon=True)
        self.process.start()
        child_end.close()
        self.row: Row | None = None
        self.ready, self.until = False, time.monotonic() + START

    def give(self, row: Row, target: Target, before: str | None) -> None:
        """Sends the process its next row."""
        self.connection.send((row, target, before))
        self.row, self.until = row, time.monotonic() + LIMIT

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


# --- The run --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A run over a list of rows.

    Attributes:
        targets: by name.
        before: results by key of an earlier run.
        report: is told each new Result.
        processes: number of processes.
        until: time (of time.monotonic) after which no row begins.
    """

    targets: dict[str, Target]
    before: dict[str, list[Any]]
    report: Callable[[Result], None]
    processes: int = PROCESSES
    until: float = math.inf

    def over(self, rows: Iterable[Row]) -> None:
        """Runs the rows, or as many as there is time for."""
        remaining = list(rows)[::-1]
        workers = [Worker() for _ in range(min(self.processes, len(remaining)))]
        try:
            while remaining or any(worker.row is not None for worker in workers):
                workers = [self._looked_after(worker) for worker in workers]
                idle = [w for w in workers if w.ready and w.row is None]
                if time.monotonic() >= self.until:
                    remaining.clear()
                for worker in idle[: len(remaining)]:
                    row = remaining.pop()
                    entry = self.before.get(row.key)
                    digest = entry[0] if entry and entry[-1] == RIGHT else None
                    worker.give(row, self.targets[row.target], digest)
                multiprocessing.connection.wait([w.connection for w in workers], timeout=0.5)
        finally:
            for worker in workers:
                worker.end()

    def _looked_after(self, worker: Worker) -> Worker:
        """Takes a worker's message; returns the worker, or a new one where it had to end."""
        try:
            message = worker.connection.recv() if worker.connection.poll() else ""
        except (EOFError, OSError):
            return self._instead(worker, "ended its process")
        if message == "ready":
            worker.ready = True
        elif message == "" and (worker.row or not worker.ready):
            if time.monotonic() > worker.until:
                return self._instead(worker, f"took more than {LIMIT:.0f} s")
        elif message is None:
            self._unchanged(worker.row)
            worker.row = None
        elif isinstance(message, Result):
            self.report(message)
            worker.row = None
            if message.verdict == FAILS:  # its device may be unusable now
                worker.end()
                return Worker()
        return worker

    def _unchanged(self, row: Row | None) -> None:
        """Reports a row whose kernels have run before."""
        assert row is not None
        digest, error, verdict = self.before[row.key]
        self.report(Result(row.key, digest, verdict, error, "has run before"))

    def _instead(self, worker: Worker, why: str) -> Worker:
        """Ends a worker that is stuck or gone; returns another one."""
        worker.end()
        if not worker.ready:
            raise RuntimeError(f"a process {why} before it ran anything: is the GPU in use?")
        if worker.row is not None:
            self.report(Result(worker.row.key, "", HANGS, None, why))
        return Worker()


# --- Results --------------------------------------------------------------------------------------


def lines_of(path: Path) -> Path:
    """Returns the file to which results are appended as they come."""
    return path.with_suffix(".lines")


def read(path: Path) -> dict[str, list[Any]]:
    """Returns what a file of results and its file of lines have: [digest, error, verdict]."""
    entries = json.loads(path.read_text())["rows"] if path.exists() else {}
    return entries | {line["key"]: _entry(line) for line in _lines(path)}


def of_sources(path: Path, digest: str) -> set[str]:
    """Returns the keys of the rows in a file that have run with the sources of this digest."""
    contents = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    keys = set(contents["rows"]) if contents.get("sources") == digest else set()
    return keys | {line["key"] for line in _lines(path) if line["sources"] == digest}


def sources() -> str:
    """Returns a digest of the package."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def line(result: Result, sources: str) -> str:
    """Returns what is appended to the file of lines."""
    return json.dumps(dataclasses.asdict(result) | {"sources": sources}) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    text = lines_of(path).read_text() if lines_of(path).exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def mend(path: Path) -> None:
    """Cuts off a line in the middle of which a run has ended."""
    with lines_of(path).open("a+") as lines:
        lines.seek(0)
        end = lines.read().rfind("\n") + 1
        lines.truncate(end)


def _entry(line: dict[str, Any]) -> list[Any]:
    error = None if line["error"] is None else float(f"{line['error']:.2g}")
    return [line["digest"], error, line["verdict"]]


def write(path: Path, entries: dict[str, list[Any]], about: dict[str, Any]) -> None:
    """Writes a file of results, a row a line, and removes its file of lines."""
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries))
    head = json.dumps(about, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": {{\n{rows}\n }}\n}}\n')
    lines_of(path).unlink(missing_ok=True)


def counts(entries: dict[str, list[Any]]) -> str:
    """Returns how many rows are right, wrong, hang and fail, as text."""
    verdicts = [entry[-1] for entry in entries.values()]
    names = (RIGHT, WRONG, HANGS, FAILS)
    return ", ".join(f"{verdicts.count(name)} {name}" for name in names)


def prepare() -> None:
    """Sets what processes read from the environment before they import jax; so does this one."""
    os.environ.update(ENVIRONMENT)
    if XLA_FLAGS not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()


def provenance() -> dict[str, Any]:
    """Returns the device, versions and day of a run."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "capability": getattr(device, "compute_capability", None),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flash_pallas": __version__,
        "date": datetime.date.today().isoformat(),
    }
