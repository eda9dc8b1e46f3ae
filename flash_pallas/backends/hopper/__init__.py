"""Hopper (compute capability 9.0): Pallas Mosaic GPU kernels on wgmma and TMA.

backend.py                                 entry point for the rest of the package
forward*.py schedule.py                    the forward, and the schedule of its CTAs
backward.py backward_blocks.py arrays.py   which kernels make a backward, and what they all read
backward_fused.py fused_*.py               all gradients of head dims up to 128, dQ by atomic adds
backward_dkv.py dkv_cta.py backward_dq.py  the deterministic backward, and that of wider heads
backward_scores.py score*.py               gradients of bias, ALiBi slopes and score_mod's arrays
key_walk.py query_walk.py                  walks over tiles, shared by the backward kernels
side_inputs.py                             inputs of score modifiers
inline_columns.py inline_exchange.py       kernel code written register by register
*_layout.py                                what a CTA of each kernel allocates of shared memory
memory.py blocks.py                        helpers that all kernels share
../mosaic                                  code shared with other GPUs: registers, P, launches
"""

from __future__ import annotations

from .backend import HopperBackend as HopperBackend
