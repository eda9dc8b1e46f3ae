"""Tests that pyright, mypy and editors understand the public functions.

Each checker runs once, over all of `user_programs`; pyright also reads the calls below.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import flash_pallas as fp
import flash_pallas.typing as types
from flash_pallas.core import problem
from flash_pallas.frontend import dispatch

from .test_architecture import FILES, PACKAGE

ROOT = PACKAGE.parent
FOLDER = ROOT / "tests" / "user_programs"
PROGRAMS = sorted(FOLDER.glob("[a-z]*.py"))
MARK = "  # error"
FUNCTIONS = (
    "flash_attention",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "autotune",
)
# A line is wrong if it says so, and then pyright's words have this in them.
CALLS = """
F(x, x, x)
F(x, x, x, causal=True, window=(3, None), scale=0.1, kv_lengths=ids, backend="xla")
F(x, x, x, q_offset=ids, bias=x, sinks=x, score_mod=max, blocks={})
F(x, x, x, is_causal=True)  # error: No parameter named "is_causal"
F(x, x, x, causal="yes")  # error: parameter "causal"
F(x, x, x, window=0.5)  # error: parameter "window"
F(x, x, x, mask=True)  # error: parameter "mask"
F(x, x, x, True)  # error: positional
F(x, x)  # error: "v"
F(x, x, shape)  # error: parameter "v"
F(x, x, x, gpu="H100")  # error: No parameter named "gpu"
"""
HEAD = """import jax
import numpy as np
import flash_pallas as fp

def calls(x: jax.Array, ids: np.ndarray, shape: jax.ShapeDtypeStruct):
"""
# No public type comes from where kernels are written, which takes a third of mypy's time.
MYPY = """[mypy]
follow_imports = silent
cache_dir = {cache}
[mypy-jax._src.pallas.*,jax.experimental.mosaic.*,jaxlib.mlir.*]
follow_imports = skip
"""


def check(folder: Path, words: dict[tuple[str, int], str]) -> None:
    """Checks that a checker says something of every line that is marked, and of no other.

    Args:
        folder: the files that it read.
        words: by file and line, from 1 on, what it said.
    """
    found = []
    for path in sorted(folder.glob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            _, wrong, expected = line.partition(MARK)
            told = words.get((path.name, number), "")
            if bool(wrong) != bool(told) or expected.removeprefix(": ") not in told:
                found.append(f"{path.name}:{number}: {line.strip()}: {told or 'nothing said'}")
    assert not found, "\n".join(found)


def copied(folder: Path) -> Path:
    """Copies the programs: no other part of this repository is above them, as at a user's.

    They stay a package, as the one named flax would hide Flax otherwise.
    """
    return Path(shutil.copytree(FOLDER, folder / "programs", ignore=lambda *_: ["__pycache__"]))


def test_pyright(tmp_path):
    calls = [CALLS.strip().replace("F(", f"fp.{name}(") for name in FUNCTIONS]
    shown = [f"reveal_type(fp.{name})" for name in FUNCTIONS]
    body = "\n".join([*calls, *shown]).replace("\n", "\n    ")
    programs = copied(tmp_path)
    (programs / "calls.py").write_text(f"{HEAD}    {body}\n")
    settings = {"include": ["."], "extraPaths": [str(ROOT)], "reportUnusedExpression": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run([*command, "-p", str(tmp_path)], capture_output=True, text=True)
    words: dict[tuple[str, int], str] = {}
    signatures = []
    for each in json.loads(ran.stdout)["generalDiagnostics"]:
        if each["severity"] == "information":
            signatures.append(each["message"])
        else:
            place = Path(each["file"]).name, each["range"]["start"]["line"] + 1
            words[place] = words.get(place, "") + each["message"]
    check(programs, words)
    for name, signature in zip(FUNCTIONS, signatures, strict=True):
        check_shows_everything(name, signature)


def check_shows_everything(name: str, signature: str) -> None:
    """Checks that pyright's words for a function, as editors show them, have all its arguments."""
    for parameter in inspect.signature(getattr(fp, name)).parameters.values():
        default = "" if parameter.default is parameter.empty else r".*? = \S+"
        assert re.search(rf"\b{parameter.name}: [^,]*{default}", signature), (name, parameter.name)
    assert "options" not in signature


