"""Sums of dS over keys, one for every query of a head, or over queries, one for every key.

A CTA owns queries and loops over the keys that they see; or it owns keys, and scores are
transposed. One kernel serves both: what a CTA owns are rows, what streams by are columns, and a
thread adds up its own columns of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .....core import bounds
from .....core.mask import Limits
from .....core.problem import Operands, Problem
from ....gpu.launch import float32, launch
from ....gpu.score_tile import RegisterTile
from ... import tiling
from ...common import softmax
from ...common.auxiliary_inputs import AuxiliaryInputs, Place, load_vector
from ...common.smem_tiles import Copy, Stream
from ...common.tile_range import Steps, key_blocks, query_blocks
from ...tiling import LinesSmem, ScoreLines
from ..arrays import BackwardArrays
from .loads import Given, Pairs, Terms


class LineCta(NamedTuple):
    """One CTA and its rows."""

    gmem: BackwardArrays
    smem: LinesSmem
    batch: Any
    head: Any
    block: Any
    steps: Steps
    passing: Any = None
    held: Any = None


@dataclasses.dataclass(frozen=True)
class LineSums(Terms):
    """One launch; the methods are the phases of a CTA.

    Attributes:
        q_axis: 0: rows are queries; 1: rows are keys.
    """

    problem: Problem
    names: tuple[Any, ...]
    q_axis: int
    tile: ScoreLines
    interpret: bool

    @property
    def inputs(self) -> AuxiliaryInputs:
        """Reader of the inputs of score modifiers."""
        return AuxiliaryInputs(self.problem, self.q_axis, self.interpret)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a tile of scores: (rows, columns)."""
        return self.tile.rows, self.tile.columns

    def __call__(self, gmem: BackwardArrays, *refs):
        *out, smem = refs
        cta = self.place(gmem, smem)
        own = self.own(cta)
        names, load = ("first", "second"), functools.partial(self.load, cta)
        stream = Stream(self.copies, names, self.tile.slots, load)
        passing = Pairs(stream, names[:1], names[1:])
        self.copies.start(*own)
        passing.prologue()
        held = self.inputs.hold(gmem.side, self.at(cta, 0)), self.vectors(cta, 0)
        self.copies.arrived(*own, pending=len(passing.groups))
        cta = cta._replace(passing=passing, held=held)
        start = tuple(softmax.none(self.tile.rows, self.interpret) for _ in self.names)
        step = functools.partial(self.step, cta)
        sums = cta.steps.fold(step, start, hides_end=not self.interpret)
        stream.end()
        rows = pl.ds(cta.block * self.tile.rows, self.tile.rows)
        for ref, total in zip(out, sums, strict=True):
            ref[cta.batch, cta.head, rows] = softmax.joined(total, self.interpret)

    def place(self, gmem: BackwardArrays, smem: LinesSmem) -> LineCta:
        """Locates this CTA and the steps that it goes through."""
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "row"))
        offset = gmem.offset(self.problem, batch)
        if self.q_axis:
            at, first = (batch, block), block * self.tile.rows
            tile = self.tile.columns, self.tile.rows
            blocks = query_blocks(self.problem, at, first - offset, tile, gmem.bounds)
        else:
            if self.problem.spec.mask.right is not None:  # the longest rows first
                block = pl.cdiv(self.problem.q_len, self.tile.rows) - 1 - block
            at, first = (batch, block), block * self.tile.rows
            lengths = gmem.side.kv_lengths
            length = None if lengths is None else lengths[batch]
            blocks = key_blocks(self.problem, at, first + offset, self.shape, gmem.bounds, length)
        return LineCta(gmem, smem, batch, head, block, Steps.of(blocks))

    def sources(self, cta: LineCta):
        """Returns [(Q, dO, queries), (K, V, keys)] of the head; what a CTA owns comes first."""
        kv_head = lax.div(cta.head, jnp.int32(self.problem.group))
        of = lambda array, head: array.at[cta.batch, :, head]
        gmem = cta.gmem
        queries = of(gmem.q, cta.head), of(gmem.do, cta.head), gmem.q_length
        keys = of(gmem.k, kv_head), of(gmem.v, kv_head), gmem.kv_length
        both = (keys, queries) if self.q_axis else (queries, keys)
        return [(*arrays, length(self.problem, cta.batch)) for *arrays, length in both]

    def own(self, cta: LineCta) -> tuple[Copy, Copy]:
        """Returns the copies of the two tiles of rows that the CTA owns."""
        (first, second, limit), _ = self.sources(cta)
        row = cta.block * self.tile.rows
        return Copy(first, cta.smem.first, row, limit), Copy(second, cta.smem.second, row, limit)

    def load(self, cta: LineCta, name: str, n, slot) -> tuple[Copy]:
        """Returns the copy of one of the n-th step's two tiles of columns."""
        step, (_, (first, second, length)) = cta.steps[n], self.sources(cta)
        limit = jnp.where(step.exists, jnp.int32(length), jnp.int32(0))
        source = first if name == "first" else second
        tile = getattr(cta.smem, f"passing_{name}").at[slot]
        return (Copy(source, tile, step.block * self.tile.columns, limit),)

    def at(self, cta: LineCta, block) -> Place:
        """Returns the place of the tile of scores of a block of columns."""
        first = cta.block * self.tile.rows, block * self.tile.columns
        return Place(cta.batch, cta.head, *first, self.shape)

    def vectors(self, cta: LineCta, block):
        """Loads lse and delta of the queries of a tile."""
        place = self.at(cta, block)
        own = cta.batch, cta.head, place.columns if self.q_axis else place.rows
        return tuple(load_vector(x.at[own], self.q_axis) for x in (cta.gmem.lse, cta.gmem.delta))

    def step(self, cta: LineCta, n, sums, *, masked: bool):
        """Returns the sums with one tile's share added."""
        block, smem, passing = cta.steps[n].block, cta.smem, cta.passing
        place, slot = self.at(cta, block), passing.stream.slot(n)
        held, of_rows = cta.held
        inputs = self.inputs.read(held, cta.gmem.side, place, ids=masked)
        lse, delta = self.vectors(cta, block) if self.q_axis else of_rows
        zeros = self.products.zeros(*self.shape)
        passing.begin(n)
        s = self.products.add(zeros, smem.first, smem.passing_first.at[slot], transposed=True)
        passing.first_read(n)
        dp = self.products.add(zeros, smem.second, smem.passing_second.at[slot], transposed=True)
        passing.second_read(n)
        where = self.score_tile(cta, place)
        limits = self.limits(cta, where) if masked else Limits()
        found = self.terms(where, Given(s, dp, lse, delta), inputs, limits)
        return tuple(a + softmax.parts(x, self.interpret) for a, x in zip(sums, found, strict=True))

    def score_tile(self, cta: LineCta, place: Place) -> RegisterTile:
        """Returns the positions of a tile of scores."""
        starts = (place.row_start, place.column_start)[:: -1 if self.q_axis else 1]
        q_start = starts[0] + cta.gmem.offset(self.problem, cta.batch)
        return RegisterTile(q_start, starts[1], place.shape, self.q_axis, self.interpret)

    def limits(self, cta: LineCta, where: RegisterTile) -> Limits:
        """Returns what positions hide of a tile.

        Keys that do not exist need no limit where they are rows: their sums are dropped.
        """
        kv_len = None
        ragged = self.problem.kv_len % self.tile.columns or cta.gmem.side.kv_lengths is not None
        if not self.q_axis and ragged:
            kv_len = cta.gmem.kv_length(self.problem, cta.batch)
        return where.limits(self.problem.spec.mask, kv_len)


