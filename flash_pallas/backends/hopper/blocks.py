"""Tile sizes of the Hopper kernels: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.problem import Problem
from .memory import SMEM_LIMIT, WARPGROUP_ROWS

NATIVE_HEAD_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class ForwardBlocks:
    """The forward kernel.

    Attributes:
        warpgroups: compute warpgroups, 64 query rows each.
        block_kv: keys per step.
        stages: blocks of K and of V in flight.
        persistent: one CTA per multiprocessor that walks many tiles (O staged beside Q).
        q_in_registers: Q as register operand of wgmma; a third less shared-memory traffic in QK^T.
        lazy_rescale: rescale O only when a row maximum grew by more than this (base 2); 0: always.
    """

    warpgroups: int = 2
    block_kv: int = 128
    stages: int = 2
    persistent: bool = True
    q_in_registers: bool = False
    lazy_rescale: float = 0.0

    @property
    def compute_registers(self) -> int:
        """Registers per thread of a compute warpgroup."""
        return 160 if self.warpgroups == 3 else 240

    @property
    def producer_registers(self) -> int:
        """Registers per thread of the producer; the pool is 65,536 for the CTA."""
        return 32 if self.warpgroups == 3 else 24

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory without barriers."""
        rows = self.warpgroups * WARPGROUP_ROWS * (2 if self.persistent else 1)
        return 2 * head_dim * (rows + 2 * self.stages * self.block_kv) + 4 * rows


# bf16, H200, as ratios to cuDNN over several seconds each; fp16 runs the same instructions.
FORWARD = {
    # 192 rows: softmax of 3 warpgroups over one block (1.13 against 1.04 with two).
    64: ForwardBlocks(warpgroups=3, block_kv=128),
    # block_kv 160 and 176: 3 to 8 % slower, 192 exceeds shared memory when persistent.
    128: ForwardBlocks(warpgroups=2, block_kv=128, q_in_registers=True),
    # Q and O share shared memory (64 KB each beside 128 KB of K and V), so not persistent; skipping
    # the rescale of a 64x256 accumulator is worth 6 %.
    256: ForwardBlocks(warpgroups=2, block_kv=64, persistent=False, lazy_rescale=8.0),
}


@dataclasses.dataclass(frozen=True)
class FusedBlocks:
    """The fused backward: 128 keys and two compute warpgroups per CTA.

    Attributes:
        block_q: queries per step.
        stages, do_stages: tiles of Q and of dO in flight.
        ds_stages: slots for dS; with one, the warpgroups meet twice per step.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2

    block_kv = 2 * WARPGROUP_ROWS
    compute_registers = 240
    producer_registers = 24

    @property
    def dq_by_rows(self) -> bool:
        """Each warpgroup computes half of dQ's rows (64 of 128), else half of its columns."""
        return self.block_q == 2 * WARPGROUP_ROWS

    def dq_tile(self, head_dim: int) -> tuple[int, int]:
        """What one warpgroup computes of dQ."""
        if self.dq_by_rows:
            return self.block_q // 2, head_dim
        return self.block_q, head_dim // 2

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory without barriers."""
        tiles = (self.stages + self.do_stages) * self.block_q * head_dim
        keys = 2 * self.block_kv * head_dim + self.ds_stages * self.block_kv * self.block_q
        rows = (self.stages + self.do_stages) * self.block_q
        return 2 * (tiles + keys) + 4 * self.block_q * head_dim + 4 * rows


FUSED = {
    64: FusedBlocks(block_q=128),
    # 128 rows would need 2 x 64 more accumulator registers than there are.
    128: FusedBlocks(block_q=64, do_stages=1, ds_stages=1),
}


def native_head_dim(problem: Problem) -> int:
    """The head dim the kernels run: the next of 64, 128, 256."""
    widest = max(problem.head_dim, problem.v_head_dim)
    return next(d for d in NATIVE_HEAD_DIMS if d >= widest)
