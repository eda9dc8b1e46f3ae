"""The kernels for wide heads outside their loop: roles, tile sizes, and shared memory."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.integers import round_up
from ....core.problem import Problem
from ...gpu.launch import WARPGROUP_ROWS
from ..common.auxiliary_inputs import AuxiliaryInputs, Streamed
from ..common.pipeline import empty_barrier, fits, row_buffer, tile_buffer
from .handover import received_buffer

NARROW, WIDEST = 256, 512  # largest head dims of the other kernels, and of these
WARPGROUPS = 2
COLUMNS = WARPGROUPS * WARPGROUP_ROWS  # scores of a step: each warpgroup has 64
SWIZZLED = 64  # columns of one swizzle of 128 bytes; chunks are one or more of these wide
LEAST_CHUNKS, MOST_CHUNKS = 2, 16  # that a warpgroup has in flight


class Role(NamedTuple):
    """Role of a kernel: the operands that it reads, by their names in BackwardArrays.

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


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks that a warpgroup reads in a step, in their order.

    First those of the first pair of scores, then the summed operand of the step before, then those
    of the second pair.

    Attributes:
        problem: what is computed.
        role: of the kernel.
        width: columns of a chunk.
    """

    problem: Problem
    role: Role
    width: int

    def of(self, name: str) -> int:
        """Returns the number of chunks of an operand's columns."""
        wide = self.problem.head_dim if name in ("q", "k") else self.problem.v_head_dim
        return -(-wide // self.width)

    @property
    def results(self) -> int:
        """Number of chunks of the result's columns that each warpgroup has."""
        return -(-self.of(self.role.summed) // WARPGROUPS)

    @property
    def summed(self) -> range:
        """Positions of the summed operand: those of 64 rows, then those of the other 64."""
        first = self.of(self.role.scores[0][1])
        return range(first, first + WARPGROUPS * self.results)

    @property
    def total(self) -> int:
        """Number of chunks of a step."""
        return sum(self.of(name) for _, name in self.role.scores) + len(self.summed)


FORWARD = Role("forward", 0, (("q", "k"),), "v")
DQ = Role("dq", 0, (("q", "k"), ("do", "v")), "k")
DV = Role("dv", 1, (("k", "q"),), "do")
DK = Role("dk", 1, (("v", "do"),), "q")  # times P^T, which comes from DV
PAIR = (DV, DK)  # roles of the CTAs of a cluster, by their ranks

# The kernels by name, with the roles of the CTAs of a cluster.
KERNELS: dict[str, tuple[Role, ...]] = {"forward": (FORWARD,), "dq": (DQ,), "dkv": PAIR}


@dataclasses.dataclass(frozen=True)
class WideBlocks:
    """Options of one kernel; its tiles are 64 rows by 128 columns.

    Attributes:
        width: columns of a chunk; it has 64 rows.
        chunks: how many chunks each warpgroup has in flight.
        stages: how many steps' auxiliary inputs it has in flight.
        lazy_rescale: as of ForwardBlocks.
    """

    width: int
    chunks: int
    stages: int = 2
    lazy_rescale: float = 0.0


class WideSmem(NamedTuple):
    """Shared memory of one CTA.

    Attributes:
        own: the CTA's rows of its own operands, [chunks, 64, width] each.
        ring: chunks of streamed operands, [2, slots, 64, width]; results in the end.
        weights: operands that the warpgroups hand to each other, [2, 64, 64].
        rows: f32[2, 2, 64], values of rows that they exchange, in turns; of the forward.
        auxiliary: of 64 columns each, in slots stages * warpgroup + stage.
        received: what a CTA of a pair gets from the other; None without pairs.
    """

    own: tuple
    ring: Any
    weights: Any
    rows: Any
    auxiliary: Streamed | None
    received: Any


class WideBarriers(NamedTuple):
    """The mbarriers of one CTA."""

    own: Any
    full: Any  # of ring, [2 * slots]
    weights_full: Any
    weights_empty: Any
    rows: Any
    auxiliary_full: Any
    handed: Any  # this and the next of the cluster, of `Handover`; None without pairs
    read: Any


def scratch(
    problem: Problem, roles: tuple[Role, ...], blocks: WideBlocks
) -> tuple[WideSmem, WideBarriers]:
    """Returns the shared memory and the barriers of a CTA, the same in every role."""
    bar, aux, chunks = plgpu.Barrier, AuxiliaryInputs(problem, roles[0].q_axis), blocks.chunks
    tile = lambda *shape: tile_buffer(shape, jnp.dtype(problem.dtype))
    num_chunks = Chunks(problem, roles[0], blocks.width).of
    counts = [
        max(map(num_chunks, names)) for names in zip(*(role.own for role in roles), strict=True)
    ]
    slots = blocks.stages * WARPGROUPS
    forward, pair, streams = roles == (FORWARD,), len(roles) > 1, bool(aux.copies)
    smem = WideSmem(
        own=tuple(tile(count, WARPGROUP_ROWS, blocks.width) for count in counts),
        ring=tile(WARPGROUPS, chunks, WARPGROUP_ROWS, blocks.width),
        weights=tile(WARPGROUPS, WARPGROUP_ROWS, WARPGROUP_ROWS),
        rows=row_buffer((2, WARPGROUPS, WARPGROUP_ROWS)) if forward else None,
        auxiliary=aux.buffers(slots, WARPGROUP_ROWS, WARPGROUP_ROWS),
        received=received_buffer(WARPGROUPS) if pair else None,
    )
    both_arrive = bar(num_arrivals=WARPGROUPS)
    # Both warpgroups of one CTA arrive, which make as many arrivals as one warpgroup of each CTA.
    of_pair = empty_barrier(len(roles), 1, 1) if pair else None
    bars = WideBarriers(
        own=bar(num_arrivals=sum(counts)),
        full=bar(num_barriers=WARPGROUPS * chunks),
        weights_full=both_arrive,
        weights_empty=both_arrive,
        rows=both_arrive if forward else None,
        auxiliary_full=bar(num_arrivals=aux.copies, num_barriers=slots) if streams else None,
        handed=of_pair,
        read=of_pair,
    )
    return smem, bars


def choose(problem: Problem, roles: tuple[Role, ...]) -> WideBlocks | None:
    """Returns the options of a kernel, with as many chunks in flight as there is room for.

    Returns None where there is not room enough.
    """
    for width, stages in itertools.product(widths(problem, roles), (2, 1)):
        totals = [Chunks(problem, role, width).total for role in roles]
        counts = range(min(MOST_CHUNKS, *totals), LEAST_CHUNKS - 1, -1)
        fitting = [
            blocks
            for blocks in (WideBlocks(width, chunks, stages) for chunks in counts)
            if fits(scratch(problem, roles, blocks))
        ]
        if fitting:
            return fitting[0]
    return None


def widths(problem: Problem, roles: tuple[Role, ...]) -> tuple[int, ...]:
    """Returns the widths of chunks to be tried, the best first.

    Every chunk costs a wait, a load and addresses, 70 instructions, whatever its width. Those with
    two operands of their own have no room for wide ones.
    """
    if any(len(role.scores) > 1 for role in roles):
        return (SWIZZLED,)
    widest = max(problem.head_dim, problem.v_head_dim)
    # Halves of 384 columns are one chunk, and halves of 512 are two.
    return (3 * SWIZZLED if widest <= 6 * SWIZZLED else 2 * SWIZZLED, SWIZZLED)


def wide_problem(problem: Problem) -> Problem:
    """Returns the problem with the head dims that the kernels run: multiples of 64."""
    wide = lambda x: round_up(x, SWIZZLED)
    return dataclasses.replace(
        problem, head_dim=wide(problem.head_dim), v_head_dim=wide(problem.v_head_dim)
    )
