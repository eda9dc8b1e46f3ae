"""The tangents of O and of the log-sum-exp, with O itself or after it.

With S = scale Q K^T, P = softmax(S) and mu = rowsum(P o dS), where o is elementwise,

    dS   = scale (dQ K^T + Q dK^T)
    dO   = (P o dS) V + P dV - mu o O
    dlse = mu

so that one pass over the keys computes all, as in the forward: (P o dS) V + P dV and mu are sums
over keys like O and l, and are rescaled with them. That is `primal`: six matmuls a block of keys.
Where O and the log-sum-exp are known, as after `jax.linearize`, P needs no row maxima and O no
matmul: five.

The CTA, its tiles and its loads are those of the forward (forward/kernel.py). dQ, dK and dV travel
with Q, K and V, in slots of their own. A step is

    S = Q K^T, dS = dQ K^T + Q dK^T     P from S, while dS is on its way
    G V, P dV, and P V of `primal`      with G = P o dS; the step waits for them

So a warpgroup waits, and leaves the tensor cores to the other one: its matmuls of a step take about
five times as long as its other work, and no ping-pong barrier orders the two. Matmuls that stay in
flight until the next step make ptxas serialise all of them (benchmarks/NOTES.md).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import dropout, padding, scores
from ....core.padding import pad_axis
from ....core.problem import Operands, Outputs, Problem, Tangents
from ....core.scores import TileInputs
from ....core.softmax import EMPTY_ROW
from ...gpu import score_tile
from ...gpu.auxiliary_arrays import moves_of, only
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ...gpu.ptx import inline, online_softmax
from ...gpu.ptx.online_softmax import Maxima
from ..common.auxiliary_inputs import Place
from ..common.pipeline import Matmuls, rows_of, warpgroup_rows
from ..forward.cta import ForwardCta, ForwardGmem, ForwardRows, QTile, TangentTiles
from ..forward.kernel import drain_inline, load_inline_first, produce
from ..forward.softmax import finish, finite, per_row, unseen
from ..forward.tiles import ForwardBlocks, ForwardSmem, native_problem
from .tiles import RowsGmem, TangentPlan, choose_tangent, tangent_aux, tangent_scratch

# --- The launch -----------------------------------------------------------------------------------


def push(
    problem: Problem,
    operands: Operands,
    operand_tangents: Operands,
    outputs: Outputs | None,
    producer: bool,
    interpret: bool,
) -> Tangents:
    """Computes the tangents of O and of the log-sum-exp, as `Jvp.run` does.

    Args:
        problem: the problem of the operands.
        operands: operands of the call.
        operand_tangents: tangents of q, k, v and others; None where an operand has none.
        outputs: results of a forward of this call; None: they are computed too.
        producer: a warpgroup of its own loads.
        interpret: run under the interpreter.
    """
    moves, primal = moves_of(operand_tangents), outputs is None
    blocks = choose_tangent(problem, moves, primal=primal, producer=producer)
    assert blocks is not None
    native = native_problem(problem)
    matmuls = Matmuls(problem.dtype, interpret)
    widths = {"q": (native.head_dim,), "k": (native.head_dim,)}
    widths |= {"v": (native.v_head_dim, blocks.block_kv)}
    # A weight of 0 times the tangent of a score of padding is 0 only if that is finite.
    laid_out = lambda x: x._replace(
        **{name: matmuls.operand(getattr(x, name), *sizes) for name, sizes in widths.items()}
    )
    cleared, moved = (laid_out(padding.cleared(operands, x)) for x in (operands, operand_tangents))
    results = tangents(native, blocks, cleared, moved, outputs, interpret)
    queries = slice(problem.q_len)
    cut = lambda x: None if x is None else matmuls.joined(x)[:, queries, :, : problem.v_head_dim]
    rows = jax.tree.map(lambda x: x[:, :, queries], results._replace(o=None, do=None))
    return Tangents(*rows._replace(o=cut(results.o), do=cut(results.do)))


def tangents(
    problem: Problem,
    blocks: ForwardBlocks,
    operands: Operands,
    operand_tangents: Operands,
    outputs: Outputs | None,
    interpret: bool,
) -> Tangents:
    """Launches the kernel of the tangents, and of O and the log-sum-exp where they are unknown.

    Args:
        problem: a problem with native head dims.
        blocks: tile sizes.
        operands: operands of the call without padding; q, k and v as operands of Matmuls.
        operand_tangents: likewise, all of q, k and v among them.
        outputs: o, lse_log2 and shift, if a forward has computed them; None: they are computed too.
        interpret: run by the interpreter.

    Returns:
        Tangents: with rows of whole tiles.
    """
    moves, primal = moves_of(operand_tangents), outputs is None
    moving = tangent_aux(problem, moves)
    plan = TangentPlan.of(problem, blocks, interpret, tangent_aux=moving, primal=primal)
    aux = moving.arrays(only(operand_tangents, moves))
    tiles = TangentTiles(operand_tangents.q, operand_tangents.k, operand_tangents.v, aux)
    gmem = plan.arrays(operands)._replace(tangents=tiles)
    before = None if outputs is None else _rows_gmem(plan, outputs)
    per_row = float32((problem.batch, problem.q_heads, plan.q_tiles * blocks.tile_rows))
    o = jax.ShapeDtypeStruct((*operands.q.shape[:3], operands.v.shape[3]), operands.v.dtype)
    shift = per_row if plan.far else None
    of_primal = (o, per_row, shift) if primal else (None, None, None)
    results = Tangents(*of_primal, do=o, dlse=per_row)
    run = launch(
        functools.partial(run_cta, plan),
        out=(results,),
        scratch=(tangent_scratch(problem, blocks, moves, gmem.q, gmem.v, o),),
        grid={"cta": plan.num_ctas},
        threads=blocks.warpgroups + blocks.producer,
        name="flash_pallas_jvp" if primal else "flash_pallas_tangents",
        interpret=interpret,
    )
    return run(gmem, before)[0]


def _rows_gmem(plan: TangentPlan, outputs: Outputs) -> RowsGmem:
    rows = plan.q_tiles * plan.blocks.tile_rows
    shift = outputs.shift if plan.far else None
    return RowsGmem(
        pad_axis(pad_axis(outputs.o, 1, rows), 3, plan.problem.v_head_dim),
        pad_axis(outputs.lse_log2, 2, rows, EMPTY_ROW),
        None if shift is None else pad_axis(shift, 2, rows),
    )


@dataclasses.dataclass(frozen=True)
class TangentCta(ForwardCta):
    """One CTA, as one of its warpgroups sees it; `out` are the Tangents.

    Attributes:
        plan: the plan of the launch.
        before: RowsGmem in device memory; None if the plan is `primal`.
    """

    plan: TangentPlan
    before: Any = None


def run_cta(
    plan: TangentPlan, gmem: ForwardGmem, before: RowsGmem | None, out: Tangents, smem: ForwardSmem
):
    """Runs a CTA: gives each warpgroup its role, consumer or producer."""
    blocks, results = plan.blocks, cast(Any, out)
    cta = TangentCta(
        plan=plan,
        gmem=gmem,
        out=results,
        smem=smem,
        k=smem.k_ring,
        v=smem.v_ring,
        index=lax.axis_index("cta"),
        wg=lax.axis_index("wg"),
        counter=None,
        before=before,
    )
    pl.when(cta.wg < blocks.warpgroups)(functools.partial(consume, cta))
    if blocks.producer:
        pl.when(cta.wg == blocks.warpgroups)(functools.partial(produce, cta))


# --- A consumer warpgroup -------------------------------------------------------------------------


class Rows(NamedTuple):
    """State of its rows that a warpgroup carries from step to step."""

    mu: Any  # f32[64, 8], sums of P o dS over each thread's own columns
    l: Any = None  # likewise of P; None where the log-sum-exp is known, as are the maxima
    maxima: Maxima | None = None


class Known(NamedTuple):
    """Results of a forward for a warpgroup's rows, f32[64] each."""

    lse_log2: Any
    shift: Any  # or None


