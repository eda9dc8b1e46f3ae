"""The GPUs that this package knows, and the GPU for which programs are made if it is not here.

Dispatch, `explain`, the doctor and the tests all read this table of GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import jax

KB = 1024


@dataclasses.dataclass(frozen=True)
class Generation:
    """GPUs of one compute capability.

    Attributes:
        shared_memory: largest number of bytes that one CTA may have (CUDA C++ Programming Guide
            13.0, table of technical specifications). An SM has 1 KB more, which it reserves for
            each CTA on it.
        backends: the backends that "auto" tries before jnp, in order of preference.
    """

    shared_memory: int
    backends: tuple[str, ...] = ("portable",)


GENERATIONS = {
    "8.0": Generation(163 * KB),
    "8.6": Generation(99 * KB),
    "8.9": Generation(99 * KB),
    "9.0": Generation(227 * KB, ("hopper", "portable")),
    "10.0": Generation(227 * KB, ("cudnn", "portable")),
    "10.3": Generation(227 * KB, ("cudnn", "portable")),
    "12.0": Generation(99 * KB),
    "12.1": Generation(99 * KB),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        kind: its name, as jax spells it.
        capability: its compute capability.
        sms: its number of SMs.
        tflops: published speed of the causal forward pass for bfloat16 [4, 4096, 16, 128], in
            TFLOP/s, from benchmarks/results. None if it has not been measured.
        stands_for: the name of another GPU that this one represents; then only `capability` is that
            of the other GPU.
    """

    kind: str
    capability: str
    sms: int
    tflops: int | None = None
    stands_for: str | None = None

    @property
    def described(self) -> str:
        """Its name, and the name of the GPU that it represents."""
        stand_in = f", which stands for {self.stands_for}" if self.stands_for else ""
        return f"{self.kind}{stand_in}"

    @property
    def shared_memory(self) -> int:
        """Largest number of bytes of shared memory that one CTA may have."""
        return GENERATIONS[self.capability].shared_memory


DEVICES = {
    "a100": Device("NVIDIA A100-SXM4-80GB", "8.0", 108),
    "a10": Device("NVIDIA A10", "8.6", 72),
    "l40s": Device("NVIDIA L40S", "8.9", 142),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", "8.9", 128),
    "h100": Device("NVIDIA H100 80GB HBM3", "9.0", 132, tflops=706),
    "h200": Device("NVIDIA H200", "9.0", 132, tflops=643),
    "b200": Device("NVIDIA B200", "10.0", 148),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", "12.0", 170),
}


# What other GPUs are called, without "NVIDIA", and which of DEVICES is like each. A digit never
# follows, so that A100 is no A10. Compute capabilities: https://developer.nvidia.com/cuda-gpus
_LIKE = (
    (r"a100|a800|a30x?", "8.0", "a100"),
    (r"(rtx)?a(10g?|16|2|40|400|[1-6]000|5500|4500)|(rtx)?30[5-9]0", "8.6", "a10"),
    (r"(rtx)?40[5-9]0", "8.9", "rtx4090"),
    (r"l4|l40s?|l20?|rtx(500|[1-6]\d\d0)(sff)?ada", "8.9", "l40s"),
    (r"gh200|h20|h200", "9.0", "h200"),
    (r"h100|h800", "9.0", "h100"),
    (r"g?b200|b100", "10.0", "b200"),
    (r"g?b300", "10.3", "b200"),
    (r"(rtx)?50[5-9]0|rtxpro(500|[1-6][05]00)", "12.0", "rtx5090"),
    (r"gb10|dgxspark", "12.1", "rtx5090"),
)
_BRANDS = r"(nvidia|geforce|tesla|quadro|hgx|dgx)*"
_MEMORY = r"\b\d+ ?gb?\b"  # as in "NVIDIA A100 80GB PCIe" and "GH200 144G HBM3e"


