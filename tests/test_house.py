"""A plain call enters no more of the package than it did.

A change that enters fewer lowers the figures here. `python -m tests.house` prints them for one
device: the stack is two deeper here, where tests have eight and a call is partitioned.
"""

from __future__ import annotations

from . import house

# Three files and five frames are those of launches: the repairs of jax 0.11, kernels compiled ahead
# where asked for, the barrier that keeps XLA from running a kernel twice, and the question whether
# heads are wide.
FILES, STACK, RECORDS = 35, 31, 40


def test_a_plain_gradient_enters_no_more_than_it_did():
    found = house.plain_gradient()
    entered = len(found.files), found.deepest, len(found.records)
    limits = FILES, STACK, RECORDS
    assert all(x <= y for x, y in zip(entered, limits, strict=True)), f"{found}; allowed {limits}"
    assert "backends/hopper/forward/kernel.py" in found.files
    assert "flash_pallas.core.problem.Problem" in found.records


def test_no_files_import_each_other():
    assert house.circles() == []


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert house.reached(graph, "a") == {"a", "b", "c"} and "d" not in house.reached(graph, "d")
