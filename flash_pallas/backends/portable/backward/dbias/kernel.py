"""Gradients of score modifiers: of the bias, of ALiBi's slopes, of what score_mod captured.

All are sums of the gradient dS of the scores, which is as large as the scores. So S and dP are
computed once more, tile by tile, and summed in registers; dS is never stored. The axes of the sum
decide what a CTA owns:

    tile     a tile of the bias, for all batch entries and heads that share it: TileSums
    columns  some keys of one head, for all queries: a bias that is the same for every query
    rows     some queries of one head, for all keys: everything else; both are LineSums

No sum depends on the order in which CTAs run: the same bits in every run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .....core import block_lists
from .....core.integers import round_up
from .....core.mask import Limits
from .....core.problem import Operands, Problem
from .....core.scores import TileInputs, placed
from ....gpu import auxiliary_arrays, score_tile
from ....gpu.bias_tiles import (
    BiasTile,
    BiasTiles,
    Members,
    bias_place,
    divide,
    members_of,
    parts_of,
    sharing,
)
from ....gpu.launch import float32, launch, score_grads, term
from ....gpu.ptx import inline
from ....gpu.ptx.mma_sync import store_accumulator
from ....gpu.ptx.sums_of_rows import partial_sums, row_sums
from ....gpu.score_tile import RegisterTile
from ...common import softmax
from ...common.auxiliary_inputs import (
    AuxiliaryInputs,
    Place,
    RowFragments,
    load_tile,
    load_vector,
)
from ...common.kernel import Kernel, Steps, kv_limits, kv_tile_range, longest_first, q_tile_range
from ...common.smem_tiles import Copies, Copy, Stream, Warpgroups, widths
from ..base import BackwardArrays
from ..tiles import (
    ENOUGH_BLOCKS,
    PIECE,
    LinesSmem,
    ScoreBlocks,
    ScoreLines,
    ScoreTiles,
    TilesSmem,
    score_lines,
    score_tiles,
)


class Pairs(NamedTuple):
    """Order of the copies of a step's tiles: each of its two matmuls reads one pair.

    With two slots the tiles of the next step have all of this step to arrive, and warps
    synchronize once a step. With one slot a pair is copied while the other one is worked on, and
    warps synchronize three times. In turns both pairs have one place, and copies are waited for.

    Attributes:
        stream: stream of all tiles.
        first: names of the first pair, which S is computed from.
        second: names of the second pair, which dP is computed from.
        many_steps: there may be more than one step.
        turns: see ScoreTiles.
    """

    stream: Stream
    first: tuple[str, ...]
    second: tuple[str, ...]
    many_steps: bool = True
    turns: bool = False

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the tiles that are copied as one group, in the sense of Copies.arrived."""
        if self.turns:
            return (self.first,)
        return (self.stream.names,) if self.stream.slots == 2 else (self.first, self.second)

    def prologue(self):
        """Starts the copies of step 0, before the loop."""
        for names in self.groups:
            self.stream.start(0, *names)

    def _start_next(self, n, *names: str):
        if self.many_steps:
            self.stream.start(n + 1, *names)

    def begin(self, n):
        """Waits until the first pair of the n-th step has arrived; with two slots both pairs."""
        if self.stream.slots == 2:
            self.stream.wait(n)
            self._start_next(n)
        else:
            self.stream.wait(n, *self.first, pending=0 if self.turns else 1)

    def first_read(self, n):
        """Marks the first pair as read, and waits until the second pair has arrived."""
        if self.turns:
            self.stream.copies.sync()
            self.stream.start(n, *self.second)
        if self.stream.slots == 1:
            self.stream.wait(n, *self.second)
            if not self.turns:
                self._start_next(n, *self.first)

    def second_read(self, n):
        """Marks the second pair as read."""
        if self.stream.slots == 1 and self.many_steps:
            self.stream.copies.sync()
            self._start_next(n, *(self.first if self.turns else self.second))


class DsInputs(NamedTuple):
    """Inputs of dS, besides those of score modifiers."""

    s: Any  # f32 tile, q @ k^T
    dp: Any  # f32 tile, dO @ v^T
    lse: Any  # f32 of each query, base 2
    delta: Any  # f32 of each query


