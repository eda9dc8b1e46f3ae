"""Tile sizes of the portable backward: fused, split, and sums for the gradients of modifiers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.integers import round_up
from ....core.problem import Problem
from ...gpu import auxiliary_arrays
from ...gpu.auxiliary_arrays import LONGEST_TILE
from ...gpu.launch import shared_memory
from ..common.shares import ScoreParts
from ..common.smem_tiles import WIDEST_ALONE, buffer, widths
from ..common.tiles import (
    MANY_MODIFIERS,
    TileSizes,
    for_width,
    modifiers,
    owned_and_streamed,
    parts_of_scores,
    turns_fault,
)

# --- Shared memory --------------------------------------------------------------------------------

WARPGROUPS = 2  # of the fused backward
WIDTH_UNIT = 16 * WARPGROUPS  # columns of K and V: each warpgroup has whole units of ldmatrix
OF_V, OF_K = range(WARPGROUPS)  # what dV is made of, and dK
# Of Q in the dK/dV kernel and of K in that of dQ. The first and the last matmul of a step read it,
# so its next tile goes to another slot. dO or V is free before the last matmul, which hides the
# copy of its next tile.
SLOTS = 2


class DkvSmem(NamedTuple):
    """Shared memory of the dK/dV kernel."""

    k: Any  # [rows, H], in the end dK
    v: Any  # [rows, Hv], in the end dV; None where V takes turns with K
    q: Any  # [SLOTS, columns, H], or one slot
    do: Any  # [columns, Hv]; None where dO takes turns with Q
    scores: ScoreParts | None  # of two warpgroups

    @property
    def whole(self) -> DkvSmem:
        """The same with every tile, in whichever place."""
        return self if self.v is not None else self._replace(v=self.k, do=self.q.at[0])


class DqSmem(NamedTuple):
    """Shared memory of the dQ kernel."""

    q: Any  # [rows, H], in the end dQ
    do: Any  # [rows, Hv]; None where dO takes turns with Q
    k: Any  # [SLOTS, columns, H], or one slot
    v: Any  # [columns, Hv]; None where V takes turns with K
    scores: ScoreParts | None  # of two warpgroups

    @property
    def whole(self) -> DqSmem:
        """The same with every tile, in whichever place."""
        return self if self.v is not None else self._replace(do=self.q, v=self.k.at[0])


class Slot(NamedTuple):
    """Shared memory of one Q tile of the fused backward, or of several."""

    tiles: Any  # [2, columns, width]: dO and Q, at OF_V and OF_K
    rows: Any  # f32[2, columns]: LSE and delta

    def at(self, n) -> Slot:
        """Returns the n-th of several slots."""
        return Slot(self.tiles.at[n], self.rows.at[n])


class FusedSmem(NamedTuple):
    """Shared memory of the fused backward."""

    own: Any  # [2, rows, width]: V and K, in the end dV and dK
    streamed: Slot  # [slots, ...]: dO and Q
    weights: Any  # [2, rows, columns]: P^T without what dropout drops, and dS^T
    dq: Any = None  # f32[2, columns, width / 2]; only under the interpreter, see DqSums.add
    barrier: Any = None  # see Warpgroups

    @property
    def k(self):
        """The K tile, [rows, width]; in the end dK."""
        return self.own.at[OF_K]

    @property
    def v(self):
        """The V tile, [rows, width]; in the end dV."""
        return self.own.at[OF_V]


class LinesSmem(NamedTuple):
    """Shared memory of sums per line: a CTA owns Q and dO and streams K and V, or the reverse."""

    first: Any  # [rows, H]
    second: Any  # [rows, Hv]; None where it takes turns with the first
    streamed_first: Any  # [slots, columns, H]
    streamed_second: Any  # [slots, columns, Hv]; likewise

    @property
    def whole(self) -> LinesSmem:
        """The same with every tile, in whichever place."""
        if self.second is not None:
            return self
        return self._replace(second=self.first, streamed_second=self.streamed_first)


class TilesSmem(NamedTuple):
    """Shared memory of dbias.TileSums."""

    q: Any  # [slots, rows, H]
    k: Any  # [slots, columns, H]
    do: Any  # [slots, rows, Hv]; None where it takes turns with Q
    v: Any  # [slots, columns, Hv]; None where it takes turns with K
    barrier: Any = None  # see Warpgroups

    @property
    def whole(self) -> TilesSmem:
        """The same with every tile, in whichever place."""
        return self if self.v is not None else self._replace(do=self.q, v=self.k)


def dkv_layout(problem: Problem, tile: TileSizes, interpret: bool = False) -> DkvSmem:
    """Returns the shared memory to allocate for a CTA of the dK/dV kernel."""
    scores = parts_of_scores(problem, tile, interpret)
    return DkvSmem(*owned_and_streamed(problem, tile, (SLOTS,), ()), scores=scores)


def dq_layout(problem: Problem, tile: TileSizes, interpret: bool = False) -> DqSmem:
    """Returns the shared memory to allocate for a CTA of the dQ kernel."""
    scores = parts_of_scores(problem, tile, interpret)
    return DqSmem(*owned_and_streamed(problem, tile, (SLOTS,), ()), scores=scores)


def fused_width(problem: Problem) -> int:
    """Returns the columns of every head-dim tile: one matmul reads tiles of Q or of dO."""
    return round_up(max(problem.head_dim, problem.v_head_dim), WIDTH_UNIT)


def fused_layout(problem: Problem, tile: FusedSizes, interpret: bool = False) -> FusedSmem:
    """Returns the shared memory to allocate for a CTA of the fused backward."""
    dtype, width = problem.dtype, fused_width(problem)
    dq = plgpu.SMEM((WARPGROUPS, tile.columns, width // WARPGROUPS), jnp.float32)
    return FusedSmem(
        own=buffer((WARPGROUPS, tile.rows, width), dtype),
        streamed=Slot(
            tiles=buffer((tile.slots, WARPGROUPS, tile.columns, width), dtype),
            rows=plgpu.SMEM((tile.slots, WARPGROUPS, tile.columns), jnp.float32),
        ),
        weights=buffer((WARPGROUPS, tile.rows, tile.columns), dtype),
        dq=dq if interpret else None,
        barrier=plgpu.Barrier(num_arrivals=WARPGROUPS) if interpret else None,
    )


def score_lines(problem: Problem, tile: ScoreLines) -> LinesSmem:
    """Returns the shared memory to allocate for a CTA of dbias.LineSums."""
    slots = (tile.slots,)
    return LinesSmem(*owned_and_streamed(problem, tile, slots, slots))


def score_tiles(problem: Problem, tile: ScoreTiles, interpret: bool = False) -> TilesSmem:
    """Returns the shared memory to allocate for a CTA of dbias.TileSums."""
    width, v_width = widths(problem)
    tile_buffer = lambda rows, columns: buffer((tile.slots, rows, columns), problem.dtype)
    meets = interpret and tile.warpgroups > 1
    if tile.turns:
        width = max(width, v_width)
    return TilesSmem(
        q=tile_buffer(tile.rows, width),
        k=tile_buffer(tile.columns, width),
        do=None if tile.turns else tile_buffer(tile.rows, v_width),
        v=None if tile.turns else tile_buffer(tile.columns, v_width),
        barrier=plgpu.Barrier(num_arrivals=tile.warpgroups) if meets else None,
    )


# --- The fused and the split backward -------------------------------------------------------------

AT_ONCE_BYTES = 16 << 20  # of Q, dO and dQ of the heads that are worked on at one time: stay in L2


@dataclasses.dataclass(frozen=True)
class FusedSizes:
    """Tile sizes of the fused backward.

    Attributes:
        rows: keys of a CTA of eight warps, 64 or 128.
        columns: queries of a step, 64 or 128.
        slots: slots for tiles of Q and dO. With two, the next tile has most of a step to arrive,
            and warps synchronize twice a step; with one, it has the time of dQ, and they do three
            times.
        vector: floats of dQ that one instruction adds: 1, or from 9.0 on 2 or 4.
        heads: number of (batch entry, KV head) pairs whose CTAs run side by side.
        mask_all: all tiles are masked, in one loop, if any tile is.
        stagger: CTAs of a head start at different queries, where there is one loop.
    """

    rows: int
    columns: int
    slots: int
    vector: int
    heads: int
    mask_all: bool
    stagger: bool


# By the largest head dim, the best that fits first: (rows, columns, slots).
#
# Bytes of shared memory read and written for each matmul decide (benchmarks/NOTES.md). At head
# dim 64 they are 0.83 with 128 queries of those with 64; there two slots are 1.06 of one (H200,
# causal 1.07), at 256 0.97 and 0.96. At 192, and at 256 with modifiers, one slot spills more.
_SHAPES = {
    64: ((128, 128, 2), (128, 128, 1), (128, 64, 1)),
    128: ((128, 64, 2), (128, 64, 1), (64, 64, 1)),
    192: ((64, 64, 2), (64, 64, 1)),
    256: ((64, 64, 1),),
}
_MODIFIED = _SHAPES | {256: _SHAPES[192]}
# 128 queries at head dim 128 are 1.06 of 64 without a mask, causal 0.98. They spill 4 bytes on 9.0,
# ragged 4 more, and 4 on 10.0 in float16, where nothing was timed and 64 are taken.
_PLAIN_FUSED = _SHAPES | {128: ((128, 128, 1), *_SHAPES[128])}
# Each modifier takes registers; all of them together spill 500 to 700 bytes with the above.
_SMALLER = {
    64: ((128, 64, 2), (128, 64, 1)),
    128: ((64, 64, 2), (64, 64, 1)),
    256: _SHAPES[192],
}


def fused_bytes(tile: FusedSizes, problem: Problem) -> int:
    """Returns the bytes of shared memory that a CTA takes."""
    return shared_memory(fused_layout(problem, tile))


def choose_fused(
    problem: Problem, vector: int, shared: int, *, pairs: bool = False
) -> FusedSizes | None:
    """Chooses the default tile sizes; returns None if no tile fits.

    Args:
        problem: what is computed.
        vector: the most floats that one instruction adds.
        shared: bytes of shared memory that a CTA may ask for.
        pairs: one instruction adds the floats of two registers; see common/tiles.py.
    """
    limit = fused_width(problem)
    if limit > WIDEST_ALONE:
        return None
    heads, unmasked = _heads_at_once(problem), problem.spec.mask.is_trivial
    count = modifiers(problem)
    plain = unmasked and problem.kv_len % 128 == 0 and not pairs and not problem.is_listed
    table = _MODIFIED if count else _PLAIN_FUSED if plain else _SHAPES
    table = table if count < MANY_MODIFIERS else _SMALLER
    shapes = for_width(table, limit)
    for rows, columns, slots in shapes:
        # Masked tiles of a list have a loop of their own: a mask_mod costs more than a loop.
        mask_all = not problem.is_listed
        tile = FusedSizes(rows, columns, slots, vector, heads, mask_all, stagger=unmasked)
        if fused_bytes(tile, problem) <= shared:
            return tile
    return None


def _heads_at_once(problem: Problem) -> int:
    pair_bytes = 8 * problem.q_len * problem.head_dim * problem.group
    pairs = problem.kv_heads * problem.batch
    sections = -(-pairs // max(1, AT_ONCE_BYTES // pair_bytes))
    return -(-pairs // sections)


def fault(tile: FusedSizes, vector: int) -> str | None:
    """Returns why the kernel cannot take these sizes, or None; `vector` is the GPU's maximum."""
    if tile.rows not in (64, 128) or tile.columns not in (64, 128):
        return "rows and columns must be 64 or 128"
    if tile.slots not in (1, 2):
        return "slots must be 1 or 2"
    if tile.vector not in (1, 2, 4) or tile.vector > vector:
        return f"vector must be 1{', 2 or 4' if vector > 1 else ' before compute capability 9.0'}"
    return None


