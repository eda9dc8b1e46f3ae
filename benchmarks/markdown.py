"""Building blocks of all tables."""

from __future__ import annotations

from typing import Any

REASON_LENGTH = 160


def grid(head: list[str], body: list[list[str]]) -> str:
    """Returns a Markdown table: names of columns, then rows."""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def unique(values) -> list:
    """Returns the values without repetitions, in order."""
    return list(dict.fromkeys(values))


def thousands(length: int) -> str:
    """Formats a length as people write it, as in "16k"."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def reasons(rows: list[dict[str, Any]]) -> str:
    """Returns one line per provider and reason for having no number, or an empty string."""
    lines: dict[str, int] = {}
    for row in rows:
        if row["refused"] is not None:
            reason = " ".join(row["refused"].split())[:REASON_LENGTH]
            line = f"- {row['provider']}: {reason}"
            lines[line] = lines.get(line, 0) + 1
    if not lines:
        return ""
    listed = "\n".join(f"{line} ({count} of the rows)" for line, count in lines.items())
    return f"\n\nNo number:\n\n{listed}"
