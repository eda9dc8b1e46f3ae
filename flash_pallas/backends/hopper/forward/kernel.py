"""The forward kernel (FlashAttention-2 Algorithm 1, scheduled after FlashAttention-3 section 3).

A CTA has `warpgroups` consumer warpgroups, each of which folds KV blocks into 64 query rows, and
one producer warpgroup, which streams K and V through rings in shared memory by TMA.

    Q rows of a warpgroup   producer -> q, one slot; O is staged in a buffer of its own, or in q
    K, V blocks             producer -> k, v rings, each read by all warpgroups; bias, segment ids
                            and the like travel with K
    S, P, O, m, l           registers of the warpgroup that owns the rows

KV blocks are processed from the last to the first. The first step is peeled off and masks whatever
it must. Among the other blocks, those at either edge of a mask have loops of their own. In every
step QK^T of block j and PV of block j - 1 are in flight together, and the softmax of j is
overlapped with PV of j - 1. The warpgroups take turns at issuing (ping-pong), so that the
tensor cores work for one while another does its softmax. A persistent CTA issues the first QK^T of
its next Q tile together with the last PV of the current one.

Where it can, a step speculates that no row max has grown by much. It takes P = 2**(x - m) and the
row sums with the m of earlier blocks, so that no exponential waits for the max of its row, and O
and l stay as they are. That is exact, because O / l is the same for every m: a float has as many
digits at 2**20 as at 1. The only thing that m must prevent is overflow. P is positive, so a sum of
at most 2**20 (2**14 in float16) bounds its terms. Where a sum is larger, or NaN, the warp finds the
maxima, rescales O and l, and computes P again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import bounds, padding
from ....core.problem import Operands, Outputs, Problem
from ...gpu import inline, row_maxima
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ..common.far_rows import Part, forward_gains, parts
from ..common.pipeline import Ring, rows_of
from ..common.zero_padding import Padding
from . import tiles
from .loads import ForwardInlineLoads, ForwardProducer
from .plan import ForwardCta, ForwardGmem, ForwardPlan, ForwardResults, ForwardRows, Work
from .scheduler import Assignment, TileOrder, with_counter
from .softmax import Finished, ForwardScores, Logits, per_row
from .tiles import ForwardBlocks


@dataclasses.dataclass(frozen=True)
class ForwardKernel:
    """One launch of the forward kernel; the methods are the phases of a CTA."""

    plan: ForwardPlan

    @property
    def problem(self) -> Problem:
        """The attention problem that is computed."""
        return self.plan.problem

    @property
    def interpret(self) -> bool:
        """True if the kernel is run by the interpreter."""
        return self.plan.interpret

    @property
    def scores(self) -> ForwardScores:
        """The work between the products and the softmax."""
        return ForwardScores(self.plan)

    @property
    def blocks(self) -> ForwardBlocks:
        """Tile sizes of the kernel."""
        return self.plan.blocks

    @property
    def feeder(self) -> ForwardInlineLoads:
        """The loads of the compute warpgroups, where there is no producer."""
        return ForwardInlineLoads(self.plan)

    @property
    def turns(self) -> PingPongBarrier:
        """The turns in which warpgroups issue products."""
        return PingPongBarrier(self.blocks.warpgroups, self.interpret)

    def __call__(self, counter, gmem: ForwardGmem, *refs):
        """Runs a CTA; `refs` are those of the results, of shared memory and of the barriers.

        A launch for Part.FAR does so only where a warpgroup of the CTA has left rows.
        """
        *results, smem, bars = refs
        stages = self.blocks.stages
        cta = ForwardCta(
            gmem=gmem,
            out=ForwardResults(**dict(zip(self.plan.result_names, results, strict=True))),
            smem=smem,
            k=Ring(bars.k_full, bars.k_empty, stages),
            v=Ring(bars.v_full, bars.v_empty, stages),
            bars=bars,
            index=lax.axis_index("cta"),
            wg=lax.axis_index("wg"),
            counter=counter,
        )
        if self.plan.part is not Part.FAR:
            self.run(cta)
            return
        left = [cta.out.left[cta.index, wg, 0] for wg in range(self.blocks.warpgroups)]
        pl.when(functools.reduce(lax.max, left) > 0)(lambda: self.run(cta))

    def run(self, cta: ForwardCta):
        """Gives each warpgroup its role: consumer or producer."""
        pl.when(cta.wg < self.blocks.warpgroups)(lambda: self.consume(cta))
        if self.blocks.producer:
            pl.when(cta.wg == self.blocks.warpgroups)(lambda: ForwardProducer(self.plan)(cta))

    # --- a compute warpgroup -------------------------------------------------------------------

    def consume(self, cta: ForwardCta):
        """Runs a consumer warpgroup: folds the KV blocks of each tile into its 64 rows."""
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        if self.plan.part is Part.NEAR:
            cta.out.left[cta.index, cta.wg, 0] = jnp.int32(0)
        first = jnp.int32(0)
        number = self.plan.queue.first(cta)
        work = self.plan.work(cta, number)
        start = cta if self.blocks.producer else self.feeder.start(cta, number)
        work = work._replace(held=self.scores.hold(cta, work))
        plgpu.barrier_wait(cta.bars.q_full.at[cta.wg])
        cta.k.wait_full(first)
        s = self.first_products(cta)
        rows = self.first_softmax(cta, work, s, first, lambda: start.k.release(first))
        rows = self.begun(rows, self.plan.products.split(rows.p))
        self.turns.start(cta.wg)

        def tile(turn, number, carry):
            rows, used = carry
            return pl.run_scoped(
                functools.partial(self.tile, cta, (turn, number), rows, used),
                plgpu.ACC((WARPGROUP_ROWS, self.problem.v_head_dim), jnp.float32),
            )

        _, used = self.plan.queue.each(cta, tile, (rows, jnp.int32(0)))
        if not self.blocks.producer:
            self.feeder.end(cta, used)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tile(self, cta: ForwardCta, at, rows: ForwardRows, used, o_acc):
        """Runs all steps of one Q tile; `at` is its (turn, number).

        `used` is the ring position of its first KV block. Returns ((rows, used), following): what
        the next tile starts with, its ring position, and its (number, whether it exists).
        `following` is None where the kernel is not persistent.
        """
        turn, number = at
        work = self.plan.work(cta, number)._replace(used=used)
        following = None
        if not self.blocks.producer:
            cta, following = self.feeder.tile(cta, turn, number, work)
        work = work._replace(held=self.scores.hold(cta, work))
        q = cta.smem.q.at[cta.wg]
        step = functools.partial(self.step, cta, work, q, o_acc)
        for edges, low, high in self.plan.zones(cta, work):
            rows = lax.fori_loop(low, high, functools.partial(step, edges=edges), rows)
        after = used + work.kv_blocks
        if self.blocks.persistent:
            following = following or self.plan.queue.following(cta, turn)
            return (self.seam(cta, number, following, rows, after, o_acc), after), following
        cta.v.wait_full(after - 1)
        self.plan.products.multiply(o_acc, rows.p, cta.smem.v.at[cta.v.slot(after - 1)])
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        cta.v.release(after - 1)
        found = begin(self.scores, cta, work, rows)
        store(self.scores, cta, work, o, found, staged=False)
        return (rows, after), None

    def step(self, cta: ForwardCta, work: Work, q, o_acc, j, rows: ForwardRows, *, edges: str):
        """Issues QK^T of block j and PV of j - 1, then does the softmax of j while PV finishes."""
        use = work.used + j
        cta.k.wait_full(use)
        s = self.issue(cta, q, use, rows.p, use - 1, o_acc)
        release = lambda: cta.k.release(use)
        tile = self.logits(cta, work, use, s, j, edges, release)
        if self.scores.bounded:
            p, sums = self.bounded_weights(cta, work, use, tile)
            return ForwardRows(p, None, rows.l + sums, self.scores.joined(rows.only, p, edges))
        if self.plan.speculates:
            o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            cta.v.release(use - 1)
            o_acc[...], rows = self.scores.speculate(cta, work, tile, rows, o)
            return rows._replace(p=self.plan.products.split(rows.p))
        found = self.scores.compared(cta, tile, rows.maxima, self.plan.lazy_rescale or None)
        tile, grew = tile._replace(x=found.x), found.grew
        safe_m = self.scores.finite(found.m, edges)
        alpha = jnp.exp2(found.before - safe_m)
        if self.scores.in_one_pass:
            o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            cta.v.release(use - 1)
            p, sums = self.scores.weights(cta, work, tile, safe_m, self.problem.dtype)
            p = self.plan.products.split(p)
        else:
            p, sums = self.scores.plain_weights(tile, safe_m)
            p = self.scores.dropped(cta, work, tile, p)
            # Keeps the whole softmax above the wait; ptxas then moves the wait up into the row
            # maximum by itself. Anything that pins it lower measured 1 to 11 % slower on H200.
            p, sums, alpha = lax.optimization_barrier((p, sums, alpha))
            o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            cta.v.release(use - 1)
            p = self.plan.products.split(p)
        l = rows.l * per_row(alpha, rows.l.shape) + sums
        if grew is None:
            o_acc[...] = o * per_row(alpha, o.shape)
        else:
            # Converted before the branch, p fills issue slots between the exponentials (2 %).
            p = lax.optimization_barrier(p)
            rescale = lambda: o * per_row(alpha, o.shape)
            o_acc[...] = lax.cond(grew > 0, rescale, lambda: o)
        return ForwardRows(p, found.maxima, l)

    def bounded_weights(self, cta: ForwardCta, work: Work, use, tile: Logits):
        """Returns (p as an operand, row sums) of a step without row maxima.

        It waits for PV of the block before and releases that block's V.
        """
        weights = functools.partial(self.scores.weights, cta, work, tile, None)
        first = None
        if self.blocks.weighs_first and self.scores.cap(tile.edges) is not None:
            # 16 bits would take more registers than those that PV reads; float32 takes the logits'.
            first = lax.optimization_barrier(weights(jnp.float32))
        plgpu.wgmma_wait(0)
        cta.v.release(use - 1)
        p, sums = weights(self.problem.dtype) if first is None else first
        return self.plan.products.split(p), sums

    def seam(
        self, cta: ForwardCta, number, following, rows: ForwardRows, after, o_acc
    ) -> ForwardRows:
        """Overlaps this tile's last PV with the next tile's first QK^T and softmax; stores O.

        After the CTA's last tile the QK^T multiplies what is left in shared memory, and its result
        is not used: cheaper than a second copy of this code.
        """
        number_after, more = following
        # Not to be hoisted: what is made from it would be held over the loops, in local memory.
        wg, after = lax.optimization_barrier((cta.wg, after))
        if not self.blocks.producer:
            number, number_after = lax.optimization_barrier((number, number_after))
        work, following = self.plan.work(cta, number), self.plan.work(cta, number_after)
        if self.plan.part is Part.NEAR:  # here, where S of the next tile has no registers yet
            left = cta.out.left.at[cta.index, wg]
            row_maxima.tell_far(left, rows.maxima.m, rows.l, self.plan.limit, self.interpret)
        plgpu.barrier_arrive(cta.bars.q_empty.at[wg])
        if not self.blocks.producer:
            self.feeder.next_q(cta, (number_after, more))

        @pl.when(more)
        def _():
            plgpu.barrier_wait(cta.bars.q_full.at[wg])
            cta.k.wait_full(after)

        s = self.issue(cta, cta.smem.q.at[wg], after, rows.p, after - 1, o_acc)
        following = following._replace(held=self.scores.hold(cta, following))
        # Early: before the next tile has a shift. And ptxas moves nothing over the branch of a
        # softmax that looks for far rows, so that what stands behind it does not overlap with
        # the matmuls (1.9 % at T=1024).
        found, early = None, self.plan.keeps_shift
        if early:
            found = begin(self.scores, cta, work, rows)
            stage_rows(cta, found)
        release = lambda: pl.when(more)(lambda: cta.k.release(after))
        start = self.first_softmax(cta, following, s, after, release)
        start = lax.optimization_barrier(start)
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        cta.v.release(after - 1)
        p16 = self.plan.products.split(start.p)
        if found is None:
            found = begin(self.scores, cta, work, rows)
        store(self.scores, cta, work, o, found, staged=early)
        return self.begun(start, p16)

    def begun(self, rows: ForwardRows, p) -> ForwardRows:
        """Returns the rows after the first softmax of a tile, with its weights p as an operand."""
        return rows._replace(p=p, only=self.scores.joined(None, p, "last"))

    def issue(self, cta: ForwardCta, q, k_use, p, v_use, o_acc):
        """Issues S = QK^T and O += PV in this warpgroup's turn; returns S, leaves PV in flight."""

        def products(s_acc):
            multiply = self.plan.products.multiply
            self.turns.wait(cta.wg)
            multiply(s_acc, q, cta.smem.k.at[cta.k.slot(k_use)], transposed=True)
            cta.v.wait_full(v_use)
            multiply(o_acc, p, cta.smem.v.at[cta.v.slot(v_use)])
            self.turns.give(cta.wg)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=self.plan.products.count)

        return pl.run_scoped(products, self.score_accumulator)

    def first_products(self, cta: ForwardCta):
        """Computes S = QK^T of the CTA's first KV block."""

        def product(s_acc):
            q, k = cta.smem.q.at[cta.wg], cta.smem.k.at[0]
            self.plan.products.multiply(s_acc, q, k, transposed=True)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        return pl.run_scoped(product, self.score_accumulator)

    def first_softmax(self, cta: ForwardCta, work: Work, s, use, release) -> ForwardRows:
        """Computes the softmax of a tile's first (rightmost, always masked) block; p is float32."""
        tile = self.logits(cta, work, use, s, jnp.int32(0), "last", release)
        m = maxima = None
        if not self.scores.bounded:
            found = self.scores.compared(cta, tile, self.scores.unseen(tile), None)
            tile, m, maxima = tile._replace(x=found.x), found.m, found.maxima
        p, sums = self.scores.plain_weights(tile, self.scores.finite(m, "last"))
        return ForwardRows(self.scores.dropped(cta, work, tile, p), maxima, sums)

    def logits(self, cta: ForwardCta, work: Work, use, s, j, edges: str, release) -> Logits:
        """Returns Scores.logits of the j-th block; calls `release` once K's slot has been read."""
        streams = self.plan.side.copies > 0
        if not streams:
            release()
        inputs = self.scores.inputs(cta, work, cta.k.slot(use), edges)
        found = self.scores.logits(cta, work, inputs, s, work.block(j), edges)
        if streams:
            release()
        return found

    @property
    def score_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_kv), jnp.float32)


