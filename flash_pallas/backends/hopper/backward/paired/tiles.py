"""Tile sizes of the paired backward: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Problem
from ....gpu.launch import WARPGROUP_ROWS, shared_memory
from ...common import pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs, Streamed
from ...common.pipeline import fits, row_buffer, tile_buffer
from ...common.wgmma import Matmuls
from ..operands import BackwardArrays
from ..split.tiles import HEAD_DIMS, DkvBlocks, native_head_dim

PAIR = 2  # CTAs of a cluster
WARPGROUPS = 2  # of a CTA, that compute
LEAST_HEAD_DIM = 192  # of Q and K; below, one CTA has dK and dV of 128 keys: backward/fused


@dataclasses.dataclass(frozen=True)
class PairedBlocks(DkvBlocks):
    """Tile sizes of the paired backward: 64 keys in each CTA of a pair, 64 queries a step.

    Attributes:
        ds_stages: slots of P^T and dS^T, 2 or 3.
        multicast: each CTA loads half of every tile of Q and dO for both.
        stagger: the pairs of a head start at different tiles; takes one loop.
        mask_all: one loop masks every tile, if the mask hides anything.
    """

    do_stages: int = 1
    ds_stages: int = 3
    multicast: bool = False
    stagger: bool = False
    mask_all: bool = False

    block_pair = PAIR * WARPGROUP_ROWS

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for the head dims that run."""
        return shared_memory(paired_scratch(problem, self))


