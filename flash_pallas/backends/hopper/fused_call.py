"""The fused backward of one call: its arrays, its launches one after the other, its gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...core import integers as ints
from ...core.problem import Operands, Problem
from ..mosaic.launch import float32, launch
from . import cluster
from .arrays import BackwardArrays
from .backward_fused import Fused
from .fused_bias import gradient_of_bias
from .fused_blocks import FusedBlocks, pairs_at_once
from .fused_cta import WARPGROUPS, Results, scratch
from .fused_launches import Launch, launches_of, origins
from .fused_parts import summed
from .fused_weights import weights_of
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
    """All launches.

    Args:
        problem: with the head dims that run.
        blocks: tile sizes.
        operands: of the call.
        arrays: what a backward reads.
        clears: padding may hold NaN; otherwise it holds 0.
        interpret: run by the interpreter.

    Returns:
        (dq, dk, dv, dbias): in the dtypes and shapes of `arrays`, dq as wide as it runs; dbias in
        those of the bias, or None without blocks.bias_cluster.
    """
    tile = (blocks.block_q, blocks.block_kv)
    given = arrays.for_rows(problem, operands, 1, tile)
    factor = weights_of(problem, blocks).factor
    if factor != 1.0:
        given = given.scaled(factor)
    if clears:
        given = given.with_padding(operands, *tile)
    return Call(problem, blocks, arrays, interpret)(given)


@dataclasses.dataclass(frozen=True)
class Call:
    """Every portion of the pairs, one after the other.

    Attributes:
        problem: with the head dims that run.
        blocks: tile sizes.
        like: whose q, k and v have the shapes of gradients.
        interpret: run by the interpreter.
    """

    problem: Problem
    blocks: FusedBlocks
    like: BackwardArrays
    interpret: bool

    def __call__(self, given: BackwardArrays):
        """(dq, dk, dv, dbias)."""
        starts = origins(self.problem, self.blocks)
        if len(starts) == 1:
            found = self.portion(Results(), given)
            dq, dbias = self.dq(found.dq), gradient_of_bias(self.problem, found.dbias)
        else:
            found, dq, dbias = self.portions(starts, given)
        dk, dv = found.dk, found.dv
        if self.blocks.parts > 1:
            dk, dv = summed(dk, self.like.k), summed(dv, self.like.v)
        return dq, dk, dv, dbias

    def portions(self, starts: list[tuple[int, int]], given: BackwardArrays):
        """(what the last portion left, dq, dbias)."""
        dq = lax.empty((*self.like.q.shape[:3], self.problem.head_dim), self.problem.dtype)
        found, biases = Results(), []
        portion = jax.jit(self.portion)  # all but the first are traced once
        for start in starts:
            # Begins when the gradients of the portion before it are there: sums of one at a time.
            found, dq, biases = lax.optimization_barrier((found, dq, biases))
            origin = jnp.array((*start, NO_PROGRESSION), jnp.int32)
            found = portion(found, given._replace(origin=origin))
            place = start[0], 0, start[1] * self.problem.group, 0
            dq = lax.dynamic_update_slice(dq, self.dq(found.dq), place)
            found = found._replace(dq=None)
            if self.bias_by_heads:
                biases = [*biases, gradient_of_bias(self.problem, found.dbias)]
                found = found._replace(dbias=None)
        if biases:
            return found, dq, jnp.concatenate(biases, axis=1)
        return found, dq, gradient_of_bias(self.problem, found.dbias)

    def portion(self, found: Results, given: BackwardArrays) -> Results:
        """The launches of one portion. `found`: what those before it left."""
        for each in launches_of(self.problem, self.blocks):
            found = self.launch(each, found, given)
        return found

    def launch(self, each: Launch, found: Results, given: BackwardArrays) -> Results:
        """`found` with what this launch adds. What there is not yet, it makes."""
        shapes = self.shapes(each)
        held = {name: getattr(found, name) for name in shapes if getattr(found, name) is not None}
        added = {"dbias"} | ({"dq"} if each.adds else set())
        if cleared := [name for name in shapes if name in added and name not in held]:
            sizes = [shapes[name].shape for name in cleared]
            held |= zip(cleared, zeros(sizes, self.interpret, found.dk), strict=True)
        out = {name: shape for name, shape in shapes.items() if name not in held}
        made = {name: jnp.zeros(x.shape, x.dtype) for name, x in out.items()}  # XLA drops these
        fused = Fused(self.problem, self.blocks, each, self.interpret)

        def kernel(kept, gmem, *refs):
            *new, smem, bars = refs
            fused(Results(**kept, **dict(zip(made, new, strict=True))), gmem, smem, bars)

        def write(refs):
            kept, new = refs
            written = self.run(each, functools.partial(kernel, kept), tuple(out.values()))(given)
            for name, x in zip(made, written, strict=True):
                new[name][...] = x

        held, made = pl.run_state(write)((held, made))
        return Results(**held, **made)

    def shapes(self, each: Launch) -> dict[str, Any]:
        """Of Results that there are: dQ's and the bias's sums, dK and dV."""
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
            if self.bias_by_heads:
                heads = sums[2]
            keys = ints.round_up(problem.kv_len, blocks.block_kv)
            queries = ints.round_up(problem.q_len, blocks.block_q)
            found["dbias"] = float32((entries, heads, keys, queries))
        return found

    @property
    def bias_by_heads(self) -> bool:
        """Sums of one portion's heads at a time, where each has a bias of its own, and a large one.

        At T=1024 with head dim 64 all of them are 3 % of what a backward keeps, for which two more
        launches a portion do not pay.
        """
        if self.blocks.launches == 1 or not self.blocks.sums_bias:
            return False
        problem = self.problem
        whole = launches_of(problem, self.blocks)[0].entries == problem.batch
        entries, heads = problem.bias_shape[:2]
        large = 3 * entries * problem.kv_len > problem.batch * problem.head_dim
        return whole and heads > 1 and large

    def run(self, each: Launch, kernel, out):
        """The call of Pallas."""
        size = self.blocks.bias_cluster
        pairs = pairs_at_once(self.problem, each.pairs, size)
        return launch(
            kernel,
            out=out,
            scratch=scratch(self.problem, self.blocks, self.like, self.interpret),
            # Some batch entries and heads fastest: CTAs that run together add to different tiles of
            # dQ (key blocks fastest: 0.94x if causal) and the longest causal walks start first; but
            # no more than L2 keeps. Of four axes the first two become one, of 65,535 at most.
            grid={
                "section": pl.cdiv(each.pairs, pairs),
                "kv": each.key_blocks,
                **({"part": self.blocks.parts} if self.blocks.parts > 1 else {}),
                "pair": pairs // size,
            },
            cluster=cluster.axes(size),
            threads=WARPGROUPS + self.blocks.producer + self.blocks.sums_bias,
            name="flash_pallas_backward_fused",
            interpret=self.interpret,
        )

    def dq(self, sums):
        """The gradient that is summed."""
        return (sums * self.problem.spec.scale).astype(self.problem.dtype)
