"""The documents: README's code runs and prints what it says, tables are up to date, links work."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import results, tables

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
PROVIDERS = ("flash_pallas", "torch_cudnn", "jax_cudnn", "tokamax")  # in its table of speeds
PERFORMANCE = "docs/performance-tables.md"
# The tables of that page by name: the results file that each is made from.
TABLES = {
    "positions": "features_positions",
    "h200": "h200",
    "wide": "wide",
    "h100": "h100",
    "h200_fa4": "h200_fa4",
    "fa4": "fa4",
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
# Tables that the page has as soon as their results exist.
AWAITED = ("fa3", "features_fa3")
TABLES |= {x: x for x in AWAITED if (ROOT / f"benchmarks/results/{x}.json").exists()}

SPEEDS = {"forward": 4, "backward": 10}  # floating-point operations for a pair and a column

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


def test_the_speeds_of_the_readme_are_those_of_the_results():
    rows = results.load(ROOT / "benchmarks/results/h200.json")["rows"]
    cells = {}
    for row in rows:
        sizes = (row[n] for n in ("batch", "q_len", "q_heads", "kv_heads", "head_dim"))
        mask, direction = "causal" if row["causal"] else "full", row["direction"]
        cells[",".join(map(str, sizes)), mask, direction, row["provider"]] = row["tflops"]
    text = (ROOT / "README.md").read_text()
    table = text.partition("| B,T,N,K,H |")[2].partition("\n\n")[0]
    _, _, *body = [[x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines()]
    assert len(body) == 6
    for shape, mask, direction, *speeds in body:
        wanted = {name: cells[shape, mask, direction, name] for name in PROVIDERS}
        assert speeds == [f"{wanted[name]:.0f}" for name in PROVIDERS], (shape, mask, direction)


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


def test_packed_documents_run_at_the_speed_that_the_page_says():
    load = lambda name: json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]
    batch, varlen = "causal, 16 sequences of one length", "causal, varlen of 16 documents"
    shapes, found = ("1,32768,16,16,128", "1,131072,16,16,128"), []
    rows = [row for row in load("features_positions") if row["group"] == "packed"]
    for direction in ("forward", "backward"):
        for shape in shapes:
            of = {r["name"]: r for r in rows if (r["shape"], r["direction"]) == (shape, direction)}
            pairs = of[varlen]["visible"] / of[batch]["visible"]
            found.append(of[varlen]["speed"] / of[batch]["speed"] * pairs)
    section = (ROOT / PERFORMANCE).read_text().split("## Packed documents")[1]
    told = re.findall(r"[01][.][0-9]{2}\b", section.split("<!--")[0])
    assert told == [f"{x:.2f}" for x in found]


def test_chosen_blocks_run_at_the_speed_that_the_page_says():
    rows, told = results.load(ROOT / "benchmarks/results/features_blocks.json")["rows"], []
    for block, (name, operations) in itertools.product((64, 128), SPEEDS.items()):
        wanted = f"block mask, 64 blocks of {block}", name
        row = next(r for r in rows if (r["name"], r["direction"]) == wanted)
        _, length, heads, _, width = map(int, row["shape"].split(","))
        pairs = length**2 * row["visible"] * heads
        told.append(f"{operations * pairs * width / row['ms'] / 1e9:.0f}")
    for page, says in {
        "performance-tables": "64 run at {} forward and {} backward, blocks of 128 at {} and {}.",
        "block-masks": "by top-k: {} and {} TFLOP/s, where (128, 128) has {} and {}",
    }.items():
        assert says.format(*told) in " ".join((ROOT / f"docs/{page}.md").read_text().split())


def test_jax_0_12_runs_at_the_speed_that_the_pages_say():
    """Compares the ratio to PyTorch's cuDNN in both runs, as each had a GPU of its own."""

    def ratios(name):
        rows = results.load(ROOT / f"benchmarks/results/{name}.json")["rows"]
        key = lambda row: tuple(row[x] for x in results.ROW_FIELDS[:7])
        ours = [row for row in rows if row["provider"] == "flash_pallas"]
        return {key(row): row["ratio_to_torch_cudnn"] for row in ours}

    old, new, told = ratios("h200_jax011"), ratios("h200_jax012"), []
    for direction in ("forward", "backward"):
        found = [new[key] / old[key] for key in old if key[-1] == direction]
        told += [f"{min(found):.2f}", f"{max(found):.2f}"]
    rows = json.loads((ROOT / "benchmarks/results/without_producer.json").read_text())["rows"]
    times = [row["time_ratio"] for row in rows if row["direction"] == "backward"]
    changed = [row["nplate3"] / row["np"] for row in times]
    told += [f"{min(changed):.2f}", f"{max(changed):.2f}"]
    whole = f"{min(told[:4])} to {max(told[:4])} of the speed"
    for page, says in {
        PERFORMANCE: "the forward has {} to {} of the speed and the backward {} to {}.",
        "docs/limits.md": "has {} to {} of its speed with jax 0.11.2, the backward {} to {}",
        "README.md": f"a form with {whole}, as ratios to cuDNN on two H200",
        "docs/internals/pitfalls.md": f"they run at {whole} with 0.11.2",
    }.items():
        assert says.format(*told) in " ".join((ROOT / page).read_text().split())
    text = " ".join((ROOT / PERFORMANCE).read_text().split())
    assert "takes {4} to {5} of the time of the old one".format(*told) in text
    rows = results.load(ROOT / "benchmarks/results/h200_jax012.json")["rows"]
    least = [min(r["relative"].values()) for r in rows if r["provider"] == "flash_pallas"]
    assert f"{min(least):.2f} to {max(least):.2f} times as fast as the faster of" in text


