"""The loops that are found in machine code, and what their instructions are for."""

from __future__ import annotations

import json

from benchmarks.figures import RESULTS

from . import loops


def code_of(lines: list[str]) -> str:
    """Returns lines of machine code; those that end with a colon are labels."""
    address = iter(range(0, 1 << 16, 16))
    return "\n".join(x if x.endswith(":") else f"  /*{next(address):04x}*/ {x} ;" for x in lines)


MATMULS = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"] * loops.FUSED
# A loop in a loop, then the end of the kernel and what runs where a barrier is not yet ready.
KERNEL = [
    ".L_x_0:",
    "MOV R1, R2",
    ".L_x_1:",
    *MATMULS,
    "@!P1 BRA `(.L_x_3)",
    ".L_x_2:",
    "FSEL R3, R4, -INF , !P4",
    "UIADD3 UR4, UR5, 0x2, URZ",
    "@P1 BRA `(.L_x_1)",
    "@P2 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_3:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR10], R12",
    "BRA `(.L_x_2)",
    "BRA `(.L_x_0)",
]


def test_the_innermost_loop_with_all_matmuls_is_found():
    (found,) = loops.loops(code_of(KERNEL))
    assert found == {"HGMMA": loops.FUSED, "BRA": 2, "FSEL": 1, "UIADD3": 1}
    assert loops.loops(code_of([x for x in KERNEL if x != MATMULS[0]])) == []


def test_instructions_are_grouped_by_what_they_are_for():
    (found,) = loops.loops(code_of(KERNEL))
    groups = loops.grouped(found)
    assert groups["matmuls"] == loops.FUSED and groups["barriers and branches"] == 2
    assert groups["masks and selects"] == groups[loops.ADDRESSES] == 1
    assert sum(groups.values()) == found.total()


def test_functions_are_split():
    text = f"head\n.text.one:\n{code_of(['MOV R1, R2'])}\n.text.two:\n{code_of(['EXIT'])}"
    found = loops.functions(text)
    assert list(found) == ["one", "two"] and "MOV" in found["one"] and "MOV" not in found["two"]


def test_names_of_cells_are_told_apart():
    pattern, _ = loops.FA3["4,4k,16,16,128 causal"]
    plain, grouped = (x.replace(".*", " ... ") for x, _ in list(loops.FA3.values())[1:3])
    assert loops._matches(pattern, plain) and not loops._matches(pattern, grouped)


def test_the_committed_counts_are_of_these_cells():
    rows = json.loads((RESULTS / "backward_instructions.json").read_text())["rows"]
    assert {row["cell"] for row in rows} == set(loops.CELLS)
    assert all(sum(row["groups"].values()) == row["instructions"] for row in rows)
    # The products of a tile of 64 queries of both kernels are the same instructions.
    counts = {row["opcodes"]["HGMMA"] for row in rows if row["rows"] in loops.ROWS.values()}
    assert counts == {32}
