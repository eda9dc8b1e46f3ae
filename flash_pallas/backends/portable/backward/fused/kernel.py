"""Backward in one launch: dK, dV, and dQ accumulated in device memory.

A CTA owns a KV tile of one head and loops over the Q tiles that attend to it. A step has five
matmuls:

    (1) S^T  = K Q^T        each warpgroup half of the queries
    (2) dP^T = V dO^T       the same
    (3) dV  += P^T dO       the first warpgroup
    (4) dK  += dS^T Q       the second one, at the same time: one matmul whose operands differ
    (5) dQ   = dS K         each warpgroup half of the columns; dS^T is read transposed

Reads of shared memory are the bottleneck: all operands lie there, and every warp loads its own. So
the warps' parts are as square as they can be (see Grid), and a warpgroup accumulates one array, not
half of two. The warpgroups synchronize twice a step: when a tile has arrived, and when P and dS are
written. With one slot they also do when the tile may be overwritten.

The order in which CTAs add to a tile of dQ differs from run to run, and with it the last bits of dQ
(DqSums). backward/split/dkv.py and backward/split/dq.py are the deterministic pair.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core import dropout
from .....core.problem import Operands, Problem
from ....gpu import score_tile
from ....gpu.launch import launch
from ....gpu.ptx import device_sums
from ....gpu.ptx.mma_sync import Grid
from ....gpu.ptx.threads import THREADS
from ...common.auxiliary_inputs import load_vector
from ...common.kernel import Kernel, Step
from ...common.smem_tiles import Copies, Copy, Stream, Vector, Warpgroups, buffer
from .. import tiles
from ..base import DELTA, LSE, BackwardArrays, GradientSums, KvStationary, KvStationaryCta, outputs
from ..tiles import OF_K, OF_V, WARPGROUPS, FusedSizes, FusedSmem, Slot, fused_width

# If dV or dK, P and dP take as many registers of a thread as this, P is read back. ptxas has 255.
MOST_REGISTERS = 224


@dataclasses.dataclass(frozen=True)
class FusedKernel(KvStationary):
    """One launch of the fused backward; its methods are the phases of a CTA."""

    problem: Problem
    tile: FusedSizes
    interpret: bool
    hides_ends: ClassVar[bool] = True

    @property
    def mask_all(self) -> bool:
        """Masks all tiles, in one loop, if any tile may be masked."""
        return self.tile.mask_all

    @property
    def dq_sums(self) -> DqSums:
        """Buffer in device memory that dQ is accumulated in."""
        width = fused_width(self.problem)
        return DqSums(self.tile.columns, width, self.tile.vector, self.interpret)

    @property
    def grid(self) -> Grid:
        """Arrangement of the warps that accumulate dV or dK."""
        return Grid.of(self.tile.rows, fused_width(self.problem))

    def __call__(self, dq, gmem: BackwardArrays, out: GradientSums, smem: FusedSmem):
        section, block, within = (lax.axis_index(name) for name in ("section", "kv", "pair"))
        heads, total = self.tile.heads, self.problem.batch * self.problem.kv_heads
        pair = section * heads + within
        run = functools.partial(self.run, dq, gmem, out, smem, pair, block)
        if total % heads == 0:
            run()
        else:  # the last section is smaller
            pl.when(pair < total)(run)

    def run(self, dq, gmem: BackwardArrays, out: GradientSums, smem: FusedSmem, pair, block):
        """Runs all phases of a CTA: of KV block `block` of a (batch entry, KV head) pair."""
        warpgroups = Warpgroups(self.interpret, WARPGROUPS, lax.axis_index("wg"), smem.barrier)
        copies = Copies(self.interpret, warpgroups)
        kv_heads = jnp.int32(self.problem.kv_heads)
        coordinates = lax.div(pair, kv_heads), lax.rem(pair, kv_heads), block
        cta = self.place(gmem, smem, copies, coordinates)
        one_loop = len(cta.steps.zones) == 1 and not self.problem.is_listed
        if self.tile.stagger and one_loop:
            cta = cta._replace(steps=cta.steps._replace(shift=block))
        own = self.own(cta)
        cta = self.with_stream(cta)
        copies.start(*own)
        cta.stream.start(0)
        copies.arrived(*own, pending=1)
        total = self.matmuls.zeros(self.tile.rows, fused_width(self.problem), self.grid)
        hides_end = self.problem.is_listed and not self.interpret
        total = cta.steps.fold(functools.partial(self.step, cta, dq), total, hides_end=hides_end)
        cta.stream.end()
        self.finish(cta, out, total)

    def with_stream(self, cta: KvStationaryCta) -> KvStationaryCta:
        """Returns `cta` with the stream of its Q tiles."""
        names, load = ("q", "do", "rows"), functools.partial(self.load, cta)
        return cta._replace(stream=Stream(cta.copies, names, self.tile.slots, load))

    def load(self, cta: KvStationaryCta, name: str, n, slot) -> tuple[Copy | Vector]:
        """Returns a copy of the n-th step: of Q, of dO, or of LSE (warpgroup 0) or delta (1)."""
        step, rank, arriving = cta.steps[n], cta.copies.warpgroups.rank, cta.smem.streamed.at(slot)
        if name != "rows":
            tile = arriving.tiles.at[OF_K if name == "q" else OF_V]
            return (self.arriving(cta, name, n, tile),)
        source = cta.gmem.rows.at[cta.batch, self.head(cta, step), rank]
        count = jnp.where(step.exists, jnp.int32(self.tile.columns), jnp.int32(0))
        return (Vector(source, arriving.rows.at[rank], step.block * self.tile.columns, count),)

    def step(self, cta: KvStationaryCta, dq, n, total, *, masked: bool):
        """Computes the five matmuls of a Q tile; returns dV or dK with the tile's share added."""
        cta = self.with_stream(self.anew(cta))
        warpgroups, smem, step = cta.copies.warpgroups, cta.smem, cta.steps[n]
        slot = self.weigh(cta, n, step, masked=masked)
        cta.copies.sync()
        weights, tile = smem.weights.at[warpgroups.rank], slot.tiles.at[warpgroups.rank]
        total = self.matmuls.add_part(total, weights, tile, 0, self.grid)  # (3) or (4)
        if self.tile.slots == 1:
            cta.copies.sync()
            cta.stream.start(n + 1)
        sums = self.dq_sums
        zeros = self.matmuls.zeros(*sums.part, sums.grid)
        column = warpgroups.rank * sums.part[1]
        ds = smem.weights.at[OF_K]  # (5)
        part = self.matmuls.add_part(zeros, ds, smem.k, column, sums.grid, transposed=True)
        target = dq.at[cta.batch, self.head(cta, step), step.block]
        sums.add(part, target, smem.dq, warpgroups.rank)
        return total

    def weigh(self, cta: KvStationaryCta, n, step: Step, *, masked: bool) -> Slot:
        """Writes P and dS of a warpgroup's queries to shared memory; returns the tile's slot."""
        first, count = cta.copies.warpgroups.part(self.tile.columns)
        place, weights = self.tile_place(cta, step, (first, count)), cta.smem.weights
        inputs = self.modifiers(cta, place, masked=masked)
        cta.stream.wait(n)
        slot = cta.smem.streamed.at(cta.stream.slot(n))
        q, do = (slot.tiles.at[which, pl.ds(first, count)] for which in (OF_K, OF_V))
        of_rows = lambda which: load_vector(slot.rows.at[which, pl.ds(first, count)], 1)
        s = self.scores(cta, place, q)  # (1)
        if self.tile.slots == 2:
            cta.stream.start(n + 1)
        w = self.weights(cta, place, s, of_rows(LSE), inputs, masked=masked)
        put_p = functools.partial(self.matmuls.put, tile=weights.at[OF_V], column=first)
        if self.rereads:
            put_p(w.p)
        dp = self.weight_gradients(cta, place, do)  # (2)
        if self.rereads:
            w = w._replace(p=self.matmuls.get(place.shape, weights.at[OF_V], first))
        else:
            put_p(score_tile.dropped(self.problem, w))
        ds = self.score_gradients(cta, place, w, dp, of_rows(DELTA))
        self.matmuls.put(ds, weights.at[OF_K], first)
        return slot

    @property
    def rereads(self) -> bool:
        """True if P is read back in 16 bits for dS: registers have no room for it next to dP.

        Each thread reads what it has written. With dropout, a softcap or score_mod between P and
        dS, P stays in registers.
        """
        spec, tile = self.problem.spec, self.tile
        if spec.dropout_rate or spec.score_modifiers:
            return False
        elements = tile.rows * (fused_width(self.problem) + tile.columns)
        return elements >= MOST_REGISTERS * THREADS

    def finish(self, cta: KvStationaryCta, out: GradientSums, total):
        """Writes dV and dK, staged where V and K were; 0 for keys beyond a length.

        These are 0 because the weights of such keys are.
        """
        spec, warpgroups, own = self.problem.spec, cta.copies.warpgroups, cta.smem.own
        gain = dropout.gain(spec.dropout_rate) if spec.dropout_rate else 1.0
        factor = jnp.where(warpgroups.rank == OF_V, jnp.float32(gain), jnp.float32(spec.scale))
        self.matmuls.put(total * factor, own.at[warpgroups.rank], 0, self.grid)
        cta.copies.sync()
        first = cta.block * self.tile.rows
        for which, target in ((OF_K, out.dk), (OF_V, out.dv)):
            target = target.at[cta.batch, :, cta.kv_head]
            cta.copies.store(own.at[which], target, first, self.problem.kv_len)


