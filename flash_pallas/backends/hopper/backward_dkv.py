"""dK and dV without atomics: one half of the deterministic backward.

A CTA owns 64 keys of one key head and walks the query tiles of every head of its group. Scores are
held transposed, so that P^T and dS^T come out of the registers as left operands. The two compute
warpgroups do different things, so that each accumulator of 64 x head dim has one owner:

    warpgroup 0   S^T = K Q^T -> P^T (16 bit) -> dV += P^T dO        hands P^T over in shared memory
    warpgroup 1   dP^T = V dO^T -> dS^T = P^T (dP^T - delta) -> dK += dS^T Q
    warpgroup 2   the producer: K and V once, Q with lse and dO with delta through two rings

dV and dK of a tile stay in flight while S^T and dP^T of the next are issued, and the elementwise
work of one warpgroup runs under the products of the other; they meet only at the P^T ring. Issuing
the next S^T before dV instead makes a tile live for two steps, so that two stages prefetch nothing
(1.09 against 1.28 of cuDNN at head dim 256).
K is read by warpgroup 0 alone and V by warpgroup 1 alone: dV and dK are staged in them at the end.
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

from ...core import softmax
from ...core.problem import Problem
from ...core.tile import Limits, Tile
from . import inline
from .arrays import BackwardArrays
from .memory import WARPGROUP_ROWS, Ring, launch, row_buffer, tile_buffer
from .query_walk import QueryWalk
from .split_blocks import DkvBlocks

DV_WARPGROUP, DK_WARPGROUP, PRODUCER = 0, 1, 2


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    q: Any  # [stages, block_q, D]
    do: Any  # [do_stages, block_q, D]
    k: Any  # [64, D]
    v: Any  # [64, D]
    p: Any  # [p_stages, 64, block_q], P^T
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[do_stages, block_q]


class Barriers(NamedTuple):
    """mbarriers; the full ones of q and do count two copies, their empty ones two warpgroups."""

    k_full: Any
    v_full: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    p_full: Any
    p_empty: Any


@dataclasses.dataclass(frozen=True)
class Cta:
    """The refs and the place of one CTA."""

    gmem: BackwardArrays
    dk: Any  # [B, S8, K, D]
    dv: Any  # [B, S8, K, D]
    smem: Smem
    bars: Barriers
    q: Ring
    do: Ring
    p: Ring
    batch: Any
    kv_head: Any
    kv_start: Any
    walk: QueryWalk

    @property
    def keys(self):
        """Index of this CTA's keys in k, v, dk and dv."""
        return self.batch, pl.ds(self.kv_start, WARPGROUP_ROWS), self.kv_head