def dq_columns(head_dim: int, warpgroup: int) -> tuple[int, int]:
    """Returns (first, number) of the columns of dQ that a warpgroup sums, of its CTA's half.

    Warpgroup 1 has more to do with scores than warpgroup 0, and gets the smaller part of 96.
    """
    half = head_dim // PAIR
    first = -(-half // 2 // 32) * 32
    return (0, first) if warpgroup == 0 else (first, half - first)


def dq_part(columns: int) -> tuple[int, int, int]:
    """Returns the shape in which 64 rows and so many columns of dQ are summed.

    Four elements of each thread of a warpgroup, as it has them of a result of wgmma in 8 columns.
    """
    return columns // 8, 128, 4


class PairedSmem(NamedTuple):
    """Shared memory of one CTA; what DkvSmem has too is the same here."""

    q: Any  # [stages, 64, D]
    do: Any  # [do_stages, 64, Dv]
    k: Any  # [1, 64, D]
    v: Any  # [1, 64, Dv]
    k_other: Any  # [1, 64, D / 2], this CTA's columns of the other's keys
    ds: Any  # [ds_stages, 2, 64, 64], P^T and then dS^T, by slot and rank of the CTA
    dq: tuple  # what each warpgroup adds to dQ, f32[columns / 8, 128, 4]; interpreted
    arrived: Any  # int32[ds_stages, 2], an mbarrier of each: counts the bytes of the other's dS^T
    rows: Any  # f32[stages + do_stages, 64], the log-sum-exp of each tile of Q, delta of dO
    auxiliary: Streamed | None  # with Q

    @property
    def lse(self):
        """Log-sum-exp of each tile of Q, f32[stages, 64]."""
        return self.rows.at[pl.ds(0, self.q.shape[0])]

    @property
    def delta(self):
        """Delta of each tile of dO, f32[do_stages, 64]."""
        return self.rows.at[pl.ds(self.q.shape[0], self.do.shape[0])]


class PairedBarriers(NamedTuple):
    """The mbarriers of one CTA; what DkvBarriers has too counts the same here."""

    k_full: Any  # of K and k_other
    v_full: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    p_full: Any  # [ds_stages], by slot, as the next three
    ds_full: Any  # dS^T of this CTA is there; under the interpreter that of both
    ds_empty: Any  # all warpgroups of the pair have read it
    ds_handed: Any  # interpreted: both CTAs have written theirs to device memory
    met: Any  # both warpgroups have read K and V for the last time


def paired_scratch(
    problem: Problem,
    blocks: PairedBlocks,
    arrays: BackwardArrays | None = None,
    interpret: bool = False,
) -> tuple[PairedSmem, PairedBarriers]:
    """Returns the shared memory and the barriers to allocate.

    Args:
        problem: problem with the head dims that run.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
        interpret: for the interpreter.
    """
    matmuls, rows, bar = Matmuls(problem.dtype), WARPGROUP_ROWS, plgpu.Barrier
    dtype, auxiliary = matmuls.operand_dtype, AuxiliaryInputs(problem, q_axis=1)
    widths = [dq_columns(problem.head_dim, wg)[1] for wg in range(WARPGROUPS)]
    of_k = swizzle_of_k(problem, arrays)
    v = () if arrays is None else (arrays.v,)
    of_v = matmuls.swizzle(problem.v_head_dim, *v, summed_rows=rows)
    tile = lambda *shape, swizzle=of_k: tile_buffer(shape, dtype, swizzle)
    smem = PairedSmem(
        q=tile(blocks.stages, rows, problem.head_dim),
        do=tile(blocks.do_stages, rows, problem.v_head_dim, swizzle=of_v),
        k=tile(1, rows, problem.head_dim),
        v=tile(1, rows, problem.v_head_dim, swizzle=of_v),
        k_other=tile(1, rows, problem.head_dim // PAIR),
        ds=tile(blocks.ds_stages, PAIR, rows, rows),
        dq=tuple(plgpu.SMEM(dq_part(width), jnp.float32) for width in widths if interpret),
        arrived=plgpu.SMEM((blocks.ds_stages, 2), jnp.int32),
        rows=row_buffer((blocks.stages + blocks.do_stages, rows)),
        auxiliary=auxiliary.buffers(blocks.stages, rows, rows),
    )
    shared = PAIR if blocks.multicast else 1
    of_pair = lambda warpgroups: pipeline.empty_barrier(PAIR, warpgroups, blocks.ds_stages)
    bars = PairedBarriers(
        k_full=bar(num_arrivals=2),
        v_full=bar(),
        q_full=bar(num_arrivals=2 + auxiliary.copies, num_barriers=blocks.stages),
        q_empty=pipeline.empty_barrier(shared, WARPGROUPS, blocks.stages),
        do_full=bar(num_arrivals=2, num_barriers=blocks.do_stages),
        do_empty=pipeline.empty_barrier(shared, WARPGROUPS, blocks.do_stages),
        p_full=bar(num_barriers=blocks.ds_stages),
        ds_full=bar(num_barriers=blocks.ds_stages),
        ds_empty=of_pair(WARPGROUPS),
        ds_handed=of_pair(1) if interpret else None,
        met=bar(num_arrivals=WARPGROUPS),
    )
    return smem, bars


def swizzle_of_k(problem: Problem, arrays: BackwardArrays | None) -> int:
    """Returns the swizzle of K, Q and dS in bytes: K is sliced where parts of dQ begin."""
    k = () if arrays is None else (arrays.k,)
    matmuls, half = Matmuls(problem.dtype), problem.head_dim // PAIR
    return matmuls.swizzle(problem.head_dim, *k, summed_rows=half)


CHOICES = (PairedBlocks(do_stages=2), PairedBlocks(), PairedBlocks(ds_stages=2))


def paired_problem(problem: Problem) -> Problem:
    """Returns the problem with the head dims that the kernel runs."""
    head_dim = max(LEAST_HEAD_DIM, native_head_dim(problem.head_dim))
    v_head_dim = native_head_dim(problem.v_head_dim)
    return dataclasses.replace(problem, head_dim=head_dim, v_head_dim=v_head_dim)


def choose_paired(problem: Problem) -> PairedBlocks | None:
    """Returns the first choice that fits into shared memory; None if none does.

    `problem`: with any head dims.
    """
    if problem.dtype.itemsize != 2 or problem.is_listed or problem.head_dim > HEAD_DIMS[-1]:
        return None
    native = paired_problem(problem)
    return next((b for b in CHOICES if fits(paired_scratch(native, b))), None)
