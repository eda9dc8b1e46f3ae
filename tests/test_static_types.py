"""Tests that type checkers and editors see the arguments of the public functions."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_pallas as fp

ROOT = Path(__file__).parent.parent
FUNCTIONS = (
    "flash_attention",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "autotune",
    "explain",
)
CALLS = """
F(x, x, x)
F(x, x, x, causal=True, window=(3, None), scale=0.1, kv_lengths=ids, backend="xla")
F(x, x, x, q_offset=ids, bias=x, sinks=x, score_mod=max, blocks={})
F(x, x, x, is_causal=True)  # No parameter named "is_causal"
F(x, x, x, causal="yes")  # parameter "causal"
F(x, x, x, window=0.5)  # parameter "window"
F(x, x, x, mask=True)  # parameter "mask"
F(x, x, x, True)  # positional
F(x, x)  # "v"
"""
RESULTS = """
o: jax.Array = fp.flash_attention(x, x, x)
o, lse = fp.flash_attention_with_lse(x, x, x)
o, lse, most = fp.flash_attention_with_max_logit(x, x, x)
o, lse = fp.flash_attention_with_max_logit(x, x, x)  # size mismatch
fp.explain(x, shape, x, bias=shape, gpu="H100").blocks
fp.explain_decode(x, shape, shape, num_splits=2, page_table=shape, gpu="H200").blocks
fp.explain_varlen(shape, x, x, cu_seqlens_q=shape, causal=True, gpu="H200").blocks
fp.explain_decode(x, x, x, return_lse=True)  # No parameter named "return_lse"
fp.explain(x, x, x, gpu=100)  # parameter "gpu"
fp.flash_attention(x, x, x, gpu="H100")  # No parameter named "gpu"
fp.flash_attention(x, x, shape)  # parameter "v"
"""
HEAD = """import jax
import numpy as np
import flash_pallas as fp

def calls(x: jax.Array, ids: np.ndarray, shape: jax.ShapeDtypeStruct):
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Runs pyright on all calls: returns its words by line, and the lines."""
    folder = tmp_path_factory.mktemp("static")
    calls = [CALLS.strip().replace("F(", f"fp.{name}(") for name in FUNCTIONS]
    shown = [f"reveal_type(fp.{name})" for name in FUNCTIONS]
    body = "\n".join([*calls, RESULTS.strip(), *shown]).replace("\n", "\n    ")
    text = f"{HEAD}    {body}\n"
    (folder / "calls.py").write_text(text)
    settings = {"include": ["."], "extraPaths": [str(ROOT)], "reportUnusedExpression": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run([*command, "-p", str(folder)], capture_output=True, text=True)
    words: dict[int, str] = {}
    for each in json.loads(ran.stdout)["generalDiagnostics"]:
        line = each["range"]["start"]["line"]
        words[line] = words.get(line, "") + each["message"]
    return words, text.splitlines()


def test_wrong_calls_are_errors_and_right_ones_are_not(told):
    words, lines = told
    for number, line in enumerate(lines):
        if "reveal_type" in line:
            continue
        _, wrong, expected = line.partition("  # ")
        found = words.get(number, "")
        assert expected in found if wrong else not found, f"{line}: {found}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_editors_see_every_name_and_default(told, name):
    words, lines = told
    shown = words[lines.index(f"    reveal_type(fp.{name})")]
    for parameter in inspect.signature(getattr(fp, name)).parameters.values():
        default = "" if parameter.default is parameter.empty else r".*? = \S+"
        assert re.search(rf"\b{parameter.name}: [^,]*{default}", shown), parameter.name
    assert "options" not in shown