def line_sums(
    problem: Problem,
    axes: str,
    names,
    tile: ScoreLines,
    operands: Operands,
    arrays,
    interpret: bool,
):
    """Launches the kernel; returns f32[B, N, T or S up to whole tiles] for each name.

    Args:
        problem: with the head dims that run.
        axes: "rows" or "columns" of mosaic.score_grads.
        names: names as of `launch` in mosaic.score_grads.
        tile: sizes.
        operands: of the call.
        arrays: BackwardArrays.
        interpret: run by the interpreter.
    """
    q_axis = int(axes == "columns")
    kernel = LineSums(problem, names, q_axis, tile, interpret)
    blocks = pl.cdiv(problem.kv_len if q_axis else problem.q_len, tile.rows)
    run = launch(
        kernel,
        out=(float32((problem.batch, problem.q_heads, blocks * tile.rows)),) * len(names),
        scratch=(tiling.score_lines(problem, tile),),
        grid={"batch": problem.batch, "head": problem.q_heads, "row": blocks},
        threads=1,
        name=f"flash_pallas_portable_scores_{axes}",
        interpret=interpret,
    )
    given = arrays.with_side(kernel.inputs, operands)
    if bounds.is_dynamic(problem):
        sizes = (tile.columns, tile.rows) if q_axis else (tile.rows, tile.columns)
        find = bounds.q_bounds if q_axis else bounds.kv_bounds
        given = given._replace(bounds=find(problem, operands, *sizes))
    found = run(given)
    if q_axis and operands.kv_lengths is not None:
        key = jnp.arange(found[0].shape[2])[None, None]
        inside = key < operands.kv_lengths[:, None, None]
        found = tuple(jnp.where(inside, x, jnp.zeros_like(x)) for x in found)
    return found
