"""Tile sizes of the Hopper kernels: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.problem import Problem
from .fused_blocks import FUSED, FusedBlocks
from .memory import SMEM_LIMIT, WARPGROUP_ROWS
from .split_blocks import DKV, DQ, DkvBlocks, DqBlocks

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
    # Three warpgroups share each block of keys; with four the registers do not reach.
    64: ForwardBlocks(warpgroups=3, block_kv=128),
    # block_kv 160 and 176: 3 to 8 % slower, 192 exceeds shared memory when persistent.
    128: ForwardBlocks(warpgroups=2, block_kv=128, q_in_registers=True),
    # Q and O share shared memory (64 KB each beside 128 KB of K and V), so not persistent; skipping
    # the rescale of a 64x256 accumulator is worth 6 %.
    256: ForwardBlocks(warpgroups=2, block_kv=64, persistent=False, lazy_rescale=8.0),
}


@dataclasses.dataclass(frozen=True)
class SplitBlocks:
    """The deterministic backward, which is also that of head dim 256."""

    dkv: DkvBlocks
    dq: DqBlocks


@dataclasses.dataclass(frozen=True)
class HopperBlocks:
    """Tile sizes of every kernel that a call and its gradient run."""

    forward: ForwardBlocks
    backward: FusedBlocks | SplitBlocks


def native_head_dim(problem: Problem) -> int:
    """The head dim the kernels run: the next of 64, 128, 256."""
    widest = max(problem.head_dim, problem.v_head_dim)
    return next(d for d in NATIVE_HEAD_DIMS if d >= widest)


def choose_blocks(problem: Problem, override: dict[str, Any] | None) -> HopperBlocks:
    """The tuned tile sizes, with fields replaced by `override`.

    Args:
        problem: the shapes.
        override: for each kernel that runs (`"forward"`, `"fused"`, `"dkv"`, `"dq"`), a dict of the
            fields to replace, such as `{"forward": {"block_kv": 64}}`.

    Raises:
        ValueError: an unknown kernel or field, or tiles that do not fit.
    """
    head_dim = native_head_dim(problem)
    chosen: dict[str, Any] = {"forward": FORWARD[head_dim]}
    ragged = problem.kv_len % FusedBlocks.block_kv != 0
    masked = ragged or not problem.spec.mask.is_trivial
    if problem.spec.deterministic or (head_dim, masked) not in FUSED:
        chosen |= {"dkv": DKV[head_dim], "dq": DQ[head_dim]}
    else:
        chosen["fused"] = FUSED[head_dim, masked]
    for kernel, fields in (override or {}).items():
        if kernel not in chosen:
            raise ValueError(
                f"blocks has {kernel!r}: on the hopper backend this call runs the kernels "
                f"{', '.join(map(repr, chosen))}; pass blocks={{'forward': {{'block_kv': 64}}}}"
            )
        chosen[kernel] = _replaced(kernel, chosen[kernel], fields, head_dim)
    if "fused" in chosen:
        return HopperBlocks(chosen["forward"], chosen["fused"])
    return HopperBlocks(chosen["forward"], SplitBlocks(chosen["dkv"], chosen["dq"]))


def _replaced(kernel: str, blocks, fields, head_dim: int):
    names = {field.name for field in dataclasses.fields(blocks)}
    if not isinstance(fields, dict) or not names.issuperset(fields):
        raise ValueError(f"blocks[{kernel!r}] is {fields!r}: a dict with keys of {sorted(names)}")
    replaced = dataclasses.replace(blocks, **fields)
    for name, tuned in vars(blocks).items():
        value = getattr(replaced, name)
        if type(value) is not type(tuned) or value < 0 or (type(tuned) is int and value < 1):
            raise ValueError(
                f"blocks[{kernel!r}][{name!r}] is {value!r}: a positive {type(tuned).__name__}"
            )
        if name.startswith("block_") and (value % 64 or value > 256):
            raise ValueError(f"blocks[{kernel!r}][{name!r}] is {value}: a multiple of 64 up to 256")
    if replaced.smem_bytes(head_dim) > SMEM_LIMIT - 1024:  # the barriers take less than 1 KB
        raise ValueError(
            f"blocks[{kernel!r}] needs {replaced.smem_bytes(head_dim)} bytes of shared memory and "
            f"there are {SMEM_LIMIT}: use fewer stages or smaller blocks"
        )
    return replaced
