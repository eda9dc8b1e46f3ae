"""Options of the paired backward: what can be chosen, what is chosen, and why."""

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
from ...common.pipeline import Matmuls, Ring, fits, row_buffer, tile_buffer
from .. import dq_sums
from ..fused.tiles import FUSED_HEAD_DIMS
from ..operands import BackwardArrays
from ..split.tiles import native_head_dim

PAIR = 2  # CTAs of a cluster
WARPGROUPS = 2  # of a CTA, that compute
SLOTS = 2  # of P^T and dS^T
HEAD_DIMS = 192, 256  # of Q and K; below, one CTA has dK and dV of 128 keys: backward/fused


@dataclasses.dataclass(frozen=True)
class PairedBlocks:
    """Options of the paired backward: 64 keys in each CTA of a pair, 64 queries a step.

    Attributes:
        stages, do_stages: tiles of Q and of dO in flight.
        stagger: the pairs of a head start at different tiles; then one loop has all tiles, and no
            CTA stores dQ.
    """

    stages: int = 2
    do_stages: int = 2
    stagger: bool = False

    block_q, block_kv = WARPGROUP_ROWS, PAIR * WARPGROUP_ROWS
    producer = True
    compute_registers, producer_registers = 240, 24

    def __post_init__(self):
        if self.stages == 1:  # Q is released one step late: with one slot the kernel waits forever
            raise ValueError("stages of the paired backward is 1: at least 2")

    def joined(self, problem: Problem) -> int:
        """Returns the number of blocks of a problem's lists that make one tile of queries."""
        del problem
        return 1

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


class PairedSmem(NamedTuple):
    """Shared memory of one CTA; what DkvSmem has too is the same here."""

    q: Any  # [stages, 64, D]
    do: Any  # [do_stages, 64, Dv]
    k: Any  # [1, 64, D]
    v: Any  # [1, 64, Dv]
    k_other: Any  # [1, 64, D / 2], this CTA's columns of the other's keys
    ds: Any  # [SLOTS, 2, 64, 64], P^T and then dS^T, by slot and rank of the CTA
    dq: tuple  # f32[64, columns] of each warpgroup, or one for both
    arrived: Any  # int32[SLOTS, 2], an mbarrier of each slot: counts the bytes of the other's dS^T
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
    q: Ring
    do: Ring
    p_full: Any  # [SLOTS], as the next three
    ds_full: Any  # dS^T of this CTA is there; under the interpreter that of both
    ds_empty: Any  # all warpgroups of the pair have read it
    ds_written: Any  # interpreted: both CTAs have written theirs to device memory
    dq_full: Any  # [2], a warpgroup has left its part
    dq_empty: Any  # [2], a warpgroup may leave its next part
    met: Any
    stored: Any = None  # backward/dq_sums.py: what this CTA stores lies in device memory
    others_stored: Any = None  # what other CTAs store lies there


def num_sections(problem: Problem) -> int:
    """Returns the number of sections of the pairs of a batch entry and a KV head."""
    pairs = problem.batch * problem.kv_heads
    return pl.cdiv(pairs, dq_sums.pairs_at_once(problem, pairs))


