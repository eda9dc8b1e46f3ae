"""Markdown tables from a results file, printed or put between the markers of a document.

    python -m benchmarks.tables RESULTS.json
    python -m benchmarks.tables RESULTS.json --into docs/performance-tables.md --name NAME

The second command replaces the text between `<!-- table:NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from typing import Any

from . import flops, parallel_tables, training_tables
from . import results as results_file
from .markdown import grid, reasons, thousands, unique
from .providers import YARDSTICK


def render(results: dict[str, Any]) -> str:
    """Returns the whole table of a results file, with the line that says where it comes from."""
    own = {
        "memory": _memory_table,
        "features": _features_table,
        "decode": _decode_table,
        "serving": _serving_table,
        "engine": _engine_table,
        "overhead": _overhead_table,
        "parallel": parallel_tables.render,
        "derivatives": _derivatives_table,
        "mean_flow": _mean_flow_table,
        "stack": _stack_table,
        "training": training_tables.render,
        "first_call": training_tables.render_first_calls,
        "sharded_training": training_tables.render_sharded,
    }
    table = own.get(results["suite"], _timing_table)(results)
    return f"{table}\n\n{provenance(results)}\n"


def provenance(results: dict[str, Any]) -> str:
    """Returns device, driver, date, commit, versions and method in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    commit = (results["commit"] or "unknown")[:12]
    return (
        f"{results['device']}, driver {results['driver']}, {results['date']}, commit `{commit}`; "
        f"{versions}. {results['method']['summary']}"
    )


def _timing_table(results: dict[str, Any]) -> str:
    """Tabulates all TFLOP/s, with the speed relative to the yardstick in parentheses."""
    rows = results["rows"]
    key = lambda r: (*(r[name] for name in results_file.ROW_FIELDS[:7]),)
    cells = {(key(row), row["provider"]): row for row in rows}
    providers = unique(row["provider"] for row in rows)
    # A provider that never ran is named below the table and takes no column.
    shown = [p for p in providers if any(r["provider"] == p and r["ms"] for r in rows)]
    judged = results["suite"] == "h200" and OURS in shown and YARDSTICK in shown
    against = results["suite"] != "h200" and set(shown) >= _PORTABLE
    beside = [peer for peer in BESIDE if {OURS, peer} <= set(shown)]
    head = ["B,T,N,K,H", "mask", "pass", *shown, *(_JUDGEMENT if judged else [])]
    head += [f"ours / {peer}" for peer in beside]
    head += ["portable / FlashAttention-2"] if against else []
    body = []
    for found in unique(key(row) for row in rows):
        *shape, causal, direction = found
        line = [",".join(map(str, shape)), "causal" if causal else "full", direction]
        entries = {provider: cells.get((found, provider)) for provider in shown}
        line += map(_entry, entries.values())
        line += _judgement(entries) if judged else []
        line += [_relative(entries[OURS], peer) for peer in beside]
        line += [_relative(entries["flash_pallas_portable"], "torch_flash")] if against else []
        body.append(line)
    return grid(head, body) + (_FOOTNOTE if judged else "") + reasons(rows)


_PORTABLE = {"flash_pallas_portable", "torch_flash"}


def _relative(row: dict[str, Any] | None, peer: str) -> str:
    """Returns the speed of a row relative to a peer, from the rounds that both have."""
    ratio = row and (row.get("relative") or {}).get(peer)
    return "-" if ratio is None else f"{ratio:.2f}"


OURS = "flash_pallas"
BESIDE = ("fa3", "fa4")  # providers that ours is divided by, in a column for each
_JUDGEMENT = ["ours / best peer", "ours / GEMM"]
_SIZE = " x ".join([str(flops.GEMM_SIZE)] * 3)
_FOOTNOTE = f"\n\nGEMM: a bfloat16 matmul of size {_SIZE} in the same rounds."


def _judgement(entries: dict[str, dict[str, Any] | None]) -> list[str]:
    """Returns the columns named in _JUDGEMENT; the best peer is the one that ours beats least."""
    ours = entries[OURS]
    ratios = (ours and ours.get("relative")) or {}
    peers = [ratio for name, ratio in ratios.items() if not name.startswith(OURS)]
    if ours is None or not peers:
        return ["-"] * len(_JUDGEMENT)
    share = ours.get("share_of_gemm")
    return [f"{min(peers):.2f}", "-" if share is None else f"{share:.2f}"]


def _entry(row: dict[str, Any] | None) -> str:
    if row is None or row["ms"] is None:
        return "-"
    text = f"{row['tflops']:.0f}"
    ratio = row["ratio_to_torch_cudnn"]
    return text if ratio is None or row["provider"] == YARDSTICK else f"{text} ({ratio:.2f})"


def _memory_table(results: dict[str, Any]) -> str:
    """Tabulates GiB by T (rows) and provider (columns): measured, else XLA's plan after a tilde."""
    rows = results["rows"]
    cells = {(row["q_len"], row["provider"]): row for row in rows}
    providers = unique(row["provider"] for row in rows)
    lengths = sorted({row["q_len"] for row in rows if row["q_len"] is not None})
    body = []
    for length in lengths:
        entries = [_gibibytes(cells.get((length, provider))) for provider in providers]
        body.append([thousands(length), *entries])
    return grid(["T", *providers], body) + reasons(rows)


