"""The tangent kernel of the backward outside its loop: tile sizes and shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Problem
from ....gpu.launch import WARPGROUP_ROWS
from ...common.auxiliary_inputs import AuxiliaryInputs, Streamed
from ...common.pipeline import Matmuls, Ring, fits, row_buffer
from ..operands import BackwardArrays


@dataclasses.dataclass(frozen=True)
class PushBlocks:
    """Tile sizes of one launch.

    Attributes:
        warpgroups: number of warpgroups, of 64 rows each.
        columns: queries or keys of a step.
        stages: tiles of what streams by that are in flight.
    """

    warpgroups: int
    columns: int
    stages: int

    @property
    def rows(self) -> int:
        """Number of rows of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS


# What is tried, in this order. There is no producer: two warpgroups have 255 registers each then.
TILES = (
    PushBlocks(2, 64, 2),
    PushBlocks(2, 32, 2),
    PushBlocks(2, 32, 1),
    PushBlocks(1, 32, 2),
    PushBlocks(1, 32, 1),
)
MOST_REGISTERS = 192  # of a thread, for its sums and for four tiles of scores


class PushSmem(NamedTuple):
    """Shared memory of one CTA.

    Attributes:
        own: A, its tangent, B and its tangent, [rows, D or Dv], as PushKernel names them; the
            results in the end.
        streamed: C, its tangent, E and its tangent, [stages, columns, D or Dv].
        vectors: f32[stages, columns] each, where columns are queries: see PushKernel.vectors.
        auxiliary: with these tiles.
    """

    own: tuple
    streamed: tuple
    vectors: tuple
    auxiliary: Streamed | None


class PushBarriers(NamedTuple):
    """The mbarriers of one CTA."""

    own: Any
    ring: Ring


def registers(problem: Problem, columns: int, widths: tuple[int, ...]) -> int:
    """Returns the registers of a thread for sums of these widths and for four tiles of scores."""
    dropped = columns if problem.spec.dropout_rate else 0  # two of them once more, in part dropped
    return sum(widths) // 2 + 2 * columns + dropped


def choose(problem: Problem, q_axis: int, widths: tuple[int, ...]) -> PushBlocks | None:
    """Returns the first of TILES that suits; None where there is none.

    Args:
        problem: a problem with native head dims.
        q_axis: axis of the tiles that runs over queries.
        widths: head dims of the results of a launch.
    """
    for blocks in TILES:
        enough = registers(problem, blocks.columns, widths) <= MOST_REGISTERS
        if enough and fits(push_scratch(problem, blocks, q_axis)):
            return blocks
    return None


def is_possible(problem: Problem) -> bool:
    """Returns whether the kernel takes a problem: 16 bits, and scores changed by masks alone.

    Derivatives of the second order of a score_mod or of a softcap are left to jnp, as are lists.
    """
    plain = not problem.spec.score_modifiers and "bias" not in problem.features
    return plain and problem.dtype != np.float32 and not problem.is_listed


def push_scratch(
    problem: Problem, blocks: PushBlocks, q_axis: int, arrays: BackwardArrays | None = None
) -> tuple[PushSmem, PushBarriers]:
    """Returns the shared memory and the barriers of a CTA.

    Args:
        problem: a problem with native head dims.
        blocks: tile sizes.
        q_axis: axis of the tiles that runs over queries.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
    """
    matmuls, (stages, columns) = Matmuls(problem.dtype), (blocks.stages, blocks.columns)
    auxiliary, bar = AuxiliaryInputs(problem, q_axis), plgpu.Barrier
    copied = lambda *names: () if arrays is None else tuple(getattr(arrays, n) for n in names)
    copied_by_width = copied("q", "k"), copied("v", "do")
    widths = problem.head_dim, problem.v_head_dim
    buffers = lambda *shape: tuple(
        matmuls.buffer((*shape, width), *x, summed_rows=columns)
        for width, x in zip(widths, copied_by_width, strict=True)
        for _ in range(2)
    )
    vectors = (row_buffer((stages, columns)),) * (4 * q_axis)
    smem = PushSmem(
        own=buffers(blocks.rows),
        streamed=buffers(stages, columns),
        vectors=vectors,
        auxiliary=auxiliary.buffers(stages, blocks.rows, columns),
    )
    copies = len(smem.streamed) + len(vectors) + auxiliary.copies
    bars = PushBarriers(
        own=bar(num_arrivals=len(smem.own)),
        ring=Ring.declare(stages, copies=copies, readers=blocks.warpgroups),
    )
    return smem, bars