def test_an_h100_is_ahead_of_cudnn_as_the_page_says():
    rows = results.load(ROOT / "benchmarks/results/h100.json")["rows"]
    ours = [row for row in rows if row["provider"] == "flash_pallas"]
    told = []
    for direction in ("forward", "backward"):
        least = [min(r["relative"].values()) for r in ours if r["direction"] == direction]
        told += [f"{min(least):.2f}", f"{max(least):.2f}"]
    says = "Forward {} to {} times as fast as the faster of both, backward {} to {}.".format(*told)
    assert says in " ".join((ROOT / PERFORMANCE).read_text().split())


# Of a file: digits, and rows of the page by contestant.
FIRST_CALLS = {
    "first_call": (
        1,
        {
            "flash_pallas, all ahead": "flash_pallas",
            "flash_pallas, none ahead": "flash_pallas, nothing compiled ahead",
            "flash_pallas, cached": "flash_pallas, in JAX's persistent cache",
            "jax_cudnn": "`jax.nn` on cuDNN, which brings its kernels compiled",
        },
    ),
    "first_call_exported": (
        2,
        {
            "flash_pallas, exported": "flash_pallas, exported",
            "jax_cudnn, exported": "`jax.nn` on cuDNN, exported",
            "jax_cudnn, cached": "`jax.nn` on cuDNN",
        },
    ),
}


@pytest.mark.parametrize("file", FIRST_CALLS)
def test_first_calls_take_the_seconds_that_the_page_says(file):
    digits, names = FIRST_CALLS[file]
    rows = results.load(ROOT / f"benchmarks/results/{file}.json")["rows"]
    found = {(row["provider"], row["work"]): f"{row['first_s']:.{digits}f}" for row in rows}
    page = (ROOT / "docs/first-call.md").read_text()
    for name, told in names.items():
        seconds = [found[name, work] for work in ("forward", "gradient", "training step")]
        if name == "flash_pallas, all ahead":  # a forward's only kernel is not compiled ahead
            seconds[0] = "-"
        assert f"| {told} | {' | '.join(seconds)} |" in page


class Cell(NamedTuple):
    """Call that a speed relative to FlashAttention-4 is of."""

    file: str
    batch: int
    length: int
    grouped: bool
    head_dim: int
    causal: bool
    direction: str


def _readings() -> list[tuple[Cell, float]]:
    """Returns the speeds relative to FlashAttention-4 of all cells, some of which occur twice."""
    found = []
    for file in ("fa4", "h200_fa4"):
        for row in results.load(ROOT / f"benchmarks/results/{file}.json")["rows"]:
            if row["provider"] == "flash_pallas":
                sizes = row["batch"], row["q_len"], row["q_heads"] > row["kv_heads"]
                cell = Cell(file, *sizes, row["head_dim"], row["causal"], row["direction"])
                found.append((cell, row["relative"]["fa4"]))
    return found


LEVEL = (0.97, 1.03)  # ratios that two readings of one cell do not tell from 1


def _counted(direction: str, most_head_dim: int) -> str:
    """Says of how many readings up to a head dim ours is ahead, level and behind."""
    cells = [(c.head_dim, x) for c, x in _readings() if c.direction == direction]
    ratios = [x for head_dim, x in cells if head_dim <= most_head_dim]
    low, high = LEVEL
    ahead, behind = sum(x > high for x in ratios), sum(x < low for x in ratios)
    level = len(ratios) - ahead - behind
    if direction == "forward":
        assert not behind and {h for h, x in cells if x <= high} == {256}
        return (
            f"ahead in {ahead} of {len(ratios)} readings, by up to {max(ratios):.2f} times; "
            f"level in the other {level}, at head dim 256."
        )
    return (
        f"level in {level} of {len(ratios)} readings, ahead in {ahead} (up to {max(ratios):.2f} "
        f"times), behind in {behind} (down to {min(ratios):.2f})."
    )


