"""Tile sizes of the split, deterministic backward: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Problem
from ....gpu.launch import WARPGROUP_ROWS, shared_memory
from ...common.auxiliary_inputs import AuxiliaryInputs, Streamed, wants_narrow_tiles
from ...common.pipeline import Matmuls, Ring, fits, row_buffer
from ..operands import BackwardArrays

HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)  # that these kernels run, of Q and K and of V each


@dataclasses.dataclass(frozen=True)
class DkvBlocks:
    """Tile sizes of the dK/dV kernel: 64 keys per CTA, one warpgroup for dV and one for dK.

    Attributes:
        block_q: queries per step, 32, 64 or 128.
        stages, do_stages: tiles of Q (at least 2) and of dO in flight.
        p_stages: number of slots in which P^T is handed over.
        producer: a warpgroup of its own loads; else the one of dK does.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    p_stages: int = 2
    producer: bool = True

    block_kv = WARPGROUP_ROWS
    compute_registers = 240
    producer_registers = 24

    def __post_init__(self):
        # A tile must divide the 128 rows that lse is padded to.
        if self.block_q not in (32, 64, 128):
            raise ValueError(f"block_q of the dK/dV kernel is {self.block_q!r}: 32, 64 or 128")
        if self.stages == 1:  # Q is released one step late: with one slot the kernel waits forever
            raise ValueError("stages of the dK/dV kernel is 1: at least 2")

    def joined(self, problem: Problem) -> int:
        """Returns the number of blocks of a problem's lists that make one tile of queries."""
        return 2 if problem.is_listed and self.block_q == 2 * problem.list_block[0] else 1

    def suits(self, problem: Problem) -> bool:
        """Returns whether the lists of a problem, if there are any, can be read in such tiles."""
        if problem.takes_tiles(self.block_q, self.block_kv):
            return True
        return self.joined(problem) == 2 and _hides_by_lists_only(problem)

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for the head dims that run."""
        return shared_memory(dkv_scratch(problem, self))


@dataclasses.dataclass(frozen=True)
class DqBlocks:
    """Tile sizes of the dQ kernel: independent warpgroups of 64 queries.

    Attributes:
        warpgroups: number of compute warpgroups, 1 or 2.
        block_kv: keys per step.
        k_stages, v_stages: blocks of K (at least 2) and of V in flight.
        producer: a warpgroup of its own loads; else the last compute warpgroup does.
    """

    warpgroups: int = 2
    block_kv: int = 64
    k_stages: int = 2
    v_stages: int = 2
    producer: bool = True

    compute_registers = 240
    producer_registers = 24

    def __post_init__(self):
        if self.warpgroups not in (1, 2):  # 240 registers each; lse is padded to 128 rows
            raise ValueError(f"warpgroups of the dQ kernel is {self.warpgroups!r}: 1 or 2")
        if (
            self.k_stages == 1
        ):  # K is released one step late: with one slot the kernel waits forever
            raise ValueError("k_stages of the dQ kernel is 1: at least 2")

    @property
    def block_q(self) -> int:
        """Number of queries of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for the head dims that run."""
        return shared_memory(dq_scratch(problem, self))


# A 64x64 wgmma with both operands in shared memory needs all of its bandwidth, 64x128 three
# quarters: tiles of scores are 128 wide wherever registers and shared memory allow.
# Head dim 256, both kernels together, bf16 on H200, as ratio to cuDNN: 1.28 to 1.36 at 4k, 1.34 at
# 4k causal, 1.39 at 16k causal; there 128 queries would need 354 KB of shared memory.
# In float32 P and dS take as many registers as operands as they do before: at 128 wide dK/dV is
# serialised (head dim 64, causal) and dQ spills 80 bytes.
DKV = (
    DkvBlocks(block_q=128),
    DkvBlocks(block_q=64),
    DkvBlocks(block_q=64, do_stages=1),
    DkvBlocks(block_q=64, do_stages=1, p_stages=1),
    DkvBlocks(block_q=32),  # float32 at head dim 128 next to tiles of both bias and mask
)

# Head dim 256 gets 64 keys and no second stage of V: 231,424 bytes.
DQ = (
    DqBlocks(block_kv=128),
    DqBlocks(block_kv=64),
    DqBlocks(block_kv=64, v_stages=1),
    DqBlocks(warpgroups=1, block_kv=64),
    DqBlocks(warpgroups=1, block_kv=64, v_stages=1),
    DqBlocks(warpgroups=1, block_kv=32),
)


def native_head_dim(head_dim: int) -> int:
    """Returns the native head dim that these kernels run for a head dim: the next of HEAD_DIMS."""
    return next(d for d in HEAD_DIMS if d >= head_dim)


def choose_dkv(problem: Problem) -> DkvBlocks:
    """Returns the first choice that fits into shared memory and into registers."""
    widest = 64 if problem.dtype == np.float32 else 128
    narrow = (b for b in DKV if b.block_q <= widest and b.suits(problem))
    return next(b for b in narrow if fits(dkv_scratch(problem, b)))


def _hides_by_lists_only(problem: Problem) -> bool:
    """Returns whether all tiles of a problem's lists are whole, but for the last keys.

    Neither a mask nor a modifier then asks where a tile lies.
    """
    plain = problem.spec.mask.is_trivial and not problem.spec.modifiers - {"softcap"}
    return plain and problem.features <= {"block_lists", "sinks"}


def choose_dq(problem: Problem) -> DqBlocks:
    """Returns the first choice that fits, and leaves registers for a tile of bias or mask."""
    auxiliary = AuxiliaryInputs(problem, q_axis=0)
    tiles = "tile" in (auxiliary.kind(problem.bias_shape), auxiliary.kind(problem.mask_shape))
    widest = 64 if (tiles and problem.head_dim > 64) or problem.dtype == np.float32 else 128
    widest = 32 if wants_narrow_tiles(problem) else widest
    narrow = (b for b in DQ if b.block_kv <= widest and problem.takes_tiles(b.block_q, b.block_kv))
    blocks = next(b for b in narrow if fits(dq_scratch(problem, b)))
    # One warpgroup that loads for itself leaves room for a second CTA on the SM: 1.05 times as fast
    # with blocks of 64 (bf16, H200, 109,632 tokens, 7 heads, 64 blocks chosen for each).
    alone = problem.is_listed and blocks.warpgroups == 1
    return dataclasses.replace(blocks, producer=False) if alone else blocks


class DkvSmem(NamedTuple):
    """Shared memory of one CTA; tiles have the operand form of Matmuls."""

    q: Any  # [stages, block_q, D]
    do: Any  # [do_stages, block_q, Dv]
    k: Any  # [64, D]
    v: Any  # [64, Dv]
    p: Any  # [p_stages, 64, block_q], what `hand_over` makes of P^T
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[do_stages, block_q]
    dk: Any  # staging [64, D], where the head dims differ, else V: read by warpgroup 1 alone
    dv: Any  # staging [64, Dv], likewise, else K
    auxiliary: Streamed | None  # with Q


class DkvBarriers(NamedTuple):
    """The mbarriers of one CTA."""

    k_full: Any
    v_full: Any
    q: Ring  # with lse and the auxiliary inputs
    do: Ring  # with delta
    p: Ring


def dkv_scratch(
    problem: Problem, blocks: DkvBlocks, arrays: BackwardArrays | None = None
) -> tuple[DkvSmem, DkvBarriers]:
    """Returns the shared memory and the barriers to allocate.

    Args:
        problem: problem with the head dims that run.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
    """
    block_q = blocks.block_q
    # Q and dO are summed over queries too; K and V must have the same swizzles.
    buffer = functools.partial(Matmuls(problem.dtype).buffer, summed_rows=block_q)
    bar, auxiliary = plgpu.Barrier, AuxiliaryInputs(problem, q_axis=1)
    copies = 2 * blocks.joined(problem)  # Q and lse, dO and delta
    same = problem.head_dim == problem.v_head_dim
    k_arrays, v_arrays = ((), ()) if arrays is None else ((arrays.k,), (arrays.v,))
    if same:  # each is staged where the other was
        k_arrays = v_arrays = k_arrays + v_arrays
    k = buffer((WARPGROUP_ROWS, problem.head_dim), *k_arrays)
    v = buffer((WARPGROUP_ROWS, problem.v_head_dim), *v_arrays)
    smem = DkvSmem(
        q=buffer((blocks.stages, block_q, problem.head_dim), *k_arrays),
        do=buffer((blocks.do_stages, block_q, problem.v_head_dim), *v_arrays),
        k=k,
        v=v,
        p=buffer((blocks.p_stages, WARPGROUP_ROWS, block_q)),
        lse=row_buffer((blocks.stages, block_q)),
        delta=row_buffer((blocks.do_stages, block_q)),
        dk=None if same else k,
        dv=None if same else v,
        auxiliary=auxiliary.buffers(blocks.stages, WARPGROUP_ROWS, block_q),
    )
    bars = DkvBarriers(
        k_full=bar(),
        v_full=bar(),
        q=Ring.declare(blocks.stages, copies=copies + auxiliary.copies, readers=2),
        do=Ring.declare(blocks.do_stages, copies=copies, readers=2),
        p=Ring.declare(blocks.p_stages),
    )
    return smem, bars


class DqSmem(NamedTuple):
    """Shared memory of one CTA; tiles have the operand form of Matmuls."""

    q: Any  # [block_q, D]
    do: Any  # [block_q, Dv]
    k: Any  # [k_stages, block_kv, D]
    v: Any  # [v_stages, block_kv, Dv]
    lse: Any  # f32[block_q]
    delta: Any  # f32[block_q]
    auxiliary: Streamed | None  # with K


class DqBarriers(NamedTuple):
    """The mbarriers of one CTA; queries counts four copies."""

    queries: Any  # Q, dO, lse, delta
    k: Ring
    v: Ring


def dq_scratch(
    problem: Problem, blocks: DqBlocks, arrays: BackwardArrays | None = None
) -> tuple[DqSmem, DqBarriers]:
    """Returns the shared memory and the barriers to allocate.

    Args:
        problem: problem with the head dims that run.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
    """
    block_q, block_kv = blocks.block_q, blocks.block_kv
    # K is summed over keys too; Q must have the same swizzle.
    buffer = functools.partial(Matmuls(problem.dtype).buffer, summed_rows=block_kv)
    bar, warpgroups, auxiliary = (
        plgpu.Barrier,
        blocks.warpgroups,
        AuxiliaryInputs(problem, q_axis=0),
    )
    copied = lambda name: () if arrays is None else (getattr(arrays, name),)
    smem = DqSmem(
        q=buffer((block_q, problem.head_dim), *copied("q")),
        do=buffer((block_q, problem.v_head_dim), *copied("do")),
        k=buffer((blocks.k_stages, block_kv, problem.head_dim), *copied("k")),
        v=buffer((blocks.v_stages, block_kv, problem.v_head_dim), *copied("v")),
        lse=row_buffer((block_q,)),
        delta=row_buffer((block_q,)),
        auxiliary=auxiliary.buffers(blocks.k_stages, block_q, block_kv),
    )
    bars = DqBarriers(
        queries=bar(num_arrivals=4),
        k=Ring.declare(blocks.k_stages, copies=1 + auxiliary.copies, readers=warpgroups),
        v=Ring.declare(blocks.v_stages, readers=warpgroups),
    )
    return smem, bars
