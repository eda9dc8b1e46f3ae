"""The fused backward: all five products of FlashAttention-2's Algorithm 2 in one kernel.

A CTA owns 128 keys of one key head (two compute warpgroups, 64 keys each) and walks the query tiles
of every head of its group. Scores are held transposed, so that P^T and dS^T come out of the
registers as left operands of the products that consume them:

    (1) S^T  = K Q^T           shared x shared
    (2) dP^T = V dO^T          shared x shared
    (3) dV  += P^T dO          registers x shared
    (4) dK  += dS^T Q          registers x shared
    (5) dQ   = dS K            shared (dS^T of both warpgroups, read transposed) x shared

In which order the two warpgroups run (3) to (5) is in fused_finish.py.

dK and dV stay in registers for the whole walk. Each dQ tile goes to float32 shared memory, and a
warp of the producer warpgroup adds it to a float32 buffer in device memory by TMA reduce-add. The
order of those adds differs from run to run, and with it the last bits of dQ; backward_dkv.py and
backward_dq.py are the deterministic pair.

    K, V            one slot each, loaded once; dK and dV are staged in them at the end
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

from ...core.problem import Operands, Problem
from ...core.tile import Limits
from . import inline, recompute
from .arrays import BackwardArrays
from .fused_blocks import FusedBlocks, entries_at_once
from .fused_cta import WARPGROUPS, Barriers, Cta, Smem, scratch
from .fused_finish import Alternating, Finish, Together
from .fused_producer import Feeder, Producer
from .memory import WARPGROUP_ROWS, Ring, launch, rows_of, warpgroup_rows
from .query_walk import QueryWalk
from .register_tile import RegisterTile
from .side_inputs import Held, Place, SideInputs


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

    @property
    def finish(self) -> Finish:
        """The second half of every step."""
        way = Alternating if self.blocks.alternate else Together
        return way(self.blocks, self.problem.head_dim, self.interpret)

    @property
    def producer(self) -> Producer:
        """What loads and adds dQ."""
        return Producer(self.problem, self.blocks, self.interpret)

    def __call__(self, dq, gmem: BackwardArrays, dk, dv, smem: Smem, bars: Barriers):
        entries = entries_at_once(self.problem)
        batch = lax.axis_index("section") * entries + lax.axis_index("entry")
        work = functools.partial(self.work, (dq, gmem, dk, dv), smem, bars, batch)
        if self.problem.batch % entries == 0:
            work()
        else:  # the last section is smaller
            pl.when(batch < self.problem.batch)(work)

    def work(self, arrays, smem: Smem, bars: Barriers, batch):
        """Everything that a CTA does."""
        dq, gmem, dk, dv = arrays
        block = lax.axis_index("kv")
        at, size = (batch, block), (self.blocks.block_kv, self.blocks.block_q)
        loops = {"mask_all": self.blocks.mask_all, "stagger": self.blocks.stagger}
        walk = QueryWalk.of(self.problem, gmem, at, *size, **loops)
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
            walk=dataclasses.replace(walk, opaque=self.blocks.alternate),
            wg=lax.axis_index("wg"),
        )
        pl.when(cta.wg < WARPGROUPS)(lambda: self.consume(cta))
        if self.blocks.producer:
            pl.when(cta.wg == WARPGROUPS)(lambda: self.producer(cta))

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: Cta):
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = Feeder(self.producer).start(cta)
        keys, head_dim = warpgroup_rows(cta.wg), self.problem.head_dim
        accumulator = plgpu.ACC((WARPGROUP_ROWS, head_dim), jnp.float32)
        dk, dv = pl.run_scoped(functools.partial(self.walk, cta), accumulator, accumulator)
        cta.meet()  # both warpgroups have read K for the last time
        cta.smem.k[keys] = (dk * self.problem.spec.scale).astype(self.problem.dtype)
        cta.smem.v[keys] = recompute.gained(self.problem, dv).astype(self.problem.dtype)
        plgpu.commit_smem()
        rows = pl.ds(cta.kv_start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        at = (cta.batch, rows, cta.kv_head)
        dk_at, dv_at = (rows_of(out, at, cta.smem.k) for out in (cta.dk, cta.dv))
        plgpu.copy_smem_to_gmem(cta.smem.k.at[keys], dk_at, commit_group=False)
        plgpu.copy_smem_to_gmem(cta.smem.v.at[keys], dv_at)
        plgpu.wait_smem_to_gmem(0)

    def walk(self, cta: Cta, dk_acc, dv_acc):
        """Every query tile of every head of the group; masked tiles are a loop of their own."""
        plgpu.barrier_wait(cta.bars.kv_full)

        held = self.side.hold_rows(cta.gmem.side, self.own_place(cta, 0))
        if self.problem.group == 1:
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, 0))
        self.finish.start(cta)
        cta.walk.visit(functools.partial(self.step, cta, held, dk_acc, dv_acc))
        self.finish.end(cta)
        if not self.blocks.producer:
            Feeder(self.producer).end(cta)
        return dk_acc[...], dv_acc[...]

    def own_place(self, cta: Cta, n) -> Place:
        """Of this warpgroup's part of the n-th tile."""
        first = cta.kv_start + cta.wg * WARPGROUP_ROWS
        return cta.place(n, first, WARPGROUP_ROWS, self.blocks.block_q)

    def step(self, cta: Cta, held: Held, dk_acc, dv_acc, n, block, *, masked):
        """The five products of the n-th tile."""
        p, ds = self.score_gradients(cta, held, n, block, masked)
        self.finish(cta, n, p, ds, dk_acc, dv_acc)

    def score_gradients(self, cta: Cta, held: Held, n, block, masked):
        """(1), (2) and the elementwise part: P^T and dS^T in 16 bits."""
        keys = warpgroup_rows(cta.anew().wg)
        q_slot, do_slot = cta.q.slot(n), cta.do.slot(n)
        if self.problem.group > 1:  # under the wait for Q
            held = self.side.hold_head(held, cta.gmem.side, self.own_place(cta, n))

        tile = self.tile(cta, block)
        k, v = cta.smem.k.at[keys], cta.smem.v.at[keys]
        q, do = cta.smem.q.at[q_slot], cta.smem.do.at[do_slot]

        def weights(s_acc, dp_in_flight):
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=dp_in_flight)
            return self.weights(cta, held, n, tile, masked, s)

        def both(s_acc):
            plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
            cta.do.wait_full(n)
            return pl.run_scoped(functools.partial(gradients, s_acc), accumulator)

        def gradients(s_acc, dp_acc):
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
            self.finish.scores_issued(cta, n)
            return self.centred(cta, n, tile, weights(s_acc, 1), dp_acc)

        def alone(s_acc):
            plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
            return weights(s_acc, 0)

        def late(w, dp_acc):
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
            return self.centred(cta, n, tile, w, dp_acc)

        # Accumulators are made after the waits: see Scores.tile in backward_scores.py.
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_q), jnp.float32)
        cta.q.wait_full(n)
        if not self.blocks.late_dp:
            return pl.run_scoped(both, accumulator)
        w = pl.run_scoped(alone, accumulator)
        cta.do.wait_full(n)
        return pl.run_scoped(functools.partial(late, w), accumulator)

    def weights(self, cta: Cta, held: Held, n, tile: RegisterTile, masked, s):
        """(P^T without what dropout drops, pull(P^T), what dropout keeps)."""
        slot, keys = cta.q.slot(n), warpgroup_rows(cta.wg)
        lse = plgpu.load(cta.smem.lse.at[slot], layout=inline.COLS)
        inputs = self.side.inputs(held, cta.smem.side, slot, s.shape, keys, ids=masked)
        limits = tile.limits(self.problem.spec.mask, cta.walk.kv_len) if masked else Limits()
        share = self.blocks.polynomials
        w = recompute.weights(self.problem, tile, s, lse, inputs, limits, polynomials=share)
        p, through = lax.optimization_barrier(
            (recompute.dropped(self.problem, w), recompute.pulled(w))
        )
        return p, through, w.kept

    def centred(self, cta: Cta, n, tile: RegisterTile, weights, dp_acc):
        """P^T and dS^T in 16 bits, from weights and dP^T."""
        p, through, kept = weights
        slot = cta.do.slot(n)
        plgpu.barrier_wait(cta.bars.delta_full.at[slot])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        delta = plgpu.load(cta.smem.delta.at[slot], layout=inline.COLS)
        ds = through * recompute.centred(self.problem, kept, dp, tile.per_q(delta))
        return p.astype(self.problem.dtype), ds.astype(self.problem.dtype)

    def tile(self, cta: Cta, block) -> RegisterTile:
        """Where this warpgroup's part of the tile of a query block lies."""
        return RegisterTile(
            q_start=block * self.blocks.block_q + cta.walk.q_offset,
            kv_start=cta.kv_start + cta.wg * WARPGROUP_ROWS,
            shape=(WARPGROUP_ROWS, self.blocks.block_q),
            q_axis=1,
            interpret=self.interpret,
        )


