"""Shared memory and barriers of a CTA of the kernel in backward_scores.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic.launch import WARPGROUP_ROWS
from . import cluster
from .arrays import BackwardArrays
from .memory import row_buffer, tile_buffer
from .products import Products
from .side_inputs import Streamed

if TYPE_CHECKING:
    from .score_blocks import ScoreBlocks, Sums

LOADED = ("q", "do", "k", "v", "lse", "delta")  # in every step


class Smem(NamedTuple):
    """Shared memory of one CTA; q, do, k and v are operands of products.py."""

    q: Any  # [stages, block_q, D]
    do: Any  # [stages, block_q, Dv]
    k: Any  # [stages, block_kv, D]
    v: Any  # [stages, block_kv, Dv]
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[stages, block_q]
    side: Streamed
    bias: Any  # [block_q, block_kv]; None unless Sums.holds_bias
    sums: Any  # staging; tile: f32[block_q, block_kv], or None: in place of the bias, if there is
    # one part; columns: f32[warpgroups, 64, block_kv]; rows: None
    vectors: Any  # rows: f32[names, block_q]; columns: f32[warpgroups, block_kv]; else None


class Barriers(NamedTuple):
    """The mbarriers of one CTA; the empty ones count the warpgroups of a cluster."""

    bias: Any
    full: Any
    empty: Any


def scratch(
    sums: Sums, blocks: ScoreBlocks, arrays: BackwardArrays | None = None
) -> tuple[Smem, Barriers]:
    """Returns the shared memory and the barriers to allocate.

    Args:
        sums: what the launch adds up.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
    """
    problem, stages = sums.problem, blocks.stages
    rows, columns = blocks.block_q, blocks.block_kv
    buffer = Products(problem.dtype).buffer

    def tile(length: int, dim: int, name: str):
        copied = () if arrays is None else (getattr(arrays, name),)
        return buffer((stages, length, dim), *copied)

    staging, vectors = None, None
    if sums.axes == "tile" and sums.parts(blocks) > 1:
        staging = tile_buffer((rows, columns), jnp.float32)
    elif sums.axes == "columns":
        staging = tile_buffer((blocks.warpgroups, WARPGROUP_ROWS, columns), jnp.float32)
        vectors = row_buffer((blocks.warpgroups, columns))
    elif sums.axes == "rows":
        vectors = row_buffer((len(sums.names), rows))
    smem = Smem(
        q=tile(rows, problem.head_dim, "q"),
        do=tile(rows, problem.v_head_dim, "do"),
        k=tile(columns, problem.head_dim, "k"),
        v=tile(columns, problem.v_head_dim, "v"),
        lse=row_buffer((stages, rows)),
        delta=row_buffer((stages, rows)),
        side=sums.side.buffers(stages, rows, columns),
        bias=tile_buffer((rows, columns), problem.bias_dtype) if sums.holds_bias else None,
        sums=staging,
        vectors=vectors,
    )
    bar = plgpu.Barrier
    bars = Barriers(
        bias=bar() if sums.holds_bias else None,
        full=bar(num_arrivals=len(LOADED) + sums.side.copies, num_barriers=stages),
        empty=cluster.empty_barrier(blocks.cluster, blocks.warpgroups, stages),
    )
    return smem, bars
