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
overlapped with PV of j - 1. A ping-pong barrier orders the warpgroups, so that the tensor cores
work for one while another does its softmax. A persistent CTA issues the first QK^T of its next Q
tile together with the last PV of the current one.

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

from ....core import padding
from ....core.problem import Operands, Outputs, Problem
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ...gpu.ptx import inline
from ..common.auxiliary_inputs import Place
from ..common.pipeline import Padding, Ring, rows_of
from .cta import (
    PER_ROW,
    ForwardCta,
    ForwardGmem,
    ForwardPlan,
    ForwardRows,
    QTile,
    with_state,
)
from .softmax import (
    bounded_softmax,
    exact_softmax,
    finish,
    first_softmax,
    joined,
    logits,
    per_row,
    speculative_softmax,
)
from .tiles import ForwardBlocks, ForwardSmem, is_bounded, team_scratch

# --- The launch -----------------------------------------------------------------------------------


def forward(
    problem: Problem, blocks: ForwardBlocks, operands: Operands, num_sms: int, interpret: bool
) -> Outputs:
    """Launches the forward kernel.

    Args:
        problem: a problem with native head dims, whose lengths include no padding.
        blocks: tile sizes.
        operands: q, k and v as operands of Matmuls.
        num_sms: number of SMs, for a persistent kernel.
        interpret: run by the interpreter.

    Returns:
        Outputs: o, an operand of Matmuls, is as long as q; others are as long as whole tiles.
    """
    blocks = blocks.possible(problem)
    num_ctas = num_sms * blocks.teams if blocks.persistent else None
    plan = ForwardPlan.of(problem, blocks, interpret, num_ctas)
    holes = Padding.of(padding.valid_keys(operands), blocks.block_kv)
    gmem = plan.arrays(operands)._replace(padding=holes)
    per_row = float32((problem.batch, problem.q_heads, plan.q_tiles * blocks.tile_rows))
    out = Outputs(
        o=jax.ShapeDtypeStruct((*operands.q.shape[:3], operands.v.shape[3]), operands.v.dtype),
        lse_log2=per_row,
        shift=per_row if plan.far else None,
        max_logit=per_row if problem.spec.max_logit else None,
    )

    kernel = functools.partial(forward_teams, plan)
    prepared = functools.partial(
        launch,
        out=(out,),
        scratch=team_scratch(problem, blocks, gmem.q, gmem.v, out.o),
        grid={"cta": pl.cdiv(plan.num_ctas, blocks.teams)},
        threads=(blocks.warpgroups + blocks.producer) * blocks.teams,
        name="flash_pallas_forward",
        interpret=interpret,
    )
    if not plan.claims:
        return prepared(functools.partial(kernel, None))(gmem)[0]
    claiming = lambda counter: prepared(functools.partial(kernel, counter))(gmem)
    return with_state(claiming, jnp.zeros((1,), jnp.int32), (out,))[1][0]


def forward_teams(
    plan: ForwardPlan,
    counter,
    gmem: ForwardGmem,
    out: Outputs,
    *smem: ForwardSmem,
    cta_type: type[ForwardCta] = ForwardCta,
):
    """Runs the teams of a CTA, each a `cta_type`; see ForwardCta for the arguments.

    Each has code of its own, so that the addresses of its shared memory are constants.
    """
    team = functools.partial(run_team, cta_type, plan, gmem, out, counter)
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    if len(smem) == 1:
        return team(smem[0], (cta, wg))
    size = plan.blocks.warpgroups + plan.blocks.producer
    for n, own in enumerate(smem):
        index, within = cta * len(smem) + n, wg - size * n
        is_own = (within >= 0) & (within < size) & (index < plan.num_ctas)
        pl.when(is_own)(functools.partial(team, own, (index, within)))


