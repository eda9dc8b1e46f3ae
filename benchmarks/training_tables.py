"""Tables of training steps and first calls.

The rows are those of run_training.py, run_sharded_training.py and run_first_call.py.
"""

from __future__ import annotations

from typing import Any

from .first_calls import PHASES
from .markdown import grid, reasons, thousands, unique

YARDSTICK = "jax_cudnn"
# Ends of the names of contestants: the program is in JAX's cache; `jax.export` kept it, too.
CACHED, EXPORTED = ", cached", ", exported"


def render(results: dict[str, Any]) -> str:
    """Tabulates speed, memory and the seconds of the first step, by length and attention."""
    rows, body = results["rows"], []
    for row in (row for row in rows if row["ms"] is not None):
        _, comma, remat = row["provider"].partition(",")
        ratio = (row["relative"] or {}).get(YARDSTICK + comma + remat)
        memory = row["peak_bytes"] or row["planned_bytes"]
        parts = " + ".join(f"{row[n]:.1f}" for n in PHASES)
        line = [thousands(row["length"]), str(row["batch"]), row["provider"]]
        line += [f"{row['tokens_per_s']:,.0f}", "-" if ratio is None else f"{ratio:.3f}"]
        line += [f"{row['ms']:.0f}", f"{row['tflops']:.0f}", f"{memory / 2**30:.1f}"]
        line += [f"{row['first_s']:.1f} ({parts})", f"{row['losses'][-1]:.4f}"]
        body.append(line)
    head = ["T", "B", "attention", "tokens/s", f"of {YARDSTICK}'s, same remat", "ms"]
    head += ["model TFLOP/s", "GiB", "s of the first step (trace + lower + compile + run)", "loss"]
    return grid(head, body) + reasons(rows)


def render_first_calls(results: dict[str, Any]) -> str:
    """Tabulates the seconds of first calls, by phase and in all, next to cuDNN's."""
    rows, body = results["rows"], []
    for row in (row for row in rows if row["refused"] is None):
        kept = (end for end in (CACHED, EXPORTED) if row["provider"].endswith(end))
        ratio = row["relative"].get(YARDSTICK + next(kept, ""))
        phases = (f"{row[n]:.2f}" for n in PHASES)
        line = [row["work"], row["provider"], *phases, f"{row['first_s']:.2f}"]
        body.append([*line, f"{row['spread']:.0%}", "-" if ratio is None else f"{ratio:.2f}"])
    head = ["program", "attention", "trace", "lower", "compile", "run", "in all", "spread"]
    head += [f"of {YARDSTICK}'s"]
    named = [row | {"provider": f"{row['work']}, {row['provider']}"} for row in rows]
    return grid(head, body) + reasons(named)


def render_sharded(results: dict[str, Any]) -> str:
    """Tabulates speed, memory and communication by devices and way, then the links' rates."""
    steps = [row for row in results["rows"] if row["what"] == "step"]
    body = []
    for row in (row for row in steps if row["refused"] is None):
        number = lambda x, digits: "-" if x is None else f"{x:.{digits}f}"
        line = [f"{row['batch']} x {thousands(row['length'])}", row["way"], row["types"]]
        line += [row["provider"], f"{row['ms']:.0f}", f"{row['tokens_per_s']:,.0f}"]
        line += [f"{row['tflops']:.0f}", number(row.get("speedup"), 2)]
        reckoned = row.get("reckoned_ms")
        alone = row["ms"] * row["speedup"] if reckoned else None
        line += [number(alone and alone / reckoned, 2), f"{row['planned_bytes'] / 2**30:.1f}"]
        line += [number((row.get("sent_bytes") or 0) / 1e9, 2)]
        line += [number(row.get("sending_ms"), 0), *_communication(row.get("profile"))]
        body.append(line)
    head = ["B x T", "mesh", "axes", "attention", "ms", "tokens/s", "model TFLOP/s of each"]
    head += ["times one GPU", "reckoned", "GiB of each", "GB sent", "ms of sending, reckoned"]
    head += ["% communicating", "% communicating alone"]
    found = [grid(head, body)] if body else []
    found.append(_NOTE)
    links = [row for row in results["rows"] if row["what"] == "link" and row["refused"] is None]
    links.sort(key=lambda row: (row["gpus"], row["name"], row["sent_bytes"]))
    size = lambda row: f"{row['sent_bytes'] / 1e6:.0f} MB"
    told = (f"{r['name']} ({r['gpus']} GPUs) {r['gb_per_s']:.0f} of {size(r)}" for r in links)
    found += [f"GB/s that a GPU sends: {'; '.join(unique(told))}."] if links else []
    full = lambda row: f"{row['way']}, {row['types']}, {row['provider']}"
    named = [row | {"provider": full(row)} for row in steps]
    return "\n\n".join(found) + reasons(named)


_NOTE = (
    "Times one GPU: tokens/s over its, with the same attention. Reckoned: the same if "
    "all work were divided evenly at one GPU's speed and nothing overlapped what is sent, at the "
    "rates below; more is possible where communication overlaps. Communicating: share of a step in "
    "which NCCL runs, waiting for other GPUs included; alone: and nothing else does."
)


def _communication(profile: dict[str, float] | None) -> list[str]:
    """Returns the shares of a step, in percent, from a profile in milliseconds."""
    if profile is None:
        return ["-", "-"]
    return [f"{100 * profile[name] / profile['whole']:.1f}" for name in ("sending", "exposed")]