class Fixed(NamedTuple):
    """Arguments that all steps of a Q tile share.

    Attributes:
        tile: the Q tile.
        moved: tangents of its auxiliary inputs that registers keep.
        known: where a forward has been; else None.
        t_acc: accumulator of (P o dS) V + P dV, f32[64, Hv].
        o_acc: accumulator of O; None where it is known.
    """

    tile: QTile
    moved: TileInputs
    known: Known | None
    t_acc: Any
    o_acc: Any


def consume(cta: TangentCta):
    """Runs a consumer warpgroup: folds the KV blocks of its tile into its 64 rows."""
    plan = cta.plan
    if plan.blocks.producer:
        plgpu.set_max_registers(plan.blocks.compute_registers, action="increase")
    number = cta.first_tile()
    step_cta: Any = cta
    tile = cta.q_tile(number)._replace(used=jnp.int32(0))
    if not plan.blocks.producer:
        step_cta = load_inline_first(cta, number)
    accumulator = plgpu.ACC((WARPGROUP_ROWS, plan.problem.v_head_dim), jnp.float32)
    plgpu.barrier_wait(cta.smem.q_full.at[cta.wg])
    accumulators = (accumulator,) * (1 + plan.primal)
    rows, t, o = pl.run_scoped(lambda *accs: steps(step_cta, tile, *accs), *accumulators)
    if not plan.blocks.producer:
        drain_inline(cta, tile.kv_blocks)
    store(cta, tile, rows, t, o)
    plgpu.wait_smem_to_gmem(0)