def named(name: str) -> Device:
    """Returns the GPU of this name, or a listed GPU that represents it.

    Args:
        name: name of an NVIDIA GPU, as jax spells it or shorter, or a compute capability such as
            "8.9". Capitals, spaces and hyphens do not matter.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is not known.
    """
    if not isinstance(name, str):
        raise TypeError(f'gpu must be the name of a GPU, as in "H100", got {name!r}')
    if device := known(name):
        return device
    model = _plain(re.sub(_MEMORY, "", name.lower()))
    for pattern, capability, similar in _LIKE:
        is_it = re.match(rf"{_BRANDS}({pattern})(?!\d)", model)
        if is_it or name.strip() == capability:
            stood_for = name if is_it else f"compute capability {capability}"
            return dataclasses.replace(
                DEVICES[similar], capability=capability, tflops=None, stands_for=stood_for
            )
    raise ValueError(
        f"gpu is {name!r}: write the name of an NVIDIA GPU of compute capability 8.0 or higher, "
        f"such as {', '.join(repr(key.upper()) for key in DEVICES)}, or its compute capability: "
        f"{', '.join(map(repr, GENERATIONS))}. Older GPUs run blockwise jnp"
    )


def known(name: str) -> Device | None:
    """Returns the GPU of this name if it is in DEVICES, otherwise None."""
    for key, device in DEVICES.items():
        if _plain(name) in (key, _plain(device.kind)):
            return device
    return None


def _plain(name: str) -> str:
    """Returns the letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def takes_first(capability: str) -> str | None:
    """Returns the backend that "auto" tries first for this compute capability; None if unknown."""
    generation = GENERATIONS.get(capability)
    return None if generation is None else generation.backends[0]


def no_gpu(needs: str) -> str | None:
    """Returns why a backend cannot run if there is no GPU; None if there is one.

    Args:
        needs: the compute capability that the backend needs.
    """
    if (platform := jax.default_backend()) == "gpu":
        return None
    return f"needs an NVIDIA GPU of compute capability {needs}; the default backend is {platform}"


def capability_here() -> str:
    """Returns the compute capability of JAX's first device, or "unknown" if it has none."""
    return str(getattr(jax.devices()[0], "compute_capability", "unknown"))


# --- The GPU that programs are made for -----------------------------------------------------------

# Part of the key of every cache of JAX that holds what was traced, lowered or compiled.
_target = jax.make_user_context(None)


def target(gpu: str) -> contextlib.AbstractContextManager[None]:
    """Makes programs for a GPU that need not be present. It is a context manager.

    Programs that are traced, lowered or exported inside it have the kernels, tile sizes and amount
    of shared memory of that GPU where they run on CUDA, and blockwise jnp on every other platform.
    So `jax.export.export(f, platforms=["cpu", "cuda"])` contains both. A jitted function is traced
    again inside. An exported program runs on GPUs of the same compute capability; on any other,
    CUDA's assembler refuses it before anything runs. `explain` also answers for that GPU.
    `backend="cudnn"` is refused, because jax would ask the cuDNN that is installed here.

    Args:
        gpu: name of any NVIDIA GPU of compute capability 8.0 or higher ("A100", "RTX 4090",
            "GH200"), or a compute capability ("8.9"). Each GPU is represented by one of its kind,
            with that GPU's number of SMs: "A100", "A10", "L40S", "RTX 4090", "H100", "H200", "B200"
            or "RTX 5090". `explain` reports which one.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is not known.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import flash_pallas
        >>> x = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
        >>> attend = jax.jit(lambda x: flash_pallas.flash_attention(x, x, x, causal=True))
        >>> with flash_pallas.target("H100"):
        ...     exported = jax.export.export(attend, platforms=["cpu", "cuda"])(x)
        >>> exported.platforms
        ('cpu', 'cuda')
    """
    return within(named(gpu))


@contextlib.contextmanager
def within(device: Device) -> Iterator[None]:
    """Makes programs for this GPU, as `target` does."""
    with _target(device):
        yield


def targeted() -> Device | None:
    """Returns the GPU of the enclosing `target`, or None."""
    return _target.value