def forward(
    problem: Problem, blocks: ForwardBlocks, operands: Operands, num_sms: int, interpret: bool
) -> Outputs:
    """Launches the forward kernel.

    Args:
        problem: a problem with native head dims, whose lengths include no padding.
        blocks: tile sizes.
        operands: q, k and v as operands of common/wgmma.py.
        num_sms: number of SMs, for a persistent kernel.
        interpret: run by the interpreter.

    Returns:
        Outputs: o, a result of common/wgmma.py, is as long as q; others are as long as whole tiles.
    """
    order = TileOrder.of(problem, blocks.warpgroups * WARPGROUP_ROWS)
    assignment = (
        Assignment.persistent(order, num_sms) if blocks.persistent else Assignment.one_each(order)
    )
    several = blocks.persistent and blocks.producer and bool(blocks.speculates)
    first, *rest = parts(problem, order.total, several and forward_gains(problem))
    plan = ForwardPlan(problem, blocks, assignment, interpret, first)
    rows = plan.tile_rows
    table = assignment.table(lambda block: plan.visited(block * rows + problem.spec.q_offset)[1])
    gmem = ForwardGmem(
        *(operands.q, operands.k, operands.v),
        table=jnp.asarray(table),
        q_offset=operands.q_offset,
        kv_bounds=(
            bounds.kv_bounds(problem, operands, rows, blocks.block_kv) if plan.dynamic else None
        ),
        padding=Padding.of(padding.valid_keys(operands), blocks.block_kv),
        whole=(bounds.kv_whole(operands, rows, blocks.block_kv) if plan.has_segments else None),
        side=plan.side.arrays(operands),
    )
    per_row = float32((problem.batch, problem.q_heads, order.q_tiles * rows))
    o = jax.ShapeDtypeStruct((*operands.q.shape[:3], operands.v.shape[3]), operands.v.dtype)
    left = jax.ShapeDtypeStruct((assignment.ctas, blocks.warpgroups, 1), jnp.int32)
    shapes = ForwardResults(o, lse=per_row, shift=per_row, most=per_row, left=left)
    results = tuple(getattr(shapes, name) for name in plan.result_names)
    run = functools.partial(
        launch,
        scratch=tiles.scratch(problem, blocks, gmem.q, gmem.v, o),
        grid={"cta": assignment.ctas},
        threads=blocks.warpgroups + blocks.producer,
        interpret=interpret,
    )
    call = functools.partial(run, out=results, name="flash_pallas_forward")
    kernel = lambda counter: call(functools.partial(ForwardKernel(plan), counter))(gmem)
    found = with_counter(kernel, results) if plan.claims else kernel(None)
    for part in rest:
        found = again(dataclasses.replace(plan, part=part), run, gmem, found)
    out = ForwardResults(**dict(zip(plan.result_names, found, strict=True)))
    return Outputs(out.o, out.lse, out.shift, out.most)


