"""The tangents of dQ, dK and dV: forward mode over the backward, for Hessian-vector products.

With dots for tangents, o elementwise, S = scale Q K^T, P = exp(S - L), D = rowsum(dO o O) - dL, and
L' = the tangent of L,

    S'  = scale (Q' K^T + Q K'^T)       P'  = P o (S' - L')
    dP' = dO' V^T + dO V'^T             dS' = P' o (dP - D) + P o (dP' - D')
    dQ' = scale (dS' K + dS K')         dK' = scale (dS'^T Q + dS^T Q')
    dV' = P'^T dO + P^T dO'

where dP = dO V^T and dS = P o (dP - D) are those of the backward. O', L' and D' come from the
tangent kernel of the forward. Queries and keys change places between the results, so one kernel
has them all. A CTA owns rows of two operands, A and B, and goes through columns of C and E:

    rows          A  B   C  E   results
    queries       Q  dO  K  V   dQ' = scale (dS' C + dS C')
    keys          K  V   Q  dO  dK' likewise, dV' = P' E + P E'

A step has six matmuls for the scores and two for each result, all of one warpgroup's 64 rows; the
other warpgroup keeps the tensor cores busy in between. The last warpgroup loads.
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

from .....core.mask import Limits
from .....core.problem import Operands, Problem
from .....core.scores import TileInputs
from ....gpu import score_tile
from ....gpu.launch import WARPGROUP_ROWS, launch
from ....gpu.ptx import inline
from ....gpu.score_tile import RegisterTile, row_shift
from ...common import pipeline
from ...common.auxiliary_inputs import AuxiliaryInputs, Place
from ...common.pipeline import Matmuls, Ring, rows_of, warpgroup_rows
from ..operands import BackwardArrays, KvTileRange, QTileRange, mask_everywhere
from .tiles import PushBarriers, PushBlocks, PushSmem, push_scratch

FIRST, SECOND = range(2)  # results: dQ' or dK', and dV'


class PushArrays(NamedTuple):
    """Operands in device memory; of the tangents, lse_log2 is L' (natural) and delta is D'."""

    primal: BackwardArrays
    tangent: BackwardArrays


class RowVectors(NamedTuple):
    """Values of queries, f32[rows] or f32[columns]."""

    lse_log2: Any
    delta: Any
    dlse: Any
    ddelta: Any


@dataclasses.dataclass(frozen=True)
class PushCta:
    """Refs, ring and place of one CTA, as one of its warpgroups sees them."""

    gmem: PushArrays
    out: tuple
    smem: PushSmem
    bars: PushBarriers
    ring: Ring
    batch: Any
    head: Any  # of the rows: a query head, or a head of keys
    start: Any  # index of the first row
    tiles: Any  # QTileRange or KvTileRange of the columns
    wg: Any


@dataclasses.dataclass(frozen=True)
class PushKernel:
    """One launch; the methods are the phases of a CTA.

    Attributes:
        problem: what is computed.
        blocks: tile sizes.
        q_axis: axis of the tiles that runs over queries; 0: rows are queries.
        results: those of FIRST and SECOND that are computed.
        interpret: run by the interpreter.
    """

    problem: Problem
    blocks: PushBlocks
    q_axis: int
    results: tuple[int, ...]
    interpret: bool

    @property
    def matmuls(self) -> Matmuls:
        """Matmuls of operands of the call's dtype."""
        return Matmuls(self.problem.dtype, self.interpret)

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Auxiliary inputs, which modifiers read."""
        return AuxiliaryInputs(self.problem, self.q_axis)

    @property
    def names(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Fields of BackwardArrays that are (A, B), and (C, E)."""
        query_names, key_names = ("q", "do"), ("k", "v")
        return (key_names, query_names) if self.q_axis else (query_names, key_names)

    def __call__(self, gmem: PushArrays, *refs):
        *out, smem, bars = refs
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "block"))
        if not self.q_axis and self.problem.spec.mask.right is not None:  # the longest rows first
            block = pl.cdiv(self.problem.q_len, self.blocks.rows) - 1 - block
        cta = PushCta(
            gmem=gmem,
            out=tuple(out),
            smem=smem,
            bars=bars,
            ring=bars.ring,
            batch=batch,
            head=head,
            start=block * self.blocks.rows,
            tiles=self.tiles(gmem.primal, batch, block),
            wg=lax.axis_index("wg"),
        )
        cta = self.feed(cta)
        widths = [(self.problem.head_dim, self.problem.v_head_dim)[i] for i in self.results]
        accumulators = [plgpu.ACC((WARPGROUP_ROWS, width), jnp.float32) for width in widths]
        tangents = pl.run_scoped(functools.partial(self.fold, cta), *accumulators)
        self.drain(cta)
        self.store(cta, tangents)

    def tiles(self, arrays: BackwardArrays, batch, block) -> QTileRange | KvTileRange:
        """Returns the tiles of columns that a CTA goes through."""
        size = self.blocks.rows, self.blocks.columns
        if self.q_axis:
            mask_all = mask_everywhere(self.problem)
            return QTileRange.of(self.problem, arrays, (batch, block), *size, mask_all=mask_all)
        position = block * self.blocks.rows + arrays.offset(self.problem, batch)
        return KvTileRange.of(self.problem, arrays, (batch, block, position), *size)

    # --- loads, by the last warpgroup ------------------------------------------------------------

    def feed(self, cta: PushCta) -> PushCta:
        """Loads the rows and the first columns; returns the CTA with a ring that is refilled."""

        def load_rows():
            rows = cta.batch, pl.ds(cta.start, self.blocks.rows), cta.head
            for source, target in zip(self.sources(cta, 0), cta.smem.own, strict=True):
                copy = rows_of(source, rows, target)
                plgpu.copy_gmem_to_smem(copy, target, cta.bars.own)

        (ring,) = pipeline.load_inline(
            cta.wg == self.blocks.warpgroups - 1,
            lambda: cta.tiles.total,
            (cta.ring, functools.partial(self.load, cta)),
            once=load_rows,
        )
        return dataclasses.replace(cta, ring=ring)

    def sources(self, cta: PushCta, side: int) -> list:
        """Returns the arrays of rows (side 0) or columns: each, and its tangent."""
        primal_and_tangent = cta.gmem.primal, cta.gmem.tangent
        return [getattr(arrays, name) for name in self.names[side] for arrays in primal_and_tangent]

    def load(self, cta: PushCta, n):
        """Issues the copies of the n-th tile of columns."""
        slot, (head, block) = cta.ring.slot(n), self.column_tile(cta, n)
        cta.ring.wait_empty(n)
        full, columns = (
            cta.ring.full.at[slot],
            pl.ds(block * self.blocks.columns, self.blocks.columns),
        )
        for source, target in zip(self.sources(cta, 1), cta.smem.streamed, strict=True):
            copy = rows_of(source, (cta.batch, columns, head), target)
            plgpu.copy_gmem_to_smem(copy, target.at[slot], full)
        if self.q_axis:
            for source, target in zip(self.vectors(cta), cta.smem.vectors, strict=True):
                plgpu.copy_gmem_to_smem(source.at[cta.batch, head, columns], target.at[slot], full)
        if self.auxiliary.copies:
            place = self.place(cta, head, block, cta.start, self.blocks.rows)
            arrays = cta.gmem.primal.auxiliary
            self.auxiliary.load(arrays, cta.smem.auxiliary, slot, full, place)

    def vectors(self, cta: PushCta) -> RowVectors:
        """Returns the values of queries, in device memory."""
        primal, tangent = cta.gmem
        return RowVectors(primal.lse_log2, primal.delta, tangent.lse_log2, tangent.delta)

    def column_tile(self, cta: PushCta, n):
        """Returns (head, block) of the n-th tile of columns."""
        if not self.q_axis:
            return lax.div(cta.head, jnp.int32(self.problem.group)), cta.tiles[n]
        member, block = cta.tiles[n]
        return cta.head * self.problem.group + member, block

    def place(self, cta: PushCta, head, block, start, rows: int) -> Place:
        """Returns the place of a tile of scores; `head` is that of its columns."""
        head = head if self.q_axis else cta.head
        columns = self.blocks.columns
        return Place(cta.batch, head, start, block * columns, rows, columns)

    def drain(self, cta: PushCta):
        """Observes the releases that no later fill waited for."""
        loads = cta.wg == self.blocks.warpgroups - 1
        pl.when(loads)(lambda: cta.ring.drain(cta.tiles.total))

    # --- a warpgroup -----------------------------------------------------------------------------

    def fold(self, cta: PushCta, *accumulators):
        """Sums the results over all tiles of columns; returns them before scaling."""
        plgpu.barrier_wait(cta.bars.own)
        gmem, row = cta.gmem.primal, cta.start + cta.wg * WARPGROUP_ROWS
        place, rows = self.place(cta, cta.head, 0, row, WARPGROUP_ROWS), None
        fragments = self.auxiliary.fragments_of_rows(gmem.auxiliary, place)
        if not self.q_axis:
            fragments = self.auxiliary.fragments_of_head(fragments, gmem.auxiliary, place)
            own = cta.batch, cta.head, pl.ds(row, WARPGROUP_ROWS)
            load = lambda ref: plgpu.load(ref.at[own], layout=inline.ROWS, optimized=False)
            rows = RowVectors(*map(load, self.vectors(cta)))
        step = functools.partial(self.step, cta, fragments, rows, accumulators)
        if self.q_axis:
            cta.tiles.visit(lambda _, n, *, masked: step(n, masked=masked))
        else:
            masks = not self.problem.spec.mask.is_trivial or cta.tiles.kv_len is not None
            cta.tiles.visit(step, masks=masks or mask_everywhere(self.problem))
        return tuple(plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accumulators)

    def step(self, cta: PushCta, fragments: TileInputs, rows, accumulators, n, *, masked: bool):
        """Adds the n-th tile of columns to the results."""
        cta.ring.wait_full(n)
        slot, multiply = cta.ring.slot(n), self.matmuls.multiply
        run = functools.partial(self.weights, cta, fragments, rows, n, masked)
        p, dp, kept, queries = pl.run_scoped(run, *(self.score_accumulator,) * 2)
        c, dc, e, de = (tile.at[self.hidden(slot)] for tile in cta.smem.streamed)
        drop = lambda x: x if kept is None else jnp.where(kept, x, 0.0)
        left: dict[int, Any] = {SECOND: (drop(dp), drop(p), e, de)}
        if FIRST in self.results:
            run = functools.partial(self.score_gradients, cta, slot, (p, dp, kept, queries))
            ds, dds = pl.run_scoped(run, *(self.score_accumulator,) * 2)
            left[FIRST] = dds, ds, c, dc
        for result, accumulator in zip(self.results, accumulators, strict=True):
            moved, fixed, right, dright = left[result]
            multiply(accumulator, self.matmuls.split(moved), right)
            multiply(accumulator, self.matmuls.split(fixed), dright)
        plgpu.wgmma_wait(0)
        cta.ring.release(n)

    @property
    def score_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.blocks.columns), jnp.float32)

    def operands(self, cta: PushCta, slot, side: int):
        """Returns (A, A', C, C') of a step in shared memory, or with `side` 1 (B, B', E, E')."""
        own = warpgroup_rows(lax.optimization_barrier(cta.wg))  # likewise not held
        pair = slice(2 * side, 2 * side + 2)
        left = (tile.at[own] for tile in cta.smem.own[pair])
        return *left, *(tile.at[self.hidden(slot)] for tile in cta.smem.streamed[pair])

    def hidden(self, slot):
        """Returns a slot that is computed anew in every step, even where there is only one.

        Descriptors of operands are then not held over the loop: 400 to 1,000 bytes of spills at
        head dim 256.
        """
        return lax.optimization_barrier(jnp.int32(slot)) if self.blocks.stages == 1 else slot

    def weights(self, cta: PushCta, fragments: TileInputs, rows, n, masked, s_acc, ds_acc):
        """Computes (P, P', what dropout keeps or None, the values of queries) of a tile."""
        slot, count = cta.ring.slot(n), self.matmuls.count
        a, da, c, dc = self.operands(cta, slot, 0)
        self.matmuls.multiply(s_acc, a, c, transposed=True)
        self.matmuls.multiply(ds_acc, da, c, transposed=True)
        self.matmuls.multiply(ds_acc, a, dc, transposed=True)
        head, block = self.column_tile(cta, n)
        row = cta.start + cta.wg * WARPGROUP_ROWS
        gmem, tile = cta.gmem.primal, self.tile(cta, row, block)
        if self.q_axis:
            place = self.place(cta, head, block, row, WARPGROUP_ROWS)
            fragments = self.auxiliary.fragments_of_head(fragments, gmem.auxiliary, place)
            load = lambda ref: plgpu.load(ref.at[slot], layout=inline.COLS)
            rows = RowVectors(*map(load, cta.smem.vectors))
        shape, own = tile.shape, warpgroup_rows(cta.wg)
        inputs = self.auxiliary.inputs(fragments, cta.smem.auxiliary, slot, shape, own)
        if gmem.auxiliary.far is not None:
            query = block * self.blocks.columns if self.q_axis else row
            q_head = head if self.q_axis else cta.head
            far = self.auxiliary.far(gmem.auxiliary, cta.batch, q_head)
            shift = row_shift(self.problem, gmem.auxiliary, far, q_head, query, some=far)
            inputs = inputs._replace(shift=shift)
        limits = Limits()
        if masked:
            limits = tile.limits(self.problem.spec.mask, cta.tiles.kv_len)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=2 * count)
        w = score_tile.weights(self.problem, tile, s, rows.lse_log2, inputs, limits)
        p = lax.optimization_barrier(w.p)  # above the wait for S'
        ds = plgpu.wgmma_accumulator_load(ds_acc, wait_n=0)
        queries = [tile.per_q(x) for x in (rows.dlse, rows.delta, rows.ddelta)]
        dp = p * (ds * self.problem.spec.scale - queries[0])
        return p, dp, w.kept, queries[1:]

    def score_gradients(self, cta: PushCta, slot, weights, dp_acc, ddp_acc):
        """Computes (dS, dS') of a tile, f32, from P and P'; `weights` as `weights` returns them."""
        (p, dp, kept, (delta, ddelta)), count = weights, self.matmuls.count
        b, db, e, de = self.operands(cta, slot, 1)
        self.matmuls.multiply(dp_acc, b, e, transposed=True)
        self.matmuls.multiply(ddp_acc, db, e, transposed=True)
        self.matmuls.multiply(ddp_acc, b, de, transposed=True)
        x = plgpu.wgmma_accumulator_load(dp_acc, wait_n=2 * count)
        centred = score_tile.centred(self.problem, kept, x, delta)
        ds, moved = lax.optimization_barrier((p * centred, dp * centred))
        dx = plgpu.wgmma_accumulator_load(ddp_acc, wait_n=0)
        return ds, moved + p * score_tile.centred(self.problem, kept, dx, ddelta)

    def tile(self, cta: PushCta, row, block) -> RegisterTile:
        """Describes a warpgroup's tile: where it lies, and its shape."""
        column = block * self.blocks.columns
        offset = cta.gmem.primal.offset(self.problem, cta.batch)
        starts = (column + offset, row) if self.q_axis else (row + offset, column)
        shape = WARPGROUP_ROWS, self.blocks.columns
        return RegisterTile(*starts, shape, q_axis=self.q_axis, interpret=self.interpret)

    def store(self, cta: PushCta, tangents):
        """Scales the results and writes them through rows that only this warpgroup reads."""
        rows = pl.ds(cta.start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        for result, out, x in zip(self.results, cta.out, tangents, strict=True):
            tile = cta.smem.own[2 * result]
            x = (
                x * self.problem.spec.scale
                if result == FIRST
                else score_tile.gained(self.problem, x)
            )
            staging = tile.at[warpgroup_rows(cta.wg)]
            self.matmuls.store(staging, x)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, rows_of(out, (cta.batch, rows, cta.head), tile))
        plgpu.wait_smem_to_gmem(0)


