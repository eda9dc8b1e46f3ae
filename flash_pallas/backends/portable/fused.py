"""The backward in one launch: dK, dV, and dQ added up in device memory.

A block owns keys of one head and goes through the queries that see them. Five products a step:

    (1) S^T  = K Q^T        shared x shared     each warpgroup half of the queries
    (2) dP^T = V dO^T       shared x shared     likewise
    (3) dV  += P^T dO       shared x shared     each warpgroup half of the columns
    (4) dK  += dS^T Q       shared x shared     likewise
    (5) dQ   = dS K         shared (dS^T read transposed) x shared, likewise

What bounds it is reading shared memory: every warp loads its own operands. With P^T and dS^T in
shared memory a warp's share of a product may have any shape, here 32 rows wherever a block has 128
keys, so a fragment of the right operand serves two products. The warpgroups meet four times a step:
when Q has arrived, when dO has, when P and dS are written, and when a tile may be overwritten.

The order in which blocks add to a tile of dQ differs from run to run, and with it the last bits of
dQ (dq_sums.py). dkv.py and dq.py are the deterministic pair.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import bounds
from ...core.problem import Operands, Problem
from ..mosaic import recompute
from ..mosaic.launch import launch
from .backward_arrays import BackwardArrays
from .dq_sums import DqSums, narrowed
from .fused_blocks import WARPGROUPS, FusedSizes, fused_widths
from .keys import Cta, OwnsKeys, Sums, outputs
from .stream import Stream
from .team import Team
from .tiles import Copies, buffer


class Smem(NamedTuple):
    """Shared memory."""

    k: Any  # [rows, H], in the end dK
    v: Any  # [rows, Hv], in the end dV
    q: Any  # [slots, columns, H]
    do: Any  # [columns, Hv]
    p: Any  # [rows, columns]: P^T, without what dropout drops
    ds: Any  # [rows, columns]: dS^T
    dq: Any = None  # see DqSums.scratch
    met: Any = None  # see Team


@dataclasses.dataclass(frozen=True)
class Fused(OwnsKeys):
    """One launch; the methods are the phases of a block."""

    problem: Problem
    tile: FusedSizes
    interpret: bool

    @property
    def dq_sums(self) -> DqSums:
        """Where dQ is added up."""
        width, _ = fused_widths(self.problem)
        return DqSums(self.tile.columns, width, self.tile.vector, self.interpret)

    def __call__(self, dq, gmem: BackwardArrays, out: Sums, smem: Smem):
        section, block, within = (lax.axis_index(name) for name in ("section", "kv", "pair"))
        heads, total = self.tile.heads, self.problem.batch * self.problem.kv_heads
        pair = section * heads + within
        run = functools.partial(self.run, dq, gmem, out, smem, pair, block)
        if total % heads == 0:
            run()
        else:  # the last section is smaller
            pl.when(pair < total)(run)

    def run(self, dq, gmem: BackwardArrays, out: Sums, smem: Smem, pair, block):
        """Everything that a block does."""
        team = Team(self.interpret, WARPGROUPS, lax.axis_index("wg"), smem.met)
        copies = Copies(self.interpret, team)
        kv_heads = jnp.int32(self.problem.kv_heads)
        at = lax.div(pair, kv_heads), lax.rem(pair, kv_heads), block
        cta = self.place(gmem, smem, copies, at, hides_ends=True, mask_all=self.tile.mask_all)
        if self.tile.stagger and len(cta.steps.zones) == 1:
            cta = cta._replace(steps=cta.steps._replace(shift=block))
        own = self.own(cta)
        cta = self.with_stream(cta)
        copies.start(*own)
        cta.stream.start()
        copies.arrived(*own, pending=2)
        widths = Sums(*(width // WARPGROUPS for width in fused_widths(self.problem)))
        zeros = functools.partial(self.products.zeros, self.tile.rows)
        sums = Sums(*map(zeros, widths))
        sums = cta.steps.fold(functools.partial(self.step, cta, dq), sums, hides_end=False)
        cta.stream.end()
        self.finish(cta, out, sums, Sums(*(team.rank * width for width in widths)))

    def with_stream(self, cta: Cta) -> Cta:
        """With Q and dO passing by."""
        tiles = functools.partial(self.tiles, cta)
        return cta._replace(stream=Stream(cta.copies, cta.smem.q, cta.smem.do, tiles))

    def step(self, cta: Cta, dq, n, sums: Sums, *, masked: bool) -> Sums:
        """The five products of a tile."""
        cta = self.with_stream(cta.anew())
        team, smem, step = cta.copies.team, cta.smem, cta.steps[n]
        queries = team.part(self.tile.columns)
        place, q = self.at(cta, step, queries), cta.stream.slot(n)
        scores = self.scores(cta, n, place, q.at[pl.ds(*queries)], masked=masked, hides_ends=True)
        cta.copies.put(recompute.dropped(self.problem, scores.weights), smem.p, queries[0])
        cta.stream.second_arrived(n)
        ds = self.score_gradients(cta, place, scores, smem.do.at[pl.ds(*queries)])
        cta.copies.put(ds, smem.ds, queries[0])
        cta.copies.meet()
        of_v = team.rank * sums.dv.shape[1]
        dv = self.products.add_part(sums.dv, smem.p, smem.do, of_v)
        cta.stream.second_read(n)
        of_k = team.rank * sums.dk.shape[1]
        dk = self.products.add_part(sums.dk, smem.ds, q, of_k)
        cta.stream.first_read(n)
        zeros = self.products.zeros(*self.dq_sums.part)
        part = self.products.add_part(zeros, smem.ds, smem.k, of_k, transposed=True)
        target = dq.at[cta.batch, place.head, step.block]
        self.dq_sums.add(part, target, smem.dq, team.rank)
        return Sums(dk, dv)


def fused(
    problem: Problem, tile: FusedSizes, operands: Operands, arrays: BackwardArrays, interpret: bool
):
    """Launch; (dQ [B, T, N, H], dK [B, S, K, H], dV [B, S, K, Hv])."""
    kernel = Fused(problem, tile, interpret)
    blocks = pl.cdiv(problem.kv_len, tile.rows)
    out = outputs(problem, blocks * tile.rows if interpret else problem.kv_len)
    run = functools.partial(
        launch,
        out=(out,),
        scratch=(_scratch(kernel),),
        # Blocks of some heads side by side add to different tiles of dQ, and the longest walks of a
        # causal mask start first.
        grid={
            "section": pl.cdiv(problem.batch * problem.kv_heads, tile.heads),
            "kv": blocks,
            "pair": tile.heads,
        },
        threads=WARPGROUPS,
        name="flash_pallas_portable_fused",
        interpret=interpret,
    )
    find, dynamic = bounds.q_bounds, bounds.is_dynamic(problem)
    given = arrays._replace(
        bounds=find(problem, operands, tile.columns, tile.rows) if dynamic else None,
        side=kernel.inputs.arrays(operands),
    )

    def accumulate(refs):
        dq, dk, dv = refs
        (found,) = run(functools.partial(kernel, dq))(given)
        dk[...], dv[...] = found

    # dK and dV are overwritten, and XLA drops their zeros.
    zeros = (jnp.zeros(x.shape, x.dtype) for x in out)
    dq, dk, dv = pl.run_state(accumulate)((kernel.dq_sums.zeros(problem), *zeros))
    dq = narrowed(problem, kernel.dq_sums, dq)
    return dq, dk[:, : problem.kv_len], dv[:, : problem.kv_len]


def _scratch(kernel: Fused) -> Smem:
    tile, dtype = kernel.tile, kernel.problem.dtype
    width, v_width = fused_widths(kernel.problem)
    return Smem(
        k=buffer((tile.rows, width), dtype),
        v=buffer((tile.rows, v_width), dtype),
        q=buffer((tile.slots, tile.columns, width), dtype),
        do=buffer((tile.columns, v_width), dtype),
        p=buffer((tile.rows, tile.columns), dtype),
        ds=buffer((tile.rows, tile.columns), dtype),
        dq=kernel.dq_sums.scratch(),
        met=plgpu.Barrier(num_arrivals=WARPGROUPS) if kernel.interpret else None,
    )
