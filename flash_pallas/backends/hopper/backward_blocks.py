"""Which kernels run the backward of a problem, and with which tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.problem import Problem
from . import split_blocks
from .fused_blocks import FUSED, FusedBlocks
from .split_blocks import DkvBlocks, DqBlocks


@dataclasses.dataclass(frozen=True)
class SplitBlocks:
    """The deterministic backward, which also runs what the fused one does not."""

    dkv: DkvBlocks
    dq: DqBlocks


def choose_backward(problem: Problem) -> dict[str, Any]:
    """Tiles of each kernel that runs: of "fused", or of "dkv" and "dq"."""
    if fused := choose_fused(problem):
        return {"fused": fused}
    native = native_problem(problem, fused=False)
    return {"dkv": split_blocks.choose_dkv(native), "dq": split_blocks.choose_dq(native)}


def choose_fused(problem: Problem) -> FusedBlocks | None:
    """Tiles of the fused kernel, or None where it does not run or is not the faster one."""
    widest = max(problem.head_dim, problem.v_head_dim)
    if problem.spec.deterministic or widest > max(dim for dim, _ in FUSED):
        return None
    ragged = problem.kv_len % FusedBlocks.block_kv != 0
    masked = ragged or not problem.spec.mask.is_trivial
    return FUSED[native_problem(problem, fused=True).head_dim, masked]


def native_problem(problem: Problem, *, fused: bool) -> Problem:
    """The problem with the head dims that the kernels run: padded with zeros."""
    if fused:
        widest = max(problem.head_dim, problem.v_head_dim)
        head_dim = next(dim for dim, _ in FUSED if dim >= widest)
        return dataclasses.replace(problem, head_dim=head_dim, v_head_dim=head_dim)
    return dataclasses.replace(
        problem,
        head_dim=split_blocks.native_head_dim(problem.head_dim),
        v_head_dim=split_blocks.native_head_dim(problem.v_head_dim),
    )