def run_team(cta_type: type[ForwardCta], plan: ForwardPlan, gmem, out, counter, smem, indices):
    """Runs a team of a CTA: gives each of its warpgroups its role, consumer or producer.

    `indices` are those of the team and of the warpgroup; see ForwardCta for the others.
    """
    blocks, (index, wg) = plan.blocks, indices
    cta = cta_type(plan, gmem, out, smem, smem.k_ring, smem.v_ring, index, wg, counter)
    pl.when(cta.wg < blocks.warpgroups)(functools.partial(consume, cta))
    if blocks.producer:
        pl.when(cta.wg == blocks.warpgroups)(functools.partial(produce, cta))


# --- A consumer warpgroup -------------------------------------------------------------------------


def consume(cta: ForwardCta):
    """Runs a consumer warpgroup: folds the KV blocks of each tile into its 64 rows."""
    plan, smem, first = cta.plan, cta.smem, jnp.int32(0)
    if plan.blocks.producer:
        plgpu.set_max_registers(plan.blocks.compute_registers, action="increase")
    number = cta.first_tile()
    tile = cta.q_tile(number)
    step_cta = cta if plan.blocks.producer else load_inline_first(cta, number)
    tile = tile._replace(fragments=cta.row_fragments(tile))
    plgpu.barrier_wait(smem.q_full.at[cta.wg])
    cta.k.wait_full(first)
    s = plan.matmuls.scores(smem.q.at[cta.wg], smem.k.at[0])
    rows = first_softmax(step_cta, tile, s, first)
    p = plan.matmuls.split(rows.p)
    rows = rows._replace(p=p, only=joined(plan, None, p, "last"))
    is_last = cta.wg == plan.blocks.warpgroups - 1  # which lets the first one go
    pl.when(is_last)(functools.partial(ping_pong_arrive, cta))
    o_acc = plgpu.ACC((WARPGROUP_ROWS, plan.problem.v_head_dim), jnp.float32)
    _, used = cta.each_tile(functools.partial(mainloop, cta), (rows, jnp.int32(0)), o_acc)
    if not plan.blocks.producer:
        drain_inline(cta, used)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def mainloop(cta: ForwardCta, n, number, carry, o_acc):
    """Runs the steps and the epilogue of the CTA's n-th Q tile, which has this number.

    Args:
        cta: the CTA.
        n: counts its tiles from 0.
        number: of the tile.
        carry: (rows after the first softmax of the tile, ring position of its first KV block).
        o_acc: accumulator of O.

    Returns:
        (carry of the next tile, following): its (number, whether it exists), or None where the
        kernel is not persistent.
    """
    (rows, used), blocks = carry, cta.plan.blocks
    tile, following, step_cta = cta.q_tile(number)._replace(used=used), None, cta
    if not blocks.producer:
        step_cta, following = load_inline(cta, n, number, tile)
    tile = tile._replace(fragments=step_cta.row_fragments(tile))
    for edges, low, high in step_cta.zones(tile):
        fold_block = functools.partial(step, step_cta, tile, o_acc, edges=edges)
        rows = lax.fori_loop(low, high, fold_block, rows)
    after = used + tile.kv_blocks
    if not blocks.persistent:
        epilogue(step_cta, tile, rows, after, o_acc)
        return (rows, after), None
    following = following or step_cta.following(n)
    rows = overlapped_epilogue(step_cta, number, following, rows, after, o_acc)
    return (rows, after), following


def step(cta: ForwardCta, tile: QTile, o_acc, j, rows: ForwardRows, *, edges: str) -> ForwardRows:
    """Folds the j-th KV block into the rows; PV is one block behind QK^T.

    (1) S = Q K^T of block j
    (2) O += P V of block j - 1
        the softmax of block j, while (2) finishes
    """
    use = tile.used + j
    if tile.listed is not None:
        tile = tile._replace(step_block=tile.kv_block(j))  # under the wait for K
    cta.k.wait_full(use)
    s = matmuls(cta, cta.smem.q.at[cta.wg], use, rows.p, o_acc)  # issues (1), (2); waits for (1)
    tile, z = logits(cta, tile, s, j, edges, use)  # scaled, modified and masked; releases K
    # Each of these computes P and its row sums, waits for (2), releases V and rescales O and l.
    if is_bounded(cta.plan.problem):
        return bounded_softmax(cta, tile, z, rows, use, o_acc)
    if cta.plan.blocks.speculates:
        return speculative_softmax(cta, tile, z, rows, use, o_acc)
    return exact_softmax(cta, tile, z, rows, use, o_acc)


