"""The fused backward: all five products of FlashAttention-2's Algorithm 2 in one kernel.

A KV-stationary CTA owns 128 keys of one key head (two compute warpgroups, 64 keys each) and loops
over the Q tiles of every query head of its group. Scores are held transposed, so that P^T and dS^T
come out of the registers as left operands of the products that consume them:

    (1) S^T  = K Q^T           shared x shared
    (2) dP^T = V dO^T          shared x shared
    (3) dV  += P^T dO          registers x shared
    (4) dK  += dS^T Q          registers x shared
    (5) dQ   = dS K            shared (dS^T of both warpgroups, read transposed) x shared

The order in which the two warpgroups run (3) to (5) is that of `Lockstep` or `PingPong`, below.

dK and dV stay in registers for the whole walk. Each dQ tile goes to float32 shared memory, and a
warp of the producer warpgroup adds it to a float32 buffer in device memory by TMA reduce-add. The
order of those adds differs from run to run, and with it the last bits of dQ; backward/split has the
deterministic pair. The gradient of a bias may be added up here too: dbias.py.

    K, V            loaded once per key block; dK and dV are staged in them at the end. One slot
                    each, or kv_stages where a CTA takes several key blocks
    Q with lse      q ring; dO with delta: do ring (delta has a barrier of its own)
    dS^T            ds slots, written by both warpgroups, read by both
    dQ              one float32 slot per warpgroup, handed to the storing warp and back
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core import integers as ints
from .....core.mask import Limits
from .....core.problem import Operands, Problem
from .....core.scores import TileInputs
from ....gpu import inline, score_tile
from ....gpu.launch import WARPGROUP_ROWS, float32, launch
from ....gpu.score_tile import RegisterTile, RowShift
from ...common import pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs, Place, RowFragments
from ...common.far_rows import Part, backward_gains, parts
from ...common.pipeline import WARP, WARPGROUP, Loader, Padding, Ring, rows_of, warpgroup_rows
from ..operands import BackwardArrays, QTileRange
from .dbias import BiasSums, gradient_of_bias
from .launches import (
    FusedCta,
    FusedResults,
    FusedScheduler,
    KvTile,
    Launch,
    by_heads,
    launches_of,
    origins,
    summed,
)
from .tiles import (
    WARPGROUPS,
    FusedBarriers,
    FusedBlocks,
    FusedSmem,
    for_far_rows,
    scratch,
    swizzles_of_k_and_v,
)


@dataclasses.dataclass(frozen=True)
class FusedKernel:
    """One launch of the fused backward; the methods are the phases of a CTA."""

    problem: Problem
    blocks: FusedBlocks
    launch: Launch
    interpret: bool

    @property
    def side(self) -> AuxiliaryInputs:
        """Side inputs, which modifiers read."""
        return AuxiliaryInputs(self.problem, q_axis=1)

    @property
    def finish(self) -> GradientGemms:
        """Second half of every step: dV, dK and dQ."""
        way = PingPong if self.blocks.alternate else Lockstep
        return way(self.blocks, self.problem.head_dim, self.interpret)

    @property
    def weights(self) -> Weights:
        """Elementwise part of every step: from S^T and dP^T to P^T and dS^T."""
        return weights_of(self.problem, self.blocks)

    @property
    def order(self) -> FusedScheduler:
        """Order of the key blocks: which CTA takes which."""
        return FusedScheduler(self.problem, self.blocks, self.launch)

    @property
    def producer(self) -> FusedProducer:
        """Producer, which loads tiles and adds dQ into device memory."""
        return FusedProducer(self.problem, self.blocks, self.interpret)

    def __call__(
        self, results: FusedResults, gmem: BackwardArrays, smem: FusedSmem, bars: FusedBarriers
    ):
        if self.blocks.takes_turns:
            self.work_in_turns(results, gmem, smem, bars)
            return
        size, total, pairs = self.blocks.bias_cluster, self.launch.pairs, self.order.at_once
        within = lax.axis_index("pair") * size + pipeline.cluster_rank(size)
        pair = lax.axis_index("section") * pairs + within
        work = functools.partial(self.work, results, gmem, smem, bars, pair)
        if total % pairs == 0:
            work()
        else:  # the last section is smaller
            pl.when(pair < total)(work)

    def work(
        self,
        results: FusedResults,
        gmem: BackwardArrays,
        smem: FusedSmem,
        bars: FusedBarriers,
        pair,
    ):
        """Runs a CTA that has one key block."""
        block, parts = lax.axis_index("kv") + self.launch.first_block, self.blocks.parts
        keys = self.order.key_block(gmem, pair, block)
        walk = self.query_walk(gmem, keys, block)
        if parts > 1:
            part = lax.axis_index("part")
            dk, dv = results.dk.at[part], results.dv.at[part]
            walk, results = walk.cut(part, parts), results._replace(dk=dk, dv=dv)
        cta = self.cta(results, gmem, smem, bars, keys, walk)
        if self.launch.part is Part.NEAR:
            pl.when(gmem.side.far[keys.batch, keys.kv_head] == 0)(lambda: self.run(cta))
        elif parts == 1:
            self.run(cta)
        else:
            pl.when(walk.total > 0)(lambda: self.run(cta))
            pl.when((walk.total == 0) & (cta.wg < WARPGROUPS))(lambda: self.store_nothing(cta))

    def work_in_turns(
        self, results: FusedResults, gmem: BackwardArrays, smem: FusedSmem, bars: FusedBarriers
    ):
        """Runs a CTA that has several key blocks; all of them have the same walk."""
        turns, zero = self.order.turns(gmem), jnp.int32(0)
        first = KvTile(zero, zero, zero, 0)
        if self.launch.part is Part.FAR:
            walk = QTileRange.whole(self.problem, gmem, self.blocks.block_kv, self.blocks.block_q)
        else:
            walk = self.query_walk(gmem, first, zero)
        cta = self.cta(results, gmem, smem, bars, first, walk)
        self.run(dataclasses.replace(cta, turns=turns))

    def query_walk(self, gmem: BackwardArrays, keys: KvTile, block) -> QTileRange:
        """Returns the walk over Q tiles of a key block, which is the `block`-th of its head."""
        size = self.blocks.block_kv, self.blocks.block_q
        loops = {"mask_all": self.blocks.mask_all, "shift": keys.shift}
        return QTileRange.of(self.problem, gmem, (keys.batch, block), *size, **loops)

    def cta(
        self, results, gmem, smem: FusedSmem, bars: FusedBarriers, keys: KvTile, walk
    ) -> FusedCta:
        """Returns the record of this CTA at a key block, with the walk over its Q tiles."""
        blocks = self.blocks
        return FusedCta(
            gmem=gmem,
            results=results,
            adds=self.launch.adds,
            smem=smem,
            bars=bars,
            q=Ring(bars.q_full, bars.q_empty, blocks.stages),
            do=Ring(bars.do_full, bars.do_empty, blocks.do_stages),
            kv=Ring(bars.kv_full, bars.kv_empty, blocks.kv_stages),
            keys=keys,
            walk=dataclasses.replace(walk, opaque=blocks.alternate),
            wg=lax.axis_index("wg"),
        )

    def run(self, cta: FusedCta):
        """Sends each warpgroup to its role: compute, producer, or sums of the bias's gradient."""
        pl.when(cta.wg < WARPGROUPS)(lambda: self.consume(cta))
        if self.blocks.producer:
            pl.when(cta.wg == WARPGROUPS)(lambda: self.producer(cta))
        if self.blocks.sums_bias:
            swizzle = swizzles_of_k_and_v(self.problem, self.blocks, cta.gmem)[0]
            first = self.launch.first_block if self.blocks.key_launches > 1 else 0
            first_key = first * self.blocks.block_kv
            add = BiasSums(self.problem, self.blocks, swizzle, self.interpret, first_key)
            pl.when(cta.wg == WARPGROUPS + 1)(lambda: add(cta))

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: FusedCta):
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = FusedInlineLoads(self.producer).start(cta)
        cta.visit(self.key_block)
        if self.blocks.parts == 1:
            plgpu.wait_smem_to_gmem(0)
        if self.blocks.sums_bias:
            cta.sums.drain(cta.tiles)  # nobody reads dS of this CTA any more

    def key_block(self, cta: FusedCta):
        """Computes and writes dK and dV of one key block, and adds its part of dQ."""
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        dk, dv = pl.run_scoped(functools.partial(self.walk, cta), accumulator, accumulator)
        dk, dv = dk * self.problem.spec.scale, self.weights.finished(dv)
        if cta.turns is not None:
            cta = cta.anew().at(cta.turns, lax.optimization_barrier(cta.turn))
        (self.store if self.blocks.parts == 1 else self.store_part)(cta, dk, dv)

    def store(self, cta: FusedCta, dk, dv):
        """Writes dK and dV of this warpgroup's keys, staged in shared memory of K and V."""
        keys = warpgroup_rows(cta.wg)
        cta.meet()  # both warpgroups have read K for the last time
        slot = cta.kv_slot
        cta.smem.k[slot, keys] = dk.astype(self.problem.dtype)
        cta.smem.v[slot, keys] = dv.astype(self.problem.dtype)
        plgpu.commit_smem()
        dk_at, dv_at = (
            rows_of(x, self.own_keys(cta), cta.smem.k) for x in (cta.results.dk, cta.results.dv)
        )
        plgpu.copy_smem_to_gmem(cta.smem.k.at[slot, keys], dk_at, commit_group=False)
        plgpu.copy_smem_to_gmem(cta.smem.v.at[slot, keys], dv_at)
        if cta.turns is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            cta.kv.release(cta.turn)

    def store_part(self, cta: FusedCta, dk, dv):
        """Writes what one part of the walk adds to dK and dV of this warpgroup's keys, in float32.

        Straight from registers: four threads write the 32 bytes of a sector.
        """
        at = self.own_keys(cta)
        cta.results.dk[at], cta.results.dv[at] = dk, dv
        plgpu.wait_smem_to_gmem(0)  # dQ's adds, where there is no producer

    def store_nothing(self, cta: FusedCta):
        """Writes the zeros that a part without tiles adds."""
        tile = jnp.zeros((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        self.store_part(cta, *[plgpu.layout_cast(tile, inline.WGMMA)] * 2)

    def own_keys(self, cta: FusedCta):
        """Returns (batch entry, keys of this warpgroup, key head), an index into dK and dV."""
        rows = pl.ds(cta.keys.start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        return cta.keys.batch, rows, cta.keys.kv_head

    def walk(self, cta: FusedCta, dk_acc, dv_acc):
        """Sums dK and dV over every Q tile of every head of the group; returns them, f32[64, D].

        Masked tiles are a loop of their own.
        """
        far = self.far(cta)  # its way from device memory is as long as that of K and V
        cta.kv.wait_full(cta.turn)

        held = self.side.hold_rows(cta.gmem.side, self.own_place(cta, 0))
        if self.problem.group == 1:
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, 0))
        self.finish.start(cta)
        step = functools.partial(self.step, cta, held, (dk_acc, dv_acc))
        self.visit(cta, step, far)
        self.finish.end(cta)
        if not self.blocks.producer:
            FusedInlineLoads(self.producer).end(cta)
        return dk_acc[...], dv_acc[...]

    def far(self, cta: FusedCta):
        """Returns an i32, not 0 if rows of the group are shifted.

        Returns None where no row can be, and where those that are get left to Part.FAR.
        """
        if self.launch.part is Part.NEAR:
            return None
        head = cta.keys.kv_head * self.problem.group
        return self.side.far(cta.gmem.side, cta.keys.batch, head)

    def visit(self, cta: FusedCta, step, far):
        """Calls `step` for every tile, in the loops that `far` and this launch's part ask for."""
        far_step = functools.partial(step, far=far)
        if self.launch.part is Part.NEAR:
            cta.walk.visit(step)
        elif self.launch.part is Part.FAR:
            cta.walk.visit(far_step, in_one_loop=True)
        else:
            cta.walk.visit(step, far, far_step)

    def own_place(self, cta: FusedCta, n) -> Place:
        """Returns the place of this warpgroup's part of the n-th tile."""
        first = cta.keys.start + cta.wg * WARPGROUP_ROWS
        return cta.place(n, first, WARPGROUP_ROWS, self.blocks.block_q)

    def step(self, cta: FusedCta, held: RowFragments, sums, n, block, *, masked, far=None):
        """Computes the five products of the n-th tile; `far` where rows of it may be shifted."""
        if far is not None:
            cta = cta.apart()
        p, ds = self.score_gradients(cta, held, (n, block), masked, far)
        self.finish(cta, n, p, ds, *sums)

    def score_gradients(self, cta: FusedCta, held: RowFragments, at, masked, far):
        """Computes (1), (2) and the elementwise part; returns P^T and dS^T in 16 bits."""
        n, block = at
        keys = warpgroup_rows(cta.anew().wg)
        q_slot, do_slot = cta.q.slot(n), cta.do.slot(n)
        if self.problem.group > 1:  # under the wait for Q
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, n))

        tile = self.tile(cta, block)
        k, v = cta.smem.k.at[cta.kv_slot, keys], cta.smem.v.at[cta.kv_slot, keys]
        q, do = cta.smem.q.at[q_slot], cta.smem.do.at[do_slot]

        def early(s_acc, dp_in_flight):
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=dp_in_flight)
            shift = None
            if far is not None:
                query = block * self.blocks.block_q
                shift = RowShift.of(self.problem, cta.gmem.side, far, cta.walk[n][0], query)
            return self.early(cta, held, n, tile, masked, s, shift)

        def both(s_acc):
            plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
            cta.do.wait_full(n)
            return pl.run_scoped(functools.partial(gradients, s_acc), accumulator)

        def gradients(s_acc, dp_acc):
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
            if self.blocks.takes_turns:
                inline.use_zero(self.interpret)
            self.finish.scores_issued(cta, n)
            return self.late(cta, n, tile, early(s_acc, 1), dp_acc)

        def alone(s_acc):
            plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
            return early(s_acc, 0)

        def late(w, dp_acc):
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
            self.finish.scores_issued(cta, n)
            return self.late(cta, n, tile, w, dp_acc)

        # Accumulators are made after the waits: see DbiasKernel.tile in backward/dbias.
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_q), jnp.float32)
        cta.q.wait_full(n)
        # With the shift of every column there is no room for dP^T next to it.
        if not self.blocks.late_dp and far is None:
            return pl.run_scoped(both, accumulator)
        w = pl.run_scoped(alone, accumulator)
        if far is not None and self.narrows(masked):
            w = self.narrowed(w)
        cta.do.wait_full(n)
        return pl.run_scoped(functools.partial(late, w), accumulator)

    def narrows(self, masked: bool) -> bool:
        """Says whether tiles of the second loop wait for dP^T in 16 bits.

        Values for which the second loop has no registers are loaded again in every step of the
        first one, which matters. Head dim 64, T=4096: with narrow tiles 1.01 of the time without
        the second loop, instead of 1.09; but where tiles are masked 1.13, instead of 1.08. At head
        dim 128 204 bytes would spill and wgmma be serialised (C7512) at T=1024 and 16k, where
        nothing spills without narrow tiles.
        """
        small = not masked and self.problem.head_dim < 128
        return small and self.launch.part is Part.ALL

    def narrowed(self, tiles):
        """Rounds float32 tiles to 16 bits until they are used."""

        leaves, form = jax.tree.flatten(tiles)
        wide = [i for i, x in enumerate(leaves) if x.dtype == jnp.float32]  # no predicates
        narrow = tuple(leaves[i].astype(self.problem.dtype) for i in wide)
        for i, x in zip(wide, lax.optimization_barrier(narrow), strict=True):
            leaves[i] = x.astype(jnp.float32)
        return jax.tree.unflatten(form, leaves)

    def early(self, cta: FusedCta, held: RowFragments, n, tile: RegisterTile, masked, s, shift):
        """Computes what can be made of S^T before dP^T has arrived."""
        slot, keys = cta.q.slot(n), warpgroup_rows(cta.wg)
        lse = plgpu.load(cta.smem.lse.at[slot], layout=inline.COLS)
        inputs = self.side.inputs(held, cta.smem.side, slot, s.shape, keys, ids=masked)
        inputs = inputs._replace(shift=shift)
        limits = tile.limits(self.problem.spec.mask, cta.walk.kv_len) if masked else Limits()
        return self.weights.early(tile, FusedScores(s, lse, inputs, limits))

    def late(self, cta: FusedCta, n, tile: RegisterTile, early, dp_acc):
        """Waits for dP^T and delta; returns P^T and dS^T in 16 bits."""
        slot = cta.do.slot(n)
        plgpu.barrier_wait(cta.bars.delta_full.at[slot])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        delta = plgpu.load(cta.smem.delta.at[slot], layout=inline.COLS)
        lse = plgpu.load(cta.smem.lse.at[cta.q.slot(n)], layout=inline.COLS)
        p, ds = self.weights.late(tile, early, lse, dp, delta)
        return p.astype(self.problem.dtype), ds.astype(self.problem.dtype)

    def tile(self, cta: FusedCta, block) -> RegisterTile:
        """Describes this warpgroup's part of the tile of a query block: its place and shape."""
        return RegisterTile(
            q_start=block * self.blocks.block_q + cta.walk.q_offset,
            kv_start=cta.keys.start + cta.wg * WARPGROUP_ROWS,
            shape=(WARPGROUP_ROWS, self.blocks.block_q),
            q_axis=1,
            interpret=self.interpret,
        )


