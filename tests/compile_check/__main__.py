"""Prints one line per compiled kernel; exits with 1 if any of them must not be shipped."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from .device import Tools, compile_for_h200, dump_to, find_tools
from .report import Report, take
from .rows import Row, rows, suite_rows

COLUMNS = "{:<28} {:>4} {:<9} {:<21} {:>5} {:>5} {:>6} {:>8} {:>7}  {}"
HEADER = COLUMNS.format(
    *("kernel", "dim", "dtype", "mask", "regs", "stack", "spills", "allowed", "smem", "remarks")
)


def check(row: Row, folder: Path) -> tuple[list[Report], list[str]]:
    """Compiles one row; its kernels' reports, and what is wrong with the row as a whole."""
    try:
        compile_for_h200(row.function, *row.arguments)
    except Exception as error:  # whatever stage refuses it, the row has failed and the rest goes on
        lines = str(error).strip().splitlines() or [""]
        return take(folder), [f"{row}: {type(error).__name__}: {lines[0][:300]}"]
    reports = take(folder)
    return reports, [] if reports else [f"{row}: compiled, but ptxas reported no kernel"]


def line(row: Row, report: Report, allowed: int) -> str:
    """One line of the table."""
    highest = report.highest_register
    return COLUMNS.format(
        report.kernel,
        row.head_dim,
        row.dtype,
        row.mask,
        report.launch_registers if highest is None else f"R{highest}",
        report.stack,
        report.spill_stores,
        allowed,
        report.smem,
        " ".join(report.remarks) or "-",
    )


def run(
    only: str, tools: Tools, suite: str | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compiles and prints all rows whose name contains `only`; their records and all faults.

    The rows are those that ship, or all cells of a suite of the benchmarks.
    """
    records, faults = [], []
    with tempfile.TemporaryDirectory() as name, dump_to(Path(name), tools):
        for row in rows() if suite is None else suite_rows(suite):
            if only not in str(row):
                continue
            reports, wrong = check(row, Path(name))
            faults += wrong
            for report in reports:
                allowed = row.allowed_spills(report.kernel)
                bad = report.faults(allowed, row.most_registers)
                faults += [f"{report.kernel} ({row}): {fault}" for fault in bad]
                print(line(row, report, allowed), flush=True)
                about = {"path": row.path, "head_dim": row.head_dim}
                about |= {"dtype": row.dtype, "mask": row.mask, "allowed_spills": allowed}
                records.append(about | dataclasses.asdict(report) | {"faults": bad})
    return records, faults


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_check", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--suite", help="the cells of this suite of the benchmarks instead")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # there is no GPU to look for
    started = time.monotonic()
    tools = find_tools()
    print(f"ptxas {tools.version()} ({tools.ptxas}), for sm_90a; nvdisasm: {tools.nvdisasm}")
    print(HEADER)
    records, faults = run(arguments.only, tools, arguments.suite)
    if not records and not faults:
        faults.append(f"no row's name contains {arguments.only!r}")
    if arguments.json:
        figures = {"ptxas": tools.version(), "kernels": records, "faults": faults}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{len(records)} kernels in {time.monotonic() - started:.0f} s, {len(faults)} faults")
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