def matmuls(cta: ForwardCta, q, use, p, o_acc):
    """Issues both matmuls of a step, with the tensor cores to itself; returns S.

    Args:
        cta: the CTA.
        q: Q of this warpgroup, [64, H] in shared memory.
        use: ring position of K; V is that of the block before.
        p: P of the block before, as an operand.
        o_acc: accumulator of O; PV is still in flight at the end.
    """
    multiply, v_use = cta.plan.matmuls.multiply, use - 1

    def issue(s_acc):
        ping_pong_wait(cta)
        multiply(s_acc, q, cta.smem.k.at[cta.k.slot(use)], transposed=True)  # (1) S = Q K^T
        cta.v.wait_full(v_use)
        multiply(o_acc, p, cta.smem.v.at[cta.v.slot(v_use)])  # (2) O += P V
        ping_pong_arrive(cta)
        return plgpu.wgmma_accumulator_load(s_acc, wait_n=cta.plan.matmuls.count)

    s = plgpu.ACC((WARPGROUP_ROWS, cta.plan.blocks.block_kv), jnp.float32)
    return pl.run_scoped(issue, s)


# --- The ping-pong barrier ------------------------------------------------------------------------
# While one warpgroup does its softmax, another has the tensor cores. bar.sync waits until the
# previous warpgroup in the round has arrived (256 threads of the two). Worth 5 to 11 % on H200
# (head dim 128: 1.086 against 1.014 of cuDNN), 12 to 18 % where steps speculate. There is none with
# one warpgroup, nor under the interpreter, which has no named barriers.


def ping_pong_wait(cta: ForwardCta):
    """Waits until the warpgroup before this one has issued its matmuls."""
    if cta.plan.blocks.warpgroups > 1 and not cta.plan.interpret:
        inline.named_barrier("sync", cta.wg + inline.FIRST_NAMED_BARRIER, 256)


def ping_pong_arrive(cta: ForwardCta):
    """Lets the next warpgroup issue its matmuls."""
    warpgroups = cta.plan.blocks.warpgroups
    if warpgroups > 1 and not cta.plan.interpret:
        following = lax.rem(cta.wg + 1, jnp.int32(warpgroups))
        inline.named_barrier("arrive", following + inline.FIRST_NAMED_BARRIER, 256)


# --- The epilogue ---------------------------------------------------------------------------------


def epilogue(cta: ForwardCta, tile: QTile, rows: ForwardRows, after, o_acc):
    """Ends a tile: O += P V of its last block, then the results.

    `after` is the ring position after the tile.
    """
    cta.v.wait_full(after - 1)
    cta.plan.matmuls.multiply(o_acc, rows.p, cta.smem.v.at[cta.v.slot(after - 1)])
    o = cta.wait_pv(o_acc, after)
    inverse, row_outputs = finish_rows(cta, tile, rows)
    store_tile(cta, tile, o, inverse, row_outputs)


