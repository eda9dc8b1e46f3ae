"""The rules of the layout: who imports whom, and how long and how nested functions may be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flash_pallas"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import those of a smaller rank, and its own folder.
RANKS = {
    "core": 0,
    "backends.base": 1,
    "reference": 1,
    "tables": 1,
    "keywords": 0,
    "devices": 0,
    "backends.xla": 2,
    "backends.mosaic": 2,
    "backends.hopper": 3,
    "backends.portable": 3,
    "dispatch": 4,
    "batching": 1,
    "sharding": 1,
    "vjp": 5,
    "validate": 5,
    "number_arguments": 3,
    "integer_arguments": 1,
    "hints": 1,
    "arguments": 4,
    "api": 6,
    "validate_decode": 6,
    "decode": 7,
    "tuning": 7,
    "cache": 7,
    "parallel": 7,
    "nn": 8,
}
GPU_BACKENDS = ("backends.mosaic", "backends.hopper", "backends.portable")
MAX_FUNCTION, MAX_NESTING, MAX_PARAMETERS = 80, 2, 8


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def unit(module: str) -> str | None:
    """Returns the entry of RANKS that a module belongs to."""
    fits = [u for u in RANKS if module == u or module.startswith(u + ".")]
    return fits[0] if fits else None


def imported(path: Path) -> set[str]:
    """Lists modules of this package that a file imports, by names relative to the package."""
    here = ["flash_pallas", *path.relative_to(PACKAGE).with_suffix("").parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            found |= {".".join([*base, alias.name]) for alias in node.names}
    inside = {m.removeprefix("flash_pallas.") for m in found if m.startswith("flash_pallas.")}
    return inside


def functions(tree, depth=1):
    """Yields (function, nesting) of every def; a method's nesting is counted within its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, depth
            yield from functions(node, depth + 1)
        else:
            yield from functions(node, depth)


def test_the_table_names_every_module():
    without = {name_of(path) for path in FILES if unit(name_of(path)) is None}
    assert without == {"__init__", "backends"}, "give the new module a rank"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    own = unit(name_of(path))
    if own is None:
        return
    for module in imported(path):
        other = unit(module)
        assert other is not None, f"{name_of(path)} imports {module}, which has no rank"
        below = other == own or RANKS[other] < RANKS[own]
        assert below, f"{name_of(path)} imports {module}"


def test_only_gpu_backends_know_pallas():
    users = {
        name_of(path)
        for path in FILES
        if re.search(r"import pallas|experimental\.pallas|pallas_call", path.read_text())
    }
    assert users and all(unit(name) in GPU_BACKENDS for name in users)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path):
    text = path.read_text()
    public = unit(name_of(path)) in ("api", "cache", "decode", "nn", "parallel")
    for function, depth in functions(ast.parse(text)):
        where = f"{name_of(path)}.{function.name}"
        body = function.end_lineno - function.lineno + 1
        if public and ast.get_docstring(function):
            body -= function.body[0].end_lineno - function.body[0].lineno + 1
        assert body <= MAX_FUNCTION, f"{where} has {body} lines"
        assert depth <= MAX_NESTING, f"{where} is nested {depth} deep"
        args = function.args
        number = len(args.posonlyargs + args.args + args.kwonlyargs)
        assert public or number <= MAX_PARAMETERS, f"{where} has {number} parameters"


def test_the_rules_are_read_right():
    tree = ast.parse("class A:\n  def f(self):\n    def g():\n      def h(): pass\n")
    assert [(f.name, depth) for f, depth in functions(tree)] == [("f", 1), ("g", 2), ("h", 3)]
    assert "core.mask.Mask" in imported(PACKAGE / "core" / "tile.py")
    assert "backends.base.Backend" in imported(PACKAGE / "dispatch.py")