@dataclasses.dataclass(frozen=True)
class Dkv:
    """One launch; the methods are the phases of a CTA."""

    problem: Problem
    blocks: DkvBlocks
    interpret: bool

    def __call__(self, *refs):
        *arrays, dk, dv, smem, bars = refs
        gmem = BackwardArrays(*arrays)
        batch, kv_start = lax.axis_index("batch"), lax.axis_index("kv") * WARPGROUP_ROWS
        cta = Cta(
            gmem=gmem,
            dk=dk,
            dv=dv,
            smem=smem,
            bars=bars,
            q=Ring(bars.q_full, bars.q_empty, self.blocks.stages),
            do=Ring(bars.do_full, bars.do_empty, self.blocks.do_stages),
            p=Ring(bars.p_full, bars.p_empty, self.blocks.p_stages),
            batch=batch,
            kv_head=lax.axis_index("head"),
            kv_start=kv_start,
            walk=QueryWalk.of(
                self.problem, gmem.q_offset, batch, kv_start, WARPGROUP_ROWS, self.blocks.block_q
            ),
        )
        wg = lax.axis_index("wg")
        pl.when(wg == DV_WARPGROUP)(lambda: self.compute_dv(cta))
        pl.when(wg == DK_WARPGROUP)(lambda: self.compute_dk(cta))
        pl.when(wg == PRODUCER)(lambda: self.produce(cta))

    # --- the producer ----------------------------------------------------------------------------

    def produce(self, cta: Cta):
        """K, then for every tile Q and dO; V between the first two, where it is first needed."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        plgpu.copy_gmem_to_smem(cta.gmem.k.at[cta.keys], cta.smem.k, cta.bars.k_full)

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            member, block = cta.walk[n]
            head = cta.kv_head * self.problem.group + member
            rows = pl.ds(block * self.blocks.block_q, self.blocks.block_q)
            tile, row = (cta.batch, rows, head), (cta.batch, head, rows)
            cta.q.wait_empty(n)
            self.load(cta.q, n, cta.gmem.q.at[tile], cta.smem.q)
            self.load(cta.q, n, cta.gmem.lse_log2.at[row], cta.smem.lse)

            pl.when(n == 0)(lambda: self.load_v(cta))
            cta.do.wait_empty(n)
            self.load(cta.do, n, cta.gmem.do.at[tile], cta.smem.do)
            self.load(cta.do, n, cta.gmem.delta.at[row], cta.smem.delta)

        cta.q.drain(cta.walk.total)
        cta.do.drain(cta.walk.total)

    def load_v(self, cta: Cta):
        plgpu.copy_gmem_to_smem(cta.gmem.v.at[cta.keys], cta.smem.v, cta.bars.v_full)

    def load(self, ring: Ring, n, source, buffer):
        """One of the copies of the n-th fill of a ring."""
        slot = ring.slot(n)
        plgpu.copy_gmem_to_smem(source, buffer.at[slot], ring.full.at[slot])

    # --- warpgroup 0: S, P, dV -------------------------------------------------------------------

    def compute_dv(self, cta: Cta):
        plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        dv = pl.run_scoped(functools.partial(self.dv_walk, cta), self.result_accumulator)
        cta.p.drain(cta.walk.total)
        self.store(dv, cta.smem.k, cta.dv.at[cta.keys])

    def dv_walk(self, cta: Cta, dv_acc):
        """dV, f32[64, D]."""
        plgpu.barrier_wait(cta.bars.k_full)
        cta.walk.visit(functools.partial(self.dv_step, cta, dv_acc), mask_all=False)
        plgpu.wgmma_wait(0)
        cta.do.release(cta.walk.total - 1)
        return dv_acc[...]

    def dv_step(self, cta: Cta, dv_acc, n, block):
        """dV += P^T dO of the n-th tile; `block`: its index where it needs the mask, else None."""
        products = functools.partial(self.weights, cta, n, block)
        p = pl.run_scoped(products, self.score_accumulator)
        cta.p.wait_empty(n)
        cta.smem.p[cta.p.slot(n)] = p
        plgpu.barrier_arrive(cta.p.full.at[cta.p.slot(n)])
        cta.do.wait_full(n)
        plgpu.wgmma(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])  # ends during the next tile

    def weights(self, cta: Cta, n, block, s_acc):
        """P^T of the n-th tile in 16 bits; ends the previous dV on the way."""
        slot = cta.q.slot(n)
        cta.q.wait_full(n)
        plgpu.wgmma(s_acc, cta.smem.k, cta.smem.q.at[slot].transpose((1, 0)))
        lse = plgpu.load(cta.smem.lse.at[slot], layout=inline.COLS)
        plgpu.wgmma_wait(1)
        pl.when(n > 0)(lambda: cta.do.release(n - 1))
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
        cta.q.release(n)
        if block is not None:
            s = inline.hide(s, self.limits(cta, block), self.interpret)
        log2_scale = self.problem.spec.scale * softmax.LOG2E
        p = jnp.exp2(s * log2_scale - lax.broadcast_in_dim(lse, s.shape, (1,)))
        return p.astype(self.problem.dtype)

    def limits(self, cta: Cta, block) -> Limits:
        """What the queries of a block see of this CTA's keys."""
        tile = Tile(
            q_start=block * self.blocks.block_q + cta.walk.q_offset,
            kv_start=cta.kv_start,
            shape=(WARPGROUP_ROWS, self.blocks.block_q),
            q_axis=1,
        )
        ragged = self.problem.kv_len % WARPGROUP_ROWS != 0
        return tile.limits(self.problem.spec.mask, self.problem.kv_len if ragged else None)

    # --- warpgroup 1: dP, dS, dK -----------------------------------------------------------------

    def compute_dk(self, cta: Cta):
        plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        dk = pl.run_scoped(functools.partial(self.dk_walk, cta), self.result_accumulator)
        self.store(dk * self.problem.spec.scale, cta.smem.v, cta.dk.at[cta.keys])

    def dk_walk(self, cta: Cta, dk_acc):
        """dK before scaling, f32[64, D]. Hidden scores have P = 0, so there is no mask here."""
        plgpu.barrier_wait(cta.bars.v_full)
        pl.loop(jnp.int32(0), cta.walk.total)(functools.partial(self.dk_step, cta, dk_acc))
        plgpu.wgmma_wait(0)
        cta.q.release(cta.walk.total - 1)
        return dk_acc[...]

    def dk_step(self, cta: Cta, dk_acc, n):
        """dK += dS^T Q of the n-th tile."""
        products = functools.partial(self.score_gradients, cta, n)
        ds = pl.run_scoped(products, self.score_accumulator)
        cta.q.wait_full(n)
        plgpu.wgmma(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])  # ends during the next tile

    def score_gradients(self, cta: Cta, n, dp_acc):
        """dS^T of the n-th tile in 16 bits; ends the previous dK on the way."""
        slot = cta.do.slot(n)
        cta.do.wait_full(n)
        plgpu.wgmma(dp_acc, cta.smem.v, cta.smem.do.at[slot].transpose((1, 0)))
        delta = plgpu.load(cta.smem.delta.at[slot], layout=inline.COLS)
        plgpu.wgmma_wait(1)
        pl.when(n > 0)(lambda: cta.q.release(n - 1))
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        cta.do.release(n)
        centred = dp - lax.broadcast_in_dim(delta, dp.shape, (1,))
        cta.p.wait_full(n)
        p = plgpu.load(cta.smem.p.at[cta.p.slot(n)], layout=inline.WGMMA).astype(jnp.float32)
        cta.p.release(n)
        return (p * centred).astype(self.problem.dtype)

    # --- both ------------------------------------------------------------------------------------

    def store(self, result, staging, out):
        """Write one gradient through shared memory that its warpgroup alone has read."""
        staging[...] = result.astype(self.problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, out)
        plgpu.wait_smem_to_gmem(0)

    @property
    def score_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_q), jnp.float32)

    @property
    def result_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)


