"""The tangents of O and of the log-sum-exp, after the forward.

A CTA of four warps owns a Q tile of one head and loops over the KV blocks that it sees, as in the
forward. With P = softmax(S), known by the log-sum-exp, and o elementwise,

    (1) S = Q K^T, dS = dQ K^T + Q dK^T
    (2) G = P o dS, T += G V + P dV, mu += rowsum(G)

and in the end dO = T - mu o O, dlse = mu.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ....core import block_lists, bounds, dropout, scores
from ....core.block_lists import BlockLists
from ....core.mask import Limits
from ....core.padding import pad_axis
from ....core.problem import Operands, Outputs, Problem, Tangents
from ....core.scores import TileInputs
from ....core.softmax import EMPTY_ROW
from ...gpu import auxiliary_arrays, score_tile
from ...gpu.auxiliary_arrays import AuxiliaryGmem, within_reach
from ...gpu.launch import launch
from ...gpu.ptx.sums_of_rows import partial_sums, row_sums
from ...gpu.score_tile import RegisterTile
from .. import tiling
from ..common.auxiliary_inputs import AuxiliaryInputs, Place, RowFragments, load_tile, load_vector
from ..common.kernel import Kernel, Steps, kv_limits, kv_tile_range, longest_first
from ..common.smem_tiles import Copy, Stream, widths
from ..common.softmax import no_sums, per_row
from ..common.tiles import TileSizes
from ..tiling import TangentSmem

COLUMNS = 64  # of dO that are finished at a time: O takes registers next to the sums


class TangentArrays(NamedTuple):
    """Arrays in device memory that the kernel reads; R is T padded so that no tile reaches past."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dq: Any  # of the shape of q, as the next two of k and v
    dk: Any
    dv: Any
    o: Any  # [B, T, N, Hv]
    lse: Any  # f32[B, N, R], base 2
    q_offset: Any  # int32[B], where problem.traced_offset
    q_lengths: Any  # int32[B], or None
    bounds: Any  # int32[B, Q blocks, 2], where arrays decide which keys are read
    # BlockLists.in_one of Q tiles, in place of `bounds`; if problem.is_listed
    lists: BlockLists | None
    aux: AuxiliaryGmem
    moved: AuxiliaryGmem  # tangents of what is in `aux`


class TangentOut(NamedTuple):
    """Results in device memory; R is T rounded up to whole tiles."""

    do: Any  # [B, T, N, Hv]
    dlse: Any  # f32[B, N, R]


class Rows(NamedTuple):
    """Sums over the KV blocks so far."""

    t: Any  # f32[rows, Hv]
    mu: Any  # f32[rows], see common.softmax.row_sums


class TangentCta(NamedTuple):
    """State of one CTA and its Q tile."""

    gmem: TangentArrays
    out: TangentOut
    smem: TangentSmem
    batch: Any
    head: Any
    block: Any
    position: Any  # of the first query
    kv_length: Any  # keys there are
    steps: Any = None  # through blocks of keys
    stream: Any = None  # of their tiles
    lse: Any = None  # f32[rows]
    fragments: RowFragments = RowFragments()
    moved: RowFragments = RowFragments()