def steps(cta: TangentCta, tile: QTile, t_acc, o_acc=None):
    """Runs the steps of a Q tile; returns (Rows, sums of T, sums of O or None)."""
    fixed = start(cta, tile, t_acc, o_acc)
    rows = step(cta, fixed, jnp.int32(0), None, edges="last")
    for edges, low, high in cta.zones(tile):
        high = lax.optimization_barrier(jnp.int32(high))  # 296 bytes of spills where it is known
        rows = lax.fori_loop(low, high, functools.partial(step, cta, fixed, edges=edges), rows)
    t = plgpu.wgmma_accumulator_load(t_acc, wait_n=0)
    o = None if o_acc is None else plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
    return rows, t, o


def start(cta: TangentCta, tile: QTile, t_acc, o_acc) -> Fixed:
    """Loads what registers keep of a Q tile."""
    plan, known = cta.plan, None
    row = tile.block * plan.blocks.tile_rows + cta.wg * WARPGROUP_ROWS
    place = Place(tile.batch, tile.head, row, 0, WARPGROUP_ROWS, plan.blocks.block_kv)
    moved = plan.tangent_aux.fragments(cta.gmem.tangents.aux, place)
    if cta.before is not None:
        index = tile.batch, tile.head, pl.ds(row, WARPGROUP_ROWS)
        load = lambda ref: plgpu.load(ref.at[index], layout=inline.ROWS, optimized=False)
        shift = cta.before.shift
        known = Known(load(cta.before.lse_log2), None if shift is None else load(shift))
    tile = tile._replace(fragments=cta.row_fragments(tile))
    return Fixed(tile, moved, known, t_acc, o_acc)


def step(cta: TangentCta, fixed: Fixed, j, rows: Any, *, edges: str) -> Rows:
    """Folds the j-th KV block into the Rows, which are None before the first."""
    tile, multiply = fixed.tile, cta.plan.matmuls.multiply
    use = tile.used + j
    if tile.listed is not None:
        fixed = fixed._replace(tile=tile._replace(step_block=tile.kv_block(j)))
    cta.k.wait_full(use)
    run = functools.partial(score_tangents, cta, fixed, (j, use, edges), rows)
    scores_acc = plgpu.ACC((WARPGROUP_ROWS, cta.plan.blocks.block_kv), jnp.float32)
    p, g, rows = pl.run_scoped(run, scores_acc, scores_acc)
    slot = hidden(cta, cta.v.slot(use))
    cta.v.wait_full(use)
    v, dv = cta.smem.v.at[slot], cta.smem.tangents.v.at[slot]
    multiply(fixed.t_acc, g, v)
    multiply(fixed.t_acc, p, dv)
    if fixed.o_acc is not None:
        multiply(fixed.o_acc, p, v)
    plgpu.wgmma_wait(0)
    cta.v.release(use)
    return rows


def hidden(cta: TangentCta, index):
    """Returns an index of shared memory that is computed again in every step of wide tiles.

    Descriptors of operands, one a wgmma, are then not held over the loop: 140 to 250 bytes of
    spills at head dim 256 and in float32. At 128 in 16 bits they are better held.
    """
    problem = cta.plan.problem
    wide = problem.head_dim + problem.v_head_dim > 256 or problem.dtype == jnp.float32
    return lax.optimization_barrier(jnp.int32(index)) if wide else index


