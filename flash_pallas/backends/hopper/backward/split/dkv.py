"""dK and dV without atomics: one half of the deterministic backward.

A KV-stationary CTA owns 64 keys of one KV head and loops over the Q tiles of every query head of
its group. Scores are held transposed, so that P^T and dS^T come out of the registers as left
operands. The two compute warpgroups do different things, so that each accumulator of 64 x head dim
has one owner:

    warpgroup 0   S^T = K Q^T -> P^T (operand) -> dV += P^T dO       hands P^T over in shared memory
    warpgroup 1   dP^T = V dO^T -> dS^T = P^T (dP^T - delta) -> dK += dS^T Q
    warpgroup 2   the producer: K and V once, Q with lse and dO with delta through two rings

The wgmmas of dV and dK of a tile stay in flight while S^T and dP^T of the next tile are issued, and
the elementwise work of one warpgroup overlaps with the wgmmas of the other; they meet only at the
P^T ring. Issuing the next S^T before dV instead keeps a tile alive for two steps, so that two
stages prefetch nothing (a ratio to cuDNN of 1.09 instead of 1.28 at head dim 256).
Only warpgroup 0 reads K and only warpgroup 1 reads V: dV and dK are staged in them at the end, if
they are of the same size.
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

from .....core import scores
from .....core.mask import Limits
from .....core.problem import Operands, Problem
from .....core.scores import TileInputs
from ....gpu import score_tile
from ....gpu.launch import WARPGROUP_ROWS, launch
from ....gpu.ptx import inline
from ....gpu.score_tile import RegisterTile, Weights, row_shift
from ...common.auxiliary_inputs import AuxiliaryInputs, Place
from ...common.pipeline import Matmuls, Ring, rows_of
from ..operands import (
    BackwardArrays,
    QTileList,
    QTilePairs,
    QTileRange,
    mask_everywhere,
    own_grid,
    own_place,
)
from .tiles import DkvBarriers, DkvBlocks, DkvSmem, dkv_scratch

DV_WARPGROUP, DK_WARPGROUP, PRODUCER = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class DkvKernel:
    """One launch of the dK/dV kernel; the methods are the phases of a CTA."""

    problem: Problem
    blocks: DkvBlocks
    interpret: bool

    @property
    def matmuls(self) -> Matmuls:
        """Matmuls of operands of the call's dtype."""
        return Matmuls(self.problem.dtype, self.interpret)

    @property
    def loads(self) -> DkvLoads:
        """Copies from device memory into shared memory."""
        return DkvLoads(self.problem, self.blocks)

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Auxiliary inputs, which modifiers read."""
        return self.loads.auxiliary

    def __call__(self, gmem: BackwardArrays, dk, dv, smem: DkvSmem, bars: DkvBarriers):
        batch, block, head = own_place(self.problem, gmem, self.problem.kv_heads)
        kv_head = head()
        cta = DkvCta(
            gmem=gmem,
            dk=dk,
            dv=dv,
            smem=smem,
            bars=bars,
            q=bars.q,
            do=bars.do,
            p=bars.p,
            batch=batch,
            kv_head=kv_head,
            kv_start=block * WARPGROUP_ROWS,
            q_tiles=self.q_tiles(gmem, (batch, kv_head, block)),
        )
        wg = lax.axis_index("wg")
        pl.when(wg == DV_WARPGROUP)(lambda: self.compute_dv(cta))
        pl.when(wg == DK_WARPGROUP)(lambda: self.compute_dk(cta))
        if self.blocks.producer:
            pl.when(wg == PRODUCER)(lambda: self.loads(cta))

    def q_tiles(self, gmem: BackwardArrays, own_tile) -> QTileRange | QTileList | QTilePairs:
        """Returns the Q tiles of a CTA; `own_tile`: (batch entry, KV head, KV tile)."""
        size = WARPGROUP_ROWS, self.blocks.block_q
        if self.blocks.joined(self.problem) == 2:
            far = self.auxiliary.far(gmem.auxiliary, own_tile[0], own_tile[1] * self.problem.group)
            return QTilePairs.of(self.problem, gmem, own_tile, WARPGROUP_ROWS, far)
        mask_all = mask_everywhere(self.problem)
        if self.problem.is_listed:
            return QTileList.of(self.problem, gmem, own_tile, *size, mask_all=mask_all)
        own_tile = own_tile[0], own_tile[2]
        return QTileRange.of(self.problem, gmem, own_tile, *size, mask_all=mask_all)

    # --- warpgroup 0: S, P, dV -------------------------------------------------------------------

    def compute_dv(self, cta: DkvCta):
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            self.loads.load_k(cta)
        far = self.auxiliary.far(cta.gmem.auxiliary, cta.batch, cta.kv_head * self.problem.group)
        if far is None:
            self.sum_dv(cta, None)
        else:
            # With both loops between the same accumulators 20 bytes spill at head dim 256, causal.
            pl.when(far == 0)(lambda: self.sum_dv(cta, None))
            pl.when(far != 0)(lambda: self.sum_dv(cta, far))

    def sum_dv(self, cta: DkvCta, far):
        """Computes and writes dV of these keys; `far` is None unless some query may be shifted."""
        accumulator = self.result_accumulator(self.problem.v_head_dim)
        dv = pl.run_scoped(functools.partial(self.loop_over_dv, cta, far), accumulator)
        cta.p.drain(cta.q_tiles.total)
        staging = cta.smem.k if cta.smem.dv is None else cta.smem.dv
        self.store(dv, staging, rows_of(cta.dv, cta.keys, staging))

    def loop_over_dv(self, cta: DkvCta, far, dv_acc):
        """Sums dV over all tiles; returns f32[64, Dv]."""
        place = self.loads.place(cta, 0, 0)
        fragments = self.auxiliary.fragments_of_rows(cta.gmem.auxiliary, place)
        if self.problem.group == 1:
            place = self.loads.place(cta, 0, 0)
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
        plgpu.barrier_wait(cta.bars.k_full)
        step = functools.partial(self.dv_step, cta, fragments, far, dv_acc)
        cta.q_tiles.visit(step, in_one_loop=far is not None)
        plgpu.wgmma_wait(0)
        cta.do.release(cta.q_tiles.total - 1)
        return score_tile.gained(self.problem, dv_acc[...])

    def dv_step(self, cta: DkvCta, fragments: TileInputs, far, dv_acc, block_of, n, *, masked):
        """Hands over P^T of the n-th tile and issues dV += P^T dO."""
        block = block_of(n)
        if self.problem.group > 1:  # under the wait for Q
            place = self.loads.place(cta, cta.q_tiles[n][0], block)
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
        # Before the accumulator exists: see DbiasKernel.tile in backward/dbias.
        cta.q.wait_full(n)
        matmuls = functools.partial(self.weights, cta, fragments, (n, block), masked, far)
        p, handed = pl.run_scoped(matmuls, self.score_accumulator)
        cta.p.wait_empty(n)
        self.matmuls.store(cta.smem.p.at[cta.p.slot(n)], handed)
        plgpu.barrier_arrive(cta.p.full.at[cta.p.slot(n)])
        cta.do.wait_full(n)
        # Ends during the next tile.
        self.matmuls.multiply(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])

    def weights(self, cta: DkvCta, fragments: TileInputs, q_tile, masked, far, s_acc):
        """Computes P^T for dV and for the other warpgroup, as operands; awaits the previous dV.

        `q_tile`: (number of the Q tile, its Q block).
        """
        n, block = q_tile
        slot = cta.q.slot(n)
        self.matmuls.multiply(s_acc, cta.smem.k, cta.smem.q.at[slot], transposed=True)
        lse = plgpu.load(cta.smem.lse.at[slot], layout=inline.COLS)
        plgpu.wgmma_wait(self.matmuls.count)
        pl.when(n > 0)(lambda: cta.do.release(n - 1))
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
        tile = self.tile(cta, block)
        problem, is_whole = self.problem, self.problem.is_listed and not masked
        inputs = self.inputs(cta, fragments, slot, ids=not is_whole)
        if is_whole:
            problem, inputs = problem.of_whole_tiles, inputs._replace(mask=None)
        if far is not None:
            query = block * self.loads.rows
            shift = row_shift(self.problem, cta.gmem.auxiliary, far, cta.q_tiles[n][0], query)
            inputs = inputs._replace(shift=shift)
        cta.q.release(n)
        limits = tile.limits(self.problem.spec.mask, cta.q_tiles.kv_len) if masked else Limits()
        w = score_tile.weights(problem, tile, s, lse, inputs, limits, marks=True)
        if self.matmuls.parts == 1:
            p = (score_tile.operand(self.problem, w),)
        else:
            p = self.matmuls.split(score_tile.dropped(self.problem, w))
        return p, self.hand_over(w, p)

    def inputs(self, cta: DkvCta, fragments: TileInputs, slot, *, ids: bool = True) -> TileInputs:
        """Returns what modifiers read at the tile that lies in a slot of Q.

        Without `ids` no vector hides anything of the tile.
        """
        shape, rows = (WARPGROUP_ROWS, self.blocks.block_q), pl.ds(0, WARPGROUP_ROWS)
        return self.auxiliary.inputs(fragments, cta.smem.auxiliary, slot, shape, rows, ids=ids)

    def hand_over(self, w: Weights, p):
        """Returns pull(P), from which warpgroup 1 makes dS; what dropout drops is negative.

        Nothing is negative by itself: softcap's pull multiplies by 1 - tanh^2. With score_mod,
        whose pull may be negative, no sign is set: see `drops_twice`.
        """
        spec = self.problem.spec
        if not spec.score_modifiers and w.kept is None:
            return p
        through = score_tile.pulled(w)
        if w.kept is not None and not self.drops_twice:
            through = jnp.where(w.kept, through, -through)
        return self.matmuls.split(through)

    @property
    def drops_twice(self) -> bool:
        """Returns whether both warpgroups compute the dropout mask.

        They do where a derivative may be negative, which leaves no sign to pass it as.
        """
        spec = self.problem.spec
        return spec.dropout_rate > 0 and bool(spec.score_modifiers - {"softcap"})

    def tile(self, cta: DkvCta, block) -> RegisterTile:
        """Describes the tile of a Q block: where it lies, and its shape."""
        return RegisterTile(
            q_start=block * self.loads.rows + cta.q_tiles.q_offset,
            kv_start=cta.kv_start,
            shape=(WARPGROUP_ROWS, self.blocks.block_q),
            q_axis=1,
            interpret=self.interpret,
            precise=self.problem.dtype == jnp.float32,
        )

    # --- warpgroup 1: dP, dS, dK -----------------------------------------------------------------

    def compute_dk(self, cta: DkvCta):
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = self.loads.feed(cta)
        accumulator = self.result_accumulator(self.problem.head_dim)
        dk = pl.run_scoped(functools.partial(self.loop_over_dk, cta), accumulator)
        if not self.blocks.producer:
            self.loads.drain(cta)
        staging = cta.smem.v if cta.smem.dk is None else cta.smem.dk
        out = rows_of(cta.dk, cta.keys, staging)
        self.store(dk * self.problem.spec.scale, staging, out)

    def loop_over_dk(self, cta: DkvCta, dk_acc):
        """Sums dK over all tiles; returns it before scaling, f32[64, D].

        Hidden scores have P = 0, so there is no mask here.
        """
        plgpu.barrier_wait(cta.bars.v_full)
        pl.loop(jnp.int32(0), cta.q_tiles.total)(functools.partial(self.dk_step, cta, dk_acc))
        plgpu.wgmma_wait(0)
        cta.q.release(cta.q_tiles.total - 1)
        return dk_acc[...]

    def dk_step(self, cta: DkvCta, dk_acc, n):
        """Computes dS^T of the n-th tile and issues dK += dS^T Q."""
        if not self.blocks.producer:
            self.loads.refill_do(cta, n)
        cta.do.wait_full(n)
        matmuls = functools.partial(self.score_gradients, cta, n)
        ds = pl.run_scoped(matmuls, self.score_accumulator)
        if not self.drops_twice:
            cta.q.wait_full(n)
        # Ends during the next tile.
        self.matmuls.multiply(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])

    def score_gradients(self, cta: DkvCta, n, dp_acc):
        """Computes dS^T of the n-th tile as an operand; awaits the previous dK on the way."""
        slot = cta.do.slot(n)
        self.matmuls.multiply(dp_acc, cta.smem.v, cta.smem.do.at[slot], transposed=True)
        delta = plgpu.load(cta.smem.delta.at[slot], layout=inline.COLS)
        plgpu.wgmma_wait(self.matmuls.count)
        pl.when(n > 0)(lambda: cta.q.release(n - 1))
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        cta.do.release(n)
        delta = lax.broadcast_in_dim(delta, dp.shape, (1,))
        if self.problem.spec.dropout_rate:
            return self.matmuls.split(self.with_dropout(cta, n, dp, delta))
        centred = dp - delta
        return self.matmuls.split(self.handed(cta, n) * centred)

    def handed(self, cta: DkvCta, n):
        """Loads what the other warpgroup's `hand_over` made, as f32, and releases its slot."""
        cta.p.wait_full(n)
        p = self.matmuls.load(cta.smem.p.at[cta.p.slot(n)], inline.WGMMA)
        cta.p.release(n)
        return p

    def with_dropout(self, cta: DkvCta, n, dp, delta):
        """Computes dS^T, f32, where some weights were dropped."""
        p = self.handed(cta, n)
        if not self.drops_twice:
            return jnp.abs(p) * score_tile.centred(self.problem, p > 0.0, dp, delta)
        cta.q.wait_full(n)  # dropout's keys
        member, block = cta.q_tiles[n]
        fragments = self.auxiliary.fragments(
            cta.gmem.auxiliary, self.loads.place(cta, member, block)
        )
        inputs = self.inputs(cta, fragments, cta.q.slot(n))
        kept = scores.kept(self.problem.spec, self.tile(cta, block), inputs)
        return p * score_tile.centred(self.problem, kept, dp, delta)

    # --- both ------------------------------------------------------------------------------------

    def store(self, gradient, staging, out):
        """Writes one gradient through shared memory that only its warpgroup has read."""
        self.matmuls.store(staging, gradient)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, out)
        plgpu.wait_smem_to_gmem(0)

    @property
    def score_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_q), jnp.float32)

    def result_accumulator(self, head_dim: int):
        return plgpu.ACC((WARPGROUP_ROWS, head_dim), jnp.float32)


