"""A step of the fused backward from S^T and dP^T on: P^T and dS^T, then dV, dK and dQ.

`early_weights` and `late_weights` compute P^T and dS^T in registers. `GradientGemms` has the orders
in which the two warpgroups run the matmuls (3) dV, (4) dK and (5) dQ of `kernel.step`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core import integers as ints
from .....core.mask import Limits
from .....core.scores import HIDING, TileInputs
from ....gpu import score_tile
from ....gpu.ptx import infinities, inline
from ....gpu.score_tile import RegisterTile, row_shift
from ...common import pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs
from ...common.pipeline import warpgroup_rows
from ..operands import QTileList
from .launches import FusedCta, Part
from .tiles import WARPGROUPS, FusedBlocks

# --- From S^T and dP^T to P^T and dS^T ------------------------------------------------------------
# There are three ways, with different tiles of registers between the two halves of a step:
#
#     of every problem         P, pull(P) and the dropout mask
#     FusedBlocks.signs        P that is negative where dropout drops it, times sign_factor: lse and
#                              delta are made for it (`BackwardArrays.scaled`)
#     FusedBlocks.defer        logits over the cap, whose exponentials wait for dP^T


def early_weights(cta: FusedCta, rows: TileInputs, q_tile, tile: RegisterTile, masked, far, s):
    """Computes what can be made of S^T before dP^T has arrived; `q_tile`: (n, its Q block)."""
    problem, auxiliary, shift = cta.problem, AuxiliaryInputs(cta.problem, q_axis=1), None
    n, block = q_tile
    if far is not None:
        query = block * cta.blocks.block_q
        shift = row_shift(problem, cta.gmem.auxiliary, far, cta.q_tiles[n][0], query)
    slot, keys = cta.q.slot(n), warpgroup_rows(cta.wg)
    lse = plgpu.load(cta.smem.lse.at[slot], layout=inline.COLS)
    inputs = auxiliary.inputs(rows, cta.smem.auxiliary, slot, s.shape, keys, ids=masked)
    inputs = inputs._replace(shift=shift)
    limits = tile.limits(problem.spec.mask, cta.q_tiles.kv_len) if masked else Limits()
    if masked and far is None and hides_in_a_branch(cta):
        listed = isinstance(cta.q_tiles, QTileList)
        partial = n < cta.q_tiles.listed.masked_steps if listed else limits.cuts(tile.shape)
        hide = lambda: score_tile.logits(problem.spec, tile, s, inputs, limits).x
        s = lax.cond(partial, hide, lambda: s)
        problem, limits = problem.of_whole_tiles, Limits()
        inputs = inputs._replace(**dict.fromkeys(("mask", *HIDING), None))
    if cta.blocks.signs:
        return score_tile.signed(problem, tile, s, lse, inputs, limits)
    if cta.blocks.defer:
        return score_tile.capped(problem, tile, s, inputs, limits)
    w = score_tile.weights(problem, tile, s, lse, inputs, limits, marks=True)
    kept = score_tile.dropped(problem, w._replace(marked=False))  # until it has 16 bits
    p, through = lax.optimization_barrier((kept, score_tile.pulled(w)))
    return p, through, w.kept


def hides_in_a_branch(cta: FusedCta) -> bool:
    """Returns whether a branch hides keys of partial tiles, in a loop that has whole ones as well.

    With two loops 128 bytes spill at head dim 128 with lists and a mask_mod, and wgmma is
    serialised (C7512). The branch hides keys in S = K Q^T itself, which is possible only where
    logits are S times a scale; elsewhere whole tiles are masked as well. Without lists it must be
    known which tiles are whole. There it leaves out 65 instructions of a whole tile. H200, causal,
    time over that without at head dim 128: 0.99, 0.98, 0.96 and 0.96 (T = 1k, 2k, 4k, 16k); 96:
    0.99 and 1.06 (1k, 8k); 64: 1.06, 0.98 and 1.07 (1k, 4k, 16k). Without a producer not timed.
    """
    problem, tiles = cta.problem, cta.q_tiles
    if problem.spec.score_modifiers or {"bias", "alibi_slopes"} & problem.features:
        return False
    if isinstance(tiles, QTileList):
        return True
    by_elements = problem.hides_by_arrays or "mask" in problem.features or problem.spec.mask_mod
    timed = problem.head_dim > 96 and cta.blocks.producer
    return timed and tiles.masks == "all" and not by_elements


def late_weights(cta: FusedCta, n, tile: RegisterTile, early, dp_acc):
    """Waits for dP^T and delta; returns P^T and dS^T in 16 bits."""
    problem, slot = cta.problem, cta.do.slot(n)
    plgpu.barrier_wait(cta.smem.delta_full.at[slot])
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    delta = plgpu.load(cta.smem.delta.at[slot], layout=inline.COLS)
    lse = plgpu.load(cta.smem.lse.at[cta.q.slot(n)], layout=inline.COLS)
    if cta.blocks.signs:
        p, ds = score_tile.of_signed(early, dp, tile.per_q(delta))
    elif cta.blocks.defer:
        p, ds = score_tile.of_capped(early, tile.per_q(lse), dp, tile.per_q(delta))
    else:
        p, through, kept = early
        ds = through * score_tile.centred(problem, kept, dp, tile.per_q(delta))
    p, ds = p.astype(problem.dtype), ds.astype(problem.dtype)
    return infinities.numbers(p, cta.interpret) if score_tile.marks_hidden(problem) else p, ds


def narrows(cta: FusedCta, masked: bool) -> bool:
    """Returns whether tiles of the second loop wait for dP^T in 16 bits.

    Values that the second loop cannot keep in registers are loaded again in every step of the first
    one, the loop that matters. Head dim 64, T=4096: with narrow tiles 1.01 of the time without the
    second loop, instead of 1.09; but where tiles are masked 1.13, instead of 1.08. At head dim 128
    204 bytes would spill and wgmma be serialised (C7512) at T=1024 and 16k, where nothing spills
    without narrow tiles.
    """
    two_loops = cta.launch.part in (Part.ALL, Part.ALL_IF_FAR)
    return not masked and cta.problem.head_dim < 128 and two_loops


def narrowed(tiles, dtype):
    """Rounds float32 tiles to 16 bits until they are used."""
    leaves, form = jax.tree.flatten(tiles)
    wide = [i for i, x in enumerate(leaves) if x.dtype == jnp.float32]  # no predicates
    narrow = tuple(leaves[i].astype(dtype) for i in wide)
    for i, x in zip(wide, lax.optimization_barrier(narrow), strict=True):
        leaves[i] = x.astype(jnp.float32)
    return jax.tree.unflatten(form, leaves)


# --- Schedules of the matmuls (3) dV, (4) dK and (5) dQ -------------------------------------------


class GradientGemms:
    """Base class of the two orders in which the warpgroups run dV, dK and dQ of a step.

    With `FusedBlocks.whole_dq` warpgroup 0 computes dV and dK alone.
    """

    def gradients(self, cta: FusedCta, n, p, ds, dk_acc, dv_acc):
        """Computes dV, dK and dQ of the n-th tile, from P^T and dS^T in 16 bits."""
        raise NotImplementedError

    def start(self, cta: FusedCta):
        """Runs before the first tile."""

    def scores_issued(self, cta: FusedCta, n):
        """Runs when S^T and dP^T of the n-th tile have been issued."""

    def end(self, cta: FusedCta):
        """Runs after the last tile."""


class Lockstep(GradientGemms):
    """Runs both warpgroups in step: they meet in each, and both compute half of its dQ."""

    def gradients(self, cta: FusedCta, n, p, ds, dk_acc, dv_acc):
        """Computes dV, dQ and dK of the n-th tile."""
        ds_slot = ints.remainder(cta.count(n), cta.blocks.ds_stages)
        if cta.blocks.ds_stages == 1:
            cta.meet()  # both have read the previous dS
        await_sums(cta, n)
        cta.smem.ds[ds_slot, warpgroup_rows(cta.wg)] = ds
        plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
        plgpu.commit_smem()
        signal_sums(cta, n)
        cta.meet()  # both have written dS
        if not cta.computes_dq:
            dk_without_dq(cta, n, ds, dk_acc)
            return

        @functools.partial(pl.run_scoped, dq_acc=plgpu.ACC(cta.dq_shape, jnp.float32))
        def dq(dq_acc):
            plgpu.wgmma(dq_acc, *dq_operands(cta, ds_slot))  # (5) dQ = dS K
            if cta.launch.all_kv_tiles:
                inline.use_zero(cta.interpret)
            plgpu.wgmma_wait(1)
            cta.do.release(n)
            plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
            await_dq(cta, cta.count(n))
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

        cta.dq_buffer(cta.wg)[...] = dq
        plgpu.commit_smem()
        add_dq(cta, n)
        plgpu.wgmma_wait(0)
        release_q(cta, n)


class PingPong(GradientGemms):
    """Runs the warpgroups half a step apart; they take turns at the tensor cores.

    A warp that issues a wgmma waits until the tensor cores take it. So a warpgroup's exponentials
    do not overlap with its own matmuls, only with those of the other warpgroup, if that is in
    another phase (ping-pong):

        warpgroup 0   | dQ' dV dK  S dP | exponentials, dS |                  | dQ' ...
        warpgroup 1   | exponentials, dS |                 | dQ dV dK  S dP   | ...

    A turn lasts from dQ to dP of the next tile. Warpgroup 1, the later one, finds that both halves
    of dS of its tile are there. Warpgroup 0 computes its part of dQ one tile late (dQ'), so dS has
    two slots: one may be overwritten once warpgroup 0 has had its next turn, before either writes
    it again.
    """

    def gradients(self, cta: FusedCta, n, p, ds, dk_acc, dv_acc):
        """Computes dQ, dV and dK of the n-th tile; warpgroup 0 computes dQ of the tile before."""
        slot = self.ds_slot(cta, n)
        await_sums(cta, n)
        cta.smem.ds[slot, warpgroup_rows(cta.anew().wg)] = ds
        plgpu.commit_smem()
        signal_sums(cta, n)
        if not cta.blocks.whole_dq:
            plgpu.barrier_arrive(cta.smem.ds_ready.at[slot])
        # Otherwise ptxas converts P within this warpgroup's turn: 5 % at head dim 64.
        inline.settle(p, n, cta.interpret)
        self.await_turn(cta)
        if not cta.computes_dq:
            plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
            dk_without_dq(cta, n, ds, dk_acc)
            return
        dq_n = self.tile_of_dq(cta, n)

        # Before the accumulator of dQ is made its first matmul can clear it: 17 instructions fewer.
        # That pays where tiles have a branch, and costs 1 % where they have none (H200).
        early = hides_in_a_branch(cta) and not isinstance(cta.q_tiles, QTileList)
        waits = not cta.blocks.whole_dq  # else warpgroup 0 wrote dS before it passed the turn
        await_ds = lambda: plgpu.barrier_wait(cta.smem.ds_ready.at[self.ds_slot(cta, dq_n)])
        if waits and early:
            pl.when(dq_n >= 0)(await_ds)

        @functools.partial(pl.run_scoped, dq_acc=plgpu.ACC(cta.dq_shape, jnp.float32))
        def dq(dq_acc):
            if waits and not early:
                pl.when(dq_n >= 0)(await_ds)
            plgpu.wgmma(dq_acc, *dq_operands(cta.anew(), self.ds_slot(cta, dq_n)))  # (5) dQ = dS K
            plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # (3) dV += P^T dO
            plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
            await_dq(cta, dq_n)
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)

        # Stored in the first turn too, though not handed over then: a branch around registers that
        # wgmmas have written makes ptxas end those in flight (C7517).
        cta.dq_buffer(cta.anew().wg)[...] = dq
        if not cta.blocks.late_handover:
            self.hand_over(cta, dq_n)
        plgpu.wgmma_wait(0)
        cta.do.release(n)
        release_q(cta, n)

    def start(self, cta: FusedCta):
        """Makes warpgroup 1 wait for the first matmuls of the other."""
        pl.when(cta.wg == 1)(functools.partial(self.await_turn, cta))

    def tile_of_dq(self, cta: FusedCta, n):
        """Returns the tile whose dQ is computed with dV and dK of the n-th.

        It is n for warpgroup 1 and n - 1 for warpgroup 0: -1 in the first turn of a KV tile.
        """
        return n - (WARPGROUPS - 1 - cta.wg)

    def hand_over(self, cta: FusedCta, dq_n):
        """Hands this warpgroup's part of dQ of that tile, in shared memory, over to be added."""
        if not cta.computes_dq:
            return
        plgpu.commit_smem()
        pl.when(dq_n >= 0)(functools.partial(add_dq, cta, dq_n))

    def scores_issued(self, cta: FusedCta, n):
        """Ends the turn, and then hands over dQ if that is to come late."""
        self.pass_turn(cta)
        if cta.blocks.late_handover:
            self.hand_over(cta, self.tile_of_dq(cta, n - 1))

    def end(self, cta: FusedCta):
        """Gives warpgroup 1 its last turn; warpgroup 0 then computes its part of the last dQ."""
        if cta.blocks.late_handover:
            self.hand_over(cta, self.tile_of_dq(cta, cta.q_tiles.total - 1))

        @pl.when(cta.wg == 0)
        def _():
            self.pass_turn(cta)
            if not cta.computes_dq:
                return
            accumulator = plgpu.ACC(cta.dq_shape, jnp.float32)
            last = functools.partial(self.last_dq, cta)
            cta.dq_buffer(cta.wg)[...] = pl.run_scoped(last, accumulator)
            plgpu.commit_smem()
            add_dq(cta, cta.q_tiles.total - 1)

    def last_dq(self, cta: FusedCta, dq_acc):
        """Computes this warpgroup's part of the last dQ, once both have written dS."""
        last = cta.q_tiles.total - 1
        plgpu.barrier_wait(cta.smem.ds_ready.at[self.ds_slot(cta, last)])
        plgpu.wgmma(dq_acc, *dq_operands(cta, self.ds_slot(cta, last)))  # (5) dQ = dS K
        await_dq(cta, last)
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

    def ds_slot(self, cta: FusedCta, n):
        """Returns the slot in which dS of the n-th tile lies; n may be -1."""
        slots = cta.blocks.ds_stages
        return lax.rem(jnp.int32(cta.count(n) + slots), jnp.int32(slots))

    # The interpreter has no named barriers; mbarriers take their place there. With them the kernel
    # would be 1 to 14 % slower on H200.
    def await_turn(self, cta: FusedCta):
        """Waits until the other warpgroup has passed the turn."""
        if cta.interpret:
            plgpu.barrier_wait(cta.smem.turn.at[cta.wg])
        else:
            inline.named_barrier("sync", cta.wg + inline.FIRST_NAMED_BARRIER, 128 * WARPGROUPS)

    def pass_turn(self, cta: FusedCta):
        """Passes the tensor cores to the other warpgroup."""
        other = WARPGROUPS - 1 - cta.wg
        if cta.interpret:
            plgpu.barrier_arrive(cta.smem.turn.at[other])
        else:
            inline.named_barrier("arrive", other + inline.FIRST_NAMED_BARRIER, 128 * WARPGROUPS)


def mma_schedule(blocks: FusedBlocks) -> GradientGemms:
    """Returns the schedule that the blocks ask for."""
    return PingPong() if blocks.ping_pong else Lockstep()


def dk_without_dq(cta: FusedCta, n, ds, dk_acc):
    """Computes dK of the n-th tile, behind dV, where the other warpgroup computes dQ."""
    plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # (4) dK += dS^T Q
    plgpu.wgmma_wait(1)
    cta.do.release(n)
    plgpu.wgmma_wait(0)
    release_q(cta, n)


def dq_operands(cta: FusedCta, ds_slot):
    """Returns the operands (dS, K) of this warpgroup's part of dQ = dS K.

    The part is half of the columns, or half of the query rows, or all.
    """
    rows = cta.dq_shape[0]
    ds = cta.smem.ds.at[ds_slot]
    if cta.blocks.dq_by_rows:
        ds = cta.smem.ds.at[ds_slot, :, pl.ds(cta.wg * rows, rows)]
        return ds.transpose((1, 0)), cta.smem.k.at[0]
    return ds.transpose((1, 0)), cta.smem.k.at[0, :, cta.dq_columns(cta.wg)]


def await_dq(cta: FusedCta, handed):
    """Waits until this warpgroup's dQ in shared memory may be overwritten.

    `handed`: positive where what lies there has been handed over.
    """
    if cta.blocks.producer:
        empty = functools.partial(plgpu.barrier_wait, cta.smem.dq_empty.at[cta.wg])
        pl.when(handed > 0)(empty)
    else:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def add_dq(cta: FusedCta, n):
    """Starts to add this warpgroup's part of the n-th dQ tile, in shared memory, to the buffer.

    With a producer this only signals that the part is there; the storing warp adds it.
    """
    if cta.blocks.producer:
        plgpu.barrier_arrive(cta.smem.dq_full.at[cta.wg])
    else:
        cta.put_dq(n, cta.wg)


def await_sums(cta: FusedCta, n):
    """Waits until dS of the n-th tile may be written, if dS of a cluster is summed."""
    if cta.blocks.sums_bias:
        cta.sums.wait_empty(n)


def signal_sums(cta: FusedCta, n):
    """Signals that this warpgroup's part of dS of the n-th tile has been written."""
    if cta.blocks.sums_bias:
        plgpu.barrier_arrive(cta.sums.full.at[cta.sums.slot(n)])


def release_q(cta: FusedCta, n):
    """Releases the n-th tile of Q, and of the bias, which a cluster loads together."""
    pipeline.cluster_release(cta.blocks.bias_cluster, cta.q, n, cta.interpret)
