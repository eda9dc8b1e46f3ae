"""Shared memory and barriers of a CTA of the dK/dV kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from ..mosaic.launch import WARPGROUP_ROWS
from .arrays import BackwardArrays
from .memory import row_buffer
from .products import Products
from .side_inputs import SideInputs, Streamed

if TYPE_CHECKING:
    from .split_blocks import DkvBlocks


class Smem(NamedTuple):
    """Shared memory of one CTA; tiles have the operand form of products.py."""

    q: Any  # [stages, block_q, D]
    do: Any  # [do_stages, block_q, Dv]
    k: Any  # [64, D]
    v: Any  # [64, Dv]
    p: Any  # [p_stages, 64, block_q], what `hand_over` makes of P^T
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[do_stages, block_q]
    dk: Any  # staging [64, D], where the head dims differ, else V: read by warpgroup 1 alone
    dv: Any  # staging [64, Dv], likewise, else K
    side: Streamed  # with Q


class Barriers(NamedTuple):
    """The mbarriers of one CTA.

    The full ones of q and do count two copies, and q's the streamed side inputs too; their empty
    ones count two warpgroups.
    """

    k_full: Any
    v_full: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    p_full: Any
    p_empty: Any


def scratch(
    problem: Problem, blocks: DkvBlocks, arrays: BackwardArrays | None = None
) -> tuple[Smem, Barriers]:
    """Returns the shared memory and the barriers to allocate.

    Args:
        problem: problem with the head dims that run.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
    """
    block_q = blocks.block_q
    # Q and dO are summed over queries too; K and V must have the same swizzles.
    buffer = functools.partial(Products(problem.dtype).buffer, summed_rows=block_q)
    bar, side = plgpu.Barrier, SideInputs(problem, q_axis=1)
    same = problem.head_dim == problem.v_head_dim
    of_k, of_v = ((), ()) if arrays is None else ((arrays.k,), (arrays.v,))
    if same:  # each is staged where the other was
        of_k = of_v = of_k + of_v
    k = buffer((WARPGROUP_ROWS, problem.head_dim), *of_k)
    v = buffer((WARPGROUP_ROWS, problem.v_head_dim), *of_v)
    smem = Smem(
        q=buffer((blocks.stages, block_q, problem.head_dim), *of_k),
        do=buffer((blocks.do_stages, block_q, problem.v_head_dim), *of_v),
        k=k,
        v=v,
        p=buffer((blocks.p_stages, WARPGROUP_ROWS, block_q)),
        lse=row_buffer((blocks.stages, block_q)),
        delta=row_buffer((blocks.do_stages, block_q)),
        dk=None if same else k,
        dv=None if same else v,
        side=side.buffers(blocks.stages, WARPGROUP_ROWS, block_q),
    )
    bars = Barriers(
        k_full=bar(),
        v_full=bar(),
        q_full=bar(num_arrivals=2 + side.copies, num_barriers=blocks.stages),
        q_empty=bar(num_arrivals=2, num_barriers=blocks.stages),
        do_full=bar(num_arrivals=2, num_barriers=blocks.do_stages),
        do_empty=bar(num_arrivals=2, num_barriers=blocks.do_stages),
        p_full=bar(num_barriers=blocks.p_stages),
        p_empty=bar(num_barriers=blocks.p_stages),
    )
    return smem, bars
