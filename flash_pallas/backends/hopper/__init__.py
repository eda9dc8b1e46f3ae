"""Hopper (compute capability 9.0): Pallas Mosaic GPU kernels on wgmma and TMA.

backend.py                                 what the rest of the package sees
forward*.py schedule.py                    the forward, and what its CTAs have to do
backward.py backward_blocks.py arrays.py   which kernels make a backward, and what they all read
backward_fused.py fused_*.py               all gradients of head dims up to 128, dQ by atomic adds
backward_dkv.py dkv_cta.py backward_dq.py  the deterministic backward, and that of wider heads
backward_scores.py score*.py               gradients of bias, ALiBi slopes and score_mod's arrays
key_walk.py query_walk.py                  what the backward kernels share
side_inputs.py                             what modifiers of scores read
inline_columns.py inline_exchange.py       what is written into kernels, register by register
*_layout.py                                what a CTA of each kernel allocates of shared memory
memory.py blocks.py                        what all kernels share
../mosaic                                  what they share with other GPUs: registers, P, launches
"""

from __future__ import annotations

from .backend import HopperBackend as HopperBackend
