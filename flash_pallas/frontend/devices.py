"""GPUs that `explain` answers for when they are not present."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """Properties of a GPU that backends and tables of tile sizes ask for.

    Attributes:
        kind: its name, as jax spells it.
        capability: its compute capability.
        sms: its number of SMs.
    """

    kind: str
    capability: str
    sms: int


DEVICES = {
    "a100": Device("NVIDIA A100-SXM4-80GB", "8.0", 108),
    "l40s": Device("NVIDIA L40S", "8.9", 142),
    "h100": Device("NVIDIA H100 80GB HBM3", "9.0", 132),
    "h200": Device("NVIDIA H200", "9.0", 132),
    "b200": Device("NVIDIA B200", "10.0", 148),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", "12.0", 170),
}


def device_of(name: str | None) -> Device | None:
    """Returns the GPU of this name; None for the device that is here.

    Raises:
        ValueError: a name that is not known.
    """
    if name is None:
        return None
    if name not in DEVICES:
        known = ", ".join(map(repr, DEVICES))
        raise ValueError(f"device is {name!r}: choose one of {known}, or None for the one here")
    return DEVICES[name]
