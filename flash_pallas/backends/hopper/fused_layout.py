"""Shared memory and barriers that a CTA of the fused backward allocates."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from . import cluster
from .arrays import BackwardArrays
from .memory import row_buffer, tile_buffer
from .products import Products
from .side_inputs import SideInputs, Streamed

if TYPE_CHECKING:
    from .fused_blocks import FusedBlocks

WARPGROUPS = 2  # that compute, 64 keys each


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    q: Any  # [stages, block_q, D]
    do: Any  # [do_stages, block_q, D]
    k: Any  # [kv_stages, block_kv, D]
    v: Any  # [kv_stages, block_kv, D]
    ds: Any  # [ds_stages, block_kv, block_q]
    dq: Any  # f32[dq parts, dq tile]
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[do_stages, block_q]
    side: Streamed  # with Q
    received: Any = None  # [rows, block_q]: parts of dS from the rest of a cluster
    arrived: Any = None  # an mbarrier, of what is received


class Barriers(NamedTuple):
    """The mbarriers of one CTA; those without a count below have one arrival."""

    kv_full: Any  # K and V
    kv_empty: Any  # with turns: each warpgroup, whose dK and dV have been read
    q_full: Any  # Q, lse and what modifiers read
    q_empty: Any  # each warpgroup
    do_full: Any
    do_empty: Any  # each warpgroup
    delta_full: Any
    met: Any  # each warpgroup
    ds_ready: Any  # where they alternate: one per slot, each warpgroup
    turn: Any  # where they alternate under the interpreter: one per warpgroup
    dq_full: Any  # one per warpgroup
    dq_empty: Any  # one per warpgroup
    arrived: Any = None  # a tile that has padding to be cleared
    summed_full: Any = None  # with bias_cluster: a slot of dS, each warpgroup
    summed_empty: Any = None  # and added up, by each CTA of the cluster
    receives: Any = None  # each CTA of the cluster


def scratch(
    problem: Problem,
    blocks: FusedBlocks,
    arrays: BackwardArrays | None = None,
    interpret: bool = False,
) -> tuple[Smem, Barriers]:
    """Returns the (shared memory, barriers) that a CTA allocates.

    Args:
        problem: a problem with the head dim that the kernel runs.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where only sizes are wanted.
        interpret: run by the interpreter.
    """
    head_dim, dtype = problem.head_dim, problem.dtype
    block_q, block_kv = blocks.block_q, blocks.block_kv
    bar, side = plgpu.Barrier, SideInputs(problem, q_axis=1)
    of_k, of_v = swizzles_of_k_and_v(problem, blocks, arrays)
    received = None
    if blocks.sums_bias:
        received = tile_buffer((blocks.received_rows, block_q), dtype, of_k)
        if interpret:  # where whole tiles of float32 are added
            received = plgpu.SMEM((block_kv, block_q), jnp.float32)
    smem = Smem(
        q=tile_buffer((blocks.stages, block_q, head_dim), dtype, of_k),
        do=tile_buffer((blocks.do_stages, block_q, head_dim), dtype, of_v),
        k=tile_buffer((blocks.kv_stages, block_kv, head_dim), dtype, of_k),
        v=tile_buffer((blocks.kv_stages, block_kv, head_dim), dtype, of_v),
        ds=tile_buffer((blocks.ds_stages, block_kv, block_q), dtype, of_k),
        dq=tile_buffer((WARPGROUPS, *blocks.dq_tile(head_dim)), jnp.float32),
        lse=row_buffer((blocks.stages, block_q)),
        delta=row_buffer((blocks.do_stages, block_q)),
        side=side.buffers(blocks.stages, block_kv, block_q),
        received=received,
        arrived=plgpu.SMEM((2,), jnp.int32) if blocks.sums_bias else None,
    )
    of_cluster = functools.partial(cluster.empty_barrier, blocks.bias_cluster)
    sums = blocks.sums_bias
    bars = Barriers(
        kv_full=bar(num_arrivals=2, num_barriers=blocks.kv_stages),
        kv_empty=(
            bar(num_arrivals=WARPGROUPS, num_barriers=blocks.kv_stages)
            if blocks.takes_turns
            else None
        ),
        q_full=bar(num_arrivals=2 + side.copies, num_barriers=blocks.stages),
        q_empty=cluster.empty_barrier(blocks.bias_cluster, WARPGROUPS, blocks.stages),
        do_full=bar(num_barriers=blocks.do_stages),
        do_empty=bar(num_arrivals=WARPGROUPS, num_barriers=blocks.do_stages),
        delta_full=bar(num_barriers=blocks.do_stages),
        met=bar(num_arrivals=WARPGROUPS),
        ds_ready=(
            bar(num_arrivals=WARPGROUPS, num_barriers=blocks.ds_stages)
            if blocks.alternate
            else None
        ),
        turn=bar(num_barriers=WARPGROUPS) if blocks.alternate and interpret else None,
        dq_full=bar(num_barriers=WARPGROUPS) if blocks.producer else None,
        dq_empty=bar(num_barriers=WARPGROUPS) if blocks.producer else None,
        arrived=bar() if {"q_lengths", "kv_lengths", "kv_segments"} & problem.features else None,
        summed_full=bar(num_arrivals=WARPGROUPS, num_barriers=blocks.ds_stages) if sums else None,
        summed_empty=of_cluster(1, blocks.ds_stages) if sums else None,
        receives=of_cluster(1, 1) if sums else None,
    )
    return smem, bars


def swizzles_of_k_and_v(problem: Problem, blocks: FusedBlocks, arrays: BackwardArrays | None):
    """Returns the swizzles in bytes of K (and Q) and of V (and dO).

    K is an operand of products with Q and with dS, V only of those with dO. Of K's columns a
    warpgroup multiplies those that it has of dQ.
    """
    products, columns = Products(problem.dtype), blocks.dq_tile(problem.head_dim)[1]
    k, v = ((), ()) if arrays is None else ((arrays.k,), (arrays.v,))
    of_k = products.swizzle(problem.head_dim, *k, summed_rows=columns)
    return of_k, products.swizzle(problem.head_dim, *v)
