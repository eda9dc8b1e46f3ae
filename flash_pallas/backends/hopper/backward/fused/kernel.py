"""The fused backward: all five matmuls of FlashAttention-2's Algorithm 2 in one kernel.

A KV-stationary CTA owns 128 keys of one KV head (two compute warpgroups, 64 keys each) and loops
over the Q tiles of every query head of its group. Scores are held transposed, so that P^T and dS^T
come out of the registers as left operands of the matmuls that consume them:

    (1) S^T  = K Q^T           shared x shared
    (2) dP^T = V dO^T          shared x shared
    (3) dV  += P^T dO          registers x shared
    (4) dK  += dS^T Q          registers x shared
    (5) dQ   = dS K            shared (dS^T of both warpgroups, read transposed) x shared

`step` is one step of a compute warpgroup. The order in which the two warpgroups run (3) to (5) is
that of `Lockstep` or `PingPong`, in gradients.py.

dK and dV stay in registers for all Q tiles. Each dQ tile goes to float32 shared memory, and a
warp of the producer warpgroup adds it to a float32 buffer in device memory by TMA reduce-add, or
stores it where no CTA has added before (dq_sums.py). The order of those adds differs from run to
run, and with it the last bits of dQ; backward/split has the deterministic pair. The gradient of a
bias may be added up here too: dbias.py.

    K, V            loaded once per KV tile; dK and dV are staged in them at the end
    Q with lse      q ring; dO with delta: do ring (delta has a barrier of its own)
    dS^T            ds slots, written by both warpgroups, read by both
    dQ              a float32 slot for each of its parts, handed to the storing warp and back
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Operands, Problem
from .....core.scores import TileInputs
from ....gpu import score_tile
from ....gpu.launch import WARPGROUP_ROWS
from ....gpu.launch import launch as launch_kernel
from ....gpu.ptx import inline
from ....gpu.ptx.inline import WARP, WARPGROUP
from ....gpu.score_tile import RegisterTile
from ...common import pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs
from ...common.pipeline import Padding, loader, rows_of, warpgroup_rows
from .. import dq_sums
from ..dq_sums import OwnTiles
from ..operands import BackwardArrays, QTileList, QTileRange
from .dbias import gradient_of_bias, sum_dbias
from .gradients import early_weights, late_weights, mma_schedule, narrowed, narrows
from .launches import FusedCta, KvTile, Launch, PairCta, Part, launches_of, summed
from .tiles import (
    WARPGROUPS,
    FusedBlocks,
    FusedSmem,
    late_dp,
    scratch,
    swizzles_of_k_and_v,
)

# --- A CTA: its KV tiles, and the roles of its warpgroups -----------------------------------------


def kernel(
    launch: Launch,
    names: tuple[str, ...],
    kept: dict[str, Any],
    gmem: BackwardArrays,
    *refs,
    place: tuple[Any, Any] | None = None,
):
    """Runs one CTA of a launch: its KV tile, or all KV tiles of its pair.

    Args:
        launch: what is the same for all CTAs.
        names: names of the results that this launch makes.
        kept: results that it adds to, by name.
        gmem: operands in device memory.
        refs: what this launch makes, shared memory and mbarriers.
        place: `Launch.place` of this CTA, where a caller has asked for it.
    """
    *made, smem = refs
    results = kept | dict(zip(names, made, strict=True))
    if launch.all_kv_tiles:
        run_roles(cta_of_pair(launch, results, gmem, smem))
        return
    pair, block = place or launch.place(gmem)
    cta = cta_of_kv_tile(launch, results, gmem, smem, pair, block)
    if launch.part is Part.NEAR:
        near = gmem.auxiliary.far[cta.batch, cta.kv_head] == 0
        pl.when(near)(functools.partial(run_roles, cta))
    elif launch.blocks.split_q == 1:
        run_roles(cta)
    else:
        pl.when(cta.q_tiles.total > 0)(functools.partial(run_roles, cta))
        nothing = (cta.q_tiles.total == 0) & (cta.wg < WARPGROUPS)
        pl.when(nothing)(functools.partial(write_zeros, cta))


def kernel_of_sections(launch: Launch, names, kept, gmem: BackwardArrays, *refs):
    """Runs `kernel` where this CTA has a pair: the last section is smaller than the others."""
    pair, block = launch.place(gmem)
    run = functools.partial(kernel, launch, names, kept, gmem, *refs, place=(pair, block))
    pl.when(pair < launch.pairs)(run)


def kernel_of_calls(run: Callable, launch: Launch, names, kept, gmem: BackwardArrays, *refs):
    """Runs a kernel if some row of the call has large logits, or if none has: `launch.part`."""
    some_far = gmem.auxiliary.any_far[0] > 0
    wanted = some_far if launch.part is Part.ALL_IF_FAR else ~some_far
    pl.when(wanted)(functools.partial(run, launch, names, kept, gmem, *refs))


def cta_of_kv_tile(
    launch: Launch,
    results: dict[str, Any],
    gmem: BackwardArrays,
    smem: FusedSmem,
    pair,
    block,
) -> FusedCta:
    """Returns a CTA that has one KV tile: of a pair, the block counted from the first key."""
    parts = launch.blocks.split_q
    tile = launch.kv_tile(pair, block)
    q_tiles = launch.q_tiles(gmem, tile, block)
    if parts > 1 and isinstance(q_tiles, QTileRange):
        part = lax.axis_index("part")
        results = results | {name: results[name].at[part] for name in ("dk", "dv")}
        q_tiles = q_tiles.cut(part, parts)
    return cta_at(launch, (results, gmem, smem), tile, q_tiles)


def cta_of_pair(
    launch: Launch, results: dict[str, Any], gmem: BackwardArrays, smem: FusedSmem
) -> FusedCta:
    """Returns a CTA that has all KV tiles of a pair, which all have the same range of Q tiles."""
    kv_tiles, zero = launch.kv_tiles_of_pair(gmem), jnp.int32(0)
    (batch, *_), blocks = kv_tiles[1](zero), launch.blocks
    q_tiles = QTileRange.whole(launch.problem, gmem, batch, blocks.block_kv, blocks.block_q)
    make = functools.partial(PairCta, kv_tiles=kv_tiles)
    return cta_at(launch, (results, gmem, smem), (zero, zero, zero, 0), q_tiles, make)


def cta_at(
    launch: Launch,
    refs,
    tile: KvTile,
    q_tiles: QTileRange | QTileList,
    make: Callable[..., FusedCta] = FusedCta,
) -> FusedCta:
    """Returns the record of this CTA at a KV tile, with the range of its Q tiles."""
    (results, gmem, smem), (batch, kv_head, kv_start, shift) = refs, tile
    return make(
        launch=launch,
        problem=launch.problem,
        blocks=launch.blocks,
        interpret=launch.interpret,
        gmem=gmem,
        results=results,
        smem=smem,
        swizzles=swizzles_of_k_and_v(launch.problem, launch.blocks, gmem),
        q=smem.q_ring,
        do=smem.do_ring,
        batch=batch,
        kv_head=kv_head,
        kv_start=kv_start,
        shift=shift,
        q_tiles=dataclasses.replace(q_tiles, opaque=launch.blocks.ping_pong),
        wg=lax.axis_index("wg"),
    )


def run_roles(cta: FusedCta):
    """Sends each warpgroup to its role: compute, producer, or sums of the bias's gradient."""
    if cta.blocks.whole_dq:
        for wg in range(WARPGROUPS):
            own = functools.partial(consume, dataclasses.replace(cta, wg=wg))
            pl.when(cta.wg == wg)(own)
    else:
        pl.when(cta.wg < WARPGROUPS)(functools.partial(consume, cta))
    if cta.blocks.producer:
        pl.when(cta.wg == WARPGROUPS)(functools.partial(produce, cta))
    if cta.blocks.sums_bias:
        pl.when(cta.wg == WARPGROUPS + 1)(functools.partial(sum_dbias, cta))


