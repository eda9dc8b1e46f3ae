"""Compilation of many rows in several processes, and the verdict on each."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flash_pallas.backends.gpu.jax_compat import trades_registers

from . import budget
from .budget import Cost
from .device import H200, Target, Tools, compile_for, dump_to
from .portable_rows import portable_rows
from .report import Report, take
from .rows import Row, rows, suite_rows

BACKENDS = ("hopper", "portable")
# Rows that are in every part; the others are in one of PARTS each.
ALWAYS = {(n, "bfloat16", m) for n in (64, 128) for m in ("full", "causal", "contiguous")}
PARTS = 4

COLUMNS = "{:<29} {:>4} {:<9} {:<24} {:>5} {:>5} {:>6} {:>8} {:>7}  {}"
HEADER = COLUMNS.format(
    *("kernel", "dim", "dtype", "mask", "regs", "stack", "spills", "allowed", "smem", "remarks")
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Selection of the rows to compile.

    Attributes:
        only: substrings of names; a row is chosen if its name has one of them. Empty: all rows.
        suite: suite of the benchmarks whose cells are the rows. None: the kernels that ship.
        backend: one of BACKENDS. None: the backend that calls reach on the target.
        part: a number; None: all rows, else those of ALWAYS and, modulo PARTS, a part of the rest.
    """

    only: tuple[str, ...] = ()
    suite: str | None = None
    backend: str | None = None
    part: int | None = None

    def rows(self, target: Target) -> Iterator[Row]:
        """Returns the chosen rows for this GPU."""
        hopper = (self.backend or BACKENDS[target != H200]) == "hopper"
        found = portable_rows(target)
        if hopper:
            found = suite_rows(self.suite) if self.suite else rows()
        wanted = lambda name: not self.only or any(part in name for part in self.only)
        return (row for row in found if wanted(str(row)) and self.has_turn(row))

    def is_budgeted(self, target: Target) -> bool:
        """Says whether the table of budgets is of these rows: Hopper's, with jax 0.11."""
        hopper = target == H200 and self.backend != "portable" and self.suite is None
        return hopper and trades_registers()

    def has_turn(self, row: Row) -> bool:
        """Says whether a row is in this part."""
        if self.part is None or (row.head_dim, row.dtype, row.mask) in ALWAYS:
            return True
        return zlib.crc32(str(row).encode()) % PARTS == self.part % PARTS


def check(target: Target, row: Row, folder: Path) -> tuple[list[Report], list[str]]:
    """Compiles one row; returns its kernels' reports and the faults of the row as a whole."""
    try:
        function, arguments = row.call()
        compile_for(target, function, *arguments)
    except Exception as error:  # whatever stage refuses it, the row has failed and the rest goes on
        lines = str(error).strip().splitlines() or [""]
        return take(folder), [f"{row}: {type(error).__name__}: {lines[0][:300]}"]
    reports = take(folder)
    return reports, [] if reports else [f"{row}: compiled, but ptxas reported no kernel"]


def line(row: Row, report: Report, allowed: int) -> str:
    """Formats one line of the table."""
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


class Found(NamedTuple):
    """Findings on a row.

    Attributes:
        number: its number among those that were chosen.
        records: those of its kernels.
        faults: what is wrong with it.
        name: its name.
        cost: what it took to compile.
        budgeted: whether the table of budgets is of such rows.
    """

    number: int
    records: list[dict[str, Any]]
    faults: list[str]
    name: str
    cost: Cost
    budgeted: bool

    @property
    def over_budget(self) -> list[str]:
        """Faults of its cost; none where compilation failed, or the table is not of such rows."""
        if not self.budgeted or not self.records:
            return []
        over = self.cost.faults(budget.table().get(self.name))
        return [f"{self.name}: {fault}" for fault in over]


def run(target: Target, choice: Choice, tools: Tools, share: tuple[int, int]) -> list[Found]:
    """Compiles rows and prints one line per kernel.

    Args:
        target: GPU to compile for.
        choice: selection of the target's rows.
        tools: CUDA programs that compile.
        share: (i, n): this process takes every n-th row, from the i-th on.
    """
    jax.config.update("jax_platforms", "cpu")  # there is no GPU to look for
    found = []
    chosen, budgeted = list(choice.rows(target)), choice.is_budgeted(target)
    with tempfile.TemporaryDirectory() as name, dump_to(Path(name), tools):
        for number, row in list(enumerate(chosen))[share[0] :: share[1]]:
            reports, faults = check(target, row, Path(name))
            cost = Cost(len(reports), sum(r.ptx_instructions for r in reports))
            records = []
            for report in reports:
                allowed = row.allowed_spills(report.kernel)
                bad = report.faults(target, allowed, row.most_registers)
                faults += [f"{report.kernel} ({row}): {fault}" for fault in bad]
                print(line(row, report, allowed), flush=True)
                about = {"path": row.path, "head_dim": row.head_dim}
                about |= {"dtype": row.dtype, "mask": row.mask, "allowed_spills": allowed}
                records.append(about | dataclasses.asdict(report) | {"faults": bad})
            found.append(Found(number, records, faults, str(row), cost, budgeted))
    return found


def run_all(target: Target, choice: Choice, tools: Tools, workers: int) -> list[Found]:
    """Calls `run` in `workers` processes; returns the results in the order of the rows.

    `run` lives in a module of its own because spawned processes cannot find what __main__ defines.
    """
    shares = [(i, workers) for i in range(workers)]
    part = functools.partial(run, target, choice, tools)
    if workers == 1:
        return part(shares[0])
    apart = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=apart) as pool:
        return sorted(found for each in pool.map(part, shares) for found in each)