class DsSums(Kernel):
    """Base class of the kernels that sum dS.

    Attributes:
        problem: what is computed.
        names: names as of `launch` in gpu.launch.score_grads.
    """

    problem: Problem
    names: tuple[Any, ...]

    def terms(
        self, tile: RegisterTile, ds_inputs: DsInputs, inputs: TileInputs, limits: Limits | None
    ):
        """Computes an f32 tile for each name: what each element adds to its gradient.

        Args:
            tile: position of the tile.
            ds_inputs: inputs of dS.
            inputs: inputs of score modifiers.
            limits: what positions leave visible of the tile; None if nothing hides any of it.
        """
        problem = self.problem.of_whole_tiles if limits is None else self.problem
        limits = limits or Limits()
        w = score_tile.weights(
            problem, tile, ds_inputs.s, ds_inputs.lse, inputs, limits, marks=True
        )
        centred = score_tile.centred(
            self.problem, w.kept, ds_inputs.dp, tile.per_q(ds_inputs.delta)
        )
        dz, dparams = w.pull(w.p * centred)
        tile = placed(tile, inputs)
        return tuple(term(name, tile, dz, dparams) for name in self.names)


# --- sums of dS over keys, one for every query of a head, or over queries, one for every key -----
# A CTA owns queries and loops over the keys that they see; or it owns keys, and scores are
# transposed. One kernel serves both: what a CTA owns are rows, what streams by are columns, and a
# thread adds up its own columns of a row.


class LineCta(NamedTuple):
    """One CTA and its rows."""

    gmem: BackwardArrays
    smem: LinesSmem
    batch: Any
    head: Any
    block: Any
    steps: Steps
    pairs: Any = None
    fragments: Any = None


