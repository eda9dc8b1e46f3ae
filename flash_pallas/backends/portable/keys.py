"""What blocks have in common that own keys of one head and let the queries pass that see them.

Scores are transposed, rows are keys. All query heads that share the keys pass by.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...core.integers import round_up
from ...core.problem import Problem
from ...core.scores import TileInputs
from ...core.tile import Limits
from ..mosaic import recompute
from ..mosaic.recompute import Weights
from ..mosaic.register_tile import RegisterTile
from .backward_arrays import BackwardArrays
from .blocks import TileSizes
from .inputs import Inputs, Place
from .kernel import Kernel
from .products import STEP
from .stream import Tiles
from .tiles import Copies, Copy
from .walk import Step, Steps, masked_unless, query_blocks

_ENDS_ANEW_FROM = 192  # head dims above; see OwnsKeys.anew


class Sums(NamedTuple):
    """What a block adds up; None for what it does not."""

    dk: Any  # f32[rows, H], before scaling
    dv: Any  # f32[rows, Hv], before dropout's gain


class Cta(NamedTuple):
    """One block of threads and its keys."""

    gmem: BackwardArrays
    smem: Any  # with k and v
    copies: Copies
    batch: Any
    kv_head: Any
    block: Any
    steps: Steps  # through blocks of queries of all heads of the group
    stream: Any = None


class OwnsKeys(Kernel):
    """Base of the kernels of dK and dV.

    Attributes:
        problem: what is computed.
        tile: rows are keys, columns queries of a step.
        interpret: run by the interpreter.
        hides_ends: keys past the end are masked; else what is summed for them is dropped.
    """

    problem: Problem
    tile: TileSizes
    hides_ends: ClassVar[bool] = False

    @property
    def inputs(self) -> Inputs:
        """What modifiers read."""
        return Inputs(self.problem, 1, self.interpret)

    @property
    def mask_all(self) -> bool:
        """If any tile may be masked, all are, in one loop."""
        return False

    def place(self, gmem: BackwardArrays, smem, copies: Copies, at) -> Cta:
        """Where this block is.

        Args:
            gmem: in device memory.
            smem: in shared memory.
            copies: how its team moves tiles.
            at: (batch entry, key head, block of keys).
        """
        batch, kv_head, block = at
        return Cta(gmem, smem, copies, batch, kv_head, block, self.steps(gmem, at))

    def steps(self, gmem: BackwardArrays, at) -> Steps:
        """Of the block at (batch entry, key head, block of keys)."""
        batch, _, block = at
        first, rows = block * self.tile.rows, self.tile.rows
        position = first - gmem.offset(self.problem, batch)
        tile = self.tile.columns, rows
        blocks = query_blocks(self.problem, (batch, block), position, tile, gmem.bounds)
        ragged = self.hides_ends and self.ragged(gmem)
        if self.mask_all and (ragged or not self.problem.spec.mask.is_trivial):
            blocks = blocks._replace(full_start=blocks.stop, full_stop=blocks.stop)
        elif ragged:
            all_whole = first + rows <= gmem.kv_length(self.problem, batch)
            blocks = masked_unless(blocks, all_whole)
        return Steps.of(blocks, self.problem.group)

    def anew(self, cta: Cta) -> Cta:
        """At a place from which nothing is hoisted: what is made of it is made in every step.

        That is addresses and, of the widest heads and where positions alone say which blocks a walk
        has, its ends: on 8.0 that saves the causal fused backward of head dim 256 8 bytes of
        spills. At 192 it would cost 12, and 12 at 256 where the walk starts elsewhere.
        """
        team = cta.copies.team
        found = lax.optimization_barrier((cta.batch, cta.kv_head, cta.block, team.rank))
        batch, kv_head, block, rank = found
        copies = dataclasses.replace(cta.copies, team=team._replace(rank=rank))
        steps = cta.steps
        wide = self.problem.head_dim > _ENDS_ANEW_FROM
        if wide and cta.gmem.bounds is None and steps.shift is None:
            steps = self.steps(cta.gmem, (batch, kv_head, block))
        return Cta(cta.gmem, cta.smem, copies, batch, kv_head, block, steps, cta.stream)

    def ragged(self, gmem: BackwardArrays) -> bool:
        """Some block has keys that do not exist."""
        return bool(self.problem.kv_len % self.tile.rows) or gmem.side.kv_lengths is not None

    def own(self, cta: Cta) -> tuple[Copy, Copy]:
        """Of its K and V."""
        gmem = cta.gmem
        first, limit = cta.block * self.tile.rows, gmem.kv_length(self.problem, cta.batch)
        of = lambda array, tile: Copy(array.at[cta.batch, :, cta.kv_head], tile, first, limit)
        return of(gmem.k, cta.smem.k), of(gmem.v, cta.smem.v)

    def tiles(self, cta: Cta, n) -> Tiles:
        """Of the n-th step."""
        step = cta.steps[n]
        head = self.head(cta, step)
        of = lambda array: array.at[cta.batch, :, head]
        length = jnp.int32(cta.gmem.q_length(self.problem, cta.batch))
        limit = jnp.where(step.exists, length, jnp.int32(0))
        return Tiles(of(cta.gmem.q), of(cta.gmem.do), step.block * self.tile.columns, limit)

    def head(self, cta: Cta, step: Step):
        """Of the queries of a step, or where there is no such step of others."""
        last = jnp.int32(self.problem.group - 1)
        return cta.kv_head * self.problem.group + lax.min(step.member, last)

    def at(self, cta: Cta, step: Step, part=None) -> Place:
        """The tile of scores of a step, or a part (first, how many) of its columns."""
        head = cta.kv_head * self.problem.group + step.member
        right, columns = part or (0, self.tile.columns)
        first = cta.block * self.tile.rows, step.block * self.tile.columns + right
        return Place(cta.batch, head, *first, (self.tile.rows, columns))

    # --- a tile ----------------------------------------------------------------------------------

    def modifiers(self, cta: Cta, place: Place, *, masked: bool) -> TileInputs:
        """What they read at a tile."""
        held = self.inputs.hold(cta.gmem.side, place)
        return self.inputs.read(held, cta.gmem.side, place, ids=masked)

    def scores(self, cta: Cta, place: Place, q):
        """S of a tile before anything is done to it, of which `q` are the rows of Q."""
        summed = round_up(self.problem.head_dim, STEP)
        zeros = self.products.zeros(*place.shape)
        return self.products.add(zeros, cta.smem.k, q, transposed=True, summed=summed)

    def weights(
        self, cta: Cta, place: Place, s, lse, inputs: TileInputs, *, masked: bool
    ) -> Weights:
        """P of a tile from its scores."""
        tile, limits = self.score_tile(cta, place), Limits()
        if masked:
            ends = self.hides_ends and self.ragged(cta.gmem)
            length = cta.gmem.kv_length(self.problem, cta.batch)
            limits = tile.limits(self.problem.spec.mask, length if ends else None)
        return recompute.weights(self.problem, tile, s, lse, inputs, limits)

    def weight_gradients(self, cta: Cta, place: Place, do):
        """dP of a tile, of which `do` are the rows of dO."""
        summed = round_up(self.problem.v_head_dim, STEP)
        zeros = self.products.zeros(*place.shape)
        return self.products.add(zeros, cta.smem.v, do, transposed=True, summed=summed)

    def score_gradients(self, cta: Cta, place: Place, w: Weights, dp, delta):
        """dS of a tile, f32."""
        delta = self.score_tile(cta, place).per_q(delta)
        return recompute.pulled(w) * recompute.centred(self.problem, w.kept, dp, delta)

    def score_tile(self, cta: Cta, place: Place) -> RegisterTile:
        """Where the scores of a block of queries lie."""
        start = place.column_start + cta.gmem.offset(self.problem, cta.batch)
        return RegisterTile(start, place.row_start, place.shape, q_axis=1, interpret=self.interpret)


def outputs(problem: Problem, length: int, wanted=("dk", "dv")) -> Sums:
    """dK and dV in device memory, of so many keys."""
    of = lambda columns: jax.ShapeDtypeStruct(
        (problem.batch, length, problem.kv_heads, columns), problem.dtype
    )
    return Sums(
        dk=of(problem.head_dim) if "dk" in wanted else None,
        dv=of(problem.v_head_dim) if "dv" in wanted else None,
    )