@dataclasses.dataclass(frozen=True)
class GradientGemms(abc.ABC):
    """Base class of the two ways in which the warpgroups finish a step.

    Attributes:
        blocks: tile sizes.
        head_dim: the head dim that the kernel runs.
        interpret: run by the interpreter.
    """

    blocks: FusedBlocks
    head_dim: int
    interpret: bool

    @property
    def dq_accumulator(self):
        """Accumulator of this warpgroup's part of dQ."""
        return plgpu.ACC(self.blocks.dq_tile(self.head_dim), jnp.float32)

    def dq_operands(self, cta: FusedCta, ds_slot):
        """Returns the operands (dS, K) of this warpgroup's part of dQ = dS K.

        The part is half of the columns, or half of the query rows.
        """
        part = self.blocks.dq_tile(self.head_dim)
        ds = cta.smem.ds.at[ds_slot]
        if self.blocks.dq_by_rows:
            ds = cta.smem.ds.at[ds_slot, :, pl.ds(cta.wg * part[0], part[0])]
            return ds.transpose((1, 0)), cta.smem.k.at[cta.kv_slot]
        columns = pl.ds(cta.wg * part[1], part[1])
        return ds.transpose((1, 0)), cta.smem.k.at[cta.kv_slot, :, columns]

    def await_dq(self, cta: FusedCta, handed):
        """Waits until this warpgroup's dQ in shared memory may be overwritten.

        `handed`: positive where what lies there has been handed over.
        """
        if self.blocks.producer:
            pl.when(handed > 0)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[cta.wg]))
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def add_dq(self, cta: FusedCta, n):
        """Starts to add this warpgroup's part of the n-th dQ tile, in shared memory, to the buffer.

        With a producer this only signals that the part is there; the storing warp adds it.
        """
        if self.blocks.producer:
            plgpu.barrier_arrive(cta.bars.dq_full.at[cta.wg])
            return
        tile = cta.query_tile(n, self.blocks.block_q)
        target = cta.results.dq.at[cta.dq_part(tile, self.blocks, self.head_dim, cta.wg)]
        plgpu.copy_smem_to_gmem(cta.smem.dq.at[cta.wg], target, reduction_op=cta.reduction)

    def await_sums(self, cta: FusedCta, n):
        """Waits until dS of the n-th tile may be written, if dS of a cluster is summed."""
        if self.blocks.sums_bias:
            cta.sums.wait_empty(n)

    def tell_sums(self, cta: FusedCta, n):
        """Signals that this warpgroup's part of dS of the n-th tile has been written."""
        if self.blocks.sums_bias:
            plgpu.barrier_arrive(cta.sums.full.at[cta.sums.slot(n)])

    def release_q(self, cta: FusedCta, n):
        """Releases the n-th tile of Q, and of the bias, which a cluster loads together."""
        pipeline.cluster_release(self.blocks.bias_cluster, cta.q, n, self.interpret)

    @abc.abstractmethod
    def __call__(self, cta: FusedCta, n, p, ds, dk_acc, dv_acc):
        """Computes dV, dK and dQ of the n-th tile, from P^T and dS^T in 16 bits."""

    @abc.abstractmethod
    def start(self, cta: FusedCta):
        """Runs before the first tile."""

    @abc.abstractmethod
    def scores_issued(self, cta: FusedCta, n):
        """Runs when S^T and dP^T of the n-th tile have been issued."""

    @abc.abstractmethod
    def end(self, cta: FusedCta):
        """Runs after the last tile."""