def overlapped_epilogue(
    cta: ForwardCta, number, following, rows: ForwardRows, after, o_acc
) -> ForwardRows:
    """Overlaps the epilogue of a tile with the prologue of the next, if there is one.

    (1) S = Q K^T of the next tile's first block
    (2) O += P V of this tile's last block
        the first softmax of the next tile, while (2) finishes; then this tile's results

    After the CTA's last tile (1) multiplies what is left in shared memory, and its result is not
    used: cheaper than a second copy of this code.
    """
    plan, smem, (number_after, more) = cta.plan, cta.smem, following
    # Not to be hoisted: what is made from it would be held over the loops, in local memory.
    wg, after = lax.optimization_barrier((cta.wg, after))
    if not plan.blocks.producer:
        number, number_after = lax.optimization_barrier((number, number_after))
    tile, next_tile = cta.q_tile(number), cta.q_tile(number_after)
    plgpu.barrier_arrive(smem.q_empty.at[wg])
    if not plan.blocks.producer:
        load_q_inline(cta, number_after, more)

    @pl.when(more)
    def _():
        plgpu.barrier_wait(smem.q_full.at[wg])
        cta.k.wait_full(after)

    s = matmuls(cta, smem.q.at[wg], after, rows.p, o_acc)  # issues (1), (2); waits for (1)
    next_tile = next_tile._replace(fragments=cta.row_fragments(next_tile))
    # Early: before the next tile has a shift. And ptxas moves nothing over the branch of a
    # softmax that looks for far rows, so that what stands behind it does not overlap with
    # the matmuls (1.9 % at T=1024).
    finished, early = None, smem.running_shift is not None
    if early:
        finished = finish_rows(cta, tile, rows)
        stage_rows(cta, finished[1])
    start = first_softmax(cta, next_tile, s, after, more)
    start = lax.optimization_barrier(start)
    o = cta.wait_pv(o_acc, after)
    p = plan.matmuls.split(start.p)
    inverse, row_outputs = finish_rows(cta, tile, rows) if finished is None else finished
    store_tile(cta, tile, o, inverse, row_outputs, rows_are_staged=early)
    return start._replace(p=p, only=joined(plan, None, p, "last"))


def finish_rows(cta: ForwardCta, tile: QTile, rows: ForwardRows):
    """Finishes the rows, and waits until the previous tile's results have left shared memory."""
    finished = finish(cta, tile, rows)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return finished


def stage_rows(cta: ForwardCta, row_outputs: Outputs):
    """Writes the per-row results to shared memory."""
    wg = lax.optimization_barrier(cta.wg)  # as in `store_tile`
    for name in PER_ROW:
        buffer = getattr(cta.smem, name)
        if buffer is not None:  # without the cast kernels are not those of gpu_coverage.json
            buffer[wg] = plgpu.layout_cast(getattr(row_outputs, name), inline.ROWS)


def store_tile(
    cta: ForwardCta, tile: QTile, o, inverse, row_outputs: Outputs, *, rows_are_staged: bool = False
):
    """Divides O by the row sums and issues the copies of all results.

    Args:
        cta: the CTA.
        tile: the Q tile.
        o: f32[64, Hv].
        inverse: f32[64], what O is multiplied by.
        row_outputs: the per-row results.
        rows_are_staged: `stage_rows` has already run for this tile.
    """
    # Not to be hoisted: addresses made from it would be held over the loops, in local memory.
    wg = lax.optimization_barrier(cta.wg)
    smem, plan = cta.smem, cta.plan
    staging = smem.q if smem.o is None else smem.o
    plan.matmuls.store(staging.at[wg], o * per_row(inverse, o.shape))
    if not rows_are_staged:
        stage_rows(cta, row_outputs)
    plgpu.commit_smem()
    cta.store_rows(tile, wg, staging)


# --- The producer warpgroup -----------------------------------------------------------------------
# It loads Q of each tile and its KV blocks from last to first, with K one block ahead of V. K's
# slot is freed before V's, because QK^T of a step ends before its PV; so K must not queue behind V.
# What modifiers read of a block travels with its K.


def produce(cta: ForwardCta):
    """Runs the producer warpgroup: loads all tiles of this CTA."""
    blocks = cta.plan.blocks
    plgpu.set_max_registers(blocks.producer_registers, action="decrease")
    first = cta.q_tile(cta.first_tile())
    load_q(cta, first, jnp.int32(0))
    load_k(cta, first, jnp.int32(0), jnp.int32(0))
    used = cta.each_tile(functools.partial(load_tile, cta), jnp.int32(0))
    cta.k.drain(used)
    cta.v.drain(used)
    if blocks.persistent:
        for wg in range(blocks.warpgroups):
            plgpu.barrier_wait(cta.smem.q_empty.at[wg])


