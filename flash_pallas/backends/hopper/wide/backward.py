"""The backward for wide heads: dQ, dK and dV, a kernel each, deterministic.

With P = exp(S - L) and D = rowsum(dO o O),

    dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO        dS = P o (dO V^T - D)

dK and dV of 64 keys at head dim 512 would take all registers of an SM. So each has a kernel of its
own, and eight matmuls a tile run where five are counted.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.problem import Operands, Problem
from ...gpu import inline, score_tile
from ...gpu.launch import WARPGROUP_ROWS, launch
from ...gpu.score_tile import row_shift
from ..backward.operands import BackwardArrays
from .column_tiles import grid_of
from .kernel import WideCta, WideKernel
from .tiles import COLUMNS, DV, WARPGROUPS, Role, WideBlocks, scratch


class GradientKernel(WideKernel):
    """The kernel of one gradient; see WideKernel."""

    def fold(self, cta: WideCta, accumulators):
        place = self.place(cta, cta.head, 0, 0)
        fragments, values = self.auxiliary.fragments_of_rows(cta.gmem.auxiliary, place), None
        if not self.role.q_axis:
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
            values = [
                self.of_queries(cta, ref, cta.head, cta.start)
                for ref in (cta.gmem.lse_log2, cta.gmem.delta)
            ]
        step = functools.partial(self.step, cta, fragments, values, accumulators)
        pl.loop(jnp.int32(0), cta.tiles.total)(step)

    def of_queries(self, cta: WideCta, ref, head, start):
        """Loads one value of each of 64 queries, of rows or of columns."""
        layout, at = (
            (inline.ROWS, inline.COLS)[self.role.q_axis],
            (cta.batch, head, pl.ds(start, WARPGROUP_ROWS)),
        )
        return plgpu.load(ref.at[at], layout=layout, optimized=False)

    def step(self, cta: WideCta, fragments, values, accumulators, n):
        """Makes the weights of the n-th tile of columns, and sums those of the one before."""
        cta = self.at_step(cta, n)
        run = functools.partial(self.weights, cta, fragments, values, accumulators, n)
        pl.run_scoped(run, self.accumulator)

    def weights(self, cta: WideCta, fragments, values, accumulators, n, s_acc):
        """Makes and stores P^T or dS of a tile."""
        problem, (head, block) = self.problem, self.column_tile(cta, n)
        place = self.place(cta, head, block, cta.wg)
        of_columns = lambda ref: self.of_queries(cta, ref, head, place.column_start)
        if self.role.q_axis:
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
        reload = self.multiply_scores(cta, n, 0, s_acc)
        sums = self.sums(cta, n, accumulators)
        next(sums)
        lse = of_columns(cta.gmem.lse_log2) if self.role.q_axis else values[0]
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        reload()
        next(sums, None)
        tile, inputs = self.tile(cta, block), self.inputs(cta, fragments, n)
        inputs = self.with_shift(cta, inputs, head, block)
        next(sums, None)
        w = score_tile.weights(problem, tile, s, lse, inputs, self.limits(cta, tile))
        next(sums, None)
        if self.role == DV:
            found, kept = score_tile.dropped(problem, w), None
        else:
            found, kept = score_tile.pulled(w), w.kept
        self.reload_auxiliary(cta, n)
        found = lax.optimization_barrier(found)
        if self.role == DV:
            next(sums, None)
            self.replace_weights(cta, self.matmuls.split(found))  # those before are loaded
        for _ in sums:
            pass
        if self.role == DV:
            return
        delta = functools.partial(of_columns, cta.gmem.delta)
        given = tile, kept, delta if self.role.q_axis else lambda: values[1]
        run = functools.partial(self.score_gradients, cta, n, given)
        found = found * pl.run_scoped(run, self.accumulator)
        self.replace_weights(cta, self.matmuls.split(found))

    def score_gradients(self, cta: WideCta, n, given, dp_acc):
        """Computes what P is to be multiplied by, keep * gain * dP - delta, f32[64, 64]."""
        (tile, kept, delta), reload = given, self.multiply_scores(cta, n, 1, dp_acc)
        delta = tile.per_q(delta())  # under the wait
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        reload()
        return score_tile.centred(self.problem, kept, dp, delta)

    def with_shift(self, cta: WideCta, inputs, head, block):
        """Returns the inputs with the shift of the queries, where some may have one."""
        auxiliary = cta.gmem.auxiliary
        if auxiliary.far is None:
            return inputs
        query = block * COLUMNS + cta.wg * WARPGROUP_ROWS
        if not self.role.q_axis:
            head, query = cta.head, cta.start
        far = self.auxiliary.far(auxiliary, cta.batch, head)
        return inputs._replace(shift=row_shift(self.problem, auxiliary, far, head, query, some=far))

    def store(self, cta: WideCta, state, found):
        del state
        if self.role == DV:
            found = [score_tile.gained(self.problem, x) for x in found]
        else:
            found = [x * self.problem.spec.scale for x in found]
        self.store_chunks(cta, cta.out[0], found)


def gradient(
    problem: Problem,
    role: Role,
    blocks: WideBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the kernel of one gradient, and returns that in the form of its operand.

    Args:
        problem: a problem with the head dims of `wide_problem`.
        role: DQ, DK or DV.
        blocks: options.
        operands: operands of the call.
        arrays: operands as the kernel reads them.
        interpret: run by the interpreter.
    """
    like = {"dq": arrays.q, "dk": arrays.k, "dv": arrays.v}[role.name]
    run = launch(
        GradientKernel(problem, blocks, role, interpret),
        out=(jax.ShapeDtypeStruct(like.shape, like.dtype),),
        scratch=scratch(problem, role, blocks),
        grid=grid_of(problem, role),
        threads=WARPGROUPS,
        name=f"flash_pallas_backward_wide_{role.name}",
        interpret=interpret,
    )
    tile = (COLUMNS, WARPGROUP_ROWS) if role.q_axis else (WARPGROUP_ROWS, COLUMNS)
    return run(arrays.for_rows(problem, operands, role.q_axis, tile))[0]