class Lockstep(GradientGemms):
    """Finishes steps with warpgroups that meet in each, both of which compute half of its dQ."""

    def __call__(self, cta: FusedCta, n, p, ds, dk_acc, dv_acc):
        """Computes dV, dQ and dK of the n-th tile."""
        ds_slot = ints.remainder(cta.count(n), self.blocks.ds_stages)
        if self.blocks.ds_stages == 1:
            cta.meet()  # both have read the previous dS
        self.await_sums(cta, n)
        cta.smem.ds[ds_slot, warpgroup_rows(cta.wg)] = ds
        plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
        plgpu.commit_smem()
        self.tell_sums(cta, n)
        cta.meet()  # both have written dS

        def products(dq_acc):
            plgpu.wgmma(dq_acc, *self.dq_operands(cta, ds_slot))  # (5) dQ = dS K
            if self.blocks.takes_turns:
                inline.use_zero(self.interpret)
            plgpu.wgmma_wait(1)
            cta.do.release(n)
            plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
            self.await_dq(cta, cta.count(n))
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

        cta.smem.dq[cta.wg] = pl.run_scoped(products, self.dq_accumulator)
        plgpu.commit_smem()
        self.add_dq(cta, n)
        plgpu.wgmma_wait(0)
        self.release_q(cta, n)

    def start(self, cta: FusedCta):
        """Does nothing before the first tile: both warpgroups begin at the same time."""

    def scores_issued(self, cta: FusedCta, n):
        """Does nothing once products are issued: neither warpgroup waits for the other's."""

    def end(self, cta: FusedCta):
        """Does nothing after the last tile: every step has finished its own dQ."""