def backward_fused(
    problem: Problem,
    blocks: FusedBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    clears: bool,
    interpret: bool,
):
    """Launch; returns (dq, dk, dv) in the dtypes and shapes of `arrays`, dq as wide as it runs.

    `clears`: padding may hold NaN; otherwise it holds 0.
    """
    dtype, tile = problem.dtype, (blocks.block_q, blocks.block_kv)
    entries = entries_at_once(problem)
    given = arrays.for_rows(problem, operands, 1, tile)
    if clears:
        given = given.with_padding(operands, *tile)
    run = functools.partial(
        launch,
        out=(
            jax.ShapeDtypeStruct(arrays.k.shape, dtype),
            jax.ShapeDtypeStruct(arrays.v.shape, dtype),
        ),
        scratch=scratch(problem, blocks, arrays, interpret),
        # Some batch entries fastest, so that CTAs that run together add to different tiles of dQ
        # (key blocks fastest: 0.94x if causal), but no more than L2 keeps.
        grid={
            "head": problem.kv_heads,
            "section": pl.cdiv(problem.batch, entries),
            "kv": pl.cdiv(problem.kv_len, blocks.block_kv),
            "entry": entries,
        },
        threads=WARPGROUPS + blocks.producer,
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
            jnp.zeros((*arrays.q.shape[:3], problem.head_dim), jnp.float32),
            jnp.zeros(arrays.k.shape, dtype),
            jnp.zeros(arrays.v.shape, dtype),
        )
    )
    return (dq * problem.spec.scale).astype(dtype), dk, dv
