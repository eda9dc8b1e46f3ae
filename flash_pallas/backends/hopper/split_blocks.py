"""Tile sizes of the split, deterministic backward: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses

import numpy as np

from ...core.problem import Problem
from ..mosaic.launch import WARPGROUP_ROWS, shared_memory
from . import dkv_layout, dq_layout
from .forward_blocks import wants_narrow_tiles
from .memory import fits
from .side_inputs import SideInputs

HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)  # that these kernels run, of Q and K and of V each


@dataclasses.dataclass(frozen=True)
class DkvBlocks:
    """Tile sizes of the dK/dV kernel: 64 keys per CTA, one warpgroup for dV and one for dK.

    Attributes:
        block_q: queries per step, 32, 64 or 128.
        stages, do_stages: tiles of Q (at least 2) and of dO in flight.
        p_stages: number of slots in which P^T is handed over.
        producer: a warpgroup of its own loads; else the one of dK does.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    p_stages: int = 2
    producer: bool = True

    block_kv = WARPGROUP_ROWS
    compute_registers = 240
    producer_registers = 24

    def __post_init__(self):
        # A tile must divide the 128 rows that lse is padded to.
        if self.block_q not in (32, 64, 128):
            raise ValueError(f"block_q of the dK/dV kernel is {self.block_q!r}: 32, 64 or 128")
        if self.stages == 1:  # Q is released one step late: with one slot the kernel waits forever
            raise ValueError("stages of the dK/dV kernel is 1: at least 2")

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for the head dims that run."""
        return shared_memory(dkv_layout.scratch(problem, self))


@dataclasses.dataclass(frozen=True)
class DqBlocks:
    """Tile sizes of the dQ kernel: independent warpgroups of 64 queries.

    Attributes:
        warpgroups: number of compute warpgroups, 1 or 2.
        block_kv: keys per step.
        k_stages, v_stages: blocks of K (at least 2) and of V in flight.
        producer: a warpgroup of its own loads; else the last compute warpgroup does.
    """

    warpgroups: int = 2
    block_kv: int = 64
    k_stages: int = 2
    v_stages: int = 2
    producer: bool = True

    compute_registers = 240
    producer_registers = 24

    def __post_init__(self):
        if self.warpgroups not in (1, 2):  # 240 registers each; lse is padded to 128 rows
            raise ValueError(f"warpgroups of the dQ kernel is {self.warpgroups!r}: 1 or 2")
        if (
            self.k_stages == 1
        ):  # K is released one step late: with one slot the kernel waits forever
            raise ValueError("k_stages of the dQ kernel is 1: at least 2")

    @property
    def block_q(self) -> int:
        """Number of queries of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for the head dims that run."""
        return shared_memory(dq_layout.scratch(problem, self))


# A 64x64 wgmma with both operands in shared memory needs all of its bandwidth, 64x128 three
# quarters: tiles of scores are 128 wide wherever registers and shared memory allow.
# Head dim 256, both kernels together, bf16 on H200, as ratio to cuDNN: 1.28 to 1.36 at 4k, 1.34 at
# 4k causal, 1.39 at 16k causal; there 128 queries would need 354 KB of shared memory.
# In float32 P and dS take as many registers as operands as they do before: at 128 wide dK/dV is
# serialised (head dim 64, causal) and dQ spills 80 bytes.
DKV = (
    DkvBlocks(block_q=128),
    DkvBlocks(block_q=64),
    DkvBlocks(block_q=64, do_stages=1),
    DkvBlocks(block_q=64, do_stages=1, p_stages=1),
    DkvBlocks(block_q=32),  # float32 at head dim 128 beside tiles of both bias and mask
)

# Head dim 256 gets 64 keys and no second stage of V: 231,424 bytes.
DQ = (
    DqBlocks(block_kv=128),
    DqBlocks(block_kv=64),
    DqBlocks(block_kv=64, v_stages=1),
    DqBlocks(warpgroups=1, block_kv=64),
    DqBlocks(warpgroups=1, block_kv=64, v_stages=1),
    DqBlocks(warpgroups=1, block_kv=32),
)


def native_head_dim(head_dim: int) -> int:
    """Returns the head dim as which these kernels run the given one: the next of HEAD_DIMS."""
    return next(d for d in HEAD_DIMS if d >= head_dim)


def choose_dkv(problem: Problem) -> DkvBlocks:
    """Returns the first choice that fits into shared memory and into registers."""
    widest = 64 if problem.dtype == np.float32 else 128
    narrow = (b for b in DKV if b.block_q <= widest)
    return next(b for b in narrow if fits(dkv_layout.scratch(problem, b)))


def choose_dq(problem: Problem) -> DqBlocks:
    """Returns the first choice that fits, and leaves registers for a tile of bias or mask."""
    side = SideInputs(problem, q_axis=0)
    tiles = "tile" in (side.kind(problem.bias_shape), side.kind(problem.mask_shape))
    widest = 64 if (tiles and problem.head_dim > 64) or problem.dtype == np.float32 else 128
    widest = 32 if wants_narrow_tiles(problem) else widest
    narrow = (b for b in DQ if b.block_kv <= widest)
    return next(b for b in narrow if fits(dq_layout.scratch(problem, b)))
