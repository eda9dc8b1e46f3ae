"""Draws loss curves of loss.csv files into one picture.

Run: python examples/plot.py a/loss.csv b/loss.csv --out both.png
"""

from __future__ import annotations

import argparse
import csv
import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def plot_losses(curves: dict[str, pathlib.Path], out: pathlib.Path) -> None:
    """Draws training (thin) and validation (thick) bits per byte of each file into one picture.

    Args:
        curves: paths of loss.csv files, by legend.
        out: the picture to write.
    """
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, (label, path) in enumerate(curves.items()):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        steps = [int(row["step"]) for row in rows]
        axes.plot(steps, [float(row["train_bits"]) for row in rows], f"C{index}", lw=0.8, alpha=0.6)
        evaluated = [row for row in rows if row["validation_bits"]]
        axes.plot(
            [int(row["step"]) for row in evaluated],
            [float(row["validation_bits"]) for row in evaluated],
            f"C{index}o-",
            ms=3,
            label=f"{label}, validation",
        )
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="loss.csv files")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("losses.png"))
    arguments = parser.parse_args()
    plot_losses({str(p.parent): p for p in arguments.files}, arguments.out)
