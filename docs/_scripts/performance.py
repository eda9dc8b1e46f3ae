"""Puts tables of docs/performance-tables.md on docs/performance.md, by the names that readers know.

A marker `<!-- results: NAME -->` stands for the table of that name. `<!-- results: NAME, A; B -->`
stands for its rows whose group or shape is A or B. A marker may be indented, as in a
content tab.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "performance-tables.md"
MARKER = re.compile(r"^( *)<!-- results: (\w+)(?:, (.+))? -->$", re.MULTILINE)
# Columns, and the first words of calls, that are named after providers of benchmarks/.
NAMES = {
    "flash_pallas": "ours",
    "flash_pallas_portable": "portable",
    "torch_cudnn": "cuDNN (PyTorch)",
    "jax_cudnn": "cuDNN (jax.nn)",
    "tokamax": "Tokamax",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "torch_flash": "FlashAttention-2 (PyTorch)",
    "torch_efficient": "memory-efficient (PyTorch)",
    "pallas_triton": "pallas.ops.gpu (Triton)",
    "jax_xla": "jax.nn (XLA)",
    "ours / fa3": "ours / FlashAttention-3",
    "ours / fa4": "ours / FlashAttention-4",
}
# Columns that are left to the other page, as are XLA's plans of memory.
LEFT_OUT = ("", "ours / GEMM", "ours / best peer", "portable / FlashAttention-2", "splits")


def table(name: str, rows_of: str | None = None) -> list[str]:
    """Returns the lines of a table in Markdown, of all rows or of some.

    Raises:
        ValueError: a group or shape that no row has.
    """
    (found,) = re.findall(f"<!-- table:{name} -->\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in found.splitlines()]
    if rows[0][1:3] == ["mask", "pass"]:  # one narrow column of two, for a phone
        rows = [[row[0], " ".join(row[1:3]), *row[3:]] for row in rows]
        rows[0][1] = "call"
    kept = [i for i, x in enumerate(rows[0]) if x not in LEFT_OUT and not x.startswith("GiB")]
    head = [[_named(rows[0][i]) for i in kept], ["---"] * len(kept)]
    body = rows[2:]
    if rows_of:
        wanted = set(rows_of.split("; "))
        body = [row for row in body if wanted & set(row[:2])]
        if missing := wanted - {cell for row in body for cell in row[:2]}:
            raise ValueError(f"table {name} has no row of {'; '.join(sorted(missing))}")
    cells = [[_named(row[i]) for i in kept] for row in body]
    return [f"| {' | '.join(row)} |" for row in head + cells]


def _named(cell: str) -> str:
    """Returns a cell with names that readers know; a shape may break at a comma."""
    first, comma, rest = cell.partition(",")
    return NAMES.get(first, first) + comma + rest.replace(",", ",<wbr>")


def replaced(markdown: str) -> str:
    """Returns the text of a page with its markers replaced by tables."""
    return MARKER.sub(lambda x: "\n".join(x[1] + line for line in table(x[2], x[3])), markdown)
