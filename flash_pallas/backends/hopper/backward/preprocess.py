"""One launch before a backward: delta, the rowsum(O dO) of every query, and zeros to add dQ to.

A launch that only reads O and dO, and one that only writes zeros, wait on memory one after the
other. Here CTAs of one warpgroup take tiles of 64 queries of a head in turns. A ring of TMA copies
keeps the next tiles on their way, and for each tile TMA also writes as many lines of zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.integers import round_up
from ....core.padding import pad_axis
from ....core.problem import Cotangents, Problem
from ....core.softmax import EMPTY_ROW
from ...gpu import inline
from ...gpu.launch import WARPGROUP_ROWS, float32
from ...gpu.launch import launch as launch_kernel
from ..common.pipeline import Ring, rows_of, swizzles, tile_buffer
from ..common.wgmma import LENGTH_MULTIPLE
from .operands import ROW_MULTIPLE

CTAS = 2 * 132  # two on each SM of an H200: with two slots of 32 KB each, 64 KB are on their way
SLOTS = 2
ZERO_LINES = 32  # of 512 bytes at head dim 128: 16 KB of zeros, to be copied twice for each tile
WIDEST = 256  # head dim of O


def takes(problem: Problem) -> bool:
    """Says whether this kernel computes delta of a call; for others XLA does.

    The gradient of sinks is another that reads delta. TMA reads O and dO as they are, without
    copies.
    """
    plain = problem.dtype.itemsize == 2 and "sinks" not in problem.features
    whole = problem.q_len % LENGTH_MULTIPLE == 0 and problem.v_head_dim <= WIDEST
    return plain and whole and tile_width(problem) > 0


def tile_width(problem: Problem) -> int:
    """Returns the columns of a tile of O in shared memory; 0 where TMA cannot fill one."""
    width = problem.v_head_dim
    widths = (round_up(width, multiple) for multiple in (16, 32, 64))
    return next((w for w in widths if swizzles(w, problem.dtype, width)), 0)


class Smem(NamedTuple):
    """Shared memory of a CTA."""

    o: Any  # [SLOTS, 64, width]
    do: Any  # likewise
    full: Any  # mbarriers of each slot, as the next
    empty: Any
    zeros: Any  # f32[ZERO_LINES, D]; None without dQ


class Gmem(NamedTuple):
    """Operands in device memory."""

    o: Any  # [B, T, N, Hv]
    do: Any  # [B, T, N, Hv]
    lse_log2: Any  # f32[B, N, T up to a multiple of 128]
    dlse: Any  # likewise, or None


def preprocess(
    problem: Problem, cotangents: Cotangents, dq_columns: int | None, interpret: bool
) -> tuple[Any, Any]:
    """Computes delta, and zeros to add dQ to.

    Args:
        problem: of the call; see `takes`.
        cotangents: with o and maybe dlse.
        dq_columns: head dim of the sums of dQ; None: they are not wanted.
        interpret: run by the interpreter.

    Returns:
        (delta, dq): f32[B, N, T up to a multiple of 128], rowsum(o * do) - dlse and 0 for queries
        without keys; and f32[B, T, N, dq_columns] of zeros, or None.
    """
    rows = round_up(problem.q_len, ROW_MULTIPLE)
    lse_log2 = pad_axis(cotangents.lse_log2, 2, rows, EMPTY_ROW)
    dlse = None if cotangents.dlse is None else pad_axis(cotangents.dlse, 2, rows)
    kernel = Preprocess(problem, rows // WARPGROUP_ROWS)
    out, zeros = [float32(lse_log2.shape)], None
    if dq_columns is not None:
        lines = problem.batch * problem.q_len * problem.q_heads
        out.append(float32((lines, dq_columns)))
        zeros = plgpu.SMEM((ZERO_LINES, dq_columns), jnp.float32)
    run = launch_kernel(
        kernel.run,
        out=out,
        scratch=(kernel.scratch(zeros),),
        grid={"cta": kernel.ctas},
        threads=1,
        name="flash_pallas_preprocess",
        interpret=interpret,
    )
    delta, *dq = run(Gmem(cotangents.o, cotangents.do, lse_log2, dlse))
    if not dq:
        return delta, None
    return delta, dq[0].reshape(*cotangents.o.shape[:3], dq_columns)


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """The kernel.

    Attributes:
        problem: of the call.
        blocks: number of tiles of each head, up to the end of delta.
    """

    problem: Problem
    blocks: int

    @property
    def tiles(self) -> int:
        """Number of tiles of all heads."""
        return self.problem.batch * self.blocks * self.problem.q_heads

    @property
    def ctas(self) -> int:
        """Size of the grid."""
        return min(self.tiles, CTAS)

    def scratch(self, zeros) -> Smem:
        """Returns what to allocate; `zeros` is that of Smem."""
        shape = SLOTS, WARPGROUP_ROWS, tile_width(self.problem)
        tile = tile_buffer(shape, self.problem.dtype, self.swizzle)
        full, empty = (plgpu.Barrier(num_arrivals=n, num_barriers=SLOTS) for n in (2, 1))
        return Smem(tile, tile, full, empty, zeros)

    @property
    def swizzle(self) -> int:
        """Swizzle of tiles of O and dO, in bytes."""
        width, problem = tile_width(self.problem), self.problem
        return swizzles(width, problem.dtype, problem.v_head_dim)[0]

    def run(self, gmem: Gmem, *refs):
        """Computes delta of every `ctas`-th tile, and clears as many lines of dQ."""
        delta, *dq, smem = refs
        cta, step = lax.axis_index("cta"), jnp.int32(self.ctas)
        total = lax.div(jnp.int32(self.tiles - 1) - cta, step) + 1
        number = lambda n: cta + n * step

        def load(n):
            pl.when(n < total)(lambda: self.load(gmem, smem, ring, n, number(n)))

        ring = Ring(smem.full, smem.empty, SLOTS, refill=load)
        for n in range(SLOTS):
            load(jnp.int32(n))
        if dq:
            layout = plgpu.Layout.WG_STRIDED(smem.zeros.shape, vec_size=4)
            smem.zeros[...] = plgpu.layout_cast(jnp.zeros(smem.zeros.shape, jnp.float32), layout)
            plgpu.commit_smem()

        @pl.loop(jnp.int32(0), total)
        def _(n):
            if dq:
                clear(smem.zeros, dq[0], number(n))
            rows = self.rows(number(n))
            own = lambda ref: plgpu.load(ref.at[rows], layout=inline.ROWS, optimized=False)
            lse_log2 = own(gmem.lse_log2)
            dlse = None if gmem.dlse is None else own(gmem.dlse)
            ring.wait_full(n)
            found = self.row_sums(smem, ring.slot(n))
            ring.release(n)
            found = found if dlse is None else found - dlse
            # Rows without keys have no P, whatever their cotangents hold: see `delta_of`.
            delta.at[rows][...] = jnp.where(lse_log2 >= EMPTY_ROW / 2, 0.0, found)

        ring.drain(total)
        plgpu.wait_smem_to_gmem(0)

    def place(self, tile):
        """Returns (batch entry, block, head) of a tile; heads lie next to each other in memory."""
        heads, blocks = jnp.int32(self.problem.q_heads), jnp.int32(self.blocks)
        others = lax.div(tile, heads)
        return lax.div(others, blocks), lax.rem(others, blocks), lax.rem(tile, heads)

    def rows(self, tile) -> tuple:
        """Returns the index of a tile's rows in delta."""
        batch, block, head = self.place(tile)
        return batch, head, pl.ds(block * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def load(self, gmem: Gmem, smem: Smem, ring: Ring, n, tile):
        """Starts to copy O and dO of a tile, the n-th of this CTA."""
        batch, block, head = self.place(tile)
        at = batch, pl.ds(block * WARPGROUP_ROWS, WARPGROUP_ROWS), head
        slot = ring.slot(n)
        ring.wait_empty(n)
        for source, tiles in ((gmem.o, smem.o), (gmem.do, smem.do)):
            target = tiles.at[slot]
            plgpu.copy_gmem_to_smem(rows_of(source, at, target), target, ring.full.at[slot])

    def row_sums(self, smem: Smem, slot):
        """Returns rowsum(o * do) of a slot, f32[64], in the layout ROWS."""
        width = self.swizzle // self.problem.dtype.itemsize
        total: Any = None
        for column in range(0, smem.o.shape[-1], width):
            at = slot, slice(None), pl.ds(column, width)
            load = lambda ref, at=at: plgpu.load(ref.at[at], layout=inline.WGMMA)
            o, do = (load(ref).astype(jnp.float32) for ref in (smem.o, smem.do))
            total = o * do if total is None else total + o * do
        return jnp.sum(total, axis=1)


def clear(zeros, dq, tile):
    """Starts to clear as many lines of dQ as a tile has rows, up to its end.

    The last tiles may lie beyond it, as delta has rows past the last query.
    """
    for line in range(0, WARPGROUP_ROWS, ZERO_LINES):
        start = tile * WARPGROUP_ROWS + line
        copy = functools.partial(plgpu.copy_smem_to_gmem, zeros, dq.at[pl.ds(start, ZERO_LINES)])
        pl.when(start < dq.shape[0])(copy)
