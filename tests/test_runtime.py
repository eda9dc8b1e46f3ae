"""The library that kernels call is named without an import of Mosaic GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.experimental.mosaic.gpu import core

from flash_pallas import _runtime

MADE = """
import sys
import jax
import jax.export
import jax.numpy as jnp
import flash_pallas as fp
x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
attend = jax.jit(lambda q, k, v: fp.flash_attention(q, k, v))
checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
with fp.target("H200"):
    made = jax.export.export(attend, platforms=["cuda"], disabled_checks=checks)(x, x, x)
open(sys.argv[1], "wb").write(made.serialize())
"""
READ = """
import sys
import jax
import jax.export
import flash_pallas
assert "jax.experimental.mosaic.gpu" not in sys.modules
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
there = sys.argv[2]
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
config = {"platform": "cuda", "target_config": open(there).read(), "topology": "1x1x1"}
one = topologies.get_topology_desc(**config)
there = NamedSharding(topologies.make_mesh(one, (1,), ("device",)), PartitionSpec())
given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in program.in_avals]
jax.jit(program.call).lower(*given).compile()
assert "jax.experimental.mosaic.gpu" not in sys.modules
"""


@pytest.fixture(name="plugin")
def _plugin(tmp_path, monkeypatch):
    """A plugin of jax for CUDA 13 with the library; the variable is not set."""
    spec = importlib.machinery.ModuleSpec("jax_cuda13_plugin", None)
    spec.submodule_search_locations = [str(tmp_path)]
    (tmp_path / _runtime.LIBRARY).touch()
    found = {"jax_cuda13_plugin": spec}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    monkeypatch.delenv(_runtime.VARIABLE, raising=False)
    return tmp_path


def test_the_library_of_the_plugin_is_named(plugin):
    _runtime.name_library()
    assert os.environ.pop(_runtime.VARIABLE) == str(plugin / _runtime.LIBRARY)


def test_what_the_user_has_set_stays(plugin, monkeypatch):
    monkeypatch.setenv(_runtime.VARIABLE, "mine.so")
    _runtime.name_library()
    assert os.environ[_runtime.VARIABLE] == "mine.so"


def test_without_a_library_nothing_is_named(plugin):
    (plugin / _runtime.LIBRARY).unlink()
    _runtime.name_library()
    assert _runtime.VARIABLE not in os.environ


def test_the_names_are_those_of_jax():
    text = Path(core.__file__).read_text()
    assert f'os.environ["{_runtime.VARIABLE}"]' in text and f'"{_runtime.LIBRARY}"' in text


@pytest.mark.compile
def test_a_process_that_only_imports_the_package_compiles_an_exported_program(tmp_path):
    from .compile_check import device

    device.find_tools()
    (tmp_path / "gpu").write_text(device.H200.description())
    names = [str(tmp_path / name) for name in ("program", "gpu")]
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    environment.pop(_runtime.VARIABLE, None)
    for program in (MADE, READ):
        command = [sys.executable, "-c", program, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