def stores_dq(problem: Problem, blocks: PairedBlocks) -> bool:
    """Returns whether CTAs store dQ of the queries at their keys' positions: backward/dq_sums.py.

    One loop then masks every tile. bf16, H200, causal: 16,1k,16,192 0.91 of the time without, 8,2k
    0.95, 4,4k 0.98; 16,1k,8,256 0.97, 8,2k 0.98, 4,4k 0.99 (paired_diagonal.json).
    """
    num_blocks = pl.cdiv(problem.kv_len, blocks.block_kv)
    allowed = dq_sums.allowed(problem, num_blocks, num_sections(problem))
    return allowed and not blocks.stagger


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
    k_swizzle = swizzle_of_k(problem, arrays)
    v = () if arrays is None else (arrays.v,)
    v_swizzle = matmuls.swizzle(problem.v_head_dim, *v, summed_rows=rows)
    tile = lambda *shape, swizzle=k_swizzle: tile_buffer(shape, dtype, swizzle)
    smem = PairedSmem(
        q=tile(blocks.stages, rows, problem.head_dim),
        do=tile(blocks.do_stages, rows, problem.v_head_dim, swizzle=v_swizzle),
        k=tile(1, rows, problem.head_dim),
        v=tile(1, rows, problem.v_head_dim, swizzle=v_swizzle),
        k_other=tile(1, rows, problem.head_dim // PAIR),
        ds=tile(SLOTS, PAIR, rows, rows),
        dq=tuple(tile_buffer((rows, width), jnp.float32) for width in dict.fromkeys(widths)),
        arrived=plgpu.SMEM((SLOTS, 2), jnp.int32),
        rows=row_buffer((blocks.stages + blocks.do_stages, rows)),
        auxiliary=auxiliary.buffers(blocks.stages, rows, rows),
    )
    pair_barrier = lambda warpgroups: pipeline.empty_barrier(PAIR, warpgroups, SLOTS)
    bars = PairedBarriers(
        k_full=bar(num_arrivals=2),
        v_full=bar(),
        q=Ring.declare(blocks.stages, copies=2 + auxiliary.copies, readers=WARPGROUPS),
        do=Ring.declare(blocks.do_stages, copies=2, readers=WARPGROUPS),
        p_full=bar(num_barriers=SLOTS),
        ds_full=bar(num_barriers=SLOTS),
        ds_empty=pair_barrier(WARPGROUPS),
        ds_written=pair_barrier(1) if interpret else None,
        dq_full=bar(num_barriers=WARPGROUPS),
        dq_empty=bar(num_barriers=WARPGROUPS),
        met=bar(num_arrivals=WARPGROUPS),
    )
    return smem, dq_sums.with_barriers(bars) if stores_dq(problem, blocks) else bars


def swizzle_of_k(problem: Problem, arrays: BackwardArrays | None) -> int:
    """Returns the swizzle of K, Q and dS in bytes: K is sliced where parts of dQ begin."""
    k = () if arrays is None else (arrays.k,)
    matmuls, half = Matmuls(problem.dtype), problem.head_dim // PAIR
    return matmuls.swizzle(problem.head_dim, *k, summed_rows=half)


def paired_problem(problem: Problem) -> Problem:
    """Returns the problem with the head dims that the kernel runs."""
    head_dim = next(d for d in HEAD_DIMS if d >= problem.head_dim)
    v_head_dim = native_head_dim(problem.v_head_dim)
    return dataclasses.replace(problem, head_dim=head_dim, v_head_dim=v_head_dim)


def choose_paired(problem: Problem) -> PairedBlocks | None:
    """Returns the tiles of a problem; None if the kernel does not run it.

    bf16, H200, against the two deterministic kernels in the same process, full and causal:
    4,4k,16,192 1.15 and 1.09, 1,16k,16,192 1.12 and 1.11; 4,4k,8,256 1.01 to 1.06 and 1.01,
    1,16k,8,256 1.10 to 1.14 and 1.06. Staggered, where nothing is masked: 4,4k,8,256 1.05 of the
    speed without, 4,4k,16,192 0.98 (options.json), so not at 192.

    Args:
        problem: what is computed, with head dims up to 256.
    """
    narrow = problem.head_dim <= FUSED_HEAD_DIMS[-1] or problem.is_listed
    if narrow or problem.dtype.itemsize != 2:
        return None
    native = paired_problem(problem)
    whole_tiles = problem.kv_len % PairedBlocks.block_kv == 0 and not problem.is_dynamic
    unmasked = problem.spec.mask.is_trivial and whole_tiles
    blocks = PairedBlocks(stagger=unmasked and native.head_dim == HEAD_DIMS[-1])
    choices = blocks, dataclasses.replace(blocks, do_stages=1)
    return next((b for b in choices if fits(paired_scratch(native, b))), None)
