"""The grids of the kernels for wide heads."""

from __future__ import annotations

from ....core.problem import Problem
from ...gpu.launch import WARPGROUP_ROWS
from ..backward.operands import own_grid
from .tiles import Role


def grid_of(problem: Problem, role: Role) -> dict[str, int]:
    """Returns the grid of a launch, an axis for each name.

    The blocks of one head run side by side: what they stream is read from device memory once.
    """
    heads, length = problem.q_heads, problem.q_len
    if role.q_axis:
        heads, length = problem.kv_heads, problem.kv_len
    axes = {"batch": problem.batch, "head": heads, "block": -(-length // WARPGROUP_ROWS)}
    return own_grid(problem, axes)
