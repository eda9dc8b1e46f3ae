"""The documents: README's code runs and prints what it says, tables are up to date, links work."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import figures, results, tables

from . import feature_table

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/NOTES.md",
    "benchmarks/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
MOST_LINES = 150  # of README.md
PERFORMANCE = "docs/performance-tables.md"
# The tables of that page by name: the results file that each is made from.
TABLES = {
    "positions": "features_positions",
    "h200": "h200",
    "wide": "wide",
    "h100": "h100",
    "h200_fa4": "h200_fa4",
    "fa4": "fa4",
    "fa3": "fa3",
    "features_fa3": "features_fa3",
    "stack": "stack",
    "portable": "portable",
    "modifiers": "features",
    "blocks": "features_blocks",
    "derivatives": "features_derivatives",
    "jvp": "jvp",
    "jvp_fa4": "jvp_fa4",
    "hessian": "hessian",
    "mean_flow": "mean_flow",
    "memory": "h200_memory",
    "decode": "decode",
    "decode_bounds": "decode_bounds",
    "decode_wide": "decode_wide",
    "decode_eight_bits": "decode_eight_bits",
    "serving": "serving",
    "engine": "engine",
    "h200_jax012": "h200_jax012",
    "training": "training",
    "sharded_training": "sharded_training",
    "first_call": "first_call",
    "first_call_exported": "first_call_exported",
    "first_call_gradient": "first_call_gradient",
    "parallel": "parallel",
    "parallel_scheduler": "parallel_scheduler",
}

# A python block, and the text block right after it, which is what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# `folder/file.ext` or `folder/` in backticks.
PATH = re.compile(r"`((?:flash_pallas|tests|benchmarks|examples|docs|[.]ci)/[\w./-]*)`")
# `Class.name` in backticks.
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)`")


def blocks():
    """Yields (line, code, expected output) of each block, named after the heading above it."""
    text = (ROOT / "README.md").read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        heading = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)[-1]
        yield pytest.param(line, *match.groups(), id=f"{heading}, line {line}")


@pytest.mark.parametrize(("line", "code", "printed"), list(blocks()))
def test_code_prints_what_the_readme_says(line, code, printed, capsys):
    # Leading newlines make a traceback name the line of README.md.
    exec(compile("\n" * line + code, "README.md", "exec"), {"__name__": "__main__"})
    assert printed is not None, f"README.md:{line}: no text block says what is printed"
    assert capsys.readouterr().out == printed


def test_every_python_block_is_found():
    text = (ROOT / "README.md").read_text()
    assert len(list(blocks())) == text.count("```python") > 0


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def _targets(document: str) -> set[Path]:
    """Returns the files that a document links to or names."""
    text = (ROOT / document).read_text()
    links = {link.split("#")[0] for link in LINK.findall(text) if "://" not in link}
    linked = {(ROOT / document).parent / link for link in links if link}
    return linked | {ROOT / path for path in PATH.findall(text) if "results/" not in path}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_named_file_exists(document):
    missing = sorted(
        str(path.resolve().relative_to(ROOT)) for path in _targets(document) if not path.exists()
    )
    assert not missing, f"{document} names files that do not exist"


def test_links_are_found():
    assert ROOT / "ARCHITECTURE.md" in _targets("README.md")
    assert ROOT / "docs/getting-started.md" in _targets("README.md")
    assert ROOT / "tests/compile_check/rows.py" in _targets("CONTRIBUTING.md")


@pytest.mark.parametrize("name", feature_table.BLOCKS)
def test_the_generated_tables_are_what_the_backends_and_the_results_say(name):
    make, pages = feature_table.BLOCKS[name]
    hint = "run `python -m tests.feature_table`"
    assert [feature_table.on_page(name, page) for page in pages] == [make()] * len(pages), hint


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_performance_are_those_of_the_results(name):
    page, file = PERFORMANCE, f"benchmarks/results/{TABLES[name]}.json"
    found = re.findall(
        f"<!-- table:{name} -->\n(.*?)<!-- end -->", (ROOT / page).read_text(), re.DOTALL
    )
    hint = f"run `python -m benchmarks.tables {file} --into {page} --name {name}`"
    assert found == [tables.render(results.load(ROOT / file))], hint


def test_the_figures_in_sentences_are_those_of_the_results():
    texts = figures.figures()
    pages = {page: (ROOT / page).read_text() for page in figures.PAGES}
    old = [page for page, text in pages.items() if figures.current(text, texts) != text]
    assert not old, "run `python -m benchmarks.figures`"
    placed = {name for text in pages.values() for _, name, *_ in figures.MARKED.findall(text)}
    assert placed == set(texts), "figures that no page has"
    first = re.compile(r"^ *<!-- figure:\S+ -->\S", re.MULTILINE)
    assert not any(map(first.search, pages.values())), (
        "a comment that begins a line ends a paragraph"
    )


def test_a_figure_is_replaced_where_it_differs():
    marked = "It ran at <!-- figure:speed -->{}<!-- end --> TFLOP/s."
    assert figures.current(marked.format("1 to\n2"), {"speed": "1 to 2"}) == marked.format(
        "1 to\n2"
    )
    assert figures.current(marked.format("1"), {"speed": "1 to 2"}) == marked.format("1 to 2")
    with pytest.raises(ValueError, match="no figure is named 'speed'"):
        figures.current(marked.format("1"), {})


def test_what_counts_as_level_is_what_two_readings_differ_by():
    low, high = figures.LEVEL
    most = max(abs(x - y) for x, y in figures.read_twice())
    assert high - low >= most - 0.005, "one of two readings may be level and the other not"


def test_the_page_has_no_other_tables():
    text = (ROOT / PERFORMANCE).read_text()
    assert set(re.findall("<!-- table:(.*) -->", text)) == set(TABLES)


def _members() -> dict[str, set[str]]:
    """Returns the names of methods and fields by class, for all classes of the package."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "flash_pallas").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                names |= {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
                targets = [x.target for x in node.body if isinstance(x, ast.AnnAssign)]
                names |= {x.id for x in targets if isinstance(x, ast.Name)}
    return found


def test_internals_name_what_exists():
    members = _members()
    wrong = [
        f"{page.name}: {name}.{member}"
        for page in sorted((ROOT / "docs/internals").glob("*.md"))
        for name, member in MEMBER.findall(page.read_text())
        if member not in members.get(name, ())
    ]
    assert not wrong
