"""The profile of the backwards, as it reads what Nsight Compute prints of a kernel."""

from __future__ import annotations

import csv
import io

from benchmarks import run_profile

FIGURES = [metric for metric, _ in run_profile.METRICS.values()]
COLUMNS = ["Address", "Source", "# Samples", "Instructions Executed", "stall_wait", "stall_mio"]


def lines(*rows: list[str]) -> io.StringIO:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    text.seek(0)
    return text


def source(name: str) -> list[list[str]]:
    """Returns a kernel of a loop of three instructions, 100 times, and one in front of it."""
    head = [*COLUMNS, "stall_mio (Not Issued)"]
    loop = [
        ["0x10", " HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "10", "100", "10", "0", "99"],
        ["0x20", "@!P3  BRA 0x10", "60", "96", "20", "40", "99"],
        ["0x30", " MUFU.EX2 R1, R1", "30", "100", "30", "0", "99"],
    ]
    return [["Kernel Name", name], head, ["0x0", " MOV R1, R2", "900", "2", "1", "1", "9"], *loop]


def test_a_loop_says_where_its_warps_wait():
    (_, instructions), *_ = run_profile.kernels_of(lines(*source("a kernel")))
    loop = run_profile.loop_of(instructions)
    assert (loop["instructions"], loop["exponentials"]) == (3, 1)
    assert loop["waits, % of samples"] == {"wait": 60.0, "mio": 40.0}
    assert loop["longest waits"][1] == {
        "%": 60.0,
        "place": 1,
        "instruction": "@!P3 BRA 0x10",
        "why": "mio",
    }


def test_each_main_kernel_has_a_row():
    ours, theirs = run_profile.OURS + "_gpu_kernel", "void flash::FlashAttnBwdSm90<(int)2>"
    names = [ours, "flash::FlashAttnBwdPreprocess<>", theirs] * len(run_profile.CELLS)
    figures = [[name, "1,500.0", "2,000,000", "60.0", "0.5"] for name in names]
    raw = lines(["Kernel Name", *FIGURES], ["", "us", "inst", "%", ""], *figures)
    # ncu prints the sources of a template twice.
    twice = [name for name in names for _ in range(1 if name == ours else 2)]
    rows = run_profile.rows_of(raw, lines(*(row for name in twice for row in source(name))))
    assert [(row["cell"], row["kernel"]) for row in rows] == [
        (cell, kernel) for cell in run_profile.CELLS for kernel in run_profile.CONTESTANTS
    ]
    assert rows[0]["ms"] == 1.5 and rows[0]["instructions, millions"] == 2.0
    assert rows[0]["instructions a cycle"] == 2.0
