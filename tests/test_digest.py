"""The seed of a run goes by what the sources hold, not by the date, git or what Python leaves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from . import digest

TESTS = Path(__file__).parent
# These note the day of a run next to its figures.
DATED = {"faults.py", "fuzzing.py", "sanitize.py"}


@pytest.fixture
def root(tmp_path):
    for name in ("flash_pallas/a.py", "flash_pallas/core/b.json", "tests/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_what_is_not_source_changes_nothing(root, tmp_path_factory):
    before = digest.of_files(root)
    for name in ("tests/__pycache__/c.pyc", "tests/c.py~", ".git/HEAD", "docs/a.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("x")
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    assert digest.of_files(shutil.copytree(root, copy)) == before


@pytest.mark.parametrize("change", ["content", "name", "new"])
def test_every_change_of_source_changes_it(root, change):
    before, path = digest.of_files(root), root / "flash_pallas/core/b.json"
    if change == "content":
        path.write_text("{}")
    elif change == "name":
        path.rename(path.with_name("d.json"))
    else:
        path.with_name("d.json").write_text("")
    assert digest.of_files(root) != before


def test_a_seed_that_is_given(monkeypatch):
    monkeypatch.setenv("FLASH_PALLAS_SEED", "7")
    assert digest.seed.__wrapped__() == 7


def test_no_test_asks_for_the_date():
    asks = re.compile(r"^(import|from) datetime", re.MULTILINE)
    dated = {path.name for path in TESTS.rglob("*.py") if asks.search(path.read_text())}
    assert dated == DATED
