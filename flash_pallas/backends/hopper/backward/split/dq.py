"""dQ without atomics: the other half of the deterministic backward.

A CTA owns 64 queries of one head per compute warpgroup and loops over the KV tiles that they see.
dQ stays in registers; the producer warpgroup streams K and V. Each block takes:

    S = Q K^T, dP = dO V^T       shared x shared
    dS = P (dP - delta)          registers, the left operand of
    dQ += dS K                   in flight while S of the next block is issued

The wait for the previous dQ comes before dP is issued, not after: the registers of dS die before dP
needs its own (after: 0.74 of the speed at head dim 256). Masked blocks, the last of which may reach
past the last key, come last, in a loop of their own. Each warpgroup alone reads its rows of Q, and
stages dQ in them.
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
from ..operands import (
    BackwardArrays,
    KvTileList,
    KvTileRange,
    mask_everywhere,
    own_grid,
    own_place,
)
from .tiles import DqBarriers, DqBlocks, DqSmem, dq_scratch

KvTiles = KvTileRange | KvTileList


class DqRows(NamedTuple):
    """Row vectors and row fragments of a warpgroup's 64 queries."""

    lse: Any  # f32[64], base 2
    delta: Any  # f32[64]
    fragments: TileInputs


@dataclasses.dataclass(frozen=True)
class DqKernel:
    """One launch of the dQ kernel; the methods are the phases of a CTA."""

    problem: Problem
    blocks: DqBlocks
    interpret: bool

    @property
    def matmuls(self) -> Matmuls:
        """Matmuls of operands of the call's dtype."""
        return Matmuls(self.problem.dtype, self.interpret)

    @property
    def loads(self) -> DqLoads:
        """Copies from device memory into shared memory."""
        return DqLoads(self.problem, self.blocks)

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Auxiliary inputs, which modifiers read."""
        return self.loads.auxiliary

    def __call__(self, gmem: BackwardArrays, dq, smem: DqSmem, bars: DqBarriers):
        batch, block, head = own_place(self.problem, gmem, self.problem.q_heads)
        causal = self.problem.spec.mask.right is not None
        if causal and not self.problem.is_listed:  # the longest rows first
            block = pl.cdiv(self.problem.q_len, self.blocks.block_q) - 1 - block
        q_start = block * self.blocks.block_q
        position = q_start + gmem.offset(self.problem, batch)
        cta = DqCta(
            gmem=gmem,
            dq=dq,
            smem=smem,
            bars=bars,
            k=bars.k,
            v=bars.v,
            batch=batch,
            head=head(),
            q_start=q_start,
            position=position,
            block=block,
            wg=lax.axis_index("wg"),
        )
        pl.when(cta.wg < self.blocks.warpgroups)(lambda: self.consume(cta))
        if self.blocks.producer:
            pl.when(cta.wg == self.blocks.warpgroups)(lambda: self.loads(cta))

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: DqCta):
        """Computes dQ of this warpgroup's rows over the KV tiles, scales it and writes it."""
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = self.loads.feed(cta)
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        dq = pl.run_scoped(functools.partial(self.fold, cta), accumulator)
        staging = cta.smem.q.at[warpgroup_rows(cta.wg)]
        self.matmuls.store(staging, dq * self.problem.spec.scale)
        plgpu.commit_smem()
        rows = pl.ds(cta.q_start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        out = rows_of(cta.dq, (cta.batch, rows, cta.head), cta.smem.q)
        plgpu.copy_smem_to_gmem(staging, out)
        plgpu.wait_smem_to_gmem(0)

    def fold(self, cta: DqCta, dq_acc):
        """Sums dQ over the KV tiles; returns it before scaling, f32[64, D]."""
        plgpu.barrier_wait(cta.bars.queries)
        own = warpgroup_rows(cta.wg)
        rows = DqRows(
            lse=plgpu.load(cta.smem.lse.at[own], layout=inline.ROWS),
            delta=plgpu.load(cta.smem.delta.at[own], layout=inline.ROWS),
            fragments=self.auxiliary.fragments(
                cta.gmem.auxiliary, cta.place(0, 0, own=True, rows=WARPGROUP_ROWS)
            ),
        )
        kv_tiles = self.loads.kv_tiles(cta)
        step = functools.partial(self.step, cta, kv_tiles, rows, dq_acc)
        far = self.auxiliary.far(cta.gmem.auxiliary, cta.batch, cta.head)
        far_step = functools.partial(step, far=far)
        kv_tiles.visit(step, masks=self.masks(kv_tiles), far=far, far_step=far_step)
        plgpu.wgmma_wait(0)
        cta.k.release(kv_tiles.total - 1)
        if not self.blocks.producer:
            pl.when(self.loads.is_loader(cta))(lambda: self.loads.drain(cta))
        return dq_acc[...]

    def masks(self, kv_tiles: KvTiles) -> bool:
        """Returns whether some tile may need its mask."""
        band = not self.problem.spec.mask.is_trivial
        return band or kv_tiles.kv_len is not None or mask_everywhere(self.problem)

    def step(self, cta: DqCta, kv_tiles: KvTiles, rows: DqRows, dq_acc, n, *, masked, far=None):
        """Computes dS of the n-th KV tile and issues dQ += dS K.

        `far` is None unless queries may be shifted.
        """
        limits = Limits()
        tile = self.tile(cta, kv_tiles[n])
        if masked:
            limits = tile.limits(self.problem.spec.mask, kv_tiles.kv_len)
        is_whole = self.problem.is_listed and not masked
        kv_tile = tile, limits, far, is_whole
        matmuls = functools.partial(self.score_gradients, cta, rows, n, kv_tile)
        # Before the accumulators exist: see DbiasKernel.tile in backward/dbias.
        cta.k.wait_full(n)
        ds = pl.run_scoped(matmuls, self.score_accumulator)
        # Ends during the next block.
        self.matmuls.multiply(dq_acc, ds, cta.smem.k.at[cta.k.slot(n)])

    def score_gradients(self, cta: DqCta, rows: DqRows, n, kv_tile, s_acc):
        """Computes dS of the n-th KV tile as an operand; awaits the previous dQ on the way.

        `kv_tile`: (RegisterTile, Limits, `far`, whether lists call it whole).
        """
        k = cta.smem.k.at[cta.k.slot(n)]
        # An index that cannot be hoisted. Otherwise the descriptors of Q and dO, one per wgmma,
        # live through the loop: 144 bytes of spills at head dim 256, 344 if causal, against none.
        own = warpgroup_rows(lax.optimization_barrier(cta.wg))
        self.matmuls.multiply(s_acc, cta.smem.q.at[own], k, transposed=True)
        plgpu.wgmma_wait(self.matmuls.count)
        pl.when(n > 0)(lambda: cta.k.release(n - 1))
        cta.v.wait_full(n)
        matmul = functools.partial(self.with_dp, cta, rows, n, kv_tile, s_acc)
        return pl.run_scoped(matmul, self.score_accumulator)

    def with_dp(self, cta: DqCta, rows: DqRows, n, kv_tile, s_acc, dp_acc):
        """Computes dP and dS of the n-th KV tile, dS as an operand, once S is issued."""
        v, own = cta.smem.v.at[cta.v.slot(n)], warpgroup_rows(lax.optimization_barrier(cta.wg))
        self.matmuls.multiply(dp_acc, cta.smem.do.at[own], v, transposed=True)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=self.matmuls.count)
        per_row = lambda x: lax.broadcast_in_dim(x, s.shape, (0,))
        (tile, limits, far, is_whole), problem = kv_tile, self.problem
        inputs = self.auxiliary.inputs(
            rows.fragments, cta.smem.auxiliary, cta.k.slot(n), s.shape, own, ids=not is_whole
        )
        if is_whole:
            problem, inputs = problem.of_whole_tiles, inputs._replace(mask=None)
        if far is not None:
            query = cta.q_start + cta.wg * WARPGROUP_ROWS
            shift = row_shift(self.problem, cta.gmem.auxiliary, far, cta.head, query)
            inputs = inputs._replace(shift=shift)
        w = score_tile.weights(problem, tile, s, rows.lse, inputs, limits, marks=True)
        p = lax.optimization_barrier(score_tile.pulled(w))  # above the wait for dP
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        cta.v.release(n)
        centred = score_tile.centred(self.problem, w.kept, dp, per_row(rows.delta))
        return self.matmuls.split(p * centred)

    @property
    def score_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_kv), jnp.float32)

    def tile(self, cta: DqCta, block) -> RegisterTile:
        """Describes this warpgroup's tile of a KV tile: where it lies, and its shape."""
        return RegisterTile(
            q_start=cta.position + cta.wg * WARPGROUP_ROWS,
            kv_start=block * self.blocks.block_kv,
            shape=(WARPGROUP_ROWS, self.blocks.block_kv),
            interpret=self.interpret,
            precise=self.problem.dtype == jnp.float32,
        )


