"""The GPUs that this package knows, and the one that programs are made for if it is not here.

The one table of GPUs: dispatch, `explain`, the doctor and the tests read it.
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
        shared_memory: bytes that one CTA may have at most (CUDA C++ Programming Guide 13.0, table
            of technical specifications). An SM has 1 KB more, and keeps that for each CTA on it.
        backends: what "auto" chooses from before jnp, in order of preference.
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
        tflops: published speed of the forward, causal, bfloat16 [4, 4096, 16, 128]: TFLOP/s from
            benchmarks/results; None where it has not been measured.
    """

    kind: str
    capability: str
    sms: int
    tflops: int | None = None

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one CTA may have at most."""
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


def device_of(name: str | None) -> Device | None:
    """Returns the GPU of this name; None for the device that is here.

    The name is a key of DEVICES, or the kind of one of them as jax spells it. Capitals, spaces and
    hyphens do not count.

    Raises:
        TypeError: a name that is no string.
        ValueError: a name that is not known.
    """
    return None if name is None else _named(name, ", or None for the one here")


def _named(name: str, other: str = "") -> Device:
    if not isinstance(name, str):
        raise TypeError(f'gpu must be the name of a GPU, as in "H100", got {name!r}')
    if device := known(name):
        return device
    choices = ", ".join(repr(key.upper()) for key in DEVICES)
    raise ValueError(f"gpu is {name!r}: choose one of {choices}{other}")


def known(name: str) -> Device | None:
    """Returns the GPU of this name, as `device_of` does; None if it is in no table."""
    for key, device in DEVICES.items():
        if _plain(name) in (key, _plain(device.kind)):
            return device
    return None


def _plain(name: str) -> str:
    """Returns the letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def takes_first(capability: str) -> str | None:
    """Returns the backend that "auto" asks first on this compute capability; None if unknown."""
    generation = GENERATIONS.get(capability)
    return None if generation is None else generation.backends[0]


def capability_here() -> str:
    """Returns the compute capability of JAX's first device, "unknown" where it has none."""
    return str(getattr(jax.devices()[0], "compute_capability", "unknown"))


# --- The GPU that programs are made for -----------------------------------------------------------

# Part of the key of every cache of JAX that holds what was traced, lowered or compiled.
_target = jax.make_user_context(None)


def target(gpu: str) -> contextlib.AbstractContextManager[None]:
    """Makes programs for a GPU that need not be here: a context manager.

    What is traced, lowered or exported within it has the kernels, tile sizes and amount of shared
    memory of that GPU where it runs on CUDA, and blockwise jnp on every other platform:
    `jax.export.export(f, platforms=["cpu", "cuda"])` has both. The same jitted function is traced
    anew inside. What is exported runs on GPUs of the same compute capability; on any other, CUDA's
    assembler refuses it before anything runs. `explain` answers for that GPU, too.
    `backend="cudnn"` is refused, as jax asks the cuDNN that is here.

    Args:
        gpu: name of the GPU, as `explain` takes it: "A100", "A10", "L40S", "RTX 4090", "H100",
            "H200", "B200" or "RTX 5090", in capitals or not.

    Raises:
        TypeError: a name that is no string.
        ValueError: a name that is not known.

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
    return within(_named(gpu))


@contextlib.contextmanager
def within(device: Device) -> Iterator[None]:
    """Makes programs for this GPU, as `target` does."""
    with _target(device):
        yield


def targeted() -> Device | None:
    """Returns the GPU of the `target` around, or None."""
    return _target.value
