"""The forward kernel (FlashAttention-2 Algorithm 1, scheduled after FlashAttention-3 section 3).

A CTA holds `warpgroups` compute warpgroups, each folding key blocks into 64 query rows, and one
producer warpgroup that streams K and V through rings of shared memory by TMA.

    Q rows of a warpgroup   producer -> q, one slot; O is staged beside it, or in it
    K, V blocks             producer -> k, v rings, each read by all warpgroups
    S, P, O, m, l           registers of the warpgroup that owns the rows

Key blocks run from the last to the first, so that every masked block comes first: the first is
peeled off the loop, which leaves the main loop without a mask. In every step QK^T of block j and PV
of block j - 1 are in flight together, and the softmax of j runs under PV of j - 1. The warpgroups
take turns at issuing (named barriers), so that one computes while another does its softmax.
A persistent CTA issues the first QK^T of its next query tile together with the last PV of this one.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import softmax
from ...core.problem import Problem
from . import inline
from .blocks import ForwardBlocks
from .forward_plan import Cta, Gmem, Plan, Rows, Work
from .memory import WARPGROUP_ROWS, Ring, float32, launch
from .schedule import Assignment, TileOrder

FIRST_NAMED_BARRIER = 8  # above Mosaic's own, one for each of at most 4 warpgroups


@dataclasses.dataclass(frozen=True)
class Forward:
    """One launch; the methods are the phases of a CTA."""

    plan: Plan
    interpret: bool

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return self.plan.problem

    @property
    def blocks(self) -> ForwardBlocks:
        """Tile sizes."""
        return self.plan.blocks

    def __call__(self, *refs):
        *gmem, smem, bars = refs
        stages = self.blocks.stages
        cta = Cta(
            gmem=Gmem(*gmem),
            smem=smem,
            k=Ring(bars.k_full, bars.k_empty, stages),
            v=Ring(bars.v_full, bars.v_empty, stages),
            bars=bars,
            index=lax.axis_index("cta"),
            wg=lax.axis_index("wg"),
        )
        pl.when(cta.wg < self.blocks.warpgroups)(lambda: self.consume(cta))
        pl.when(cta.wg == self.blocks.warpgroups)(lambda: self.produce(cta))

    # --- the producer --------------------------------------------------------------------------

    def produce(self, cta: Cta):
        """Load Q of each tile, and its K and V blocks from last to first, K one block ahead of V.

        K's slot frees before V's (QK^T of a step ends before its PV), so K must not queue behind V.
        """
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        first = self.plan.work(cta, jnp.int32(0))
        self.load_q(cta, first, jnp.int32(0))
        self.load_kv(cta, cta.k, first, jnp.int32(0), jnp.int32(0))
        turns = self.plan.turns(cta)

        tile = functools.partial(self.produce_tile, cta, turns)
        used = lax.fori_loop(jnp.int32(0), turns, tile, jnp.int32(0))
        cta.k.drain(used)
        cta.v.drain(used)
        if self.blocks.persistent:
            for wg in range(self.blocks.warpgroups):
                plgpu.barrier_wait(cta.bars.q_empty.at[wg])

    def produce_tile(self, cta: Cta, turns, turn, used):
        """The K and V blocks of one tile, and the first K and the Q of the next."""
        work = self.plan.work(cta, turn)

        @pl.loop(jnp.int32(1), work.kv_blocks)
        def _(j):
            self.load_kv(cta, cta.k, work, j, used + j)
            self.load_kv(cta, cta.v, work, j - 1, used + j - 1)

        last, after = work.kv_blocks - 1, used + work.kv_blocks
        more = turn + 1 < turns
        following = self.plan.work(cta, turn + 1)
        if self.blocks.persistent:
            pl.when(more)(lambda: self.load_kv(cta, cta.k, following, jnp.int32(0), after))
        self.load_kv(cta, cta.v, work, last, after - 1)
        if self.blocks.persistent:
            pl.when(more)(lambda: self.load_q(cta, following, turn + 1))
        return after

    def load_q(self, cta: Cta, work: Work, turn):
        """Each warpgroup's 64 rows, as soon as it has read its last."""
        batch, head, block = work.at
        for wg in range(self.blocks.warpgroups):
            rows = pl.ds(block * self.plan.tile_rows + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
            if self.blocks.persistent:
                pl.when(turn > 0)(lambda wg=wg: plgpu.barrier_wait(cta.bars.q_empty.at[wg]))
            plgpu.copy_gmem_to_smem(
                cta.gmem.q.at[batch, rows, head], cta.smem.q.at[wg], cta.bars.q_full.at[wg]
            )

    def load_kv(self, cta: Cta, ring: Ring, work: Work, j, use):
        """The j-th block from the right of K or V, as the use-th fill of its ring."""
        gmem, smem = (cta.gmem.k, cta.smem.k) if ring is cta.k else (cta.gmem.v, cta.smem.v)
        block_kv = self.blocks.block_kv
        rows = pl.ds((work.kv_blocks - 1 - j) * block_kv, block_kv)
        head = lax.div(work.at.head, jnp.int32(self.problem.group))
        slot = ring.slot(use)
        ring.wait_empty(use)
        plgpu.copy_gmem_to_smem(
            gmem.at[work.at.batch, rows, head], smem.at[slot], ring.full.at[slot]
        )

    # --- a compute warpgroup -------------------------------------------------------------------

    def consume(self, cta: Cta):
        """Fold the key blocks of each tile into this warpgroup's rows."""
        plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        work = self.plan.work(cta, jnp.int32(0))
        plgpu.barrier_wait(cta.bars.q_full.at[cta.wg])
        cta.k.wait_full(jnp.int32(0))
        scores = self.first_scores(cta)
        cta.k.release(jnp.int32(0))
        rows = self.first_softmax(cta, work, scores)
        self.pass_turn_once(cta)

        def tile(turn, carry):
            rows, used = carry
            return pl.run_scoped(
                functools.partial(self.tile, cta, turn, rows, used),
                plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32),
            )

        turns = self.plan.turns(cta)
        lax.fori_loop(jnp.int32(0), turns, tile, (rows, jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tile(self, cta: Cta, turn, rows: Rows, used, o_acc):
        """All steps of one query tile; `used` is the ring position of its first key block."""
        work = self.plan.work(cta, turn)._replace(used=used)
        q = cta.smem.q.at[cta.wg]
        if self.blocks.q_in_registers:
            q = plgpu.load(q, layout=inline.WGMMA)
        step = functools.partial(self.step, cta, work, q, o_acc)
        unmasked_from = jnp.int32(1)
        if self.plan.masked_blocks != 1:
            whole = jnp.int32(self.plan.unmasked(work.position + cta.wg * WARPGROUP_ROWS))
            unmasked_from = lax.clamp(jnp.int32(1), work.kv_blocks - whole, work.kv_blocks)
            masked = functools.partial(step, masked=True)
            rows = lax.fori_loop(jnp.int32(1), unmasked_from, masked, rows)
        plain = functools.partial(step, masked=False)
        rows = lax.fori_loop(unmasked_from, work.kv_blocks, plain, rows)
        after = used + work.kv_blocks
        if self.blocks.persistent:
            return self.seam(cta, turn, rows, after, o_acc), after
        cta.v.wait_full(after - 1)
        plgpu.wgmma(o_acc, rows.p, cta.smem.v.at[cta.v.slot(after - 1)])
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        cta.v.release(after - 1)
        self.store(cta, work, o, rows)
        return rows, after

    def step(self, cta: Cta, work: Work, q, o_acc, j, rows: Rows, *, masked):
        """QK^T of block j beside PV of block j - 1, then the softmax of j while PV ends."""
        use = work.used + j
        cta.k.wait_full(use)
        s = self.issue(cta, q, use, rows.p, use - 1, o_acc)
        cta.k.release(use)
        if masked:
            s = inline.hide(
                s, self.plan.limits(cta, work, work.kv_blocks - 1 - j, tail=False), self.interpret
            )
        log2_scale = self.problem.spec.scale * softmax.LOG2E
        m = jnp.maximum(rows.m, s.max(axis=1) * log2_scale)
        grew = None
        if self.blocks.lazy_rescale:
            m, grew = inline.lazy_max(rows.m, m, self.blocks.lazy_rescale, self.interpret)
        safe_m = _finite(m) if masked else m
        alpha = jnp.exp2(rows.m - safe_m)
        p = jnp.exp2(s * log2_scale - _per_row(safe_m, s.shape))
        l = rows.l * _per_row(alpha, rows.l.shape) + inline.lane_sums(p, self.interpret)
        # Keeps the whole softmax above the wait; ptxas then moves the wait up into the row maximum
        # by itself. Anything that pins it lower measured 1 to 11 % slower on H200.
        p, m, l, alpha = lax.optimization_barrier((p, m, l, alpha))
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        cta.v.release(use - 1)
        p16 = p.astype(rows.p.dtype)
        if grew is None:
            o_acc[...] = o * _per_row(alpha, o.shape)
        else:
            # Converted before the branch, p fills issue slots between the exponentials (2 %).
            p16 = lax.optimization_barrier(p16)
            rescale = lambda: o * _per_row(alpha, o.shape)
            o_acc[...] = lax.cond(grew > 0, rescale, lambda: o)
        return Rows(p16, m, l)

    def seam(self, cta: Cta, turn, rows: Rows, after, o_acc) -> Rows:
        """The last PV of this tile beside the first QK^T and softmax of the next; then the store.

        After the CTA's last tile the QK^T multiplies what is left in shared memory, unused: cheaper
        than a second copy of this code.
        """
        work, following = self.plan.work(cta, turn), self.plan.work(cta, turn + 1)
        more = turn + 1 < self.plan.turns(cta)
        if self.blocks.q_in_registers:
            plgpu.commit_smem()  # orders our reads of Q before the copy that overwrites it
        plgpu.barrier_arrive(cta.bars.q_empty.at[cta.wg])

        @pl.when(more)
        def _():
            plgpu.barrier_wait(cta.bars.q_full.at[cta.wg])
            cta.k.wait_full(after)

        s = self.issue(cta, cta.smem.q.at[cta.wg], after, rows.p, after - 1, o_acc)
        pl.when(more)(lambda: cta.k.release(after))
        start = lax.optimization_barrier(self.first_softmax(cta, following, s, convert=False))
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        cta.v.release(after - 1)
        p16 = start.p.astype(rows.p.dtype)
        self.store(cta, work, o, rows)
        return start._replace(p=p16)

    def issue(self, cta: Cta, q, k_use, p, v_use, o_acc):
        """Issue S = QK^T and O += PV when it is our turn; return S, leave O pending."""

        def products(s_acc):
            self.await_turn(cta)
            plgpu.wgmma(s_acc, q, cta.smem.k.at[cta.k.slot(k_use)].transpose((1, 0)))
            cta.v.wait_full(v_use)
            plgpu.wgmma(o_acc, p, cta.smem.v.at[cta.v.slot(v_use)])
            self.pass_turn(cta)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

        return pl.run_scoped(products, self.score_accumulator)

    def first_scores(self, cta: Cta):
        """QK^T of the CTA's first block."""

        def product(s_acc):
            plgpu.wgmma(s_acc, cta.smem.q.at[cta.wg], cta.smem.k.at[0].transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        return pl.run_scoped(product, self.score_accumulator)

    def first_softmax(self, cta: Cta, work: Work, s, convert=True) -> Rows:
        """The softmax of a tile's first (rightmost, always masked) block."""
        log2_scale = self.problem.spec.scale * softmax.LOG2E
        s = inline.hide(
            s, self.plan.limits(cta, work, work.kv_blocks - 1, tail=True), self.interpret
        )
        m = s.max(axis=1) * log2_scale
        safe_m = m if self.problem.spec.mask.is_trivial else _finite(m)
        p = jnp.exp2(s * log2_scale - _per_row(safe_m, s.shape))
        l = inline.lane_sums(p, self.interpret)
        return Rows(p.astype(self.problem.dtype) if convert else p, m, l)

    def store(self, cta: Cta, work: Work, o, rows: Rows):
        """Divide by the row sums and write O and the log-sum-exp."""
        batch, head, block = work.at
        inverse, lse = softmax.finish(rows.m, rows.l.sum(axis=1))
        staging = cta.smem.q if cta.smem.o is None else cta.smem.o
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[cta.wg] = (o * _per_row(inverse, o.shape)).astype(self.problem.dtype)
        cta.smem.lse[cta.wg] = lse
        plgpu.commit_smem()
        row = block * self.plan.tile_rows + cta.wg * WARPGROUP_ROWS
        rows_at = pl.ds(row, WARPGROUP_ROWS)
        plgpu.copy_smem_to_gmem(staging.at[cta.wg], cta.gmem.o.at[batch, rows_at, head])
        plgpu.copy_smem_to_gmem(cta.smem.lse.at[cta.wg], cta.gmem.lse.at[batch, head, rows_at])

    @property
    def score_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_kv), jnp.float32)

    # --- taking turns --------------------------------------------------------------------------

    # bar.sync waits until the previous warpgroup in the round has arrived (256 threads of the two).
    # Worth 5 to 11 % on H200 (head dim 128: 1.086 against 1.014 of cuDNN).
    def await_turn(self, cta: Cta):
        """Wait until the warpgroup before this one has issued its products."""
        if self.blocks.warpgroups > 1 and not self.interpret:
            inline.named_barrier("sync", cta.wg + FIRST_NAMED_BARRIER, 256)

    def pass_turn(self, cta: Cta):
        """Let the next warpgroup issue."""
        if self.blocks.warpgroups > 1 and not self.interpret:
            following = lax.rem(cta.wg + 1, jnp.int32(self.blocks.warpgroups))
            inline.named_barrier("arrive", following + FIRST_NAMED_BARRIER, 256)

    def pass_turn_once(self, cta: Cta):
        """Start the round: the last warpgroup lets the first one go."""
        pl.when(cta.wg == self.blocks.warpgroups - 1)(lambda: self.pass_turn(cta))


def _per_row(x, shape):
    return lax.broadcast_in_dim(x, shape, (0,))


def _finite(m):
    """0 for rows that have seen no key yet, so that their weights are exp2(-inf) = 0, not NaN."""
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def forward(problem: Problem, blocks: ForwardBlocks, arrays, num_sms: int, interpret: bool):
    """Launch. `arrays`: q, k, v, q_offset as memory.py's padding leaves them.

    Returns (o in q's shape, lse_log2 f32[B, N, whole tiles of T]).
    """
    q, k, v, q_offset = arrays
    order = TileOrder.of(problem, blocks.warpgroups * WARPGROUP_ROWS)
    assignment = (
        Assignment.persistent(order, num_sms) if blocks.persistent else Assignment.one_each(order)
    )
    plan = Plan(problem, blocks, assignment)
    rows, dtype = plan.tile_rows, problem.dtype
    table = assignment.table(lambda block: plan.visited(block * rows + problem.spec.q_offset))
    run = launch(
        Forward(plan, interpret),
        out=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            float32((problem.batch, problem.q_heads, order.q_tiles * rows)),
        ),
        scratch=plan.scratch(),
        grid=(assignment.ctas,),
        grid_names=("cta",),
        threads=blocks.warpgroups + 1,
        name="flash_pallas_forward",
        interpret=interpret,
    )
    return run(q, k, v, jnp.asarray(table), q_offset)