# --- A compute warpgroup --------------------------------------------------------------------------


def consume(cta: FusedCta):
    """Computes dK and dV of 64 keys of each KV tile, and its part of what it adds to dQ."""
    if cta.blocks.producer:
        plgpu.set_max_registers(cta.blocks.compute_registers, action="increase")
    else:
        cta = start_inline_loads(cta)
    sums = [plgpu.ACC((WARPGROUP_ROWS, cta.problem.head_dim), jnp.float32)] * 2
    if isinstance(cta, PairCta):
        cta.visit(lambda cta: pl.run_scoped(functools.partial(consume_kv_tile, cta), *sums))
    else:
        pl.run_scoped(functools.partial(consume_kv_tile, cta), *sums)
    if cta.blocks.split_q == 1:
        plgpu.wait_smem_to_gmem(0)
    if cta.blocks.sums_bias:
        cta.sums.drain(cta.total)  # afterwards no CTA reads dS of this one


def consume_kv_tile(cta: FusedCta, dk_acc, dv_acc):
    """Loops over the Q tiles of every head of the group; writes dK and dV.

    `dk_acc`, `dv_acc`: f32[64, D] in registers, zeros.
    """
    problem, schedule, part = cta.problem, mma_schedule(cta.blocks), cta.launch.part
    auxiliary = AuxiliaryInputs(problem, q_axis=1)
    far = None  # or an i32, not 0 if rows of the group are shifted
    if part not in (Part.NEAR, Part.ALL_IF_NEAR):  # these have no rows with large logits
        # Loaded before the wait for K and V, which takes as long as this load.
        far = auxiliary.far(cta.gmem.auxiliary, cta.batch, cta.kv_head * problem.group)
    cta.smem.kv_ring.wait_full(cta.kv_index)
    if cta.blocks.whole_dq:
        v = cta.smem.v.at[0, warpgroup_rows(cta.wg)]
        cta = dataclasses.replace(cta, held_v=plgpu.load(v, layout=inline.WGMMA))

    rows = auxiliary.fragments_of_rows(cta.gmem.auxiliary, cta.own_place(0))
    if problem.group == 1:
        rows = auxiliary.fragments_of_head(rows, cta.gmem.auxiliary, cta.own_place(0))
    schedule.start(cta)
    near_step = functools.partial(step, cta, rows, (dk_acc, dv_acc))
    far_step = functools.partial(near_step, far=far)
    if part is Part.FAR:
        cta.q_tiles.visit(far_step, in_one_loop=True)
    else:
        cta.q_tiles.visit(near_step, far, far_step)
    schedule.end(cta)
    if not cta.blocks.producer:
        end_inline_loads(cta)

    dk, dv = dk_acc[...], dv_acc[...]
    dk, dv = dk * problem.spec.scale, dv if cta.blocks.signs else score_tile.gained(problem, dv)
    cta = cta.again() if isinstance(cta, PairCta) else cta
    if cta.blocks.split_q == 1:
        epilogue(cta, dk, dv)
    else:
        epilogue_of_part(cta, dk, dv)