@dataclasses.dataclass(frozen=True)
class LineSums(DsSums):
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
        cta = self.place(gmem, smem.whole)
        own = () if self.tile.turns else self.own(cta)
        names, load = ("first", "second"), functools.partial(self.load, cta)
        stream = Stream(self.copies, names, self.tile.slots, load)
        pairs = Pairs(stream, names[:1], names[1:], turns=self.tile.turns)
        if own:
            self.copies.start(*own)
        pairs.prologue()
        place = Place.of(cta, self.tile, 0)
        fragments = self.inputs.row_fragments(gmem.aux, place), self.vectors(cta, place)
        if own:
            self.copies.arrived(*own, pending=len(pairs.groups))
        cta = cta._replace(pairs=pairs, fragments=fragments)
        start = tuple(softmax.no_sums(self.tile.rows, self.interpret) for _ in self.names)
        step = functools.partial(self.step, cta)
        sums = cta.steps.fold(step, start, hides_end=not self.interpret)
        stream.end()
        rows = pl.ds(cta.block * self.tile.rows, self.tile.rows)
        for ref, total in zip(out, sums, strict=True):
            ref[cta.batch, cta.head, rows] = row_sums(total, self.interpret)

    def place(self, gmem: BackwardArrays, smem: LinesSmem) -> LineCta:
        """Locates this CTA and the steps that it goes through."""
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "row"))
        offset = gmem.offset(self.problem, batch)
        if not self.q_axis:
            block = longest_first(self.problem, self.tile.rows, block)
        if gmem.lists is not None:
            steps = Steps.of_list(self.problem, gmem.lists, (batch, head, block))
            return LineCta(gmem, smem, batch, head, block, steps)
        if self.q_axis:
            coordinates, first = (batch, block), block * self.tile.rows
            tile = self.tile.columns, self.tile.rows
            blocks = q_tile_range(self.problem, coordinates, first - offset, tile, gmem.bounds)
        else:
            coordinates, first = (batch, block), block * self.tile.rows
            lengths = gmem.aux.kv_lengths
            length = None if lengths is None else lengths[batch]
            blocks = kv_tile_range(
                self.problem, coordinates, first + offset, self.shape, gmem.bounds, length
            )
        return LineCta(gmem, smem, batch, head, block, Steps.of(blocks))

    def sources(self, cta: LineCta):
        """Returns [(Q, dO, queries), (K, V, keys)] of the head; what a CTA owns comes first."""
        kv_head = lax.div(cta.head, jnp.int32(self.problem.group))
        of_head = lambda array, head: array.at[cta.batch, :, head]
        gmem = cta.gmem
        queries = of_head(gmem.q, cta.head), of_head(gmem.do, cta.head), gmem.q_length
        keys = of_head(gmem.k, kv_head), of_head(gmem.v, kv_head), gmem.kv_length
        both = (keys, queries) if self.q_axis else (queries, keys)
        return [(*arrays, length(self.problem, cta.batch)) for *arrays, length in both]

    def own(self, cta: LineCta) -> tuple[Copy, Copy]:
        """Returns the copies of the two tiles of rows that the CTA owns."""
        (first, second, limit), _ = self.sources(cta)
        row = cta.block * self.tile.rows
        return Copy(first, cta.smem.first, row, limit), Copy(second, cta.smem.second, row, limit)

    def load(self, cta: LineCta, name: str, n, slot) -> tuple[Copy, ...]:
        """Returns the copy of one of the n-th step's two tiles of columns; in turns of rows too."""
        step, (_, (first, second, length)) = cta.steps[n], self.sources(cta)
        source = first if name == "first" else second
        tile = getattr(cta.smem, f"streamed_{name}").at[slot]
        copy = Copy(source, tile, step.block * self.tile.columns, step.limit(length))
        if not self.tile.turns:
            return (copy,)
        own = self.own(cta)[("first", "second").index(name)]
        return own._replace(limit=step.limit(own.limit)), copy

    def vectors(self, cta: LineCta, place: Place):
        """Loads lse and delta of the queries of a tile."""
        own = cta.batch, cta.head, place.columns if self.q_axis else place.rows
        return tuple(load_vector(x.at[own], self.q_axis) for x in (cta.gmem.lse, cta.gmem.delta))

    def step(self, cta: LineCta, n, sums, *, masked: bool):
        """Returns the sums with one tile's share added."""
        block, smem, pairs = cta.steps[n].block, cta.smem, cta.pairs
        place, slot = Place.of(cta, self.tile, block), pairs.stream.slot(n)
        fragments, row_vectors = cta.fragments
        inputs = self.inputs.read(fragments, cta.gmem.aux, place, ids=masked)
        lse, delta = self.vectors(cta, place) if self.q_axis else row_vectors
        width, v_width = widths(self.problem)
        product = functools.partial(
            self.matmuls.add, self.matmuls.zeros(*self.shape), transposed=True
        )
        pairs.begin(n)
        s = product(smem.first, smem.streamed_first.at[slot], summed=width)
        pairs.first_read(n)
        dp = product(smem.second, smem.streamed_second.at[slot], summed=v_width)
        pairs.second_read(n)
        tile = self.score_tile(cta, place)
        limits = self.limits(cta, tile) if masked else None
        terms = self.terms(tile, DsInputs(s, dp, lse, delta), inputs, limits)
        return tuple(
            total + partial_sums(x, self.interpret) for total, x in zip(sums, terms, strict=True)
        )

    def score_tile(self, cta: LineCta, place: Place) -> RegisterTile:
        """Returns the positions of a tile of scores."""
        starts = (place.row_start, place.column_start)[:: -1 if self.q_axis else 1]
        q_start = starts[0] + cta.gmem.offset(self.problem, cta.batch)
        return RegisterTile(q_start, starts[1], place.shape, self.q_axis, interpret=self.interpret)

    def limits(self, cta: LineCta, tile: RegisterTile) -> Limits:
        """Returns what positions hide of a tile.

        Keys that do not exist need no limit where they are rows: their sums are dropped.
        """
        if self.q_axis:
            return tile.limits(self.problem.spec.mask, None)
        length = cta.gmem.kv_length(self.problem, cta.batch)
        return kv_limits(self.problem, tile, cta.gmem.aux.kv_lengths, length)


