"""Shared memory layouts: the buffers that a CTA of each kernel allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.decode import DecodeProblem
from ...core.integers import round_up
from ...core.problem import Problem
from .dq_sums import DqSums
from .folding import Exchange
from .passing import Slot
from .stream import SLOTS
from .tiles import buffer, widths

if TYPE_CHECKING:
    from .blocks import TileSizes
    from .decode_blocks import PortableDecodeBlocks
    from .fused_blocks import FusedSizes
    from .score_blocks import ScoreLines, ScoreTiles

WARPGROUPS = 2  # of the fused backward
WIDTH_UNIT = 16 * WARPGROUPS  # columns of K and V: each warpgroup has whole units of ldmatrix
OF_V, OF_K = range(WARPGROUPS)  # what dV is made of, and dK


class ForwardSmem(NamedTuple):
    """Shared memory of the forward."""

    q: Any  # [rows, the wider head dim], in the end O
    k: Any  # [slots, columns, H]
    v: Any  # [slots, columns, Hv]
    exchange: Exchange | None  # where weights are shared


class DkvSmem(NamedTuple):
    """Shared memory of the dK/dV kernel."""

    k: Any  # [rows, H], in the end dK
    v: Any  # [rows, Hv], in the end dV
    q: Any  # [SLOTS, columns, H]
    do: Any  # [columns, Hv]


class DqSmem(NamedTuple):
    """Shared memory of the dQ kernel."""

    q: Any  # [rows, H], in the end dQ
    do: Any  # [rows, Hv]
    k: Any  # [SLOTS, columns, H]
    v: Any  # [columns, Hv]


class FusedSmem(NamedTuple):
    """Shared memory of the fused backward."""

    own: Any  # [2, rows, width]: V and K, in the end dV and dK
    passing: Slot  # [slots, ...]: dO and Q
    weights: Any  # [2, rows, columns]: P^T without what dropout drops, and dS^T
    dq: Any = None  # see DqSums.scratch
    met: Any = None  # see Team

    @property
    def k(self):
        """The K tile, [rows, width]; in the end dK."""
        return self.own.at[OF_K]

    @property
    def v(self):
        """The V tile, [rows, width]; in the end dV."""
        return self.own.at[OF_V]


class LinesSmem(NamedTuple):
    """Shared memory of score_lines.py: a CTA owns Q and dO and streams K and V, or the reverse."""

    first: Any  # [rows, H]
    second: Any  # [rows, Hv]
    passing_first: Any  # [slots, columns, H]
    passing_second: Any  # [slots, columns, Hv]


class TilesSmem(NamedTuple):
    """Shared memory of score_tiles.py."""

    q: Any  # [slots, rows, H]
    k: Any  # [slots, columns, H]
    do: Any  # [slots, rows, Hv]
    v: Any  # [slots, columns, Hv]
    met: Any = None  # see Team


class DecodeSmem(NamedTuple):
    """Shared memory of the decode kernel."""

    q: Any  # [rows, H]
    k: Any  # [columns, H]
    v: Any  # [columns, Hv]


def forward(problem: Problem, tile: TileSizes) -> ForwardSmem:
    """Returns the shared memory to allocate for a CTA of the forward."""
    width, v_width = widths(problem)
    exchange = None
    if tile.shared_weights:
        exchange = Exchange.scratch(tile.rows, tile.columns, problem.dtype)
    return ForwardSmem(
        q=buffer((tile.rows, max(width, v_width)), problem.dtype),
        k=buffer((tile.slots, tile.columns, width), problem.dtype),
        v=buffer((tile.slots, tile.columns, v_width), problem.dtype),
        exchange=exchange,
    )


def dkv(problem: Problem, tile: TileSizes) -> DkvSmem:
    """Returns the shared memory to allocate for a CTA of the dK/dV kernel."""
    width, v_width = widths(problem)
    return DkvSmem(
        k=buffer((tile.rows, width), problem.dtype),
        v=buffer((tile.rows, v_width), problem.dtype),
        q=buffer((SLOTS, tile.columns, width), problem.dtype),
        do=buffer((tile.columns, v_width), problem.dtype),
    )


def dq(problem: Problem, tile: TileSizes) -> DqSmem:
    """Returns the shared memory to allocate for a CTA of the dQ kernel."""
    width, v_width = widths(problem)
    return DqSmem(
        q=buffer((tile.rows, width), problem.dtype),
        do=buffer((tile.rows, v_width), problem.dtype),
        k=buffer((SLOTS, tile.columns, width), problem.dtype),
        v=buffer((tile.columns, v_width), problem.dtype),
    )


def fused_width(problem: Problem) -> int:
    """Returns the columns of every head-dim tile: one product reads tiles of Q or of dO."""
    return round_up(max(problem.head_dim, problem.v_head_dim), WIDTH_UNIT)


def fused(problem: Problem, tile: FusedSizes, interpret: bool = False) -> FusedSmem:
    """Returns the shared memory to allocate for a CTA of the fused backward."""
    dtype, width = problem.dtype, fused_width(problem)
    sums = DqSums(tile.columns, width, tile.vector, interpret)
    return FusedSmem(
        own=buffer((WARPGROUPS, tile.rows, width), dtype),
        passing=Slot(
            tiles=buffer((tile.slots, WARPGROUPS, tile.columns, width), dtype),
            rows=plgpu.SMEM((tile.slots, WARPGROUPS, tile.columns), jnp.float32),
        ),
        weights=buffer((WARPGROUPS, tile.rows, tile.columns), dtype),
        dq=sums.scratch(),
        met=plgpu.Barrier(num_arrivals=WARPGROUPS) if interpret else None,
    )


def score_lines(problem: Problem, tile: ScoreLines) -> LinesSmem:
    """Returns the shared memory to allocate for a CTA of score_lines.py."""
    width, v_width = widths(problem)
    of = lambda *shape: buffer(shape, problem.dtype)
    return LinesSmem(
        first=of(tile.rows, width),
        second=of(tile.rows, v_width),
        passing_first=of(tile.slots, tile.columns, width),
        passing_second=of(tile.slots, tile.columns, v_width),
    )


def score_tiles(problem: Problem, tile: ScoreTiles, interpret: bool = False) -> TilesSmem:
    """Returns the shared memory to allocate for a CTA of score_tiles.py."""
    width, v_width = widths(problem)
    of = lambda rows, columns: buffer((tile.slots, rows, columns), problem.dtype)
    meets = interpret and tile.warpgroups > 1
    return TilesSmem(
        q=of(tile.rows, width),
        k=of(tile.columns, width),
        do=of(tile.rows, v_width),
        v=of(tile.columns, v_width),
        met=plgpu.Barrier(num_arrivals=tile.warpgroups) if meets else None,
    )


def decode(problem: DecodeProblem, blocks: PortableDecodeBlocks) -> DecodeSmem:
    """Returns the shared memory to allocate for a CTA of the decode kernel."""
    width, v_width = widths(problem)
    return DecodeSmem(
        q=buffer((blocks.rows, width), problem.dtype),
        k=buffer((blocks.columns, width), problem.dtype),
        v=buffer((blocks.columns, v_width), problem.dtype),
    )