def step(cta: FusedCta, rows: TileInputs, sums, block_of, n, *, masked: bool, far=None):
    """Computes the five matmuls of the n-th Q tile; `far` where rows of it may be shifted.

    Args:
        cta: this CTA at its KV tile.
        rows: auxiliary inputs of this warpgroup's keys.
        sums: accumulators of dK and dV, f32[64, D].
        block_of: function of n; returns the Q block.
        n: number of the Q tile.
        masked: some element of the tile may be hidden.
        far: i32, not 0 if rows are shifted; None where none is.
    """
    block = block_of(n)
    if far is not None:
        cta = cta.apart()
    problem, blocks, schedule = cta.problem, cta.blocks, mma_schedule(cta.blocks)
    keys = warpgroup_rows(cta.anew().wg)
    q_slot, do_slot = cta.q.slot(n), cta.do.slot(n)
    if problem.group > 1:  # under the wait for Q
        auxiliary = AuxiliaryInputs(problem, q_axis=1)
        rows = auxiliary.fragments_of_head(rows, cta.gmem.auxiliary, cta.own_place(n))
    tile = RegisterTile(
        q_start=block * blocks.block_q + cta.q_tiles.q_offset,
        kv_start=cta.kv_start + cta.wg * WARPGROUP_ROWS,
        shape=(WARPGROUP_ROWS, blocks.block_q),
        q_axis=1,
        interpret=cta.interpret,
    )
    k, v = cta.smem.k.at[0, keys], cta.held_v
    if v is None:
        v = cta.smem.v.at[0, keys]
    q, do = cta.smem.q.at[q_slot], cta.smem.do.at[do_slot]
    # Accumulators are made after the waits: see DbiasKernel.tile in backward/dbias.
    accumulator = plgpu.ACC((WARPGROUP_ROWS, blocks.block_q), jnp.float32)
    # The shift of every column leaves no registers for dP^T next to S^T.
    dp_is_late = late_dp(problem) or far is not None
    to_early = functools.partial(early_weights, cta, rows, (n, block), tile, masked, far)

    def scores(s_acc):
        plgpu.wgmma(s_acc, k, q.transpose((1, 0)))  # (1) S^T = K Q^T
        if dp_is_late:
            return to_early(plgpu.wgmma_accumulator_load(s_acc, wait_n=0))
        cta.do.wait_full(n)
        return pl.run_scoped(functools.partial(score_gradients, s_acc, None), accumulator)

    def score_gradients(s_acc, early, dp_acc):
        plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))  # (2) dP^T = V dO^T
        schedule.scores_issued(cta, n)
        if not dp_is_late:
            early = to_early(plgpu.wgmma_accumulator_load(s_acc, wait_n=1))
        return late_weights(cta, n, tile, early, dp_acc)

    cta.q.wait_full(n)
    tiles = pl.run_scoped(scores, accumulator)
    if dp_is_late:
        if far is not None and narrows(cta, masked):
            tiles = narrowed(tiles, problem.dtype)
        cta.do.wait_full(n)
        tiles = pl.run_scoped(functools.partial(score_gradients, None, tiles), accumulator)
    p, ds = tiles
    schedule.gradients(cta, n, p, ds, *sums)  # (3) dV += P^T dO, (4) dK += dS^T Q, (5) dQ = dS K