def score_tangents(cta: TangentCta, fixed: Fixed, block, rows: Rows | None, s_acc, ds_acc):
    """Computes P and G = P o dS of a step as operands; returns (P, G, Rows after the step).

    Args:
        cta: the CTA.
        fixed: what the tile's steps have in common.
        block: (number of the block, its ring position, edges as for ForwardCta.limits).
        rows: Rows before the step; None in the first.
        s_acc: accumulator of S.
        ds_acc: accumulator of dS.
    """
    plan, (_, use, edges), matmuls = cta.plan, block, cta.plan.matmuls
    slot, tangent = cta.k.slot(use), cta.smem.tangents
    own, slot = hidden(cta, cta.wg), hidden(cta, slot)
    q, dq, k, dk = (
        *(ref.at[own] for ref in (cta.smem.q, tangent.q)),
        *(ref.at[slot] for ref in (cta.smem.k, tangent.k)),
    )
    matmuls.multiply(s_acc, q, k, transposed=True)
    matmuls.multiply(ds_acc, dq, k, transposed=True)
    matmuls.multiply(ds_acc, q, dk, transposed=True)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=2 * matmuls.count)
    tile, z, (inputs, moved) = logits(cta, fixed, s, block)
    if fixed.known is None:
        p, growth, rows_ = weights(cta, z, rows, edges)
    else:
        p, growth, rows_ = known_weights(z, fixed.known), None, rows
    p = lax.optimization_barrier(p)  # above the wait for dS
    ds = plgpu.wgmma_accumulator_load(ds_acc, wait_n=0)
    p, ds = lax.optimization_barrier((p, ds))
    cta.k.release(use)
    if growth is not None:
        rescale(fixed, growth)
    g = score_tile.pushed(plan.problem, tile, (p, z.pull), ds, moved)
    mu = inline.lane_sums(g, plan.interpret)
    if rows is not None:
        before = rows.mu if growth is None else rows.mu * per_row(growth[0], rows.mu.shape)
        mu = before + mu
    kept = None
    if plan.problem.spec.dropout_rate:
        kept = scores.kept(plan.problem.spec, tile, inputs)
    drop = lambda x: x if kept is None else jnp.where(kept, x, 0.0)
    rows = Rows(mu) if rows_ is None else rows_._replace(mu=mu)
    return matmuls.split(drop(p)), matmuls.split(drop(g)), rows


def logits(cta: TangentCta, fixed: Fixed, s, block):
    """Returns (place of the scores, core.scores.Logits, (inputs, tangents of the inputs))."""
    plan, tile, (j, use, edges) = cta.plan, fixed.tile, block
    slot, own, shape = cta.k.slot(use), warpgroup_rows(cta.wg), s.shape
    inputs = plan.aux.inputs(tile.fragments, cta.smem.aux, slot, shape, own, ids=edges != "none")
    moved = plan.tangent_aux.inputs(fixed.moved, cta.smem.tangents.aux, slot, shape, own)
    kv_block = tile.kv_block(j)
    place, limits = cta.score_tile(tile, kv_block), cta.limits(tile, kv_block, edges)
    spec = plan.problem.spec
    if edges == "none" and tile.listed is not None:
        spec, inputs = plan.problem.of_whole_tiles.spec, inputs._replace(mask=None)
    z = score_tile.logits(spec, place, s, inputs, limits)
    return scores.placed(place, inputs), z, (inputs, moved)


def known_weights(z: scores.Logits, known: Known):
    """Computes P of a tile whose rows' log-sum-exp is known."""
    x = z.x if known.shift is None else z.x - per_row(known.shift, z.x.shape)
    return jnp.exp2(x * z.log2_scale - per_row(known.lse_log2, x.shape))


