"""The kernels for wide heads outside their loop: roles, tile sizes, and shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.integers import round_up
from ....core.problem import Problem
from ...gpu.launch import WARPGROUP_ROWS
from ..common.auxiliary_inputs import AuxiliaryInputs, Streamed
from ..common.pipeline import fits, row_buffer, tile_buffer

NARROW, WIDEST = 256, 512  # head dims that the other kernels run, and these
WARPGROUPS = 2
CHUNK = 64  # rows and columns of a chunk: a row is one swizzle of 128 bytes
COLUMNS = WARPGROUPS * CHUNK  # scores of a step: each warpgroup has 64
LEAST_CHUNKS, MOST_CHUNKS = 3, 16  # of a warpgroup, in flight
AUX_STAGES = 2


class Role(NamedTuple):
    """Which operands a kernel reads, by their names in BackwardArrays.

    Attributes:
        name: of the kernel.
        q_axis: axis of its tiles of scores that runs over queries; 0: rows are queries.
        scores: pairs (own, streamed), each of which is multiplied to a tile of scores.
        summed: what weights are multiplied with, one of the streamed operands.
    """

    name: str
    q_axis: int
    scores: tuple[tuple[str, str], ...]
    summed: str

    @property
    def own(self) -> tuple[str, ...]:
        """Operands of which a CTA has 64 rows."""
        return tuple(own for own, _ in self.scores)

    def width(self, problem: Problem, name: str) -> int:
        """Returns the head dim of an operand."""
        return problem.head_dim if name in ("q", "k") else problem.v_head_dim

    def chunks(self, problem: Problem, name: str) -> int:
        """Returns the number of chunks of an operand's columns."""
        return -(-self.width(problem, name) // CHUNK)

    def results(self, problem: Problem) -> int:
        """Returns the number of chunks of the result's columns that each warpgroup has."""
        return -(-self.chunks(problem, self.summed) // WARPGROUPS)

    def summed_at(self, problem: Problem) -> range:
        """Returns the positions of the summed operand's chunks among those of a step.

        Before them are those of the first pair of scores, after them those of the second.
        """
        first = self.chunks(problem, self.scores[0][1])
        return range(first, first + WARPGROUPS * self.results(problem))

    def steps(self, problem: Problem) -> int:
        """Returns the number of chunks that a warpgroup reads in a step."""
        scores = sum(self.chunks(problem, name) for _, name in self.scores)
        return scores + len(self.summed_at(problem))


FORWARD = Role("forward", 0, (("q", "k"),), "v")
DQ = Role("dq", 0, (("q", "k"), ("do", "v")), "k")
DK = Role("dk", 1, (("k", "q"), ("v", "do")), "q")
DV = Role("dv", 1, (("k", "q"),), "do")


@dataclasses.dataclass(frozen=True)
class WideBlocks:
    """Options of one kernel; its tiles are 64 rows by 128 columns.

    Attributes:
        chunks: how many chunks of 64 rows and 64 columns each warpgroup has in flight.
        lazy_rescale: as of ForwardBlocks.
    """

    chunks: int
    lazy_rescale: float = 0.0


class WideSmem(NamedTuple):
    """Shared memory of one CTA.

    Attributes:
        own: the CTA's rows of its own operands, [chunks, 64, 64] each.
        ring: chunks of streamed operands, [2, slots, 64, 64]; results in the end.
        weights: operands that the warpgroups hand to each other, [2, 64, 64].
        rows: f32[2, 2, 64], values of rows that they exchange, in turns; of the forward.
        auxiliary: of 64 columns each, in slots 2 stage + warpgroup.
    """

    own: tuple
    ring: Any
    weights: Any
    rows: Any
    auxiliary: Streamed | None


class WideBarriers(NamedTuple):
    """The mbarriers of one CTA."""

    own: Any
    full: Any  # of ring, [2 * slots]
    weights_full: Any
    weights_empty: Any
    rows: Any
    auxiliary_full: Any


def scratch(problem: Problem, role: Role, chunks: int) -> tuple[WideSmem, WideBarriers]:
    """Returns the shared memory and the barriers of a CTA with so many chunks in flight."""
    bar, aux = plgpu.Barrier, AuxiliaryInputs(problem, role.q_axis)
    tile = lambda *shape: tile_buffer((*shape, CHUNK), jnp.dtype(problem.dtype))
    own = tuple(tile(role.chunks(problem, name), WARPGROUP_ROWS) for name in role.own)
    slots = AUX_STAGES * WARPGROUPS
    forward, streams = role == FORWARD, bool(aux.copies)
    smem = WideSmem(
        own=own,
        ring=tile(WARPGROUPS, chunks, CHUNK),
        weights=tile(WARPGROUPS, WARPGROUP_ROWS),
        rows=row_buffer((2, WARPGROUPS, WARPGROUP_ROWS)) if forward else None,
        auxiliary=aux.buffers(slots, WARPGROUP_ROWS, WARPGROUP_ROWS),
    )
    both = bar(num_arrivals=WARPGROUPS)
    bars = WideBarriers(
        own=bar(num_arrivals=sum(x.shape[0] for x in own)),
        full=bar(num_barriers=WARPGROUPS * chunks),
        weights_full=both,
        weights_empty=both,
        rows=both if forward else None,
        auxiliary_full=bar(num_arrivals=aux.copies, num_barriers=slots) if streams else None,
    )
    return smem, bars


def choose(problem: Problem, role: Role) -> WideBlocks | None:
    """Returns the options of a kernel, with as many chunks in flight as there is room for.

    Returns None where there is not room enough.
    """
    for chunks in range(min(MOST_CHUNKS, role.steps(problem)), LEAST_CHUNKS - 1, -1):
        if fits(scratch(problem, role, chunks)):
            return WideBlocks(chunks)
    return None


def wide_problem(problem: Problem) -> Problem:
    """Returns the problem with the head dims that the kernels run: multiples of a chunk."""
    wide = lambda x: round_up(x, CHUNK)
    return dataclasses.replace(
        problem, head_dim=wide(problem.head_dim), v_head_dim=wide(problem.v_head_dim)
    )


def is_wide(problem: Problem) -> bool:
    """Returns whether a problem's head dims are above those of the other kernels."""
    return max(problem.head_dim, problem.v_head_dim) > NARROW