@dataclasses.dataclass(frozen=True)
class SplitSizes:
    """Tile sizes of the deterministic backward, which also runs where no fused tile fits."""

    dkv: TileSizes
    dq: TileSizes


# --- Sums for the gradients of modifiers ----------------------------------------------------------

ENOUGH_BLOCKS = 2 * 132  # with fewer, a sum over batch entries and heads is cut into parts
# Head dim up to which the bias of a tile stays in registers: 1.12 of the whole backward (H200,
# B = 128, 4 heads of 64, T = 1024). At 128 it is 1.07 and spills 60 bytes.
MOST_TO_KEEP = 64
PIECE = 32  # columns of a warpgroup whose S and dP are in registers at one time


@dataclasses.dataclass(frozen=True)
class ScoreTiles:
    """Tile sizes of the sums over batch entries and heads.

    Attributes:
        rows: queries of a tile, 64 or 128.
        columns: keys of a tile, of which each warpgroup has an equal part.
        warpgroups: 1 or 2.
        slots: 1 or 2 tiles of each of Q, K, V and dO.
        keep_bias: the bias of a tile stays in registers.
        turns: dO and V take the place of Q and K in every step; with one slot.
    """

    rows: int
    columns: int
    warpgroups: int
    slots: int
    keep_bias: bool
    turns: bool = False

    def bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA."""
        return shared_memory(score_tiles(problem, self))

    @property
    def fault(self) -> str | None:
        """The reason why the kernel cannot take these sizes, or None."""
        if self.rows not in (64, 128) or not {self.warpgroups, self.slots} <= {1, 2}:
            return "rows must be 64 or 128, warpgroups and slots 1 or 2"
        if self.columns <= 0 or self.columns % (16 * self.warpgroups):
            return f"columns must be a multiple of {16 * self.warpgroups}"
        return turns_fault(self)


@dataclasses.dataclass(frozen=True)
class ScoreLines:
    """Tile sizes of the sums over keys for every query, and over queries for every key.

    Attributes:
        rows: queries, or keys, that a CTA of four warps owns: 64 or 128.
        columns: keys, or queries, of a tile that streams by: a multiple of 16.
        slots: 1 or 2 tiles of what streams by.
        turns: dO and V take the place of Q and K in every step; with one slot.
    """

    rows: int
    columns: int
    slots: int
    turns: bool = False

    def bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA."""
        return shared_memory(score_lines(problem, self))

    @property
    def fault(self) -> str | None:
        """The reason why the kernel cannot take these sizes, or None."""
        if self.rows not in (64, 128) or self.slots not in (1, 2):
            return "rows must be 64 or 128, slots 1 or 2"
        if self.columns % 16 or not 0 < self.columns <= LONGEST_TILE:
            return f"columns must be a multiple of 16 up to {LONGEST_TILE}"
        return turns_fault(self)


