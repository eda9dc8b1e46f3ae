"""dQ without atomics: the other half of the deterministic backward.

A CTA owns 64 queries per compute warpgroup of one head and folds the key blocks they see into dQ,
which stays in registers; the producer warpgroup streams K and V. Per block:

    S = Q K^T, dP = dO V^T       shared x shared
    dS = P (dP - delta)          registers, in 16 bits the left operand of
    dQ += dS K                   in flight while S of the next block is issued

The previous dQ is awaited before dP is issued, not after: the registers of dS die before dP needs
its own (after: 0.74 of the speed at head dim 256). Masked blocks, of which the last may reach past
the last key, come last, in a loop of their own. Each warpgroup alone reads its rows of Q, and
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

from ...core import integers as ints
from ...core import softmax
from ...core.problem import Problem
from ...core.tile import Limits, Tile
from . import inline
from .arrays import BackwardArrays
from .memory import WARPGROUP_ROWS, Ring, launch, row_buffer, tile_buffer, warpgroup_rows
from .split_blocks import DqBlocks


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    q: Any  # [block_q, D]
    do: Any  # [block_q, D]
    k: Any  # [k_stages, block_kv, D]
    v: Any  # [v_stages, block_kv, D]
    lse: Any  # f32[block_q]
    delta: Any  # f32[block_q]


class Barriers(NamedTuple):
    """mbarriers; queries counts four copies, the empty ones each warpgroup."""

    queries: Any  # Q, dO, lse, delta
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Rows(NamedTuple):
    """What a warpgroup knows of its 64 queries."""

    lse: Any  # f32[64], base 2
    delta: Any  # f32[64]


@dataclasses.dataclass(frozen=True)
class Cta:
    """The refs and the place of one CTA, as one of its warpgroups sees them."""

    gmem: BackwardArrays
    dq: Any  # [B, T8, N, D]
    smem: Smem
    bars: Barriers
    k: Ring
    v: Ring
    batch: Any
    head: Any
    q_start: Any  # index of the first query
    position: Any  # its position: q_start + q_offset
    wg: Any


@dataclasses.dataclass(frozen=True)
class Dq:
    """One launch; the methods are the phases of a CTA."""

    problem: Problem
    blocks: DqBlocks
    interpret: bool

    def __call__(self, *refs):
        *arrays, dq, smem, bars = refs
        gmem = BackwardArrays(*arrays)
        batch, block, spec = lax.axis_index("batch"), lax.axis_index("q"), self.problem.spec
        if spec.mask.right is not None:  # the longest rows first
            block = pl.cdiv(self.problem.q_len, self.blocks.block_q) - 1 - block
        q_start = block * self.blocks.block_q
        offset = gmem.q_offset[batch] if self.problem.traced_offset else spec.q_offset
        cta = Cta(
            gmem=gmem,
            dq=dq,
            smem=smem,
            bars=bars,
            k=Ring(bars.k_full, bars.k_empty, self.blocks.k_stages),
            v=Ring(bars.v_full, bars.v_empty, self.blocks.v_stages),
            batch=batch,
            head=lax.axis_index("head"),
            q_start=q_start,
            position=q_start + offset,
            wg=lax.axis_index("wg"),
        )
        pl.when(cta.wg < self.blocks.warpgroups)(lambda: self.consume(cta))
        pl.when(cta.wg == self.blocks.warpgroups)(lambda: self.produce(cta))

    def kv_blocks(self, cta: Cta):
        """(unmasked, all): how many leading key blocks; all is at least one.

        The same for every warpgroup of the CTA, which releases the blocks together.
        """
        mask, rows = self.problem.spec.mask, self.blocks.block_q
        found = mask.kv_blocks(cta.position, rows, self.problem.kv_len, self.blocks.block_kv)
        return jnp.int32(found.full_stop), jnp.int32(ints.maximum(found.stop, 1))

    # --- the producer ----------------------------------------------------------------------------

    def produce(self, cta: Cta):
        """Q, dO, lse and delta once, then every block of K and V."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        queries = pl.ds(cta.q_start, self.blocks.block_q)
        tile, row = (cta.batch, queries, cta.head), (cta.batch, cta.head, queries)
        arrived = cta.bars.queries
        plgpu.copy_gmem_to_smem(cta.gmem.q.at[tile], cta.smem.q, arrived)
        plgpu.copy_gmem_to_smem(cta.gmem.do.at[tile], cta.smem.do, arrived)
        plgpu.copy_gmem_to_smem(cta.gmem.lse_log2.at[row], cta.smem.lse, arrived)
        plgpu.copy_gmem_to_smem(cta.gmem.delta.at[row], cta.smem.delta, arrived)
        _, stop = self.kv_blocks(cta)
        kv_head = lax.div(cta.head, jnp.int32(self.problem.group))

        @pl.loop(jnp.int32(0), stop)
        def _(n):
            keys = (cta.batch, pl.ds(n * self.blocks.block_kv, self.blocks.block_kv), kv_head)
            self.load(cta.k, n, cta.gmem.k.at[keys], cta.smem.k)
            self.load(cta.v, n, cta.gmem.v.at[keys], cta.smem.v)

        cta.k.drain(stop)
        cta.v.drain(stop)

    def load(self, ring: Ring, n, source, buffer):
        """The n-th fill of a ring."""
        slot = ring.slot(n)
        ring.wait_empty(n)
        plgpu.copy_gmem_to_smem(source, buffer.at[slot], ring.full.at[slot])

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: Cta):
        """Fold the key blocks into this warpgroup's rows and write them."""
        plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        dq = pl.run_scoped(functools.partial(self.walk, cta), accumulator)
        staging = cta.smem.q.at[warpgroup_rows(cta.wg)]
        staging[...] = (dq * self.problem.spec.scale).astype(self.problem.dtype)
        plgpu.commit_smem()
        rows = pl.ds(cta.q_start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_smem_to_gmem(staging, cta.dq.at[cta.batch, rows, cta.head])
        plgpu.wait_smem_to_gmem(0)

    def walk(self, cta: Cta, dq_acc):
        """dQ before scaling, f32[64, D]."""
        plgpu.barrier_wait(cta.bars.queries)
        own = warpgroup_rows(cta.wg)
        rows = Rows(
            lse=plgpu.load(cta.smem.lse.at[own], layout=inline.ROWS),
            delta=plgpu.load(cta.smem.delta.at[own], layout=inline.ROWS),
        )
        unmasked, stop = self.kv_blocks(cta)
        step = functools.partial(self.step, cta, rows, dq_acc)
        pl.loop(jnp.int32(0), unmasked)(functools.partial(step, masked=False))
        if not self.problem.spec.mask.is_trivial or self.ragged:
            # With known bounds a single masked block is peeled off, and its registers beside those
            # of the loop make ptxas serialise every wgmma (C7512, head dim 128).
            end = lax.optimization_barrier(stop)
            pl.loop(unmasked, end)(functools.partial(step, masked=True))
        plgpu.wgmma_wait(0)
        cta.k.release(stop - 1)
        return dq_acc[...]

    def step(self, cta: Cta, rows: Rows, dq_acc, n, *, masked):
        """dQ += dS K of the n-th key block."""
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_kv), jnp.float32)
        products = functools.partial(self.score_gradients, cta, rows, n, masked)
        ds = pl.run_scoped(products, accumulator, accumulator)
        plgpu.wgmma(dq_acc, ds, cta.smem.k.at[cta.k.slot(n)])  # ends during the next block

    def score_gradients(self, cta: Cta, rows: Rows, n, masked, s_acc, dp_acc):
        """dS of the n-th key block in 16 bits; ends the previous dQ on the way."""
        k, v = cta.smem.k.at[cta.k.slot(n)], cta.smem.v.at[cta.v.slot(n)]
        # An index that cannot be hoisted. Otherwise the descriptors of Q and dO, one per wgmma,
        # live through the loop: 144 bytes of spills at head dim 256, 344 if causal, against none.
        own = warpgroup_rows(lax.optimization_barrier(cta.wg))
        cta.k.wait_full(n)
        plgpu.wgmma(s_acc, cta.smem.q.at[own], k.transpose((1, 0)))
        plgpu.wgmma_wait(1)
        pl.when(n > 0)(lambda: cta.k.release(n - 1))
        cta.v.wait_full(n)
        plgpu.wgmma(dp_acc, cta.smem.do.at[own], v.transpose((1, 0)))
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        if masked:
            s = inline.hide(s, self.limits(cta, n), self.interpret)
        per_row = lambda x: lax.broadcast_in_dim(x, s.shape, (0,))
        p = jnp.exp2(s * (self.problem.spec.scale * softmax.LOG2E) - per_row(rows.lse))
        p = lax.optimization_barrier(p)  # above the wait for dP
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        cta.v.release(n)
        return (p * (dp - per_row(rows.delta))).astype(self.problem.dtype)

    @property
    def ragged(self) -> bool:
        """The last key block reaches past the last key: there K is 0, and P would not be."""
        return self.problem.kv_len % self.blocks.block_kv != 0

    def limits(self, cta: Cta, n) -> Limits:
        """What this warpgroup's queries see of the n-th key block."""
        tile = Tile(
            q_start=cta.position + cta.wg * WARPGROUP_ROWS,
            kv_start=n * self.blocks.block_kv,
            shape=(WARPGROUP_ROWS, self.blocks.block_kv),
        )
        return tile.limits(self.problem.spec.mask, self.problem.kv_len if self.ragged else None)


