"""The forward for wide heads: the online softmax over columns that two warpgroups share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import dropout, scores, softmax
from ....core.problem import Operands, Outputs, Problem
from ...gpu import score_tile
from ...gpu.launch import WARPGROUP_ROWS, float32, launch
from ...gpu.ptx import inline, online_softmax
from ...gpu.ptx.online_softmax import Maxima, far_of
from ..backward.operands import BackwardArrays
from ..forward.softmax import per_row
from .column_tiles import grid_of, loops
from .kernel import WideCta, WideKernel
from .tiles import COLUMNS, FORWARD, WARPGROUPS, WideBlocks, scratch


class Rows(NamedTuple):
    """State of the rows of a CTA. The warpgroups have the same maxima, and sums of their own."""

    maxima: Maxima
    l: Any  # f32[64, 8], sums of each thread's own columns


class ForwardKernel(WideKernel):
    """The forward; see WideKernel."""

    @property
    def far(self) -> float:
        """Magnitude of logits (base 2) beyond which rows need a shift; 0: none can be so large."""
        return far_of(self.problem.spec, self.problem.dtype)

    def fold(self, cta: WideCta, accumulators):
        rows = jnp.zeros((WARPGROUP_ROWS,), jnp.float32)
        rows = plgpu.layout_cast(rows, inline.ROWS)
        shift = rows if self.far else None
        sums = jnp.zeros((WARPGROUP_ROWS, inline.LANE_COLS), jnp.float32)
        state = Rows(Maxima(rows - jnp.inf, shift), plgpu.layout_cast(sums, inline.WGMMA))
        place = self.place(cta, cta.head, 0, 0)
        fragments = self.auxiliary.fragments(cta.gmem.auxiliary, place)
        for start, stop, masked in loops(self.problem, cta.tiles):
            step = functools.partial(self.step, cta, (fragments, masked), accumulators)
            state = lax.fori_loop(start, stop, step, state)
        return state

    def step(self, cta: WideCta, held, accumulators, n, rows: Rows) -> Rows:
        """Folds the n-th tile of keys into the rows, and sums the weights of the one before.

        Args:
            cta: the CTA.
            held: (inputs of modifiers that do not stream, whether positions hide scores).
            accumulators: the sums.
            n: number of the step.
            rows: state of the rows.
        """
        cta = self.at_step(cta, n)
        run = functools.partial(self.weights, cta, held, accumulators, n, rows)
        (alpha, grew), rows = pl.run_scoped(run, self.accumulator)
        for acc in accumulators:
            old = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            scaled = lambda old=old: old * per_row(alpha, old.shape)
            acc[...] = scaled() if grew is None else lax.cond(grew > 0, scaled, lambda old=old: old)
        return rows

    def weights(self, cta: WideCta, held, accumulators, n, rows: Rows, s_acc):
        """Makes and stores the weights; returns ((factor of the sums, if it is not 1), Rows)."""
        fragments, masked = held
        problem, reload = self.problem, self.multiply_scores(cta, n, 0, s_acc)
        sums = self.sums(cta, n, accumulators)
        next(sums)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        reload()
        next(sums, None)
        tile, spec = self.tile(cta, cta.tiles[n]), problem.spec
        inputs, limits = self.inputs(cta, fragments, n), self.limits(cta, tile, masked)
        z = score_tile.logits(spec, tile, s, inputs, limits)
        next(sums, None)
        slack = None if spec.max_logit else self.blocks.lazy_rescale or None
        top = self.most(cta, n, z.x.max(axis=1))
        next(sums, None)
        compared = online_softmax.compared(
            rows.maxima, z.x, z.log2_scale, self.far, slack, self.interpret, top=top
        )
        next(sums, None)
        m = jnp.where(compared.m == -jnp.inf, jnp.zeros_like(compared.m), compared.m)
        p = jnp.exp2(compared.x * z.log2_scale - per_row(m, s.shape))
        alpha = jnp.exp2(compared.before - m)
        next(sums, None)
        lane_sums = inline.lane_sums(p, self.interpret)
        if spec.dropout_rate:
            p = jnp.where(scores.kept(spec, tile, inputs), p, 0.0)
        self.reload_auxiliary(cta, n)
        rows = Rows(compared.maxima, rows.l * per_row(alpha, lane_sums.shape) + lane_sums)
        self.replace_weights(cta, self.matmuls.split(p))  # both parts of those before are loaded
        alpha, rows = lax.optimization_barrier((alpha, rows))
        for _ in sums:
            pass
        return (alpha, compared.grew), rows

    def most(self, cta: WideCta, n, own):
        """Returns the row maxima of both warpgroups' scores, f32[64]."""
        return jnp.maximum(own, self.of_other(cta, n, own))

    def of_other(self, cta: WideCta, n, own):
        """Returns what the other warpgroup passes as `own`, f32[64]; n counts these calls."""
        rows = cta.smem.rows.at[lax.rem(n, jnp.int32(2))]
        rows[cta.wg] = plgpu.layout_cast(own, inline.ROWS)
        plgpu.barrier_arrive(cta.bars.rows)
        plgpu.barrier_wait(cta.bars.rows)
        return plgpu.load(rows.at[1 - cta.wg], layout=inline.ROWS)

    def store(self, cta: WideCta, state: Rows, sums):
        spec, problem = self.problem.spec, self.problem
        l = plgpu.layout_cast(state.l.sum(axis=1), inline.ROWS)
        l = l + self.of_other(cta, cta.tiles.total, l)
        m, shift = online_softmax.settled(state.maxima)
        sink, sinks = None, cta.gmem.auxiliary.sinks
        if sinks is not None:
            sink = lax.broadcast_in_dim(sinks[cta.batch, cta.head], l.shape, ())
            sink = plgpu.layout_cast(sink, inline.ROWS)
        inverse, lse, shift_ = softmax.finish(m, l, shift, sink, problem.unit)
        gain = dropout.gain(spec.dropout_rate) if spec.dropout_rate else 1.0
        o, *row_outputs = cta.out
        values = [lse, *([shift_] if self.far else [])]
        if spec.max_logit:
            values.append(shift * problem.unit + m * softmax.LN2)
        index = cta.batch, cta.head, pl.ds(cta.start, WARPGROUP_ROWS)

        @pl.when(cta.wg == 0)
        def _():
            for out, x in zip(row_outputs, values, strict=True):
                self.write_rows(cta, out.at[index], x)

        scale = inverse * gain
        self.store_chunks(cta, o, [x * per_row(scale, x.shape) for x in sums])

    def write_rows(self, cta: WideCta, out, x):
        """Writes f32[64] through shared memory that the other warpgroup no longer reads."""
        staging = cta.smem.rows.at[lax.rem(cta.tiles.total + 1, jnp.int32(2)), 0]
        plgpu.wait_smem_to_gmem(0)
        staging[...] = plgpu.layout_cast(x, inline.ROWS)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, out)