def epilogue(cta: FusedCta, dk, dv):
    """Writes dK and dV of this warpgroup's keys, staged in shared memory of K and V."""
    keys = warpgroup_rows(cta.wg)
    cta.meet()  # both warpgroups have read K for the last time
    cta.smem.k[0, keys] = dk.astype(cta.problem.dtype)
    cta.smem.v[0, keys] = dv.astype(cta.problem.dtype)
    plgpu.commit_smem()
    own_keys = cta.own_keys
    dk_at = rows_of(cta.results["dk"], own_keys, cta.smem.k)
    dv_at = rows_of(cta.results["dv"], own_keys, cta.smem.k)
    plgpu.copy_smem_to_gmem(cta.smem.k.at[0, keys], dk_at, commit_group=False)
    plgpu.copy_smem_to_gmem(cta.smem.v.at[0, keys], dv_at)
    if isinstance(cta, PairCta):  # the next KV tile is loaded there
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        cta.smem.kv_ring.release(cta.kv_index)


def epilogue_of_part(cta: FusedCta, dk, dv):
    """Writes what one part of the Q tiles adds to dK and dV of this warpgroup's keys, in float32.

    Straight from registers: four threads write the 32 bytes of a sector.
    """
    own_keys = cta.own_keys
    cta.results["dk"][own_keys], cta.results["dv"][own_keys] = dk, dv
    plgpu.wait_smem_to_gmem(0)  # dQ's adds, where there is no producer


def write_zeros(cta: FusedCta):
    """Writes the zeros that a part without Q tiles adds."""
    tile = jnp.zeros((WARPGROUP_ROWS, cta.problem.head_dim), jnp.float32)
    epilogue_of_part(cta, *[plgpu.layout_cast(tile, inline.WGMMA)] * 2)


# --- The producer warpgroup: a warp loads, another adds dQ to device memory -----------------------

LOAD_WARP, STORE_WARP, SIGNAL_WARP, WAIT_WARP = range(4)


