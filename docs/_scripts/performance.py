"""Makes the tables of docs/performance.md from benchmarks/results/*.json.

A marker `<!-- results: NAME -->` stands for a table: `timing`, `features` or `decode`. Rows carry
what docs/assets/performance.js lets a reader choose by: GPU, jax version, head dim, length, mask.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import flops

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
MARKER = re.compile(r"<!-- results: (\w+) -->")
NOTHING = "–"  # noqa: RUF001

# In the order of the columns.
NAMES = {
    "flash_pallas": "hopper",
    "torch_cudnn": "cuDNN (PyTorch)",
    "jax_cudnn": "cuDNN (jax.nn)",
    "fa4": "FlashAttention-4 (PyTorch)",
    "fa4_jax": "FlashAttention-4 (JAX)",
    "tokamax": "Tokamax",
    "flash_pallas_portable": "portable",
    "torch_flash": "FlashAttention-2 (PyTorch)",
    "triton_baseline": "FlashAttention-2 (Triton)",
    "torch_efficient": "memory-efficient (PyTorch)",
    "pallas_triton": "pallas.ops.gpu (Triton)",
    "jax_xla": "jax.nn (XLA)",
    "flash_pallas_deterministic": "hopper, deterministic",
}
YARDSTICK = "torch_cudnn"

# File, and the columns to take where others of the same run are out of date. A row is of one run:
# figures of two runs never stand side by side.
TIMING: dict[str, tuple[str, ...]] = {
    "h200.json": (),
    "h200_fa4.json": (),
    "fa4.json": (),
    "wide.json": (),
    "charts.json": (),
    "h100.json": (),
    "portable.json": (),
    "h200_deterministic.json": ("flash_pallas_deterministic",),
    "h200_baselines.json": ("triton_baseline", "jax_xla"),
}
FEATURES = ("features.json",)
DECODE = ("decode.json",)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        choice: what a reader chooses by: gpu, jax, head-dim, length and mask.
        cells: text of every cell, as HTML, by column.
    """

    choice: dict[str, str]
    cells: dict[str, str]


def loaded(name: str) -> dict[str, Any]:
    """Returns a results file."""
    return json.loads((RESULTS / name).read_text())


def gpu(results: dict[str, Any]) -> str:
    """Returns the short name of the GPU of a results file."""
    return results["device"].removeprefix("NVIDIA ").split()[0]


def row(results: dict[str, Any], shape: str, mask: str, cells: dict[str, str]) -> Row:
    """Makes a row of a call whose shape is "B,T,N,K,H" or "B,T,N,K,H/Hv"."""
    _, length, *_, head_dim = shape.split(",")
    choice = {
        "gpu": gpu(results),
        "jax": results["versions"]["jax"],
        "head-dim": head_dim,
        "length": length,
        "mask": mask,
    }
    first = {"GPU": choice["gpu"], "jax": choice["jax"], "B,T,N,K,H": shape}
    return Row(choice, first | cells)


def timing() -> list[Row]:
    """Returns a row for each run, GPU, jax version, shape, mask and pass: TFLOP/s of everybody."""
    found: dict[tuple[str, ...], Row] = {}
    for name, columns in TIMING.items():
        results = loaded(name)
        for each in _timed(results):
            if each["provider"] not in (columns or NAMES):
                continue
            cells = {"mask": each["mask"], "pass": each["direction"], "run": name}
            new = row(results, each["shape"], each["mask"], cells)
            place = (name, *new.choice.values(), each["shape"], each["direction"])
            # Of a cell that was timed twice, the last: as in benchmarks/tables.py.
            found.setdefault(place, new).cells[NAMES[each["provider"]]] = _speed(each)
    return list(found.values())