def dkv(
    problem: Problem,
    blocks: DkvBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the kernel; returns (dk, dv) in the form of arrays.k and v.

    The result has the same bits in every run.
    """
    run = launch(
        DkvKernel(problem, blocks, interpret),
        out=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.k, arrays.v)),
        scratch=dkv_scratch(problem, blocks, arrays),
        # Heads slowest: 1.05 (1.09 causal) of keys slowest, both kernels together, head dim 256.
        grid=own_grid(
            problem,
            {
                "head": problem.kv_heads,
                "block": pl.cdiv(problem.kv_len, WARPGROUP_ROWS),
                "batch": problem.batch,
            },
        ),
        threads=2 + blocks.producer,
        name="flash_pallas_backward_dkv",
        interpret=interpret,
    )
    rows = DkvLoads(problem, blocks).rows
    if rows < blocks.block_q:
        arrays = arrays.with_rows_past(rows)
    return run(arrays.for_rows(problem, operands, 1, (rows, WARPGROUP_ROWS)))


@dataclasses.dataclass(frozen=True)
class DkvCta:
    """Refs, rings and place of one CTA of the dK/dV kernel."""

    gmem: BackwardArrays
    dk: Any  # [B, S8, K, D]
    dv: Any  # [B, S8, K, Dv]
    smem: DkvSmem
    bars: DkvBarriers
    q: Ring
    do: Ring
    p: Any  # Ring; None in backward/paired
    batch: Any
    kv_head: Any
    kv_start: Any
    q_tiles: QTileRange | QTileList | QTilePairs

    @property
    def keys(self):
        """Index of this CTA's keys in k, v, dk and dv."""
        return self.batch, pl.ds(self.kv_start, WARPGROUP_ROWS), self.kv_head


@dataclasses.dataclass(frozen=True)
class DkvLoads:
    """Loads of one CTA: K and V once, Q with lse and dO with delta through two rings."""

    problem: Problem
    blocks: DkvBlocks

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Auxiliary inputs, which modifiers read."""
        return AuxiliaryInputs(self.problem, q_axis=1)

    @property
    def rows(self) -> int:
        """Number of queries of a block, of which `DkvBlocks.joined` make a tile."""
        return self.blocks.block_q // self.blocks.joined(self.problem)

    def place(self, cta: DkvCta, member, block) -> Place:
        """Returns the place of the tile of a Q block of one head of the group."""
        head, columns = cta.kv_head * self.problem.group + member, self.blocks.block_q
        start = block * self.rows
        return Place(cta.batch, head, cta.kv_start, start, WARPGROUP_ROWS, columns)

    def __call__(self, cta: DkvCta):
        """Runs the producer warpgroup: gives registers away, then loads all tiles."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        self.load_all(cta)

    def load_all(self, cta: DkvCta):
        """Loads K, then Q and dO of every tile; V between the first two."""
        self.load_k(cta)

        @pl.loop(jnp.int32(0), cta.q_tiles.total)
        def _(n):
            self.load_q(cta, n)
            pl.when(n == 0)(lambda: self.load_v(cta))
            self.load_do(cta, n)

        self.drain(cta)

    def drain(self, cta: DkvCta):
        """Observes the releases that no later fill waited for."""
        cta.q.drain(cta.q_tiles.total)
        cta.do.drain(cta.q_tiles.total)

    def feed(self, cta: DkvCta) -> DkvCta:
        """Loads what the Q tiles start with, in warpgroup 1, where there is no producer.

        Returns the CTA with a ring of Q that this warpgroup fills again where it releases it; it is
        the last to do so.
        """
        tiles = cta.q_tiles.total
        for n in range(max(self.blocks.stages, self.blocks.do_stages)):
            if n < self.blocks.stages:
                pl.when(n < tiles)(lambda n=n: self.load_q(cta, jnp.int32(n)))
            if n == 0:
                self.load_v(cta)
            if n < self.blocks.do_stages:
                pl.when(n < tiles)(lambda n=n: self.load_do(cta, jnp.int32(n)))
        refill = lambda n: pl.when(n < tiles)(lambda: self.load_q(cta, n))
        return dataclasses.replace(cta, q=dataclasses.replace(cta.q, refill=refill))

    def refill_do(self, cta: DkvCta, n):
        """Loads dO in warpgroup 1 at the start of its n-th tile, where there is no producer.

        The slot is that of the tile before, which warpgroup 0 releases in its own n-th tile.
        """
        following = n + self.blocks.do_stages - 1
        wanted = (n > 0) & (following < cta.q_tiles.total)
        pl.when(wanted)(lambda: self.load_do(cta, following))

    def parts(self, cta: DkvCta, n):
        """Returns (place in a slot, head, rows, rows of lse) of the blocks of the n-th tile."""
        rows_at = lambda block: pl.ds(block * self.rows, self.rows)
        head_of = lambda member: cta.kv_head * self.problem.group + member
        if not isinstance(cta.q_tiles, QTilePairs):
            member, block = cta.q_tiles[n]
            return [((), head_of(member), rows_at(block), rows_at(block))]
        pair_tiles = enumerate(cta.q_tiles.both(n))
        place = lambda i: (pl.ds(i * self.rows, self.rows),)
        return [
            (place(i), head_of(member), rows_at(block), rows_at(lse_block))
            for i, (member, block, lse_block) in pair_tiles
        ]

    def load_q(self, cta: DkvCta, n):
        """Loads Q of the n-th tile, its lse and its streamed auxiliary inputs."""
        parts = self.parts(cta, n)
        cta.q.wait_empty(n)
        for part, head, rows, lse_rows in parts:
            q = rows_of(cta.gmem.q, (cta.batch, rows, head), cta.smem.q)
            self.load(cta.q, n, q, cta.smem.q, part)
            lse = cta.gmem.lse_log2.at[cta.batch, head, lse_rows]
            self.load(cta.q, n, lse, cta.smem.lse, part)
        if self.auxiliary.copies:
            member, block = cta.q_tiles[n]
            slot = cta.q.slot(n)
            place = self.place(cta, member, block)
            self.auxiliary.load(
                cta.gmem.auxiliary, cta.smem.auxiliary, slot, cta.q.full.at[slot], place
            )

    def load_do(self, cta: DkvCta, n):
        """Loads dO and delta of the n-th tile."""
        parts = self.parts(cta, n)
        cta.do.wait_empty(n)
        for part, head, rows, _ in parts:
            do = rows_of(cta.gmem.do, (cta.batch, rows, head), cta.smem.do)
            self.load(cta.do, n, do, cta.smem.do, part)
            delta = cta.gmem.delta.at[cta.batch, head, rows]
            self.load(cta.do, n, delta, cta.smem.delta, part)

    def load_k(self, cta: DkvCta):
        """Loads the CTA's K tile by TMA, which arrives at `k_full`."""
        k = rows_of(cta.gmem.k, cta.keys, cta.smem.k)
        plgpu.copy_gmem_to_smem(k, cta.smem.k, cta.bars.k_full)

    def load_v(self, cta: DkvCta):
        """Loads the CTA's V tile by TMA, which arrives at `v_full`."""
        v = rows_of(cta.gmem.v, cta.keys, cta.smem.v)
        plgpu.copy_gmem_to_smem(v, cta.smem.v, cta.bars.v_full)

    def load(self, ring: Ring, n, source, buffer, part=()):
        """Issues one of the copies of the n-th fill of a ring, into a part of its slot."""
        slot = ring.slot(n)
        plgpu.copy_gmem_to_smem(source, buffer.at[(slot, *part)], ring.full.at[slot])
