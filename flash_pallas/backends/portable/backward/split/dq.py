"""dQ: a CTA owns a Q tile of one head and loops over the KV blocks it sees; dQ stays in registers.

    (1) S   = Q K^T
    (2) dP  = dO V^T, dS = P (dP - delta)
    (3) dQ += dS K

The result has the same bits in every run.
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
from ....gpu import score_tile
from ....gpu.launch import launch
from ....gpu.score_tile import RegisterTile
from ... import tiling
from ...common.auxiliary_inputs import AuxiliaryInputs, Place, RowFragments, load_vector
from ...common.kernel import Kernel, Steps, kv_limits, kv_tile_range, longest_first
from ...common.smem_tiles import Copy, Stream, widths
from ...tiling import SLOTS, DqSmem, TileSizes
from ..base import BackwardArrays


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
        first = cta.block * self.tile.rows
        limit = gmem.q_length(self.problem, cta.batch)
        of = lambda array: array.at[cta.batch, :, cta.head]
        own = Copy(of(gmem.q), smem.q, first, limit), Copy(of(gmem.do), smem.do, first, limit)
        stream = Stream(self.copies, ("k", "v"), SLOTS, functools.partial(self.load, cta))
        self.copies.start(*own)
        stream.start(0, "k")
        stream.start(0, "v")
        rows = self.rows(cta)
        self.copies.arrived(*own, pending=2)
        cta = cta._replace(stream=stream, rows=rows)
        zeros = self.matmuls.zeros(self.tile.rows, widths(self.problem)[0])
        found = cta.steps.fold(
            functools.partial(self.step, cta), zeros, hides_end=not self.interpret
        )
        stream.end()
        self.matmuls.put(found * self.problem.spec.scale, smem.q)
        self.copies.sync()
        self.copies.store(smem.q, of(dq), first, self.problem.q_len)

    def place(self, gmem: BackwardArrays, smem: DqSmem) -> DqCta:
        """Returns where this CTA is, and the steps of its loop over KV blocks."""
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "q"))
        block = longest_first(self.problem, self.tile.rows, block)
        position = block * self.tile.rows + gmem.offset(self.problem, batch)
        if gmem.lists is not None:
            steps = Steps.of_list(self.problem, gmem.lists, (batch, head, block))
            return DqCta(gmem, smem, batch, head, block, position, steps)
        length = None if gmem.aux.kv_lengths is None else gmem.aux.kv_lengths[batch]
        tile = self.tile.rows, self.tile.columns
        at = batch, block
        blocks = kv_tile_range(self.problem, at, position, tile, gmem.bounds, length)
        return DqCta(gmem, smem, batch, head, block, position, Steps.of(blocks))

    def load(self, cta: DqCta, name: str, n, slot) -> tuple[Copy]:
        """Returns the copy of the K or V tile of the n-th step."""
        tile = cta.smem.k.at[slot] if name == "k" else cta.smem.v
        step = cta.steps[n]
        kv_head = lax.div(cta.head, jnp.int32(self.problem.group))
        source = getattr(cta.gmem, name).at[cta.batch, :, kv_head]
        limit = step.limit(cta.gmem.kv_length(self.problem, cta.batch))
        return (Copy(source, tile, step.block * self.tile.columns, limit),)

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
        cta.stream.wait(n, "k", pending=1)
        cta.stream.start(n + 1, "k")
        s = self.matmuls.add(zeros, cta.smem.q, k, transposed=True)  # (1)
        cta.stream.wait(n, "v", pending=1)
        dp = self.matmuls.add(zeros, cta.smem.do, cta.smem.v, transposed=True)  # (2)
        self.copies.sync()
        cta.stream.start(n + 1, "v")
        ds = self.score_gradients(cta, block, inputs, (s, dp), masked=masked)
        return self.matmuls.add(dq, ds.astype(self.problem.dtype), k)  # (3)

    def score_gradients(self, cta: DqCta, block, inputs, s_dp, *, masked: bool):
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
        w = score_tile.weights(problem, tile, s, cta.rows.lse, inputs, limits)
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
        scratch=(tiling.dq_layout(problem, tile),),
        grid={"batch": problem.batch, "head": problem.q_heads, "q": blocks},
        threads=1,
        name="flash_pallas_portable_dq",
        interpret=interpret,
    )
    found = run(arrays.of_kernel(kernel.inputs, operands, tile))
    return found[:, : problem.q_len]