def line_sums(
    problem: Problem,
    axes: str,
    names,
    tile: ScoreLines,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the kernel; returns f32[B, N, T or S up to whole tiles] for each name.

    Args:
        problem: with the head dims that run.
        axes: "rows" or "columns" of gpu.launch.score_grads.
        names: names as of `launch` in gpu.launch.score_grads.
        tile: sizes.
        operands: of the call.
        arrays: those that the kernel reads, without `aux`.
        interpret: run by the interpreter.
    """
    q_axis = int(axes == "columns")
    kernel = LineSums(problem, names, q_axis, tile, interpret)
    blocks = pl.cdiv(problem.kv_len if q_axis else problem.q_len, tile.rows)
    run = launch(
        kernel,
        out=(float32((problem.batch, problem.q_heads, blocks * tile.rows)),) * len(names),
        scratch=(score_lines(problem, tile),),
        grid={"batch": problem.batch, "head": problem.q_heads, "row": blocks},
        threads=1,
        name=f"flash_pallas_portable_scores_{axes}",
        interpret=interpret,
    )
    sums = run(arrays.of_kernel(kernel.inputs, operands, tile))
    if q_axis and operands.kv_lengths is not None:
        key = jnp.arange(sums[0].shape[2])[None, None]
        inside = key < operands.kv_lengths[:, None, None]
        sums = tuple(jnp.where(inside, x, jnp.zeros_like(x)) for x in sums)
    return sums


# --- sums of dS over batch entries and heads: the gradient of a bias that is [.., T, S] ----------
# A CTA owns a tile of the bias and loops over the scores that it was added to, the tiles of all its
# members (gpu/bias_tiles.py). A step has two matmuls, and every operand of both is loaded anew:
#
#     S = Q K^T, dP = dO V^T, dS = P (dP - delta), sums += dS
#
# So copies are the bottleneck, and tiles are as large as the registers for the sums allow. Each
# warpgroup has all rows of some columns, and holds S and dP of PIECE of these columns at a time.


class TileCta(NamedTuple):
    """One CTA and its tile, as one of its warpgroups sees them."""

    gmem: BackwardArrays
    bias: Any  # [T, S], of its entry and head
    smem: TilesSmem
    warpgroups: Warpgroups
    own: BiasTile
    members: Members
    pairs: Any = None


@dataclasses.dataclass(frozen=True)
class TileSums(DsSums):
    """One launch; the methods are the phases of a CTA."""

    problem: Problem
    tile: ScoreTiles
    parts: int
    interpret: bool
    names = ("bias",)

    @property
    def inputs(self) -> AuxiliaryInputs:
        """Reader of the inputs of score modifiers, besides the bias."""
        problem = dataclasses.replace(
            self.problem,
            bias_shape=None,
            bias_dtype=None,
            features=self.problem.features - {"bias"},
        )
        return AuxiliaryInputs(problem, 0, self.interpret)

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return self.tile.rows, self.tile.columns

    @property
    def share(self) -> int:
        """Columns of a warpgroup."""
        return self.tile.columns // self.tile.warpgroups

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first, count) of the columns of a warpgroup that are in registers at one time."""
        size = PIECE if self.share % PIECE == 0 else self.share
        return [(first, size) for first in range(0, self.share, size)]

    def __call__(self, gmem: BackwardArrays, bias, out, smem: TilesSmem):
        cta = self.place(gmem, bias, smem.whole)
        copies = Copies(self.interpret, cta.warpgroups)
        many_steps = sharing(self.problem) > 1
        names, load = ("q", "k", "do", "v"), functools.partial(self.load, cta)
        stream = Stream(copies, names, self.tile.slots, load)
        pairs = Pairs(stream, names[:2], names[2:], many_steps, self.tile.turns)
        pairs.prologue()
        cta = cta._replace(pairs=pairs)
        kept = None
        if self.tile.keep_bias:
            kept = tuple(
                self.own_bias(cta, self.piece_place(cta, 0, 0, piece)) for piece in self.pieces
            )
        zeros = tuple(self.matmuls.zeros(self.tile.rows, size) for _, size in self.pieces)
        step = functools.partial(self.step, cta, kept)
        sums = lax.fori_loop(jnp.int32(0), cta.members.total, step, zeros)
        stream.end()
        target = out.at[divide(cta.own.part, self.problem.bias_shape[1])]  # [parts * Bb, N1]
        for piece, total in zip(self.pieces, sums, strict=True):
            place = self.piece_place(cta, 0, 0, piece)
            store_accumulator(total, target, (place.row_start, place.column_start), self.interpret)

    def place(self, gmem: BackwardArrays, bias, smem: TilesSmem) -> TileCta:
        """Locates this CTA, its tile of the bias and its members."""
        rank = lax.axis_index("wg") if self.tile.warpgroups > 1 else 0
        warpgroups = Warpgroups(self.interpret, self.tile.warpgroups, rank, smem.barrier)
        own = BiasTiles.of(self.problem, *self.size).at(lax.axis_index("tile"))
        members = members_of(self.problem, own, self.parts, self.size)
        if gmem.states is not None:  # a tile that no member sees needs no steps
            seen = gmem.states.per_bias[(*bias_place(self.problem, own), *self.block(own))]
            total = lax.select(seen > 0, members.total, jnp.int32(0))
            members = members._replace(total=total)
        return TileCta(gmem, bias.at[bias_place(self.problem, own)], smem, warpgroups, own, members)

    def load(self, cta: TileCta, name: str, n, slot) -> tuple[Copy]:
        """Returns the copy of a tile of the n-th step."""
        (batch, head), gmem = cta.members[n], cta.gmem
        exists = n < cta.members.total
        batch = jnp.where(exists, batch, jnp.int32(0))
        head = jnp.where(exists, head, jnp.int32(0))
        if gmem.states is not None:
            exists = exists & self.sees(cta, batch, head)
        if name in ("q", "do"):
            first, length = cta.own.q_block * self.tile.rows, gmem.q_length(self.problem, batch)
        else:
            head = lax.div(jnp.int32(head), jnp.int32(self.problem.group))
            first = cta.own.kv_block * self.tile.columns
            length = gmem.kv_length(self.problem, batch)
        limit = jnp.where(exists, jnp.int32(length), jnp.int32(0))
        source = getattr(gmem, name).at[batch, :, head]
        return (Copy(source, getattr(cta.smem, name).at[slot], first, limit),)

    def piece_place(self, cta: TileCta, batch, head, piece) -> Place:
        """Returns the place of a piece: some columns of this warpgroup's scores of a member."""
        first, size = piece
        column = cta.own.kv_block * self.tile.columns + cta.warpgroups.rank * self.share + first
        row = cta.own.q_block * self.tile.rows
        return Place(batch, head, row, column, (self.tile.rows, size))

    def own_bias(self, cta: TileCta, place: Place):
        """Loads the bias of a piece, in its dtype."""
        return load_tile(cta.bias, place, 0, self.interpret)

    def step(self, cta: TileCta, kept, n, sums):
        """Returns the sums with one member's share added."""
        gmem, smem, pairs = cta.gmem, cta.smem, cta.pairs
        batch, head = cta.members[n]
        place, slot = self.piece_place(cta, batch, head, self.pieces[0]), pairs.stream.slot(n)
        rows = batch, head, place.rows
        lse, delta = (load_vector(x.at[rows], 0) for x in (gmem.lse, gmem.delta))
        fragments = self.inputs.row_fragments(gmem.aux, place)
        pairs.begin(n)
        matmul, (width, v_width) = functools.partial(self.matmul, cta, slot), widths(self.problem)
        s: list[Any] = [None] * len(self.pieces)
        if self.tile.slots == 1:  # S of all pieces, before the next tiles overwrite Q and K
            s = [matmul(smem.q, smem.k, piece, width) for piece in self.pieces]
        pairs.first_read(n)
        new_sums = []
        for i, piece in enumerate(self.pieces):
            if self.tile.slots > 1:
                s[i] = matmul(smem.q, smem.k, piece, width)
            dp = matmul(smem.do, smem.v, piece, v_width)
            if i == len(self.pieces) - 1:
                pairs.second_read(n)
            # The compiler cannot hoist loads from a place that it does not know.
            place = self.piece_place(cta, batch, head, piece)
            unknown = inline.unknown(place.column_start, self.interpret)
            place = place._replace(column_start=unknown)
            inputs = self.bias_and(cta, fragments, place, None if kept is None else kept[i])
            ds_inputs = DsInputs(s[i], dp, lse, delta)
            new_sums.append(sums[i] + self.gradients(cta, place, ds_inputs, inputs))
        return tuple(new_sums)

    def matmul(self, cta: TileCta, slot, left, right, piece, width: int):
        """Computes all rows of one tile @ some columns of another, f32[rows, size].

        Sums are over `width`.
        """
        first, size = piece
        columns = right.at[slot, pl.ds(cta.warpgroups.rank * self.share + first, size)]
        zeros = self.matmuls.zeros(self.tile.rows, size)
        return self.matmuls.add(zeros, left.at[slot], columns, transposed=True, summed=width)

    def bias_and(self, cta: TileCta, fragments: RowFragments, place: Place, kept) -> TileInputs:
        """Returns the inputs of all score modifiers at a piece, the bias in f32."""
        inputs = self.inputs.read(fragments, cta.gmem.aux, place)
        # The kept bias stays in 16 bits: converted before the loop it takes twice the registers.
        bias = self.own_bias(cta, place) if kept is None else lax.optimization_barrier(kept)
        return inputs._replace(bias=bias.astype(jnp.float32))

    def gradients(self, cta: TileCta, place: Place, ds_inputs: DsInputs, inputs: TileInputs):
        """Computes dS of a piece."""
        start = place.row_start + cta.gmem.offset(self.problem, place.batch)
        tile = RegisterTile(start, place.column_start, place.shape, interpret=self.interpret)
        # Sums of keys that do not exist are dropped; those beyond a length are 0.
        lengths = cta.gmem.aux.kv_lengths
        length = None if lengths is None else lengths[place.batch]
        if cta.gmem.states is not None:
            length = jnp.int32(self.problem.kv_len if length is None else length)
            sees = self.sees(cta, place.batch, place.head)
            length = lax.select(sees, length, jnp.int32(0))
        limits = tile.limits(self.problem.spec.mask, length)
        (ds,) = self.terms(tile, ds_inputs, inputs, limits)
        return ds

    def block(self, own: BiasTile):
        """Returns (query block, KV block) of a problem's lists that a tile lies in."""
        block_q, block_kv = self.problem.spec.block_shape or self.size
        rows, columns = block_q // self.tile.rows, block_kv // self.tile.columns
        return lax.div(own.q_block, jnp.int32(rows)), lax.div(own.kv_block, jnp.int32(columns))

    def sees(self, cta: TileCta, batch, head):
        """Returns whether lists name the block of the CTA's tile for this entry and head."""
        states = cta.gmem.states.per_list
        of_list = auxiliary_arrays.entry(self.problem, states.shape, batch, head)
        return states[(*of_list, *self.block(cta.own))] > 0


class States(NamedTuple):
    """States of all blocks of a problem's lists, int32, 0 for those that nothing is seen of.

    Attributes:
        per_list: [Bb, N1, Q blocks, KV blocks].
        per_bias: the largest state over the entries and heads that share an entry and head of the
            bias, [entries, heads, Q blocks, KV blocks].
    """

    per_list: Any
    per_bias: Any

    @classmethod
    def of(cls, problem: Problem, operands: Operands, block_kv: int) -> States:
        """Returns the states of a problem with a bias and lists of blocks of `block_kv` keys."""
        blocks = pl.cdiv(problem.kv_len, block_kv)
        per_list = block_lists.states_of(operands.block_lists, blocks).astype(jnp.int32)
        entries, heads = problem.bias_shape[:2]
        per_head = jnp.repeat(per_list, problem.batch // per_list.shape[0], axis=0)
        per_head = jnp.repeat(per_head, problem.q_heads // per_list.shape[1], axis=1)
        sizes = entries, problem.batch // entries, heads, problem.q_heads // heads
        return cls(per_list, per_head.reshape(*sizes, *per_list.shape[2:]).max(axis=(1, 3)))


def tile_sums(
    problem: Problem, tile: ScoreTiles, operands: Operands, arrays: BackwardArrays, interpret: bool
):
    """Launches the kernel; returns ([parts * Bb, N1, T, S and more],).

    The dtype is that of the bias, or f32 if there are several parts.
    """
    tiles = BiasTiles.of(problem, tile.rows, tile.columns)
    parts = parts_of(problem, tiles.clusters, ENOUGH_BLOCKS)
    entries, heads = problem.bias_shape[:2]
    kernel = TileSums(problem, tile, parts, interpret)
    sizes = problem.q_len, round_up(problem.kv_len, 8)  # rows start at multiples of 16 bytes
    if interpret:
        sizes = tiles.rows * tile.rows, tiles.columns * tile.columns
    dtype = problem.bias_dtype if parts == 1 else jnp.float32
    run = launch(
        kernel,
        out=jax.ShapeDtypeStruct((parts * entries, heads, *sizes), dtype),
        scratch=(score_tiles(problem, tile, interpret),),
        grid={"tile": tiles.clusters * parts * entries * heads},
        threads=tile.warpgroups,
        name="flash_pallas_portable_scores_tile",
        interpret=interpret,
    )
    gmem = arrays.with_aux(AuxiliaryInputs(problem, 0, interpret), operands)
    if problem.spec.block_shape:
        states = States.of(problem, operands, problem.spec.block_shape[1])
        gmem = gmem._replace(states=states)
    return (run(gmem._replace(aux=gmem.aux._replace(bias=None)), gmem.aux.bias),)


def scores(
    problem: Problem,
    blocks: ScoreBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    wanted: frozenset[str],
    interpret: bool,
):
    """Computes gradients by name: those of core.problem.EXTRA_GRADS that are in `wanted`."""

    def launch(axes, names):
        if axes == "tile":
            return tile_sums(problem, blocks.tile, operands, arrays, interpret)
        return line_sums(problem, axes, names, blocks.lines, operands, arrays, interpret)

    return score_grads(problem, operands, wanted, launch)
