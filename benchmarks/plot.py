"""Draws a results file or loss curves into a picture.

    python -m benchmarks.plot results RESULTS.json --out h200.png
    python -m benchmarks.plot losses A/loss.csv B/loss.csv --out losses.png

The suffix of --out is the format.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import statistics
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from . import results as results_file
from .run import row_label


def plot_results(results: dict[str, Any], out: pathlib.Path) -> None:
    """Draws TFLOP/s or training steps as bars, or peak memory or rates of decoding as lines.

    Args:
        results: of any suite but that of run_features.
        out: the picture; its suffix is the format (.png, .svg). The suite of charts makes two
            pictures, with "_forward" and "_backward" after the stem.
    """
    if results["suite"] == "charts":
        for direction in ("forward", "backward"):
            path = out.with_stem(f"{out.stem}_{direction}")
            _save(_charts(results["rows"], direction), results, path)
        return
    own = {"memory": _memory, "decode": _splits, "training": _training, "sharded_training": _ways}
    draw = own.get(results["suite"], _bars)
    _save(draw(results["rows"]), results, out)


def _save(figure, results: dict[str, Any], out: pathlib.Path) -> None:
    figure.suptitle(f"{results['device']}, {results['date']}", fontsize=10)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def _charts(rows: list[dict[str, Any]], direction: str):
    """Draws a panel for each head dim (down) and mask (across), with TFLOP/s bars by length.

    Each bar carries its TFLOP/s as a number. The grey line is the large GEMM of the same rounds, as
    the median over a panel.
    """
    rows = [row for row in rows if row["direction"] == direction and row["ms"] is not None]
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    dims = sorted({row["head_dim"] for row in rows})
    lengths = sorted({row["q_len"] for row in rows})
    width = 0.84 / max(len(providers), 1)
    size = (15, 1 + 3.4 * len(dims))
    figure, panels = plt.subplots(
        len(dims), 2, figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for head_dim, across in zip(dims, panels, strict=True):
        for causal, axes in zip((False, True), across, strict=True):
            panel = [r for r in rows if r["head_dim"] == head_dim and r["causal"] is causal]
            for index, provider in enumerate(providers):
                found = [row for row in panel if row["provider"] == provider]
                places = [lengths.index(r["q_len"]) + (index + 0.5) * width - 0.42 for r in found]
                bars = axes.bar(
                    places, [r["tflops"] for r in found], width, label=provider, color=f"C{index}"
                )
                axes.bar_label(bars, fmt="%.0f", fontsize=6, rotation=90, padding=2)
            limits = [r["tflops"] / r["share_of_gemm"] for r in panel if r.get("share_of_gemm")]
            if limits:
                axes.axhline(statistics.median(limits), color="0.6", ls="--", lw=1, label="GEMM")
            mask = "causal" if causal else "full"
            axes.set_title(f"{direction}, head dim {head_dim}, {mask}", fontsize=9)
            axes.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
            axes.set_axisbelow(True)
            axes.grid(axis="y", alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("sequence length (16k tokens in all, width 2048)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), ncols=7, loc="outside lower center")
    return figure


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _bars(rows: list[dict[str, Any]]):
    """Draws one panel per direction: cells along x, a bar for each provider that has a number."""
    cells = list(dict.fromkeys(row_label(row) for row in rows))
    providers = list(dict.fromkeys(row["provider"] for row in rows if row["ms"] is not None))
    figure, panels = plt.subplots(2, 1, figsize=(12, 7), layout="constrained", sharex=True)
    width = 0.8 / max(len(providers), 1)
    for axes, direction in zip(panels, ("forward", "backward"), strict=True):
        for index, provider in enumerate(providers):
            found = [r for r in rows if r["provider"] == provider and r["direction"] == direction]
            found = [r for r in found if r["ms"] is not None]
            places = [cells.index(row_label(r)) + (index + 0.5) * width - 0.4 for r in found]
            heights = [r["tflops"] for r in found]
            axes.bar(places, heights, width, label=provider, color=f"C{index}")
        axes.set(ylabel=f"{direction}, TFLOP/s")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    panels[1].legend(ncols=4, fontsize=8)  # the backward has a bar of every provider
    labels = [cell.replace(" ", "\n") for cell in cells]
    panels[1].set_xticks(range(len(cells)), labels, fontsize=7, rotation=20)
    panels[1].set_xlabel("batch, length, query heads, key heads, head dim")
    return figure


def _memory(rows: list[dict[str, Any]]):
    """Draws peak GiB against T, both logarithmic: linear growth is a line of slope 1."""
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for index, provider in enumerate(dict.fromkeys(row["provider"] for row in rows)):
        points = [
            (row["q_len"], (row["measured"] or row["planned"]) / 2**30)
            for row in rows
            if row["provider"] == provider and (row["measured"] or row["planned"])
        ]
        if points:
            axes.loglog(*zip(*points, strict=True), f"C{index}o-", ms=4, label=provider, base=2)
    axes.set(xlabel="sequence length T", ylabel="peak memory, GiB")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _splits(rows: list[dict[str, Any]]):
    """Draws GB/s against the number of splits, a line per cache; plain readers' best is dashed."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    best = max(row["gb_per_s"] for row in rows if row["group"] == "ceiling")
    swept = [row for row in rows if row["group"] == "splits" and row["ms"] is not None]
    for index, shape in enumerate(dict.fromkeys(row["shape"] for row in swept)):
        found = [row for row in swept if row["shape"] == shape]
        points = sorted((row["chosen"]["num_splits"], row["gb_per_s"]) for row in found)
        axes.semilogx(*zip(*points, strict=True), f"C{index}o-", ms=4, label=shape, base=2)
    axes.axhline(best, color="0.4", ls="--", lw=1, label="the best plain reader")
    axes.set(xlabel="number of splits", ylabel="k and v read, GB/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(title="batch, length, query heads, key heads, head dim")
    return figure


def _training(rows: list[dict[str, Any]]):
    """Draws bars by length and attention: tokens a second, and the seconds of the first step."""
    rows = [row for row in rows if row["ms"] is not None]
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    width = 0.84 / max(len(providers), 1)
    drawn = {"tokens_per_s": "thousand tokens/s", "first_s": "first step, s"}
    for axes, (name, label) in zip(panels, drawn.items(), strict=True):
        scale = 1e-3 if name == "tokens_per_s" else 1.0
        for index, provider in enumerate(providers):
            found = [row for row in rows if row["provider"] == provider]
            places = [lengths.index(r["length"]) + (index + 0.5) * width - 0.42 for r in found]
            heights = [scale * row[name] for row in found]
            bars = axes.bar(places, heights, width, label=provider, color=f"C{index}")
            axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
        axes.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
        axes.set(xlabel="sequence length", ylabel=label)
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, ncols=max(len(providers), 1), loc="outside lower center")
    return figure


