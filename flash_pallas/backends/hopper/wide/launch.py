"""Forward and backward of one call with wide heads: padding, options, launches."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from ....core import padding
from ....core.integers import round_up
from ....core.padding import pad_axis
from ....core.problem import Cotangents, Grads, Operands, Outputs, Problem
from ....core.softmax import EMPTY_ROW
from ..backward.operands import ROW_MULTIPLE, BackwardArrays
from ..common.wgmma import LENGTH_MULTIPLE
from .backward import gradient
from .forward import forward as run_forward
from .tiles import (
    COLUMNS,
    DK,
    DQ,
    DV,
    FORWARD,
    WIDEST,
    WideBlocks,
    choose,
    wide_problem,
)
from ...gpu.launch import WARPGROUP_ROWS

ROLES = {"forward": FORWARD, "dq": DQ, "dk": DK, "dv": DV}


@dataclasses.dataclass(frozen=True)
class WideGradients:
    """Options of the kernels of the backward."""

    dq: WideBlocks
    dk: WideBlocks
    dv: WideBlocks


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernels for wide heads do not take a problem, or None."""
    widest = max(problem.head_dim, problem.v_head_dim)
    if widest > WIDEST:
        return f"takes head dims up to {WIDEST}, not {widest}"
    if not (
        problem.takes_tiles(WARPGROUP_ROWS, COLUMNS) and problem.takes_tiles(COLUMNS, WARPGROUP_ROWS)
    ):
        return (
            f"takes block masks with blocks in multiples of {COLUMNS} at head dims above 256, not "
            f"{problem.list_block}"
        )
    if any(choose(wide_problem(problem), role) is None for role in ROLES.values()):
        return f"has no room in shared memory for head dim {widest} next to this bias or mask"
    return None


def blocks(problem: Problem) -> dict[str, WideBlocks]:
    """Returns the options of each kernel that runs."""
    wide, found = wide_problem(problem), {}
    for name, role in ROLES.items():
        found[name] = choose(wide, role)
    lazy = 0.0 if problem.spec.max_logit else 8.0
    found["forward"] = dataclasses.replace(found["forward"], lazy_rescale=lazy)
    return found


def _arrays(problem: Problem, operands: Operands, cotangents: Cotangents | None) -> BackwardArrays:
    """Returns the operands as the kernels read them: whole chunks, lengths in multiples of 8."""

    def tile(x, width: int):
        if x is None:
            return None
        return pad_axis(pad_axis(x, 3, width), 1, round_up(x.shape[1], LENGTH_MULTIPLE))

    rows = round_up(problem.q_len, ROW_MULTIPLE)
    do, lse, delta, shift = (None,) * 4 if cotangents is None else cotangents_of(cotangents)
    per_row = lambda x, fill=0.0: None if x is None else pad_axis(x, 2, rows, fill)
    return BackwardArrays(
        q=tile(operands.q, problem.head_dim),
        k=tile(operands.k, problem.head_dim),
        v=tile(operands.v, problem.v_head_dim),
        do=tile(do, problem.v_head_dim),
        lse_log2=per_row(lse, EMPTY_ROW),
        delta=per_row(delta),
        q_offset=operands.q_offset,
        shift=per_row(shift),
    )


def cotangents_of(x: Cotangents):
    """Returns (do, lse_log2, delta, shift)."""
    return x.do, x.lse_log2, x.delta, x.shift


def forward(problem: Problem, blocks: WideBlocks, operands: Operands, interpret: bool) -> Outputs:
    """Computes attention; see core.problem.Outputs."""
    wide = wide_problem(problem)
    arrays = _arrays(wide, padding.cleared(operands), None)
    found = run_forward(wide, blocks, operands, arrays, interpret)
    rows = lambda x: None if x is None else x[:, :, : problem.q_len]
    return Outputs(
        found.o[:, : problem.q_len, :, : problem.v_head_dim],
        rows(found.lse_log2),
        rows(found.shift),
        rows(found.max_logit),
    )


def backward(
    problem: Problem,
    blocks: WideGradients,
    operands: Operands,
    cotangents: Cotangents,
    interpret: bool,
) -> Grads:
    """Computes the gradients of q, k and v; dK and dV are summed over each group of heads."""
    wide = wide_problem(problem)
    do = padding.cleared_queries(operands, cotangents.do)
    operands, cotangents = padding.cleared(operands), cotangents._replace(do=do)
    arrays = _arrays(wide, operands, cotangents)
    run = lambda name: gradient(
        wide, ROLES[name], getattr(blocks, name), operands, arrays, interpret
    )
    whole = lambda x, like: x[:, : like.shape[1], :, : like.shape[3]]
    return Grads(
        whole(run("dq"), operands.q),
        whole(run("dk"), operands.k),
        whole(run("dv"), operands.v),
    )
