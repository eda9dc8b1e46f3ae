"""Kernels that are lowered for a GPU that is not here: what Mosaic GPU asks the device about.

Mosaic GPU takes the compute capability from the default device, and 9.0 where that is a CPU. It has
no setting for it, so its function is replaced: here and nowhere else. How much shared memory there
is it asks too, only to refuse what takes more, which no kernel of this package does: their tile
sizes are chosen for the GPU's own (devices.py). On a CPU it assumes 227 KB.
"""

from __future__ import annotations

import functools

from jax.experimental.mosaic.gpu import utils

from ...devices import targeted


@functools.cache
def teach() -> None:
    """Makes Mosaic GPU lower kernels for the GPU of the `target` around, if there is one."""
    here = utils._infer_arch

    def there() -> tuple[int, int]:
        device = targeted()
        if device is None:
            return here()
        major, minor = map(int, device.capability.split("."))
        return major, minor

    utils._infer_arch = there
