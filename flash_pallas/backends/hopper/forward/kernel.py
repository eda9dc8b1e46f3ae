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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import bounds, padding
from ....core.problem import Operands, Outputs, Problem
from ...gpu import inline, online_softmax
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ..common.auxiliary_inputs import Place
from ..common.far_rows import Part, forward_gains, parts
from ..common.pipeline import Loader, Padding, Ring, rows_of
from . import tiles
from .scheduler import Assignment, TileOrder, with_counter
from .softmax import Finished, ForwardScores, Logits, per_row
from .tiles import (
    ForwardBlocks,
    ForwardCta,
    ForwardGmem,
    ForwardPlan,
    ForwardResults,
    ForwardRows,
    Work,
)


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
            online_softmax.tell_far(left, rows.maxima.m, rows.l, self.plan.limit, self.interpret)
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


# --- The producer warpgroup of the forward kernel -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ForwardProducer:
    """Loads Q of each tile and its KV blocks from last to first, with K one block ahead of V.

    K's slot is freed before V's, because QK^T of a step ends before its PV; so K must not queue
    behind V. What modifiers read of a block travels with its K.
    """

    plan: ForwardPlan

    @property
    def blocks(self) -> ForwardBlocks:
        """Tile sizes of the kernel."""
        return self.plan.blocks

    def __call__(self, cta: ForwardCta):
        """Runs the producer warpgroup: loads all tiles of this CTA."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        first = self.plan.work(cta, self.plan.queue.first(cta))
        self.load_q(cta, first, jnp.int32(0))
        self.load_kv(cta, cta.k, first, jnp.int32(0), jnp.int32(0))
        tile = functools.partial(self.tile, cta)
        used = self.plan.queue.each(cta, tile, jnp.int32(0))
        cta.k.drain(used)
        cta.v.drain(used)
        if self.blocks.persistent:
            for wg in range(self.blocks.warpgroups):
                plgpu.barrier_wait(cta.bars.q_empty.at[wg])

    def tile(self, cta: ForwardCta, turn, number, used):
        """Loads the K and V blocks of one tile, and Q and the first K block of the next.

        The tile's own first K block has been loaded with the tile before. Returns (ring position of
        the next tile, (its number, whether it exists)).
        """
        work = self.plan.work(cta, number)

        @pl.loop(jnp.int32(1), work.kv_blocks)
        def _(j):
            self.load_kv(cta, cta.k, work, j, used + j)
            self.load_kv(cta, cta.v, work, j - 1, used + j - 1)

        last, after = work.kv_blocks - 1, used + work.kv_blocks
        number, more = self.plan.queue.claim(cta, turn)
        following = self.plan.work(cta, number)
        if self.blocks.persistent:
            pl.when(more)(lambda: self.load_kv(cta, cta.k, following, jnp.int32(0), after))
        self.load_kv(cta, cta.v, work, last, after - 1)
        if self.blocks.persistent:
            pl.when(more)(lambda: self.load_q(cta, following, turn + 1))
        return after, (number, more)

    def load_q(self, cta: ForwardCta, work: Work, turn):
        """Loads the 64 Q rows of each warpgroup, as soon as it has read its old ones."""
        for wg in range(self.blocks.warpgroups):
            if self.blocks.persistent:
                pl.when(turn > 0)(lambda wg=wg: plgpu.barrier_wait(cta.bars.q_empty.at[wg]))
            self.load_rows(cta, work, wg)

    def load_rows(self, cta: ForwardCta, work: Work, wg):
        """Issues the copy of the 64 Q rows of one warpgroup."""
        batch, head, block = work.at
        rows = pl.ds(block * self.plan.tile_rows + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        source = rows_of(cta.gmem.q, (batch, rows, head), cta.smem.q)
        plgpu.copy_gmem_to_smem(source, cta.smem.q.at[wg], cta.bars.q_full.at[wg])

    def load_kv(self, cta: ForwardCta, ring: Ring, work: Work, j, use):
        """Loads the j-th block of K or V from the right, as the use-th fill of its ring."""
        block, block_kv = work.block(j), self.blocks.block_kv
        start = block * block_kv
        head = lax.div(work.at.head, jnp.int32(self.plan.problem.group))
        keys = (work.at.batch, pl.ds(start, block_kv), head)
        slot = ring.slot(use)
        full = ring.full.at[slot]
        ring.wait_empty(use)
        if ring is cta.v:
            # PV alone sums over keys: what padding holds of K only reaches scores that are hidden.
            source = rows_of(cta.gmem.v, keys, cta.smem.v)
            self.load_v(cta, source, cta.smem.v.at[slot], full, work.at.batch, block)
            return
        source = rows_of(cta.gmem.k, keys, cta.smem.k)
        plgpu.copy_gmem_to_smem(source, cta.smem.k.at[slot], full)
        first_row, tile_rows = work.at.block * self.plan.tile_rows, self.plan.tile_rows
        place = Place(work.at.batch, work.at.head, first_row, start, tile_rows, block_kv)
        self.plan.side.load(cta.gmem.side, cta.smem.side, slot, full, place)

    def load_v(self, cta: ForwardCta, *copy):
        """Loads a block of V and clears its padding, if any; the arguments are those of Loader."""
        width, rows = self.plan.problem.v_head_dim, self.blocks.block_kv
        swizzle = self.plan.products.swizzle(width, cta.gmem.v, summed_rows=rows)
        padding, arrived = cta.gmem.padding, cta.bars.v_arrived
        Loader(padding, arrived, swizzle, self.plan.interpret)(*copy)


class Ahead(NamedTuple):
    """The blocks that can be loaded: those of a tile and of the tile after it."""

    number: Any  # of the tile
    used: Any  # ring position of its first block
    end: Any  # ring position after its last block
    following: Any = None  # number of the tile after it; None where nobody knows yet
    limit: Any = None  # ring position after that one's last block


@dataclasses.dataclass(frozen=True)
class ForwardInlineLoads:
    """The part of a producer's work that the compute warpgroups do."""

    plan: ForwardPlan

    def start(self, cta: ForwardCta, number) -> ForwardCta:
        """Loads what the first tile starts with; returns the CTA as its first step sees it."""
        work = self.plan.work(cta, number)
        ForwardProducer(self.plan).load_rows(cta, work, cta.wg)
        ahead = Ahead(number, jnp.int32(0), work.kv_blocks)

        @pl.when(self.loads(cta))
        def _():
            for use in range(self.plan.blocks.stages):
                self.fill(cta, cta.k, ahead, jnp.int32(use))
                self.fill(cta, cta.v, ahead, jnp.int32(use))

        return self.refilling(cta, ahead)

    def tile(self, cta: ForwardCta, turn, number, work: Work) -> tuple[ForwardCta, Any]:
        """Returns the CTA as the steps of the turn-th tile see it, and what the queue says is next.

        The latter is (number, whether it exists), or None where the kernel is not persistent. Slots
        that were released before this tile, for blocks that were not known then, are filled now;
        only tiles with fewer blocks than there are slots leave any.
        """
        queue, following = self.plan.queue, None
        ahead = Ahead(number, work.used, work.used + work.kv_blocks)
        if self.plan.blocks.persistent:
            if self.plan.claims:

                @pl.when(self.loads(cta))
                def _():
                    queue.claim(cta, turn)

            number, more = following = queue.following(cta, turn)
            blocks = jnp.where(more, self.plan.work(cta, number).kv_blocks, 0)
            ahead = ahead._replace(following=number, limit=ahead.end + blocks)

            @pl.when(self.loads(cta))
            def _():
                # The softmax of the tile's first block was part of the tile before.
                released = work.used + self.plan.blocks.stages
                for ring, stop in ((cta.k, released + 1), (cta.v, released)):
                    known, wanted = lax.min(stop, ahead.end), lax.min(stop, ahead.limit)
                    fill = functools.partial(self.fill, cta, ring, ahead)
                    pl.loop(known, wanted)(fill)

        return self.refilling(cta, ahead), following

    def end(self, cta: ForwardCta, used):
        """Waits for the releases that no later fill has waited for."""

        @pl.when(self.loads(cta))
        def _():
            cta.k.drain(used)
            cta.v.drain(used)

    def next_q(self, cta: ForwardCta, following):
        """Loads this warpgroup's Q rows of the next tile, once those of this one have been read."""
        number, more = following
        plgpu.barrier_wait(cta.bars.q_empty.at[cta.wg])
        load = lambda: ForwardProducer(self.plan).load_rows(
            cta, self.plan.work(cta, number), cta.wg
        )
        pl.when(more)(load)

    def loads(self, cta: ForwardCta):
        """Returns whether this warpgroup, the last, is the one that loads K and V."""
        return cta.wg == self.plan.blocks.warpgroups - 1

    def refilling(self, cta: ForwardCta, ahead: Ahead) -> ForwardCta:
        """Returns the CTA with rings whose slots are refilled as they are released."""

        def ring(plain: Ring) -> Ring:
            fill = functools.partial(self.fill, cta, plain, ahead)
            return plain._replace(refill=lambda use: pl.when(self.loads(cta))(lambda: fill(use)))

        return dataclasses.replace(cta, k=ring(cta.k), v=ring(cta.v))

    def fill(self, cta: ForwardCta, ring: Ring, ahead: Ahead, use):
        """Issues the use-th fill of a ring, if its block is known."""
        limit = ahead.end if ahead.limit is None else ahead.limit

        @pl.when(use < limit)
        def _():
            number, before = ahead.number, ahead.used
            if ahead.following is not None:
                inside = use < ahead.end
                number = lax.select(inside, number, ahead.following)
                before = lax.select(inside, before, ahead.end)
            # What follows from the number is found anew: held over the loop it would spill.
            work = self.plan.work(cta, lax.optimization_barrier(number))
            ForwardProducer(self.plan).load_kv(cta, ring, work, use - before, use)
