"""Forward and backward of one call with wide heads: padding, options, launches."""

from __future__ import annotations

import dataclasses

from ....core import padding
from ....core.integers import round_up
from ....core.padding import pad_axis
from ....core.problem import Cotangents, Operands, Outputs, Problem
from ....core.softmax import EMPTY_ROW
from ...gpu.launch import score_grads
from ..backward.dbias.kernel import score_sums
from ..backward.operands import ROW_MULTIPLE, BackwardArrays
from ..common.pipeline import LENGTH_MULTIPLE, fits
from .backward import key_value_gradients, query_gradient
from .forward import forward as run_forward
from .tiles import (
    COLUMNS,
    KERNELS,
    LEAST_CHUNKS,
    MOST_CHUNKS,
    NARROW,
    SWIZZLED,
    WIDEST,
    Chunks,
    WideBlocks,
    choose,
    scratch,
    wide_problem,
)

# Weights may be up to 2**8 times as large as relative to the largest logit.
LAZY_RESCALE = 8.0


@dataclasses.dataclass(frozen=True)
class WideGradients:
    """Options of the kernels of the backward."""

    dq: WideBlocks
    dkv: WideBlocks


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernels for wide heads do not take a problem, or None."""
    widest = max(problem.head_dim, problem.v_head_dim)
    if widest > WIDEST:
        return f"takes head dims up to {WIDEST}, not {widest}"
    rows, columns = problem.list_block if problem.is_listed else (COLUMNS, COLUMNS)
    if rows % COLUMNS or columns % COLUMNS:
        return (
            f"takes blocks of a block_mask in multiples of {COLUMNS} at head dims above "
            f"{NARROW}, not {rows} x {columns}"
        )
    if any(choose(wide_problem(problem), roles) is None for roles in KERNELS.values()):
        return f"has no room in shared memory for head dim {widest} next to this bias or mask"
    return None


def choose_wide(problem: Problem) -> dict[str, WideBlocks]:
    """Returns the options of each kernel that runs."""
    wide, blocks = wide_problem(problem), {}
    for name, roles in KERNELS.items():
        chosen = choose(wide, roles)
        assert chosen is not None, "`unsupported` has refused it"
        blocks[name] = chosen
    lazy = 0.0 if problem.spec.max_logit else LAZY_RESCALE
    return blocks | {"forward": dataclasses.replace(blocks["forward"], lazy_rescale=lazy)}


def misfit(problem: Problem, kernel: str, blocks: WideBlocks) -> str | None:
    """Returns why a kernel cannot have these options, or None."""
    wide, roles, step = wide_problem(problem), KERNELS[kernel], SWIZZLED
    if blocks.width not in (step, 2 * step, 3 * step):
        return f"'width' is {step}, {2 * step} or {3 * step}"
    most = min(MOST_CHUNKS, *(Chunks(wide, role, blocks.width).total for role in roles))
    if not LEAST_CHUNKS <= blocks.chunks <= most or blocks.stages not in (1, 2):
        return f"'chunks' is from {LEAST_CHUNKS} to {most}, and 'stages' is 1 or 2"
    if not fits(scratch(wide, roles, blocks)):
        return "there is no room for that in shared memory: use fewer chunks, or narrower ones"
    return None


def arrays_of(
    problem: Problem, operands: Operands, cotangents: Cotangents | None
) -> BackwardArrays:
    """Returns the operands as the kernels read them: whole chunks, lengths in multiples of 8."""

    def tile(x, width: int):
        if x is None:
            return None
        return pad_axis(pad_axis(x, 3, width), 1, round_up(x.shape[1], LENGTH_MULTIPLE))

    rows = round_up(problem.q_len, ROW_MULTIPLE)
    cotangents = cotangents or Cotangents(None, None, None)
    per_row = lambda x, fill=0.0: None if x is None else pad_axis(x, 2, rows, fill)
    return BackwardArrays(
        q=tile(operands.q, problem.head_dim),
        k=tile(operands.k, problem.head_dim),
        v=tile(operands.v, problem.v_head_dim),
        do=tile(cotangents.do, problem.v_head_dim),
        lse_log2=per_row(cotangents.lse_log2, EMPTY_ROW),
        delta=per_row(cotangents.delta),
        q_offset=operands.q_offset,
        shift=per_row(cotangents.shift),
    )


def forward(problem: Problem, blocks: WideBlocks, operands: Operands, interpret: bool) -> Outputs:
    """Pads the operands, runs the kernel and returns its results without padding."""
    wide = wide_problem(problem)
    arrays = arrays_of(wide, padding.cleared(operands), None)
    outputs = run_forward(wide, blocks, operands, arrays, interpret)
    rows = lambda x: None if x is None else x[:, :, : problem.q_len]
    return Outputs(
        outputs.o[:, : problem.q_len, :, : problem.v_head_dim],
        rows(outputs.lse_log2),
        rows(outputs.shift),
        rows(outputs.max_logit),
    )


def backward(
    problem: Problem,
    blocks: WideGradients,
    operands: Operands,
    cotangents: Cotangents,
    wanted: frozenset[str],
    producer: bool,
    interpret: bool,
) -> Operands:
    """Computes gradients; dK and dV are summed over each group of query heads.

    Args:
        problem: problem of the operands.
        blocks: options of the kernels.
        operands: operands of the call.
        cotangents: what the backward starts from: LSE, dO, delta and shifts.
        wanted: names of the operands besides q, k and v whose gradients are asked for.
        producer: whether the kernel of these others has a warpgroup that loads.
        interpret: run under the interpreter.
    """
    wide = wide_problem(problem)
    do = padding.cleared_queries(operands, cotangents.do)
    operands, cotangents = padding.cleared(operands), cotangents._replace(do=do)
    arrays = arrays_of(wide, operands, cotangents)
    dk, dv = key_value_gradients(wide, blocks.dkv, operands, arrays, interpret)
    cut = lambda gradient, x: gradient[:, : x.shape[1], :, : x.shape[3]]
    launch = lambda *sums: score_sums(wide, sums, operands, arrays, producer, interpret)
    return Operands(
        cut(query_gradient(wide, blocks.dq, operands, arrays, interpret), operands.q),
        cut(dk, operands.k),
        cut(dv, operands.v),
        **score_grads(wide, operands, wanted, launch),
    )