def produce(cta: FusedCta):
    """Runs the warps of the producer over all tiles of this CTA."""
    plgpu.set_max_registers(cta.blocks.producer_registers, action="decrease")

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == LOAD_WARP)(functools.partial(load, cta))
        pl.when(warp == STORE_WARP)(functools.partial(store_dq, cta))
        if cta.launch.stores_dq:
            pl.when(warp == SIGNAL_WARP)(lambda: cta.own_tiles.signal())
            pl.when(warp == WAIT_WARP)(lambda: cta.own_tiles.await_flags())


def load(cta: FusedCta):
    """Issues all loads of this CTA, then waits for the release of their slots."""
    if isinstance(cta, PairCta):
        cta.visit(load_kv_tile)
    else:
        load_kv_tile(cta)
    cta.q.drain(cta.total)
    cta.do.drain(cta.total)
    if isinstance(cta, PairCta):
        cta.smem.kv_ring.drain(cta.kv_tiles[0])


def load_kv_tile(cta: FusedCta):
    """Loads K and V once, then Q, LSE, dO and delta of every Q tile."""
    cta.smem.kv_ring.wait_empty(cta.kv_index)
    load_kv(cta)

    @pl.loop(jnp.int32(0), cta.q_tiles.total)
    def _(n):
        place = cta.query_tile(n)
        load_q(cta, n, place)
        load_do(cta, n, place)


def load_kv(cta: FusedCta):
    """Loads K and V of this KV tile into their slot; both copies arrive at its full barrier."""
    keys = (cta.batch, pl.ds(cta.kv_start, cta.blocks.block_kv), cta.kv_head)
    block = lax.div(cta.kv_start, jnp.int32(cta.blocks.block_kv))
    load_k, load_v = loaders(cta, cta.gmem.kv_padding)
    source = functools.partial(rows_of, tile=cta.smem.k)  # Q and dO are as wide
    k, v, full = cta.smem.k.at[0], cta.smem.v.at[0], cta.smem.kv_ring.full.at[0]
    load_k(source(cta.gmem.k, keys), k, full, cta.batch, block)
    load_v(source(cta.gmem.v, keys), v, full, cta.batch, block)


def load_q(cta: FusedCta, n, place):
    """Loads Q of the n-th Q tile, which has this place, with its LSE and auxiliary inputs."""
    head, rows, block = place
    load_rows, slot = loaders(cta, cta.gmem.q_padding)[0], cta.q.slot(n)
    source = rows_of(cta.gmem.q, (cta.batch, rows, head), cta.smem.k)
    full = cta.q.full.at[slot]
    cta.q.wait_empty(n)
    load_rows(source, cta.smem.q.at[slot], full, cta.batch, block)
    lse = cta.gmem.lse_log2.at[cta.batch, head, rows]
    plgpu.copy_gmem_to_smem(lse, cta.smem.lse.at[slot], full, oob_mode=bounds_of_rows(cta))
    auxiliary = AuxiliaryInputs(cta.problem, q_axis=1)
    if auxiliary.copies:
        tile_place, shared = cta.place(n), pipeline.multicast(cta.blocks.bias_cluster)
        auxiliary.load(cta.gmem.auxiliary, cta.smem.auxiliary, slot, full, tile_place, shared)


def load_do(cta: FusedCta, n, place):
    """Loads dO and delta of the n-th Q tile, which has this place."""
    head, rows, block = place
    load_rows, slot = loaders(cta, cta.gmem.q_padding)[1], cta.do.slot(n)
    source = rows_of(cta.gmem.do, (cta.batch, rows, head), cta.smem.k)
    cta.do.wait_empty(n)
    full = cta.do.full.at[slot]
    load_rows(source, cta.smem.do.at[slot], full, cta.batch, block)
    delta = cta.gmem.delta.at[cta.batch, head, rows]
    target, arrived = cta.smem.delta.at[slot], cta.smem.delta_full.at[slot]
    plgpu.copy_gmem_to_smem(delta, target, arrived, oob_mode=bounds_of_rows(cta))


def bounds_of_rows(cta: FusedCta) -> plgpu.OOBFillMode:
    """Returns the `oob_mode` of the copies of LSE and delta, which are padded to whole tiles.

    With PROMISE_IN_BOUNDS a copy needs no TMA descriptor. The two descriptors take LLVM 0.1 of the
    0.57 CPU seconds of this kernel. The main launch has them, as the other copy has not been timed.
    """
    modes = plgpu.OOBFillMode
    return modes.PROMISE_IN_BOUNDS if cta.launch.part is Part.FAR else modes.ZEROS