def weights(cta: TangentCta, z: scores.Logits, rows: Any, edges: str):
    """Computes the weights of a tile relative to row maxima that include it.

    Returns (weights, (alpha, grew) as `rescale` takes them, Rows without mu); None in place of the
    pair in the first step, which has nothing to rescale.
    """
    plan, first = cta.plan, rows is None
    slack = None if first else plan.blocks.lazy_rescale or None
    old = unseen(cta, z.x) if first else rows.maxima
    compared = online_softmax.compared(old, z.x, z.log2_scale, plan.far, slack, plan.interpret)
    m = finite(plan, compared.m, edges)
    x = compared.x * z.log2_scale
    p = jnp.exp2(x - per_row(m, x.shape))
    sums = inline.lane_sums(p, plan.interpret)
    if first:
        return p, None, Rows(None, sums, compared.maxima)
    alpha = jnp.exp2(compared.before - m)
    l = rows.l * per_row(alpha, sums.shape) + sums
    return p, (alpha, compared.grew), Rows(None, l, compared.maxima)


def rescale(fixed: Fixed, growth):
    """Multiplies the sums of T and of O by alpha, if a row has a new maximum.

    `growth` is (alpha, Compared.grew); where grew is None, they are multiplied in any case.
    """
    alpha, grew = growth
    for acc in (fixed.t_acc, fixed.o_acc):
        old = plgpu.wgmma_accumulator_load(acc, wait_n=0)
        scaled = lambda old=old: old * per_row(alpha, old.shape)
        acc[...] = scaled() if grew is None else lax.cond(grew > 0, scaled, lambda old=old: old)


# --- The epilogue ---------------------------------------------------------------------------------

# Of O and its tangent, that are finished at a time: at head dim 256 all take 256 registers.
COLUMNS = 64


def store(cta: TangentCta, tile: QTile, rows: Rows, t, o):
    """Finishes a Q tile and issues the copies of its results."""
    plan, spec, out, smem = cta.plan, cta.plan.problem.spec, cta.out, cta.smem
    # Addresses made from it are not to be held over the loops.
    wg = lax.optimization_barrier(cta.wg)
    first_row = tile.block * plan.blocks.tile_rows + wg * WARPGROUP_ROWS
    index = tile.batch, tile.head, pl.ds(first_row, WARPGROUP_ROWS)
    mu, gain, inverse = rows.mu.sum(axis=1), dropout.gain(spec.dropout_rate), None
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if o is not None:
        inverse, row_outputs = finish(cta, tile, ForwardRows(None, rows.maxima, rows.l))
        mu = mu * inverse * (1.0 / gain)
        store_rows(out.lse_log2, smem.lse_log2, row_outputs.lse_log2, index, wg)
        if out.shift is not None:
            store_rows(out.shift, smem.shift, row_outputs.shift, index, wg)
        scaled = lambda x: x * per_row(inverse, x.shape)
        store_tile(cta, out.o, lambda columns: scaled(o[:, columns]), index)

    def of_o(columns):
        if o is not None:
            return scaled(o[:, columns])
        source = cta.before.o.at[tile.batch, index[2], tile.head, columns]
        return plgpu.load(source, layout=inline.WGMMA, optimized=False).astype(jnp.float32)

    def tangent(columns):
        x = t[:, columns]
        x = x * gain if inverse is None else scaled(x)
        return x - per_row(mu, x.shape) * of_o(columns)

    store_tile(cta, out.do, tangent, index)
    # The wait of the tile's store was for the log-sum-exp too, which has been copied from there.
    store_rows(out.dlse, smem.lse_log2, mu, index, wg)


def store_tile(cta: TangentCta, out, piece, index):
    """Stages a tile in shared memory and issues its copy to `out`.

    Args:
        cta: the CTA.
        out: the result in device memory.
        piece: function of a slice of columns that returns them, f32[64, columns].
        index: (batch entry, head, rows).
    """
    (batch, head, rows), width = index, cta.plan.problem.v_head_dim
    staging, matmuls = cta.smem.q if cta.smem.o is None else cta.smem.o, cta.plan.matmuls
    own = staging.at[lax.optimization_barrier(cta.wg)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    step = COLUMNS if width % COLUMNS == 0 else width
    for start in range(0, width, step):
        columns = slice(start, start + step)
        parts = zip(matmuls.refs(own), matmuls.split(piece(columns)), strict=True)
        for target, part in parts:
            target.at[:, columns][...] = part
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own, rows_of(out, (batch, rows, head), staging))


def store_rows(out, buffer, x, index, wg):
    """Stages f32[64] in shared memory that nothing is copied from, and issues its copy to `out`."""
    buffer[wg] = plgpu.layout_cast(x, inline.ROWS)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer.at[wg], out.at[index])