def _timed(results: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yields shape, mask, direction, provider, tflops and ratio of each row of a timing suite."""
    for each in results["rows"]:
        if "cell" not in each:
            sizes = (each[name] for name in ("batch", "q_len", "q_heads", "kv_heads", "head_dim"))
            mask = "causal" if each["causal"] else "full"
            yield {**each, "shape": ",".join(map(str, sizes)), "mask": mask}
            continue
        shape, mask = each["cell"].split()
        batch, length, heads, _, head_dim = map(int, shape.split(","))
        sizes = types.SimpleNamespace(
            batch=batch, q_len=length, kv_len=length, q_heads=heads, head_dim=head_dim
        )
        for provider, ms in each["ms"].items():
            speed = flops.tflops(sizes, mask == "causal", each["direction"], ms)
            same = {"shape": shape, "mask": mask, "direction": each["direction"]}
            yield same | {"provider": provider, "tflops": speed, "ratio_to_torch_cudnn": None}


def _speed(each: dict[str, Any]) -> str:
    if each["tflops"] is None:
        return f'<span title="{html.escape(each["refused"])}">no</span>'
    ratio = each["ratio_to_torch_cudnn"]
    told = "" if ratio is None or each["provider"] == YARDSTICK else f" ({ratio:.2f})"
    return f"{each['tflops']:.0f}{told}"


# In the name of a call: what the filter calls it.
_MASKS = {"window": "causal, window", "packed": "causal, packed", "kv_lengths": "causal, lengths"}


def features() -> list[Row]:
    """Returns a row for each call with masks, modifiers or other head dims: ms of both passes."""
    found: dict[tuple[str, ...], Row] = {}
    for name in FEATURES:
        results, mask, group = loaded(name), "full", None
        for each in results["rows"]:
            place = (each["group"], each["shape"], each["direction"])
            mask, group = ("full" if place != group else mask), place
            if each["name"].startswith(("full", "causal")):
                mask = each["name"].split(",")[0]
            shape, _, dtype = each["shape"].partition(" ")
            chosen = next((m for word, m in _MASKS.items() if word in each["name"]), mask)
            call = each["name"]
            if call in NAMES:
                call = f"{NAMES[call]}, {mask}"
            cells = {"dtype": dtype or "bfloat16", "call": html.escape(call)}
            key = (each["group"], each["shape"], call)
            new = found.setdefault(key, row(results, shape, chosen, cells))
            new.cells[f"{each['direction']}, ms"] = _milliseconds(each)
    return list(found.values())


def _milliseconds(each: dict[str, Any]) -> str:
    if each.get("ms") is None:
        return NOTHING
    speed = each.get("speed")
    return f"{each['ms']:.2f}" + ("" if speed is None else f" ({speed:.2f})")


def decode() -> list[Row]:
    """Returns a row for each decoding step: microseconds and GB/s of the cache."""
    found = []
    for name in DECODE:
        results = loaded(name)
        for each in results["rows"]:
            # The others are the reader that sets the ceiling, and trials of splits and tiles.
            if each["group"] in ("ceiling", "splits", "blocks") or each["ms"] is None:
                continue
            shape = each["shape"]
            call = each["call"].removeprefix(f"{each['provider']}, ")
            cells = {
                "kernel": NAMES[each["provider"]],
                "call": html.escape(call),
                "us": f"{each['ms'] * 1e3:.1f}",
                "GB/s": f"{each['gb_per_s']:.0f} ({each['of_ceiling']:.2f})",
            }
            new = row(results, shape, "causal", cells)
            if new not in found:  # several groups have the plain call
                new.cells["B,S,N,K,H"] = new.cells["B,T,N,K,H"]
                found.append(new)
    return _once(found)


def _once(rows: list[Row]) -> list[Row]:
    """Leaves out rows of calls that a row before them has."""
    taken, kept = set(), []
    for each in rows:
        place = tuple(each.cells[name] for name in ("B,S,N,K,H", "kernel", "call"))
        if place not in taken:
            kept.append(each)
        taken.add(place)
    return kept


TABLES = {
    "timing": (
        timing,
        ("GPU", "jax", "B,T,N,K,H", "mask", "pass", *NAMES.values(), "run"),
        tuple(TIMING),
    ),
    "features": (
        features,
        ("GPU", "jax", "B,T,N,K,H", "dtype", "call", "forward, ms", "backward, ms"),
        FEATURES,
    ),
    "decode": (decode, ("GPU", "jax", "B,S,N,K,H", "kernel", "call", "us", "GB/s"), DECODE),
}
OURS = tuple(name for provider, name in NAMES.items() if provider.startswith("flash_pallas"))
WORDS = ("GPU", "jax", "B,T,N,K,H", "B,S,N,K,H", "mask", "pass", "dtype", "call", "kernel", "run")


def table(name: str) -> str:
    """Returns a table as HTML on one line, with a line that says where its numbers come from."""
    rows_of, columns, files = TABLES[name]
    rows = rows_of()
    columns = [c for c in columns if any(c in each.cells for each in rows)]
    head = "".join(f"<th{_kind(c, head=True)}>{html.escape(c)}</th>" for c in columns)
    body = "".join(_tr(each, columns) for each in rows)
    where = "; ".join(_source(loaded(file), file) for file in files)
    return (
        '<div class="fp-scroll"><table class="fp-results">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="fp-source">From {where}.</p>'
    )


def _tr(each: Row, columns: list[str]) -> str:
    data = "".join(f' data-{key}="{html.escape(x)}"' for key, x in each.choice.items())
    cells = "".join(f"<td{_kind(c)}>{each.cells.get(c, NOTHING)}</td>" for c in columns)
    return f"<tr{data}>{cells}</tr>"


def _kind(column: str, head: bool = False) -> str:
    if column in WORDS:
        return ""
    return ' class="number ours"' if column in OURS and not head else ' class="number"'


def _source(results: dict[str, Any], name: str) -> str:
    others = ("torch", "triton", "tokamax", "nvidia-cudnn-cu13")
    versions = [f"{x} {results['versions'][x]}" for x in others if x in results["versions"]]
    told = ", ".join([gpu(results), results["date"].split()[0], *versions])
    return f"<code>{name}</code> ({told})"


def replaced(markdown: str) -> str:
    """Returns the text of a page with its markers replaced by tables."""
    return MARKER.sub(lambda found: table(found[1]), markdown)