@dataclasses.dataclass(frozen=True)
class TangentKernel(Kernel):
    """One launch of the kernel; its methods are the phases of a CTA.

    Attributes:
        problem: what is computed.
        tile: tile sizes.
        moves: names of the operands besides q, k and v that have tangents.
        interpret: run under the interpreter.
    """

    problem: Problem
    tile: TileSizes
    moves: frozenset[str]
    interpret: bool

    @property
    def inputs(self) -> AuxiliaryInputs:
        """Loader of what score modifiers read; rows are queries."""
        return AuxiliaryInputs(self.problem, 0, self.interpret)

    @property
    def moving(self) -> AuxiliaryInputs:
        """Loader of the tangents of that."""
        problem = auxiliary_arrays.of_tangents(self.problem, self.moves)
        return AuxiliaryInputs(problem, 0, self.interpret)

    def __call__(self, gmem: TangentArrays, out: TangentOut, smem: TangentSmem):
        cta = self.place(gmem, out, smem)
        cta = cta._replace(steps=self.steps(cta))
        q_length = self.problem.q_len if gmem.q_lengths is None else gmem.q_lengths[cta.batch]
        of_head = lambda array: array.at[cta.batch, :, cta.head]
        first = cta.block * self.tile.rows
        own = (
            Copy(of_head(gmem.q), smem.q, first, q_length),
            Copy(of_head(gmem.dq), smem.dq, first, q_length),
        )
        stream = Stream(self.copies, ("k", "v"), 1, functools.partial(self.load, cta))
        self.copies.start(*own)
        stream.start(0, "k")
        self.copies.arrived(*own, pending=1)
        own_rows, place = (
            (cta.batch, cta.head, pl.ds(first, self.tile.rows)),
            Place.of(cta, self.tile, 0),
        )
        cta = cta._replace(
            stream=stream,
            lse=load_vector(gmem.lse.at[own_rows], 0),
            fragments=self.inputs.row_fragments(gmem.aux, place),
            moved=self.moving.row_fragments(gmem.moved, place),
        )
        zeros = self.matmuls.zeros(self.tile.rows, widths(self.problem)[1])
        rows = Rows(zeros, no_sums(self.tile.rows, self.interpret))
        step = functools.partial(self.step, cta)
        rows = cta.steps.fold(step, rows, hides_end=not self.interpret)
        stream.end()
        self.finish(cta, rows)

    def place(self, gmem: TangentArrays, out: TangentOut, smem: TangentSmem) -> TangentCta:
        """Returns where this CTA is: batch entry, head, Q tile and number of keys."""
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "q"))
        block = longest_first(self.problem, self.tile.rows, block)
        offset = self.problem.spec.q_offset if gmem.q_offset is None else gmem.q_offset[batch]
        lengths = gmem.aux.kv_lengths
        position = block * self.tile.rows + offset
        length = self.problem.kv_len if lengths is None else lengths[batch]
        return TangentCta(gmem, out, smem, batch, head, block, position, length)

    def steps(self, cta: TangentCta) -> Steps:
        """Returns the steps of the CTA's loop over KV blocks."""
        gmem = cta.gmem
        if gmem.lists is not None:
            return Steps.of_list(self.problem, gmem.lists, (cta.batch, cta.head, cta.block))
        coordinates, tile = (cta.batch, cta.block), (self.tile.rows, self.tile.columns)
        traced = None if gmem.aux.kv_lengths is None else cta.kv_length
        return Steps.of(
            kv_tile_range(self.problem, coordinates, cta.position, tile, gmem.bounds, traced)
        )

    def load(self, cta: TangentCta, name: str, n, slot) -> tuple[Copy, Copy]:
        """Returns the copies of the K and dK, or V and dV tiles of the n-th step."""
        del slot
        step, kv_head = cta.steps[n], lax.div(cta.head, jnp.int32(self.problem.group))
        first, limit = step.block * self.tile.columns, step.limit(cta.kv_length)
        source = lambda name: getattr(cta.gmem, name).at[cta.batch, :, kv_head]
        copy = lambda name: Copy(source(name), getattr(cta.smem, name), first, limit)
        return copy(name), copy(f"d{name}")

    def step(self, cta: TangentCta, n, rows: Rows, *, masked: bool) -> Rows:
        """Adds one KV block."""
        block, smem = cta.steps[n].block, cta.smem
        place = Place.of(cta, self.tile, block)
        inputs = self.inputs.read(cta.fragments, cta.gmem.aux, place, ids=masked)
        moved = self.moving.read(cta.moved, cta.gmem.moved, place)
        zeros, add = self.matmuls.zeros(*place.shape), self.matmuls.add
        cta.stream.wait(n, "k")
        cta.stream.start(n, "v")
        s = add(zeros, smem.q, smem.k, transposed=True)  # (1)
        ds = add(add(zeros, smem.dq, smem.k, transposed=True), smem.q, smem.dk, transposed=True)
        p, g = self.weigh(cta, block, (inputs, moved), (s, ds), masked=masked)
        cta.stream.wait(n, "v")
        cta.stream.start(n + 1, "k")
        mu = rows.mu + partial_sums(g, self.interpret)
        p, g = (self.narrowed(cta, block, inputs, x) for x in (p, g))
        return Rows(add(add(rows.t, g, smem.v), p, smem.dv), mu)  # (2)

    def weigh(self, cta: TangentCta, block, read, tiles, *, masked: bool):
        """Computes P and G of one tile, f32 before dropout."""
        (inputs, moved), (s, ds) = read, tiles
        problem = self.problem if masked else self.problem.of_whole_tiles
        tile, limits = self.score_tile(cta, block), Limits()
        if masked:
            limits = kv_limits(problem, tile, cta.gmem.aux.kv_lengths, cta.kv_length)
        w = score_tile.weights(problem, tile, s, cta.lse, inputs, limits)
        tile = scores.placed(tile, inputs)
        return w.p, score_tile.pushed(problem, tile, (w.p, w.pull), ds, moved)

    def narrowed(self, cta: TangentCta, block, inputs: TileInputs, x):
        """Returns x in 16 bits, 0 where dropout drops a weight."""
        if self.problem.spec.dropout_rate:
            kept = scores.kept(self.problem.spec, self.score_tile(cta, block), inputs)
            x = jnp.where(kept, x, 0.0)
        return x.astype(self.problem.dtype)

    def score_tile(self, cta: TangentCta, block) -> RegisterTile:
        """Returns the RegisterTile of a KV block's scores: their positions and shape."""
        start, shape = block * self.tile.columns, (self.tile.rows, self.tile.columns)
        return RegisterTile(cta.position, start, shape, interpret=self.interpret)

    def finish(self, cta: TangentCta, rows: Rows):
        """Writes dO and dlse."""
        first, width = cta.block * self.tile.rows, rows.t.shape[1]
        mu, gain = row_sums(rows.mu, self.interpret), dropout.gain(self.problem.spec.dropout_rate)
        o = cta.gmem.o.at[cta.batch, :, cta.head]
        for start in range(0, width, COLUMNS):
            t = rows.t[:, start : start + COLUMNS] * gain
            place = Place(cta.batch, cta.head, first, start, t.shape)
            of_o = load_tile(o, place, 0, self.interpret).astype(jnp.float32)
            self.matmuls.put(t - per_row(mu, t.shape) * of_o, cta.smem.q, start)
        self.copies.sync()
        target = cta.out.do.at[cta.batch, :, cta.head]
        self.copies.store(cta.smem.q, target, first, self.problem.q_len)
        cta.out.dlse[cta.batch, cta.head, pl.ds(first, self.tile.rows)] = mu


