"""The tangent kernels outside their loop: tile sizes, shared memory, and the plan of a launch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.problem import EXTRA_GRADS, Problem
from ...gpu import auxiliary_arrays
from ..common.auxiliary_inputs import AuxiliaryInputs, many, modifiers, wants_narrow_tiles
from ..common.pipeline import fits
from ..forward.cta import ForwardPlan, TangentTiles
from ..forward.tiles import ForwardBlocks, ForwardSmem, is_plain, native_problem, scratch

# --- Tile sizes -----------------------------------------------------------------------------------

# What is tried, in this order, until registers and shared memory suffice. A 64x64 wgmma with both
# operands in shared memory needs all of its bandwidth, 64x128 three quarters.
TILES = tuple(
    ForwardBlocks(warpgroups, block_kv, stages, persistent=False)
    for warpgroups, block_kv, stages in (
        (2, 128, 2),
        (2, 64, 2),
        (2, 64, 1),
        (1, 64, 2),
        (1, 64, 1),
        (2, 32, 1),
        (1, 32, 1),
    )
)
# Of the 240 registers of a thread, those for the sums of tiles of 64 rows and for two score tiles.
MOST_REGISTERS = 192
# Weights may be up to 2**8 times as large as relative to the largest logit. In float16, whose
# largest number is 65,504, weights times tangents must find room too.
LAZY_RESCALE = 8.0


def choose_tangent(
    problem: Problem, moves: frozenset[str], *, primal: bool, producer: bool
) -> ForwardBlocks | None:
    """Returns the first of TILES that suits a problem; None where there is none.

    Args:
        problem: the problem of the call.
        moves: names of the operands that have tangents.
        primal: O and the log-sum-exp are computed too.
        producer: a warpgroup of its own loads.
    """
    problem, moves = native_problem(problem), moves & set(EXTRA_GRADS)
    plain = is_plain(problem) and "sinks" not in problem.features and not moves
    # Other calls have 12 to 124 bytes of spills in one kernel, and none in two.
    in_one_kernel = plain and producer and problem.dtype == jnp.bfloat16
    if primal and not in_one_kernel and problem.v_head_dim > 64:
        return None
    widest = (
        128 if plain and producer and (problem.head_dim, problem.v_head_dim) == (64, 64) else 64
    )
    # Next to sums of 256 columns there are registers for 64 keys only where all of these are seen:
    # else 130 to 250 bytes spill.
    full = problem.v_head_dim > 192 and not (plain and problem.kv_len % widest == 0)
    if full or many(modifiers(problem)) or wants_narrow_tiles(problem) or "bias" in moves:
        widest = 32
    lazy = 0.0 if problem.dtype == np.float16 or not primal else LAZY_RESCALE
    for blocks in TILES:
        if blocks.block_kv > widest or registers(problem, blocks, primal=primal) > MOST_REGISTERS:
            continue
        if not problem.takes_tiles(blocks.tile_rows, blocks.block_kv):
            continue
        if fits(tangent_scratch(problem, blocks, moves)):
            return dataclasses.replace(blocks, lazy_rescale=lazy, producer=producer)
    return None


def registers(problem: Problem, blocks: ForwardBlocks, *, primal: bool) -> int:
    """Returns the registers of a thread for the sums of 64 rows and for two tiles of scores."""
    sums = (1 + primal) * problem.v_head_dim // 2
    # As operands P and G take half of that; in float32, where they have two parts, all of it.
    scores = blocks.block_kv if problem.dtype != np.float32 else blocks.block_kv * 5 // 2
    return sums + scores


# --- The launch -----------------------------------------------------------------------------------


class RowsGmem(NamedTuple):
    """Results of a forward in device memory; their rows are those of whole tiles."""

    o: Any  # [B, rows, N, Hv] in the call's dtype
    lse_log2: Any  # f32[B, N, rows]
    shift: Any  # f32[B, N, rows], or None


@dataclasses.dataclass(frozen=True)
class TangentPlan(ForwardPlan):
    """The plan of a launch: that of the forward, with the inputs that have tangents.

    Attributes:
        primal: O and the log-sum-exp are computed too.
    """

    primal: bool = True


def tangent_aux(problem: Problem, moves: frozenset[str]) -> AuxiliaryInputs:
    """Returns the auxiliary inputs of a kernel whose operands are the tangents of `moves`."""
    return AuxiliaryInputs(auxiliary_arrays.of_tangents(problem, moves), q_axis=0)


def tangent_scratch(
    problem: Problem, blocks: ForwardBlocks, moves: frozenset[str], *arrays
) -> ForwardSmem:
    """Returns the shared memory and the barriers of a CTA.

    Args:
        problem: a problem with native head dims.
        blocks: tile sizes.
        moves: names of the operands besides q, k and v that have tangents.
        *arrays: q, v and o in device memory, as `forward.tiles.scratch` takes them.
    """
    smem, stages, bar = scratch(problem, blocks, *arrays), blocks.stages, plgpu.Barrier
    aux, moving = AuxiliaryInputs(problem, q_axis=0), tangent_aux(problem, moves)
    copies = 2 + aux.copies + moving.copies
    streamed = moving.buffers(stages, blocks.tile_rows, blocks.block_kv)
    return smem._replace(
        tangents=TangentTiles(smem.q, smem.k, smem.v, streamed),
        q_full=bar(num_arrivals=2, num_barriers=blocks.warpgroups),
        k_ring=smem.k_ring.filled_by(copies),
        v_ring=smem.v_ring.filled_by(2),
        v_arrived=None,
    )