def test_mypy(tmp_path, request):
    """Follows imports silently: mypy reports nothing of a package that is installed."""
    kept = request.config.pluginmanager.hasplugin("cacheprovider")
    # With what an earlier run knows of JAX and Flax it takes 3 s of a CPU, without that 10 s.
    cache = request.config.cache.mkdir("mypy") if kept else tmp_path / "cache"
    settings = MYPY.format(cache=cache)
    (tmp_path / "mypy.ini").write_text(settings)
    programs = copied(tmp_path)
    command = [sys.executable, "-m", "mypy", "--output", "json", "."]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    words: dict[tuple[str, int], str] = {}
    for each in map(json.loads, ran.stdout.splitlines()):
        place = Path(each["file"]).name, each["line"]
        words[place] = words.get(place, "") + each["message"]
    assert ran.returncode == 1, ran.stderr
    check(programs, words)


def test_every_page_with_code_has_a_program_with_errors_in_it():
    pages = {
        path.stem.replace("-", "_")
        for path in (ROOT / "docs").glob("*.md")
        if "```python" in path.read_text()
    }
    assert pages == {path.stem for path in PROGRAMS}
    assert all(MARK in path.read_text() for path in PROGRAMS)


def test_types_need_no_other_package():
    """Checks that no file imports jaxtyping: types are then the same with it and without."""
    imports = re.compile(r"^\s*(import|from)\s+jaxtyping\b", re.MULTILINE)
    assert [path.name for path in FILES if imports.search(path.read_text())] == []
    assert imports.search("if TYPE_CHECKING:\n    from jaxtyping import Float")


def test_the_choices_are_those_that_run():
    of = lambda alias: set(typing.get_args(alias))
    assert of(types.BackendName) == {dispatch.AUTO, *dispatch.BACKENDS}
    assert of(types.Differentiable) == set(problem.DERIVATIVES)
    assert of(typing.get_args(types.Precision)[0]) == set(problem.PRECISIONS)
    assert of(types.Alignment) == set(importlib.import_module("flash_pallas.varlen").ALIGNMENTS)


OVERLOADED = [
    "append_ragged_kv",
    "compat.flash_attn.flash_attn_with_kvcache",
    "compat.flex.flex_attention",
    "compat.splash.make_splash_mha",
    "dot_product_attention",
    "flash_attention_varlen",
    "flash_decode",
    "nn.linen.FlashAttention.__call__",
    "nn.nnx.FlashAttention.__call__",
    "parallel.sharded_attention",
    "ragged_paged_attention",
]


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_have_the_arguments_of_the_function(name):
    """Compares names, the order of those that go by position, and the types of a TypedDict."""
    function = found("flash_pallas", name)
    whole = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    assert len(overloads) >= 2
    for overload in overloads:
        own = dict(inspect.signature(overload).parameters)
        options = own.pop("options", None)
        types = {} if options is None else keys_of(overload, options)
        assert own.keys() | types.keys() == whole.keys()
        positional = [x.name for x in own.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert positional == list(whole)[: len(positional)]
        for key, annotation in types.items():
            assert annotation == str(whole[key].annotation), key


def keys_of(overload, options: inspect.Parameter) -> dict[str, str]:
    """Returns the types of the keys of `**options: Unpack[...]`, as they are written."""
    path = str(options.annotation).removeprefix("Unpack[").removesuffix("]").split(".")
    options = overload.__globals__[path[0]]
    for part in path[1:]:
        options = getattr(options, part)
    written = {key: each.__forward_arg__ for key, each in options.__annotations__.items()}
    required = re.compile(r"Required\[(.*)\]")
    return {key: required.sub(r"\1", text) for key, text in written.items()}


def found(package: str, name: str):
    """Returns what stands behind a path of modules and attributes."""
    value = importlib.import_module(package)
    for part in name.split("."):
        path = f"{value.__name__}.{part}"
        value = getattr(value, part, None) or importlib.import_module(path)
    return value
