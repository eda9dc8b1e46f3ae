"""The documents: README's code runs and prints what it says, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import feature_table

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/NOTES.md",
    "benchmarks/README.md",
]

# A python block, and the text block right after it, which is what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# `folder/file.ext` or `folder/` in backticks.
PATH = re.compile(r"`((?:flash_pallas|tests|benchmarks|examples|[.]ci)/[\w./-]*)`")


def blocks():
    """Yields (line, code, expected output) of each block, named after the heading above it."""
    text = (ROOT / "README.md").read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        heading = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)[-1]
        yield pytest.param(line, *match.groups(), id=f"{heading}, line {line}")


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("line", "code", "printed"), list(blocks()))
def test_code_prints_what_the_readme_says(line, code, printed, capsys):
    # Leading newlines make a traceback name the line of README.md.
    exec(compile("\n" * line + code, "README.md", "exec"), {"__name__": "__main__"})
    assert printed is not None, f"README.md:{line}: no text block says what is printed"
    assert capsys.readouterr().out == printed


def test_every_python_block_is_found():
    text = (ROOT / "README.md").read_text()
    assert len(list(blocks())) == text.count("```python") > 0


def _targets(document: str) -> set[Path]:
    """Returns the files that a document links to or names."""
    text = (ROOT / document).read_text()
    links = {link.split("#")[0] for link in LINK.findall(text) if "://" not in link}
    linked = {(ROOT / document).parent / link for link in links if link}
    return linked | {ROOT / path for path in PATH.findall(text) if "results/" not in path}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_named_file_exists(document):
    missing = sorted(
        str(path.relative_to(ROOT)) for path in _targets(document) if not path.exists()
    )
    assert not missing, f"{document} names files that do not exist"


def test_links_are_found():
    assert ROOT / "ARCHITECTURE.md" in _targets("README.md")
    assert ROOT / "flash_pallas/core/mask.py" in _targets("ARCHITECTURE.md")


def test_the_table_of_features_is_what_the_backends_answer():
    hint = "run `python -m tests.feature_table`"
    assert feature_table.in_readme() == feature_table.table(), hint


@pytest.mark.parametrize("suite", ["h200", "memory", "decode", "parallel", "parallel_scheduler"])
def test_generated_tables_have_their_markers(suite):
    pattern = f"<!-- table:{suite} -->\n.*?<!-- end -->"
    assert len(re.findall(pattern, (ROOT / "README.md").read_text(), re.DOTALL)) == 1
