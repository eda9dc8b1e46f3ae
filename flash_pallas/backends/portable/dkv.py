"""dK and dV: a block owns keys of one head and folds the queries that see them into both.

    S^T = K Q^T, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q

Scores are transposed, so that P and dS are left operands of the products that follow, in registers.
All query heads that share the keys pass by. Where dK and dV together have more elements than 128
threads have registers, each has a launch of its own. The same bits in every run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...core import bounds
from ...core.problem import Operands, Problem
from ...core.tile import Limits
from ..mosaic import inline_modifiers, recompute
from ..mosaic.launch import launch
from ..mosaic.register_tile import RegisterTile
from .backward_arrays import BackwardArrays
from .blocks import TileSizes, widths
from .inputs import Inputs, Place, load_vector
from .kernel import Kernel
from .stream import SLOTS, Stream, Tiles
from .tiles import Copy, buffer
from .walk import Step, Steps, query_blocks

WIDEST_TOGETHER = 256  # head dims of K and V together: f32 of 64 rows in 128 registers


class Smem(NamedTuple):
    """Shared memory."""

    k: Any  # [rows, H], in the end dK
    v: Any  # [rows, Hv], in the end dV
    q: Any  # [SLOTS, columns, H]
    do: Any  # [columns, Hv]


class Sums(NamedTuple):
    """What a block adds up; None for what it does not."""

    dk: Any  # f32[rows, H], before scaling
    dv: Any  # f32[rows, Hv], before dropout's gain


class Cta(NamedTuple):
    """One block of threads and its keys."""

    gmem: BackwardArrays
    smem: Smem
    batch: Any
    kv_head: Any
    block: Any
    steps: Steps  # through blocks of queries of all heads of the group
    stream: Any = None


@dataclasses.dataclass(frozen=True)
class Dkv(Kernel):
    """One launch; the methods are the phases of a block.

    Attributes:
        wanted: "dk" and "dv", or one of them.
    """

    problem: Problem
    tile: TileSizes
    wanted: tuple[str, ...]
    interpret: bool

    @property
    def inputs(self) -> Inputs:
        """What modifiers read."""
        return Inputs(self.problem, 1, self.interpret)

    def __call__(self, gmem: BackwardArrays, out: Sums, smem: Smem):
        cta = self.place(gmem, smem)
        first, limit = cta.block * self.tile.rows, gmem.kv_length(self.problem, cta.batch)
        of = lambda array: array.at[cta.batch, :, cta.kv_head]
        own = [Copy(of(gmem.k), smem.k, first, limit)]
        if "dk" in self.wanted:  # dP wants V
            own.append(Copy(of(gmem.v), smem.v, first, limit))
        stream = Stream(self.copies, smem.q, smem.do, functools.partial(self.tiles, cta))
        self.copies.start(*own)
        stream.start()
        self.copies.arrived(*own, pending=2)
        cta = cta._replace(stream=stream)
        zeros = functools.partial(self.products.zeros, self.tile.rows)
        sums = Sums(*map(zeros, widths(self.problem)))
        sums = Sums(*(x if n in self.wanted else None for n, x in sums._asdict().items()))
        sums = cta.steps.fold(functools.partial(self.step, cta), sums, self.interpret)
        stream.end()
        self.finish(cta, out, sums)

    def place(self, gmem: BackwardArrays, smem: Smem) -> Cta:
        """Where this block is; the first keys have the longest columns of a causal mask."""
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "kv"))
        position = block * self.tile.rows - gmem.offset(self.problem, batch)
        tile, at = (self.tile.columns, self.tile.rows), (batch, block)
        blocks = query_blocks(self.problem, at, position, tile, gmem.bounds)
        return Cta(gmem, smem, batch, head, block, Steps.of(blocks, self.problem.group))

    def tiles(self, cta: Cta, n) -> Tiles:
        """Of the n-th step."""
        step = cta.steps[n]
        last = jnp.int32(self.problem.group - 1)
        head = cta.kv_head * self.problem.group + lax.min(step.member, last)
        of = lambda array: array.at[cta.batch, :, head]
        length = jnp.int32(cta.gmem.q_length(self.problem, cta.batch))
        limit = jnp.where(step.exists, length, jnp.int32(0))
        return Tiles(of(cta.gmem.q), of(cta.gmem.do), step.block * self.tile.columns, limit)

    def at(self, cta: Cta, step: Step) -> Place:
        """The tile of scores of a step."""
        head = cta.kv_head * self.problem.group + step.member
        first = cta.block * self.tile.rows, step.block * self.tile.columns
        return Place(cta.batch, head, *first, (self.tile.rows, self.tile.columns))

    # --- a tile ----------------------------------------------------------------------------------

    def step(self, cta: Cta, n, sums: Sums, *, masked: bool) -> Sums:
        """The sums with one tile's share."""
        place = self.at(cta, cta.steps[n])
        held = self.inputs.hold(cta.gmem.side, place)
        inputs = self.inputs.read(held, cta.gmem.side, place, ids=masked)
        rows = place.batch, place.head, place.columns
        lse = load_vector(cta.gmem.lse.at[rows], 1)
        zeros = self.products.zeros(*place.shape)
        cta.stream.begin(n)
        q = cta.stream.slot(n)
        s = self.products.add(zeros, cta.smem.k, q, transposed=True)
        delta = load_vector(cta.gmem.delta.at[rows], 1)  # registers have no room for it before
        tile = self.score_tile(cta, place)
        limits = tile.limits(self.problem.spec.mask) if masked else Limits()
        w = recompute.weights(self.problem, tile, s, lse, inputs, limits)
        cta.stream.second_arrived(n)
        dk, dv, ds = sums.dk, sums.dv, None
        if dk is not None:
            dp = self.products.add(zeros, cta.smem.v, cta.smem.do, transposed=True)
            c = recompute.centred(self.problem, w.kept, dp, tile.per_q(delta))
            ds = (recompute.pulled(w) * c).astype(self.problem.dtype)
        if dv is not None:
            p = recompute.dropped(self.problem, w).astype(self.problem.dtype)
            dv = self.products.add(dv, p, cta.smem.do)
        cta.stream.second_read(n)
        if dk is not None:
            dk = self.products.add(dk, ds, q)
        return Sums(dk, dv)

    def score_tile(self, cta: Cta, place: Place) -> RegisterTile:
        """Where the scores of a block of queries lie."""
        start = place.column_start + cta.gmem.offset(self.problem, cta.batch)
        return RegisterTile(start, place.row_start, place.shape, q_axis=1, interpret=self.interpret)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self, cta: Cta, out: Sums, sums: Sums):
        """Write what was added up; 0 for keys beyond a length."""
        dk = None if sums.dk is None else sums.dk * self.problem.spec.scale
        dv = None if sums.dv is None else recompute.gained(self.problem, sums.dv)
        first = cta.block * self.tile.rows
        pairs = [(dk, cta.smem.k, out.dk), (dv, cta.smem.v, out.dv)]
        for values, staging, _ in pairs:
            if values is not None:
                self.copies.put(self.cleared(cta, values), staging)
        self.copies.meet()
        for values, staging, target in pairs:
            if values is not None:
                target = target.at[cta.batch, :, cta.kv_head]
                self.copies.store(staging, target, first, self.problem.kv_len)

    def cleared(self, cta: Cta, values):
        """With 0 in the rows of keys beyond a length."""
        lengths = cta.gmem.side.kv_lengths
        if lengths is None:
            return values
        start = cta.block * self.tile.rows
        key = inline_modifiers.positions(values.shape, 0, start, self.interpret)
        return jnp.where(key < lengths[cta.batch], values, jnp.zeros_like(values))


