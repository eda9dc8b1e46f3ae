"""Tile sizes of the split, deterministic backward: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses

from .memory import WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class DkvBlocks:
    """The dK/dV kernel: 64 keys per CTA, one warpgroup for dV and one for dK.

    Attributes:
        block_q: queries per step, 64 or 128.
        stages, do_stages: tiles of Q (at least 2) and of dO in flight.
        p_stages: slots in which P^T is handed over.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    p_stages: int = 2

    block_kv = WARPGROUP_ROWS
    compute_registers = 240
    producer_registers = 24

    def __post_init__(self):
        if self.block_q not in (64, 128):  # a tile must divide the 128 rows that lse is padded to
            raise ValueError(f"block_q of the dK/dV kernel is {self.block_q!r}: 64 or 128")
        if self.stages == 1:  # Q is released one step late: with one slot the kernel waits forever
            raise ValueError("stages of the dK/dV kernel is 1: at least 2")

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory without barriers."""
        tiles = (self.stages + self.do_stages) * self.block_q + 2 * self.block_kv
        handed_over = self.p_stages * self.block_kv * self.block_q
        rows = (self.stages + self.do_stages) * self.block_q
        return 2 * (tiles * head_dim + handed_over) + 4 * rows


@dataclasses.dataclass(frozen=True)
class DqBlocks:
    """The dQ kernel: independent warpgroups of 64 queries.

    Attributes:
        warpgroups: compute warpgroups, 1 or 2.
        block_kv: keys per step.
        k_stages, v_stages: blocks of K (at least 2) and of V in flight.
    """

    warpgroups: int = 2
    block_kv: int = 64
    k_stages: int = 2
    v_stages: int = 2

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
        """Queries of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory without barriers."""
        keys = (self.k_stages + self.v_stages) * self.block_kv
        return 2 * head_dim * (2 * self.block_q + keys) + 8 * self.block_q


# A 64x64 wgmma with both operands in shared memory needs all of its bandwidth, 64x128 three
# quarters: tiles of scores are 128 wide wherever registers and shared memory allow.
DKV = {
    64: DkvBlocks(block_q=128),
    128: DkvBlocks(block_q=128),
    # 128 queries would need 354 KB of shared memory. Both kernels together, bf16 on H200, as ratio
    # to cuDNN: 1.28 to 1.36 at 4k, 1.34 at 4k causal, 1.39 at 16k causal.
    256: DkvBlocks(block_q=64),
}

DQ = {
    64: DqBlocks(block_kv=128),
    128: DqBlocks(block_kv=128),
    # 231,424 bytes: no room for a second stage of V.
    256: DqBlocks(block_kv=64, v_stages=1),
}
