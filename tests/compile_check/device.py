"""GPUs that can be compiled for but not run on.

XLA, the Mosaic GPU pipeline and ptxas all run as they would on a machine with the card. All they
need to know about it is in the topology description that `Target` writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from flash_pallas.devices import DEVICES, Device

_DESCRIPTION = """
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  platform_version: "Compute Capability {major}.{minor}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  core_count: {multiprocessors}
  fpus_per_core: 128
  clock_rate_ghz: {clock}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {smem}
  shared_memory_per_core: {smem_per_multiprocessor}
  l2_cache_size: {l2_cache}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}000000000
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
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for. Mosaic GPU asks for `major`, `minor` and `smem` only.

    Attributes:
        gpu: the GPU as the package knows it.
        name: name of the report.
        threads: threads that one SM holds.
        l2_cache, memory: bytes.
        bandwidth: memory bandwidth in GB/s.
        clock: GHz.
    """

    gpu: Device
    name: str
    threads: int
    l2_cache: int
    memory: int
    bandwidth: int
    clock: float

    @property
    def major(self) -> int:
        """First number of the compute capability."""
        return int(self.gpu.capability.split(".")[0])

    @property
    def minor(self) -> int:
        """Second number of the compute capability."""
        return int(self.gpu.capability.split(".")[1])

    @property
    def smem(self) -> int:
        """Bytes of shared memory that one CTA may ask for."""
        return self.gpu.shared_memory

    @property
    def smem_per_multiprocessor(self) -> int:
        """Bytes of shared memory of an SM: the system keeps 1 KB per CTA, so no CTA has all."""
        return self.smem + 1024

    @property
    def accelerated(self) -> bool:
        """True where code is compiled with this capability's own features, the "a" of sm_90a.

        Mosaic GPU writes PTX for them wherever LLVM knows such a target (GetSmVersion in
        jaxlib/mosaic/gpu/target.cc), which is from 9.0 on. ptxas must be told the same: asked for
        sm_120 it refuses PTX for sm_120a.
        """
        return self.major >= 9

    @property
    def architecture(self) -> str:
        """Architecture in ptxas' spelling, such as "sm_90a"."""
        return f"sm_{self.major}{self.minor}{'a' if self.accelerated else ''}"

    def description(self) -> str:
        """Returns XLA's GpuTargetConfigProto in text form."""
        return _DESCRIPTION.format(
            extension="feature_extension: ACCELERATED_FEATURES" if self.accelerated else "",
            major=self.major,
            minor=self.minor,
            multiprocessors=self.gpu.sms,
            smem=self.smem,
            smem_per_multiprocessor=self.smem_per_multiprocessor,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
        )


MB, GB = 2**20, 2**30
# Threads of an SM; L2 cache, memory, bandwidth, clock
H200 = Target(DEVICES["h200"], "NVIDIA H200", 2048, 50 * MB, 141 * GB, 4800, 1.98)
A100 = Target(DEVICES["a100"], "NVIDIA A100", 2048, 40 * MB, 80 * GB, 2039, 1.41)
A10 = Target(DEVICES["a10"], "NVIDIA A10", 1536, 6 * MB, 24 * GB, 600, 1.695)
L40S = Target(DEVICES["l40s"], "NVIDIA L40S", 1536, 96 * MB, 48 * GB, 864, 2.52)
B200 = Target(DEVICES["b200"], "NVIDIA B200", 2048, 126 * MB, 192 * GB, 8000, 1.965)
RTX_5090 = Target(
    DEVICES["rtx5090"], "NVIDIA GeForce RTX 5090", 1536, 96 * MB, 32 * GB, 1792, 2.407
)
TARGETS = {
    "h200": H200,
    "a100": A100,
    "a10": A10,
    "l40s": L40S,
    "b200": B200,
    "rtx5090": RTX_5090,
}


# Folders of the wheels nvidia-cuda-nvcc and nvidia-cuda-nvcc-cu12 that have ptxas in bin.
TOOLKITS = ("cu13", "cuda_nvcc")


@dataclasses.dataclass(frozen=True)
class Tools:
    """The CUDA programs that a compilation runs.

    Attributes:
        ptxas: path of the assembler.
        nvdisasm: path of the disassembler, or None, which gives no instruction counts.
    """

    ptxas: Path
    nvdisasm: Path | None

    def version(self) -> str:
        """Returns the release of ptxas, such as "V13.0.88"."""
        told = subprocess.run([self.ptxas, "--version"], capture_output=True, text=True, check=True)
        return next(word for word in told.stdout.split() if word.startswith("V"))


