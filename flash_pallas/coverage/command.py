"""Runs every kernel that a backend can choose on the GPU here, and compares with float64.

python -m flash_pallas.coverage --out benchmarks/results/gpu_coverage.json
python -m flash_pallas.coverage --check benchmarks/results/gpu_coverage.json   # needs no GPU
python -m flash_pallas.coverage --list --only "portable-99 decode"
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import run
from .calls import Row
from .check import RIGHT, Result
from .rows import TARGETS, Target, rows

BAR = 30  # columns of a progress bar
TOLD = 40  # rows that are not right and are printed at the end


def parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """Builds the parser of this command and of `doctor --full`."""
    command = argparse.ArgumentParser(prog=program, description=about)
    add_options(command)
    command.add_argument("--list", action="store_true", help="print the rows and run none")
    command.add_argument(
        "--check", type=Path, help="compare the digests in this file; needs no GPU"
    )
    command.add_argument(
        "--target", choices=TARGETS, action="append", help="default: as the GPU is"
    )
    return command


def add_options(group: Any) -> None:
    """Adds the options that `doctor --full` has too."""
    group.add_argument(
        "--only", action="append", default=[], help="rows whose name contains this; may be repeated"
    )
    group.add_argument("--processes", type=int, default=default_processes(), help="side by side")
    group.add_argument("--minutes", type=float, default=math.inf, help="then no further row begins")
    group.add_argument("--out", type=Path, default=Path("gpu_coverage.json"), help="the results")


def default_processes() -> int:
    """Returns one process a core, less two for the driver and this one."""
    return max(1, min(run.PROCESSES, len(os.sched_getaffinity(0)) - 2))


def targets_here() -> dict[str, Target]:
    """Returns the targets that the GPU here can run.

    One of compute capability 9.0 runs the Hopper kernels, and the portable ones with the tiles of
    every amount of shared memory; others run the portable kernels as they are on them.
    """
    import jax

    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if capability == "9.0":
        return TARGETS
    if device.platform != "gpu":
        raise SystemExit("there is no GPU here: --list and --check need none, with --target")
    sms = getattr(device, "core_count", None) or 108
    return {f"portable-{capability}": Target("portable", capability, sms)}


def over(
    wanted: Sequence[Row],
    targets: dict[str, Target],
    options: argparse.Namespace,
) -> dict[str, list[Any]]:
    """Runs rows and writes the file of results; returns what it has."""
    before, begin, sources = run.read(options.out), time.monotonic(), run.sources()
    ran = run.of_sources(options.out, sources)
    was_right = {key for key, entry in before.items() if entry[-1] == RIGHT}
    left = [row for row in wanted if row.key not in ran & was_right]
    left.sort(key=lambda row: row.key in was_right)  # last: most of these are only lowered
    run.prepare()
    run.mend(options.out)
    with run.lines_of(options.out).open("a") as lines:

        def report(result: Result) -> None:
            lines.write(run.line(result, sources))
            lines.flush()
            done[0] += 1
            if result.verdict != RIGHT:
                print(f"\n{result.verdict.upper()} {result.key}: {result.why}", flush=True)
            part = (len(wanted) - len(left) + done[0]) / len(wanted)
            bar = "#" * round(BAR * part)
            minutes = (time.monotonic() - begin) / 60.0
            print(f"\r[{bar:<{BAR}}] {part:4.0%} {minutes:5.1f} min", end="", flush=True)

        done = [0]
        until = begin + 60.0 * options.minutes
        work = run.Run(targets, before, report, options.processes, until)
        work.over(left)
    print()
    ran = run.of_sources(options.out, sources)
    entries = run.read(options.out)
    if not options.only:  # drops rows that no longer exist
        entries = {key: entries[key] for key in (row.key for row in wanted) if key in entries}
    about = run.provenance() | {"commit": commit()}
    run.write(options.out, entries, about | {"sources": sources if ran >= entries.keys() else None})
    missing = sum(row.key not in entries for row in wanted)
    print(f"{len(entries)} rows: {run.counts(entries)}; {missing} of the list have not run yet")
    return entries


def full(options: argparse.Namespace) -> bool:
    """Runs every kernel that this GPU can choose, for `doctor --full`; returns if all are right."""
    targets = targets_here()
    wanted = chosen(targets, options)
    entries = over(wanted, targets, options)
    print(f"attach {options.out} to an issue of flash_pallas, so that this GPU is known to work")
    return all(entry[-1] == RIGHT for entry in entries.values())


def chosen(targets: dict[str, Target], options: argparse.Namespace) -> list[Row]:
    """Returns the rows that the command line asks for."""
    parts = options.only or [""]
    return [row for row in rows(targets) if any(name in row.key for name in parts)]


def commit() -> str | None:
    """Returns FLASH_PALLAS_COMMIT if it is set, else git's commit; None without either."""
    if from_environment := os.environ.get("FLASH_PALLAS_COMMIT"):
        return from_environment
    folder = Path(__file__).parent
    if not (folder.parents[1] / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or None


def older(path: Path, wanted: Sequence[Row], processes: int) -> list[str]:
    """Lists the rows that have not run, were not right, or whose kernels have changed since."""
    entries = run.read(path)
    right = [row for row in wanted if entries.get(row.key, [""])[-1] == RIGHT]
    missing = [f"{row.key}: has not run" for row in wanted if row not in set(right)]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, spawn) as pool:
        digests = list(pool.map(_digest, right, chunksize=8))
    changed = zip(right, digests, strict=True)
    return missing + [
        f"{row.key}: {digest}" for row, digest in changed if digest != entries[row.key][0]
    ]


def _digest(row: Row) -> str:
    from . import check

    return check.digest(row, TARGETS[row.target])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a row is not right."""
    options = parser("python -m flash_pallas.coverage", __doc__).parse_args(arguments)
    named = {name: TARGETS[name] for name in options.target or ()}
    needs_none = options.list or options.check
    run.prepare()
    targets = named or (TARGETS if needs_none else targets_here())
    wanted = chosen(targets, options)
    if options.list:
        print("\n".join(row.key for row in wanted))
        print(f"{len(wanted)} rows", file=sys.stderr)
        return 0
    if options.check:
        faults = older(options.check, wanted, options.processes)
        print(
            "\n".join([*faults[:TOLD], f"{len(faults)} of {len(wanted)} rows are not up to date"])
        )
        return int(bool(faults))
    entries = over(wanted, targets, options)
    return int(any(entry[-1] != RIGHT for entry in entries.values()))


if __name__ == "__main__":
    sys.exit(main())
