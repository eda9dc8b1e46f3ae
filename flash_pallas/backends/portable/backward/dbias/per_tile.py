"""Sums of dS over batch entries and heads: the gradient of a bias that is [.., T, S].

A CTA owns a tile of the bias and loops over the scores that it was added to, the tiles of all its
members (gpu/bias_tiles.py). A step has two products, and every operand of both is loaded anew:

    S = Q K^T, dP = dO V^T, dS = P (dP - delta), sums += dS

So copies are the bottleneck, and tiles are as large as the registers for the sums allow. Each
warpgroup has all rows of some columns, and holds S and dP of PIECE of these columns at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .....core.integers import round_up
from .....core.problem import Operands, Problem
from ....gpu import inline
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
from ....gpu.inline import at, coordinates, i32_constant, opaque, origin, splat
from ....gpu.launch import launch
from ....gpu.score_tile import RegisterTile
from ... import tiling
from ...common.auxiliary_inputs import AuxiliaryInputs, Place, load_tile, load_vector
from ...common.smem_tiles import Copies, Copy, Stream
from ...common.team import Team
from ...common.threads import where
from ...tiling import ENOUGH_BLOCKS, PIECE, ScoreTiles, TilesSmem
from ..arrays import BackwardArrays
from .loads import Given, Pairs, Terms


class TileCta(NamedTuple):
    """One CTA and its tile, as one of its warpgroups sees them."""

    gmem: BackwardArrays
    bias: Any  # [T, S], of its entry and head
    smem: TilesSmem
    team: Team
    own: BiasTile
    members: Members
    passing: Any = None


@dataclasses.dataclass(frozen=True)
class TileSums(Terms):
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
    def share(self) -> int:
        """Columns of a warpgroup."""
        return self.tile.columns // self.tile.warpgroups

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first, count) of the columns of a warpgroup that are in registers at one time."""
        size = PIECE if self.share % PIECE == 0 else self.share
        return [(first, size) for first in range(0, self.share, size)]

    def __call__(self, gmem: BackwardArrays, bias, out, smem: TilesSmem):
        cta = self.place(gmem, bias, smem)
        copies = Copies(self.interpret, cta.team)
        several = sharing(self.problem) > 1
        names, load = ("q", "k", "do", "v"), functools.partial(self.load, cta)
        stream = Stream(copies, names, self.tile.slots, load)
        passing = Pairs(stream, names[:2], names[2:], several)
        passing.prologue()
        cta = cta._replace(passing=passing)
        kept = None
        if self.tile.keep_bias:
            kept = tuple(self.own_bias(cta, self.at(cta, 0, 0, piece)) for piece in self.pieces)
        zeros = tuple(self.products.zeros(self.tile.rows, size) for _, size in self.pieces)
        step = functools.partial(self.step, cta, kept)
        sums = lax.fori_loop(jnp.int32(0), cta.members.total, step, zeros)
        stream.end()
        target = out.at[divide(cta.own.part, self.problem.bias_shape[1])]  # [parts * Bb, N1]
        for piece, total in zip(self.pieces, sums, strict=True):
            place = self.at(cta, 0, 0, piece)
            store(total, target, (place.row_start, place.column_start), self.interpret)

    def place(self, gmem: BackwardArrays, bias, smem: TilesSmem) -> TileCta:
        """Locates this CTA, its tile of the bias and its members."""
        rank = lax.axis_index("wg") if self.tile.warpgroups > 1 else 0
        team = Team(self.interpret, self.tile.warpgroups, rank, smem.met)
        size = self.tile.rows, self.tile.columns
        own = BiasTiles.of(self.problem, *size).at(lax.axis_index("tile"))
        members = members_of(self.problem, own, self.parts, size)
        return TileCta(gmem, bias.at[bias_place(self.problem, own)], smem, team, own, members)

    def load(self, cta: TileCta, name: str, n, slot) -> tuple[Copy]:
        """Returns the copy of a tile of the n-th step."""
        (batch, head), gmem = cta.members[n], cta.gmem
        exists = n < cta.members.total
        batch = jnp.where(exists, batch, jnp.int32(0))
        head = jnp.where(exists, head, jnp.int32(0))
        if name in ("q", "do"):
            first, length = cta.own.q_block * self.tile.rows, gmem.q_length(self.problem, batch)
        else:
            head = lax.div(jnp.int32(head), jnp.int32(self.problem.group))
            first = cta.own.kv_block * self.tile.columns
            length = gmem.kv_length(self.problem, batch)
        limit = jnp.where(exists, jnp.int32(length), jnp.int32(0))
        source = getattr(gmem, name).at[batch, :, head]
        return (Copy(source, getattr(cta.smem, name).at[slot], first, limit),)

    def at(self, cta: TileCta, batch, head, piece) -> Place:
        """Returns the place of a piece: some columns of this warpgroup's scores of a member."""
        first, size = piece
        column = cta.own.kv_block * self.tile.columns + cta.team.rank * self.share + first
        row = cta.own.q_block * self.tile.rows
        return Place(batch, head, row, column, (self.tile.rows, size))

    def own_bias(self, cta: TileCta, place: Place):
        """Loads the bias of a piece, in its dtype."""
        return load_tile(cta.bias, place, 0, self.interpret)

    def step(self, cta: TileCta, kept, n, sums):
        """Returns the sums with one member's share added."""
        gmem, smem, passing = cta.gmem, cta.smem, cta.passing
        batch, head = cta.members[n]
        place, slot = self.at(cta, batch, head, self.pieces[0]), passing.stream.slot(n)
        rows = batch, head, place.rows
        lse, delta = (load_vector(x.at[rows], 0) for x in (gmem.lse, gmem.delta))
        held = self.inputs.hold(gmem.side, place)
        passing.begin(n)
        product = functools.partial(self.product, cta, slot)
        s: list[Any] = [None] * len(self.pieces)
        if self.tile.slots == 1:  # all of them, as the next tiles take the place of these
            s = [product(smem.q, smem.k, piece) for piece in self.pieces]
        passing.first_read(n)
        found = []
        for i, piece in enumerate(self.pieces):
            if self.tile.slots > 1:
                s[i] = product(smem.q, smem.k, piece)
            dp = product(smem.do, smem.v, piece)
            if i == len(self.pieces) - 1:
                passing.second_read(n)
            # Of a place that the compiler does not know, a piece is read when its turn has come.
            place = self.at(cta, batch, head, piece)
            unknown = inline.unknown(place.column_start, self.interpret)
            place = place._replace(column_start=unknown)
            inputs = self.bias_and(cta, held, place, None if kept is None else kept[i])
            given = Given(s[i], dp, lse, delta)
            found.append(sums[i] + self.gradients(cta, place, given, inputs))
        return tuple(found)

    def product(self, cta: TileCta, slot, left, right, piece):
        """Computes all rows of one tile @ some columns of another, f32[rows, size]."""
        first, size = piece
        columns = right.at[slot, pl.ds(cta.team.rank * self.share + first, size)]
        zeros = self.products.zeros(self.tile.rows, size)
        return self.products.add(zeros, left.at[slot], columns, transposed=True)

    def bias_and(self, cta: TileCta, held, place: Place, kept):
        """Returns the inputs of all score modifiers at a piece, the bias in f32."""
        inputs = self.inputs.read(held, cta.gmem.side, place)
        # What is kept stays in 16 bits: converted before the loop it takes twice the registers.
        bias = self.own_bias(cta, place) if kept is None else lax.optimization_barrier(kept)
        return inputs._replace(bias=bias.astype(jnp.float32))

    def gradients(self, cta: TileCta, place: Place, given: Given, inputs):
        """Computes dS of a piece."""
        start = place.row_start + cta.gmem.offset(self.problem, place.batch)
        where = RegisterTile(start, place.column_start, place.shape, interpret=self.interpret)
        # Sums of keys that do not exist are dropped; those beyond a length are 0.
        lengths = cta.gmem.side.kv_lengths
        limits = where.limits(
            self.problem.spec.mask, None if lengths is None else lengths[place.batch]
        )
        (found,) = self.terms(where, given, inputs, limits)
        return found


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
        scratch=(tiling.score_tiles(problem, tile, interpret),),
        grid={"tile": tiles.clusters * parts * entries * heads},
        threads=tile.warpgroups,
        name="flash_pallas_portable_scores_tile",
        interpret=interpret,
    )
    given = arrays.with_side(AuxiliaryInputs(problem, 0, interpret), operands)
    return (run(given._replace(side=given.side._replace(bias=None)), given.side.bias),)


