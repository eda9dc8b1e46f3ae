"""dQ: a CTA owns a Q tile of one head and loops over the KV blocks it sees; dQ stays in registers.

    (1) S   = Q K^T
    (2) dP  = dO V^T, dS = P (dP - delta)
    (3) dQ += dS K

The result has the same bits in every run. Above head dim 256 two warpgroups have half of the
columns each (common/shares.py). Where shared memory has no room for Q and dO next to each other,
tiles take turns: dO and V, then Q and K, in every step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .....core.mask import Limits
from .....core.problem import Operands, Problem
from .....core.scores import TileInputs
from ....gpu import score_tile
from ....gpu.launch import launch
from ....gpu.score_tile import RegisterTile
from ...common.auxiliary_inputs import AuxiliaryInputs, Place, RowFragments, load_vector
from ...common.kernel import Kernel, Steps, kv_limits, kv_tile_range, longest_first
from ...common.shares import Shares
from ...common.smem_tiles import Copies, Copy, Stream, warpgroups_of, widths
from ...common.tiles import TileSizes
from .. import tiles
from ..base import BackwardArrays
from ..tiles import SLOTS, DqSmem


class DqRows(NamedTuple):
    """Values of each query that stay in registers during the loop."""

    lse: Any  # f32[rows], base 2
    delta: Any  # f32[rows]
    fragments: RowFragments


class DqCta(NamedTuple):
    """State of one CTA and its Q tile."""

    gmem: BackwardArrays
    smem: DqSmem
    batch: Any
    head: Any
    block: Any
    position: Any  # of the first query
    steps: Steps  # through blocks of keys
    shares: Shares
    copies: Copies
    stream: Any = None
    rows: Any = None


@dataclasses.dataclass(frozen=True)
class DqKernel(Kernel):
    """One launch of the dQ kernel; its methods are the phases of a CTA."""

    problem: Problem
    tile: TileSizes
    interpret: bool

    @property
    def hides_offsets(self) -> bool:
        """True with a mask and head dims up to 192; see Copies.

        Hidden offsets cost 4 bytes of spills on 10.0 at head dim 256, causal, and 8 at 192
        without a mask. At 192, causal, offsets that are not hidden cost 16 on 12.0.
        """
        return not self.problem.spec.mask.is_trivial and max(widths(self.problem)) <= 192

    @property
    def inputs(self) -> AuxiliaryInputs:
        """Loader of what score modifiers read; rows are queries."""
        return AuxiliaryInputs(self.problem, 0, self.interpret)

    def __call__(self, gmem: BackwardArrays, dq, smem: DqSmem):
        cta = self.place(gmem, smem)
        first, turns = cta.block * self.tile.rows, self.tile.turns
        limit = gmem.q_length(self.problem, cta.batch)
        own = () if turns else (self.own(cta, "q", limit), self.own(cta, "do", limit))
        slots = 1 if turns else SLOTS
        stream = Stream(cta.copies, ("k", "v"), slots, functools.partial(self.load, cta))
        if not turns:
            cta.copies.start(*own)
            stream.start(0, "k")
        stream.start(0, "v")
        rows = self.rows(cta)
        if not turns:
            cta.copies.arrived(*own, pending=2)
        cta = cta._replace(stream=stream, rows=rows)
        column, columns = cta.shares.columns(widths(self.problem)[0])
        zeros = self.matmuls.zeros(self.tile.rows, columns)
        dq_sums = cta.steps.fold(
            functools.partial(self.step, cta), zeros, hides_end=not self.interpret
        )
        stream.end()
        self.matmuls.put(dq_sums * self.problem.spec.scale, smem.q, column)
        cta.copies.sync()
        target = dq.at[cta.batch, :, cta.head]
        cta.copies.store(smem.q, target, first, self.problem.q_len)

    def place(self, gmem: BackwardArrays, smem: DqSmem) -> DqCta:
        """Returns where this CTA is, and the steps of its loop over KV blocks."""
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "q"))
        block = longest_first(self.problem, self.tile.rows, block)
        position = block * self.tile.rows + gmem.offset(self.problem, batch)
        shares = self.shares(smem.scores)
        cta = functools.partial(DqCta, gmem, smem.whole, batch, head, block, position)
        cta = functools.partial(cta, shares=shares, copies=self.copies_of(shares))
        if gmem.lists is not None:
            return cta(steps=Steps.of_list(self.problem, gmem.lists, (batch, head, block)))
        length = None if gmem.aux.kv_lengths is None else gmem.aux.kv_lengths[batch]
        tile = self.tile.rows, self.tile.columns
        coordinates = batch, block
        blocks = kv_tile_range(self.problem, coordinates, position, tile, gmem.bounds, length)
        return cta(steps=Steps.of(blocks))

    def own(self, cta: DqCta, name: str, limit) -> Copy:
        """Returns the copy of the CTA's tile of Q or dO ("q", "do")."""
        source = getattr(cta.gmem, name).at[cta.batch, :, cta.head]
        return Copy(source, getattr(cta.smem, name), cta.block * self.tile.rows, limit)

    def load(self, cta: DqCta, name: str, n, slot) -> tuple[Copy, ...]:
        """Returns the copy of the K or V tile of the n-th step, and in turns of Q or dO."""
        tile = cta.smem.k.at[slot] if name == "k" else cta.smem.v
        step = cta.steps[n]
        kv_head = lax.div(cta.head, jnp.int32(self.problem.group))
        source = getattr(cta.gmem, name).at[cta.batch, :, kv_head]
        limit = step.limit(cta.gmem.kv_length(self.problem, cta.batch))
        copy = Copy(source, tile, step.block * self.tile.columns, limit)
        if not self.tile.turns:
            return (copy,)
        limit = step.limit(cta.gmem.q_length(self.problem, cta.batch))
        return self.own(cta, "q" if name == "k" else "do", limit), copy

    def rows(self, cta: DqCta) -> DqRows:
        """Loads what is read of the queries once: LSE, delta and the inputs of modifiers."""
        own = cta.batch, cta.head, pl.ds(cta.block * self.tile.rows, self.tile.rows)
        return DqRows(
            lse=load_vector(cta.gmem.lse.at[own], 0),
            delta=load_vector(cta.gmem.delta.at[own], 0),
            fragments=self.inputs.row_fragments(cta.gmem.aux, Place.of(cta, self.tile, 0)),
        )

    def step(self, cta: DqCta, n, dq, *, masked: bool):
        """Returns dQ with the share of one KV block added."""
        block = cta.steps[n].block
        place = Place.of(cta, self.tile, block)
        zeros = self.matmuls.zeros(*place.shape)
        inputs = self.inputs.read(cta.rows.fragments, cta.gmem.aux, place, ids=masked)
        k = cta.smem.k.at[cta.stream.slot(n)]
        s_dp = (self.in_turns if self.tile.turns else self.products)(cta, n, zeros, k)
        ds = self.score_gradients(cta, block, inputs, s_dp, masked=masked)
        column, _ = cta.shares.columns(widths(self.problem)[0])
        dq = self.matmuls.add(dq, ds.astype(self.problem.dtype), k, column=column)  # (3)
        if self.tile.turns:
            cta.copies.sync()
            cta.stream.start(n + 1, "v")
        return dq

    def products(self, cta: DqCta, n, zeros, k):
        """Computes S and dP of the n-th step, f32, while copies of the next step are started."""
        width, v_width = widths(self.problem)
        cta.stream.wait(n, "k", pending=1)
        cta.stream.start(n + 1, "k")
        s = cta.shares.product(zeros, cta.smem.q, k, width)  # (1)
        cta.stream.wait(n, "v", pending=1)
        dp = cta.shares.product(zeros, cta.smem.do, cta.smem.v, v_width)  # (2)
        cta.shares.read()
        cta.stream.start(n + 1, "v")
        return s, dp

    def in_turns(self, cta: DqCta, n, zeros, k):
        """Computes S and dP of the n-th step, f32, from tiles that take turns; K stays."""
        width, v_width = widths(self.problem)
        cta.stream.wait(n, "v")
        dp = cta.shares.product(zeros, cta.smem.do, cta.smem.v, v_width)  # (2)
        cta.shares.read()
        cta.stream.start(n, "k")
        cta.stream.wait(n, "k")
        return cta.shares.product(zeros, cta.smem.q, k, width), dp  # (1)

    def score_gradients(self, cta: DqCta, block, inputs: TileInputs, s_dp, *, masked: bool):
        """Computes dS of one tile, f32."""
        s, dp = s_dp
        shape, gmem = s.shape, cta.gmem
        problem = self.problem if masked else self.problem.of_whole_tiles
        start = block * self.tile.columns
        tile = RegisterTile(cta.position, start, shape, interpret=self.interpret)
        limits = Limits()
        if masked:
            length = gmem.kv_length(problem, cta.batch)
            limits = kv_limits(problem, tile, gmem.aux.kv_lengths, length)
        w = score_tile.weights(problem, tile, s, cta.rows.lse, inputs, limits, marks=True)
        delta = tile.per_q(cta.rows.delta)
        return score_tile.pulled(w) * score_tile.centred(self.problem, w.kept, dp, delta)


def dq(problem: Problem, tile: TileSizes, operands: Operands, arrays: BackwardArrays, interpret):
    """Launches the kernel and returns dQ [B, T, N, H]."""
    blocks = pl.cdiv(problem.q_len, tile.rows)
    shape = arrays.q.shape
    if interpret:
        shape = (shape[0], blocks * tile.rows, *shape[2:])
    kernel = DqKernel(problem, tile, interpret)
    run = launch(
        kernel,
        out=jax.ShapeDtypeStruct(shape, problem.dtype),
        scratch=(tiles.dq_layout(problem, tile, interpret),),
        grid={"batch": problem.batch, "head": problem.q_heads, "q": blocks},
        threads=warpgroups_of(problem),
        name="flash_pallas_portable_dq",
        interpret=interpret,
    )
    return run(arrays.of_kernel(kernel.inputs, operands, tile))[:, : problem.q_len]
