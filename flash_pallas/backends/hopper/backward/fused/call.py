"""The fused backward of one call: its arrays, its launches one after the other, its gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .....core import integers as ints
from .....core.problem import Operands, Problem
from ....gpu.launch import float32, launch
from ...common import cluster
from ...common.far_rows import Part, backward_gains, parts
from ..arrays import BackwardArrays
from .cta import FusedResults
from .dbias import gradient_of_bias
from .kernel import FusedKernel, weights_of
from .launches import Launch, by_heads, launches_of, origins, summed
from .scheduler import FusedScheduler
from .tiles import WARPGROUPS, FusedBlocks, for_far_rows, scratch
from .zeros import zeros

# XLA computes constants that are progressions, in a launch of 2 us; others lie in device memory.
NO_PROGRESSION = -(2**20)


def backward_fused(
    problem: Problem,
    blocks: FusedBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    clears: bool,
    interpret: bool,
):
    """Runs all launches of the fused backward.

    Args:
        problem: a problem with the head dims that the kernel runs.
        blocks: tile sizes.
        operands: the operands of the call.
        arrays: the arrays that a backward kernel reads.
        clears: padding may hold NaN and is cleared; otherwise it holds 0.
        interpret: run by the interpreter.

    Returns:
        (dq, dk, dv, dbias): in the dtypes and shapes of `arrays`, but dq is as wide as the kernel
        runs it; dbias has the dtype and shape of the bias, or is None without blocks.bias_cluster.
    """
    tile = (blocks.block_q, blocks.block_kv)
    given = arrays.for_rows(problem, operands, 1, tile)
    factor = weights_of(problem, blocks).factor
    if factor != 1.0:
        given = given.scaled(factor)
    if clears:
        given = given.with_padding(operands, *tile)
    return FusedCall(problem, blocks, arrays, interpret)(given)


@dataclasses.dataclass(frozen=True)
class FusedCall:
    """The portions of a call's pairs of a batch entry and a key head, run one after the other.

    Attributes:
        problem: a problem with the head dims that the kernel runs.
        blocks: tile sizes.
        like: arrays whose q, k and v have the shapes of gradients.
        interpret: run by the interpreter.
    """

    problem: Problem
    blocks: FusedBlocks
    like: BackwardArrays
    interpret: bool

    def __call__(self, given: BackwardArrays):
        """Returns (dq, dk, dv, dbias)."""
        starts = origins(self.problem, self.blocks)
        if len(starts) == 1:
            found, dbias = self.portion(FusedResults(), self.whole_bias, given)
            dq = self.dq(found.dq)
        else:
            found, dq, dbias = self.portions(starts, given)
        if dbias is None:
            dbias = gradient_of_bias(self.problem, found.dbias)
        dk, dv = found.dk, found.dv
        if self.blocks.parts > 1:
            dk, dv = summed(dk, self.like.k), summed(dv, self.like.v)
        return dq, dk, dv, dbias

    def portions(self, starts: list[tuple[int, int]], given: BackwardArrays):
        """Runs the portions that begin at `starts`; returns (what the last one left, dq, dbias)."""
        dq = lax.empty((*self.like.q.shape[:3], self.problem.head_dim), self.problem.dtype)
        found, dbias = FusedResults(), self.whole_bias
        portion = jax.jit(self.portion)  # all but the first are traced once
        for start in starts:
            # Begins when the gradients of the portion before it are there: sums of one at a time.
            found, dq, dbias = lax.optimization_barrier((found, dq, dbias))
            origin = jnp.array((*start, NO_PROGRESSION), jnp.int32)
            found, dbias = portion(found, dbias, given._replace(origin=origin))
            place = start[0], 0, start[1] * self.problem.group, 0
            dq = lax.dynamic_update_slice(dq, self.dq(found.dq), place)
            found = found._replace(dq=None)
        return found, dq, dbias

    def portion(self, found: FusedResults, dbias, given: BackwardArrays):
        """Runs the launches of one portion; returns `found` and `dbias` with what they add."""
        wanted = self.may_leave and backward_gains(self.problem)
        for each in launches_of(self.problem, self.blocks):
            part, *rest = parts(self.problem, each.pairs * each.key_blocks, wanted)
            found = self.launch(dataclasses.replace(each, part=part), found, given)
            for other in rest:
                again = dataclasses.replace(self, blocks=for_far_rows(each.pairs))
                found = again.launch(dataclasses.replace(each, part=other), found, given)
            if self.blocks.key_launches > 1:
                found, dbias = self.put(found, dbias, given, each.first_block)
        if found.dbias is not None and dbias is not None:
            found, dbias = self.put(found, dbias, given, 0)
        return found, dbias

    @property
    def may_leave(self) -> bool:
        """True if groups of heads may be left to another launch; nothing else was tried."""
        blocks = self.blocks
        alone = blocks.launches == blocks.key_launches == blocks.parts == 1
        return blocks.producer and alone and not (blocks.first_alone or blocks.takes_turns)

    def put(self, found: FusedResults, dbias, given: BackwardArrays, first_block: int):
        """Puts the gradient of some heads and keys of the bias in its place, and drops its sums."""
        first_key = first_block * self.blocks.block_kv
        part = gradient_of_bias(self.problem, found.dbias, first_key)
        head = 0 if given.origin is None else given.origin[1] * self.problem.group
        dbias = lax.dynamic_update_slice(dbias, part, (0, head, 0, first_key))
        return lax.optimization_barrier((found._replace(dbias=None), dbias))

    @property
    def whole_bias(self):
        """Array in which parts of the bias gradient are put; None if it is summed at one time."""
        if self.blocks.key_launches == 1 and not by_heads(self.problem, self.blocks):
            return None
        return lax.empty(self.problem.bias_shape, self.problem.bias_dtype)

    def launch(self, each: Launch, found: FusedResults, given: BackwardArrays) -> FusedResults:
        """Returns `found` with what this launch adds; results that are not there yet are made."""
        shapes = self.shapes(each)
        held = {name: getattr(found, name) for name in shapes if getattr(found, name) is not None}
        added = {"dbias"} | ({"dq"} if each.adds else set())
        if cleared := [name for name in shapes if name in added and name not in held]:
            sizes = [shapes[name].shape for name in cleared]
            held |= zip(cleared, zeros(sizes, self.interpret, found.dk), strict=True)
        out = {name: shape for name, shape in shapes.items() if name not in held}
        made = {name: jnp.zeros(x.shape, x.dtype) for name, x in out.items()}  # XLA drops these
        fused = FusedKernel(self.problem, self.blocks, each, self.interpret)

        def kernel(kept, gmem, *refs):
            *new, smem, bars = refs
            fused(FusedResults(**kept, **dict(zip(made, new, strict=True))), gmem, smem, bars)

        def write(refs):
            kept, new = refs
            written = self.run(each, functools.partial(kernel, kept), tuple(out.values()))(given)
            for name, x in zip(made, written, strict=True):
                new[name][...] = x

        held, made = pl.run_state(write)((held, made))
        return FusedResults(**held, **made)

    def shapes(self, each: Launch) -> dict[str, Any]:
        """Returns the shapes of the Results that exist: sums of dQ and of the bias, dK and dV."""
        problem, blocks, like = self.problem, self.blocks, self.like
        # dQ is [B, T, N, D] like q: no transpose afterwards, and the adds are as fast as head-major
        # (1.00x).
        sums = (each.entries, like.q.shape[1], each.heads * problem.group, problem.head_dim)
        of_k, of_v = (jax.ShapeDtypeStruct(x.shape, problem.dtype) for x in (like.k, like.v))
        if blocks.parts > 1:  # whole tiles, as what writes them knows no ends
            rows = each.key_blocks * blocks.block_kv
            keys = (problem.batch, rows, problem.kv_heads, problem.head_dim)
            of_k = of_v = float32((blocks.parts, *keys))
        found = {"dq": float32(sums), "dk": of_k, "dv": of_v}
        if blocks.sums_bias:
            entries, heads = problem.bias_shape[:2]
            if by_heads(problem, blocks):
                heads = sums[2]
            keys = -(-problem.kv_len // blocks.block_kv) // blocks.key_launches * blocks.block_kv
            queries = ints.round_up(problem.q_len, blocks.block_q)
            found["dbias"] = float32((entries, heads, keys, queries))
        return found

    def run(self, each: Launch, kernel, out):
        """Returns the Pallas call of one launch."""
        return launch(
            kernel,
            out=out,
            scratch=scratch(self.problem, self.blocks, self.like, self.interpret),
            grid=FusedScheduler(self.problem, self.blocks, each).grid,
            cluster=cluster.axes(self.blocks.bias_cluster),
            threads=WARPGROUPS + self.blocks.producer + self.blocks.sums_bias,
            name="flash_pallas_backward_fused" + "_far" * (each.part is Part.FAR),
            interpret=self.interpret,
        )

    def dq(self, sums):
        """Returns dQ in the problem's dtype, from its float32 sums without the scale."""
        return (sums * self.problem.spec.scale).astype(self.problem.dtype)
