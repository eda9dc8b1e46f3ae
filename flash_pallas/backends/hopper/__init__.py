"""Hopper (compute capability 9.0): Pallas Mosaic GPU kernels on wgmma and TMA.

backend.py                       what the rest of the package sees
forward.py, forward_plan.py      the forward, and what its CTAs have to do
backward_fused.py, fused_cta.py  the backward of head dims up to 128: one kernel, dQ by atomic adds
backward_dkv.py, backward_dq.py  the deterministic backward, and that of head dim 256: two kernels
inline.py memory.py schedule.py blocks.py split_blocks.py arrays.py   what they share
"""

from __future__ import annotations

from .backend import HopperBackend as HopperBackend