class PingPong(GradientGemms):
    """Finishes steps with warpgroups that take turns at the tensor cores, half a step apart.

    A warp that issues a wgmma waits until the tensor cores take it. So a warpgroup's exponentials
    do not overlap with its own products, only with those of the other warpgroup, if that is in
    another phase (ping-pong):

        warpgroup 0   | dQ' dV dK  S dP | exponentials, dS |                  | dQ' ...
        warpgroup 1   | exponentials, dS |                 | dQ dV dK  S dP   | ...

    A turn lasts from dQ to dP of the next tile. Warpgroup 1, the later one, finds that both halves
    of dS of its tile are there. Warpgroup 0 computes its part of dQ one tile late (dQ'), so dS has
    two slots: one may be overwritten once warpgroup 0 has had its next turn, before either writes
    it again.
    """

    def __call__(self, cta: FusedCta, n, p, ds, dk_acc, dv_acc):
        """Computes dQ, dV and dK of the n-th tile; warpgroup 0 computes dQ of the tile before."""
        slot = self.slot(cta, n)
        self.await_sums(cta, n)
        cta.smem.ds[slot, warpgroup_rows(cta.anew().wg)] = ds
        plgpu.commit_smem()
        self.tell_sums(cta, n)
        plgpu.barrier_arrive(cta.bars.ds_ready.at[slot])
        # ptxas would convert P when the tensor cores are ours already: 5 % at head dim 64.
        inline.settle(p, n, self.interpret)
        self.await_turn(cta)
        of_dq = handed = self.of_dq(cta, n)
        if cta.turns is not None:  # what lies there in the first turn is of the key block before
            handed = lax.select(n == 0, cta.before, handed)

        def products(dq_acc):
            written = lambda: self.slot(cta, of_dq)
            pl.when(of_dq >= 0)(lambda: plgpu.barrier_wait(cta.bars.ds_ready.at[written()]))
            plgpu.wgmma(dq_acc, *self.dq_operands(cta.anew(), written()))  # (5) dQ = dS K
            plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
            plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
            self.await_dq(cta, handed)
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)

        # Stored in the first turn too, though nobody is told: a branch around registers that
        # products have written makes ptxas end those in flight (C7517).
        cta.smem.dq[cta.anew().wg] = pl.run_scoped(products, self.dq_accumulator)
        if not self.blocks.late_handover:
            self.hand_over(cta, of_dq)
        plgpu.wgmma_wait(0)
        cta.do.release(n)
        self.release_q(cta, n)

    def start(self, cta: FusedCta):
        """Makes warpgroup 1 wait for the first products of the other."""
        pl.when(cta.wg == 1)(lambda: self.await_turn(cta))

    def of_dq(self, cta: FusedCta, n):
        """Returns the tile whose dQ is computed with dV and dK of the n-th.

        It is n for warpgroup 1 and n - 1 for warpgroup 0: -1 in the first turn of a KV block.
        """
        return n - (WARPGROUPS - 1 - cta.wg)

    def hand_over(self, cta: FusedCta, of_dq):
        """Hands this warpgroup's part of dQ of that tile, in shared memory, over to be added."""
        plgpu.commit_smem()
        pl.when(of_dq >= 0)(lambda: self.add_dq(cta, of_dq))

    def scores_issued(self, cta: FusedCta, n):
        """Ends the turn, and then hands over dQ if that is to come late."""
        self.pass_turn(cta)
        if self.blocks.late_handover:
            self.hand_over(cta, self.of_dq(cta, n - 1))

    def end(self, cta: FusedCta):
        """Gives warpgroup 1 its last turn; warpgroup 0 then computes its part of the last dQ."""
        if self.blocks.late_handover:
            self.hand_over(cta, self.of_dq(cta, cta.walk.total - 1))

        @pl.when(cta.wg == 0)
        def _():
            self.pass_turn(cta)
            last = functools.partial(self.last_dq, cta)
            cta.smem.dq[cta.wg] = pl.run_scoped(last, self.dq_accumulator)
            plgpu.commit_smem()
            self.add_dq(cta, cta.walk.total - 1)

    def last_dq(self, cta: FusedCta, dq_acc):
        """Computes this warpgroup's part of the last dQ, once both have written dS."""
        last = cta.walk.total - 1
        plgpu.barrier_wait(cta.bars.ds_ready.at[self.slot(cta, last)])
        plgpu.wgmma(dq_acc, *self.dq_operands(cta, self.slot(cta, last)))
        self.await_dq(cta, last)
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

    def slot(self, cta: FusedCta, n):
        """Returns the slot in which dS of the n-th tile lies; n may be -1."""
        slots = self.blocks.ds_stages
        return lax.rem(jnp.int32(cta.count(n) + slots), jnp.int32(slots))

    # The interpreter has no named barriers; mbarriers take their place there. With them the kernel
    # would be 1 to 14 % slower on H200.
    def await_turn(self, cta: FusedCta):
        """Waits until the other warpgroup has passed the turn."""
        if self.interpret:
            plgpu.barrier_wait(cta.bars.turn.at[cta.wg])
        else:
            inline.named_barrier("sync", cta.wg + inline.FIRST_NAMED_BARRIER, 128 * WARPGROUPS)

    def pass_turn(self, cta: FusedCta):
        """Passes the tensor cores to the other warpgroup."""
        other = WARPGROUPS - 1 - cta.wg
        if self.interpret:
            plgpu.barrier_arrive(cta.bars.turn.at[other])
        else:
            inline.named_barrier("arrive", other + inline.FIRST_NAMED_BARRIER, 128 * WARPGROUPS)


