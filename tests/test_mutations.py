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


def test_what_they_name_is_in_one_part():
    seeds = range(5, 5 + selection.NAMED_PARTS)
    for mutation in MUTATIONS:
        assert sum(selection.runs(f"tests/{mutation.test}", (), seed) for seed in seeds) == 1


@pytest.mark.parametrize("name", [CASE, "tests/test_a.py::test_b", "tests/test_a.py"])
def test_cases_that_a_name_has(monkeypatch, name):
    seeds = range(selection.PARTS)
    assert sum(selection.runs(CASE, (), seed) for seed in seeds) == 1
    monkeypatch.setattr(selection, "NAMED", {name})
    named_seeds = range(selection.NAMED_PARTS)
    assert sum(selection.runs(CASE, (), seed) for seed in named_seeds) == 1
    assert sum(selection.runs("tests/test_ab.py::test_b", (), seed) for seed in seeds) == 1


def test_cases_that_a_mark_has():
    seeds = range(selection.PARTS)
    assert all(selection.runs(CASE, None, seed) for seed in seeds)
    assert all(selection.runs(CASE, ("c",), seed) for seed in seeds)
    assert sum(selection.runs(CASE, ("d",), seed) for seed in seeds) == 1


def test_names_of_nothing_are_found():
    names = (CASE, "tests/test_a.py::test_b[d]", "tests/test_a.py::test_b", "tests/test_z.py::test")
    assert selection.missing(names, [CASE, "tests/test_c.py::test_d"]) == [names[1]]
