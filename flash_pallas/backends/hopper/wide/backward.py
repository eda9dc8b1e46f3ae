"""The backward for wide heads: dQ, dK and dV, a kernel each, deterministic.

With P = exp(S - L) and D = rowsum(dO o O),

    dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO        dS = P o (dO V^T - D)

dK and dV of 64 keys at head dim 512 would take all registers of an SM. So each has a kernel of its
own, and eight matmuls a tile run where five are counted.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.mask import Limits
from ....core.problem import Operands, Problem
from ...gpu import inline, score_tile
from ...gpu.launch import WARPGROUP_ROWS, launch
from ...gpu.score_tile import row_shift
from ..backward.operands import BackwardArrays, mask_everywhere
from .kernel import WideCta, WideKernel
from .launches import grid_of
from .tiles import COLUMNS, DV, Role, WARPGROUPS, WideBlocks, scratch


class Values(NamedTuple):
    """Values of queries, f32[64] of rows or of a warpgroup's columns."""

    lse: Any
    delta: Any


class GradientKernel(WideKernel):
    """The kernel of one gradient; see WideKernel."""

    def fold(self, cta: WideCta, *accumulators):
        place = self.place(cta, cta.head, 0, 0)
        fragments, values = self.auxiliary.fragments_of_rows(cta.gmem.auxiliary, place), None
        if not self.role.q_axis:
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
            values = self.values(cta, cta.head, cta.start, inline.ROWS)
        step = functools.partial(self.step, cta, fragments, values, accumulators)
        if self.role.q_axis:
            cta.tiles.visit(lambda _, n, *, masked: step(n, masked=masked))
        else:
            masks = not self.problem.spec.mask.is_trivial or cta.tiles.kv_len is not None
            cta.tiles.visit(step, masks=masks or mask_everywhere(self.problem))
        return None, [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accumulators]

    def values(self, cta: WideCta, head, start, layout) -> Values:
        """Loads the values of 64 queries."""
        at = cta.batch, head, pl.ds(start, WARPGROUP_ROWS)
        load = lambda ref: plgpu.load(ref.at[at], layout=layout, optimized=False)
        return Values(load(cta.gmem.lse_log2), load(cta.gmem.delta))

    def step(self, cta: WideCta, fragments, values, accumulators, n, *, masked: bool):
        """Adds the n-th tile of columns to the results."""
        run = functools.partial(self.weights, cta, fragments, values, n, masked)
        w = pl.run_scoped(run, *(self.accumulator,) * len(self.role.scores))
        self.multiply_weights(cta, n, (w, self.exchange(cta, n, w)), accumulators)

    def weights(self, cta: WideCta, fragments, values, n, masked: bool, s_acc, dp_acc=None):
        """Computes P^T or dS of a tile as an operand."""
        problem, accumulators = self.problem, (s_acc, *([] if dp_acc is None else [dp_acc]))
        head, block = self.column_tile(cta, n)
        if self.role.q_axis:
            place = self.place(cta, head, block, cta.wg)
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
            values = self.values(cta, head, place.column_start, inline.COLS)
        self.multiply_scores(cta, n, accumulators)
        s, *dp = [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accumulators]
        self.release_scores(cta, n)
        tile, limits, whole = self.tile(cta, block), Limits(), problem.is_listed and not masked
        if masked:
            limits = tile.limits(problem.spec.mask, cta.tiles.kv_len)
        inputs = self.inputs(cta, fragments, n, ids=not whole)
        if whole:
            problem, inputs = problem.of_whole_tiles, inputs._replace(mask=None)
        inputs = self.with_shift(cta, inputs, head, block)
        w = score_tile.weights(problem, tile, s, values.lse, inputs, limits)
        if self.role == DV:
            found = score_tile.dropped(problem, w)
        else:
            delta = tile.per_q(values.delta)
            found = score_tile.pulled(w) * score_tile.centred(problem, w.kept, dp[0], delta)
        self.release_auxiliary(cta, n)
        return self.matmuls.split(found)

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
        scratch=scratch(problem, role, blocks.chunks),
        grid=grid_of(problem, role),
        threads=WARPGROUPS,
        name=f"flash_pallas_backward_wide_{role.name}",
        interpret=interpret,
    )
    tile = (COLUMNS, WARPGROUP_ROWS) if role.q_axis else (WARPGROUP_ROWS, COLUMNS)
    return run(arrays.for_rows(problem, operands, role.q_axis, tile))[0]