def store(values, target, starts, interpret: bool):
    """Writes an f32 tile to [rows, columns] in device memory, in the dtype of the target.

    Rows and columns that the array does not have are not written. Under the interpreter it has all.

    Args:
        values: f32 tile in the accumulator layout.
        target: float32 or of 16 bits, columns a multiple of 2.
        starts: (row, column) where the first element goes, the column a multiple of 2.
        interpret: run by the interpreter.
    """
    values = values.astype(target.dtype)
    if interpret:
        index = (pl.ds(start, size) for start, size in zip(starts, values.shape, strict=True))
        target[tuple(index)] = values
        return
    types: Any = (inline.WGMMA, plgpu.RefType(), *(plgpu.Layout.WG_SPLAT,) * 2)
    body = functools.partial(_store_body, values.dtype.itemsize)
    plgpu.inline_mgpu(arg_types=types)(body)(values, target, *map(jnp.int32, starts))


def _store_body(size: int, _, values, target, first_row, first_column):
    i64 = ir.IntegerType.get_signless(64)
    length, width = target.type.shape
    (stride, _), _ = target.type.get_strides_and_offset()
    row, column = origin(values.shape, values.layout)
    row = opaque(arith.addi(splat(first_row), row))
    column = arith.addi(splat(first_column), column)
    held = {}  # by the row of thread 0
    for index, down, right in coordinates(values.shape, values.layout):
        held.setdefault(down, []).append((right, values.registers[index]))
    wide = lambda x, bytes: arith.muli(arith.extsi(i64, x), arith.constant(i64, bytes))
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(target))
    base = arith.addi(base, arith.addi(wide(row, size * stride), wide(column, size)))
    for down, pairs in held.items():
        exists = arith.cmpi(arith.CmpIPredicate.slt, row, i32_constant(length - down))
        write = functools.partial(_store_pairs, base, size, stride * down, pairs, (column, width))
        where(exists, write)


def _store_pairs(base, size: int, offset: int, pairs, ends):
    column, width = ends
    for right, register in pairs:
        exists = arith.cmpi(arith.CmpIPredicate.slt, column, i32_constant(width - right))
        write = functools.partial(_store_pair, base, size, size * (offset + right), register)
        where(exists, write)


def _store_pair(base, size: int, offset: int, register):
    if size == 4:
        code, values = "st.global.v2.b32 [$0+{}], {{$1, $2}};", [at(register, e) for e in (0, 1)]
    else:
        i32 = ir.IntegerType.get_signless(32)
        code, values = "st.global.b32 [$0+{}], $1;", [llvm.bitcast(i32, register)]
    constraints = "l" + (",f,f" if size == 4 else ",r")
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [base, *values], code.format(offset), constraints, has_side_effects=True)
