"""Prints one line per compiled kernel; exits with 1 if any of them must not be shipped."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import jax

from . import budget
from .checking import BACKENDS, HEADER, Choice, run_all
from .device import H200, TARGETS, find_tools


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_check", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="h200", help="what to compile for")
    parser.add_argument("--backend", choices=BACKENDS, help="whose kernels, on an H200: hopper's")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="rows whose name contains one of these",
    )
    parser.add_argument("--suite", help="the cells of this suite of the benchmarks instead")
    parser.add_argument("--part", type=int, help="plain rows, of others the fourth of this number")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--budget", action="store_true", help="note what compiling them costs now")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]
    if arguments.backend == "hopper" and target != H200:
        parser.error("the Hopper kernels are compiled for --target h200")
    if arguments.suite and (target != H200 or arguments.backend == "portable"):
        parser.error("the cells of a suite are calls of the Hopper kernels: --target h200")
    choice = Choice(tuple(arguments.only), arguments.suite, arguments.backend, arguments.part)
    started = time.monotonic()
    tools = find_tools()
    print(f"ptxas {tools.version()} ({tools.ptxas}); nvdisasm: {tools.nvdisasm}")
    print(f"for {target.name}, {target.architecture}")
    print(HEADER)
    found = run_all(target, choice, tools, arguments.workers)
    records = [record for row in found for record in row.records]
    faults = [fault for row in found for fault in row.faults]
    if arguments.budget:
        budget.note((row.name, row.cost) for row in found if row.budgeted and row.records)
    faults += [fault for row in found for fault in row.over_budget]
    if not records and not faults:
        faults.append(f"no row's name contains {arguments.only!r}")
    if arguments.json:
        figures = {
            "ptxas": tools.version(),
            "jax": jax.__version__,
            "target": target.name,
            "kernels": records,
            "faults": faults,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{len(records)} kernels in {time.monotonic() - started:.0f} s, {len(faults)} faults")
    new = sorted(row.name for row in found if row.budgeted and row.name not in budget.table())
    if new:
        print(f"{len(new)} rows have no budget of their own, which --budget notes: {new[0]}, ...")
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