def _features_table(results: dict[str, Any]) -> str:
    """Tabulates ms with the speed relative to each group's first call in parentheses, and GiB."""
    body = []
    for group in groups(results["rows"]):
        for name in unique(row["name"] for row in group):
            found = {row["direction"]: row for row in group if row["name"] == name}
            both = [found.get(direction) for direction in ("forward", "backward")]
            if any(row and row.get("ms") for row in both):
                whole = _planned(both[1], "peak_bytes_both")
                memory = [*map(_planned, both), whole]
                body.append([group[0]["shape"], name, *map(_milliseconds, both), *memory])
    head = ["B,T,N,K,H", "call", "forward", "backward", "GiB forward", "GiB backward", "GiB both"]
    return grid(head, body) + _of_other_commits(results) + reasons(_with_provider(results["rows"]))


# Operations for each byte of the cache from which TFLOP/s are shown. Kernels reach 500 to 600
# TFLOP/s and an H200's memory 4.6 TB/s, so from 110 to 130 on arithmetic takes longer.
ARITHMETIC = 100


def _decode_table(results: dict[str, Any]) -> str:
    """Tabulates us and GB/s of every call, except the splits that plot.py draws and the tuning.

    TFLOP/s are shown where arithmetic binds, not the reading of the cache.
    """
    rows = [row for row in results["rows"] if row["group"] not in ("splits", "blocks")]
    timed = [row for row in rows if row["ms"] is not None]
    bound = lambda row: row.get("tflops", 0) * 1e3 >= ARITHMETIC * row["gb_per_s"]
    counted, body = any(map(bound, timed)), []
    for row in timed:
        rate = f"{row['gb_per_s']:.0f}"
        if "of_ceiling" in row:
            shares = [row[name] for name in ("of_ceiling", "of_reader") if name in row]
            rate += f" ({', '.join(f'{share:.2f}' for share in shares)})"
        splits = row.get("chosen", {}).get("num_splits")
        numbers = [f"{row['ms'] * 1e3:.1f}", rate]
        numbers += [f"{row['tflops']:.0f}" if bound(row) else "-"] if counted else []
        numbers.append("-" if splits is None else str(splits))
        body.append([row["group"], row["shape"], row["call"], *numbers])
    head = ["", "B,S,N,K,H", "call", "us", "GB/s", *(["TFLOP/s"] if counted else []), "splits"]
    return grid(head, body) + reasons(rows)


def _serving_table(results: dict[str, Any]) -> str:
    """Tabulates us, speed relative to all in one call, TFLOP/s, GB/s and launches of every mix."""
    rows, body = [row | {"provider": f"{row['mix']}, {row['call']}"} for row in results["rows"]], []
    number = lambda x, digits: "-" if x is None else f"{x:.{digits}f}"
    for row in (row for row in rows if row["ms"] is not None):
        line = [row["mix"], str(row["sequences"]), thousands(row["tokens"]), row["call"]]
        line += [f"{row['ms'] * 1e3:.1f}", number(row["speed"], 2), number(row.get("tflops"), 0)]
        body.append([*line, number(row.get("gb_per_s"), 0), number(row["launches"], 1)])
    head = ["mix", "sequences", "tokens", "call", "us", "speed", "TFLOP/s", "GB/s", "launches"]
    return grid(head, body) + reasons(rows)


def _engine_table(results: dict[str, Any]) -> str:
    """Tabulates what examples/serve.py says of each run."""
    head = ["engine", "tokens/s", "steps", "ms to the first token (p50 / p99)"]
    head += ["ms from token to token (p50 / p99)", "most pages held", "prompts from shared pages"]
    body = []
    for row in results["rows"]:
        ms = lambda name, row=row: " / ".join(f"{row[f'{name}_p{p}'] * 1e3:.1f}" for p in (50, 99))
        line = [row["call"], thousands(round(row["tokens_per_second"])), f"{row['steps']:,}"]
        line += [ms("ttft"), ms("tpot"), str(row["most_pages_held"])]
        body.append([*line, f"{row['prefix_reused']:.0%}"])
    return grid(head, body)


def _overhead_table(results: dict[str, Any]) -> str:
    """Tabulates device time, wall time without and with CUDA graphs, and launches, by provider."""
    rows = results["rows"]
    providers = unique(row["provider"] for row in rows)
    cells = {(row["shape"], row["work"], row["provider"]): row for row in rows}
    columns = ("device", "wall (graphs)", "launches")
    head = ["B,T,N,K,H", "tiles", "call", *(f"{p}: {c}" for p in providers for c in columns)]
    body = []
    for shape, work, tiles in unique((r["shape"], r["work"], r["tiles"]) for r in rows):
        line = [shape, str(tiles), work]
        for provider in providers:
            row = cells[shape, work, provider]
            device, wall, graphs, launches = (
                "-" if row[name] is None else f"{row[name]:.1f}"
                for name in ("device_us", "wall_us", "wall_us_with_graphs", "launches")
            )
            line += [device, f"{wall} ({graphs})", launches]
        body.append(line)
    return grid(head, body) + reasons(rows)