def load_tile(cta: ForwardCta, n, number, used):
    """Loads the K and V blocks of the CTA's n-th tile, and Q and the first K block of the next.

    The tile's own first K block has been loaded with the tile before. Returns (ring position of
    the next tile, (its number, whether it exists)).
    """
    tile, persistent = cta.q_tile(number), cta.plan.blocks.persistent
    if cta.plan.claims_ahead:
        # Its slot is free: Q of this tile is loaded, so consumers are done with the tile before.
        cta.claim(n)

    @pl.loop(jnp.int32(1), tile.kv_blocks)
    def _(j):
        load_k(cta, tile, j, used + j)
        load_v(cta, tile, j - 1, used + j - 1)

    last, after = tile.kv_blocks - 1, used + tile.kv_blocks
    number, more = cta.following(n, wait=False) if cta.plan.claims_ahead else cta.claim(n)
    following = cta.q_tile(number)
    if persistent:
        pl.when(more)(lambda: load_k(cta, following, jnp.int32(0), after))
    load_v(cta, tile, last, after - 1)
    if persistent:
        pl.when(more)(lambda: load_q(cta, following, n + 1))
    return after, (number, more)


def load_q(cta: ForwardCta, tile: QTile, n):
    """Loads the 64 Q rows of each warpgroup, as soon as it has read those of the tile before."""
    for wg in range(cta.plan.blocks.warpgroups):
        if cta.plan.blocks.persistent:
            read = cta.smem.q_empty.at[wg]
            pl.when(n > 0)(functools.partial(plgpu.barrier_wait, read))
        load_q_rows(cta, tile, wg)


def load_q_rows(cta: ForwardCta, tile: QTile, wg):
    """Issues the copy of the 64 Q rows of one warpgroup."""
    rows, full = cta.rows_at(tile, wg), cta.smem.q_full
    for source, target in cta.moving("q"):
        plgpu.copy_gmem_to_smem(rows_of(source, rows, target), target.at[wg], full.at[wg])


def load_k(cta: ForwardCta, tile: QTile, j, use):
    """Loads K of the j-th block from the right, as the use-th fill of its ring."""
    plan, block = cta.plan, tile.kv_block(j)
    keys, slot = cta.keys_at(tile, block), cta.k.slot(use)
    full = cta.k.full.at[slot]
    cta.k.wait_empty(use)
    cta.copy_k(keys, slot, full)
    rows, block_kv = plan.blocks.tile_rows, plan.blocks.block_kv
    place = Place(tile.batch, tile.head, tile.block * rows, block * block_kv, rows, block_kv)
    plan.aux.load(cta.gmem.aux, cta.smem.aux, slot, full, place)
    if plan.tangent_aux is not None:
        tangents = cta.gmem.tangents.aux, cta.smem.tangents.aux
        plan.tangent_aux.load(*tangents, slot, full, place)


def load_v(cta: ForwardCta, tile: QTile, j, use):
    """Loads V of the j-th block from the right and zeroes its padding, if any.

    PV alone sums over keys: what padding holds of K only reaches scores that are hidden.
    """
    block = tile.kv_block(j)
    keys, slot = cta.keys_at(tile, block), cta.v.slot(use)
    full = cta.v.full.at[slot]
    cta.v.wait_empty(use)
    cta.copy_v(tile, block, keys, slot, full)


# --- Inline loads: without a producer, the compute warpgroups load --------------------------------


class Ahead(NamedTuple):
    """The blocks that can be loaded: those of a tile and of the tile after it."""

    number: Any  # of the tile
    used: Any  # ring position of its first block
    end: Any  # ring position after its last block
    following: Any = None  # number of the tile after it; None while it is unknown
    limit: Any = None  # ring position after the last block of the tile after it


