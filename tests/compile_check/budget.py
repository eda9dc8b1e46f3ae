"""Budget of compile time: kernels, PTX instructions and CPU seconds, by the row's name.

    python -m tests.compile_check --budget      # notes what the compiled rows cost now

The table, budget.json, is of an H200 and jax 0.11, whose kernels trade registers. Instructions of
PTX are the same on every machine, whatever else it does, and compile time grows with them. CPU
seconds are of one machine, and some row of a process pays for what the process does once, so that
only far more of them is a fault: it tells of what makes compilation slow without a single
instruction more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("budget.json")
MORE_INSTRUCTIONS, MORE_SECONDS = 1.1, 4.0  # of what the table has
# A row of 1.1 s took 6.3 on a machine of half the speed whose other cores were busy.
ONCE_SECONDS = 10.0
ELSEWHERE = (6, 20_000, 15.0)  # budget of a new row, which the table does not have yet


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of tracing, lowering and compiling a row.

    Attributes:
        kernels: number of kernels.
        instructions: of all kernels' PTX.
        seconds: of CPU time, in this process and in ptxas.
    """

    kernels: int
    instructions: int
    seconds: float

    def faults(self, allowed: Cost | None) -> list[str]:
        """Returns what is beyond the budget; None where the table has none for the row."""
        if allowed is None:
            allowed = Cost(*ELSEWHERE)
        faults = []
        if self.kernels > allowed.kernels:
            faults.append(f"compiles {self.kernels} kernels, {allowed.kernels} allowed")
        if self.instructions > MORE_INSTRUCTIONS * allowed.instructions:
            faults.append(
                f"{self.instructions} PTX instructions, {MORE_INSTRUCTIONS} of "
                f"{allowed.instructions} allowed"
            )
        most_seconds = MORE_SECONDS * allowed.seconds + ONCE_SECONDS
        if self.seconds > most_seconds:
            faults.append(f"{self.seconds:.1f} CPU seconds, {most_seconds:.1f} allowed")
        return faults


@functools.cache
def table(path: Path = TABLE) -> Mapping[str, Cost]:
    """Returns the budgets by the names of rows."""
    entries = json.loads(path.read_text()) if path.exists() else {}
    return {name: Cost(*figures) for name, figures in entries.items()}


def note(costs: Iterable[tuple[str, Cost]], path: Path = TABLE) -> None:
    """Writes costs into the table, one line for each row; other rows keep theirs."""
    entries = dict(table(path)) | dict(costs)
    figures = lambda cost: [cost.kernels, cost.instructions, round(cost.seconds, 1)]
    lines = [f"{json.dumps(name)}: {figures(entries[name])}" for name in sorted(entries)]
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
    table.cache_clear()


@contextlib.contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """Yields a list that gets the CPU seconds spent inside, programs that have ended included."""
    found, before = [], _spent()
    yield found
    found.append(_spent() - before)


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
