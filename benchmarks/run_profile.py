"""Profiles the backward's main kernels, ours and FlashAttention-3's, by Nsight Compute.

    ncu --clock-control none --kernel-name-base demangled \\
        -k regex:"backward_fused_mosaic|FlashAttnBwdSm90<" -o profile \\
        --section SpeedOfLight --section WarpStateStats --section InstructionStats \\
        --section ComputeWorkloadAnalysis --section SchedulerStats --section SourceCounters \\
        python -m benchmarks.run_profile
    ncu --import profile.ncu-rep --page raw --csv > raw.csv
    ncu --import profile.ncu-rep --page source --csv --print-source sass > source.csv
    python -m benchmarks.run_profile --raw raw.csv --source source.csv \\
        --out benchmarks/results/backward_profile.json

The first program runs each backward once. The last reads what ncu has found: figures of each kernel
and, of the loop in which its warps do matmuls, where they wait. A host whose GPU gives no hardware
counters fails at the first.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import flash_pallas as fp

from . import flash_attention_3, results

CELLS = {  # B, T, N, K, H, all causal
    "4,4k,32,32,64 causal": (4, 4096, 32, 32, 64),
    "4,4k,16,16,128 causal": (4, 4096, 16, 16, 128),
    "2,8k,32,8,128 causal": (2, 8192, 32, 8, 128),
}
CONTESTANTS = {"flash_pallas": fp.flash_attention, "fa3": flash_attention_3.attention}
OURS = "flash_pallas_backward_fused_mosaic"
# ncu's name of a figure, what it is divided by, and ours.
METRICS = {
    "ms": ("gpu__time_duration.sum", 1.0),
    "instructions, millions": ("smsp__inst_executed.sum", 1e6),
    "tensor pipe busy, %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1.0),
    "instructions a cycle": ("smsp__issue_active.avg.per_cycle_active", 0.25),
}
STALL, NOT_ISSUED = "stall_", "(Not Issued)"
WORST = 40  # instructions of a loop that are listed
MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}  # ncu takes what suits the numbers


def run_all() -> None:
    """Runs the backward of every cell once, of ours and of FlashAttention-3's."""
    for cell in CELLS.values():
        arrays = _drawn(*cell)
        for attention in CONTESTANTS.values():
            jax.block_until_ready(_gradients(attention)(*arrays))


def _drawn(batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> list[jax.Array]:
    """Returns Q, K, V and dO."""
    keys, sizes = jax.random.split(jax.random.key(0), 4), (heads, kv_heads, kv_heads, heads)
    return [
        jax.random.normal(key, (batch, length, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys, sizes, strict=True)
    ]


def _gradients(attention):
    call = lambda q, k, v: attention(q, k, v, causal=True)
    return jax.jit(lambda q, k, v, do: jax.vjp(call, q, k, v)[1](do))


def kernels_of(lines: Iterator[str]) -> list[tuple[str, list[dict[str, str]]]]:
    """Reads ncu's page of sources: (name of a kernel, its instructions), each kernel once."""
    found: list[tuple[str, list[dict[str, str]]]] = []
    head: list[str] = []
    for row in csv.reader(lines):
        if row and row[0] == "Kernel Name":
            found.append((row[1], []))
        elif row and row[0] == "Address":
            head = row
        elif row:
            found[-1][1].append(dict(zip(head, row, strict=False)))
    # ncu writes a kernel twice whose name has an argument of a template.
    return [x for n, x in enumerate(found) if n == 0 or x != found[n - 1]]


def loop_of(instructions: list[dict[str, str]]) -> dict[str, Any]:
    """Returns where warps wait in the loop in which matmuls are issued most often."""
    count = lambda x: int(x["Instructions Executed"])
    most = max(count(x) for x in instructions if "HGMMA" in x["Source"])
    loop = [x for x in instructions if abs(count(x) - most) <= 0.1 * most]
    samples = sum(int(x["# Samples"]) for x in loop)
    share = lambda n: round(100.0 * n / samples, 2)
    waits: collections.Counter[str] = collections.Counter()
    worst = []
    for place, x in enumerate(loop):
        why = {k[len(STALL) :]: int(n or 0) for k, n in x.items() if _is_stall(k)}
        waits.update(why)
        cause = max(why, key=lambda k: why[k])
        worst.append((share(int(x["# Samples"])), place, " ".join(x["Source"].split()), cause))
    listed = sorted(sorted(worst, reverse=True)[:WORST], key=lambda x: x[1])
    return {
        "instructions": len(loop),
        "exponentials": sum("MUFU.EX2" in x["Source"] for x in loop),
        "waits, % of samples": {name: share(n) for name, n in waits.most_common(8)},
        "longest waits": [
            {"%": percent, "place": place, "instruction": text, "why": cause}
            for percent, place, text, cause in listed
        ],
    }


def _is_stall(column: str) -> bool:
    return column.startswith(STALL) and NOT_ISSUED not in column


def rows_of(raw: Iterator[str], source: Iterator[str]) -> list[dict[str, Any]]:
    """Returns a row for each main kernel, in the order of the cells and contestants."""
    head, units, *figures = csv.reader(raw)
    unit_of_time = MS[units[head.index(METRICS["ms"][0])]]
    ran = [dict(zip(head, row, strict=True)) for row in figures]
    main = lambda name: OURS in name or "FlashAttnBwdSm90<" in name
    ran = [x for x in ran if main(x["Kernel Name"])]
    loops = [loop_of(x) for name, x in kernels_of(source) if main(name)]
    number = lambda text: float(text.replace(",", ""))
    found = []
    for n, (figures_of_kernel, loop) in enumerate(zip(ran, loops, strict=True)):
        cell = list(CELLS)[n // len(CONTESTANTS)]
        kernel = list(CONTESTANTS)[n % len(CONTESTANTS)]
        assert (OURS in figures_of_kernel["Kernel Name"]) == (kernel == "flash_pallas")
        metrics = {
            name: round(number(figures_of_kernel[metric]) / unit, 3)
            for name, (metric, unit) in METRICS.items()
        }
        metrics["ms"] = round(metrics["ms"] * unit_of_time, 4)
        found.append({"cell": cell, "kernel": kernel, **metrics, "loop": loop})
    return found


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_profile", description=__doc__)
    parser.add_argument("--raw", type=pathlib.Path, help="ncu's page of figures")
    parser.add_argument("--source", type=pathlib.Path, help="ncu's page of instructions")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.raw is None:
        return run_all()
    with arguments.raw.open() as raw, arguments.source.open() as source:
        rows = rows_of(raw, source)
    about = {"summary": "Nsight Compute, one launch of each kernel, the card's own clocks"}
    found = results.header("profile of backwards", about) | {"rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