class FusedScores(NamedTuple):
    """A tile of scores and what belongs to it.

    Attributes:
        s: K Q^T, f32.
        lse: log-sum-exp of each query, base 2.
        inputs: inputs of the modifiers.
        limits: part of the tile that positions leave visible.
    """

    s: Any
    lse: Any
    inputs: TileInputs
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Weights(abc.ABC):
    """Base class of the two halves, each of which runs once per tile.

    Attributes:
        problem: what is computed.
        blocks: tile sizes.
    """

    problem: Problem
    blocks: FusedBlocks

    @property
    def factor(self) -> float:
        """Factor of P for which lse and delta must be made: see `BackwardArrays.scaled`."""
        return 1.0

    @abc.abstractmethod
    def early(self, tile: RegisterTile, scores: FusedScores):
        """Computes the tiles of registers that `late` needs, before dP^T has arrived."""

    @abc.abstractmethod
    def late(self, tile: RegisterTile, held, lse, dp, delta) -> tuple[Any, Any]:
        """Returns (keep * P, dS), f32, from what `early` has made, and lse, dP^T and delta."""

    def finished(self, dv):
        """Returns dV from the sum of products with keep * P."""
        return score_tile.gained(self.problem, dv)


class General(Weights):
    """P, pull(P) and the dropout mask in separate tiles, which serve every modifier."""

    def early(self, tile: RegisterTile, scores: FusedScores):
        """Returns (P without what dropout drops, pull(P), dropout mask)."""
        given = (scores.s, scores.lse, scores.inputs, scores.limits)
        w = score_tile.weights(self.problem, tile, *given, polynomials=self.blocks.polynomials)
        p, through = lax.optimization_barrier(
            (score_tile.dropped(self.problem, w), score_tile.pulled(w))
        )
        return p, through, w.kept

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Computes dS with a subtraction and a product."""
        p, through, kept = held
        return p, through * score_tile.centred(self.problem, kept, dp, tile.per_q(delta))


class Signed(Weights):
    """P that is negative where dropout drops it, for problems without other modifiers."""

    @property
    def factor(self) -> float:
        """Factor of P that goes with the sign."""
        return score_tile.sign_factor(self.problem)

    def early(self, tile: RegisterTile, scores: FusedScores):
        """Returns P times `factor`, f32, negative where dropout drops it."""
        return score_tile.signed(self.problem, tile, *scores)

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Returns (keep * gain * P, dS): signs become zeros."""
        return score_tile.of_signed(held, dp, tile.per_q(delta))

    def finished(self, dv):
        """Returns dv as it is, because `late` has multiplied by the gain."""
        return dv


class Deferred(Weights):
    """Logits over the cap, whose exponentials wait for dP^T, for problems with a softcap alone."""

    def early(self, tile: RegisterTile, scores: FusedScores):
        """Computes hyperbolic tangents: the logits over the cap."""
        return score_tile.capped(self.problem, tile, scores.s, scores.inputs, scores.limits)

    def late(self, tile: RegisterTile, held, lse, dp, delta):
        """Computes the exponentials, and dS from them."""
        spread = tile.per_q(lse), dp, tile.per_q(delta)
        share = self.blocks.polynomials
        return score_tile.of_capped(tile, held, *spread, polynomials=share)