def dq(
    problem: Problem,
    blocks: DqBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the kernel; returns dq in the form of arrays.q, with the same bits in every run."""
    block_q, block_kv = blocks.block_q, blocks.block_kv
    run = launch(
        DqKernel(problem, blocks, interpret),
        out=jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
        scratch=dq_scratch(problem, blocks, arrays),
        # Queries slowest: 1.03 to 1.05 of heads slowest (head dim 256).
        grid=own_grid(
            problem,
            {
                "block": pl.cdiv(problem.q_len, block_q),
                "head": problem.q_heads,
                "batch": problem.batch,
            },
        ),
        threads=blocks.warpgroups + blocks.producer,
        name="flash_pallas_backward_dq",
        interpret=interpret,
    )
    return run(arrays.for_rows(problem, operands, 0, (block_q, block_kv)))


@dataclasses.dataclass(frozen=True)
class DqCta:
    """Refs, rings and place of one CTA, as one of its warpgroups sees them."""

    gmem: BackwardArrays
    dq: Any  # [B, T8, N, D]
    smem: DqSmem
    bars: DqBarriers
    k: Ring
    v: Ring
    batch: Any
    head: Any
    q_start: Any  # index of the first query
    position: Any  # its position: q_start + q_offset
    block: Any  # of queries
    wg: Any

    def place(self, column_start, columns: int, *, own: bool, rows: int) -> Place:
        """Returns the place of a tile of this CTA or, if `own`, of this warpgroup."""
        row_start = self.q_start + self.wg * WARPGROUP_ROWS if own else self.q_start
        return Place(self.batch, self.head, row_start, column_start, rows, columns)


@dataclasses.dataclass(frozen=True)
class DqLoads:
    """Loads of one CTA: Q, dO, lse and delta once, K and V through two rings."""

    problem: Problem
    blocks: DqBlocks

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Auxiliary inputs, which modifiers read."""
        return AuxiliaryInputs(self.problem, q_axis=0)

    def kv_tiles(self, cta: DqCta) -> KvTiles:
        """Returns the KV tiles of this CTA."""
        if self.problem.is_listed:
            own_tile = cta.batch, cta.head, cta.block
            return KvTileList.of(self.problem, cta.gmem, own_tile, self.blocks.block_kv)
        own_tile, blocks = (cta.batch, cta.block, cta.position), self.blocks
        return KvTileRange.of(self.problem, cta.gmem, own_tile, blocks.block_q, blocks.block_kv)

    def __call__(self, cta: DqCta):
        """Runs the producer: loads Q, dO, lse and delta once, then every block of K and V."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        self.load_queries(cta)
        kv_tiles = self.kv_tiles(cta)

        @pl.loop(jnp.int32(0), kv_tiles.total)
        def _(n):
            self.load_k(cta, kv_tiles, n)
            self.load_v(cta, kv_tiles, n)

        self.drain(cta)

    def feed(self, cta: DqCta) -> DqCta:
        """Loads what the KV tiles start with, in the last warpgroup, where there is no producer.

        Returns the CTA with rings that this warpgroup fills again where it releases them.
        """
        kv_tiles = self.kv_tiles(cta)
        k, v = pipeline.load_inline(
            self.is_loader(cta),
            lambda: kv_tiles.total,
            (cta.k, functools.partial(self.load_k, cta, kv_tiles)),
            (cta.v, functools.partial(self.load_v, cta, kv_tiles)),
            once=lambda: self.load_queries(cta),
        )
        return dataclasses.replace(cta, k=k, v=v)

    def load_queries(self, cta: DqCta):
        """Loads Q, dO, lse and delta."""
        queries = pl.ds(cta.q_start, self.blocks.block_q)
        tile, row = (cta.batch, queries, cta.head), (cta.batch, cta.head, queries)
        arrived = cta.bars.queries
        gmem, smem = cta.gmem, cta.smem
        plgpu.copy_gmem_to_smem(rows_of(gmem.q, tile, smem.q), smem.q, arrived)
        plgpu.copy_gmem_to_smem(rows_of(gmem.do, tile, smem.do), smem.do, arrived)
        plgpu.copy_gmem_to_smem(gmem.lse_log2.at[row], smem.lse, arrived)
        plgpu.copy_gmem_to_smem(gmem.delta.at[row], smem.delta, arrived)

    def keys(self, cta: DqCta, kv_tiles: KvTiles, n):
        """Returns the index of the n-th block in k and v."""
        block_kv = self.blocks.block_kv
        kv_head = lax.div(cta.head, jnp.int32(self.problem.group))
        return cta.batch, pl.ds(kv_tiles[n] * block_kv, block_kv), kv_head

    def load_k(self, cta: DqCta, kv_tiles: KvTiles, n):
        """Loads K of the n-th block and its streamed auxiliary inputs."""
        gmem, smem, keys = cta.gmem, cta.smem, self.keys(cta, kv_tiles, n)
        self.load(cta.k, n, rows_of(gmem.k, keys, smem.k), smem.k)
        if self.auxiliary.copies:
            slot, rows = cta.k.slot(n), self.blocks.block_q
            place = cta.place(keys[1].start, self.blocks.block_kv, own=False, rows=rows)
            self.auxiliary.load(gmem.auxiliary, smem.auxiliary, slot, cta.k.full.at[slot], place)

    def load_v(self, cta: DqCta, kv_tiles: KvTiles, n):
        """Loads V of the n-th block."""
        source = rows_of(cta.gmem.v, self.keys(cta, kv_tiles, n), cta.smem.v)
        self.load(cta.v, n, source, cta.smem.v)

    def load(self, ring: Ring, n, source, buffer):
        """Issues the copy of the n-th fill of a ring, once its slot is empty."""
        slot = ring.slot(n)
        ring.wait_empty(n)
        plgpu.copy_gmem_to_smem(source, buffer.at[slot], ring.full.at[slot])

    def is_loader(self, cta: DqCta):
        """Returns whether this is the warpgroup that loads where there is no producer."""
        return cta.wg == self.blocks.warpgroups - 1

    def drain(self, cta: DqCta):
        """Observes the releases that no later fill waited for."""
        total = self.kv_tiles(cta).total
        cta.k.drain(total)
        cta.v.drain(total)
