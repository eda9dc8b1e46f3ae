"""The backward for wide heads: dQ in one kernel, dK and dV in another, deterministic.

With P = exp(S - L) and D = rowsum(dO o O),

    dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO        dS = P o (dO V^T - D)

dK and dV of 64 keys at head dim 512 would take all registers of an SM. So a cluster of two CTAs has
them, each with one product of scores and one sum:

    rank 0      S^T = K Q^T     P^T                                     dV += P^T dO
    rank 1      dP^T = V dO^T   dS^T = P^T o (dP^T - D), P^T of rank 0  dK += dS^T Q

Together with dQ, which computes both scores again, seven matmuls a tile run where five are counted.
P^T goes from one CTA to the other in 16 bits, the dtype in which dV takes it: that adds one
rounding to dS, which is itself rounded to that dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import scores
from ....core.problem import Operands, Problem
from ....core.scores import TileInputs
from ...gpu import score_tile
from ...gpu.launch import WARPGROUP_ROWS, launch
from ...gpu.ptx import inline
from ...gpu.score_tile import row_shift
from ..backward.operands import BackwardArrays
from ..common import pipeline
from ..common.auxiliary_inputs import AuxiliaryInputs
from .column_tiles import grid_of
from .handover import Handover, Received, stand_in
from .kernel import WideCta, WideKernel
from .tiles import COLUMNS, DQ, PAIR, WARPGROUPS, WideBlocks, scratch


class GradientKernel(WideKernel):
    """Common parts of the kernels of all gradients; see WideKernel."""

    def fold(self, cta: WideCta, accumulators):
        step = functools.partial(self.step, cta, self.of_rows(cta), accumulators)
        pl.loop(jnp.int32(0), cta.tiles.total)(step)

    def step(self, cta: WideCta, held, accumulators, n):
        """Makes the weights of the n-th tile of columns, and sums those of the one before."""
        cta = self.at_step(cta, n)
        run = functools.partial(self.weights, cta, held, accumulators, n)
        pl.run_scoped(run, self.accumulator)

    def of_rows(self, cta: WideCta):
        """Loads what registers keep of the rows, `held` of the steps."""
        raise NotImplementedError

    def weights(self, cta: WideCta, held, accumulators, n, s_acc):
        """Makes and stores the weights of a tile."""
        raise NotImplementedError

    def store_scaled(self, cta: WideCta, out, sums):
        """Writes sums of dS times an operand, as the gradient of the other operand of S."""
        self.store_chunks(cta, out, [x * self.problem.spec.scale for x in sums])

    def of_queries(self, cta: WideCta, ref, head, start):
        """Loads one value of each of 64 queries, of rows or of columns."""
        layout, index = (
            (inline.ROWS, inline.COLS)[self.role.q_axis],
            (cta.batch, head, pl.ds(start, WARPGROUP_ROWS)),
        )
        return plgpu.load(ref.at[index], layout=layout, optimized=False)

    def probabilities(self, cta: WideCta, n, fragments, lse, s, issue: Callable):
        """Returns (tile, its weights) of the n-th tile of scores; `issue` issues a matmul."""
        head, block = self.column_tile(cta, n)
        tile, inputs = self.tile(cta, block), self.inputs(cta, fragments, n)
        inputs = self.with_shift(cta, inputs, head, block)
        issue()
        limits = self.limits(cta, tile)
        return tile, score_tile.weights(self.problem, tile, s, lse, inputs, limits, marks=True)

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


class QueryGradient(GradientKernel):
    """The kernel of dQ."""

    def of_rows(self, cta: WideCta):
        place = self.place(cta, cta.head, 0, 0)
        rows = [
            self.of_queries(cta, ref, cta.head, cta.start)
            for ref in (cta.gmem.lse_log2, cta.gmem.delta)
        ]
        return self.auxiliary.fragments(cta.gmem.auxiliary, place), *rows

    def weights(self, cta: WideCta, held, accumulators, n, s_acc):
        fragments, lse, delta = held
        reload = self.multiply_scores(cta, n, 0, s_acc)
        sums = self.sums(cta, n, accumulators)
        next(sums)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        reload()
        next(sums, None)
        issue = lambda: next(sums, None)
        tile, w = self.probabilities(cta, n, fragments, lse, s, issue)
        issue()
        p = score_tile.pulled(w)
        self.reload_auxiliary(cta, n)
        p = lax.optimization_barrier(p)
        for _ in sums:
            pass
        run = functools.partial(self.score_gradients, cta, n, tile, w.kept, delta)
        ds = p * pl.run_scoped(run, self.accumulator)
        self.replace_weights(cta, self.matmuls.split(ds))

    def score_gradients(self, cta: WideCta, n, tile, kept, delta, dp_acc):
        """Computes what P is to be multiplied by, keep * gain * dP - delta, f32[64, 64]."""
        reload = self.multiply_scores(cta, n, 1, dp_acc)
        delta = tile.per_q(delta)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        reload()
        return score_tile.centred(self.problem, kept, dp, delta)

    def store(self, cta: WideCta, state, sums):
        del state
        self.store_scaled(cta, cta.out[0], sums)


class Pieces:
    """The sums of a step, matmul by matmul."""

    def __init__(self, sums: Iterator, count: int):
        self.sums, self.left = sums, count

    def issue(self, most: int = 1):
        """Issues the next matmuls, if there are any."""
        for _ in range(min(most, self.left)):
            next(self.sums)
        self.left -= min(most, self.left)

    def finish(self):
        """Waits for all of them, which have been issued."""
        assert self.left == 0
        for _ in self.sums:
            pass


class OfPair(GradientKernel):
    """The part of one CTA of a pair; the results of the pair are dK, dV.

    A step ends with the weights: handed over while the last sums are in flight.
    """

    def pieces(self, cta: WideCta, n, accumulators) -> Pieces:
        """Issues the first matmul of the sums; returns the others."""
        pieces = Pieces(self.sums(cta, n, accumulators), WARPGROUPS * self.chunks.results)
        pieces.issue()
        return pieces

    def handover(self, cta: WideCta) -> Handover:
        """Returns the way from rank 0 to rank 1 for this warpgroup."""
        received, passed = cta.smem.received, None
        if self.interpret:
            passed = cta.out[2].at[cta.batch, cta.head, cta.block, cta.wg]
        slot = Received(received.words.at[cta.wg], received.arrived.at[cta.wg])
        bars, dtype = cta.bars, self.matmuls.operand_dtype
        return Handover(slot, bars.handed, bars.read, passed, dtype, self.interpret)


class ValueGradient(OfPair):
    """The part of rank 0: dV, and P^T for the other."""

    def of_rows(self, cta: WideCta):
        place = self.place(cta, cta.head, 0, 0)
        return self.auxiliary.fragments_of_rows(cta.gmem.auxiliary, place)

    def weights(self, cta: WideCta, held, accumulators, n, s_acc):
        head, block = self.column_tile(cta, n)
        place = self.place(cta, head, block, cta.wg)
        fragments = self.auxiliary.fragments_of_head(held, cta.gmem.auxiliary, place)
        reload = self.multiply_scores(cta, n, 0, s_acc)
        sums = self.pieces(cta, n, accumulators)
        lse = self.of_queries(cta, cta.gmem.lse_log2, head, place.column_start)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        reload()
        sums.issue()
        _, w = self.probabilities(cta, n, fragments, lse, s, sums.issue)
        passed, own = self.both(w)
        for operand in (own, *([] if passed is None else [passed])):
            # ptxas would leave the exponentials to the end, when most of the sums are done.
            inline.settle(operand, n, self.interpret)
        self.reload_auxiliary(cta, n)
        sums.issue(sums.left)
        self.handover(cta).send(own if passed is None else passed)
        self.replace_weights(cta, (own,))  # those before are loaded
        sums.finish()

    def both(self, w: score_tile.Weights):
        """Returns (P for dK, or None where it is the same, P for dV), as operands."""
        pulled, dropped = score_tile.pulled(w), score_tile.dropped(self.problem, w)
        (own,) = self.matmuls.split(dropped)
        return None if pulled is dropped else self.matmuls.split(pulled)[0], own

    def drain(self, cta: WideCta):
        super().drain(cta)
        self.handover(cta).drain()

    def store(self, cta: WideCta, state, sums):
        del state
        self.store_chunks(cta, cta.out[1], [score_tile.gained(self.problem, x) for x in sums])


class KeyGradient(OfPair):
    """The part of rank 1: dK. Masks, modifiers and exponentials are in the P^T that it gets."""

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Nothing streams but what is multiplied."""
        bare = {"features": frozenset(), "bias_shape": None, "mask_shape": None}
        return AuxiliaryInputs(dataclasses.replace(self.problem, **bare), self.role.q_axis)

    def fold(self, cta: WideCta, accumulators):
        self.handover(cta).open()
        super().fold(cta, accumulators)

    def of_rows(self, cta: WideCta):
        place = self.place(cta, cta.head, 0, 0)
        return AuxiliaryInputs(self.problem, self.role.q_axis).row_keys(cta.gmem.auxiliary, place)

    def weights(self, cta: WideCta, held, accumulators, n, s_acc):
        head, block = self.column_tile(cta, n)
        column, tile = self.place(cta, head, block, cta.wg).column_start, self.tile(cta, block)
        reload = self.multiply_scores(cta, n, 0, s_acc)
        sums = self.pieces(cta, n, accumulators)
        delta = tile.per_q(self.of_queries(cta, cta.gmem.delta, head, column))
        kept = self.kept(cta, tile, held, head, column)
        dp = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        reload()
        sums.issue()
        centred = lax.optimization_barrier(score_tile.centred(self.problem, kept, dp, delta))
        sums.issue(sums.left)
        ds = centred * self.handover(cta).receive(n).astype(jnp.float32)
        self.replace_weights(cta, self.matmuls.split(ds))  # those before are loaded
        sums.finish()

    def kept(self, cta: WideCta, tile, of_keys, head, column):
        """Returns the dropout mask of a tile; None without dropout."""
        if not self.problem.spec.dropout_rate:
            return None
        place = self.place(cta, head, 0, 0)
        keys = self.auxiliary.keys_at(cta.gmem.auxiliary.column_keys, place, column, WARPGROUP_ROWS)
        q_keys = plgpu.load(keys, layout=inline.COLS, optimized=False)
        inputs = TileInputs(q_keys=q_keys, kv_keys=of_keys)
        return scores.kept(self.problem.spec, tile, inputs)

    def store(self, cta: WideCta, state, sums):
        del state
        self.store_scaled(cta, cta.out[0], sums)