def dkv(problem: Problem, blocks: DkvBlocks, arrays: BackwardArrays, interpret: bool):
    """Launch; returns (dk, dv) in the dtype and padded shape of k, the same bits in every run."""
    head_dim, dtype, block_q = problem.head_dim, problem.dtype, blocks.block_q
    bar = plgpu.Barrier
    smem = Smem(
        q=tile_buffer((blocks.stages, block_q, head_dim), dtype),
        do=tile_buffer((blocks.do_stages, block_q, head_dim), dtype),
        k=tile_buffer((WARPGROUP_ROWS, head_dim), dtype),
        v=tile_buffer((WARPGROUP_ROWS, head_dim), dtype),
        p=tile_buffer((blocks.p_stages, WARPGROUP_ROWS, block_q), dtype),
        lse=row_buffer((blocks.stages, block_q)),
        delta=row_buffer((blocks.do_stages, block_q)),
    )
    bars = Barriers(
        k_full=bar(),
        v_full=bar(),
        q_full=bar(num_arrivals=2, num_barriers=blocks.stages),
        q_empty=bar(num_arrivals=2, num_barriers=blocks.stages),
        do_full=bar(num_arrivals=2, num_barriers=blocks.do_stages),
        do_empty=bar(num_arrivals=2, num_barriers=blocks.do_stages),
        p_full=bar(num_barriers=blocks.p_stages),
        p_empty=bar(num_barriers=blocks.p_stages),
    )
    run = launch(
        Dkv(problem, blocks, interpret),
        out=(
            jax.ShapeDtypeStruct(arrays.k.shape, dtype),
            jax.ShapeDtypeStruct(arrays.v.shape, dtype),
        ),
        scratch=(smem, bars),
        # Heads fastest: 1.05 (1.09 causal) of keys fastest, both kernels together, head dim 256.
        grid=(problem.kv_heads, pl.cdiv(problem.kv_len, WARPGROUP_ROWS), problem.batch),
        grid_names=("head", "kv", "batch"),
        threads=3,
        name="flash_pallas_backward_dkv",
        interpret=interpret,
    )
    return run(*arrays)
