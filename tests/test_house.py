"""A plain call enters no more of the package than it did.

A change that enters fewer lowers the figures here, which `python -m tests.house` prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from . import house

# Three files and five frames are those of launches: the repairs of jax 0.11, kernels compiled ahead
# where asked for, the barrier that keeps XLA from running a kernel twice, and the question whether
# heads are wide. One file has the tables of tile sizes, which were part of the choice of a backend.
FILES, FUNCTIONS, STACK, RECORDS = 35, 527, 24, 37


def test_a_plain_gradient_enters_no_more_than_it_did():
    """Counts in a process of its own, with one device: what ran before decides what is cached."""
    command = [sys.executable, "-m", "tests.house", "--json"]
    told = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env={name: x for name, x in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(told.stdout)
    entered = len(found["files"]), found["functions"], found["deepest"], len(found["records"])
    limits = FILES, FUNCTIONS, STACK, RECORDS
    assert all(x <= y for x, y in zip(entered, limits, strict=True)), f"{found}; allowed {limits}"
    assert "backends/hopper/forward/kernel.py" in found["files"]
    assert "flash_pallas.core.problem.Problem" in found["records"]


def test_no_files_import_each_other():
    assert house.circles() == []


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert house.reached(graph, "a") == {"a", "b", "c"} and "d" not in house.reached(graph, "d")