def loaders(cta: FusedCta, padding: Padding | None) -> list[Callable]:
    """Returns the loaders of Q and K, and of dO and V; their tiles may differ in swizzle."""
    threads = WARP if cta.blocks.producer else WARPGROUP
    arrived, interpret = cta.smem.padded_full, cta.interpret
    return [loader(padding, arrived, swizzle, interpret, threads) for swizzle in cta.swizzles]


def store_dq(cta: FusedCta):
    """Adds each warpgroup's part of every dQ tile to the float32 buffer in device memory.

    Or stores it, where no CTA has written before.
    """
    total, zero = cta.q_tiles.total, jnp.int32(0)
    if isinstance(cta, PairCta):
        cta.visit(store_dq_of_kv_tile)
    elif cta.launch.stores_dq:
        own = cta.own_tiles
        put_dq_tiles(cta, zero, own.count, None)
        own.await_others()
        put_dq_tiles(cta, own.count, total, own=own)
        pl.when(own.count == total)(own.are_stored)
    else:
        put_dq_tiles(cta, zero, total)
    plgpu.wait_smem_to_gmem(0)


def store_dq_of_kv_tile(cta: PairCta):
    """Stores the dQ tiles of the first KV tile of a pair, to which no other CTA adds."""
    total, zero = cta.q_tiles.total, jnp.int32(0)

    @pl.when(cta.kv_index == 0)
    def _():
        put_dq_tiles(cta, zero, total, None)
        plgpu.wait_smem_to_gmem(0)
        inline.fence_copies()

    pl.when(cta.kv_index > 0)(lambda: put_dq_tiles(cta, zero, total))


def put_dq_tiles(
    cta: FusedCta,
    start,
    stop,
    reduction_op: Literal["add"] | None = "add",
    own: OwnTiles | None = None,
):
    """Adds dQ tiles in a range, in order, or stores them; `own`: those stored before the range."""
    parts = cta.blocks.dq_parts
    parts = tuple(reversed(parts)) if cta.blocks.ping_pong else parts

    @pl.loop(start, stop)
    def _(n):
        for wg in parts:
            plgpu.barrier_wait(cta.smem.dq_full.at[wg])
            if own is not None and wg == parts[0]:
                # After the wait for a later tile the stores before it have long been written.
                pl.when((n == own.count) & (n > 0))(own.are_stored)
            cta.put_dq(n, wg, reduction_op)
            if cta.blocks.ping_pong:
                give_back(cta, n, wg, 0)
        if not cta.blocks.ping_pong:
            for returned, wg in enumerate(parts, start=1):
                give_back(cta, n, wg, len(parts) - returned)


def give_back(cta: FusedCta, n, wg: int, in_flight: int):
    """Releases the dQ buffer once at most `in_flight` adds are still reading theirs."""
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    more = cta.count(n) + 1 < cta.total
    pl.when(more)(lambda: plgpu.barrier_arrive(cta.smem.dq_empty.at[wg]))


# --- Loads without a producer warpgroup -----------------------------------------------------------
# They are issued by the later of the two compute warpgroups, the last to release a slot of Q or dO.
# It fills the slot at once, with the tile that is as many further on as there are slots.


def start_inline_loads(cta: FusedCta) -> FusedCta:
    """Loads what the Q tiles start with; returns the CTA with rings that refill on release."""
    load = lambda load_tile: lambda n: load_tile(cta, n, cta.query_tile(n))
    q, do = pipeline.load_inline(
        cta.wg == WARPGROUPS - 1,
        lambda: cta.q_tiles.total,
        (cta.q, load(load_q)),
        (cta.do, load(load_do)),
        once=lambda: load_kv(cta),
    )
    return dataclasses.replace(cta, q=q, do=do)


def end_inline_loads(cta: FusedCta):
    """Observes the releases that no later fill waited for."""

    @pl.when(cta.wg == WARPGROUPS - 1)
    def _():
        cta.q.drain(cta.q_tiles.total)
        cta.do.drain(cta.q_tiles.total)


