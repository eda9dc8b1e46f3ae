"""Counts what a reader of one plain call has to enter: `python -m tests.house`.

The gradient of a causal bfloat16 call is traced and lowered for a Hopper GPU, which need not be
there. It counts the files of the package whose functions run, how deep these calls are stacked, and
the kinds of record (dataclasses and named tuples) that are made.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import flash_pallas as fp
from flash_pallas.frontend import dispatch

from .lowering_fuzz import GPUS
from .test_architecture import FILES, imported, name_of

PACKAGE = str(Path(fp.__file__).parent)


@dataclasses.dataclass
class Count:
    """Figures of one call.

    Attributes:
        files: of the package, whose functions ran.
        functions: of the package that ran, as (file, qualified name).
        records: kinds of dataclass and named tuple that were made.
        deepest: most functions of the package on the stack at one time.
    """

    files: set[str] = dataclasses.field(default_factory=set)
    functions: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    records: set[str] = dataclasses.field(default_factory=set)
    deepest: int = 0

    def __str__(self) -> str:
        return (
            f"files entered {len(self.files)}, functions {len(self.functions)}, deepest stack "
            f"{self.deepest}, kinds of record {len(self.records)}"
        )


def made_by(frame: FrameType) -> str | None:
    """Returns the class of this package that a generated constructor makes, if the frame is one."""
    name, given = frame.f_code.co_name, frame.f_locals
    made = type(given["self"]) if name == "__init__" and "self" in given else given.get("_cls")
    if isinstance(made, type) and made.__module__.startswith("flash_pallas"):
        return f"{made.__module__}.{made.__qualname__}"
    return None


def counted(run: Callable[[], Any]) -> Count:
    """Runs it and counts what happens in the package."""
    found, depth = Count(), 0

    def watch(frame: FrameType, event: str, _):
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return"):
            return
        if code.co_filename.startswith(PACKAGE):
            depth += 1 if event == "call" else -1
            if event == "call":
                found.files.add(code.co_filename.removeprefix(PACKAGE + "/"))
                found.functions.add((code.co_filename, code.co_qualname))
                found.deepest = max(found.deepest, depth)
        elif event == "call" and code.co_filename.startswith("<") and (kind := made_by(frame)):
            found.records.add(kind)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def plain_gradient() -> Count:
    """Counts the gradient of a causal bfloat16 call of [4, 4096, 16, 128]."""
    q = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)

    def loss(q, k, v):
        o = fp.flash_attention(q, k, v, causal=True, backend="hopper")
        return o.astype(jnp.float32).sum()

    def lower():
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, q, q)
        traced.lower(lowering_platforms=("cuda",))

    there = {"hopper": GPUS["hopper"].make()}
    with mock.patch.dict(dispatch.BACKENDS, there):
        return counted(lower)


def circles() -> list[list[str]]:
    """Returns the groups of files that import each other, however indirectly."""
    names = {name_of(path) for path in FILES}
    graph = {name_of(path): set(within(imported(path), names)) for path in FILES}
    reach = {name: reached(graph, name) for name in graph}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def within(modules: set[str], names: set[str]) -> Iterator[str]:
    """Yields the file of each imported name; those of packages alone are left out."""
    for module in modules:
        while module and module not in names:
            module = module.rpartition(".")[0]
        if module and not module.endswith("backends"):
            yield module


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns all files that one imports, however indirectly."""
    found, todo = set(), [start]
    while todo:
        for other in graph.get(todo.pop(), ()):
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


def main() -> None:
    """Prints the figures; with `--json` what a plain gradient enters, for tests."""
    found = plain_gradient()
    if "--json" in sys.argv:
        names = {"files": sorted(found.files), "records": sorted(found.records)}
        counts = {"functions": len(found.functions), "deepest": found.deepest}
        sys.stdout.write(json.dumps(names | counts))
        return
    lines = sum(len(path.read_text().splitlines()) for path in FILES)
    told = [str(found), f"lines {lines}, files {len(FILES)}"]
    told += [f"import circle: {', '.join(group)}" for group in circles()]
    sys.stdout.write("\n".join([*told, ""]))


if __name__ == "__main__":
    main()