def query_gradient(
    problem: Problem,
    blocks: WideBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the kernel of dQ, and returns that in the form of Q.

    Args:
        problem: a problem with the head dims of `wide_problem`.
        blocks: options.
        operands: operands of the call.
        arrays: operands as the kernel reads them.
        interpret: run by the interpreter.
    """
    run = launch(
        QueryGradient(problem, blocks, DQ, interpret),
        out=(jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),),
        scratch=scratch(problem, (DQ,), blocks),
        grid=grid_of(problem, DQ),
        threads=WARPGROUPS,
        name="flash_pallas_backward_wide_dq",
        interpret=interpret,
    )
    return run(arrays.for_rows(problem, operands, 0, (WARPGROUP_ROWS, COLUMNS)))[0]


def key_value_gradients(
    problem: Problem,
    blocks: WideBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the pairs of dK and dV, and returns (dK, dV) in the form of K and V.

    Arguments are those of `query_gradient`.
    """
    sides = tuple(
        side(problem, blocks, role, interpret)
        for side, role in zip((ValueGradient, KeyGradient), PAIR, strict=True)
    )

    def kernel(*refs):
        rank = pipeline.cluster_rank(len(sides))
        for i, side in enumerate(sides):
            pl.when(rank == i)(functools.partial(side, *refs))

    out: list[Any] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.k, arrays.v)]
    if interpret:
        tiles = problem.batch, problem.kv_heads, -(-problem.kv_len // WARPGROUP_ROWS)
        out.append(stand_in(*tiles, warpgroups=WARPGROUPS, dtype=arrays.k.dtype))
    run = launch(
        kernel,
        out=tuple(out),
        scratch=scratch(problem, PAIR, blocks),
        grid=grid_of(problem, PAIR[0]),
        cluster=pipeline.cluster_axes(len(sides)),
        threads=WARPGROUPS,
        name="flash_pallas_backward_wide_dkv",
        interpret=interpret,
    )
    return run(arrays.for_rows(problem, operands, 1, (COLUMNS, WARPGROUP_ROWS)))[:2]
