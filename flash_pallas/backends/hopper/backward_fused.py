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
backward_dq.py are the deterministic pair. The gradient of a bias may be added up here too:
fused_bias.py.

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
from ..mosaic import inline
from ..mosaic.launch import WARPGROUP_ROWS, float32, launch
from ..mosaic.register_tile import RegisterTile
from . import cluster
from .arrays import BackwardArrays
from .fused_bias import BiasSums, Sums
from .fused_blocks import FusedBlocks, pairs_at_once
from .fused_cta import WARPGROUPS, Barriers, Cta, Smem, scratch, swizzles_of_k_and_v
from .fused_finish import Alternating, Finish, Together
from .fused_parts import summed
from .fused_producer import Feeder, Producer
from .fused_weights import Scores, Weights, weights_of
from .memory import Ring, rows_of, warpgroup_rows
from .query_walk import QueryWalk
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
    def weights(self) -> Weights:
        """The elementwise part."""
        return weights_of(self.problem, self.blocks)

    @property
    def producer(self) -> Producer:
        """What loads and adds dQ."""
        return Producer(self.problem, self.blocks, self.interpret)

    def __call__(self, sums: Sums, gmem: BackwardArrays, dk, dv, smem: Smem, bars: Barriers):
        size, total = self.blocks.bias_cluster, self.problem.batch * self.problem.kv_heads
        pairs = pairs_at_once(self.problem, size)
        within = lax.axis_index("pair") * size + cluster.rank(size)
        pair = lax.axis_index("section") * pairs + within
        work = functools.partial(self.work, (sums, gmem, dk, dv), smem, bars, pair)
        if total % pairs == 0:
            work()
        else:  # the last section is smaller
            pl.when(pair < total)(work)

    def work(self, arrays, smem: Smem, bars: Barriers, pair):
        """Everything that a CTA does."""
        sums, gmem, dk, dv = arrays
        entries = jnp.int32(self.problem.batch)
        batch, kv_head = lax.rem(pair, entries), lax.div(pair, entries)
        block, parts = lax.axis_index("kv"), self.blocks.parts
        at, size = (batch, block), (self.blocks.block_kv, self.blocks.block_q)
        loops = {"mask_all": self.blocks.mask_all, "shift": block if self.blocks.stagger else 0}
        walk = QueryWalk.of(self.problem, gmem, at, *size, **loops)
        if parts > 1:
            part = lax.axis_index("part")
            walk, dk, dv = walk.cut(part, parts), dk.at[part], dv.at[part]
        cta = Cta(
            gmem=gmem,
            dq=sums.dq,
            dbias=sums.bias,
            dk=dk,
            dv=dv,
            smem=smem,
            bars=bars,
            q=Ring(bars.q_full, bars.q_empty, self.blocks.stages),
            do=Ring(bars.do_full, bars.do_empty, self.blocks.do_stages),
            batch=batch,
            kv_head=kv_head,
            kv_start=block * self.blocks.block_kv,
            walk=dataclasses.replace(walk, opaque=self.blocks.alternate),
            wg=lax.axis_index("wg"),
        )
        if parts == 1:
            self.run(cta)
        else:
            pl.when(walk.total > 0)(lambda: self.run(cta))
            pl.when((walk.total == 0) & (cta.wg < WARPGROUPS))(lambda: self.store_nothing(cta))

    def run(self, cta: Cta):
        """All warpgroups."""
        pl.when(cta.wg < WARPGROUPS)(lambda: self.consume(cta))
        if self.blocks.producer:
            pl.when(cta.wg == WARPGROUPS)(lambda: self.producer(cta))
        if self.blocks.sums_bias:
            swizzle = swizzles_of_k_and_v(self.problem, self.blocks, cta.gmem)[0]
            add = BiasSums(self.problem, self.blocks, swizzle, self.interpret)
            pl.when(cta.wg == WARPGROUPS + 1)(lambda: add(cta))

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: Cta):
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = Feeder(self.producer).start(cta)
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        dk, dv = pl.run_scoped(functools.partial(self.walk, cta), accumulator, accumulator)
        dk, dv = dk * self.problem.spec.scale, self.weights.finished(dv)
        (self.store if self.blocks.parts == 1 else self.store_part)(cta, dk, dv)

    def store(self, cta: Cta, dk, dv):
        """This warpgroup's keys of the results."""
        keys = warpgroup_rows(cta.wg)
        cta.meet()  # both warpgroups have read K for the last time
        cta.smem.k[keys] = dk.astype(self.problem.dtype)
        cta.smem.v[keys] = dv.astype(self.problem.dtype)
        plgpu.commit_smem()
        dk_at, dv_at = (rows_of(x, self.own_keys(cta), cta.smem.k) for x in (cta.dk, cta.dv))
        plgpu.copy_smem_to_gmem(cta.smem.k.at[keys], dk_at, commit_group=False)
        plgpu.copy_smem_to_gmem(cta.smem.v.at[keys], dv_at)
        plgpu.wait_smem_to_gmem(0)
        if self.blocks.sums_bias:
            cta.sums.drain(cta.walk.total)  # nobody reads dS of this CTA any more

    def store_part(self, cta: Cta, dk, dv):
        """This warpgroup's keys of what one part of the walk adds to the results, in float32.

        Straight from registers: four threads write the 32 bytes of a sector.
        """
        at = self.own_keys(cta)
        cta.dk[at], cta.dv[at] = dk, dv
        plgpu.wait_smem_to_gmem(0)  # dQ's adds, where there is no producer

    def store_nothing(self, cta: Cta):
        """What a part without tiles adds."""
        tile = jnp.zeros((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        self.store_part(cta, *[plgpu.layout_cast(tile, inline.WGMMA)] * 2)

    def own_keys(self, cta: Cta):
        """(batch entry, keys of this warpgroup, key head) of dK and dV."""
        rows = pl.ds(cta.kv_start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        return cta.batch, rows, cta.kv_head

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

        def early(s_acc, dp_in_flight):
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=dp_in_flight)
            return self.early(cta, held, n, tile, masked, s)

        def both(s_acc):
            plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
            cta.do.wait_full(n)
            return pl.run_scoped(functools.partial(gradients, s_acc), accumulator)

        def gradients(s_acc, dp_acc):
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
            self.finish.scores_issued(cta, n)
            return self.late(cta, n, tile, early(s_acc, 1), dp_acc)

        def alone(s_acc):
            plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
            return early(s_acc, 0)

        def late(w, dp_acc):
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
            return self.late(cta, n, tile, w, dp_acc)

        # Accumulators are made after the waits: see Scores.tile in backward_scores.py.
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_q), jnp.float32)
        cta.q.wait_full(n)
        if not self.blocks.late_dp:
            return pl.run_scoped(both, accumulator)
        w = pl.run_scoped(alone, accumulator)
        cta.do.wait_full(n)
        return pl.run_scoped(functools.partial(late, w), accumulator)

    def early(self, cta: Cta, held: Held, n, tile: RegisterTile, masked, s):
        """What is made of S^T before dP^T has arrived."""
        slot, keys = cta.q.slot(n), warpgroup_rows(cta.wg)
        lse = plgpu.load(cta.smem.lse.at[slot], layout=inline.COLS)
        inputs = self.side.inputs(held, cta.smem.side, slot, s.shape, keys, ids=masked)
        limits = tile.limits(self.problem.spec.mask, cta.walk.kv_len) if masked else Limits()
        return self.weights.early(tile, Scores(s, lse, inputs, limits))

    def late(self, cta: Cta, n, tile: RegisterTile, early, dp_acc):
        """P^T and dS^T in 16 bits."""
        slot = cta.do.slot(n)
        plgpu.barrier_wait(cta.bars.delta_full.at[slot])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        delta = plgpu.load(cta.smem.delta.at[slot], layout=inline.COLS)
        lse = plgpu.load(cta.smem.lse.at[cta.q.slot(n)], layout=inline.COLS)
        p, ds = self.weights.late(tile, early, lse, dp, delta)
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
    """Launch.

    Args:
        problem: with the head dims that run.
        blocks: tile sizes.
        operands: of the call.
        arrays: what a backward reads.
        clears: padding may hold NaN; otherwise it holds 0.
        interpret: run by the interpreter.

    Returns:
        (dq, dk, dv, dbias): in the dtypes and shapes of `arrays`, dq as wide as it runs; dbias in
        those of the bias, or None without blocks.bias_cluster.
    """
    dtype, tile = problem.dtype, (blocks.block_q, blocks.block_kv)
    pairs = pairs_at_once(problem, blocks.bias_cluster)
    given = arrays.for_rows(problem, operands, 1, tile)
    factor = weights_of(problem, blocks).factor
    if factor != 1.0:
        given = given.scaled(factor)
    if clears:
        given = given.with_padding(operands, *tile)
    key_blocks = pl.cdiv(problem.kv_len, blocks.block_kv)
    of_k, of_v = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (arrays.k, arrays.v))
    if blocks.parts > 1:  # whole tiles, as what writes them knows no ends
        keys = (problem.batch, key_blocks * blocks.block_kv, problem.kv_heads, problem.head_dim)
        of_k = of_v = float32((blocks.parts, *keys))
    run = functools.partial(
        launch,
        out=(of_k, of_v),
        scratch=scratch(problem, blocks, arrays, interpret),
        # Some batch entries and heads fastest: CTAs that run together add to different tiles of dQ
        # (key blocks fastest: 0.94x if causal) and the longest causal walks start first; but no
        # more than L2 keeps. Of four axes the first two become one, of 65,535 at most.
        grid={
            "section": pl.cdiv(problem.batch * problem.kv_heads, pairs),
            "kv": key_blocks,
            **({"part": blocks.parts} if blocks.parts > 1 else {}),
            "pair": pairs // blocks.bias_cluster,
        },
        cluster=cluster.axes(blocks.bias_cluster),
        threads=WARPGROUPS + blocks.producer + blocks.sums_bias,
        name="flash_pallas_backward_fused",
        interpret=interpret,
    )

    def accumulate(refs):
        sums, dk, dv = refs
        dk[...], dv[...] = run(functools.partial(Fused(problem, blocks, interpret), sums))(given)

    # dQ is [B, T, N, D] like q: no transpose afterwards, and the adds are as fast as head-major
    # (1.00x). Only the zeros of sums are written; dK and dV are overwritten, and XLA drops theirs.
    sums, dk, dv = pl.run_state(accumulate)(
        (
            Sums.zeros(problem, blocks, arrays, interpret),
            *(jnp.zeros(x.shape, x.dtype) for x in (of_k, of_v)),
        )
    )
    if blocks.parts > 1:
        dk, dv = (summed(x, like) for x, like in ((dk, arrays.k), (dv, arrays.v)))
    return (sums.dq * problem.spec.scale).astype(dtype), dk, dv, sums.of_bias(problem)
