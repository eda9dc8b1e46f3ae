"""Draws faults at random, puts each into a copy, and asks whether `make test` notices.

    python -m tests.faults --count 20 --seed 1 --json benchmarks/results/faults.json

A fault is one edit of an operator, a comparison, a constant, an axis, or the order of two
arguments. `mutations.py` has faults that somebody thought of; these are those that nobody did. The
tests that mention the file run first, and the first failure ends the run of a fault.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results

from . import digest

ROOT = digest.ROOT
PLACES = ("core", "transforms", "nn", "cache.py", "ragged.py")
KINDS = ("operator", "comparison", "constant", "axis", "arguments")
SECONDS = 1500  # of the tests with one fault

OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*",
             ast.Mod: "//", ast.BitAnd: "|", ast.BitOr: "&"}  # fmt: skip
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
               ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.And: "or",
               ast.Or: "and"}  # fmt: skip


class Fault(NamedTuple):
    """One wrong edit: the text of a file between two offsets (in bytes) is replaced."""

    kind: str
    file: str
    line: int
    start: int
    end: int
    old: str
    new: str


class _Text:
    """Source of a file; nodes of its tree are ranges of bytes."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.name = path.relative_to(ROOT).as_posix()
        lines = self.data.splitlines(keepends=True)
        self.starts = np.cumsum([0, *map(len, lines)]).tolist()

    def range(self, node: Any) -> tuple[int, int]:
        """Returns (start, end) of a node."""
        first = self.starts[node.lineno - 1] + node.col_offset
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset

    def fault(self, kind: str, line: int, start: int, end: int, new: str) -> Fault:
        """Returns the fault that replaces this range."""
        return Fault(kind, self.name, line, start, end, self.data[start:end].decode(), new)

    def source(self, node: Any) -> str:
        """Returns the text of a node."""
        start, end = self.range(node)
        return self.data[start:end].decode()


def faults_of(path: Path) -> Iterator[Fault]:
    """Yields all faults that may be put into a file: what its functions do, not what they say."""
    text = _Text(path)
    yield from _within(text, ast.parse(text.data))


