"""The backward of one call: which kernels run it, and their launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ....core import padding
from ....core.problem import Cotangents, Operands, Problem
from ...gpu.launch import score_grads
from ..common.pipeline import Matmuls
from .dbias.kernel import score_sums
from .fused.kernel import backward_fused
from .fused.launches import choose_split_q, fitting
from .fused.tiles import FUSED_HEAD_DIMS, FusedBlocks, choose_fused, without_sums
from .operands import BackwardArrays
from .paired.kernel import backward_paired
from .paired.tiles import PAIR, PairedBlocks, choose_paired, paired_problem
from .split.dkv import dkv
from .split.dq import dq
from .split.tiles import DkvBlocks, DqBlocks, choose_dkv, choose_dq, native_head_dim

# --- The call -------------------------------------------------------------------------------------


def backward(
    problem: Problem,
    blocks: FusedBlocks | PairedBlocks | SplitBlocks,
    operands: Operands,
    cotangents: Cotangents,
    wanted: frozenset[str],
    interpret: bool,
) -> Operands:
    """Computes gradients; the kernels sum dK and dV over each group of query heads.

    Args:
        problem: problem of the operands.
        blocks: tile sizes of the kernels that run.
        operands: operands of the call.
        cotangents: what the backward starts from: LSE, dO, delta and shifts.
        wanted: names of the operands besides q, k and v whose gradients are asked for.
        interpret: run under the interpreter.
    """
    native = native_backward_problem(problem, kernel_of(blocks))
    # The other kernels read copies whose padding is cleared.
    inside = isinstance(blocks, FusedBlocks) and not wanted
    if not inside:
        do = padding.cleared_queries(operands, cotangents.do)
        operands, cotangents = padding.cleared(operands), cotangents._replace(do=do)
    arrays = BackwardArrays.of(native, operands, cotangents, _summed_rows(native, blocks))
    extra: dict[str, Any] = {}
    if isinstance(blocks, FusedBlocks):
        blocks = fitting(native, blocks if "bias" in wanted else without_sums(blocks))
        *grads, dbias = backward_fused(native, blocks, operands, arrays, inside, interpret)
        if dbias is not None:
            extra, wanted = {"bias": dbias}, wanted - {"bias"}
    elif isinstance(blocks, PairedBlocks):
        grads = backward_paired(native, blocks, operands, arrays, interpret)
    else:
        dk, dv = dkv(native, blocks.dkv, operands, arrays, interpret)
        grads = dq(native, blocks.dq, operands, arrays, interpret), dk, dv
    producer = (blocks.dq if isinstance(blocks, SplitBlocks) else blocks).producer
    launch = lambda *sums: score_sums(native, sums, operands, arrays, producer, interpret)
    extra |= score_grads(native, operands, wanted, launch)
    dq_, dk, dv = map(Matmuls(problem.dtype).joined, grads)
    return Operands(
        dq_[:, : problem.q_len, :, : problem.head_dim],
        dk[:, : problem.kv_len, :, : problem.head_dim],
        dv[:, : problem.kv_len, :, : problem.v_head_dim],
        **extra,
    )


def _summed_rows(
    native: Problem, blocks: FusedBlocks | PairedBlocks | SplitBlocks
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns `summed_rows` of BackwardArrays.of: for the tiles of Q and K, and of V and dO.

    A 0 stands for the kernel of backward/dbias/kernel.py.
    """
    if isinstance(blocks, FusedBlocks):
        return (blocks.dq_tile(native.head_dim)[1], 0), (0,)
    if isinstance(blocks, PairedBlocks):
        return (native.head_dim // PAIR, 0), (blocks.block_q, 0)
    rows = (blocks.dkv.block_q, blocks.dq.block_kv, 0)
    return rows, rows


# --- Which kernels run, and their tile sizes ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SplitBlocks:
    """Tile sizes of the deterministic backward, which also runs what the fused one does not."""

    dkv: DkvBlocks
    dq: DqBlocks


def kernel_of(blocks: FusedBlocks | PairedBlocks | SplitBlocks) -> str:
    """Returns "fused", "paired" or "split"."""
    if isinstance(blocks, FusedBlocks):
        return "fused"
    return "paired" if isinstance(blocks, PairedBlocks) else "split"


def choose_backward(problem: Problem, num_sms: int, producer: bool = True) -> dict[str, Any]:
    """Chooses the tile sizes of each kernel that runs: of "fused", "paired", or "dkv" and "dq".

    Args:
        problem: what is computed.
        num_sms: number of SMs, each of which holds one CTA.
        producer: whether kernels may have a producer warpgroup; the paired one always has.
    """
    widest = max(problem.head_dim, problem.v_head_dim)
    fused = None
    atomics = not problem.spec.deterministic and problem.dtype != np.float32
    if atomics and widest <= FUSED_HEAD_DIMS[-1]:
        native = native_backward_problem(problem, "fused")
        fused = choose_fused(native)
    if fused is not None:
        parts = (
            1 if fused.sums_bias or problem.is_listed else choose_split_q(native, fused, num_sms)
        )
        one_loop = fused.mask_all or (parts > 1 and problem.hides_by_arrays)
        fused = dataclasses.replace(fused, split_q=parts, mask_all=one_loop)
        return {"fused": fused}
    paired = choose_paired(problem) if atomics and producer else None
    if paired is not None:
        return {"paired": paired}
    native = native_backward_problem(problem, "split")
    return {"dkv": choose_dkv(native), "dq": choose_dq(native)}


def native_backward_problem(problem: Problem, kernel: str) -> Problem:
    """Returns the problem with the head dims that a kernel runs: zero-padded to a native size."""
    if kernel == "paired":
        return paired_problem(problem)
    q, v = problem.head_dim, problem.v_head_dim
    if kernel == "fused":
        q = v = next(dim for dim in FUSED_HEAD_DIMS if dim >= max(q, v))
    else:
        q, v = native_head_dim(q), native_head_dim(v)
    return dataclasses.replace(problem, head_dim=q, v_head_dim=v)
