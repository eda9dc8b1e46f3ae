"""An H200 that can be compiled for but not run on.

XLA, the Mosaic GPU pipeline and ptxas all run as they would beside the card; what they need to know
of it is in the topology description below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

SMEM_LIMIT = 232_448  # bytes that one block may ask for: 227 KB

_H200 = f"""
gpu_device_info {{
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  platform_version: "Compute Capability 9.0"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {SMEM_LIMIT}
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  device_address_bits: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Tools:
    """The CUDA programs that a compilation runs.

    Attributes:
        ptxas: the assembler.
        nvdisasm: the disassembler, or None: no instruction counts then.
    """

    ptxas: Path
    nvdisasm: Path | None

    def version(self) -> str:
        """The release of ptxas, such as "V13.0.88"."""
        told = subprocess.run([self.ptxas, "--version"], capture_output=True, text=True, check=True)
        return next(word for word in told.stdout.split() if word.startswith("V"))


def find_tools() -> Tools:
    """The wheel's own tools, else those on PATH, and puts the wheel's first on PATH for XLA.

    Raises:
        FileNotFoundError: there is no ptxas anywhere.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for root in [] if nvidia is None else nvidia.submodule_search_locations or []:
        folder = Path(root, "cu13", "bin")
        if (folder / "ptxas").exists():
            os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    ptxas, nvdisasm = shutil.which("ptxas"), shutil.which("nvdisasm")
    if ptxas is None:
        raise FileNotFoundError("no ptxas: install the package with its 'cuda13' extra")
    return Tools(Path(ptxas), None if nvdisasm is None else Path(nvdisasm))


@contextlib.contextmanager
def dump_to(folder: Path, tools: Tools) -> Iterator[None]:
    """Mosaic GPU leaves .ptx, .ptxas, .resources.txt (and .sass_ctrl) of every kernel in `folder`.

    Importing Mosaic GPU overwrites MOSAIC_GPU_CUDA_ROOT, where it looks for bin/nvdisasm, so the
    variable is set after that import.
    """
    import jax.experimental.mosaic.gpu  # noqa: F401

    with tempfile.TemporaryDirectory() as name:
        root = _silent_disassembler(Path(name)) if tools.nvdisasm is None else tools.nvdisasm
        settings = {
            "MOSAIC_GPU_DUMP_TO": str(folder),
            "MOSAIC_GPU_CUDA_ROOT": str(root.parent.parent),
        }
        with _environment(settings):
            yield


def _silent_disassembler(folder: Path) -> Path:
    """One that prints nothing: without any, Mosaic GPU complains of every kernel in three lines."""
    program = folder / "bin" / "nvdisasm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compile_for_h200(function: Callable, *arguments: Any) -> None:
    """Compiles `function` for one H200.

    Args:
        function: what users would jit.
        *arguments: pytrees of jax.ShapeDtypeStruct.

    Raises:
        Exception: whatever tracing, lowering, XLA or ptxas raises.
    """
    topology = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    there = NamedSharding(mesh, PartitionSpec())
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there)
    jax.jit(function).lower(*jax.tree.map(place, arguments)).compile()