def weights_of(problem: Problem, blocks: FusedBlocks) -> Weights:
    """Returns the way that the blocks ask for, where the problem allows it; else General."""
    if blocks.signs and score_tile.may_sign(problem):
        return Signed(problem, blocks)
    if blocks.defer and score_tile.may_defer(problem):
        return Deferred(problem, blocks)
    return General(problem, blocks)


# --- The producer warpgroup: a warp loads, another adds dQ to device memory -----------------------

LOAD_WARP, STORE_WARP = 0, 1


@dataclasses.dataclass(frozen=True)
class FusedProducer:
    """Copies of a CTA between device and shared memory, except those of dK and dV."""

    problem: Problem
    blocks: FusedBlocks
    interpret: bool

    def __call__(self, cta: FusedCta):
        """Runs the two warps of the producer over all tiles of this CTA."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == LOAD_WARP)(lambda: self.load(cta))
            pl.when(warp == STORE_WARP)(lambda: self.store_dq(cta))

    def load(self, cta: FusedCta):
        """Issues all loads of this CTA, then waits for the release of their slots."""
        cta.visit(self.load_walk)
        cta.q.drain(cta.tiles)
        cta.do.drain(cta.tiles)
        if cta.turns is not None:
            cta.kv.drain(cta.turns.count)

    def load_walk(self, cta: FusedCta):
        """Loads K and V once, then Q, LSE, dO and delta of every Q tile."""
        cta.kv.wait_empty(cta.turn)
        self.load_kv(cta)

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            place = self.place(cta, n)
            self.load_q(cta, n, place)
            self.load_do(cta, n, place)

    def load_kv(self, cta: FusedCta):
        """Loads K and V of this KV block."""
        slot = cta.kv_slot
        keys = (cta.keys.batch, pl.ds(cta.keys.start, self.blocks.block_kv), cta.keys.kv_head)
        block = lax.div(cta.keys.start, jnp.int32(self.blocks.block_kv))
        load_k, load_v = self.loaders(cta, cta.gmem.kv_padding)
        at = functools.partial(rows_of, tile=cta.smem.k)  # Q and dO are as wide
        k, v, full = cta.smem.k.at[slot], cta.smem.v.at[slot], cta.bars.kv_full.at[slot]
        load_k(at(cta.gmem.k, keys), k, full, cta.keys.batch, block)
        load_v(at(cta.gmem.v, keys), v, full, cta.keys.batch, block)

    def place(self, cta: FusedCta, n):
        """Returns (query head, rows, query block) of the n-th tile."""
        head, rows = cta.query_tile(n, self.blocks.block_q)
        return head, rows, cta.walk[n][1]

    def load_q(self, cta: FusedCta, n, place):
        """Loads Q of the n-th tile, which has this place, with its LSE and side inputs."""
        head, rows, block = place
        load, slot = self.loaders(cta, cta.gmem.q_padding)[0], cta.q.slot(n)
        source = rows_of(cta.gmem.q, (cta.keys.batch, rows, head), cta.smem.k)
        full = cta.bars.q_full.at[slot]
        cta.q.wait_empty(n)
        load(source, cta.smem.q.at[slot], full, cta.keys.batch, block)
        lse = cta.gmem.lse_log2.at[cta.keys.batch, head, rows]
        plgpu.copy_gmem_to_smem(lse, cta.smem.lse.at[slot], full)
        side = AuxiliaryInputs(self.problem, q_axis=1)
        if side.copies:
            where = cta.place(n, cta.keys.start, self.blocks.block_kv, self.blocks.block_q)
            shared = pipeline.multicast(self.blocks.bias_cluster)
            side.load(cta.gmem.side, cta.smem.side, slot, full, where, shared)

    def load_do(self, cta: FusedCta, n, place):
        """Loads dO and delta of the n-th tile, which has this place."""
        head, rows, block = place
        load, slot = self.loaders(cta, cta.gmem.q_padding)[1], cta.do.slot(n)
        source = rows_of(cta.gmem.do, (cta.keys.batch, rows, head), cta.smem.k)
        cta.do.wait_empty(n)
        full = cta.bars.do_full.at[slot]
        load(source, cta.smem.do.at[slot], full, cta.keys.batch, block)
        delta = cta.gmem.delta.at[cta.keys.batch, head, rows]
        plgpu.copy_gmem_to_smem(delta, cta.smem.delta.at[slot], cta.bars.delta_full.at[slot])

    def loaders(self, cta: FusedCta, padding: Padding | None) -> list[Loader]:
        """Returns the loaders of Q and K, and of dO and V; their tiles may differ in swizzle."""
        swizzles = swizzles_of_k_and_v(self.problem, self.blocks, cta.gmem)
        threads = WARP if self.blocks.producer else WARPGROUP
        make = lambda swizzle: Loader(padding, cta.bars.arrived, swizzle, self.interpret, threads)
        return list(map(make, swizzles))

    def store_dq(self, cta: FusedCta):
        """Adds each warpgroup's part of every dQ tile to the float32 buffer in device memory.

        It writes the parts instead where `Cta.adds` is false.
        """
        cta.visit(self.store_walk)
        plgpu.wait_smem_to_gmem(0)

    def store_walk(self, cta: FusedCta):
        """Adds the dQ tiles of one KV block."""

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            tile = cta.query_tile(n, self.blocks.block_q)
            if self.blocks.alternate:
                for wg in (1, 0):  # as they come
                    self.add_dq(cta, tile, wg)
                    self.give_back(cta, n, wg, 0)
            else:
                self.add_dq(cta, tile, 0)
                self.add_dq(cta, tile, 1)
                self.give_back(cta, n, 0, 1)
                self.give_back(cta, n, 1, 0)

    def add_dq(self, cta: FusedCta, tile, wg: int):
        """Waits for a warpgroup's part of a dQ tile and starts to add it."""
        plgpu.barrier_wait(cta.bars.dq_full.at[wg])
        target = cta.results.dq.at[cta.dq_part(tile, self.blocks, self.problem.head_dim, wg)]
        plgpu.copy_smem_to_gmem(cta.smem.dq.at[wg], target, reduction_op=cta.reduction)

    def give_back(self, cta: FusedCta, n, wg: int, in_flight: int):
        """Releases the dQ buffer once at most `in_flight` adds are still reading theirs."""
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        more = cta.count(n) + 1 < cta.tiles
        pl.when(more)(lambda: plgpu.barrier_arrive(cta.bars.dq_empty.at[wg]))


