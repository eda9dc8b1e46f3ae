"""Mosaic GPU kernels on `mma.sync`, `ldmatrix` and `cp.async`: compute capability 8.0 and above.

`backend` is the entry point, `tiling` chooses the tile sizes of a call. Each kernel has a folder,
whose `kernel` is the place to start: forward, backward (fused, split, dbias), decode.
"""

from __future__ import annotations

from .backend import PortableBackend as PortableBackend
