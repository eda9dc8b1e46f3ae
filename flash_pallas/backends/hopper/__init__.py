"""Hopper (compute capability 9.0): Pallas Mosaic GPU kernels on wgmma and TMA.

`backend` is the entry point, `tiling` chooses tile sizes. Each kernel has a folder, whose `kernel`
is the place to start: forward, backward (fused, split, dbias), decode.
"""

from __future__ import annotations

from .backend import HopperBackend as HopperBackend