@dataclasses.dataclass(frozen=True)
class ScoreBlocks:
    """Tile sizes of the kernels that a call's gradients may need; None where it needs none."""

    tile: Any = None  # ScoreTiles
    lines: Any = None  # ScoreLines


# By the largest head dim: (rows, columns, warpgroups, slots), the first that fits. A step copies
# rows + columns of two arrays each for rows x columns scores.
_SCORE_TILES = {
    64: ((128, 128, 2, 2), (128, 128, 2, 1), (128, 64, 2, 1)),
    128: ((128, 128, 2, 1), (64, 64, 2, 1)),
    256: ((128, 64, 2, 1), (64, 64, 2, 1), (64, 16, 1, 1)),
}
# (rows, columns, slots): the first of which an SM holds two blocks, else the first that
# fits, as four warps alone leave nothing to run while they wait.
_LINES = {
    64: ((128, 64, 2), (64, 64, 2), (64, 32, 2)),
    128: ((128, 32, 2), (64, 32, 2), (64, 32, 1)),
    256: ((64, 32, 2), (64, 32, 1), (64, 16, 1)),
}
# Where more than a bias changes scores, a mask too: else 32 to 140 bytes of spills at head dim 128.
_MODIFIED_TILES = _SCORE_TILES | {128: ((128, 64, 2, 2), (128, 64, 2, 1), (64, 64, 2, 1))}
# Each modifier takes registers: with many of them these.
_TILES_OF_MANY = {
    64: ((128, 64, 2, 2), (128, 64, 2, 1)),
    128: ((64, 64, 2, 2), (64, 64, 2, 1)),
    256: ((64, 64, 2, 1), (64, 16, 1, 1)),
}
_LINES_OF_MANY = {
    64: ((64, 32, 2),),
    128: ((64, 32, 2), (64, 32, 1)),
    256: ((64, 16, 2), (64, 16, 1)),
}
# Above head dim 256, whatever changes scores. Sums of dS have no head dims, so registers are those
# of narrow heads; tiles take turns where shared memory has no room for both pairs.
_WIDE_TILES = (
    ScoreTiles(64, 64, 2, 1, keep_bias=False),
    ScoreTiles(64, 64, 2, 1, keep_bias=False, turns=True),
    ScoreTiles(64, 32, 2, 1, keep_bias=False, turns=True),
)
_WIDE_LINES = (
    ScoreLines(64, 32, 1),
    ScoreLines(64, 32, 1, turns=True),
    ScoreLines(64, 16, 1, turns=True),
)


