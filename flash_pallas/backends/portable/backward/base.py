"""Arrays that backward kernels read, and the base of the KV-stationary ones."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ....core import block_lists, bounds
from ....core.block_lists import BlockLists
from ....core.integers import round_up
from ....core.mask import Limits
from ....core.padding import pad_axis
from ....core.problem import Cotangents, Operands, Problem
from ....core.scores import TileInputs
from ....core.softmax import EMPTY_ROW
from ...gpu import auxiliary_arrays, score_tile
from ...gpu.auxiliary_arrays import AuxiliaryGmem, within_reach
from ...gpu.ptx.mma_sync import STEP
from ...gpu.score_tile import RegisterTile, Weights
from ..common.auxiliary_inputs import AuxiliaryInputs, Place
from ..common.kernel import Kernel, Step, Steps, masked_unless, q_tile_range
from ..common.smem_tiles import Copies, Copy
from ..common.tiles import TileSizes
from .tiles import FusedSizes, ScoreLines

LSE, DELTA = range(2)  # of BackwardArrays.rows


class BackwardArrays(NamedTuple):
    """Arrays in device memory that a backward kernel reads.

    R is T padded so that no tile reaches past it. The LSE of padded rows is EMPTY_ROW, so that
    their P is 0.
    """

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    do: Any  # [B, T, N, Hv]
    lse: Any  # f32[B, N, R], base 2
    delta: Any  # f32[B, N, R]: sum of O dO
    q_offset: Any = None  # int32[B], where problem.traced_offset
    q_lengths: Any = None  # int32[B]
    bounds: Any = None  # int32[B, own blocks, 2], where arrays decide what a block reads
    # BlockLists.in_one of own blocks, in place of `bounds`; if is_listed
    lists: BlockLists | None = None
    states: Any = None  # dbias.kernel.States, where every tile is gone through; likewise
    aux: AuxiliaryGmem = AuxiliaryGmem()
    shift: Any = None  # f32[B, N, R], of the log-sum-exp; None where it is 0
    rows: Any = None  # f32[B, N, 2, R]: LSE and DELTA, in the fused kernel in place of both

    @classmethod
    def of(cls, operands: Operands, cotangents: Cotangents) -> BackwardArrays:
        """Returns the arrays without `bounds` and `aux`, of which each kernel has its own."""
        rows = within_reach(operands.q.shape[1])
        return cls(
            q=operands.q,
            k=operands.k,
            v=operands.v,
            do=cotangents.do,
            lse=pad_axis(cotangents.lse_log2, 2, rows, EMPTY_ROW),
            delta=pad_axis(cotangents.delta, 2, rows),
            q_offset=operands.q_offset,
            q_lengths=operands.q_lengths,
            shift=None if cotangents.shift is None else pad_axis(cotangents.shift, 2, rows),
        )

    def with_aux(self, inputs: AuxiliaryInputs, operands: Operands) -> BackwardArrays:
        """Returns the arrays with `aux`: what a kernel reads besides them, and `shift`."""
        kv_heads = inputs.problem.kv_heads
        aux = auxiliary_arrays.with_shift(inputs.arrays(operands), self.shift, kv_heads)
        return self._replace(aux=aux, shift=None)

    def of_kernel(
        self,
        inputs: AuxiliaryInputs,
        operands: Operands,
        tile: TileSizes | FusedSizes | ScoreLines,
        group: int = 1,
    ) -> BackwardArrays:
        """Returns the arrays with `aux`, and `bounds` or `lists`, of a kernel with these tiles.

        Args:
            inputs: loader of the kernel.
            operands: of the call.
            tile: tile sizes.
            group: number of query heads that a CTA which owns keys goes through.
        """
        arrays, problem = self.with_aux(inputs, operands), inputs.problem
        if problem.is_listed:
            if inputs.q_axis:
                lists = block_lists.of_keys(problem, operands, (tile.columns, tile.rows), group)
            else:
                lists = block_lists.of_queries(problem, operands, (tile.rows, tile.columns))
            return arrays._replace(lists=lists.in_one)
        if not problem.is_dynamic:
            return arrays
        if inputs.q_axis:
            return arrays._replace(
                bounds=bounds.q_bounds(problem, operands, tile.columns, tile.rows)
            )
        return arrays._replace(bounds=bounds.kv_bounds(problem, operands, tile.rows, tile.columns))

    def stacked(self) -> BackwardArrays:
        """Returns the arrays with LSE and delta stacked in `rows`; each warpgroup copies one."""
        rows = jnp.stack([self.lse, self.delta], axis=2)
        return self._replace(lse=None, delta=None, rows=rows)

    def offset(self, problem: Problem, batch):
        """Returns the position of query 0 of a batch entry."""
        return problem.spec.q_offset if self.q_offset is None else self.q_offset[batch]

    def q_length(self, problem: Problem, batch):
        """Returns the number of queries of a batch entry."""
        return problem.q_len if self.q_lengths is None else self.q_lengths[batch]

    def kv_length(self, problem: Problem, batch):
        """Returns the number of keys of a batch entry."""
        return problem.kv_len if self.aux.kv_lengths is None else self.aux.kv_lengths[batch]


_ENDS_ANEW_FROM = 192  # head dims above; see KvStationary.anew


class GradientSums(NamedTuple):
    """Accumulators of dK and dV of a CTA; None for what it does not accumulate."""

    dk: Any  # f32[rows, H], before scaling
    dv: Any  # f32[rows, Hv], before dropout's gain


class KvStationaryCta(NamedTuple):
    """State of one CTA and its KV tile."""

    gmem: BackwardArrays
    smem: Any  # with k and v
    copies: Copies
    batch: Any
    kv_head: Any
    block: Any
    steps: Steps  # through blocks of queries of all heads of the group
    stream: Any = None


class KvStationary(Kernel):
    """Base class of the kernels of dK and dV: a CTA owns a KV tile and loops over Q tiles.

    These are the Q tiles that attend to it, of all query heads that share the keys. Scores are
    transposed: rows are keys.

    Attributes:
        problem: what is computed.
        tile: tile sizes; rows are keys, columns the queries of a step.
        interpret: run under the interpreter.
        hides_ends: keys past the end are masked; else what is summed for them is dropped.
    """

    problem: Problem
    tile: TileSizes
    hides_ends: ClassVar[bool] = False

    @property
    def inputs(self) -> AuxiliaryInputs:
        """Loader of what score modifiers read; rows are keys."""
        return AuxiliaryInputs(self.problem, 1, self.interpret)

    @property
    def mask_all(self) -> bool:
        """Masks all tiles, in one loop, if any tile may be masked."""
        return False

    def place(self, gmem: BackwardArrays, smem, copies: Copies, coordinates) -> KvStationaryCta:
        """Returns where this CTA is, and the steps of its loop over Q tiles.

        Args:
            gmem: arrays in device memory.
            smem: buffers in shared memory.
            copies: copies of tiles by the warpgroups of the CTA.
            coordinates: (batch entry, KV head, KV block).
        """
        batch, kv_head, block = coordinates
        return KvStationaryCta(
            gmem, smem, copies, batch, kv_head, block, self.steps(gmem, coordinates)
        )

    def steps(self, gmem: BackwardArrays, coordinates) -> Steps:
        """Returns the steps of the CTA with these (batch entry, KV head, KV block)."""
        batch, _, block = coordinates
        if gmem.lists is not None:
            per_head = pl.cdiv(self.problem.q_len, self.tile.columns)
            steps = Steps.of_list(self.problem, gmem.lists, coordinates, per_head)
            return steps.all_masked() if self.mask_all else steps
        first, rows = block * self.tile.rows, self.tile.rows
        position = first - gmem.offset(self.problem, batch)
        tile = self.tile.columns, rows
        blocks = q_tile_range(self.problem, (batch, block), position, tile, gmem.bounds)
        ragged = self.hides_ends and self.ragged(gmem)
        if self.mask_all and (ragged or not self.problem.spec.mask.is_trivial):
            blocks = blocks._replace(full_start=blocks.stop, full_stop=blocks.stop)
        elif ragged:
            all_whole = first + rows <= gmem.kv_length(self.problem, batch)
            blocks = masked_unless(blocks, all_whole)
        return Steps.of(blocks, self.problem.group)

    def anew(self, cta: KvStationaryCta) -> KvStationaryCta:
        """Returns `cta` behind an optimization barrier: nothing computed from it is hoisted.

        Addresses are computed again in every step. So are the ends of the loop for the widest
        heads, where positions alone say which blocks the loop has: on 8.0 that saves the causal
        fused backward of head dim 256 8 bytes of spills. At 192 it would cost 12, and 12 at 256
        where the loop starts elsewhere.
        """
        warpgroups = cta.copies.warpgroups
        opaque = lax.optimization_barrier((cta.batch, cta.kv_head, cta.block, warpgroups.rank))
        batch, kv_head, block, rank = opaque
        copies = dataclasses.replace(cta.copies, warpgroups=warpgroups._replace(rank=rank))
        steps = cta.steps
        wide = self.problem.head_dim > _ENDS_ANEW_FROM and not self.problem.is_listed
        if wide and cta.gmem.bounds is None and steps.shift is None:
            steps = self.steps(cta.gmem, (batch, kv_head, block))
        return KvStationaryCta(cta.gmem, cta.smem, copies, batch, kv_head, block, steps, cta.stream)

    def ragged(self, gmem: BackwardArrays) -> bool:
        """Returns whether some KV block has keys that do not exist."""
        return bool(self.problem.kv_len % self.tile.rows) or gmem.aux.kv_lengths is not None

    def own(self, cta: KvStationaryCta) -> tuple[Copy, Copy]:
        """Returns the copies of the CTA's K and V tiles."""
        gmem = cta.gmem
        first, limit = cta.block * self.tile.rows, gmem.kv_length(self.problem, cta.batch)
        copy = lambda array, tile: Copy(array.at[cta.batch, :, cta.kv_head], tile, first, limit)
        return copy(gmem.k, cta.smem.k), copy(gmem.v, cta.smem.v)

    def arriving(self, cta: KvStationaryCta, name: str, n, tile) -> Copy:
        """Returns the copy of the Q or dO tile ("q", "do") of the n-th step to `tile`."""
        step = cta.steps[n]
        source = getattr(cta.gmem, name).at[cta.batch, :, self.head(cta, step)]
        limit = step.limit(cta.gmem.q_length(self.problem, cta.batch))
        return Copy(source, tile, step.block * self.tile.columns, limit)

    def head(self, cta: KvStationaryCta, step: Step):
        """Returns the query head of a step; if there is no such step, some head of the group."""
        last = jnp.int32(self.problem.group - 1)
        return cta.kv_head * self.problem.group + lax.min(step.member, last)

    def tile_place(self, cta: KvStationaryCta, step: Step, part=None) -> Place:
        """Returns the place of a step's score tile, or of `part`, (first, count) of its columns."""
        head = cta.kv_head * self.problem.group + step.member
        offset, columns = part or (0, self.tile.columns)
        starts = cta.block * self.tile.rows, step.block * self.tile.columns + offset
        return Place(cta.batch, head, *starts, (self.tile.rows, columns))

    # --- a tile ----------------------------------------------------------------------------------

    def modifiers(self, cta: KvStationaryCta, place: Place, *, masked: bool) -> TileInputs:
        """Returns the inputs of the score modifiers at a tile."""
        fragments = self.inputs.row_fragments(cta.gmem.aux, place)
        return self.inputs.read(fragments, cta.gmem.aux, place, ids=masked)

    def scores(self, cta: KvStationaryCta, place: Place, q):
        """Computes S^T of a tile from the rows `q` of Q, before scale and modifiers."""
        summed = round_up(self.problem.head_dim, STEP)
        zeros = self.matmuls.zeros(*place.shape)
        return self.matmuls.add(zeros, cta.smem.k, q, transposed=True, summed=summed)

    def weights(
        self, cta: KvStationaryCta, place: Place, s, lse, inputs: TileInputs, *, masked: bool
    ) -> Weights:
        """Computes P^T of a tile from its scores."""
        tile, limits = self.score_tile(cta, place), Limits()
        problem = self.problem if masked else self.problem.of_whole_tiles
        if masked:
            ends = self.hides_ends and self.ragged(cta.gmem)
            length = cta.gmem.kv_length(self.problem, cta.batch)
            limits = tile.limits(self.problem.spec.mask, length if ends else None)
        return score_tile.weights(problem, tile, s, lse, inputs, limits, marks=True)

    def weight_gradients(self, cta: KvStationaryCta, place: Place, do):
        """Computes dP^T of a tile from the rows `do` of dO."""
        summed = round_up(self.problem.v_head_dim, STEP)
        zeros = self.matmuls.zeros(*place.shape)
        return self.matmuls.add(zeros, cta.smem.v, do, transposed=True, summed=summed)

    def score_gradients(self, cta: KvStationaryCta, place: Place, w: Weights, dp, delta):
        """Computes dS^T of a tile, f32."""
        delta = self.score_tile(cta, place).per_q(delta)
        return score_tile.pulled(w) * score_tile.centred(self.problem, w.kept, dp, delta)

    def score_tile(self, cta: KvStationaryCta, place: Place) -> RegisterTile:
        """Returns the RegisterTile of a block of queries: the positions and shape of its scores."""
        start = place.column_start + cta.gmem.offset(self.problem, cta.batch)
        return RegisterTile(start, place.row_start, place.shape, q_axis=1, interpret=self.interpret)


def outputs(problem: Problem, length: int, wanted=("dk", "dv")) -> GradientSums:
    """Returns the shapes of dK and dV in device memory, of `length` keys."""
    gradient = lambda columns: jax.ShapeDtypeStruct(
        (problem.batch, length, problem.kv_heads, columns), problem.dtype
    )
    return GradientSums(
        dk=gradient(problem.head_dim) if "dk" in wanted else None,
        dv=gradient(problem.v_head_dim) if "dv" in wanted else None,
    )
