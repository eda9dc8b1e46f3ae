"""Tile sizes of the fused backward: which can be chosen, which are chosen, and why."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Problem
from ....gpu.launch import WARPGROUP_ROWS, shared_memory
from ...common import pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs, Streamed
from ...common.pipeline import Matmuls, Ring, fits, row_buffer, tile_buffer
from ..operands import BackwardArrays


@dataclasses.dataclass(frozen=True)
class FusedBlocks:
    """Tile sizes and options of the fused backward: 128 keys and two compute warpgroups per CTA.

    Attributes:
        block_q: number of queries per step.
        stages, do_stages: number of tiles of Q and of dO in flight.
        ds_stages: number of slots for dS; with one, the warpgroups meet twice per step.
        mask_all: one loop masks every tile (if the mask hides anything), instead of a loop for the
            masked tiles and one for the rest: fewer registers, more instructions.
        ping_pong: the warpgroups take turns at the tensor cores; see `PingPong`, else `Lockstep`.
            Takes at least two slots of everything; not where `late_dp`.
        late_handover: ping-pong warpgroups hand dQ to the storing warp after their turn.
        signs: the elements of P that dropout drops have a minus sign: one tile of registers where
            there were two and predicates. Used where score_tile.may_sign.
        defer: the exponentials of capped logits wait for dP^T: one tile of registers where there
            were two. Used where score_tile.may_defer.
        whole_dq: warpgroup 1 computes all of dQ, and each warpgroup has code of its own and V in
            registers, as the left operand of dP^T; otherwise each computes half of the columns of
            dQ, or of the rows.
        producer: a warpgroup of its own loads and adds dQ; otherwise the two that compute do.
        split_q: number of CTAs that share the Q tiles of a KV tile, whose dK and dV are added up
            afterwards; see launches.py. Takes one loop, as with mask_all.
        bias_cluster: number of CTAs, each with a batch entry of its own, that sum the gradient of a
            bias which the entries share, where it is wanted: dbias.py. 1: backward/dbias/kernel.py
            computes it.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    mask_all: bool = False
    ping_pong: bool = False
    late_handover: bool = False
    signs: bool = False
    defer: bool = False
    whole_dq: bool = False
    producer: bool = True
    split_q: int = 1
    bias_cluster: int = 1

    block_kv = 2 * WARPGROUP_ROWS
    producer_registers, summing_registers = 24, 40

    @property
    def compute_registers(self) -> int:
        """Registers per thread of a compute warpgroup; a warpgroup that sums a bias takes some."""
        return 224 if self.sums_bias else 240

    @property
    def sums_bias(self) -> bool:
        """True if this kernel sums the gradient of a bias."""
        return self.bias_cluster > 1

    @property
    def received_rows(self) -> int:
        """Number of keys in the parts that a CTA receives from the others of its cluster."""
        return self.block_kv - self.block_kv // self.bias_cluster

    @property
    def dq_by_rows(self) -> bool:
        """True if each warpgroup computes half of dQ's rows (64 of 128)."""
        return self.block_q == 2 * WARPGROUP_ROWS and not self.whole_dq

    @property
    def dq_parts(self) -> tuple[int, ...]:
        """The warpgroups that compute dQ, each a part of it."""
        return (1,) if self.whole_dq else (0, 1)

    def dq_tile(self, head_dim: int) -> tuple[int, int]:
        """Returns the shape (rows, columns) of the part of dQ that one warpgroup computes."""
        if self.whole_dq:
            return self.block_q, head_dim
        if self.dq_by_rows:
            return self.block_q // 2, head_dim
        return self.block_q, head_dim // 2

    def runs(self, head_dim: int) -> bool:
        """Returns whether a part of dQ is as wide as the narrowest rows (16) of an operand tile."""
        return self.dq_tile(head_dim)[1] >= 16

    def may_ping_pong(self, problem: Problem) -> bool:
        """Returns whether there are slots for two tiles, and dP^T is issued with S^T.

        With one slot for dO, a warpgroup would wait in its turn for what the other has yet to read.
        """
        return min(self.stages, self.do_stages, self.ds_stages) >= 2 and not late_dp(problem)

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for the head dim that the kernel runs."""
        return shared_memory(scratch(problem, self))


CLUSTERS = (2, 4, 8)  # CTAs, of which a GPU promises no more than 8
FUSED_HEAD_DIMS = (16, 32, 64, 96, 128)  # that this kernel runs, of Q, K and V alike

# bf16, H200, against lockstep: ping-pong is 1.11 times as fast at 128 (causal 1.05, T=16k 1.14 and
# 1.06), 1.00 at 64 (causal 1.09) and 1.03 at 32. A quarter of the exponentials in the multiply-add
# units costs 3 to 13 % at 64 (H200, documents, positions and lengths; options.json).
#
# Where some tile is masked, all are, in one loop: with a second loop for the tiles that need no
# mask, ptxas runs out of registers at 64, and at 128 it is 1.02 (T=4096) and 0.96 (16k) of this.
#
# At 128, block_q 128 would need 2 x 64 more accumulator registers than there are.
#
# At 96, halves of dQ have 48 columns, so that K, Q and dS need swizzles of 32 bytes. A step takes
# 2,304 wavefronts of shared memory (counted from shapes) where its matmuls take 1,920 clocks; with
# dQ by one warpgroup 2,176, and with V in registers 1,984. K in registers as well would spill 120
# bytes and more: ptxas copies an operand that stays in registers before each use. bf16, H200,
# against tiles padded to 128, full and causal, 2,8k,16 and 16,1k,16: 1.22, 1.21, 1.17 and 1.18;
# halves 1.23 and 1.16 full. Causal with two stages 1.04 and 1.09. Modifiers and lists have halves
# and no V in registers, as otherwise 56 to 276 bytes spill.
#
# Handing over late spares a turn the wait for its writes, for which the exponentials of the next
# tile pay: without a mask 1.02 at 128 (T=16k 1.01 to 1.03, GQA 1.01) and 1.05 at 32; at
# 64, where exponentials take as long as a turn, 0.94 to 1.00; causal 0.98 at 128 and 0.99 at 64.
#
# Three tiles of Q and dO at 128, without a mask: 1.02 (T=4096), 1.05 (16k), 1.02 (GQA,
# 8k), 1.01 (1024); causal 0.97 to 1.00.
_PING_PONG = {
    16: FusedBlocks(block_q=128, ping_pong=True),
    32: FusedBlocks(block_q=128, ping_pong=True),
    64: FusedBlocks(block_q=128, ping_pong=True),
    96: FusedBlocks(block_q=64, ping_pong=True, whole_dq=True),
    128: FusedBlocks(block_q=64, ping_pong=True),
}
PLAIN = {d: dataclasses.replace(b, late_handover=d in (32, 96, 128)) for d, b in _PING_PONG.items()}
PLAIN |= {d: dataclasses.replace(PLAIN[d], stages=3, do_stages=3) for d in (96, 128)}
MASKED = {d: dataclasses.replace(b, mask_all=True) for d, b in _PING_PONG.items()}
MASKED[96] = dataclasses.replace(MASKED[96], stages=3, do_stages=3)
# Documents or positions and nothing else: whole tiles have a loop without masks. H200, 32k and 128k
# tokens of 16 documents: 1.05 and 1.06, by ids 1.10 and 1.08, causal by positions 1.06. Spills 12
# to 32 bytes. One loop masks every tile at 64, where two of a causal mask spill 284, and with a
# static window, where they spill 28 and were not timed.
PACKED = MASKED | {d: _PING_PONG[d] for d in (96, 128)}
# Lists: partial and whole tiles in one loop, see `hide_listed_keys` in kernel.py. Handing over late
# is 0.98 to 1.01 at 128 (H200, 32k tokens: causal, prefix, documents, window, random blocks); a
# third stage of Q 0.95 to 1.00.
LISTED = MASKED | {96: FusedBlocks(block_q=64, mask_all=True, ping_pong=True)}
# Modifiers need registers of their own: several at 64 spill with 128 queries, with 64 they do not.
# Ping-pong, four stages: softcap at 64 1.08 (two 1.04, three 1.06), at 128 1.07; score_mod at 64
# 1.08; dropout at 128 1.05.
MODIFIED = {
    16: FusedBlocks(block_q=128, mask_all=True),
    32: FusedBlocks(block_q=128, mask_all=True),
    64: FusedBlocks(block_q=64, mask_all=True, ping_pong=True, stages=4, do_stages=4),
    96: FusedBlocks(block_q=64, mask_all=True, ping_pong=True),
    128: FusedBlocks(block_q=64, mask_all=True, ping_pong=True),
}
# bf16, H200, B = 128, 4 heads, T = 1024, 2048 and 4096, dQ, dK, dV and dbias, against the sums of
# backward/dbias: 1.19, 1.26 and 1.25 (head dim 64), 1.12, 1.22 and 1.29 (32), 1.06, 1.12 (16).
# Larger clusters are slower, as all wait for the last: 4 CTAs 0.91 to 0.97 of pairs at 64 and 32.
# Ping-pong is 1.03 of lockstep at 64; at 32 it is 0.96, with spills.
BIASED = {
    16: FusedBlocks(block_q=128, mask_all=True, bias_cluster=2),
    32: FusedBlocks(block_q=128, mask_all=True, bias_cluster=2),
    64: FusedBlocks(
        stages=3,
        do_stages=3,
        mask_all=True,
        ping_pong=True,
        late_handover=True,
        bias_cluster=2,
    ),
}
# Where ping-pong is slower: with a tile of a bias 0.93 (head dim 32) and 0.95 to 1.01 (64), with
# 64 queries and dropout at 64 0.98, with score_mod at 128 0.67.
LOCKSTEP = {
    16: FusedBlocks(block_q=128, mask_all=True),
    32: FusedBlocks(block_q=128, mask_all=True),
    64: FusedBlocks(block_q=64, mask_all=True),
    96: FusedBlocks(block_q=64, mask_all=True),
    128: FusedBlocks(block_q=64, mask_all=True),
}
# Dropout and nothing else, but for positions and lengths (with documents 44 bytes of spills): the
# sign of P says what is dropped, and 128 queries fit into registers at 64 without a spill (with P,
# pull(P) and predicates 160 bytes). bf16, H200, B=4, T=4096: 1.21 of 64 queries and warpgroups that
# meet (1.20 without a mask); handing over late 0.97. At 128 signs are 1.02: within what one row
# differs by.
DROPPING = MODIFIED | {64: dataclasses.replace(MASKED[64], signs=True)}
# A cap and as little else (with documents 64 bytes): exponentials wait for dP^T, and 128 queries
# fit. 1.18 of 64 queries with four stages; handing over late 0.97. At 128 1.00.
CAPPED = MODIFIED | {64: dataclasses.replace(MASKED[64], defer=True)}
SMALLEST = FusedBlocks(block_q=64, do_stages=1, ds_stages=1, mask_all=True)


def for_far_rows(near: FusedBlocks) -> FusedBlocks:
    """Returns the tiles of the launch for rows with large logits.

    Both launches read the same log-sum-exp, which `signs` scales, so both have the same `signs`.
    """
    return FusedBlocks(block_q=64, mask_all=True, signs=near.signs, bias_cluster=near.bias_cluster)


def late_dp(problem: Problem) -> bool:
    """Returns whether dP^T is issued after the weights, whose registers it would take.

    With a score_mod at head dim 128 1.5 times as fast where the other order spills 352 bytes, and
    1.03 where it does not (H200, options.json); at 64 0.92, with a softcap 0.95.
    """
    return problem.spec.score_mod is not None and problem.head_dim > 64


def choose_fused(problem: Problem) -> FusedBlocks | None:
    """Chooses tiles for a problem of a native head dim; None if nothing fits into shared memory."""
    first = _table(problem)[problem.head_dim]
    if not may_sum_bias(problem, first.bias_cluster):
        first = without_sums(first)
    lockstep = dataclasses.replace(without_sums(first), ping_pong=False, late_handover=False)
    fewer = dataclasses.replace(lockstep, stages=2, do_stages=1, ds_stages=1)
    candidates = (first, dataclasses.replace(first, block_q=64), fewer, SMALLEST)
    takes_tiles = lambda b: problem.takes_tiles(b.block_q, b.block_kv)
    runs = lambda b: b.runs(problem.head_dim) and takes_tiles(b) and fits(scratch(problem, b))
    return next(filter(runs, candidates), None)


def without_sums(blocks: FusedBlocks) -> FusedBlocks:
    """Returns `blocks` for a call that does not ask for the gradient of its bias."""
    return dataclasses.replace(blocks, bias_cluster=1)


def without_producer(blocks: FusedBlocks, problem: Problem) -> FusedBlocks:
    """Returns `blocks` without a producer, for when warpgroups cannot trade registers.

    In ping-pong a warpgroup adds its dQ itself, and in its turn the other would wait for that. Head
    dim 128, causal, H200, as shares of the time with a producer: in the turn 1.09 (T=1024) to 1.28
    (8k, grouped heads), after it and with a third stage 1.00 to 1.06. Other head dims were not
    timed. At 64 up to 52 bytes would spill.
    """
    # Two loops of documents were not timed, and ptxas ends a wgmma in one of them (C7517).
    one_loop = blocks.mask_all or problem.hides_by_arrays
    # With whole tiles of dQ and V in registers 24 to 96 bytes would spill at head dim 96.
    inline_loads = dataclasses.replace(
        without_sums(blocks), mask_all=one_loop, whole_dq=False, producer=False
    )
    modified = problem.spec.modifiers or problem.bias_shape is not None
    if modified or problem.head_dim == 64 or not (inline_loads.ping_pong and one_loop):
        return inline_loads
    late = dataclasses.replace(inline_loads, late_handover=True)
    more = dataclasses.replace(late, stages=3, do_stages=3)
    return more if problem.head_dim == 128 and fits(scratch(problem, more)) else late


def _table(problem: Problem) -> dict[int, FusedBlocks]:
    spec, features, head_dim = problem.spec, problem.features, problem.head_dim
    auxiliary = AuxiliaryInputs(problem, q_axis=1)
    has_tile = "tile" in (auxiliary.kind(problem.bias_shape), auxiliary.kind(problem.mask_shape))
    drops, mods = spec.dropout_rate > 0, spec.score_mod is not None
    if has_tile and _only_a_bias(problem) and head_dim in BIASED:
        return BIASED
    other_modifiers = spec.modifiers - {"dropout_rate"}
    if problem.is_listed:  # only partial tiles
        other_modifiers -= {"mask_mod"}
    alone = not (other_modifiers and drops) and not problem.hides_by_arrays
    if drops and head_dim == 64 and not alone:
        return LOCKSTEP
    if has_tile or "bias" in features or (mods and head_dim > 64):
        return LOCKSTEP
    if drops and alone:
        return DROPPING
    if other_modifiers == {"softcap"} and alone:
        return CAPPED
    if drops or other_modifiers:
        return MODIFIED
    if problem.is_listed:
        return LISTED
    if problem.is_packed:
        return PACKED
    return MASKED if hides_keys(problem) else PLAIN


def hides_keys(problem: Problem) -> bool:
    """Returns whether a mask, an array or the end of the keys hides some key of a KV tile."""
    ragged = problem.kv_len % FusedBlocks.block_kv != 0
    return ragged or problem.is_dynamic or not problem.spec.mask.is_trivial


def may_sum_bias(problem: Problem, cluster: int) -> bool:
    """Returns whether clusters of this many CTAs can sum the bias's gradient; True for 1 CTA.

    All CTAs of a cluster take the same steps with the same tiles of a bias in 16 bits. No modifier
    follows the bias, so dS is its gradient.
    """
    if cluster == 1:
        return True
    kind = AuxiliaryInputs(problem, q_axis=1).kind(problem.bias_shape)
    if kind != "tile" or not _only_a_bias(problem):
        return False
    sharing = problem.batch // problem.bias_shape[0]
    return cluster in CLUSTERS and sharing % cluster == 0


def _only_a_bias(problem: Problem) -> bool:
    """Returns whether a bias in 16 bits is all that modifies the scores."""
    spec = problem.spec
    if spec.modifiers or problem.mask_shape is not None or not spec.mask.is_trivial:
        return False
    small = problem.bias_shape is not None and problem.bias_dtype.itemsize == 2
    return small and problem.features - {"sinks"} == {"bias"}


WARPGROUPS = 2  # that compute, 64 keys each


class FusedSmem(NamedTuple):
    """Shared memory of one CTA, and its barriers."""

    q: Any  # [stages, block_q, D]
    do: Any  # [do_stages, block_q, D]
    k: Any  # [1, block_kv, D]
    v: Any  # [1, block_kv, D]
    ds: Any  # [ds_stages, block_kv, block_q]
    dq: Any  # f32[dq parts, dq tile]
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[do_stages, block_q]
    auxiliary: Streamed | None  # with Q
    received: Any = None  # [rows, block_q]: parts of dS from the rest of a cluster
    arrived: Any = None  # an mbarrier, of what is received
    # mbarriers; those without a count have one arrival
    kv_ring: Any = None  # K and V; with all KV tiles: given back once dK and dV have been read
    q_ring: Any = None  # Q, lse and what modifiers read
    do_ring: Any = None
    delta_full: Any = None
    met: Any = None  # each warpgroup
    ds_ready: Any = None  # with ping-pong and halves of dQ: one per slot, each warpgroup
    turn: Any = None  # with ping-pong under the interpreter: one per warpgroup
    dq_full: Any = None  # one per warpgroup
    dq_empty: Any = None  # one per warpgroup
    stored: Any = None  # dq_sums.py: what this CTA stores of dQ lies in device memory
    others_stored: Any = None  # what other CTAs store of dQ lies there
    padded_full: Any = None  # a tile whose padding is to be zeroed
    sums_ring: Any = None  # with bias_cluster: dS of both warpgroups, added up by each CTA
    receives: Any = None  # each CTA of the cluster


def scratch(
    problem: Problem,
    blocks: FusedBlocks,
    arrays: BackwardArrays | None = None,
    interpret: bool = False,
    all_kv_tiles: bool = False,
) -> FusedSmem:
    """Returns the shared memory and the barriers that a CTA allocates.

    Args:
        problem: a problem with the head dim that the kernel runs.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where only sizes are wanted.
        interpret: run by the interpreter.
        all_kv_tiles: the CTA takes one KV tile after the other: `Launch.all_kv_tiles`.
    """
    head_dim, dtype = problem.head_dim, problem.dtype
    block_q, block_kv = blocks.block_q, blocks.block_kv
    bar, ring, auxiliary = plgpu.Barrier, Ring.declare, AuxiliaryInputs(problem, q_axis=1)
    k_swizzle, v_swizzle = swizzles_of_k_and_v(problem, blocks, arrays)
    received = None
    if blocks.sums_bias:
        received = tile_buffer((blocks.received_rows, block_q), dtype, k_swizzle)
        if interpret:  # where whole tiles of float32 are added
            received = plgpu.SMEM((block_kv, block_q), jnp.float32)
    sums, may_pad = blocks.sums_bias, {"q_lengths", "kv_lengths", "kv_segments"} & problem.features
    return FusedSmem(
        q=tile_buffer((blocks.stages, block_q, head_dim), dtype, k_swizzle),
        do=tile_buffer((blocks.do_stages, block_q, head_dim), dtype, v_swizzle),
        k=tile_buffer((1, block_kv, head_dim), dtype, k_swizzle),
        v=tile_buffer((1, block_kv, head_dim), dtype, v_swizzle),
        ds=tile_buffer((blocks.ds_stages, block_kv, block_q), dtype, k_swizzle),
        dq=tile_buffer((len(blocks.dq_parts), *blocks.dq_tile(head_dim)), jnp.float32),
        lse=row_buffer((blocks.stages, block_q)),
        delta=row_buffer((blocks.do_stages, block_q)),
        auxiliary=auxiliary.buffers(blocks.stages, block_kv, block_q),
        received=received,
        arrived=plgpu.SMEM((2,), jnp.int32) if blocks.sums_bias else None,
        kv_ring=ring(1, copies=2, readers=WARPGROUPS * all_kv_tiles),
        q_ring=ring(
            blocks.stages,
            copies=2 + auxiliary.copies,
            readers=WARPGROUPS,
            cluster=blocks.bias_cluster,
        ),
        do_ring=ring(blocks.do_stages, readers=WARPGROUPS),
        delta_full=bar(num_barriers=blocks.do_stages),
        met=bar(num_arrivals=WARPGROUPS),
        ds_ready=(
            bar(num_arrivals=WARPGROUPS, num_barriers=blocks.ds_stages)
            if blocks.ping_pong and not blocks.whole_dq
            else None
        ),
        turn=bar(num_barriers=WARPGROUPS) if blocks.ping_pong and interpret else None,
        dq_full=bar(num_barriers=WARPGROUPS) if blocks.producer else None,
        dq_empty=bar(num_barriers=WARPGROUPS) if blocks.producer else None,
        padded_full=bar() if may_pad else None,
        sums_ring=(
            ring(blocks.ds_stages, copies=WARPGROUPS, cluster=blocks.bias_cluster) if sums else None
        ),
        receives=pipeline.empty_barrier(blocks.bias_cluster, 1, 1) if sums else None,
    )


def may_read(problem: Problem, blocks: FusedBlocks, arrays: BackwardArrays) -> bool:
    """Returns whether TMA can fill tiles of these blocks up to the head dim from the arrays.

    Arrays of 40 and 56 columns fill tiles of 64 up where a warpgroup has all columns of dQ, with
    swizzles of 128 bytes, and not where it has 32 of them.
    """
    columns = blocks.dq_tile(problem.head_dim)[1]
    return bool(pipeline.swizzles(columns, problem.dtype, arrays.k.shape[-1]))


def swizzles_of_k_and_v(problem: Problem, blocks: FusedBlocks, arrays: BackwardArrays | None):
    """Returns the swizzles in bytes of K (and Q) and of V (and dO).

    K is an operand of matmuls with Q and with dS, V only of those with dO. Of K's columns a
    warpgroup multiplies those that it has of dQ.
    """
    matmuls, columns = Matmuls(problem.dtype), blocks.dq_tile(problem.head_dim)[1]
    k, v = ((), ()) if arrays is None else ((arrays.k,), (arrays.v,))
    k_swizzle = matmuls.swizzle(problem.head_dim, *k, summed_rows=columns)
    return k_swizzle, matmuls.swizzle(problem.head_dim, *v)
