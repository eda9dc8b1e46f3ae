"""The fused backward: all five products of FlashAttention-2's Algorithm 2 in one kernel.

A KV-stationary CTA owns 128 keys of one key head (two compute warpgroups, 64 keys each) and loops
over the Q tiles of every query head of its group. Scores are held transposed, so that P^T and dS^T
come out of the registers as left operands of the products that consume them:

    (1) S^T  = K Q^T           shared x shared
    (2) dP^T = V dO^T          shared x shared
    (3) dV  += P^T dO          registers x shared
    (4) dK  += dS^T Q          registers x shared
    (5) dQ   = dS K            shared (dS^T of both warpgroups, read transposed) x shared

The order in which the two warpgroups run (3) to (5) is in fused_finish.py.

dK and dV stay in registers for the whole walk. Each dQ tile goes to float32 shared memory, and a
warp of the producer warpgroup adds it to a float32 buffer in device memory by TMA reduce-add. The
order of those adds differs from run to run, and with it the last bits of dQ; backward_dkv.py and
backward_dq.py are the deterministic pair. The gradient of a bias may be added up here too:
fused_bias.py.

    K, V            loaded once per key block; dK and dV are staged in them at the end. One slot
                    each, or kv_stages where a CTA takes several key blocks
    Q with lse      q ring; dO with delta: do ring (delta has a barrier of its own)
    dS^T            ds slots, written by both warpgroups, read by both
    dQ              one float32 slot per warpgroup, handed to the storing warp and back
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from ...core.tile import Limits
from ..mosaic import inline, registers
from ..mosaic.launch import WARPGROUP_ROWS
from ..mosaic.recompute import RowShift
from ..mosaic.register_tile import RegisterTile
from . import cluster
from .arrays import BackwardArrays
from .far_rows import Part
from .fused_bias import BiasSums
from .fused_blocks import FusedBlocks
from .fused_cta import Cta, KeyBlock, Results
from .fused_finish import Alternating, Finish, Together
from .fused_launches import Launch
from .fused_layout import WARPGROUPS, Barriers, Smem, swizzles_of_k_and_v
from .fused_order import Order
from .fused_producer import Feeder, Producer
from .fused_weights import Scores, Weights, weights_of
from .memory import Ring, rows_of, warpgroup_rows
from .query_walk import QueryWalk
from .side_inputs import Held, Place, SideInputs


@dataclasses.dataclass(frozen=True)
class Fused:
    """One launch of the fused backward; the methods are the phases of a CTA."""

    problem: Problem
    blocks: FusedBlocks
    launch: Launch
    interpret: bool

    @property
    def side(self) -> SideInputs:
        """Side inputs, which modifiers read."""
        return SideInputs(self.problem, q_axis=1)

    @property
    def finish(self) -> Finish:
        """Second half of every step: dV, dK and dQ."""
        way = Alternating if self.blocks.alternate else Together
        return way(self.blocks, self.problem.head_dim, self.interpret)

    @property
    def weights(self) -> Weights:
        """Elementwise part of every step: from S^T and dP^T to P^T and dS^T."""
        return weights_of(self.problem, self.blocks)

    @property
    def order(self) -> Order:
        """Order of the key blocks: which CTA takes which."""
        return Order(self.problem, self.blocks, self.launch)

    @property
    def producer(self) -> Producer:
        """Producer, which loads tiles and adds dQ into device memory."""
        return Producer(self.problem, self.blocks, self.interpret)

    def __call__(self, results: Results, gmem: BackwardArrays, smem: Smem, bars: Barriers):
        if self.blocks.takes_turns:
            self.work_in_turns(results, gmem, smem, bars)
            return
        size, total, pairs = self.blocks.bias_cluster, self.launch.pairs, self.order.at_once
        within = lax.axis_index("pair") * size + cluster.rank(size)
        pair = lax.axis_index("section") * pairs + within
        work = functools.partial(self.work, results, gmem, smem, bars, pair)
        if total % pairs == 0:
            work()
        else:  # the last section is smaller
            pl.when(pair < total)(work)

    def work(self, results: Results, gmem: BackwardArrays, smem: Smem, bars: Barriers, pair):
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

    def work_in_turns(self, results: Results, gmem: BackwardArrays, smem: Smem, bars: Barriers):
        """Runs a CTA that has several key blocks; all of them have the same walk."""
        turns, zero = self.order.turns(gmem), jnp.int32(0)
        first = KeyBlock(zero, zero, zero, 0)
        if self.launch.part is Part.FAR:
            walk = QueryWalk.whole(self.problem, gmem, self.blocks.block_kv, self.blocks.block_q)
        else:
            walk = self.query_walk(gmem, first, zero)
        cta = self.cta(results, gmem, smem, bars, first, walk)
        self.run(dataclasses.replace(cta, turns=turns))

    def query_walk(self, gmem: BackwardArrays, keys: KeyBlock, block) -> QueryWalk:
        """Returns the walk over Q tiles of a key block, which is the `block`-th of its head."""
        size = self.blocks.block_kv, self.blocks.block_q
        loops = {"mask_all": self.blocks.mask_all, "shift": keys.shift}
        return QueryWalk.of(self.problem, gmem, (keys.batch, block), *size, **loops)

    def cta(self, results, gmem, smem: Smem, bars: Barriers, keys: KeyBlock, walk) -> Cta:
        """Returns the record of this CTA at a key block, with the walk over its Q tiles."""
        blocks = self.blocks
        return Cta(
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

    def run(self, cta: Cta):
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

    def consume(self, cta: Cta):
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = Feeder(self.producer).start(cta)
        cta.visit(self.key_block)
        if self.blocks.parts == 1:
            plgpu.wait_smem_to_gmem(0)
        if self.blocks.sums_bias:
            cta.sums.drain(cta.tiles)  # nobody reads dS of this CTA any more

    def key_block(self, cta: Cta):
        """Computes and writes dK and dV of one key block, and adds its part of dQ."""
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        dk, dv = pl.run_scoped(functools.partial(self.walk, cta), accumulator, accumulator)
        dk, dv = dk * self.problem.spec.scale, self.weights.finished(dv)
        if cta.turns is not None:
            cta = cta.anew().at(cta.turns, lax.optimization_barrier(cta.turn))
        (self.store if self.blocks.parts == 1 else self.store_part)(cta, dk, dv)

    def store(self, cta: Cta, dk, dv):
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

    def store_part(self, cta: Cta, dk, dv):
        """Writes what one part of the walk adds to dK and dV of this warpgroup's keys, in float32.

        Straight from registers: four threads write the 32 bytes of a sector.
        """
        at = self.own_keys(cta)
        cta.results.dk[at], cta.results.dv[at] = dk, dv
        plgpu.wait_smem_to_gmem(0)  # dQ's adds, where there is no producer

    def store_nothing(self, cta: Cta):
        """Writes the zeros that a part without tiles adds."""
        tile = jnp.zeros((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        self.store_part(cta, *[plgpu.layout_cast(tile, inline.WGMMA)] * 2)

    def own_keys(self, cta: Cta):
        """Returns (batch entry, keys of this warpgroup, key head), an index into dK and dV."""
        rows = pl.ds(cta.keys.start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        return cta.keys.batch, rows, cta.keys.kv_head

    def walk(self, cta: Cta, dk_acc, dv_acc):
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
            Feeder(self.producer).end(cta)
        return dk_acc[...], dv_acc[...]

    def far(self, cta: Cta):
        """Returns an i32, not 0 if rows of the group are shifted.

        Returns None where no row can be, and where those that are get left to Part.FAR.
        """
        if self.launch.part is Part.NEAR:
            return None
        head = cta.keys.kv_head * self.problem.group
        return self.side.far(cta.gmem.side, cta.keys.batch, head)

    def visit(self, cta: Cta, step, far):
        """Calls `step` for every tile, in the loops that `far` and this launch's part ask for."""
        far_step = functools.partial(step, far=far)
        if self.launch.part is Part.NEAR:
            cta.walk.visit(step)
        elif self.launch.part is Part.FAR:
            cta.walk.visit(far_step, in_one_loop=True)
        else:
            cta.walk.visit(step, far, far_step)

    def own_place(self, cta: Cta, n) -> Place:
        """Returns the place of this warpgroup's part of the n-th tile."""
        first = cta.keys.start + cta.wg * WARPGROUP_ROWS
        return cta.place(n, first, WARPGROUP_ROWS, self.blocks.block_q)

    def step(self, cta: Cta, held: Held, sums, n, block, *, masked, far=None):
        """Computes the five products of the n-th tile; `far` where rows of it may be shifted."""
        if far is not None:
            cta = cta.apart()
        p, ds = self.score_gradients(cta, held, (n, block), masked, far)
        self.finish(cta, n, p, ds, *sums)

    def score_gradients(self, cta: Cta, held: Held, at, masked, far):
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
                registers.use_zero(self.interpret)
            self.finish.scores_issued(cta, n)
            return self.late(cta, n, tile, early(s_acc, 1), dp_acc)

        def alone(s_acc):
            plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
            return early(s_acc, 0)

        def late(w, dp_acc):
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
            self.finish.scores_issued(cta, n)
            return self.late(cta, n, tile, w, dp_acc)

        # Accumulators are made after the waits: see Scores.tile in backward_scores.py.
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_q), jnp.float32)
        cta.q.wait_full(n)
        # With the shift of every column there is no room for dP^T beside it.
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

    def early(self, cta: Cta, held: Held, n, tile: RegisterTile, masked, s, shift):
        """Computes what can be made of S^T before dP^T has arrived."""
        slot, keys = cta.q.slot(n), warpgroup_rows(cta.wg)
        lse = plgpu.load(cta.smem.lse.at[slot], layout=inline.COLS)
        inputs = self.side.inputs(held, cta.smem.side, slot, s.shape, keys, ids=masked)
        inputs = inputs._replace(shift=shift)
        limits = tile.limits(self.problem.spec.mask, cta.walk.kv_len) if masked else Limits()
        return self.weights.early(tile, Scores(s, lse, inputs, limits))

    def late(self, cta: Cta, n, tile: RegisterTile, early, dp_acc):
        """Waits for dP^T and delta; returns P^T and dS^T in 16 bits."""
        slot = cta.do.slot(n)
        plgpu.barrier_wait(cta.bars.delta_full.at[slot])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        delta = plgpu.load(cta.smem.delta.at[slot], layout=inline.COLS)
        lse = plgpu.load(cta.smem.lse.at[cta.q.slot(n)], layout=inline.COLS)
        p, ds = self.weights.late(tile, early, lse, dp, delta)
        return p.astype(self.problem.dtype), ds.astype(self.problem.dtype)

    def tile(self, cta: Cta, block) -> RegisterTile:
        """Describes this warpgroup's part of the tile of a query block: its place and shape."""
        return RegisterTile(
            q_start=block * self.blocks.block_q + cta.walk.q_offset,
            kv_start=cta.keys.start + cta.wg * WARPGROUP_ROWS,
            shape=(WARPGROUP_ROWS, self.blocks.block_q),
            q_axis=1,
            interpret=self.interpret,
        )
