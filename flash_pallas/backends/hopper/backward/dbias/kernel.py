"""Gradients of what modifies scores: of the bias, of ALiBi's slopes, of what score_mod captured.

All are sums of the gradient dS of the scores, which is as large as the scores. So S and dP are
computed once more, tile by tile, and dS is summed in registers, never stored. What is summed over
(`Sums.axes`) decides what a CTA owns:

    tile     a tile of the bias, for all batch entries and heads that share it: written once
    columns  some keys of one head, for all queries: a bias that is the same for every query
    rows     some queries of one head, for all keys: everything else

No sum depends on the order in which CTAs run: every run gives the same bits. Sums over rows or
columns are [B, N, T] or [B, N, S], and XLA adds up the batch entries and heads that share a value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core import scores
from .....core.integers import round_up
from .....core.mask import Limits
from .....core.problem import Operands, Problem
from ....gpu import auxiliary_arrays, score_tile
from ....gpu.bias_tiles import BiasTile, BiasTiles, Members, bias_place, divide, members_of
from ....gpu.launch import WARPGROUP_ROWS, float32, launch, term
from ....gpu.ptx import inline
from ....gpu.score_tile import RegisterTile, row_shift
from ...common import pipeline
from ...common.auxiliary_inputs import Place
from ...common.pipeline import Matmuls, Ring, rows_of, warpgroup_rows
from ..operands import BackwardArrays, KvTileRange, QTileRange
from .tiles import LOADED, DbiasBarriers, DbiasSmem, ScoreBlocks, Sums, scratch


@dataclasses.dataclass(frozen=True)
class DbiasKernel:
    """One launch of this kernel; the methods are the phases of a CTA."""

    sums: Sums
    blocks: ScoreBlocks
    interpret: bool

    @property
    def problem(self) -> Problem:
        """Problem that is computed."""
        return self.sums.problem

    @property
    def matmuls(self) -> Matmuls:
        """Matmuls of operands of the call's dtype."""
        return Matmuls(self.problem.dtype, self.interpret)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a warpgroup's tile: (queries, keys)."""
        return WARPGROUP_ROWS, self.blocks.block_kv

    def __call__(self, gmem: BackwardArrays, bias, *refs):
        *out, smem, bars = refs
        wg = lax.axis_index("wg")
        cta = DbiasCta(self.sums, self.blocks, gmem, bias, tuple(out), smem, bars, wg)
        pl.when(wg < self.blocks.warpgroups)(lambda: self.consume(cta))
        if self.blocks.producer:
            pl.when(wg == self.blocks.warpgroups)(lambda: self.produce(cta))

    # --- the producer ----------------------------------------------------------------------------

    def produce(self, cta: DbiasCta):
        """Loads the tile of the bias, if it is held, then everything that each step reads."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        self.load_bias(cta)
        steps = cta.steps()
        pl.loop(jnp.int32(0), steps.total)(functools.partial(self.load, cta, steps))
        cta.ring.drain(steps.total)

    def feed(self, cta: DbiasCta) -> DbiasCta:
        """Loads what the first steps read, in the last warpgroup, where there is no producer.

        Returns the CTA with a ring that this warpgroup fills again where it releases it.
        """
        steps = cta.steps()
        (ring,) = pipeline.load_inline(
            cta.wg == self.blocks.warpgroups - 1,
            lambda: steps.total,
            (cta.ring, functools.partial(self.load, cta, steps)),
            once=lambda: self.load_bias(cta),
        )
        return dataclasses.replace(cta, refill=ring.refill)

    def load_bias(self, cta: DbiasCta):
        """Loads the tile of the bias, if it is held."""
        if self.sums.holds_bias:
            source = cta.bias.at[cta.bias_place + self.tile_at(cta)]
            plgpu.copy_gmem_to_smem(source, cta.smem.bias, cta.bars.bias)

    def load(self, cta: DbiasCta, steps: DbiasSteps, n):
        """Loads everything that the n-th step reads."""
        slot, step = cta.ring.slot(n), steps[n]
        cta.ring.wait_empty(n)
        sources, arrived = self.sources(cta, step), cta.ring.full.at[slot]
        for name in LOADED:
            target = getattr(cta.smem, name).at[slot]
            # The CTAs of a cluster differ in their keys.
            shared = None if name in ("k", "v") else pipeline.multicast(self.blocks.cluster)
            plgpu.copy_gmem_to_smem(sources[name], target, arrived, collective_axes=shared)
        place = self.place(step, 0, self.blocks.block_q)
        self.sums.auxiliary.load(cta.gmem.auxiliary, cta.smem.auxiliary, slot, arrived, place)

    def sources(self, cta: DbiasCta, step: DbiasStep):
        """Returns what a step reads besides auxiliary inputs, in device memory, by name."""
        queries = pl.ds(step.q_block * self.blocks.block_q, self.blocks.block_q)
        keys = pl.ds(step.kv_block * self.blocks.block_kv, self.blocks.block_kv)
        kv_head = lax.div(jnp.int32(step.head), jnp.int32(self.problem.group))
        gmem, smem = cta.gmem, cta.smem
        q_at, kv_at = (step.batch, queries, step.head), (step.batch, keys, kv_head)
        return {
            "q": rows_of(gmem.q, q_at, smem.q),
            "do": rows_of(gmem.do, q_at, smem.do),
            "k": rows_of(gmem.k, kv_at, smem.k),
            "v": rows_of(gmem.v, kv_at, smem.v),
            "lse": gmem.lse_log2.at[step.batch, step.head, queries],
            "delta": gmem.delta.at[step.batch, step.head, queries],
        }

    def place(self, step: DbiasStep, first_row, rows: int) -> Place:
        """Returns the place of some rows of a tile."""
        start = step.q_block * self.blocks.block_q + first_row
        columns = self.blocks.block_kv
        return Place(step.batch, step.head, start, step.kv_block * columns, rows, columns)

    def tile_at(self, cta: DbiasCta):
        """Returns (queries, keys) of the tile that a CTA owns, as slices."""
        own = cta.owned
        return (
            pl.ds(own.q_block * self.blocks.block_q, self.blocks.block_q),
            pl.ds(own.kv_block * self.blocks.block_kv, self.blocks.block_kv),
        )

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: DbiasCta):
        """Adds up this warpgroup's 64 rows of every tile, and writes the sums."""
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = self.feed(cta)
        if self.sums.holds_bias:
            plgpu.barrier_wait(cta.bars.bias)
        steps = cta.steps()
        columns = inline.LANE_COLS if self.sums.axes == "rows" else self.blocks.block_kv
        zero = jnp.zeros((WARPGROUP_ROWS, columns), jnp.float32)
        start = tuple(plgpu.layout_cast(zero, inline.WGMMA) for _ in self.sums.names)

        kept = self.own_bias(cta) if self.sums.holds_bias and self.blocks.keep_bias else None

        def step(n, total):
            return tuple(map(jnp.add, total, self.tile(cta, n, steps[n], kept)))

        total = lax.fori_loop(jnp.int32(0), steps.total, step, start)
        if not self.blocks.producer:
            pl.when(cta.wg == self.blocks.warpgroups - 1)(lambda: cta.ring.drain(steps.total))
        {"tile": self.store_tile, "columns": self.store_columns, "rows": self.store_rows}[
            self.sums.axes
        ](cta, total)
        plgpu.wait_smem_to_gmem(0)

    def tile(self, cta: DbiasCta, n, step: DbiasStep, bias):
        """Computes what the n-th tile adds to each sum."""
        slot, smem = cta.ring.slot(n), cta.smem
        own = warpgroup_rows(lax.optimization_barrier(cta.wg))  # not to be hoisted: descriptors
        place = self.place(step, cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        fragments = self.sums.auxiliary.fragments(cta.gmem.auxiliary, place)  # under the wait
        tile = RegisterTile(
            q_start=place.row_start + cta.gmem.offset(self.problem, step.batch),
            kv_start=place.column_start,
            shape=self.shape,
            interpret=self.interpret,
            precise=self.problem.dtype == jnp.float32,
        )
        limits = self.limits(cta, step, tile)

        def matmuls(s_acc, dp_acc):
            multiply = functools.partial(self.matmuls.multiply, transposed=True)
            multiply(s_acc, smem.q.at[slot, own], smem.k.at[slot])
            multiply(dp_acc, smem.do.at[slot, own], smem.v.at[slot])
            lse = plgpu.load(smem.lse.at[slot, own], layout=inline.ROWS)
            delta = plgpu.load(smem.delta.at[slot, own], layout=inline.ROWS)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=self.matmuls.count)
            inputs = self.sums.auxiliary.inputs(fragments, smem.auxiliary, slot, self.shape, own)
            inputs = inputs._replace(shift=self.shift(cta, place))
            if self.sums.holds_bias:
                # What is kept stays in 16 bits: converted before the loop it takes 64 registers.
                own_bias = self.own_bias(cta) if bias is None else lax.optimization_barrier(bias)
                inputs = score_tile.with_bias(self.problem, inputs, own_bias, lambda: own_bias)
            w = score_tile.weights(self.problem, tile, s, lse, inputs, limits, marks=True)
            w = w._replace(p=lax.optimization_barrier(w.p))
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            pipeline.cluster_release(self.blocks.cluster, cta.ring, n, self.interpret)
            dlogits = w.p * score_tile.centred(self.problem, w.kept, dp, tile.per_q(delta))
            return self.terms(scores.placed(tile, inputs), *w.pull(dlogits))

        # Before the accumulators exist: zeroed on one side of a branch and used on the other, they
        # cost an instruction per register.
        cta.ring.wait_full(n)
        accumulator = plgpu.ACC(self.shape, jnp.float32)
        return pl.run_scoped(matmuls, accumulator, accumulator)

    def terms(self, tile: RegisterTile, dz, dparams):
        """Returns what a tile adds to each sum, from the gradients of scores and of score_mod."""
        if self.sums.axes != "rows":
            return (dz,)
        lanes = functools.partial(inline.lane_sums, interpret=self.interpret)
        return tuple(lanes(term(name, tile, dz, dparams)) for name in self.sums.names)

    def shift(self, cta: DbiasCta, place: Place) -> Callable | None:
        """Returns the shift of the queries of a tile; None where there is none."""
        far = self.sums.auxiliary.far(cta.gmem.auxiliary, place.batch, place.head)
        if far is None:
            return None
        auxiliary, query = cta.gmem.auxiliary, place.row_start
        return row_shift(self.problem, auxiliary, far, place.head, query, some=far)

    def own_bias(self, cta: DbiasCta):
        """Loads this warpgroup's rows of the tile of the bias that a CTA holds."""
        own = warpgroup_rows(lax.optimization_barrier(cta.wg))
        return plgpu.load(cta.smem.bias.at[own], layout=inline.WGMMA)

    def limits(self, cta: DbiasCta, step: DbiasStep, tile: RegisterTile) -> Limits:
        """Returns what positions leave visible of a tile.

        Keys past the end matter to sums over keys alone.
        """
        kv_len = cta.gmem.kv_len(self.problem, step.batch, self.blocks.block_kv)
        if self.sums.axes != "rows" and cta.gmem.auxiliary.kv_lengths is None:
            kv_len = None
        if cta.gmem.states is not None:
            seen = self.kept_by_lists(cta, step, tile)
            kv_len = self.problem.kv_len if kv_len is None else kv_len
            kv_len = lax.select(seen, jnp.int32(kv_len), jnp.int32(0))
        return tile.limits(self.problem.spec.mask, kv_len)

    def kept_by_lists(self, cta: DbiasCta, step: DbiasStep, tile: RegisterTile):
        """Returns whether lists name the blocks that a tile of this warpgroup lies in."""
        states, (rows, columns) = cta.gmem.states, self.problem.list_block
        list_entry = auxiliary_arrays.entry(self.problem, states.shape, step.batch, step.head)
        query = step.q_block * self.blocks.block_q + cta.wg * WARPGROUP_ROWS
        # Rows past the last query have a block of their own in the last tile only.
        row = lax.min(lax.div(query, jnp.int32(rows)), jnp.int32(states.shape[2] - 1))
        return states[(*list_entry, row, lax.div(tile.kv_start, jnp.int32(columns)))] > 0

    def store_tile(self, cta: DbiasCta, total):
        """Writes this warpgroup's rows of one tile of the bias's gradient."""
        own = warpgroup_rows(cta.wg)
        (out,) = cta.out
        staging = cta.smem.bias if cta.smem.sums is None else cta.smem.sums
        staging[own] = total[0].astype(out.dtype)
        plgpu.commit_smem()
        queries, keys = self.tile_at(cta)
        rows = pl.ds(queries.start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        index = (*divide(cta.owned.part, self.problem.bias_shape[1]), rows, keys)
        plgpu.copy_smem_to_gmem(staging.at[own], out.at[index])

    def store_columns(self, cta: DbiasCta, total):
        """Writes this warpgroup's sums over its rows, one per key.

        The tile is transposed on its way through shared memory. With 32 keys, only half of it is
        used, and the other half may hold anything.
        """
        staging, vectors = cta.smem.sums.at[cta.wg], cta.smem.vectors.at[cta.wg]
        own, key_sums = staging, vectors
        if self.blocks.block_kv < WARPGROUP_ROWS:
            own = staging.at[:, pl.ds(0, self.blocks.block_kv)]
            key_sums = vectors.at[pl.ds(0, self.blocks.block_kv)]
        own[...] = total[0]
        plgpu.commit_smem()  # each warp reads what the others wrote
        for first in range(0, self.blocks.block_kv, WARPGROUP_ROWS):
            keys = pl.ds(first, WARPGROUP_ROWS)
            tile = plgpu.load(
                staging.at[:, keys].transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED
            )
            vectors[keys] = plgpu.layout_cast(tile, inline.WGMMA).sum(axis=1)
        plgpu.commit_smem()
        block, head, batch = (lax.axis_index(name) for name in ("x", "y", "z"))
        keys = pl.ds(block * self.blocks.block_kv, self.blocks.block_kv)
        plgpu.copy_smem_to_gmem(key_sums, cta.out[0].at[batch, head, cta.wg, keys])

    def store_rows(self, cta: DbiasCta, total):
        """Writes this warpgroup's rows of every sum."""
        own = warpgroup_rows(cta.wg)
        for i, lanes in enumerate(total):
            cta.smem.vectors[i, own] = lanes.sum(axis=1)
        plgpu.commit_smem()
        block, head, batch = (lax.axis_index(name) for name in ("x", "y", "z"))
        rows = pl.ds(block * self.blocks.block_q + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        for i, out in enumerate(cta.out):
            plgpu.copy_smem_to_gmem(cta.smem.vectors.at[i, own], out.at[batch, head, rows])


def score_sums(
    problem: Problem,
    sums,
    operands: Operands,
    arrays: BackwardArrays,
    producer: bool,
    interpret: bool,
):
    """Launches the kernel; returns one array per name.

    Args:
        problem: problem with the head dims that run.
        sums: axes and names of `Sums`.
        operands: operands of the call.
        arrays: what a backward reads.
        producer: `producer` of ScoreBlocks.
        interpret: run under the interpreter.

    Returns:
        tile: [parts * Bb, N1, T up to a multiple of 8, S up to whole rows of 128 bytes] in the
        dtype of the bias, f32 if there are several parts; columns: f32[B, N, S up to a multiple
        of 128]; rows: f32[B, N, T up to whole tiles].
    """
    axes, names = sums
    sums = Sums(problem, axes, names)
    blocks = dataclasses.replace(sums.blocks(), producer=producer)
    q_tiles, kv_tiles = (
        pl.cdiv(problem.q_len, blocks.block_q),
        pl.cdiv(problem.kv_len, blocks.block_kv),
    )
    grid = {"x": q_tiles, "y": problem.q_heads, "z": problem.batch}
    out = float32((problem.batch, problem.q_heads, q_tiles * blocks.block_q))  # all are summed
    if axes == "columns":
        grid |= {"x": kv_tiles}
        padded_len = round_up(problem.kv_len, 128)
        out = float32((problem.batch, problem.q_heads, blocks.warpgroups, padded_len))
    auxiliary, bias = arrays.auxiliary_of(problem, operands, 0), None
    tile = (blocks.block_q, blocks.block_kv)
    if axes == "tile":
        parts, (entries, heads) = sums.parts(blocks), problem.bias_shape[:2]
        # One axis, as the two others of a grid hold no more than 65,535.
        tiles = BiasTiles.of(problem, *tile, blocks.cluster)
        grid = {"cluster": tiles.clusters * parts * entries * heads}
        bias, auxiliary = auxiliary.bias, auxiliary._replace(bias=None)
        dtype = problem.bias_dtype if parts == 1 else jnp.float32
        out = jax.ShapeDtypeStruct((parts * entries, heads, *bias.shape[2:]), dtype)
    gmem = arrays
    if problem.is_listed:
        gmem = arrays.for_any_tile(problem, operands)
    elif axes != "tile":  # CTAs of "tile" own one, and mask what is hidden of it
        gmem = arrays.for_rows(problem, operands, int(axes == "columns"), tile)
    run = launch(
        DbiasKernel(sums, blocks, interpret),
        out=(out,) * len(names),
        scratch=scratch(sums, blocks, arrays),
        grid=grid,
        cluster=pipeline.cluster_axes(blocks.cluster),
        threads=blocks.warpgroups + blocks.producer,
        name=f"flash_pallas_backward_scores_{axes}",
        interpret=interpret,
    )
    totals = run(gmem._replace(auxiliary=auxiliary), bias)
    return tuple(x.sum(axis=2) for x in totals) if axes == "columns" else totals


class DbiasStep(NamedTuple):
    """Place of the tile of scores of one step."""

    batch: Any
    head: Any
    q_block: Any
    kv_block: Any


@dataclasses.dataclass(frozen=True)
class DbiasSteps:
    """The tiles that a CTA goes through.

    Attributes:
        first: the tile of step 0.
        total: number of tiles.
        along: which field of the tile grows by one with every step, "q_block" or "kv_block".
        members: batch entries and heads of the tiles, where it is these that change.
    """

    first: DbiasStep
    total: Any
    along: str = ""
    members: Members | None = None

    def __getitem__(self, n) -> DbiasStep:
        """Returns the n-th tile."""
        if self.members is not None:
            batch, head = self.members[n]
            return self.first._replace(batch=batch, head=head)
        return self.first._replace(**{self.along: getattr(self.first, self.along) + n})


@dataclasses.dataclass(frozen=True)
class DbiasCta:
    """The refs and the place of one CTA, as one of its warpgroups sees them."""

    sums: Sums
    blocks: ScoreBlocks
    gmem: BackwardArrays
    bias: Any
    out: tuple
    smem: DbiasSmem
    bars: DbiasBarriers
    wg: Any
    refill: Callable[[Any], Any] | None = None  # of the ring

    @property
    def owned(self) -> BiasTile:
        """The tile of the bias that this CTA owns, where it owns one."""
        blocks = self.blocks
        tiles = BiasTiles.of(self.sums.problem, blocks.block_q, blocks.block_kv, blocks.cluster)
        return tiles.at(lax.axis_index("cluster"), pipeline.cluster_rank(blocks.cluster))

    @property
    def ring(self) -> Ring:
        """Ring of the stages, each with all the tiles that a step reads."""
        return dataclasses.replace(self.bars.ring, refill=self.refill)

    def steps(self) -> DbiasSteps:
        """Returns the tiles of this CTA."""
        problem, blocks = self.sums.problem, self.blocks
        if self.sums.axes == "tile":
            return self.members()
        block, head, batch = (lax.axis_index(name) for name in ("x", "y", "z"))
        if self.sums.axes == "rows":
            position = block * blocks.block_q + self.gmem.offset(problem, batch)
            own_tile = batch, block, position
            kv_tiles = KvTileRange.of(problem, self.gmem, own_tile, blocks.block_q, blocks.block_kv)
            return DbiasSteps(
                DbiasStep(batch, head, block, kv_tiles.start), kv_tiles.total, "kv_block"
            )
        q_tiles = QTileRange.of(
            problem, self.gmem, (batch, block), blocks.block_kv, blocks.block_q, mask_all=True
        )
        return DbiasSteps(
            DbiasStep(batch, head, q_tiles.start, block), jnp.int32(q_tiles.per_head), "q_block"
        )

    def members(self) -> DbiasSteps:
        """Returns the tile of this CTA, once for every batch entry and head that shares it."""
        blocks, own = self.blocks, self.owned
        size, parts = (blocks.block_q, blocks.block_kv), self.sums.parts(blocks)
        members = members_of(self.sums.problem, own, parts, size, blocks.cluster)
        first = DbiasStep(members.batch, members.head, own.q_block, own.kv_block)
        return DbiasSteps(first, members.total, members=members)

    @property
    def bias_place(self):
        """Place in the bias, (entry, head), of what this CTA sums."""
        return bias_place(self.sums.problem, self.owned)