def fused(
    problem: Problem, tile: FusedSizes, operands: Operands, arrays: BackwardArrays, interpret: bool
):
    """Launches the fused backward; returns (dQ [B, T, N, H], dK [B, S, K, H], dV [B, S, K, Hv])."""
    kernel = FusedKernel(problem, tile, interpret)
    blocks = pl.cdiv(problem.kv_len, tile.rows)
    out = outputs(problem, blocks * tile.rows if interpret else problem.kv_len)
    run = functools.partial(
        launch,
        out=(out,),
        scratch=(tiles.fused_layout(problem, tile, interpret),),
        # Blocks of some heads side by side add to different tiles of dQ, and the longest loops of a
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
    gmem = arrays.stacked().of_kernel(kernel.inputs, operands, tile, problem.group)

    def accumulate(refs):
        dq, dk, dv = refs
        (gradients,) = run(functools.partial(kernel, dq))(gmem)
        dk[...], dv[...] = gradients

    # dK and dV are overwritten, and XLA drops their zeros.
    zeros = (jnp.zeros(x.shape, x.dtype) for x in out)
    dq, dk, dv = pl.run_state(accumulate)((kernel.dq_sums.zeros(problem), *zeros))
    dq = narrowed(problem, kernel.dq_sums, dq)
    return dq, dk[:, : problem.kv_len], dv[:, : problem.kv_len]


# --- accumulation of dQ: float32 in device memory, in an order of its own ------------------------
# Of each Q tile a warpgroup has half of the columns, and a thread of it has the registers of an
# accumulator of `grid`, in the order of gpu/ptx/device_sums.py. Before 9.0 one instruction adds one
# float. A second launch reads the tiles in the same order and writes dQ in 16 bits.
#
# Under the interpreter a part of a tile is [rows, columns], and copy_smem_to_gmem adds it.


@dataclasses.dataclass(frozen=True)
class DqSums:
    """Buffer in device memory that dQ is accumulated in.

    Attributes:
        rows: number of queries in a tile.
        width: number of columns of a tile.
        vector: number of floats that one instruction adds.
        interpret: run under the interpreter.
    """

    rows: int
    width: int
    vector: int
    interpret: bool

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of a tile."""
        return self.rows, self.width // WARPGROUPS

    @property
    def grid(self) -> Grid:
        """Arrangement of a warpgroup's warps over its part of a tile."""
        return Grid.of(*self.part)

    @property
    def tile(self) -> tuple[int, ...]:
        """Shape of a tile in device memory: both parts."""
        rows, columns = self.part
        if self.interpret:
            return WARPGROUPS, rows, columns
        return WARPGROUPS, rows * columns // THREADS // self.vector, THREADS, self.vector

    def zeros(self, problem: Problem):
        """Returns zeros for all tiles: f32[B, N, tiles, *tile]."""
        tiles = pl.cdiv(problem.q_len, self.rows)
        return jnp.zeros((problem.batch, problem.q_heads, tiles, *self.tile), jnp.float32)

    def add(self, values, target, scratch, rank):
        """Adds one part to a tile in device memory.

        Args:
            values: f32[part], an accumulator of `grid`.
            target: the tile in device memory.
            scratch: FusedSmem.dq.
            rank: rank of this warpgroup.
        """
        target = target.at[rank]
        if self.interpret:
            scratch[rank] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch.at[rank], target, reduction_op="add")
            plgpu.wait_smem_to_gmem(0)
            return
        device_sums.add(values, target, self.vector)

    def load(self, source):
        """Loads one part of a tile from device memory as an accumulator of `grid`."""
        if self.interpret:
            return source[...]
        return device_sums.load(source, self.grid.label(*self.part), self.vector)