def forward(
    problem: Problem,
    blocks: WideBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
) -> Outputs:
    """Launches the kernel; results have the rows of whole tiles, but for O.

    Args:
        problem: a problem with the head dims of `wide_problem`.
        blocks: options.
        operands: operands of the call.
        arrays: q, k and v as the kernel reads them.
        interpret: run by the interpreter.
    """
    rows = -(-problem.q_len // WARPGROUP_ROWS) * WARPGROUP_ROWS
    row_shape = float32((problem.batch, problem.q_heads, rows))
    kernel = ForwardKernel(problem, blocks, FORWARD, interpret)
    shape = *arrays.q.shape[:3], arrays.v.shape[3]
    out = [jax.ShapeDtypeStruct(shape, arrays.v.dtype), row_shape]
    out += [row_shape] * (bool(kernel.far) + problem.spec.max_logit)
    run = launch(
        kernel,
        out=tuple(out),
        scratch=scratch(problem, (FORWARD,), blocks),
        grid=grid_of(problem, FORWARD),
        threads=WARPGROUPS,
        name="flash_pallas_forward_wide",
        interpret=interpret,
    )
    tile = WARPGROUP_ROWS, COLUMNS
    o, lse, *row_outputs = run(arrays.for_rows(problem, operands, 0, tile))
    shift = row_outputs.pop(0) if kernel.far else None
    return Outputs(o, lse, shift, row_outputs.pop(0) if problem.spec.max_logit else None)