def push_launch(
    problem: Problem, blocks: PushBlocks, q_axis: int, results: tuple[int, ...], interpret: bool
):
    """Returns (Operands, PushArrays) -> the results of one launch, in the form of operands."""
    kernel = PushKernel(problem, blocks, q_axis, results, interpret)

    def run(operands: Operands, arrays: PushArrays):
        primal = arrays.primal
        rows = (primal.k, primal.v) if q_axis else (primal.q, primal.do)
        heads, length = (
            (problem.kv_heads, problem.kv_len) if q_axis else (problem.q_heads, problem.q_len)
        )
        tile = (blocks.columns, blocks.rows) if q_axis else (blocks.rows, blocks.columns)
        primal = primal.for_rows(problem, operands, q_axis, tile)
        call = launch(
            kernel,
            out=tuple(jax.ShapeDtypeStruct(rows[i].shape, rows[i].dtype) for i in results),
            scratch=push_scratch(problem, blocks, q_axis, primal),
            grid={"head": heads, "block": pl.cdiv(length, blocks.rows), "batch": problem.batch},
            threads=blocks.warpgroups,
            name=f"flash_pallas_backward_push_{'kv' if q_axis else 'q'}",
            interpret=interpret,
        )
        return call(arrays._replace(primal=primal))

    return run
