"""What all tables are made of."""

from __future__ import annotations

from typing import Any

REASON_LENGTH = 160


def grid(head: list[str], body: list[list[str]]) -> str:
    """A table: names of columns, then rows."""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def unique(values) -> list:
    """Without repetitions, in order."""
    return list(dict.fromkeys(values))


def thousands(length: int) -> str:
    """A length as people write it."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def reasons(rows: list[dict[str, Any]]) -> str:
    """One line per provider and reason for having no number."""
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
