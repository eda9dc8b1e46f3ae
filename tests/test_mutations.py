"""The list of mutations: each entry is what it claims, and `make test` runs what it names."""

from __future__ import annotations

import pytest

from . import selection
from .mutations import MUTATIONS, ROOT

CASE = "tests/test_a.py::test_b[c]"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_line_is_there(mutation):
    text = (ROOT / "flash_pallas" / mutation.file).read_text()
    assert text.count(mutation.old) == 1 and mutation.old != mutation.new
    assert (ROOT / "tests" / mutation.test.partition("::")[0]).is_file()


def test_what_they_name_runs_once_in_named_days():
    days = range(5, 5 + selection.NAMED_DAYS)
    for mutation in MUTATIONS:
        assert sum(selection.runs(f"tests/{mutation.test}", (), day) for day in days) == 1


@pytest.mark.parametrize("name", [CASE, "tests/test_a.py::test_b", "tests/test_a.py"])
def test_cases_that_a_name_has(monkeypatch, name):
    days = range(selection.DAYS)
    assert sum(selection.runs(CASE, (), day) for day in days) == 1
    monkeypatch.setattr(selection, "NAMED", {name})
    named_days = range(selection.NAMED_DAYS)
    assert sum(selection.runs(CASE, (), day) for day in named_days) == 1
    assert sum(selection.runs("tests/test_ab.py::test_b", (), day) for day in days) == 1


def test_cases_that_a_mark_has():
    days = range(selection.DAYS)
    assert all(selection.runs(CASE, None, day) for day in days)
    assert all(selection.runs(CASE, ("c",), day) for day in days)
    assert sum(selection.runs(CASE, ("d",), day) for day in days) == 1


def test_names_of_nothing_are_found():
    names = (CASE, "tests/test_a.py::test_b[d]", "tests/test_a.py::test_b", "tests/test_z.py::test")
    assert selection.missing(names, [CASE, "tests/test_c.py::test_d"]) == [names[1]]
