"""The rules of the layout: who imports whom, and how long and how nested functions may be."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "flash_pallas"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import those of a smaller rank, and its own room.
RANKS = {
    "typing": -1,
    "_version": 0,
    "_lazy": 0,
    "_runtime": 0,
    "core": 0,
    "devices": 0,
    "reference": 1,
    "transforms.sharding": 1,
    "backends.base": 1,
    "backends.xla": 2,
    "backends.cudnn": 2,
    "backends.gpu": 2,
    "backends.target": 3,
    "backends.unloaded": 3,
    "backends.hopper": 3,
    "backends.portable": 3,
    "frontend.tables": 4,
    "frontend.dispatch": 5,
    "frontend.explain": 6,
    "frontend.arguments": 3,
    "frontend.functions": 4,
    "frontend.words": 5,
    "frontend.readable": 5,
    "transforms.derivatives": 3,
    "transforms.equations": 4,
    "transforms.any_order": 5,
    "frontend.validate": 5,
    "frontend.validate_decode": 6,
    "frontend.validate_ragged": 7,
    "api": 6,
    "varlen": 7,
    "decode": 7,
    "tuning": 7,
    "cache": 8,
    "ragged": 9,
    "parallel": 7,
    "nn": 9,
    "integrations": 9,
    "conformance": 9,
    "coverage": 10,
    "doctor": 11,
    "__main__": 12,
    "compat": 10,
}
# The rooms of a kernel's directions know nothing of each other.
APART = (
    ("backends.hopper.forward", "backends.hopper.backward"),
    ("backends.hopper.backward.fused", "backends.hopper.backward.split"),
    ("backends.hopper.backward.dbias", "backends.hopper.backward.split"),
    ("backends.hopper.decode", "backends.hopper.backward"),
    ("backends.portable.forward", "backends.portable.backward"),
    ("backends.portable.decode", "backends.portable.backward"),
)
GPU_BACKENDS = ("backends.gpu", "backends.hopper", "backends.portable")
MAX_FILE, MAX_FUNCTION, MAX_NESTING, MAX_PARAMETERS = 700, 80, 2, 8


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def unit(module: str) -> str | None:
    """Returns the entry of RANKS that a module belongs to."""
    fits = [u for u in RANKS if module == u or module.startswith(u + ".")]
    return fits[0] if fits else None


@functools.cache
def imported(path: Path) -> frozenset[str]:
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
    return frozenset(inside)


def functions(tree, depth=1):
    """Yields (function, nesting) of every def; a method's nesting is counted within its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, depth
            yield from functions(node, depth + 1)
        else:
            yield from functions(node, depth)


ROOMS = {"__init__", "backends", "frontend", "transforms"}


def test_the_table_names_every_module():
    without = {name_of(path) for path in FILES if unit(name_of(path)) is None}
    assert without == ROOMS, "give the new module a rank"


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE} == {}


def test_imports_point_down():
    upwards = []
    for path in FILES:
        name = name_of(path)
        own = unit(name)
        for module in imported(path) if own else ():
            other = unit(module)
            below = other is not None and (other == own or RANKS[other] < RANKS[own])
            if not below:
                upwards.append(f"{name} imports {module}")
    assert not upwards


def inside(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def test_rooms_are_apart():
    doors = [
        f"{name_of(path)} imports {module}"
        for pair in APART
        for one, other in (pair, pair[::-1])
        for path in FILES
        for module in imported(path)
        if inside(name_of(path), one) and inside(module, other)
    ]
    assert not doors


def test_only_gpu_backends_know_pallas():
    users = {
        name_of(path)
        for path in FILES
        if re.search(r"import pallas|experimental\.pallas|pallas_call", path.read_text())
    }
    assert users and all(unit(name) in GPU_BACKENDS for name in users)


# What differs between versions of jax, and what is replaced inside Mosaic GPU.
OF_VERSIONS = r"version_info|jaxlib\.version|_infer_arch|KNOWN_KERNELS|transitively|\bsetattr\("
MAY_ASK = {"backends.gpu.jax_compat", "frontend.tables"}  # tables are named after jaxlib's version


# Code in MLIR or PTX, but for the names of kernels and for reading what was lowered.
WRITTEN = r"jaxlib\.mlir|inline_mgpu\("
MAY_WRITE = {"backends.gpu.jax_compat", "coverage.digests"}


def test_one_room_writes_mlir_and_ptx():
    names = {name_of(path) for path in FILES if re.search(WRITTEN, path.read_text())}
    elsewhere = {name for name in names if not name.startswith("backends.gpu.ptx.")}
    assert elsewhere == MAY_WRITE


def test_one_file_knows_versions_of_jax():
    rooms = ("backends", "core", "frontend", "transforms")
    asking = {
        name_of(path)
        for path in FILES
        if name_of(path).startswith(rooms) and re.search(OF_VERSIONS, path.read_text())
    }
    assert asking == MAY_ASK


def test_the_page_of_a_new_jax_names_what_is_replaced():
    page = (PACKAGE.parent / "docs" / "internals" / "jax-upgrade.md").read_text()
    source = (PACKAGE / "backends" / "gpu" / "jax_compat.py").read_text()
    replaced = re.findall(r"^- `([\w.]+)`", source, re.M)
    assert len(replaced) == 3 and all(f"`{name}`" in page for name in replaced)


def too_much(path: Path) -> Iterator[str]:
    """Yields what is too long, too deep or has too many parameters in a file."""
    public = unit(name_of(path)) in (
        "api",
        "cache",
        "compat",
        "decode",
        "integrations",
        "nn",
        "parallel",
        "ragged",
        "varlen",
    )
    for function, depth in functions(ast.parse(path.read_text())):
        where = f"{name_of(path)}.{function.name}"
        lines = function.end_lineno - function.lineno + 1
        if public and ast.get_docstring(function):
            lines -= function.body[0].end_lineno - function.body[0].lineno + 1
        if lines > MAX_FUNCTION:
            yield f"{where} has {lines} lines"
        if depth > MAX_NESTING:
            yield f"{where} is nested {depth} deep"
        args = function.args
        number = len(args.posonlyargs + args.args + args.kwonlyargs)
        if not public and number > MAX_PARAMETERS:
            yield f"{where} has {number} parameters"


def test_sizes():
    assert not [fault for path in FILES for fault in too_much(path)]


def test_the_rules_are_read_right():
    tree = ast.parse("class A:\n  def f(self):\n    def g():\n      def h(): pass\n")
    assert [(f.name, depth) for f, depth in functions(tree)] == [("f", 1), ("g", 2), ("h", 3)]
    assert "core.mask.Mask" in imported(PACKAGE / "core" / "problem.py")
    assert "backends.base.Backend" in imported(PACKAGE / "frontend" / "dispatch.py")