def tangents(
    problem: Problem,
    tile: TileSizes,
    operands: Operands,
    operand_tangents: Operands,
    forward_out: Outputs,
    interpret: bool,
) -> Tangents:
    """Launches the kernel.

    Args:
        problem: description of the operands.
        tile: tile sizes.
        operands: q, k and v are 0 where segment ids mark padding; head dims are multiples of 8.
        operand_tangents: tangents of the operands, likewise.
        forward_out: o, lse_log2 and shift of the forward; o has the head dim of v.
        interpret: run under the interpreter.
    """
    moves = auxiliary_arrays.moves_of(operand_tangents)
    kernel = TangentKernel(problem, tile, moves, interpret)
    blocks = pl.cdiv(problem.q_len, tile.rows)
    rows = blocks * tile.rows
    shape = (problem.batch, rows if interpret else problem.q_len, problem.q_heads)
    out = TangentOut(
        do=jax.ShapeDtypeStruct((*shape, problem.v_head_dim), problem.dtype),
        dlse=jax.ShapeDtypeStruct((problem.batch, problem.q_heads, rows), jnp.float32),
    )
    mask, heads = problem.spec.mask, {"head": problem.q_heads}
    of_q = {"q": blocks}
    by_length = mask.right is not None and mask.left is None  # see forward.kernel.grid
    run = launch(
        kernel,
        out=(out,),
        scratch=(tiling.tangent_layout(problem, tile),),
        grid={"batch": problem.batch} | (of_q | heads if by_length else heads | of_q),
        threads=1,
        name="flash_pallas_portable_tangents",
        interpret=interpret,
    )
    (results,) = run(_arrays(kernel, operands, operand_tangents, forward_out))
    queries = slice(problem.q_len)
    return Tangents(None, None, None, results.do[:, queries], results.dlse[:, :, queries])


def _arrays(
    kernel: TangentKernel, operands: Operands, operand_tangents: Operands, forward_out: Outputs
):
    problem, sizes = kernel.problem, (kernel.tile.rows, kernel.tile.columns)
    listed, reach = problem.is_listed, within_reach(problem.q_len)
    dynamic = problem.is_dynamic and not listed
    aux = kernel.inputs.arrays(operands)
    if forward_out.shift is not None:
        shift = pad_axis(forward_out.shift, 2, reach)
        aux = auxiliary_arrays.with_shift(aux, shift, problem.kv_heads)
    return TangentArrays(
        *operands[:3],
        *operand_tangents[:3],
        o=forward_out.o,
        lse=pad_axis(forward_out.lse_log2, 2, reach, EMPTY_ROW),
        q_offset=operands.q_offset,
        q_lengths=operands.q_lengths,
        bounds=bounds.kv_bounds(problem, operands, *sizes) if dynamic else None,
        lists=block_lists.of_queries(problem, operands, sizes).in_one if listed else None,
        aux=aux,
        moved=kernel.moving.arrays(auxiliary_arrays.only(operand_tangents, kernel.moves)),
    )