def _beside_flash_attention_4(direction: str, wanted) -> str:
    """Returns the range of the ratios in the tables, of cells that are wanted."""
    # Of a cell that one file has twice, tables have the last.
    last = dict(_readings()).items()
    ratios = [ratio for cell, ratio in last if cell.direction == direction and wanted(cell)]
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def test_two_readings_differ_as_little_as_the_page_says():
    cells: dict[tuple, list[float]] = {}
    for cell, ratio in _readings():
        cells.setdefault(cell[1:], []).append(ratio)
    twice = [found for found in cells.values() if len(found) == 2]
    most = max(abs(x - y) for x, y in twice)
    page = " ".join((ROOT / PERFORMANCE).read_text().split())
    assert len(twice) == 8 and "Eight cells and passes are in both tables" in page
    assert f"the two ratios differ by up to {most:.2f}." in page
    low, high = LEVEL
    assert high - low >= most - 0.005, "one of two readings may be level and the other not"
    assert f"Ratios from {low} to {high} are within noise" in " ".join(
        (ROOT / "README.md").read_text().split()
    )


def test_the_speed_beside_flash_attention_4_is_what_the_pages_say():
    ratios, page = _beside_flash_attention_4, " ".join((ROOT / PERFORMANCE).read_text().split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    forward = ratios("forward", lambda x: True)
    assert f"**Forward:** {_counted('forward', 256)}" in readme
    assert f"**Backward, head dims up to 192:** {_counted('backward', 192)}" in readme
    by_width = [ratios("forward", lambda x, d=d: x.head_dim == d) for d in (64, 96, 128, 192, 256)]
    told = "{} at head dim 64, {} at 96, {} at 128, {} at 192 and {} at 256".format(*by_width)
    assert f"**Forward.** {forward}, most at 1k tokens: {told}." in page
    widest = ratios("backward", lambda x: x.head_dim == 256)
    assert f"**Backward, head dim 256:** {widest} times as fast." in readme
    assert f"256.** {widest}." in page
    causal = lambda x: x.causal and x.head_dim < 256
    full = ratios("backward", lambda x: not x.causal and x.head_dim < 256)
    assert f"192, causal.** {ratios('backward', causal)}." in page and f"full.** {full}." in page
    short = [ratios("backward", lambda x, t=t: causal(x) and x.length == t) for t in (1024, 2048)]
    groups = ratios("backward", lambda x: causal(x) and x.grouped)
    longer = ratios("backward", lambda x: causal(x) and x.length > 2048 and not x.grouped)
    longest = ratios("backward", lambda x: (x.length, x.head_dim) == (16384, 128))
    assert "short sequences, {} at 1k and {} at 2k, ".format(*short) in page
    assert f"and with grouped queries ({groups}). From 4k on, without groups, {longer}." in page
    assert f"16k**, both masks: {longest} in the two tables." in page


def test_head_dims_above_256_are_as_fast_as_the_page_says():
    rows = results.load(ROOT / "benchmarks/results/wide.json")["rows"]
    told = {"forward": [], "backward": []}
    for row in rows:
        if row["provider"] == "flash_pallas":
            told[row["direction"]].append(row["relative"]["torch_efficient"])
    *backward, single = told["backward"]  # the last shape has one head
    says = (
        f"Ours is {min(told['forward']):.1f} to {max(told['forward']):.1f} times as fast as "
        f"memory-efficient attention forward, and {min(backward):.1f} to {max(backward):.1f} times "
        f"backward ({single:.1f} times with one head)."
    )
    assert says in " ".join((ROOT / PERFORMANCE).read_text().split())


def test_the_client_trains_at_the_speed_that_the_page_says():
    rows = json.loads((ROOT / "benchmarks/results/client.json").read_text())["rows"]
    speeds = {row["provider"]: f"{round(row['tokens_per_second'], -2):,.0f}" for row in rows}
    text = " ".join((ROOT / "docs/switching.md").read_text().split())
    assert f"at {speeds['flash_pallas']} tokens/s with `flash_pallas`" in text
    assert f"at {speeds['cudnn_flash_jax']} with MaxText's own `cudnn_flash_jax`" in text
    ours, theirs = (row["tokens_per_second"] for row in rows)
    assert f"from the same weights: {ours / theirs - 1:.0%} more.".replace("%", " %") in text


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
