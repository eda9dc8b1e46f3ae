"""The example of docs/internals/new-modifier.md, applied to a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "internals" / "new-modifier.md"

# Outputs and gradients against the oracle; a bound that a wrong sign or a lost factor exceeds.
PROGRAM = """
import contextlib
import jax, jax.numpy as jnp
from flash_pallas import flash_attention, reference
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.transforms import derivatives
from tests.interpreter import race_checked

def on(backend):
    def call(q, k, v, **arguments):
        call = validate.canonicalize(q, k, v, Arguments(**arguments))
        blocks = backend.attention.plan(call.problem)
        return derivatives.attend(backend, call.spec, blocks, call.operands)[0]
    return call

def results(call, x, **arguments):
    o, pull = jax.vjp(lambda *qkv: call(*qkv, **arguments).astype(jnp.float32), *x[:3])
    return o, *pull(x[3].astype(jnp.float32))

CALLS = {
    "xla": lambda *qkv, **a: flash_attention(*qkv, backend="xla", **a),
    "hopper": on(HopperBackend(interpret=True, num_sms=2)),
    "portable": on(PortableBackend(interpret=True)),
}
keys = jax.random.split(jax.random.key(0), 5)
x = [jax.random.normal(key, (1, 128, 2, 64), jnp.bfloat16) for key in keys[:4]]
bias = jax.random.normal(keys[4], (1, 1, 1, 128), jnp.bfloat16)
bias = jnp.where(jnp.arange(128) % 3 == 1, -jnp.inf, bias)  # -inf hides, whatever comes after it
CASES = {
    "xla": (
        {"causal": True},
        {"softcap": 2.0, "bias": bias},
        {"dropout_rate": 0.3, "dropout_seed": 1},
    ),
    "hopper": (
        {"softcap": 2.0, "causal": True, "dropout_rate": 0.3, "dropout_seed": 1},
        {"softcap": 2.0, "bias": bias},
    ),
    "portable": ({"softcap": 2.0, "causal": True, "bias": bias},),
}
oracle = lambda *qkv, **a: reference.attention(*qkv, **a)[0]
for name, call in CALLS.items():
    for arguments in CASES[name]:
        exact = results(oracle, x, leak=0.1, **arguments)
        with contextlib.nullcontext() if name == "xla" else race_checked():
            found = results(call, x, leak=0.1, **arguments)
        without = results(oracle, x, **arguments)
        distance = lambda a, b: float(jnp.abs((a - b).astype(jnp.float32)).max() / jnp.abs(a).max())
        errors = [distance(a, b) for a, b in zip(exact, found, strict=True)]
        effects = [distance(a, b) for a, b in zip(exact, without, strict=True)]
        assert max(errors) < 0.02 < 0.1 < max(effects), (name, arguments, errors, effects)
try:
    flash_attention(*x[:3], leak=-1.0)
except ValueError as error:
    assert "leak is -1.0" in str(error)
else:
    raise AssertionError("a negative leak was taken")
print("right")
"""


def hunks(diff: str):
    """Yields (path, old text, new text) of each part of a diff without line numbers."""
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        path, _, rest = part.partition("\n")
        for hunk in rest.split("@@\n")[1:]:
            lines = [line or " " for line in hunk.splitlines()]
            of = lambda kinds, lines=lines: "\n".join(x[1:] for x in lines if x[0] in kinds)
            yield path, of(" -"), of(" +")


@pytest.mark.thorough
def test_the_example_is_the_whole_change(tmp_path):
    shutil.copytree(
        ROOT / "flash_pallas",
        tmp_path / "flash_pallas",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for path, old, new in hunks(diff):
        text = (tmp_path / path).read_text()
        assert old in text, f"{path} has no such lines: {old}"
        (tmp_path / path).write_text(text.replace(old, new))
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "NPROC": "16"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.endswith("right\n"), found.stdout + found.stderr[-3000:]


def test_the_example_fits_the_package():
    """Finds the lines that the example changes, and none of a kernel among them."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = list(hunks(diff))
    # Each once; what is passed on as it is, in every function of the file.
    assert all((ROOT / path).read_text().count(old) >= 1 for path, old, _ in found)
    assert not [path for path, *_ in found if "backends/" in path]