def dkv(problem: Problem, tile: TileSizes, operands: Operands, arrays: BackwardArrays, interpret):
    """Launch; (dK [B, S, K, H], dV [B, S, K, Hv])."""
    if sum(widths(problem)) <= WIDEST_TOGETHER:
        return _launch(problem, tile, ("dk", "dv"), operands, arrays, interpret=interpret)
    each = functools.partial(_launch, operands=operands, arrays=arrays, interpret=interpret)
    return each(problem, tile, ("dk",))[0], each(problem, tile, ("dv",))[1]


def _launch(problem: Problem, tile: TileSizes, wanted, operands, arrays, *, interpret) -> Sums:
    width, v_width = widths(problem)
    blocks = pl.cdiv(problem.kv_len, tile.rows)
    length = blocks * tile.rows if interpret else problem.kv_len
    of = lambda columns: jax.ShapeDtypeStruct(
        (problem.batch, length, problem.kv_heads, columns), problem.dtype
    )
    out = Sums(
        dk=of(problem.head_dim) if "dk" in wanted else None,
        dv=of(problem.v_head_dim) if "dv" in wanted else None,
    )
    smem = Smem(
        k=buffer((tile.rows, width), problem.dtype),
        v=buffer((tile.rows, v_width), problem.dtype),
        q=buffer((SLOTS, tile.columns, width), problem.dtype),
        do=buffer((tile.columns, v_width), problem.dtype),
    )
    run = launch(
        Dkv(problem, tile, wanted, interpret),
        out=(out,),
        scratch=(smem,),
        grid={"batch": problem.batch, "head": problem.kv_heads, "kv": blocks},
        threads=1,
        name="flash_pallas_portable_" + "".join(wanted).replace("dkdv", "dkv"),
        interpret=interpret,
    )
    find, dynamic = bounds.q_bounds, bounds.is_dynamic(problem)
    (found,) = run(
        arrays._replace(
            bounds=find(problem, operands, tile.columns, tile.rows) if dynamic else None,
            side=Inputs(problem, 1, interpret).arrays(operands),
        )
    )
    return Sums(*(None if x is None else x[:, : problem.kv_len] for x in found))
