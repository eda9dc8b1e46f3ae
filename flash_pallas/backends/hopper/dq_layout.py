"""Shared memory and barriers of a CTA of the dQ kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from .arrays import BackwardArrays
from .memory import row_buffer
from .products import Products
from .side_inputs import SideInputs, Streamed

if TYPE_CHECKING:
    from .split_blocks import DqBlocks


class Smem(NamedTuple):
    """Shared memory of one CTA; tiles have the operand form of products.py."""

    q: Any  # [block_q, D]
    do: Any  # [block_q, Dv]
    k: Any  # [k_stages, block_kv, D]
    v: Any  # [v_stages, block_kv, Dv]
    lse: Any  # f32[block_q]
    delta: Any  # f32[block_q]
    side: Streamed  # with K


class Barriers(NamedTuple):
    """The mbarriers of one CTA; queries counts four copies, the empty ones each warpgroup."""

    queries: Any  # Q, dO, lse, delta
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


def scratch(
    problem: Problem, blocks: DqBlocks, arrays: BackwardArrays | None = None
) -> tuple[Smem, Barriers]:
    """Returns the shared memory and the barriers to allocate.

    Args:
        problem: problem with the head dims that run.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
    """
    block_q, block_kv = blocks.block_q, blocks.block_kv
    # K is summed over keys too; Q must have the same swizzle.
    buffer = functools.partial(Products(problem.dtype).buffer, summed_rows=block_kv)
    bar, warpgroups, side = plgpu.Barrier, blocks.warpgroups, SideInputs(problem, q_axis=0)
    of = lambda name: () if arrays is None else (getattr(arrays, name),)
    smem = Smem(
        q=buffer((block_q, problem.head_dim), *of("q")),
        do=buffer((block_q, problem.v_head_dim), *of("do")),
        k=buffer((blocks.k_stages, block_kv, problem.head_dim), *of("k")),
        v=buffer((blocks.v_stages, block_kv, problem.v_head_dim), *of("v")),
        lse=row_buffer((block_q,)),
        delta=row_buffer((block_q,)),
        side=side.buffers(blocks.k_stages, block_q, block_kv),
    )
    bars = Barriers(
        queries=bar(num_arrivals=4),
        k_full=bar(num_arrivals=1 + side.copies, num_barriers=blocks.k_stages),
        k_empty=bar(num_arrivals=warpgroups, num_barriers=blocks.k_stages),
        v_full=bar(num_barriers=blocks.v_stages),
        v_empty=bar(num_arrivals=warpgroups, num_barriers=blocks.v_stages),
    )
    return smem, bars