@dataclasses.dataclass(frozen=True)
class Narrow(Kernel):
    """One launch that scales the sums and writes dQ in 16 bits; a CTA has one tile."""

    problem: Problem
    sums: DqSums
    interpret: bool

    def __call__(self, tiles, dq, staging):
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "q"))
        for part in range(WARPGROUPS):
            values = self.sums.load(tiles.at[batch, head, block, part])
            column = part * self.sums.part[1]
            self.matmuls.put(values * self.problem.spec.scale, staging, column, self.sums.grid)
        self.copies.sync()
        target = dq.at[batch, :, head]
        self.copies.store(staging, target, block * self.sums.rows, self.problem.q_len)


def narrowed(problem: Problem, sums: DqSums, tiles):
    """Launches Narrow and returns dQ [B, T, N, H] from the tiles."""
    blocks = tiles.shape[2]
    rows = blocks * sums.rows if sums.interpret else problem.q_len
    shape = problem.batch, rows, problem.q_heads, problem.head_dim
    run = launch(
        Narrow(problem, sums, sums.interpret),
        out=jax.ShapeDtypeStruct(shape, problem.dtype),
        scratch=(buffer((sums.rows, sums.width), problem.dtype),),
        grid={"batch": problem.batch, "head": problem.q_heads, "q": blocks},
        threads=1,
        name="flash_pallas_portable_narrow",
        interpret=sums.interpret,
    )
    return run(tiles)[:, : problem.q_len]