def _ways(rows: list[dict[str, Any]]):
    """Draws the speed of each mesh relative to one GPU, by attention; reckoned ones are marks."""
    steps = [row for row in rows if row["what"] == "step" and row["refused"] is None]
    steps = [row for row in steps if row["gpus"] > 1 and row.get("speedup")]
    key = lambda row: (row["gpus"], row["way"], row["length"])
    places = sorted({key(row) for row in steps})
    kinds = list(dict.fromkeys((row["provider"], row["types"]) for row in steps))
    figure, axes = plt.subplots(figsize=(12, 4.5), layout="constrained")
    width = 0.84 / max(len(kinds), 1)
    for index, (provider, types) in enumerate(kinds):
        found = [row for row in steps if (row["provider"], row["types"]) == (provider, types)]
        at = [places.index(key(row)) + (index + 0.5) * width - 0.42 for row in found]
        label = f"{provider}, {types} axes"
        axes.bar(at, [row["speedup"] for row in found], width, label=label, color=f"C{index}")
        reckoned = [row["ms"] * row["speedup"] / row["reckoned_ms"] for row in found]
        axes.plot(at, reckoned, "k_", ms=9, label=None if index else "reckoned, nothing overlaps")
    labels = [f"{way}\n{_short(length)}" for _, way, length in places]
    axes.set_xticks(range(len(places)), labels, fontsize=8)
    axes.set(ylabel="times one GPU")
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure


def plot_losses(paths: list[pathlib.Path], out: pathlib.Path) -> None:
    """Draws the curves of several CSV files, whose first column is the step and second the loss.

    Args:
        paths: the files; a curve is labelled with its file's folder.
        out: the picture to write.
    """
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    name = "loss"
    for index, path in enumerate(paths):
        with path.open(newline="") as file:
            (_, name, *_), *lines = csv.reader(file)
        points = [(int(step), float(loss)) for step, loss, *_ in lines]
        # Curves that agree lie on one another: the later ones are dashed, so that both are seen.
        style = "-" if index == 0 else "--"
        label = path.parent.name or path.stem
        axes.plot(*zip(*points, strict=True), style, lw=1, label=label)
    axes.set(xlabel="step", ylabel=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    """Parses the command line and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["results", "losses"])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    if arguments.kind == "losses":
        plot_losses(arguments.files, arguments.out)
    else:
        plot_results(results_file.load(arguments.files[0]), arguments.out)


if __name__ == "__main__":
    main()