@dataclasses.dataclass(frozen=True)
class FusedInlineLoads:
    """Loads without a producer warpgroup, issued by the later of the two compute warpgroups.

    That warpgroup is the last to release a slot of Q or dO. It fills the slot at once, with the
    tile that is as many further on as there are slots.
    """

    producer: FusedProducer

    def start(self, cta: FusedCta) -> FusedCta:
        """Loads what the walk starts with; returns the CTA with rings that refill on release."""
        loads = cta.wg == WARPGROUPS - 1

        @pl.when(loads)
        def _():
            self.producer.load_kv(cta)
            for n in range(max(cta.q.slots, cta.do.slots)):
                for ring, load in self.rings(cta):
                    if n < ring.slots:
                        self.fill(cta, load, jnp.int32(n))

        def refilled(ring: Ring, load):
            fill = functools.partial(self.fill, cta, load)
            return ring._replace(refill=lambda n: pl.when(loads)(lambda: fill(n)))

        q, do = (refilled(*ring) for ring in self.rings(cta))
        return dataclasses.replace(cta, q=q, do=do)

    def rings(self, cta: FusedCta):
        """Returns each ring with the function that fills a slot of it."""
        return (cta.q, self.producer.load_q), (cta.do, self.producer.load_do)

    def fill(self, cta: FusedCta, load: Callable, n):
        """Loads the n-th tile, if there is one."""
        pl.when(n < cta.walk.total)(lambda: load(cta, n, self.producer.place(cta, n)))

    def end(self, cta: FusedCta):
        """Observes the releases that no later fill waited for."""

        @pl.when(cta.wg == WARPGROUPS - 1)
        def _():
            cta.q.drain(cta.walk.total)
            cta.do.drain(cta.walk.total)


# --- Zeros to add to: 134 MB in 32 us on an H200, where XLA takes 40 ------------------------------

ZEROS_CTAS = 2 * 132  # as many SMs as an H200 has; half and twice as many take as long
ZEROS_TILE = (128, 64)  # 32 KB, to be copied by TMA; twice as many bytes: 33 us


def zeros(shapes: list[tuple[int, ...]], interpret: bool, after=None) -> list:
    """Returns f32[shape] of zeros, for each shape, cleared in one launch.

    Args:
        shapes: shapes of a multiple of 64 elements each.
        interpret: run under the interpreter.
        after: an array that must exist before. XLA would otherwise clear early what is needed late.
    """
    lines = [math.prod(shape) // ZEROS_TILE[1] for shape in shapes]
    ctas = min(sum(pl.cdiv(rows, ZEROS_TILE[0]) for rows in lines), ZEROS_CTAS)
    run = launch(
        functools.partial(_clear, ctas),
        out=[float32((rows, ZEROS_TILE[1])) for rows in lines],
        scratch=[plgpu.SMEM(ZEROS_TILE, jnp.float32)],
        grid={"cta": ctas},
        threads=1,
        name="flash_pallas_zeros",
        interpret=interpret,
    )
    return [x.reshape(shape) for x, shape in zip(run(after), shapes, strict=True)]


def _clear(ctas: int, _, *refs):
    """Clears every `ctas`-th tile of each array; TMA writes nothing past the end of the last."""
    *arrays, tile = refs
    layout = plgpu.Layout.WG_STRIDED(tile.shape, vec_size=4)
    tile[...] = plgpu.layout_cast(jnp.zeros(ZEROS_TILE, jnp.float32), layout)
    plgpu.commit_smem()
    cta, rows = lax.axis_index("cta"), ZEROS_TILE[0]
    for out in arrays:

        @pl.loop(cta, jnp.int32(pl.cdiv(out.shape[0], rows)), step=jnp.int32(ctas))
        def _(n, out=out):
            plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(n * rows, rows)])

    plgpu.wait_smem_to_gmem(0)


# --- One call: its arrays, its launches one after the other, its gradients ------------------------

# XLA computes constants that are progressions, in a launch of 2 us; others lie in device memory.
NO_PROGRESSION = -(2**20)


def backward_fused(
    problem: Problem,
    blocks: FusedBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    clears: bool,
    interpret: bool,
):
    """Runs all launches of the fused backward.

    Args:
        problem: a problem with the head dims that the kernel runs.
        blocks: tile sizes.
        operands: the operands of the call.
        arrays: the arrays that a backward kernel reads.
        clears: padding may hold NaN and is cleared; otherwise it holds 0.
        interpret: run by the interpreter.

    Returns:
        (dq, dk, dv, dbias): in the dtypes and shapes of `arrays`, but dq is as wide as the kernel
        runs it; dbias has the dtype and shape of the bias, or is None without blocks.bias_cluster.
    """
    tile = (blocks.block_q, blocks.block_kv)
    given = arrays.for_rows(problem, operands, 1, tile)
    factor = weights_of(problem, blocks).factor
    if factor != 1.0:
        given = given.scaled(factor)
    if clears:
        given = given.with_padding(operands, *tile)
    return FusedCall(problem, blocks, arrays, interpret)(given)