def _derivatives_table(results: dict[str, Any]) -> str:
    """Tabulates ms, TFLOP/s and GiB of every call, by provider."""
    rows = results["rows"]
    providers = unique(row["provider"] for row in rows if row["ms"])
    key = lambda row: (row["shape"], row["mask"], row["work"])
    cells = {(key(row), row["provider"]): row for row in rows}

    def entry(row) -> list[str]:
        if row is None or row["ms"] is None:
            return ["-", "-"]
        speed = f" ({row['tflops']:.0f})" if row["tflops"] else ""
        return [f"{row['ms']:.2f}{speed}", f"{row['temporary_bytes'] / 2**30:.2f}"]

    head = ["B,T,N,K,H", "mask", "call", *(x for p in providers for x in (p, f"{p}: GiB"))]
    body = [
        [*found, *(text for p in providers for text in entry(cells.get((found, p))))]
        for found in unique(map(key, rows))
    ]
    return grid(head, body) + reasons(rows)


def _mean_flow_table(results: dict[str, Any]) -> str:
    """Tabulates ms, the ratio to a step without the derivative, and GiB."""
    rows, body = results["rows"], []
    for row in (row for row in rows if row["ms"] is not None):
        gibibytes = f"{row['temporary_bytes'] / 2**30:.2f}"
        ratio = f"{row['times_flow_matching']:.2f}"
        body.append([row["shape"], row["step"], f"{row['ms']:.1f}", ratio, gibibytes])
    head = ["B,T,C", "step", "ms", "times flow matching", "GiB"]
    return grid(head, body) + reasons(rows)


def _stack_table(results: dict[str, Any]) -> str:
    """Tabulates tokens per second, ms and GiB of a step."""
    rows, body = results["rows"], []
    for row in (row for row in rows if row["ms"] is not None):
        gibibytes = f"{row['temporary_bytes'] / 2**30:.2f}"
        speed = f"{row['tokens_per_s']:,.0f}"
        body.append([row["shape"], row["step"], speed, f"{row['ms']:.1f}", gibibytes])
    return grid(["B,T", "attention", "tokens/s", "ms", "GiB"], body) + reasons(rows)


def _of_other_commits(results: dict[str, Any]) -> str:
    """Says how many rows were kept from earlier runs."""
    kept = sum("commit" in row for row in results["rows"])
    if not kept:
        return ""
    total = len(results["rows"])
    return f"\n\n{kept} of {total} rows are of earlier runs; the results file has their commits."


def groups(rows: list[dict[str, Any]]):
    """Returns the rows of each group: its forward rows, then its backward rows."""
    found: list[list[dict[str, Any]]] = []
    for row in rows:
        if not found or (row["direction"], found[-1][-1]["direction"]) == ("forward", "backward"):
            found.append([])
        found[-1].append(row)
    return found


def _with_provider(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"provider": row["name"]} for row in rows]


def _milliseconds(row: dict[str, Any] | None) -> str:
    if row is None or row.get("ms") is None:
        return "-"
    speed = row.get("speed")  # None where the first call of the group failed
    return f"{row['ms']:.2f}" if speed is None else f"{row['ms']:.2f} ({speed:.2f})"


def _planned(row: dict[str, Any] | None, of: str = "peak_bytes") -> str:
    planned = None if row is None else row.get(of)
    return f"{planned / 2**30:.2f}" if planned else "-"


def _gibibytes(row: dict[str, Any] | None) -> str:
    if row is None or row["refused"] is not None:
        return "-"
    if row["measured"] is not None:
        return f"{row['measured'] / 2**30:.3f}"
    return f"~{row['planned'] / 2**30:.3f}" if row["planned"] is not None else "-"


def replace(document: str, name: str, table: str) -> str:
    """Returns the document with the text between the markers of this name replaced.

    Raises:
        ValueError: it does not have exactly one such pair.
    """
    opening = re.escape(f"<!-- table:{name} -->")
    pattern = re.compile(f"({opening}\n).*?(<!-- end -->)", re.DOTALL)
    if len(pattern.findall(document)) != 1:
        raise ValueError(
            f"one pair of markers `<!-- table:{name} -->` and `<!-- end -->` is needed"
        )
    return pattern.sub(lambda m: f"{m[1]}{table.strip()}\n{m[2]}", document)


def main() -> None:
    """Prints the table of a results file, or puts it into a document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--into", type=pathlib.Path, help="the document to change")
    parser.add_argument("--name", help="of the markers; default: the suite")
    arguments = parser.parse_args()
    results = results_file.load(arguments.results)
    table = render(results)
    if arguments.into is None:
        print(table)
        return
    document = arguments.into.read_text()
    arguments.into.write_text(replace(document, arguments.name or results["suite"], table))


if __name__ == "__main__":
    main()