def dq(problem: Problem, blocks: DqBlocks, arrays: BackwardArrays, interpret: bool):
    """Launch; returns dq in the dtype and padded shape of q, the same bits in every run."""
    head_dim, dtype, block_q = problem.head_dim, problem.dtype, blocks.block_q
    bar, warpgroups = plgpu.Barrier, blocks.warpgroups
    smem = Smem(
        q=tile_buffer((block_q, head_dim), dtype),
        do=tile_buffer((block_q, head_dim), dtype),
        k=tile_buffer((blocks.k_stages, blocks.block_kv, head_dim), dtype),
        v=tile_buffer((blocks.v_stages, blocks.block_kv, head_dim), dtype),
        lse=row_buffer((block_q,)),
        delta=row_buffer((block_q,)),
    )
    bars = Barriers(
        queries=bar(num_arrivals=4),
        k_full=bar(num_barriers=blocks.k_stages),
        k_empty=bar(num_arrivals=warpgroups, num_barriers=blocks.k_stages),
        v_full=bar(num_barriers=blocks.v_stages),
        v_empty=bar(num_arrivals=warpgroups, num_barriers=blocks.v_stages),
    )
    run = launch(
        Dq(problem, blocks, interpret),
        out=jax.ShapeDtypeStruct(arrays.q.shape, dtype),
        scratch=(smem, bars),
        # Queries fastest: 1.03 to 1.05 of heads fastest (head dim 256).
        grid=(pl.cdiv(problem.q_len, block_q), problem.q_heads, problem.batch),
        grid_names=("q", "head", "batch"),
        threads=warpgroups + 1,
        name="flash_pallas_backward_dq",
        interpret=interpret,
    )
    return run(*arrays)
