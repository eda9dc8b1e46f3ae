"""Compares versions of jax: the cells of a suite, timed by one process of each version in turn.

    python -m benchmarks.run_jax --paths 0.11.2= 0.12.0=/folder/with/jax --rounds 3 \\
        --out benchmarks/results/versions_jax.json

A version is a folder that is searched for packages before all others, such as one that
`pip install --no-deps --target` has filled; an empty one is the environment as it is. Every second
round goes backwards. Other versions are divided by the first; a cell's time is the median of its
processes, each of which reports the median of its readings.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from . import results, suites

KEYS = ("batch", "q_len", "q_heads", "kv_heads", "head_dim", "causal", "direction")


def measured(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what `benchmarks.run` writes in a process that searches the folder first."""
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch, "found.json")
        paths = [path for path in (folder, os.environ.get("PYTHONPATH", "")) if path]
        command = [sys.executable, "-m", "benchmarks.run", "--providers", "flash_pallas"]
        command += ["--suite", arguments.suite, "--only", arguments.only, "--out", str(out)]
        command += ["--rounds", str(arguments.readings), "--reading-ms", str(arguments.reading_ms)]
        command += ["--processes", str(arguments.processes)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def compared(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns a row for each cell: ms of every process, and each version's time over the first's.

    Args:
        runs: what `measured` has returned, by version.
    """
    first, rows = next(iter(runs)), []
    for number, row in enumerate(runs[first][0]["rows"]):
        ms = {name: [one["rows"][number]["ms"] for one in found] for name, found in runs.items()}
        middle = {name: statistics.median(times) for name, times in ms.items()}
        ratios = {name: middle[name] / middle[first] for name in runs}
        rows.append({key: row[key] for key in KEYS} | {"ms": ms, "time_ratio": ratios})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns, by version, the geometric mean of its ratios and the largest one."""
    columns = {name: [row["time_ratio"][name] for row in rows] for name in rows[0]["time_ratio"]}
    return {
        name: {"geometric mean": statistics.geometric_mean(found), "largest": max(found)}
        for name, found in columns.items()
    }


def main() -> None:
    """Parses the command line, runs the processes in turn, and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_jax", description=__doc__)
    parser.add_argument("--paths", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--suite", choices=sorted(suites.SUITES), default="quick")
    parser.add_argument("--only", default="", help="cells whose label contains this")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each version")
    parser.add_argument("--readings", type=int, default=7, help="rounds of one process")
    parser.add_argument("--reading-ms", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=0, help="that trace for each of them")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    folders = dict(pair.split("=", 1) for pair in arguments.paths)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    for turn in range(arguments.rounds):
        for name in list(folders)[:: -1 if turn % 2 else 1]:
            runs[name].append(measured(folders[name], arguments))
            print(f"round {turn}: {name}", flush=True)
    rows = compared(runs)
    about = {
        "summary": f"time over that of {next(iter(folders))}, of {arguments.rounds} alternating "
        "processes each the median",
        "timer": next(iter(runs.values()))[0]["method"]["timer"],
        "versions": {name: found[0]["versions"] for name, found in runs.items()},
        "of all cells": summary(rows),
    }
    found = results.header("versions of jax", about) | {"rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, of_all in about["of all cells"].items():
        print(f"{name}: {of_all}", flush=True)


if __name__ == "__main__":
    main()
