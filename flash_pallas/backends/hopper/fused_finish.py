"""The second half of a step of the fused backward: dV, dK and dQ, and who waits for whom.

A dQ tile needs dS of both compute warpgroups, and each of them computes half of it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import integers as ints
from ..mosaic import inline, registers
from . import cluster
from .fused_blocks import FusedBlocks
from .fused_cta import Cta
from .fused_layout import WARPGROUPS
from .memory import warpgroup_rows


@dataclasses.dataclass(frozen=True)
class Finish(abc.ABC):
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

    def dq_operands(self, cta: Cta, ds_slot):
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

    def await_dq(self, cta: Cta, handed):
        """Waits until this warpgroup's dQ in shared memory may be overwritten.

        `handed`: positive where what lies there has been handed over.
        """
        if self.blocks.producer:
            pl.when(handed > 0)(lambda: plgpu.barrier_wait(cta.bars.dq_empty.at[cta.wg]))
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def add_dq(self, cta: Cta, n):
        """Starts to add this warpgroup's part of the n-th dQ tile, in shared memory, to the buffer.

        With a producer this only signals that the part is there; the storing warp adds it.
        """
        if self.blocks.producer:
            plgpu.barrier_arrive(cta.bars.dq_full.at[cta.wg])
            return
        tile = cta.query_tile(n, self.blocks.block_q)
        target = cta.results.dq.at[cta.dq_part(tile, self.blocks, self.head_dim, cta.wg)]
        plgpu.copy_smem_to_gmem(cta.smem.dq.at[cta.wg], target, reduction_op=cta.reduction)

    def await_sums(self, cta: Cta, n):
        """Waits until dS of the n-th tile may be written, if dS of a cluster is summed."""
        if self.blocks.sums_bias:
            cta.sums.wait_empty(n)

    def tell_sums(self, cta: Cta, n):
        """Signals that this warpgroup's part of dS of the n-th tile has been written."""
        if self.blocks.sums_bias:
            plgpu.barrier_arrive(cta.sums.full.at[cta.sums.slot(n)])

    def release_q(self, cta: Cta, n):
        """Releases the n-th tile of Q, and of the bias, which a cluster loads together."""
        cluster.release(self.blocks.bias_cluster, cta.q, n, self.interpret)

    @abc.abstractmethod
    def __call__(self, cta: Cta, n, p, ds, dk_acc, dv_acc):
        """Computes dV, dK and dQ of the n-th tile, from P^T and dS^T in 16 bits."""

    @abc.abstractmethod
    def start(self, cta: Cta):
        """Runs before the first tile."""

    @abc.abstractmethod
    def scores_issued(self, cta: Cta, n):
        """Runs when S^T and dP^T of the n-th tile have been issued."""

    @abc.abstractmethod
    def end(self, cta: Cta):
        """Runs after the last tile."""


class Together(Finish):
    """Finishes steps with warpgroups that meet in each, both of which compute half of its dQ."""

    def __call__(self, cta: Cta, n, p, ds, dk_acc, dv_acc):
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
                registers.use_zero(self.interpret)
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

    def start(self, cta: Cta):
        """Does nothing before the first tile: both warpgroups begin at the same time."""

    def scores_issued(self, cta: Cta, n):
        """Does nothing once products are issued: neither warpgroup waits for the other's."""

    def end(self, cta: Cta):
        """Does nothing after the last tile: every step has finished its own dQ."""


class Alternating(Finish):
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

    def __call__(self, cta: Cta, n, p, ds, dk_acc, dv_acc):
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

    def start(self, cta: Cta):
        """Makes warpgroup 1 wait for the first products of the other."""
        pl.when(cta.wg == 1)(lambda: self.await_turn(cta))

    def of_dq(self, cta: Cta, n):
        """Returns the tile whose dQ is computed with dV and dK of the n-th.

        It is n for warpgroup 1 and n - 1 for warpgroup 0: -1 in the first turn of a KV block.
        """
        return n - (WARPGROUPS - 1 - cta.wg)

    def hand_over(self, cta: Cta, of_dq):
        """Hands this warpgroup's part of dQ of that tile, in shared memory, over to be added."""
        plgpu.commit_smem()
        pl.when(of_dq >= 0)(lambda: self.add_dq(cta, of_dq))

    def scores_issued(self, cta: Cta, n):
        """Ends the turn, and then hands over dQ if that is to come late."""
        self.pass_turn(cta)
        if self.blocks.late_handover:
            self.hand_over(cta, self.of_dq(cta, n - 1))

    def end(self, cta: Cta):
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

    def last_dq(self, cta: Cta, dq_acc):
        """Computes this warpgroup's part of the last dQ, once both have written dS."""
        last = cta.walk.total - 1
        plgpu.barrier_wait(cta.bars.ds_ready.at[self.slot(cta, last)])
        plgpu.wgmma(dq_acc, *self.dq_operands(cta, self.slot(cta, last)))
        self.await_dq(cta, last)
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

    def slot(self, cta: Cta, n):
        """Returns the slot in which dS of the n-th tile lies; n may be -1."""
        slots = self.blocks.ds_stages
        return lax.rem(jnp.int32(cta.count(n) + slots), jnp.int32(slots))

    # The interpreter has no named barriers; mbarriers take their place there. With them the kernel
    # would be 1 to 14 % slower on H200.
    def await_turn(self, cta: Cta):
        """Waits until the other warpgroup has passed the turn."""
        if self.interpret:
            plgpu.barrier_wait(cta.bars.turn.at[cta.wg])
        else:
            inline.named_barrier("sync", cta.wg + inline.FIRST_NAMED_BARRIER, 128 * WARPGROUPS)

    def pass_turn(self, cta: Cta):
        """Passes the tensor cores to the other warpgroup."""
        other = WARPGROUPS - 1 - cta.wg
        if self.interpret:
            plgpu.barrier_arrive(cta.bars.turn.at[other])
        else:
            inline.named_barrier("arrive", other + inline.FIRST_NAMED_BARRIER, 128 * WARPGROUPS)