def load_inline_first(cta: ForwardCta, number) -> ForwardCta:
    """Loads what the first tile starts with; returns the CTA as its first step sees it."""
    tile = cta.q_tile(number)
    load_q_rows(cta, tile, cta.wg)
    ahead = Ahead(number, jnp.int32(0), tile.kv_blocks)

    @pl.when(loads_inline(cta))
    def _():
        for use in range(cta.plan.blocks.stages):
            fill_inline(cta, load_k, ahead, jnp.int32(use))
            fill_inline(cta, load_v, ahead, jnp.int32(use))

    return refilling(cta, ahead)


def load_inline(cta: ForwardCta, n, number, tile: QTile) -> tuple[ForwardCta, Any]:
    """Returns the CTA as the steps of its n-th tile see it, and which tile is next.

    The latter is (number, whether it exists), or None where the kernel is not persistent. Slots
    that were released before this tile, for blocks that were not known then, are filled now;
    only tiles with fewer blocks than there are slots leave any.
    """
    following = None
    ahead = Ahead(number, tile.used, tile.used + tile.kv_blocks)
    if cta.plan.blocks.persistent:
        if cta.plan.claims:

            @pl.when(loads_inline(cta))
            def _():
                cta.claim(n)

        number, more = following = cta.following(n)
        blocks = jnp.where(more, cta.q_tile(number).kv_blocks, 0)
        ahead = ahead._replace(following=number, limit=ahead.end + blocks)

        @pl.when(loads_inline(cta))
        def _():
            # The softmax of the tile's first block was part of the tile before.
            released = tile.used + cta.plan.blocks.stages
            for load, stop in ((load_k, released + 1), (load_v, released)):
                known, wanted = lax.min(stop, ahead.end), lax.min(stop, ahead.limit)
                pl.loop(known, wanted)(functools.partial(fill_inline, cta, load, ahead))

    return refilling(cta, ahead), following


def drain_inline(cta: ForwardCta, used):
    """Waits for the releases that no later fill has waited for."""

    @pl.when(loads_inline(cta))
    def _():
        cta.k.drain(used)
        cta.v.drain(used)


def load_q_inline(cta: ForwardCta, number, more):
    """Loads this warpgroup's Q rows of the next tile, once those of this one have been read."""
    plgpu.barrier_wait(cta.smem.q_empty.at[cta.wg])
    pl.when(more)(lambda: load_q_rows(cta, cta.q_tile(number), cta.wg))


def loads_inline(cta: ForwardCta):
    """Returns whether this warpgroup, the last, is the one that loads K and V."""
    return cta.wg == cta.plan.blocks.warpgroups - 1


def refilling(cta: ForwardCta, ahead: Ahead) -> ForwardCta:
    """Returns the CTA with rings whose slots are refilled as they are released."""

    def ring(plain: Ring, load) -> Ring:
        fill = functools.partial(fill_inline, cta, load, ahead)
        return dataclasses.replace(
            plain, refill=lambda use: pl.when(loads_inline(cta))(lambda: fill(use))
        )

    return dataclasses.replace(cta, k=ring(cta.k, load_k), v=ring(cta.v, load_v))


def fill_inline(cta: ForwardCta, load, ahead: Ahead, use):
    """Issues the use-th fill of a ring by load_k or load_v, if its block is known."""
    limit = ahead.end if ahead.limit is None else ahead.limit

    @pl.when(use < limit)
    def _():
        number, before = ahead.number, ahead.used
        if ahead.following is not None:
            inside = use < ahead.end
            number = lax.select(inside, number, ahead.following)
            before = lax.select(inside, before, ahead.end)
        # What follows from the number is computed again: held over the loop it would spill.
        tile = cta.q_tile(lax.optimization_barrier(number))
        load(cta, tile, use - before, use)