def again(plan: ForwardPlan, run, gmem: ForwardGmem, results):
    """Launches the kernel for the rows that an earlier launch has left; returns its `results`."""

    def kernel(refs, gmem, smem, bars):
        ForwardKernel(plan)(None, gmem, *refs, smem, bars)

    def write(refs):
        run(functools.partial(kernel, refs), out=(), name="flash_pallas_forward_far")(gmem)

    return pl.run_state(write)(tuple(results))


VECTORS = ("lse", "shift", "most")  # the results of one value a row


def begin(scores: ForwardScores, cta: ForwardCta, work: Work, rows: ForwardRows) -> Finished:
    """Finishes the rows, and waits until the previous tile's results have left shared memory."""
    found = scores.finish(cta, work, rows)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return found


def stage_rows(cta: ForwardCta, found: Finished):
    """Writes the per-row results, those of one value a row, to shared memory."""
    wg = lax.optimization_barrier(cta.wg)  # as in `store`
    for name in VECTORS:
        buffer = getattr(cta.smem, name)
        if buffer is not None:  # the zeros of Part.NEAR have no layout
            buffer[wg] = plgpu.layout_cast(getattr(found, name), inline.ROWS)


def store(scores: ForwardScores, cta: ForwardCta, work: Work, o, found: Finished, *, staged: bool):
    """Divides O by the row sums and issues the copies of all results.

    `staged`: `stage_rows` has already run for this tile.
    """
    batch, head, block = work.at
    # Not to be hoisted: addresses made from it would be held over the loops, in local memory.
    wg = lax.optimization_barrier(cta.wg)
    smem, out = cta.smem, cta.out
    staging = smem.q if smem.o is None else smem.o
    scores.plan.products.store(staging.at[wg], o * per_row(found.inverse, o.shape))
    if not staged:
        stage_rows(cta, found)
    plgpu.commit_smem()
    rows_at = pl.ds(block * scores.plan.tile_rows + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
    o_at = rows_of(out.o, (batch, rows_at, head), staging)
    plgpu.copy_smem_to_gmem(staging.at[wg], o_at)
    for name in VECTORS:
        buffer, target = getattr(smem, name), getattr(out, name)
        if buffer is not None:
            plgpu.copy_smem_to_gmem(buffer.at[wg], target.at[batch, head, rows_at])


# bar.sync waits until the previous warpgroup in the round has arrived (256 threads of the two).
# Worth 5 to 11 % on H200 (head dim 128: 1.086 against 1.014 of cuDNN), 12 to 18 % where steps
# speculate.
@dataclasses.dataclass(frozen=True)
class PingPongBarrier:
    """A round of warpgroups; it does nothing with one of them, or under the interpreter.

    Attributes:
        warpgroups: number of warpgroups.
        interpret: run by the interpreter, which has no named barriers.
    """

    warpgroups: int
    interpret: bool

    def start(self, wg: Any):
        """Starts the round: the last warpgroup lets the first one go."""
        pl.when(wg == self.warpgroups - 1)(lambda: self.give(wg))

    def wait(self, wg: Any):
        """Waits until the warpgroup before this one has issued its products."""
        if self.warpgroups > 1 and not self.interpret:
            inline.named_barrier("sync", wg + inline.FIRST_NAMED_BARRIER, 256)

    def give(self, wg: Any):
        """Lets the next warpgroup issue its products."""
        if self.warpgroups > 1 and not self.interpret:
            following = lax.rem(wg + 1, jnp.int32(self.warpgroups))
            inline.named_barrier("arrive", following + inline.FIRST_NAMED_BARRIER, 256)
