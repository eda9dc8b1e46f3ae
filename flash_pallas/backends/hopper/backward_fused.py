"""The fused backward: all five products of FlashAttention-2's Algorithm 2 in one kernel.

A CTA owns 128 keys of one key head (two compute warpgroups, 64 keys each) and walks the query tiles
of every head of its group. Scores are held transposed, so that P^T and dS^T come out of the
registers as left operands of the products that consume them:

    (1) S^T  = K Q^T           shared x shared
    (2) dP^T = V dO^T          shared x shared
    (3) dV  += P^T dO          registers x shared
    (4) dK  += dS^T Q          registers x shared
    (5) dQ   = dS K            shared (dS^T of both warpgroups, read transposed) x shared

dK and dV stay in registers for the whole walk. Each dQ tile goes to float32 shared memory, and a
warp of the producer warpgroup adds it to a float32 buffer in device memory by TMA reduce-add. The
order of those adds differs from run to run, and with it the last bits of dQ; backward_dkv.py and
backward_dq.py are the deterministic pair.

    K, V            one slot each, loaded once; dK and dV are staged in them at the end
    Q with lse      q ring; dO with delta: do ring (delta has a barrier of its own)
    dS^T            ds slots, written by both warpgroups, read by both: `ds_ready` counts them in
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

from ...core import integers as ints
from ...core.problem import Operands, Problem
from ...core.tile import Limits
from . import inline, recompute
from .arrays import BackwardArrays
from .fused_blocks import FusedBlocks
from .fused_cta import Barriers, Cta, Smem, scratch
from .key_walk import mask_everywhere
from .memory import WARPGROUP_ROWS, Ring, launch, warpgroup_rows
from .query_walk import QueryWalk
from .register_tile import RegisterTile
from .side_inputs import Held, Place, SideInputs

LOAD_WARP, STORE_WARP = 0, 1


@dataclasses.dataclass(frozen=True)
class Fused:
    """One launch; the methods are the phases of a CTA."""

    problem: Problem
    blocks: FusedBlocks
    interpret: bool

    @property
    def side(self) -> SideInputs:
        """What modifiers read."""
        return SideInputs(self.problem, q_axis=1)

    def __call__(self, dq, gmem: BackwardArrays, dk, dv, smem: Smem, bars: Barriers):
        batch, block = lax.axis_index("batch"), lax.axis_index("kv")
        at, size = (batch, block), (self.blocks.block_kv, self.blocks.block_q)
        cta = Cta(
            gmem=gmem,
            dq=dq,
            dk=dk,
            dv=dv,
            smem=smem,
            bars=bars,
            q=Ring(bars.q_full, bars.q_empty, self.blocks.stages),
            do=Ring(bars.do_full, bars.do_empty, self.blocks.do_stages),
            batch=batch,
            kv_head=lax.axis_index("head"),
            kv_start=block * self.blocks.block_kv,
            walk=QueryWalk.of(self.problem, gmem, at, *size),
            wg=lax.axis_index("wg"),
        )
        pl.when(cta.wg < self.blocks.warpgroups)(lambda: self.consume(cta))
        pl.when(cta.wg == self.blocks.warpgroups)(lambda: self.produce(cta))
        if self.blocks.dq_warpgroup:
            pl.when(cta.wg == self.blocks.warpgroups + 1)(lambda: self.consume_ds(cta))

    # --- the producer: one warp loads, another adds dQ into device memory ------------------------

    def produce(self, cta: Cta):
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == LOAD_WARP)(lambda: self.load(cta))
            if self.blocks.own_dq or self.blocks.late_dq:
                for wg in range(self.blocks.warpgroups):
                    pl.when(warp == STORE_WARP + wg)(lambda wg=wg: self.store_dq(cta, (wg,)))
            else:
                parts = tuple(range(self.blocks.dq_parts))
                pl.when(warp == STORE_WARP)(lambda: self.store_dq(cta, parts))

    def load(self, cta: Cta):
        """K and V once, then Q, lse, dO and delta of every query tile."""
        keys = (cta.batch, pl.ds(cta.kv_start, self.blocks.block_kv), cta.kv_head)
        plgpu.copy_gmem_to_smem(cta.gmem.k.at[keys], cta.smem.k, cta.bars.kv_full)
        plgpu.copy_gmem_to_smem(cta.gmem.v.at[keys], cta.smem.v, cta.bars.kv_full)

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            head, rows = self.query_tile(cta, n)
            tile, row = (cta.batch, rows, head), (cta.batch, head, rows)
            slot = cta.q.slot(n)
            cta.q.wait_empty(n)
            plgpu.copy_gmem_to_smem(
                cta.gmem.q.at[tile], cta.smem.q.at[slot], cta.bars.q_full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                cta.gmem.lse_log2.at[row], cta.smem.lse.at[slot], cta.bars.q_full.at[slot]
            )
            if self.side.copies:
                place = self.place(cta, n, cta.kv_start, self.blocks.block_kv)
                self.side.load(cta.gmem.side, cta.smem.side, slot, cta.bars.q_full.at[slot], place)
            slot = cta.do.slot(n)
            cta.do.wait_empty(n)
            plgpu.copy_gmem_to_smem(
                cta.gmem.do.at[tile], cta.smem.do.at[slot], cta.bars.do_full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                cta.gmem.delta.at[row], cta.smem.delta.at[slot], cta.bars.delta_full.at[slot]
            )

        cta.q.drain(cta.walk.total)
        cta.do.drain(cta.walk.total)

    def store_dq(self, cta: Cta, parts):
        """Add each warpgroup's part of every dQ tile to the float32 buffer."""

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            head, rows = self.query_tile(cta, n)
            for wg in parts:
                plgpu.barrier_wait(cta.bars.dq_full.at[wg])
                plgpu.copy_smem_to_gmem(
                    cta.smem.dq.at[wg],
                    cta.dq.at[self.dq_part(cta, head, rows, wg)],
                    reduction_op="add",
                )
            for i, wg in enumerate(parts):
                plgpu.wait_smem_to_gmem(len(parts) - 1 - i, wait_read_only=True)
                pl.when(n + 1 < cta.walk.total)(
                    lambda wg=wg: plgpu.barrier_arrive(cta.bars.dq_empty.at[wg])
                )

        plgpu.wait_smem_to_gmem(0)

    def query_tile(self, cta: Cta, n):
        """(query head, rows) of the n-th tile of the walk."""
        head, block = cta.walk[n]
        return cta.kv_head * self.problem.group + head, pl.ds(
            block * self.blocks.block_q, self.blocks.block_q
        )

    def place(self, cta: Cta, n, kv_start, rows: int) -> Place:
        """Of the n-th tile of the walk against some keys."""
        head, queries = self.query_tile(cta, n)
        return Place(cta.batch, head, kv_start, queries.start, rows, self.blocks.block_q)

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: Cta):
        plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        keys, head_dim = warpgroup_rows(cta.wg), self.problem.head_dim
        accumulator = plgpu.ACC((WARPGROUP_ROWS, head_dim), jnp.float32)
        dk, dv = pl.run_scoped(functools.partial(self.walk, cta), accumulator, accumulator)
        if self.blocks.dq_warpgroup:
            plgpu.barrier_wait(cta.bars.k_free)
        elif not self.blocks.own_dq:
            self.meet(cta)  # both warpgroups have read K for the last time
        cta.smem.k[keys] = (dk * self.problem.spec.scale).astype(self.problem.dtype)
        cta.smem.v[keys] = recompute.gained(self.problem, dv).astype(self.problem.dtype)
        plgpu.commit_smem()
        rows = pl.ds(cta.kv_start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        at = (cta.batch, rows, cta.kv_head)
        plgpu.copy_smem_to_gmem(cta.smem.k.at[keys], cta.dk.at[at], commit_group=False)
        plgpu.copy_smem_to_gmem(cta.smem.v.at[keys], cta.dv.at[at])
        plgpu.wait_smem_to_gmem(0)

    def walk(self, cta: Cta, dk_acc, dv_acc):
        """Every query tile of every head of the group; masked tiles are a loop of their own."""
        plgpu.barrier_wait(cta.bars.kv_full)

        held = self.side.hold_rows(cta.gmem.side, self.own_place(cta, 0))
        if self.problem.group == 1:
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, 0))
        mask_all = self.blocks.mask_all or mask_everywhere(self.problem)
        if self.blocks.early_s:
            step = functools.partial(self.step_early, cta, held, dk_acc, dv_acc)
            cta.q.wait_full(0)
            first = lambda s_acc: self.scores(cta, 0, s_acc, 0)
            s = pl.run_scoped(first, plgpu.ACC(self.shape, jnp.float32))
            cta.walk.visit(step, mask_all, s)
            plgpu.wgmma_wait(0)
            cta.q.release(cta.walk.total - 1)
        else:
            step = self.step_apart if self.blocks.dq_warpgroup else self.step
            step = self.step_late if self.blocks.late_dq else step
            step = self.step_first if self.blocks.dq_first else step
            step = functools.partial(step, cta, held, dk_acc, dv_acc)
            cta.walk.visit(step, mask_all)
            if self.blocks.in_flight:
                plgpu.wgmma_wait(0)
                cta.do.release(cta.walk.total - 1)
                cta.q.release(cta.walk.total - 1)
            if self.blocks.late_dq:
                self.last_dq(cta)
        return dk_acc[...], dv_acc[...]

    @property
    def shape(self) -> tuple[int, int]:
        """Of a warpgroup's tile."""
        return WARPGROUP_ROWS, self.blocks.block_q

    def scores(self, cta: Cta, n, s_acc, wait_n):
        keys = warpgroup_rows(lax.optimization_barrier(cta.wg))
        q = cta.smem.q.at[cta.q.slot(n)]
        plgpu.wgmma(s_acc, cta.smem.k.at[keys], q.transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(s_acc, wait_n=wait_n)

    def step_early(self, cta: Cta, held: Held, dk_acc, dv_acc, n, block, s, *, masked):
        """(2) to (5) of the n-th tile and (1) of the next one."""
        if self.problem.group > 1:
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, n))
        cta.do.wait_full(n)
        accumulator = plgpu.ACC(self.shape, jnp.float32)

        def gradients(dp_acc):
            keys = warpgroup_rows(lax.optimization_barrier(cta.wg))
            do = cta.smem.do.at[cta.do.slot(n)]
            plgpu.wgmma(dp_acc, cta.smem.v.at[keys], do.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # dK of the tile before
            pl.when(n > 0)(lambda: cta.q.release(n - 1))
            return self.pointwise(cta, held, n, block, masked, s, dp_acc)

        p, ds = pl.run_scoped(gradients, accumulator)
        own = warpgroup_rows(cta.wg)
        cta.smem.ds[0, own] = ds
        plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
        plgpu.commit_smem()
        pl.when(n + 1 < cta.walk.total)(lambda: cta.q.wait_full(n + 1))

        def products(dq_acc, s_acc):
            own = warpgroup_rows(lax.optimization_barrier(cta.wg))
            ds_part = cta.smem.ds.at[0, own].transpose((1, 0))
            plgpu.wgmma(dq_acc, ds_part, cta.smem.k.at[own])  # (5) dQ = dS K
            q = cta.smem.q.at[cta.q.slot(n + 1)]  # past the last tile: an old one, for nothing
            plgpu.wgmma(s_acc, cta.smem.k.at[own], q.transpose((1, 0)))
            plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
            plgpu.wgmma_wait(3)
            cta.do.release(n)
            pl.when(n > 0)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[cta.wg]))
            cta.smem.dq[cta.wg] = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)
            plgpu.commit_smem()
            plgpu.barrier_arrive(cta.bars.dq_full.at[cta.wg])
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

        dq_tile = self.blocks.dq_tile(self.problem.head_dim)
        return pl.run_scoped(products, plgpu.ACC(dq_tile, jnp.float32), accumulator)

    def pointwise(self, cta: Cta, held: Held, n, block, masked, s, dp_acc, wait_n=0):
        """P^T and dS^T in 16 bits."""
        q_slot, do_slot = cta.q.slot(n), cta.do.slot(n)
        keys, tile = warpgroup_rows(cta.wg), self.tile(cta, block)
        lse = plgpu.load(cta.smem.lse.at[q_slot], layout=inline.COLS)
        inputs = self.side.inputs(held, cta.smem.side, q_slot, self.shape, keys)
        limits = tile.limits(self.problem.spec.mask, cta.walk.kv_len) if masked else Limits()
        w = recompute.weights(self.problem, tile, s, lse, inputs, limits)
        p, through = lax.optimization_barrier(
            (recompute.dropped(self.problem, w), recompute.pulled(w))
        )
        plgpu.barrier_wait(cta.bars.delta_full.at[do_slot])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=wait_n)
        delta = plgpu.load(cta.smem.delta.at[do_slot], layout=inline.COLS)
        ds = through * recompute.centred(self.problem, w.kept, dp, tile.per_q(delta))
        return p.astype(self.problem.dtype), ds.astype(self.problem.dtype)

    def own_place(self, cta: Cta, n) -> Place:
        """Of this warpgroup's part of the n-th tile."""
        return self.place(cta, n, cta.kv_start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def step(self, cta: Cta, held: Held, dk_acc, dv_acc, n, block, carry, *, masked):
        """The five products of the n-th tile."""
        p, ds = self.score_gradients(cta, held, n, block, masked)
        ds_slot = ints.remainder(n, self.blocks.ds_stages)
        if self.blocks.ds_stages == 1 and not self.blocks.own_dq:
            self.meet(cta)  # both have read the previous dS
        cta.smem.ds[ds_slot, warpgroup_rows(cta.wg)] = ds
        plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
        plgpu.commit_smem()
        if not self.blocks.own_dq:
            self.meet(cta)  # both have written dS

        def products(dq_acc):
            ds_part, k_part = self.dq_operands(cta, ds_slot)
            plgpu.wgmma(dq_acc, ds_part, k_part)  # (5) dQ = dS K
            plgpu.wgmma_wait(1)
            cta.do.release(n)
            plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
            pl.when(n > 0)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[cta.wg]))
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

        dq = pl.run_scoped(
            products, plgpu.ACC(self.blocks.dq_tile(self.problem.head_dim), jnp.float32)
        )
        cta.smem.dq[cta.wg] = dq
        plgpu.commit_smem()
        plgpu.barrier_arrive(cta.bars.dq_full.at[cta.wg])
        plgpu.wgmma_wait(0)
        cta.q.release(n)
        return carry

    def step_late(self, cta: Cta, held: Held, dk_acc, dv_acc, n, block, carry, *, masked):
        """The products (1) to (4) of the n-th tile and dQ of the one before."""
        p, ds = self.score_gradients(cta, held, n, block, masked)
        ring = self.ds_ring(cta)
        slot = ring.slot(n)
        last_use = n + 1 >= ring.slots  # by dQ of tile n - slots, which for -1 is of nothing
        pl.when(last_use)(lambda: plgpu.barrier_wait(ring.empty.at[slot]))
        cta.smem.ds[slot, warpgroup_rows(cta.wg)] = ds
        plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.full.at[slot])
        pl.when(n > 0)(lambda: ring.wait_full(n - 1))

        def products(dq_acc):
            ds_part, k_part = self.dq_operands(cta, ring.slot(n + ring.slots - 1))
            plgpu.wgmma(dq_acc, ds_part, k_part)  # (5) dQ = dS K; of nothing where n is 0
            plgpu.wgmma_wait(1)
            cta.do.release(n)
            plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
            pl.when(n > 1)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[cta.wg]))
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

        cta.smem.dq[cta.wg] = pl.run_scoped(products, self.dq_accumulator)
        plgpu.commit_smem()
        before = n - 1 + ring.slots
        pl.when(before < cta.walk.total)(lambda: ring.release(before))
        pl.when(n > 0)(lambda: plgpu.barrier_arrive(cta.bars.dq_full.at[cta.wg]))
        plgpu.wgmma_wait(0)
        cta.q.release(n)
        return carry

    def step_first(self, cta: Cta, held: Held, dk_acc, dv_acc, n, block, carry, *, masked):
        """The products (1) to (4) of the n-th tile and dQ of the one before."""
        keys, ring = warpgroup_rows(lax.optimization_barrier(cta.wg)), self.ds_ring(cta)
        q, do = cta.smem.q.at[cta.q.slot(n)], cta.smem.do.at[cta.do.slot(n)]
        if self.problem.group > 1:  # under the wait for Q
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, n))
        accumulator = plgpu.ACC(self.shape, jnp.float32)
        cta.q.wait_full(n)

        def s_product(s_acc):
            plgpu.wgmma(s_acc, cta.smem.k.at[keys], q.transpose((1, 0)))
            cta.do.wait_full(n)
            return pl.run_scoped(functools.partial(dp_product, s_acc), accumulator)

        def dp_product(s_acc, dp_acc):
            plgpu.wgmma(dp_acc, cta.smem.v.at[keys], do.transpose((1, 0)))
            if self.blocks.in_flight:
                plgpu.wgmma_wait(2)
                pl.when(n > 0)(lambda: cta.do.release(n - 1))
                pl.when(n > 0)(lambda: cta.q.release(n - 1))
            pl.when(n > 0)(lambda: ring.wait_full(n - 1))
            return pl.run_scoped(functools.partial(dq_product, s_acc, dp_acc), self.dq_accumulator)

        def dq_product(s_acc, dp_acc, dq_acc):
            plgpu.wgmma(dq_acc, *self.dq_operands(cta, ring.slot(n + ring.slots - 1)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=2)
            p, ds = self.pointwise(cta, held, n, block, masked, s, dp_acc, 1)
            pl.when(n > 1)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[cta.wg]))
            return p, ds, plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        p, ds, dq = pl.run_scoped(s_product, accumulator)
        cta.smem.dq[cta.wg] = dq
        pl.when((n > 0) & (n - 1 + ring.slots < cta.walk.total))(lambda: ring.release(n - 1))
        ring.wait_empty(n)
        cta.smem.ds[ring.slot(n), keys] = ds
        plgpu.wgmma(dv_acc, p, do)  # (3) dV += P^T dO
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.full.at[ring.slot(n)])
        pl.when(n > 0)(lambda: plgpu.barrier_arrive(cta.bars.dq_full.at[cta.wg]))
        plgpu.wgmma(dk_acc, ds, q)  # (4) dK += dS^T Q
        if not self.blocks.in_flight:
            plgpu.wgmma_wait(1)
            cta.do.release(n)
            plgpu.wgmma_wait(0)
            cta.q.release(n)
        return carry

    @property
    def dq_accumulator(self):
        return plgpu.ACC(self.blocks.dq_tile(self.problem.head_dim), jnp.float32)

    def last_dq(self, cta: Cta):
        """(5) of the last tile."""
        ring, last = self.ds_ring(cta), cta.walk.total - 1
        ring.wait_full(last)

        def product(dq_acc):
            plgpu.wgmma(dq_acc, *self.dq_operands(cta, ring.slot(last)))
            pl.when(last > 0)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[cta.wg]))
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        cta.smem.dq[cta.wg] = pl.run_scoped(product, self.dq_accumulator)
        plgpu.commit_smem()
        plgpu.barrier_arrive(cta.bars.dq_full.at[cta.wg])

    def step_apart(self, cta: Cta, held: Held, dk_acc, dv_acc, n, block, carry, *, masked):
        """The products (1) to (4) of the n-th tile; dS^T goes to the warpgroup of dQ."""
        p, ds = self.score_gradients(cta, held, n, block, masked)
        ring = self.ds_ring(cta)
        slot = ring.slot(n)
        ring.wait_empty(n)
        cta.smem.ds[slot, warpgroup_rows(cta.wg)] = ds
        plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.full.at[slot])
        plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
        plgpu.wgmma_wait(1)
        cta.do.release(n)
        plgpu.wgmma_wait(0)
        cta.q.release(n)
        return carry

    def ds_ring(self, cta: Cta) -> Ring:
        """The slots of dS^T between the warpgroups that make it and that of dQ."""
        return Ring(cta.bars.ds_full, cta.bars.ds_empty, self.blocks.ds_stages)

    def consume_ds(self, cta: Cta):
        """(5) dQ = dS K of every tile."""
        plgpu.set_max_registers(self.blocks.dq_registers, action="decrease")
        plgpu.barrier_wait(cta.bars.kv_full)
        ring, total = self.ds_ring(cta), cta.walk.total

        @pl.loop(jnp.int32(0), total)
        def _(n):
            ring.wait_full(n)

            def product(dq_acc):
                plgpu.wgmma(dq_acc, cta.smem.ds.at[ring.slot(n)].transpose((1, 0)), cta.smem.k)
                pl.when(n > 0)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[0]))
                return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

            tile = self.blocks.dq_tile(self.problem.head_dim)
            dq = pl.run_scoped(product, plgpu.ACC(tile, jnp.float32))
            pl.when(n + ring.slots < total)(lambda: ring.release(n))
            cta.smem.dq[0] = dq
            plgpu.commit_smem()
            plgpu.barrier_arrive(cta.bars.dq_full.at[0])

        plgpu.barrier_arrive(cta.bars.k_free)

    def score_gradients(self, cta: Cta, held: Held, n, block, masked):
        """(1), (2) and the elementwise part: P^T and dS^T in 16 bits."""
        # The barrier keeps ptxas from holding the descriptors of K and V over the whole loop, which
        # costs 60 to 190 bytes of spills.
        keys = warpgroup_rows(lax.optimization_barrier(cta.wg))
        q_slot, do_slot = cta.q.slot(n), cta.do.slot(n)
        if self.problem.group > 1:  # under the wait for Q
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, n))

        cta.q.wait_full(n)

        def weights(s_acc):
            plgpu.wgmma(s_acc, cta.smem.k.at[keys], cta.smem.q.at[q_slot].transpose((1, 0)))
            cta.do.wait_full(n)
            return pl.run_scoped(functools.partial(gradients, s_acc), accumulator)

        def gradients(s_acc, dp_acc):
            plgpu.wgmma(dp_acc, cta.smem.v.at[keys], cta.smem.do.at[do_slot].transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            return self.pointwise(cta, held, n, block, masked, s, dp_acc)

        accumulator = plgpu.ACC(self.shape, jnp.float32)
        return pl.run_scoped(weights, accumulator)

    def tile(self, cta: Cta, block) -> RegisterTile:
        """Where this warpgroup's part of the tile of a query block lies."""
        return RegisterTile(
            q_start=block * self.blocks.block_q + cta.walk.q_offset,
            kv_start=cta.kv_start + cta.wg * WARPGROUP_ROWS,
            shape=(WARPGROUP_ROWS, self.blocks.block_q),
            q_axis=1,
            interpret=self.interpret,
        )

    def dq_operands(self, cta: Cta, ds_slot):
        """This warpgroup's part of dQ = dS K: half the columns, or half the query rows."""
        part = self.blocks.dq_tile(self.problem.head_dim)
        ds = cta.smem.ds.at[ds_slot]
        if self.blocks.own_dq:
            own = warpgroup_rows(cta.wg)
            return cta.smem.ds.at[ds_slot, own].transpose((1, 0)), cta.smem.k.at[own]
        if self.blocks.dq_by_rows:
            ds = cta.smem.ds.at[ds_slot, :, pl.ds(cta.wg * part[0], part[0])]
            return ds.transpose((1, 0)), cta.smem.k
        return ds.transpose((1, 0)), cta.smem.k.at[:, pl.ds(cta.wg * part[1], part[1])]

    def dq_part(self, cta: Cta, head, rows, wg: int):
        """Where that part lies in the dQ buffer."""
        part = self.blocks.dq_tile(self.problem.head_dim)
        if self.blocks.own_dq or self.blocks.dq_warpgroup:
            return cta.batch, rows, head, slice(None)
        if self.blocks.dq_by_rows:
            return cta.batch, pl.ds(rows.start + wg * part[0], part[0]), head, slice(None)
        return cta.batch, rows, head, pl.ds(wg * part[1], part[1])

    def meet(self, cta: Cta):
        """Wait for the other warpgroup."""
        plgpu.barrier_arrive(cta.bars.ds_ready)
        plgpu.barrier_wait(cta.bars.ds_ready)


def backward_fused(
    problem: Problem, blocks: FusedBlocks, operands: Operands, arrays: BackwardArrays, interpret
):
    """Launch; returns (dq, dk, dv) in the dtypes and padded shapes of q, k, v."""
    dtype = problem.dtype
    given = arrays.for_rows(problem, operands, 1, (blocks.block_q, blocks.block_kv))
    run = functools.partial(
        launch,
        out=(
            jax.ShapeDtypeStruct(arrays.k.shape, dtype),
            jax.ShapeDtypeStruct(arrays.v.shape, dtype),
        ),
        scratch=scratch(problem, blocks),
        # Heads fastest: CTAs that run together add to different dQ tiles (kv fastest: 0.93x).
        grid=(problem.kv_heads, pl.cdiv(problem.kv_len, blocks.block_kv), problem.batch),
        grid_names=("head", "kv", "batch"),
        threads=blocks.threads,
        name="flash_pallas_backward_fused",
        interpret=interpret,
    )

    def accumulate(refs):
        dq, dk, dv = refs
        dk[...], dv[...] = run(functools.partial(Fused(problem, blocks, interpret), dq))(given)

    # dQ is [B, T, N, D] like q: no transpose afterwards, and the adds are as fast as head-major
    # (1.00x). Only dQ's zeros are written; those of dK and dV are overwritten, and XLA drops them.
    dq, dk, dv = pl.run_state(accumulate)(
        (
            jnp.zeros(arrays.q.shape, jnp.float32),
            jnp.zeros(arrays.k.shape, dtype),
            jnp.zeros(arrays.v.shape, dtype),
        )
    )
    return (dq * problem.spec.scale).astype(dtype), dk, dv
