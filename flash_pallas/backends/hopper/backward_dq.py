"""dQ without atomics: the other half of the deterministic backward.

A CTA owns 64 queries of one head per compute warpgroup and loops over the key blocks that they see.
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

from ...core.problem import Operands, Problem
from ...core.tile import Limits
from ..mosaic import inline, recompute
from ..mosaic.launch import WARPGROUP_ROWS, launch
from ..mosaic.recompute import RowShift
from ..mosaic.register_tile import RegisterTile
from .arrays import BackwardArrays
from .dq_layout import Barriers, Smem, scratch
from .dq_loads import Cta, Loads
from .key_walk import KeyWalk, mask_everywhere
from .memory import Ring, rows_of, warpgroup_rows
from .products import Products
from .side_inputs import Held, SideInputs
from .split_blocks import DqBlocks


class Rows(NamedTuple):
    """Row vectors and held side inputs of a warpgroup's 64 queries."""

    lse: Any  # f32[64], base 2
    delta: Any  # f32[64]
    held: Held


@dataclasses.dataclass(frozen=True)
class Dq:
    """One launch of the dQ kernel; the methods are the phases of a CTA."""

    problem: Problem
    blocks: DqBlocks
    interpret: bool

    @property
    def products(self) -> Products:
        """Matrix products of operands of the call's dtype."""
        return Products(self.problem.dtype, self.interpret)

    @property
    def loads(self) -> Loads:
        """Copies from device memory into shared memory."""
        return Loads(self.problem, self.blocks)

    @property
    def side(self) -> SideInputs:
        """Side inputs, which modifiers read."""
        return self.loads.side

    def __call__(self, gmem: BackwardArrays, dq, smem: Smem, bars: Barriers):
        batch, block, spec = lax.axis_index("batch"), lax.axis_index("q"), self.problem.spec
        if spec.mask.right is not None:  # the longest rows first
            block = pl.cdiv(self.problem.q_len, self.blocks.block_q) - 1 - block
        q_start = block * self.blocks.block_q
        position = q_start + gmem.offset(self.problem, batch)
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
            position=position,
            block=block,
            wg=lax.axis_index("wg"),
        )
        pl.when(cta.wg < self.blocks.warpgroups)(lambda: self.consume(cta))
        if self.blocks.producer:
            pl.when(cta.wg == self.blocks.warpgroups)(lambda: self.loads(cta))

    # --- a compute warpgroup ---------------------------------------------------------------------

    def consume(self, cta: Cta):
        """Computes dQ of this warpgroup's rows over the key blocks, scales it and writes it."""
        if self.blocks.producer:
            plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        else:
            cta = self.loads.feed(cta)
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.problem.head_dim), jnp.float32)
        dq = pl.run_scoped(functools.partial(self.fold, cta), accumulator)
        staging = cta.smem.q.at[warpgroup_rows(cta.wg)]
        self.products.store(staging, dq * self.problem.spec.scale)
        plgpu.commit_smem()
        rows = pl.ds(cta.q_start + cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        out = rows_of(cta.dq, (cta.batch, rows, cta.head), cta.smem.q)
        plgpu.copy_smem_to_gmem(staging, out)
        plgpu.wait_smem_to_gmem(0)

    def fold(self, cta: Cta, dq_acc):
        """Sums dQ over the key blocks; returns it before scaling, f32[64, D]."""
        plgpu.barrier_wait(cta.bars.queries)
        own = warpgroup_rows(cta.wg)
        rows = Rows(
            lse=plgpu.load(cta.smem.lse.at[own], layout=inline.ROWS),
            delta=plgpu.load(cta.smem.delta.at[own], layout=inline.ROWS),
            held=self.side.hold(cta.gmem.side, cta.place(0, 0, own=True, rows=WARPGROUP_ROWS)),
        )
        walk = self.loads.walk(cta)
        step = functools.partial(self.step, cta, walk, rows, dq_acc)
        far = self.side.far(cta.gmem.side, cta.batch, cta.head)
        far_step = functools.partial(step, far=far)
        walk.visit(step, masks=self.masks(walk), far=far, far_step=far_step)
        plgpu.wgmma_wait(0)
        cta.k.release(walk.total - 1)
        if not self.blocks.producer:
            pl.when(self.loads.is_loader(cta))(lambda: self.loads.drain(cta))
        return dq_acc[...]

    def masks(self, walk: KeyWalk) -> bool:
        """Says whether some tile may need its mask."""
        band = not self.problem.spec.mask.is_trivial
        return band or walk.kv_len is not None or mask_everywhere(self.problem)

    def step(self, cta: Cta, walk: KeyWalk, rows: Rows, dq_acc, n, *, masked, far=None):
        """Computes dS of the n-th key block and issues dQ += dS K.

        `far` is given where queries may be shifted.
        """
        limits = Limits()
        tile = self.tile(cta, walk[n])
        if masked:
            limits = tile.limits(self.problem.spec.mask, walk.kv_len)
        products = functools.partial(self.score_gradients, cta, rows, n, (tile, limits, far))
        # Before the accumulators exist: see Scores.tile in backward_scores.py.
        cta.k.wait_full(n)
        ds = pl.run_scoped(products, self.score_accumulator)
        # Ends during the next block.
        self.products.multiply(dq_acc, ds, cta.smem.k.at[cta.k.slot(n)])

    def score_gradients(self, cta: Cta, rows: Rows, n, where, s_acc):
        """Computes dS of the n-th key block as an operand; awaits the previous dQ on the way."""
        k = cta.smem.k.at[cta.k.slot(n)]
        # An index that cannot be hoisted. Otherwise the descriptors of Q and dO, one per wgmma,
        # live through the loop: 144 bytes of spills at head dim 256, 344 if causal, against none.
        own = warpgroup_rows(lax.optimization_barrier(cta.wg))
        self.products.multiply(s_acc, cta.smem.q.at[own], k, transposed=True)
        plgpu.wgmma_wait(self.products.count)
        pl.when(n > 0)(lambda: cta.k.release(n - 1))
        cta.v.wait_full(n)
        product = functools.partial(self.with_dp, cta, rows, n, where, s_acc)
        return pl.run_scoped(product, self.score_accumulator)

    def with_dp(self, cta: Cta, rows: Rows, n, where, s_acc, dp_acc):
        """Computes dP and dS of the n-th key block, dS as an operand, once S is issued."""
        v, own = cta.smem.v.at[cta.v.slot(n)], warpgroup_rows(lax.optimization_barrier(cta.wg))
        self.products.multiply(dp_acc, cta.smem.do.at[own], v, transposed=True)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=self.products.count)
        per_row = lambda x: lax.broadcast_in_dim(x, s.shape, (0,))
        tile, limits, far = where
        inputs = self.side.inputs(rows.held, cta.smem.side, cta.k.slot(n), s.shape, own)
        if far is not None:
            query = cta.q_start + cta.wg * WARPGROUP_ROWS
            shift = RowShift.of(self.problem, cta.gmem.side, far, cta.head, query)
            inputs = inputs._replace(shift=shift)
        w = recompute.weights(self.problem, tile, s, rows.lse, inputs, limits)
        p = lax.optimization_barrier(recompute.pulled(w))  # above the wait for dP
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        cta.v.release(n)
        c = recompute.centred(self.problem, w.kept, dp, per_row(rows.delta))
        return self.products.split(p * c)

    @property
    def score_accumulator(self):
        return plgpu.ACC((WARPGROUP_ROWS, self.blocks.block_kv), jnp.float32)

    def tile(self, cta: Cta, block) -> RegisterTile:
        """Describes this warpgroup's tile of a key block: where it lies, and its shape."""
        return RegisterTile(
            q_start=cta.position + cta.wg * WARPGROUP_ROWS,
            kv_start=block * self.blocks.block_kv,
            shape=(WARPGROUP_ROWS, self.blocks.block_kv),
            interpret=self.interpret,
            precise=self.problem.dtype == jnp.float32,
        )


def dq(problem: Problem, blocks: DqBlocks, operands: Operands, arrays: BackwardArrays, interpret):
    """Launches the kernel; returns dq in the form of arrays.q, with the same bits in every run."""
    block_q, block_kv = blocks.block_q, blocks.block_kv
    run = launch(
        Dq(problem, blocks, interpret),
        out=jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
        scratch=scratch(problem, blocks, arrays),
        # Queries slowest: 1.03 to 1.05 of heads slowest (head dim 256).
        grid={
            "q": pl.cdiv(problem.q_len, block_q),
            "head": problem.q_heads,
            "batch": problem.batch,
        },
        threads=blocks.warpgroups + blocks.producer,
        name="flash_pallas_backward_dq",
        interpret=interpret,
    )
    return run(arrays.for_rows(problem, operands, 0, (block_q, block_kv)))
