"""Budget of compilation: kernels and PTX instructions, by the row's name.

    python -m tests.compile_check --budget      # notes what the compiled rows cost now

The table, budget.json, is of an H200 and jax 0.11, whose kernels trade registers. Instructions of
PTX are the same on every machine, whatever else it does, and compile time grows with them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("budget.json")
MORE_INSTRUCTIONS = 1.1  # of what the table has
ELSEWHERE = (6, 20_000)  # budget of a new row, which the table does not have yet


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of tracing, lowering and compiling a row.

    Attributes:
        kernels: number of kernels.
        instructions: of all kernels' PTX.
    """

    kernels: int
    instructions: int

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
        return faults


@functools.cache
def table(path: Path = TABLE) -> Mapping[str, Cost]:
    """Returns the budgets by the names of rows."""
    entries = json.loads(path.read_text()) if path.exists() else {}
    return {name: Cost(*figures) for name, figures in entries.items()}


def note(costs: Iterable[tuple[str, Cost]], path: Path = TABLE) -> None:
    """Writes costs into the table, one line for each row; other rows keep theirs."""
    entries = dict(table(path)) | dict(costs)
    figures = lambda cost: [cost.kernels, cost.instructions]
    lines = [f"{json.dumps(name)}: {figures(entries[name])}" for name in sorted(entries)]
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
    table.cache_clear()