# --- One call: its arrays, its launches one after the other, its gradients ------------------------


def backward_fused(
    problem: Problem,
    blocks: FusedBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    clears: bool,
    interpret: bool,
):
    """Runs all launches of the fused backward.

    Args:
        problem: a problem with the head dims that the kernel runs.
        blocks: tile sizes.
        operands: the operands of the call.
        arrays: the arrays that a backward kernel reads.
        clears: padding may hold NaN and is cleared; otherwise it holds 0.
        interpret: run by the interpreter.

    Returns:
        (dq, dk, dv, dbias): in the dtypes and shapes of `arrays`, but dq is as wide as the kernel
        runs it; dbias has the dtype and shape of the bias, or is None without blocks.bias_cluster.
    """
    tile = (blocks.block_q, blocks.block_kv)
    gmem = arrays.for_rows(problem, operands, 1, tile)
    if blocks.signs:
        gmem = gmem.scaled(score_tile.sign_factor(problem))
    if clears:
        gmem = gmem.with_padding(operands, *tile)

    launches = launches_of(problem, blocks, arrays, interpret)
    if launches[0].part is Part.ALL_IF_NEAR:
        gmem = gmem.with_any_far()
    results: dict[str, Any] = {}
    for launch in launches:
        arrays_of_launch = kept_and_made(launch, arrays, results)
        run = functools.partial(run_kernel, launch, arrays, gmem)
        kept, made = pl.run_state(run)(arrays_of_launch)  # XLA drops the zeros of `made`
        results = kept | made
    dq = dq_sums.scaled_dq(problem, results["dq"])
    dbias = gradient_of_bias(problem, results["dbias"]) if blocks.sums_bias else None
    dk, dv = results["dk"], results["dv"]
    if blocks.split_q > 1:
        dk, dv = summed(dk, arrays.k), summed(dv, arrays.v)
    return dq, dk, dv, dbias


def kept_and_made(
    launch: Launch, arrays: BackwardArrays, results: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the results that a launch adds to, and zeros in place of those that it makes.

    Args:
        launch: which.
        arrays: operands, whose q, k and v have the shapes of gradients.
        results: by name, those of launches before; see `Launch.result_shapes`.
    """
    shapes = launch.result_shapes(arrays)
    kept = {name: results[name] for name in shapes if name in results}
    if launch.stores_dq:
        kept |= dq_sums.cleared(launch, shapes)
    if cleared := [name for name in ("dq", "dbias") if name in shapes and name not in kept]:
        sizes = [shapes[name].shape for name in cleared]
        kept |= zip(cleared, dq_sums.zeros(sizes, launch.interpret), strict=True)
    return kept, {n: jnp.zeros(x.shape, x.dtype) for n, x in shapes.items() if n not in kept}


def run_kernel(launch: Launch, arrays: BackwardArrays, gmem: BackwardArrays, refs):
    """Runs the kernel of one launch.

    Args:
        launch: which.
        arrays: operands, whose q, k and v have the shapes of gradients.
        gmem: what the kernel reads.
        refs: (results that it adds to, results that it makes), by name.
    """
    kept, made = refs
    smem = scratch(launch.problem, launch.blocks, arrays, launch.interpret, launch.all_kv_tiles)
    in_sections = not (launch.all_kv_tiles or launch.in_order)
    run = kernel_of_sections if in_sections and launch.pairs % launch.at_once else kernel
    if launch.part in (Part.ALL_IF_NEAR, Part.ALL_IF_FAR):
        run = functools.partial(kernel_of_calls, run)
    call = launch_kernel(
        functools.partial(run, launch, tuple(made), kept),
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made.values()],
        scratch=(dq_sums.with_barriers(smem) if launch.stores_dq else smem,),
        grid=launch.grid,
        cluster=pipeline.cluster_axes(launch.blocks.bias_cluster),
        threads=WARPGROUPS + launch.blocks.producer + launch.blocks.sums_bias,
        name="flash_pallas_backward_fused" + "_far" * launch.all_kv_tiles,
        interpret=launch.interpret,
    )
    for ref, x in zip(made.values(), call(gmem), strict=True):
        ref[...] = x