def choose_scores(problem: Problem, shared: int) -> dict[str, ScoreTiles | ScoreLines]:
    """Chooses tile sizes by kernel name, for only those kernels whose gradients a call can have.

    Args:
        problem: what is computed.
        shared: bytes of shared memory that a CTA may ask for.
    """
    chosen: dict[str, ScoreTiles | ScoreLines] = {}
    tiled = auxiliary_arrays.kind(problem.bias_shape, q_axis=0) == "tile"
    if tiled:
        chosen["score_tiles"] = choose_tile(problem, shared)
    if problem.features & {"alibi_slopes", "score_params"} or (
        problem.bias_shape is not None and not tiled
    ):
        chosen["score_lines"] = choose_lines(problem, shared)
    return chosen


def choose_tile(problem: Problem, shared: int) -> ScoreTiles:
    """Chooses the sizes of dbias.TileSums for `choose_scores`."""
    limit, plain = max(widths(problem)), _sums_are_plain(problem)
    table = _SCORE_TILES if plain else _MODIFIED_TILES
    if modifiers(problem) >= MANY_MODIFIERS:
        table = _TILES_OF_MANY
    tiles = _WIDE_TILES
    if limit <= WIDEST_ALONE:
        keep = plain and limit <= MOST_TO_KEEP
        tiles = tuple(ScoreTiles(*shape, keep_bias=keep) for shape in for_width(table, limit))
    for tile in tiles:
        if tile.bytes(problem) <= shared:
            return tile
    raise AssertionError(f"{problem}: no tile fits into {shared} bytes of shared memory")


def choose_lines(problem: Problem, shared: int) -> ScoreLines:
    """Chooses the sizes of dbias.LineSums for `choose_scores`."""
    limit = max(widths(problem))
    table = _LINES_OF_MANY if modifiers(problem) >= MANY_MODIFIERS else _LINES
    tiles = _WIDE_LINES
    if limit <= WIDEST_ALONE:
        tiles = tuple(ScoreLines(*shape) for shape in for_width(table, limit))
    for blocks in (2, 1):
        for tile in tiles:
            if blocks * tile.bytes(problem) <= shared:
                return tile
    raise AssertionError(f"{problem}: no tile fits into {shared} bytes of shared memory")


def _sums_are_plain(problem: Problem) -> bool:
    """Checks that a bias is all that changes scores, except scalars per batch entry and head."""
    spec = problem.spec
    if spec.modifiers or not spec.mask.is_trivial:
        return False
    return problem.features <= {"bias", "sinks", "q_lengths", "q_offset"}
