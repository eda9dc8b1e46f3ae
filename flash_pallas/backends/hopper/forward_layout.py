"""Shared memory and barriers that a CTA of the forward kernel allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import bounds
from ...core.problem import Problem
from ..mosaic.launch import WARPGROUP_ROWS
from ..mosaic.row_maxima import far_of
from .memory import row_buffer
from .products import Products
from .side_inputs import SideInputs, Streamed
from .tile_queue import SLOTS

if TYPE_CHECKING:
    from .forward_blocks import ForwardBlocks


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    q: Any  # [warpgroups, 64, H]
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]
    o: Any  # [warpgroups, 64, Hv], or None: O is staged in q
    lse: Any  # f32[warpgroups, 64]
    shift: Any  # f32[warpgroups, 64], or None
    most: Any  # f32[warpgroups, 64], or None
    kept: Any  # f32[warpgroups, 64], or None
    side: Streamed  # one slot for each of k's
    tiles: Any = None  # int32[slots, 1], numbers of claimed tiles


class Barriers(NamedTuple):
    """The mbarriers of a CTA: those of q one per warpgroup, those of k and v one per stage."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    v_arrived: Any = None  # a block of V that has padding to be cleared
    tile_full: Any = None  # the number of a claimed tile


def claims(problem: Problem, blocks: ForwardBlocks) -> bool:
    """Returns whether CTAs claim tiles, because their cost is not known at trace time."""
    return bounds.is_dynamic(problem) and blocks.persistent


def keeps_shift(problem: Problem, blocks: ForwardBlocks) -> bool:
    """Returns whether the shift of rows lies in shared memory, accessed only where there is one.

    A kernel that speculates seldom looks at the row maxima. In registers the shift costs 2 to 4 %
    at head dim 64.
    """
    return bool(far_of(problem.spec, problem.dtype) and blocks.speculation(problem))


def scratch(
    problem: Problem, blocks: ForwardBlocks, q: Any = None, v: Any = None, o: Any = None
) -> tuple[Smem, Barriers]:
    """Returns the (shared memory, barriers) that a CTA allocates.

    Args:
        problem: a problem with native head dims.
        blocks: tile sizes.
        q: an operand in device memory; its number of columns decides the layout of tiles, as do
            those of v and o. None where only sizes are wanted.
        v: an operand in device memory, or None.
        o: the result in device memory, or None.
    """
    wgs, stages, block_kv = blocks.warpgroups, blocks.stages, blocks.block_kv
    side, bar = SideInputs(problem, q_axis=0), plgpu.Barrier
    tiles, v_shape = Products(problem.dtype).buffer, (stages, block_kv, problem.v_head_dim)
    apart = not blocks.o_in_q(problem.head_dim, problem.v_head_dim)
    given = lambda *arrays: tuple(x for x in arrays if x is not None)
    in_q, of_v, of_o = given(q) if apart else given(q, o), given(v), given(o)
    rows, claimed = (wgs, WARPGROUP_ROWS), claims(problem, blocks)
    smem = Smem(
        q=tiles((*rows, problem.head_dim), *in_q),
        k=tiles((stages, block_kv, problem.head_dim), *in_q),  # must have the swizzle of Q
        v=tiles(v_shape, *of_v, summed_rows=block_kv),
        o=tiles((*rows, problem.v_head_dim), *of_o) if apart else None,
        lse=row_buffer(rows),
        shift=row_buffer(rows) if far_of(problem.spec, problem.dtype) else None,
        most=row_buffer(rows) if problem.spec.max_logit else None,
        kept=row_buffer(rows) if keeps_shift(problem, blocks) else None,
        side=side.buffers(stages, blocks.tile_rows, block_kv),
        tiles=plgpu.SMEM((SLOTS, 1), jnp.int32) if claimed else None,
    )
    bars = Barriers(
        q_full=bar(num_barriers=wgs),
        q_empty=bar(num_barriers=wgs) if blocks.persistent else None,
        k_full=bar(num_arrivals=1 + side.copies, num_barriers=stages),
        k_empty=bar(num_arrivals=wgs, num_barriers=stages),
        v_full=bar(num_barriers=stages),
        v_empty=bar(num_arrivals=wgs, num_barriers=stages),
        v_arrived=bar() if bounds.is_dynamic(problem) else None,
        tile_full=bar(num_barriers=SLOTS) if claimed else None,
    )
    return smem, bars
