"""Runs the cases of `flash_pallas.conformance` against attention functions of JAX, on this device.

    python -m benchmarks.run_conformance --out benchmarks/results/conformance.json

`--into docs/conformance.md` writes the table of such a file into the page and runs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import re
import sys
from typing import Any

import jax

from flash_pallas import conformance

from . import results
from .markdown import grid, unique

# As on the command line of flash_pallas.conformance, by the package that has them.
FUNCTIONS = {
    "flash_pallas": "flash_pallas:flash_attention",
    "jax.nn": "jax.nn:dot_product_attention",
    "Tokamax": "tokamax:dot_product_attention",
    "Flax nnx": "flax.nnx:dot_product_attention",
    "Flax linen": "flax.linen:dot_product_attention",
}
PACKAGES = ("jax", "jaxlib", "flax", "tokamax")
MARKED = re.compile(r"(<!-- table:conformance -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CELLS = {
    conformance.RIGHT: "right",
    conformance.WRONG: "**wrong**",
    conformance.REFUSED: "refused",
    conformance.NOT_OFFERED: "",
}
REASON_LENGTH = 110


def measured(dtype: str | None) -> dict[str, Any]:
    """Returns the verdicts of every function that is installed, and where they come from."""
    found = {}
    for name, path in FUNCTIONS.items():
        try:
            function = conformance.loaded(path)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        verdicts = conformance.check(function, dtype=dtype)
        found[name] = [dataclasses.asdict(verdict) for verdict in verdicts]
        print(f"{name}: {sum(v['verdict'] == conformance.RIGHT for v in found[name])} right")
    return {
        "device": jax.local_devices()[0].device_kind,
        "dtype": dtype or "that of the device",
        "commit": results.commit(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "verdicts": found,
    }


def table(run: dict[str, Any]) -> str:
    """Returns the table of a run in Markdown, and below it the reasons."""
    verdicts = run["verdicts"]
    by_case = {name: {v["case"]: v for v in each} for name, each in verdicts.items()}
    cases = unique(v["case"] for each in verdicts.values() for v in each)
    body = [
        [case, *(CELLS[each[case]["verdict"]] if case in each else "" for each in by_case.values())]
        for case in cases
    ]
    lines = unique(line for name, each in verdicts.items() for v in each for line in _told(name, v))
    told = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    head = f"On one {run['device']}, {told}. An empty cell: the function has no such option.\n\n"
    return head + "\n".join([grid(["case", *verdicts], body), "", *sorted(lines), ""])


def _told(name: str, verdict: dict[str, Any]) -> list[str]:
    """Returns a line on what a table's cell does not say."""
    detail, kind = verdict["detail"], verdict["verdict"]
    if kind == conformance.REFUSED:
        return [f"- {name}, refused: `{detail[:REASON_LENGTH]}`"]
    if kind == conformance.WRONG:
        size = verdict["error"]
        far = "" if size is None else f" is off by {size:.2g}; allowed is {verdict['allowed']:.2g}"
        return [f"- {name}, {verdict['case']}: {detail}{far}."]
    if kind == conformance.RIGHT and detail:
        return [f"- {name}, {verdict['case']}: {detail}."]
    return []


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_conformance")
    parser.add_argument("--out", type=pathlib.Path, default="benchmarks/results/conformance.json")
    parser.add_argument("--into", type=pathlib.Path, help="page that gets the table of --out")
    parser.add_argument("--dtype", help="of the cases that have none of their own")
    given = parser.parse_args()
    if given.into is None:
        given.out.write_text(json.dumps(measured(given.dtype), indent=1) + "\n")
        return
    run = json.loads(given.out.read_text())
    page = given.into.read_text()
    given.into.write_text(MARKED.sub(lambda m: m[1] + table(run) + m[3], page))


if __name__ == "__main__":
    main()
