"""Tables of context parallelism, from the rows of run_parallel.py."""

from __future__ import annotations

from typing import Any

from .markdown import grid, reasons, thousands, unique


def render(results: dict[str, Any]) -> str:
    """Returns tables of steps, overlap, longest sequences and features, and names their runs."""
    of = lambda what: [row for row in results["rows"] if row["what"] == what]
    percent = lambda x: "-" if x is None else f"{100 * x:.1f}"
    number = lambda x, digits=1: "-" if x is None else f"{x:.{digits}f}"
    memory = lambda x: "-" if x is None else f"{x / 2**30:.2f}"
    where = lambda row: [str(row["gpus"]), thousands(row["q_len"]), row["kind"]]
    head = ["GPUs", "T", "", "ms (rounds)", "TFLOP/s of each", "% of one GPU", "% estimated"]
    head += [
        "GiB sent",
        "ms of sending alone",
        "GiB of arguments and results",
        "GiB of temporaries",
    ]
    steps = []
    for row in of("step"):
        if row["refused"] is None:
            held = [row["argument_bytes"] + row["output_bytes"], row["temp_bytes"]]
            shares = [percent(row["share"]), percent(row["bound"])]
            sent = [memory(row["sent_bytes"]), number(row["sending_ms"], 2)]
            ms = "-" if row["ms"] is None else f"{row['ms']:.1f} ({row['rounds']})"
            speed = [ms, number(row["tflops"], 0)]
            steps.append([*where(row), *speed, *shares, *sent, *map(memory, held)])
    found = [grid(head, steps)]
    head = ["GPUs", "T", "", "ms from first to last", "attention", "sending", "% overlapped"]
    body = []
    for row in of("overlap"):
        ms = [number(row[name], 2) for name in ("whole", "attention", "sending")]
        body.append([*where(row), *ms, percent(row["hidden"] / row["sending"])])
    found += [grid(head, body)] if body else []
    body = []
    for row in of("longest"):
        plan = row["refused"] or memory(row["planned_bytes"])
        body.append([*where(row), plan])
    head = ["GPUs", "longest T by XLA's plan, not run", "", "GiB of each"]
    found += [grid(head, body)] if body else []
    body = [[*where(row), row["feature"], number(row["gate"], 2)] for row in of("feature")]
    head = ["GPUs", "T", "", "feature", "error, of what is allowed"]
    found += [grid(head, body)] if body else []
    found += [_shares(of("step")), *_rates(of("collective"))]
    timed = {(row["gpus"], row["q_len"]) for row in of("step")}
    sent = [run for run in results["runs"] if timed & {(run["gpus"], n) for n in run["lengths"]}]
    for rates in unique(run["rates"] for run in sent):
        gpus = unique(str(run["gpus"]) for run in sent if run["rates"] == rates)
        found.append(f"Sending alone, {' and '.join(gpus)} GPUs: {rates}.")
    if len(results["runs"]) > 1:
        found.append(f"{len(results['runs'])} runs; the results file has the commit of each.")
    refused = [row | {"provider": row["kind"]} for row in of("step")]
    refused += [row | {"provider": f"{row['name']} of {row['of']}"} for row in of("collective")]
    refused += [row | {"provider": f"{row['kind']}, {row['feature']}"} for row in of("feature")]
    return "\n\n".join(found) + reasons(refused)


def _shares(steps: list[dict[str, Any]]) -> str:
    """Explains the columns "% of one GPU" and "% estimated" of the steps."""
    of = {r["q_len"]: r["share_of"] for r in steps if r["share"] is not None}
    others = [f", but at {thousands(of[n])} for {thousands(n)}" for n in of if of[n] != n]
    return (
        "% of one GPU: TFLOP/s of each against one GPU's in the same run at the same "
        f"T{''.join(others)}. % estimated: what imbalance and sending leave of that, if all work "
        "runs at one GPU's speed and only a ring overlaps sending with attention; an estimate, not "
        "a bound, as both can be faster."
    )


def _rates(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the GB/s that every GPU sends, over messages that took more than 20 microseconds."""
    rows = [row for row in rows if row["refused"] is None]
    found = []
    for gpus, name in unique((row["gpus"], row["name"]) for row in rows):
        mine = [r for r in rows if (r["gpus"], r["name"]) == (gpus, name) and r["ms"] > 0.02]
        mine.sort(key=lambda row: row["sent_bytes"])
        rates = (f"{row['gb_per_s']:.0f} of {row['sent_bytes'] / 1e6:.0f} MB" for row in mine)
        found.append(f"{name} ({gpus} GPUs) {', '.join(unique(rates))}")
    return [f"GB/s that a GPU sends: {'; '.join(found)}."] if found else []