def find_tools() -> Tools:
    """Finds the wheel's own tools, else those on PATH, and puts the wheel's first on PATH for XLA.

    Raises:
        FileNotFoundError: there is no ptxas anywhere.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for root in [] if nvidia is None else nvidia.submodule_search_locations or []:
        for toolkit in TOOLKITS:
            folder = Path(root, toolkit, "bin")
            if (folder / "ptxas").exists():
                os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    ptxas, nvdisasm = shutil.which("ptxas"), shutil.which("nvdisasm")
    if ptxas is None:
        raise FileNotFoundError("no ptxas: install the package with its 'compile' extra")
    return Tools(Path(ptxas), None if nvdisasm is None else Path(nvdisasm))


PRINTED = "printed.txt"  # the file in the folder of `dump_to` that has what C++ printed


@contextlib.contextmanager
def dump_to(folder: Path, tools: Tools) -> Iterator[None]:
    """Makes Mosaic GPU leave in `folder` what `report.take` reads of each kernel that it compiles.

    MOSAIC_GPU_DUMP_TO would make it write files there, but of all that it knows. The forward of
    `blocks_window_128` takes 9.4 s then, not 3.9 s, and writes 146 MB of MLIR passes. Without that
    variable it prints what the others ask for. C++ prints PTX, ptxas' report and SASS, by which
    `report.split` tells kernels apart. Python prints shared memory without the kernel's name, but
    through a function that is given the name of a file.

    Importing Mosaic GPU overwrites MOSAIC_GPU_CUDA_ROOT, where it looks for bin/nvdisasm, so the
    variable is set after that import.
    """
    from jax.experimental.mosaic.gpu import utils

    others = dict.fromkeys(name for name in os.environ if name.startswith("MOSAIC_GPU_DUMP_"))
    wanted = ["PTX", "PTXAS", "RESOURCES"] + ["SASS_CTRL"] * (tools.nvdisasm is not None)
    settings = others | {f"MOSAIC_GPU_DUMP_{name}": "1" for name in wanted}
    if tools.nvdisasm is not None:
        settings["MOSAIC_GPU_CUDA_ROOT"] = str(tools.nvdisasm.parent.parent)
    write = lambda content, name, _: (folder / name).write_text(content)
    with (
        _environment(settings),
        mock.patch.object(utils, "dump_to_file_or_stdout", write),
        _printed_to(folder / PRINTED),
    ):
        yield


@contextlib.contextmanager
def _environment(settings: dict[str, str | None]) -> Iterator[None]:
    """Sets variables, or removes those that are None."""
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: dict[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    """Appends to a file what C++ prints; what Python prints still goes to standard output."""
    sys.stdout.flush()
    with path.open("ab") as file, open(os.dup(1), "w", buffering=1) as output:
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(output):
                yield
        finally:
            os.dup2(output.fileno(), 1)


_architectures: set[str] = set()  # that this process has compiled for: one at most


def compile_for(target: Target, function: Callable, *arguments: Any) -> Any:
    """Compiles `function` for one GPU of this kind.

    Lowering asks jax.extend.backend.get_default_device() which compute capability it writes for
    (`_infer_arch` in jax/experimental/mosaic/gpu/utils.py; 9.0 where that is a CPU), hence the
    target's device as the default one. It asks jax.local_devices() how much shared memory there is
    (`_launch` in core.py; 227 KB where that is a CPU), hence the limit, which can only lower it.

    Args:
        target: one of TARGETS.
        function: function that users would jit.
        *arguments: pytrees of jax.ShapeDtypeStruct.

    Returns:
        What XLA made, a jax.stages.Compiled that cannot run here.

    Raises:
        RuntimeError: this process has compiled for another architecture. jaxlib keeps the first
            kernel's compute capability for the ptxas of all that follow (GetPassPipeline in
            jaxlib/mosaic/gpu/custom_call.cc), without a word where the second one is lower.
        Exception: whatever tracing, lowering, XLA or ptxas raises.
    """
    from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit

    with artificial_shared_memory_limit(target.smem):
        return lower_for(target, function, *arguments).compile()


def lower_for(target: Target, function: Callable, *arguments: Any) -> Any:
    """Lowers `function` for one GPU of this kind; the rest is as in `compile_for`."""
    there = device_of(target)
    (device,) = there.device_set
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there)
    with jax.default_device(device):
        return jax.jit(function).lower(*jax.tree.map(place, arguments))


def device_of(target: Target) -> NamedSharding:
    """Returns one GPU of this kind, as a sharding.

    Raises:
        RuntimeError: as in `compile_for`.
    """
    others = _architectures - {target.architecture}
    if others:
        raise RuntimeError(
            f"{target.name} is {target.architecture}, but this process compiles for {others}: "
            "start another one"
        )
    _architectures.add(target.architecture)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.description(), topology="1x1x1"
    )
    return NamedSharding(topologies.make_mesh(topology, (1,), ("device",)), PartitionSpec())
