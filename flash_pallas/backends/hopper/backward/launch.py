"""The backward of one call: the kernels that it runs, on padded copies where those are needed."""

from __future__ import annotations

from typing import Any

from ....core import padding
from ....core.problem import Cotangents, Grads, Operands, Problem
from ...gpu.dbias_launches import score_grads
from ..common.wgmma import Matmuls
from .arrays import BackwardArrays
from .dbias.kernel import score_sums
from .fused.call import backward_fused
from .fused.launches import fitting
from .fused.tiles import FusedBlocks, without_sums
from .select import SplitBlocks, native_problem
from .split.dkv import dkv
from .split.dq import dq


def backward(
    problem: Problem,
    blocks: FusedBlocks | SplitBlocks,
    operands: Operands,
    cotangents: Cotangents,
    wanted: frozenset[str],
    interpret: bool,
) -> Grads:
    """Computes gradients; the kernels sum dK and dV over each group of query heads.

    Args:
        problem: problem of the operands.
        blocks: tile sizes of the kernels that run.
        operands: operands of the call.
        cotangents: what the backward starts from: LSE, dO, delta and shifts.
        wanted: names of the operands besides q, k and v whose gradients are asked for.
        interpret: run under the interpreter.
    """
    fused = isinstance(blocks, FusedBlocks)
    native = native_problem(problem, fused=fused)
    inside = fused and not wanted  # the other kernels are given copies without padding
    if not inside:
        do = padding.cleared_queries(operands, cotangents.do)
        operands, cotangents = padding.cleared(operands), cotangents._replace(do=do)
    arrays = BackwardArrays.of(native, operands, cotangents, _summed_rows(native, blocks))
    extra: dict[str, Any] = {}
    if fused:
        blocks = fitting(native, blocks if "bias" in wanted else without_sums(blocks))
        *grads, dbias = backward_fused(native, blocks, operands, arrays, inside, interpret)
        if dbias is not None:
            extra, wanted = {"bias": dbias}, wanted - {"bias"}
    else:
        dk, dv = dkv(native, blocks.dkv, operands, arrays, interpret)
        grads = dq(native, blocks.dq, operands, arrays, interpret), dk, dv
    producer = (blocks if fused else blocks.dq).producer
    launch = lambda *sums: score_sums(native, sums, operands, arrays, producer, interpret)
    extra |= score_grads(native, operands, wanted, launch)
    dq_, dk, dv = map(Matmuls(problem.dtype).joined, grads)
    return Grads(
        dq_[:, : problem.q_len, :, : problem.head_dim],
        dk[:, : problem.kv_len, :, : problem.head_dim],
        dv[:, : problem.kv_len, :, : problem.v_head_dim],
        **extra,
    )


def _summed_rows(native: Problem, blocks: FusedBlocks | SplitBlocks):
    """Returns `summed_rows` of BackwardArrays.of: for the tiles of Q and K, and of V and dO.

    A 0 stands for the kernel of backward/dbias/kernel.py.
    """
    if isinstance(blocks, FusedBlocks):
        return (blocks.dq_tile(native.head_dim)[1], 0), (0,)
    rows = (blocks.dkv.block_q, blocks.dq.block_kv, 0)
    return rows, rows
