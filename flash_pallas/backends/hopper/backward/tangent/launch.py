"""Forward mode of the backward of one call: the launches, and what they read."""

from __future__ import annotations

from typing import Any

from .....core import padding
from .....core.problem import Cotangents, Operands, Problem
from ...common.pipeline import Matmuls
from ..launch import native_backward_problem
from ..operands import BackwardArrays
from .kernel import FIRST, SECOND, PushArrays, push_launch
from .tiles import choose, is_possible

# (axis of queries, results) of each launch where registers have room for both results of keys, and
# where they have not.
TOGETHER = ((0, (FIRST,)), (1, (FIRST, SECOND)))
APART = ((0, (FIRST,)), (1, (FIRST,)), (1, (SECOND,)))


def launches(problem: Problem) -> list[tuple[int, tuple[int, ...], Any]] | None:
    """Returns [(axis of queries, results, PushBlocks)] of the launches; None if there are none."""
    if not is_possible(problem):
        return None
    native = native_backward_problem(problem, "split")
    widths = native.head_dim, native.v_head_dim
    for plan in (TOGETHER, APART):
        chosen = [
            (q_axis, results, choose(native, q_axis, tuple(widths[i] for i in results)))
            for q_axis, results in plan
        ]
        if all(blocks is not None for _, _, blocks in chosen):
            return chosen
    return None


def push_backward(
    problem: Problem,
    operands: Operands,
    cotangents: Cotangents,
    operand_tangents: Operands,
    moved: Cotangents,
    interpret: bool,
) -> Operands:
    """Computes the tangents of the gradients of q, k and v.

    Args:
        problem: problem of the operands.
        operands: operands of the call.
        cotangents: what the backward starts from: LSE, dO, delta and shifts.
        operand_tangents: tangents of q, k and v.
        moved: tangents of the cotangents; that of the log-sum-exp is of the natural one.
        interpret: run under the interpreter.
    """
    native, plan = native_backward_problem(problem, "split"), launches(problem)
    assert plan is not None
    clear = lambda x: padding.cleared_queries(operands, x)
    summed = (tuple(sorted({blocks.columns for _, _, blocks in plan})),) * 2
    arrays = PushArrays(
        *(
            BackwardArrays.of(
                native, padding.cleared(operands, x), c._replace(do=clear(c.do)), summed
            )
            for x, c in ((operands, cotangents), (operand_tangents, moved))
        )
    )
    tangents = {}
    for q_axis, results, blocks in plan:
        run = push_launch(native, blocks, q_axis, results, interpret)
        row_names = ("k", "v") if q_axis else ("q",)
        out = run(padding.cleared(operands), arrays)
        tangents |= {row_names[i]: x for i, x in zip(results, out, strict=True)}
    joined = Matmuls(problem.dtype).joined
    unpadded = lambda name, x: joined(tangents[name])[:, : x.shape[1], :, : x.shape[3]]
    q, k, v = (unpadded(name, getattr(operands, name)) for name in ("q", "k", "v"))
    return Operands(q, k, v)
