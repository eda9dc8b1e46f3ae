"""dK and dV: a CTA owns a KV tile of one head and loops over the Q tiles that attend to it.

    (1) S^T  = K Q^T
    (2) dP^T = V dO^T, dS^T = P^T (dP^T - delta)
    (3) dV  += P^T dO
    (4) dK  += dS^T Q

Scores are transposed, so that P and dS are left operands, in registers, of the matmuls that follow.
Where dK and dV together have more elements than threads have registers for, each has a launch of
its own. The results have the same bits in every run. Above head dim 256 two warpgroups have half of
the columns each (common/shares.py). Where shared memory has no room for K and V next to each other,
tiles take turns: V and dO, then K and Q, in every step of dK; Q, then dO in every step of dV.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .....core.problem import Operands, Problem
from ....gpu import score_tile
from ....gpu.launch import launch
from ....gpu.ptx import modifiers
from ....gpu.score_tile import Weights
from ...common.auxiliary_inputs import Place, load_vector
from ...common.shares import Shares
from ...common.smem_tiles import Copy, Stream, warpgroups_of, widths
from ...common.tiles import TileSizes
from .. import tiles
from ..base import BackwardArrays, GradientSums, KvStationary, KvStationaryCta, outputs
from ..tiles import SLOTS, DkvSmem

WIDEST_TOGETHER = 256  # columns of dK and dV of a warpgroup: f32 of 64 rows in 128 registers


@dataclasses.dataclass(frozen=True)
class DkvKernel(KvStationary):
    """One launch of the dK/dV kernel; its methods are the phases of a CTA.

    Attributes:
        wanted: "dk" and "dv", or one of them.
    """

    problem: Problem
    tile: TileSizes
    wanted: tuple[str, ...]
    interpret: bool

    def __call__(self, gmem: BackwardArrays, out: GradientSums, smem: DkvSmem):
        # With a causal mask, the first keys are seen by the most queries.
        coordinates = tuple(lax.axis_index(name) for name in ("batch", "head", "kv"))
        shares = self.shares(smem.scores)
        cta = self.place(gmem, smem.whole, self.copies_of(shares), coordinates)
        own, turns = self.own(cta), self.tile.turns
        if "dk" not in self.wanted:  # V is needed for dP alone
            own = own[:1]
        slots = 1 if turns else SLOTS
        stream = Stream(cta.copies, ("q", "do"), slots, functools.partial(self.load, cta))
        if turns and "dk" in self.wanted:  # K and V arrive in every step
            stream.start(0, "do")
        else:
            cta.copies.start(*own)
            stream.start(0, "q")
            if not turns:
                stream.start(0, "do")
            cta.copies.arrived(*own, pending=1 if turns else 2)
        cta = cta._replace(stream=stream)
        zeros = functools.partial(self.matmuls.zeros, self.tile.rows)
        sums = GradientSums(*(zeros(shares.columns(width)[1]) for width in widths(self.problem)))
        sums = GradientSums(*(x if n in self.wanted else None for n, x in sums._asdict().items()))
        sums = cta.steps.fold(functools.partial(self.step, cta), sums, hides_end=not self.interpret)
        stream.end()
        self.finish(cta, out, sums)

    def load(self, cta: KvStationaryCta, name: str, n, slot) -> tuple[Copy, ...]:
        """Returns the copy of the Q or dO tile of the n-th step, and in turns of dK of K or V."""
        tile, now = cta.smem.q.at[slot] if name == "q" else cta.smem.do, self.anew(cta)
        copy = self.arriving(now, name, n, tile)
        if not self.tile.turns or "dk" not in self.wanted:
            return (copy,)
        own = self.own(now)[("q", "do").index(name)]
        return own._replace(limit=now.steps[n].limit(own.limit)), copy

    def step(self, cta: KvStationaryCta, n, sums: GradientSums, *, masked: bool) -> GradientSums:
        """Returns the sums with the share of one Q tile added."""
        # `anew` as a whole would cost 16 to 28 bytes of spills here on 10.0.
        batch, kv_head = lax.optimization_barrier((cta.batch, cta.kv_head))
        cta = cta._replace(batch=batch, kv_head=kv_head)
        place, q = self.tile_place(cta, cta.steps[n]), cta.smem.q.at[cta.stream.slot(n)]
        rows = place.batch, place.head, place.columns
        inputs = self.modifiers(cta, place, masked=masked)
        lse = load_vector(cta.gmem.lse.at[rows], 1)
        if self.tile.turns:
            return self.in_turns(cta, n, place, sums, (lse, inputs), masked=masked)
        cta.stream.wait(n, "q", pending=1)
        cta.stream.start(n + 1, "q")
        s = self.scores(cta, place, q)  # (1)
        delta = load_vector(cta.gmem.delta.at[rows], 1)  # registers have no room for it before
        w = self.weights(cta, place, s, lse, inputs, masked=masked)
        cta.stream.wait(n, "do", pending=1)
        dk, dv, ds = sums.dk, sums.dv, None
        if dk is not None:
            dp = self.weight_gradients(cta, place, cta.smem.do)  # (2)
            ds = self.score_gradients(cta, place, w, dp, delta).astype(self.problem.dtype)
        if dv is not None:
            dv = self.add_dv(cta, dv, w)
        if dv is None:
            self.shares_of(cta).read()
        else:
            cta.copies.sync()
        cta.stream.start(n + 1, "do")
        if dk is not None:
            dk = self.add_dk(cta, dk, ds, q)
        return GradientSums(dk, dv)

    def in_turns(
        self, cta: KvStationaryCta, n, place: Place, sums: GradientSums, read, *, masked: bool
    ) -> GradientSums:
        """Returns dK, or dV, with the share of one Q tile added; see `step`.

        Args:
            cta: the CTA.
            n: number of the step.
            place: place of the tile of scores.
            sums: dK, or dV.
            read: LSE and the inputs of modifiers.
            masked: some of the tile may be hidden.
        """
        (lse, inputs), dp, stream = read, None, cta.stream
        if sums.dk is not None:
            stream.wait(n, "do")
            dp = self.weight_gradients(cta, place, cta.smem.do)  # (2)
            self.shares_of(cta).read()
            stream.start(n, "q")
        stream.wait(n, "q")
        q = cta.smem.q.at[0]
        s = self.scores(cta, place, q)  # (1)
        if sums.dk is None:
            self.shares_of(cta).read()
            stream.start(n, "do")
        w = self.weights(cta, place, s, lse, inputs, masked=masked)
        if sums.dk is None:
            stream.wait(n, "do")
            sums = sums._replace(dv=self.add_dv(cta, sums.dv, w))
        else:
            delta = load_vector(cta.gmem.delta.at[place.batch, place.head, place.columns], 1)
            ds = self.score_gradients(cta, place, w, dp, delta).astype(self.problem.dtype)
            sums = sums._replace(dk=self.add_dk(cta, sums.dk, ds, q))
        cta.copies.sync()
        stream.start(n + 1, "q" if sums.dk is None else "do")
        return sums

    def add_dv(self, cta: KvStationaryCta, dv, w: Weights):
        """Returns dV with the share of one Q tile added."""
        p = score_tile.operand(self.problem, w)
        column, _ = self.shares_of(cta).columns(widths(self.problem)[1])
        return self.matmuls.add(dv, p, cta.smem.do, column=column)  # (3)

    def add_dk(self, cta: KvStationaryCta, dk, ds, q):
        """Returns dK with the share of one Q tile added."""
        column, _ = self.shares_of(cta).columns(widths(self.problem)[0])
        return self.matmuls.add(dk, ds, q, column=column)  # (4)

    def shares_of(self, cta: KvStationaryCta) -> Shares:
        """Returns the columns that this warpgroup of the CTA has."""
        return Shares(self.interpret, cta.copies.warpgroups, cta.smem.scores)

    def scores(self, cta: KvStationaryCta, place: Place, q):
        """Computes S^T of a tile; see KvStationary.scores."""
        zeros = self.matmuls.zeros(*place.shape)
        return self.shares_of(cta).product(zeros, cta.smem.k, q, widths(self.problem)[0])

    def weight_gradients(self, cta: KvStationaryCta, place: Place, do):
        """Computes dP^T of a tile; see KvStationary.weight_gradients."""
        zeros = self.matmuls.zeros(*place.shape)
        return self.shares_of(cta).product(zeros, cta.smem.v, do, widths(self.problem)[1])

    def finish(self, cta: KvStationaryCta, out: GradientSums, sums: GradientSums):
        """Writes dK and dV, staged where K and V were; 0 for keys beyond a length."""
        dk = None if sums.dk is None else sums.dk * self.problem.spec.scale
        dv = None if sums.dv is None else score_tile.gained(self.problem, sums.dv)
        first = cta.block * self.tile.rows
        width, v_width = widths(self.problem)
        parts = [(dk, cta.smem.k, width, out.dk), (dv, cta.smem.v, v_width, out.dv)]
        parts = [(values, *places) for values, *places in parts if values is not None]
        for values, staging, width, _ in parts:
            column, _ = self.shares_of(cta).columns(width)
            self.matmuls.put(self.zero_padded(cta, values), staging, column)
        cta.copies.sync()
        for _, staging, _, target in parts:
            target = target.at[cta.batch, :, cta.kv_head]
            cta.copies.store(staging, target, first, self.problem.kv_len)

    def zero_padded(self, cta: KvStationaryCta, values):
        """Returns `values` with 0 in the rows of keys beyond a length."""
        lengths = cta.gmem.aux.kv_lengths
        if lengths is None:
            return values
        start = cta.block * self.tile.rows
        key = modifiers.positions(values.shape, 0, start, self.interpret)
        return jnp.where(key < lengths[cta.batch], values, jnp.zeros_like(values))


def dkv(problem: Problem, tile: TileSizes, operands: Operands, arrays: BackwardArrays, interpret):
    """Launches the kernel once or twice and returns (dK [B, S, K, H], dV [B, S, K, Hv])."""
    columns = sum(widths(problem)) // warpgroups_of(problem)
    if columns <= WIDEST_TOGETHER and not tile.turns:
        return _launch(problem, tile, ("dk", "dv"), operands, arrays, interpret=interpret)
    launch_one = functools.partial(_launch, operands=operands, arrays=arrays, interpret=interpret)
    return launch_one(problem, tile, ("dk",))[0], launch_one(problem, tile, ("dv",))[1]


def _launch(
    problem: Problem,
    tile: TileSizes,
    wanted: tuple[str, ...],
    operands: Operands,
    arrays: BackwardArrays,
    *,
    interpret: bool,
) -> GradientSums:
    blocks = pl.cdiv(problem.kv_len, tile.rows)
    length = blocks * tile.rows if interpret else problem.kv_len
    kernel = DkvKernel(problem, tile, wanted, interpret)
    run = launch(
        kernel,
        out=(outputs(problem, length, wanted),),
        scratch=(tiles.dkv_layout(problem, tile, interpret),),
        grid={"batch": problem.batch, "head": problem.kv_heads, "kv": blocks},
        threads=warpgroups_of(problem),
        name="flash_pallas_portable_" + "".join(wanted).replace("dkdv", "dkv"),
        interpret=interpret,
    )
    (gradients,) = run(arrays.of_kernel(kernel.inputs, operands, tile, problem.group))
    return GradientSums(*(None if x is None else x[:, : problem.kv_len] for x in gradients))