@dataclasses.dataclass(frozen=True)
class FusedCall:
    """The portions of a call's pairs of a batch entry and a key head, run one after the other.

    Attributes:
        problem: a problem with the head dims that the kernel runs.
        blocks: tile sizes.
        like: arrays whose q, k and v have the shapes of gradients.
        interpret: run by the interpreter.
    """

    problem: Problem
    blocks: FusedBlocks
    like: BackwardArrays
    interpret: bool

    def __call__(self, given: BackwardArrays):
        """Returns (dq, dk, dv, dbias)."""
        starts = origins(self.problem, self.blocks)
        if len(starts) == 1:
            found, dbias = self.portion(FusedResults(), self.whole_bias, given)
            dq = self.dq(found.dq)
        else:
            found, dq, dbias = self.portions(starts, given)
        if dbias is None:
            dbias = gradient_of_bias(self.problem, found.dbias)
        dk, dv = found.dk, found.dv
        if self.blocks.parts > 1:
            dk, dv = summed(dk, self.like.k), summed(dv, self.like.v)
        return dq, dk, dv, dbias

    def portions(self, starts: list[tuple[int, int]], given: BackwardArrays):
        """Runs the portions that begin at `starts`; returns (what the last one left, dq, dbias)."""
        dq = lax.empty((*self.like.q.shape[:3], self.problem.head_dim), self.problem.dtype)
        found, dbias = FusedResults(), self.whole_bias
        portion = jax.jit(self.portion)  # all but the first are traced once
        for start in starts:
            # Begins when the gradients of the portion before it are there: sums of one at a time.
            found, dq, dbias = lax.optimization_barrier((found, dq, dbias))
            origin = jnp.array((*start, NO_PROGRESSION), jnp.int32)
            found, dbias = portion(found, dbias, given._replace(origin=origin))
            place = start[0], 0, start[1] * self.problem.group, 0
            dq = lax.dynamic_update_slice(dq, self.dq(found.dq), place)
            found = found._replace(dq=None)
        return found, dq, dbias

    def portion(self, found: FusedResults, dbias, given: BackwardArrays):
        """Runs the launches of one portion; returns `found` and `dbias` with what they add."""
        wanted = self.may_leave and backward_gains(self.problem)
        for each in launches_of(self.problem, self.blocks):
            part, *rest = parts(self.problem, each.pairs * each.key_blocks, wanted)
            found = self.launch(dataclasses.replace(each, part=part), found, given)
            for other in rest:
                again = dataclasses.replace(self, blocks=for_far_rows(each.pairs))
                found = again.launch(dataclasses.replace(each, part=other), found, given)
            if self.blocks.key_launches > 1:
                found, dbias = self.put(found, dbias, given, each.first_block)
        if found.dbias is not None and dbias is not None:
            found, dbias = self.put(found, dbias, given, 0)
        return found, dbias

    @property
    def may_leave(self) -> bool:
        """True if groups of heads may be left to another launch; nothing else was tried."""
        blocks = self.blocks
        alone = blocks.launches == blocks.key_launches == blocks.parts == 1
        return blocks.producer and alone and not (blocks.first_alone or blocks.takes_turns)

    def put(self, found: FusedResults, dbias, given: BackwardArrays, first_block: int):
        """Puts the gradient of some heads and keys of the bias in its place, and drops its sums."""
        first_key = first_block * self.blocks.block_kv
        part = gradient_of_bias(self.problem, found.dbias, first_key)
        head = 0 if given.origin is None else given.origin[1] * self.problem.group
        dbias = lax.dynamic_update_slice(dbias, part, (0, head, 0, first_key))
        return lax.optimization_barrier((found._replace(dbias=None), dbias))

    @property
    def whole_bias(self):
        """Array in which parts of the bias gradient are put; None if it is summed at one time."""
        if self.blocks.key_launches == 1 and not by_heads(self.problem, self.blocks):
            return None
        return lax.empty(self.problem.bias_shape, self.problem.bias_dtype)

    def launch(self, each: Launch, found: FusedResults, given: BackwardArrays) -> FusedResults:
        """Returns `found` with what this launch adds; results that are not there yet are made."""
        shapes = self.shapes(each)
        held = {name: getattr(found, name) for name in shapes if getattr(found, name) is not None}
        added = {"dbias"} | ({"dq"} if each.adds else set())
        if cleared := [name for name in shapes if name in added and name not in held]:
            sizes = [shapes[name].shape for name in cleared]
            held |= zip(cleared, zeros(sizes, self.interpret, found.dk), strict=True)
        out = {name: shape for name, shape in shapes.items() if name not in held}
        made = {name: jnp.zeros(x.shape, x.dtype) for name, x in out.items()}  # XLA drops these
        fused = FusedKernel(self.problem, self.blocks, each, self.interpret)

        def kernel(kept, gmem, *refs):
            *new, smem, bars = refs
            fused(FusedResults(**kept, **dict(zip(made, new, strict=True))), gmem, smem, bars)

        def write(refs):
            kept, new = refs
            written = self.run(each, functools.partial(kernel, kept), tuple(out.values()))(given)
            for name, x in zip(made, written, strict=True):
                new[name][...] = x

        held, made = pl.run_state(write)((held, made))
        return FusedResults(**held, **made)

    def shapes(self, each: Launch) -> dict[str, Any]:
        """Returns the shapes of the Results that exist: sums of dQ and of the bias, dK and dV."""
        problem, blocks, like = self.problem, self.blocks, self.like
        # dQ is [B, T, N, D] like q: no transpose afterwards, and the adds are as fast as head-major
        # (1.00x).
        sums = (each.entries, like.q.shape[1], each.heads * problem.group, problem.head_dim)
        of_k, of_v = (jax.ShapeDtypeStruct(x.shape, problem.dtype) for x in (like.k, like.v))
        if blocks.parts > 1:  # whole tiles, as what writes them knows no ends
            rows = each.key_blocks * blocks.block_kv
            keys = (problem.batch, rows, problem.kv_heads, problem.head_dim)
            of_k = of_v = float32((blocks.parts, *keys))
        found = {"dq": float32(sums), "dk": of_k, "dv": of_v}
        if blocks.sums_bias:
            entries, heads = problem.bias_shape[:2]
            if by_heads(problem, blocks):
                heads = sums[2]
            keys = -(-problem.kv_len // blocks.block_kv) // blocks.key_launches * blocks.block_kv
            queries = ints.round_up(problem.q_len, blocks.block_q)
            found["dbias"] = float32((entries, heads, keys, queries))
        return found

    def run(self, each: Launch, kernel, out):
        """Returns the Pallas call of one launch."""
        return launch(
            kernel,
            out=out,
            scratch=scratch(self.problem, self.blocks, self.like, self.interpret),
            grid=FusedScheduler(self.problem, self.blocks, each).grid,
            cluster=pipeline.cluster_axes(self.blocks.bias_cluster),
            threads=WARPGROUPS + self.blocks.producer + self.blocks.sums_bias,
            name="flash_pallas_backward_fused" + "_far" * (each.part is Part.FAR),
            interpret=self.interpret,
        )

    def dq(self, sums):
        """Returns dQ in the problem's dtype, from its float32 sums without the scale."""
        return (sums * self.problem.spec.scale).astype(self.problem.dtype)
