"""Choice of the kernels that run the backward of a problem, and of their tile sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ....core.problem import Problem
from .fused.launches import choose_launches, choose_parts
from .fused.tiles import FUSED_HEAD_DIMS, choose_fused
from .split.tiles import DkvBlocks, DqBlocks, choose_dkv, choose_dq, native_head_dim


@dataclasses.dataclass(frozen=True)
class SplitBlocks:
    """Tile sizes of the deterministic backward, which also runs what the fused one does not."""

    dkv: DkvBlocks
    dq: DqBlocks


def choose_backward(problem: Problem, num_sms: int) -> dict[str, Any]:
    """Chooses the tile sizes of each kernel that runs: of "fused", or of "dkv" and "dq"."""
    widest = max(problem.head_dim, problem.v_head_dim)
    fused = None
    atomics = not problem.spec.deterministic and problem.dtype != np.float32
    if atomics and widest <= FUSED_HEAD_DIMS[-1]:
        native = native_problem(problem, fused=True)
        fused = choose_fused(native)
    if fused is not None:
        parts = 1 if fused.sums_bias else choose_parts(native, fused, num_sms)
        fused = dataclasses.replace(fused, parts=parts)
        return {"fused": choose_launches(native, fused, num_sms)}
    native = native_problem(problem, fused=False)
    return {"dkv": choose_dkv(native), "dq": choose_dq(native)}


def native_problem(problem: Problem, *, fused: bool) -> Problem:
    """Returns the problem with the head dims that the kernels run: zero-padded to a native size."""
    q, v = problem.head_dim, problem.v_head_dim
    if fused:
        q = v = next(dim for dim in FUSED_HEAD_DIMS if dim >= max(q, v))
    else:
        q, v = native_head_dim(q), native_head_dim(v)
    return dataclasses.replace(problem, head_dim=q, v_head_dim=v)