def _within(text: _Text, node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    skipped = {"annotation", "returns", "decorator_list", "type_params"}
    yield from _own(text, node)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in skipped:
                yield from _within(text, child)


def _own(text: _Text, node: Any) -> Iterator[Fault]:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        between = text.range(node.left)[1], text.range(node.right)[0]
        yield from _symbol(text, node.left, "operator", between, OPERATORS[type(node.op)])
    elif isinstance(node, ast.BoolOp):
        between = text.range(node.values[0])[1], text.range(node.values[1])[0]
        yield from _symbol(text, node, "comparison", between, COMPARISONS[type(node.op)])
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        between = text.range(node.left)[1], text.range(node.comparators[0])[0]
        yield from _symbol(text, node, "comparison", between, COMPARISONS[type(node.ops[0])])
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
        new = str(not node.value if isinstance(node.value, bool) else node.value + 1)
        yield text.fault("constant", node.lineno, *text.range(node), new)
    elif isinstance(node, ast.keyword) and node.arg in ("axis", "axes", "keepdims"):
        if isinstance(node.value, ast.Constant | ast.UnaryOp):
            value = ast.literal_eval(node.value)
            new = str(not value if isinstance(value, bool) else 0 if value else 1)
            yield text.fault("axis", node.value.lineno, *text.range(node.value), new)
    elif isinstance(node, ast.Call):
        pairs = zip(node.args, node.args[1:], strict=False)
        for one, two in pairs:
            names = [text.source(x) for x in (one, two)]
            if names[0] != names[1] and not any(isinstance(x, ast.Starred) for x in (one, two)):
                start, end = text.range(one)[0], text.range(two)[1]
                gap = text.data[text.range(one)[1] : text.range(two)[0]].decode()
                yield text.fault("arguments", one.lineno, start, end, names[1] + gap + names[0])


def _symbol(text: _Text, node: Any, kind: str, between: tuple[int, int], new: str):
    """Yields the fault of an operator that stands between two operands, brackets aside."""
    found = text.data[slice(*between)].decode()
    symbol = found.strip("() \n\\")
    if symbol and "#" not in symbol and "\n" not in symbol:
        start = between[0] + found.index(symbol)
        yield text.fault(kind, node.lineno, start, start + len(symbol), new)


def draw(seed: int, count: int) -> list[Fault]:
    """Draws faults, of all kinds in turn; no file has two of one kind."""
    rng, found = np.random.default_rng(seed), []
    paths = [p for place in PLACES for p in _files(digest.ROOT / "flash_pallas" / place)]
    everything = [fault for path in paths for fault in faults_of(path)]
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        taken = {(f.kind, f.file) for f in found}
        fits = [f for f in everything if f.kind == kind and (kind, f.file) not in taken]
        order = rng.permutation(len(fits))
        found.append(next(fits[i] for i in order if _parses(fits[i])))
    return found


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def _broken(fault: Fault) -> bytes:
    data = (ROOT / fault.file).read_bytes()
    return data[: fault.start] + fault.new.encode() + data[fault.end :]


def _parses(fault: Fault) -> bool:
    try:
        compile(_broken(fault), fault.file, "exec")
    except SyntaxError:
        return False
    return True


def ordered(tests: Path, fault: Fault) -> list[str]:
    """Returns the files of tests, those first that mention the module of the fault."""
    stem = Path(fault.file).stem.strip("_")

    def rank(path: Path) -> tuple[int, str]:
        named = stem in path.stem
        return 0 if named else 1 if stem in path.read_text() else 2, path.as_posix()

    files = [p for p in tests.rglob("test_*.py") if p.parent.name != "clients"]
    return [p.relative_to(tests.parent).as_posix() for p in sorted(files, key=rank)]


def outcome(fault: Fault, workers: int) -> dict[str, Any]:
    """Runs the tests with a fault until one fails; returns what noticed it, if anything did."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        wanted = ("flash_pallas", "tests", "benchmarks", "docs", "examples", ".ci")
        for name in wanted:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, copy)
        (copy / fault.file).write_bytes(_broken(fault))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-n", str(workers), "-m", "not compile", *ordered(copy / "tests", fault)]
        # The cases of the sound tree: the copy has another digest.
        environment = os.environ | {
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASH_PALLAS_SEED": str(digest.seed()),
        }
        try:
            found = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return fault._asdict() | {"noticed": False, "by": f"nothing in {SECONDS} s"}
    failed = [x for x in found.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    by = failed[0].partition(" - ")[0] if failed else found.stdout[-300:]
    seconds = round(time.monotonic() - started)
    return fault._asdict() | {"noticed": found.returncode != 0, "by": by, "seconds": seconds}


def main() -> int:
    """Runs the command line; returns 1 if more than a tenth of the faults went unseen."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of faults to put in")
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of pytest")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    arguments = parser.parse_args()
    drawn = list(enumerate(draw(arguments.seed, arguments.count)))
    chosen = [(n, f) for n, f in drawn if not arguments.only or n in arguments.only]
    found = []
    for number, fault in chosen:
        print(f"{number:3} {fault.kind:10} {fault.file}:{fault.line}: {fault.old!r} -> "
              f"{fault.new!r}", flush=True)  # fmt: skip
        if arguments.list:
            continue
        found.append({"number": number} | outcome(fault, arguments.workers))
        print(f"    {'noticed by' if found[-1]['noticed'] else 'UNSEEN:'} {found[-1]['by']}")
        if arguments.json:
            today = datetime.date.today().isoformat()
            about = {"seed": arguments.seed, "commit": results.commit(), "date": today}
            arguments.json.write_text(json.dumps(about | {"faults": found}, indent=1) + "\n")
    unseen = sum(not each["noticed"] for each in found)
    return 1 if 10 * unseen > len(found) else 0


if __name__ == "__main__":
    sys.exit(main())
