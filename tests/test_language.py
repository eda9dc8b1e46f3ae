"""The linter of language finds what it is for, and the repository has none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import language

GOOD = '''
"""Row sums of a tile."""


def sums(x):
    """Returns the row sums of x."""
    return x.sum(-1)  # one for each SM
'''


def faults(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "module.py"
    file.write_text(text)
    return list(language.faults_in(file))


def test_a_good_file_has_no_faults(tmp_path):
    assert faults(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("was", "wrong", "told"),
    [
        ("Row sums of a tile.", "What row sums are.", "make it a sentence"),
        ("Returns the row sums", "The row sums", "say what the function does"),
        ("of x.", "of x", "full stop"),
        ("of a tile.", "of a block of threads.", "the field says CTA"),
        ("each SM", "each multiprocessor", "comment: says 'multiprocessor'"),
    ],
)
def test_each_rule_finds_its_fault(tmp_path, was, wrong, told):
    found = faults(tmp_path, GOOD.replace(was, wrong))
    assert len(found) == 1 and told in found[0]
