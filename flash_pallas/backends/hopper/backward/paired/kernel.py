"""The paired backward: all five matmuls of FlashAttention-2's Algorithm 2 for head dims to 256.

At head dim 256 dK and dV of 64 keys take half of an SM's registers, and CTAs of 64 keys would add
more to dQ in device memory than L2 takes. So a cluster of two CTAs owns 128 keys. Each has 64 of
them with their dK and dV, as in backward/split/dkv.py. They exchange dS, and each computes half of
the columns of dQ for all 128 keys:

    warpgroup 0   S^T = K Q^T     P^T                          dV += P^T dO
    warpgroup 1   dP^T = V dO^T   dS^T = P^T (dP^T - delta)    dK += dS^T Q
    both          dQ = dS K of the tile before, some of the CTA's columns each
    warpgroup 2   one warp loads, another adds dQ to a float32 buffer in device memory

dQ of a tile is computed in the step after it, so that the other CTA's dS has a step to arrive. The
order in which pairs add to dQ differs from run to run, and with it the last bits; backward/split is
deterministic. Where no CTA has added before, dQ is stored: see backward/dq_sums.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Operands, Problem
from .....core.scores import TileInputs
from ....gpu.launch import WARPGROUP_ROWS, float32, launch
from ....gpu.ptx import inline
from ...common import pipeline
from ...common.pipeline import hidden, rows_of
from .. import dq_sums
from ..dq_sums import OwnTiles
from ..operands import BackwardArrays, QTileRange, mask_everywhere
from ..split.dkv import DK_WARPGROUP, DV_WARPGROUP, PRODUCER, DkvCta, DkvKernel, DkvLoads
from .exchange import Exchange, stand_in
from .tiles import (
    PAIR,
    SLOTS,
    WARPGROUPS,
    PairedBlocks,
    dq_columns,
    num_sections,
    paired_scratch,
    stores_dq,
    swizzle_of_k,
)

LOAD_WARP, STORE_WARP, SIGNAL_WARP, WAIT_WARP = range(4)


@dataclasses.dataclass(frozen=True)
class PairedCta(DkvCta):
    """Refs, rings and place of one CTA of a pair.

    Attributes:
        dq: f32[B, T8, N, D] in device memory: sums.
        own: function that returns the dQ tiles that this CTA stores; None where it only adds.
        block: number of the pair's 128 keys.
        rank: of this CTA in the pair.
        exchange: of dS.
        dq_acc: accumulator of this warpgroup's part of dQ, within a step.
    """

    dq: Any = None
    own: Callable[[], OwnTiles] | None = None
    block: Any = None
    rank: Any = None
    exchange: Any = None
    dq_acc: Any = None

    def anew(self) -> PairedCta:
        """Returns this record with operands whose descriptors are not held over the loop."""
        zero, smem = hidden(0), self.smem
        k, v, k_other = (x.at[zero] for x in (smem.k, smem.v, smem.k_other))
        smem = smem._replace(k=k, v=v, k_other=k_other)
        return dataclasses.replace(self, smem=smem, rank=hidden(self.rank))

    @property
    def half(self) -> int:
        """Number of columns of dQ that a CTA computes."""
        return self.smem.k_other.shape[-1]


@dataclasses.dataclass(frozen=True)
class PairedKernel(DkvKernel):
    """One launch of the paired kernel; see DkvKernel, of which it has the scores, dK and dV."""

    blocks: PairedBlocks

    @property
    def loads(self) -> PairedLoads:
        """Copies from device memory into shared memory, and the sums of dQ."""
        return PairedLoads(self.problem, self.blocks)

    @property
    def at_once(self) -> int:
        """Number of pairs of a batch entry and a KV head that are worked on at one time."""
        return dq_sums.pairs_at_once(self.problem, self.pairs)

    @property
    def pairs(self) -> int:
        """Number of pairs of a batch entry and a KV head."""
        return self.problem.batch * self.problem.kv_heads

    @property
    def sections(self) -> int:
        """Number of sections of the pairs."""
        return num_sections(self.problem)

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks, of a pair of CTAs each."""
        return pl.cdiv(self.problem.kv_len, self.blocks.block_kv)

    @property
    def stores_dq(self) -> bool:
        """True if CTAs store dQ of the queries at their keys' positions: backward/dq_sums.py."""
        return stores_dq(self.problem, self.blocks)

    @property
    def grid(self) -> dict[str, int]:
        """The grid, of clusters: sections as in backward/fused/launches.py."""
        return {"section": self.sections, "kv": self.num_blocks, "pair": self.at_once}

    def run(self, sums, gmem: BackwardArrays, dk, dv, *refs):
        """Runs a CTA; `sums`: dQ, to which it adds, and flags if it stores some."""
        stand_ins, (smem, bars) = refs[:-2], refs[-2:]
        pair = lax.axis_index("section") * self.at_once + lax.axis_index("pair")
        batches = jnp.int32(self.problem.batch)
        batch, kv_head = lax.rem(pair, batches), lax.div(pair, batches)
        block, rank = lax.axis_index("kv"), pipeline.cluster_rank(PAIR)
        if self.stores_dq:
            block = dq_sums.block_of(self, block)
        exchange = Exchange(
            ds=smem.ds,
            arrived=smem.arrived,
            handed_over=bars.p_full,
            full=bars.ds_full,
            empty=bars.ds_empty,
            written=bars.ds_written,
            stand_in=stand_ins[0].at[batch, kv_head, block] if stand_ins else None,
            rank=rank,
            swizzle=swizzle_of_k(self.problem, gmem),
            interpret=self.interpret,
        )
        cta = PairedCta(
            gmem=gmem,
            dk=dk,
            dv=dv,
            smem=smem,
            bars=bars,
            # Descriptors of operands are made in every step, not held over the loop.
            q=dataclasses.replace(bars.q, hides_slot=True),
            do=dataclasses.replace(bars.do, hides_slot=True),
            p=None,
            batch=batch,
            kv_head=kv_head,
            kv_start=(block * PAIR + rank) * WARPGROUP_ROWS,
            q_tiles=self.q_tiles(gmem, (batch, kv_head, block)),
            dq=sums["dq"],
            block=block,
            rank=rank,
            exchange=exchange,
        )
        if self.stores_dq:
            own = functools.partial(self.own_tiles, cta, sums["stored"])
            cta = dataclasses.replace(cta, own=own)
        if self.pairs % self.at_once == 0:
            self.run_roles(cta)
        else:  # the last section is smaller
            pl.when(pair < self.pairs)(lambda: self.run_roles(cta))

    def own_tiles(self, cta: PairedCta, flags) -> OwnTiles:
        """Returns the dQ tiles that a CTA stores, of which each of a pair has its columns."""
        total = cta.q_tiles.total
        unknown = functools.partial(inline.unknown, interpret=self.interpret)

        def place():
            pair = unknown(cta.kv_head) * self.problem.batch + unknown(cta.batch)
            return unknown(cta.block), pair * PAIR + unknown(cta.rank)

        return OwnTiles(
            count=dq_sums.num_stored(self, total),
            total=total,
            flags=flags,
            place=place,
            num_blocks=self.num_blocks,
            stored=cta.bars.stored,
            others_stored=cta.bars.others_stored,
        )

    def run_roles(self, cta: PairedCta):
        """Sends each warpgroup to its role: dV, dK, or the producer."""
        wg = lax.axis_index("wg")
        pl.when(wg == DV_WARPGROUP)(lambda: self.compute_dv(cta))
        pl.when(wg == DK_WARPGROUP)(lambda: self.compute_dk(cta))
        pl.when(wg == PRODUCER)(lambda: self.loads(cta))

    def q_tiles(self, gmem: BackwardArrays, own_tile) -> QTileRange:
        batch, _, block = own_tile
        return QTileRange.of(
            self.problem,
            gmem,
            (batch, block),
            self.blocks.block_kv,
            self.blocks.block_q,
            mask_all=mask_everywhere(self.problem) or self.blocks.stagger or self.stores_dq,
            shift=block if self.blocks.stagger else 0,
        )

    # --- warpgroup 0 -----------------------------------------------------------------------------

    def sum_dv(self, cta: PairedCta, far):
        cta.exchange.enter()
        accumulator = self.result_accumulator(self.problem.v_head_dim)
        dv = pl.run_scoped(functools.partial(self.loop_over_dv, cta, far), accumulator)
        self.last_dq(cta, DV_WARPGROUP)
        self.meet(cta)
        staging = cta.smem.v.at[0]
        self.store(dv, staging, rows_of(cta.dv, cta.keys, staging))
        cta.exchange.drain(cta.q_tiles.total)

    def dv_step(self, cta: PairedCta, fragments: TileInputs, far, dv_acc, block_of, n, *, masked):
        """Hands over P^T of the n-th tile, issues dV += P^T dO, leaves dQ of the tile before."""
        block, n = block_of(n), hidden(n)
        if self.problem.group > 1:  # under the wait for Q
            place = self.loads.place(cta, cta.q_tiles[n][0], block)
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
        cta.q.wait_full(n)
        weights = functools.partial(
            self.weights, fragments=fragments, q_tile=(n, block), masked=masked, far=far
        )
        run = functools.partial(self.dv_matmuls, cta, n, weights, dv_acc)
        dq = pl.run_scoped(run, self.score_accumulator, self.dq_accumulator(DV_WARPGROUP))
        self.leave_dq(cta, n, DV_WARPGROUP, dq)

    def dv_matmuls(self, cta: PairedCta, n, weights, dv_acc, s_acc, dq_acc):
        """Returns dQ of the tile before; dV ends during the next tile.

        `weights`: `self.weights` of the n-th tile, as a function of the CTA and of `s_acc`.
        """
        cta = dataclasses.replace(cta.anew(), dq_acc=dq_acc)
        p, handed = weights(cta, s_acc=s_acc)
        cta.exchange.hand_over(n, handed[0])
        self.issue_dq(cta, n - 1, DV_WARPGROUP)
        cta.do.wait_full(n)
        self.matmuls.multiply(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        cta.exchange.release(n - 1)
        return dq

    # --- warpgroup 1 -----------------------------------------------------------------------------

    def compute_dk(self, cta: PairedCta):
        plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        cta.exchange.open()
        accumulator = self.result_accumulator(self.problem.head_dim)
        plgpu.barrier_wait(cta.bars.k_full)
        dk = pl.run_scoped(functools.partial(self.loop_over_dk, cta), accumulator)
        self.last_dq(cta, DK_WARPGROUP)
        self.meet(cta)
        staging = cta.smem.k.at[0]
        out = rows_of(cta.dk, cta.keys, staging)
        self.store(dk * self.problem.spec.scale, staging, out)

    def dk_step(self, cta: PairedCta, dk_acc, n):
        """Sends dS^T of the n-th tile, issues dK += dS^T Q, and leaves dQ of the tile before."""
        cta.do.wait_full(n)
        run = functools.partial(self.dk_matmuls, cta, dk_acc, n)
        dq = pl.run_scoped(run, self.score_accumulator, self.dq_accumulator(DK_WARPGROUP))
        self.leave_dq(cta, n, DK_WARPGROUP, dq)

    def dk_matmuls(self, cta: PairedCta, dk_acc, n, dp_acc, dq_acc):
        """Returns dQ of the tile before; dK ends during the next tile."""
        cta = dataclasses.replace(cta.anew(), dq_acc=dq_acc)
        ds = self.score_gradients(cta, n, dp_acc)
        cta.exchange.send(n, ds[0])
        if not self.drops_twice:
            cta.q.wait_full(n)
        self.issue_dq(cta, n - 1, DK_WARPGROUP)
        self.matmuls.multiply(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        cta.exchange.release(n - 1)
        return dq

    def handed(self, cta: PairedCta, n):
        return cta.exchange.probabilities(n).astype(jnp.float32)

    # --- dQ --------------------------------------------------------------------------------------

    def dq_accumulator(self, warpgroup: int):
        """Makes the accumulator of a warpgroup's part of dQ."""
        columns = dq_columns(self.problem.head_dim, warpgroup)[1]
        return plgpu.ACC((self.blocks.block_q, columns), jnp.float32)

    def issue_dq(self, cta: PairedCta, n, warpgroup: int):
        """Issues dQ = dS K of the n-th tile, or of what lies there."""
        wait = cta.exchange.wait if warpgroup == DV_WARPGROUP else cta.exchange.receive
        pl.when(n >= 0)(lambda: wait(n))
        first, columns = dq_columns(self.problem.head_dim, warpgroup)
        own, slot = cta.rank * cta.half + first, cta.exchange.slot(n)
        ds_of = lambda rank: cta.smem.ds.at[slot, rank].transpose((1, 0))
        plgpu.wgmma(cta.dq_acc, ds_of(cta.rank), cta.smem.k.at[:, pl.ds(own, columns)])
        plgpu.wgmma(cta.dq_acc, ds_of(1 - cta.rank), cta.smem.k_other.at[:, pl.ds(first, columns)])

    def leave_dq(self, cta: PairedCta, n, warpgroup: int, dq):
        """Leaves a warpgroup's part of dQ of the tile before the n-th, to be added.

        Stored in the first step too, though not added then: a branch around registers that wgmmas
        have written makes ptxas end those in flight (C7517).
        """
        slots = len(cta.smem.dq)
        wait = lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[warpgroup])
        if warpgroup >= slots:  # the other has left its part before
            wait()
        else:
            pl.when(n > 0)(wait)
        cta.smem.dq[warpgroup % slots][...] = dq
        plgpu.commit_smem()
        plgpu.barrier_arrive(cta.bars.dq_full.at[warpgroup])

    def last_dq(self, cta: PairedCta, warpgroup: int):
        """Computes a warpgroup's part of dQ of the last tile, and leaves it to be added."""
        total = cta.q_tiles.total

        def run(dq_acc):
            self.issue_dq(dataclasses.replace(cta.anew(), dq_acc=dq_acc), total - 1, warpgroup)
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        dq = pl.run_scoped(run, self.dq_accumulator(warpgroup))
        cta.exchange.release(total - 1)
        self.leave_dq(cta, total, warpgroup, dq)

    def meet(self, cta: PairedCta):
        """Waits for the other warpgroup, which has read K and V for the last time."""
        plgpu.barrier_arrive(cta.bars.met)
        plgpu.barrier_wait(cta.bars.met)


@dataclasses.dataclass(frozen=True)
class PairedLoads(DkvLoads):
    """The producer of one CTA of a pair: loads, and the sums of dQ."""

    blocks: PairedBlocks

    def __call__(self, cta: PairedCta):
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == LOAD_WARP)(lambda: self.load_all(cta))
            pl.when(warp == STORE_WARP)(lambda: self.add_dq(cta))
            if own := cta.own:
                pl.when(warp == SIGNAL_WARP)(lambda: own().signal())
                pl.when(warp == WAIT_WARP)(lambda: own().await_flags())

    def load_k(self, cta: PairedCta):
        """Loads this CTA's keys, and its columns of the other's."""
        k, k_other = (x.at[0] for x in (cta.smem.k, cta.smem.k_other))
        plgpu.copy_gmem_to_smem(rows_of(cta.gmem.k, cta.keys, k), k, cta.bars.k_full)
        start = (cta.block * PAIR + 1 - cta.rank) * WARPGROUP_ROWS
        columns = pl.ds(cta.rank * cta.half, cta.half)
        keys = cta.gmem.k.at[cta.batch, pl.ds(start, WARPGROUP_ROWS), cta.kv_head, columns]
        plgpu.copy_gmem_to_smem(keys, k_other, cta.bars.k_full)

    def load_v(self, cta: PairedCta):
        v = cta.smem.v.at[0]
        plgpu.copy_gmem_to_smem(rows_of(cta.gmem.v, cta.keys, v), v, cta.bars.v_full)

    def add_dq(self, cta: PairedCta):
        """Adds both warpgroups' parts of dQ of every tile to device memory, or stores them."""
        total, zero = cta.q_tiles.total, jnp.int32(0)
        if cta.own is None:
            self.put_dq(cta, zero, total + 1)
        else:
            own = cta.own()
            self.put_dq(cta, zero, own.count + 1, None)
            own.await_others()
            self.put_dq(cta, own.count + 1, total + 1, own=own)
            pl.when(own.count == total)(own.are_stored)
        plgpu.wait_smem_to_gmem(0)

    def put_dq(
        self,
        cta: PairedCta,
        start,
        stop,
        reduction_op: Literal["add"] | None = "add",
        own: OwnTiles | None = None,
    ):
        """Adds dQ of the tiles before a range of steps, or stores it; `own`: those before it."""
        total, slots = cta.q_tiles.total, len(cta.smem.dq)

        @pl.loop(start, stop)
        def _(n):
            for wg in range(WARPGROUPS):
                plgpu.barrier_wait(cta.bars.dq_full.at[wg])
                if own is not None and wg == 0:
                    pl.when((n == own.count + 1) & (own.count > 0))(own.are_stored)
                pl.when(n > 0)(lambda wg=wg: self.put_part(cta, n - 1, wg, reduction_op))
                after = 1 - wg if slots == 1 else wg
                give_back = lambda after=after: plgpu.barrier_arrive(cta.bars.dq_empty.at[after])
                if after > wg:
                    give_back()
                else:
                    pl.when(n < total)(give_back)

    def put_part(self, cta: PairedCta, n, wg: int, reduction_op: Literal["add"] | None):
        """Adds or stores a warpgroup's part of dQ of the n-th tile; waits until it is read."""
        first, columns = dq_columns(self.problem.head_dim, wg)
        member, block = cta.q_tiles[n]
        head = cta.kv_head * self.problem.group + member
        rows = pl.ds(block * self.blocks.block_q, self.blocks.block_q)
        target = cta.dq.at[cta.batch, rows, head, pl.ds(cta.rank * cta.half + first, columns)]
        part = cta.smem.dq[wg % len(cta.smem.dq)]
        plgpu.copy_smem_to_gmem(part, target, reduction_op=reduction_op)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def backward_paired(
    problem: Problem,
    blocks: PairedBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the kernel.

    Args:
        problem: a problem with the head dims of `paired_problem`.
        blocks: tile sizes.
        operands: operands of the call.
        arrays: arrays that a backward kernel reads.
        interpret: run by the interpreter.

    Returns:
        (dq, dk, dv): in the dtypes and shapes of `arrays`, but dq is as wide as the kernel runs it.
    """
    kernel = PairedKernel(problem, blocks, interpret)
    gmem = arrays.for_rows(problem, operands, 1, (blocks.block_q, blocks.block_kv))
    sums = float32((*arrays.q.shape[:3], problem.head_dim))
    out_shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.k, arrays.v)]
    if interpret:
        places = problem.batch, problem.kv_heads, kernel.grid["kv"], SLOTS, PAIR
        out_shapes.append(stand_in(*places, dtype=problem.dtype))

    if kernel.stores_dq:
        flags = jax.ShapeDtypeStruct((kernel.pairs * PAIR,), jnp.int32)
        shapes = {"dq": sums, "stored": flags}
        cleared = dq_sums.cleared(kernel, shapes)
    else:
        cleared = {"dq": dq_sums.zeros([sums.shape], interpret)[0]}

    def run(refs):
        kept, *out = refs
        call = launch(
            functools.partial(kernel.run, kept),
            out=tuple(out_shapes),
            scratch=paired_scratch(problem, blocks, arrays, interpret),
            grid=kernel.grid,
            cluster=pipeline.cluster_axes(PAIR),
            threads=WARPGROUPS + 1,
            name="flash_pallas_backward_paired",
            interpret=interpret,
        )
        for ref, x in zip(out, call(gmem), strict=False):
            ref[...] = x

    empty = [jnp.zeros(x.shape, x.dtype) for x in out_shapes[:2]]  # XLA drops them
    kept, dk, dv = pl.run_state(run)((cleared, *empty))
    return dq_sums.scaled_dq(problem, kept["dq"]), dk, dv
