"""Tile sizes of the portable kernels and the shared memory that they take.

The bytes of a launch are counted from its own layout, before tiles are chosen, and tiles step down
until they fit. First come the layouts, then the tiles of the fused backward, of the gradients of
modifiers, of forward and split backward, and of decoding.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.decode import MAX_SPLITS, VALUES_BEHIND_KEYS, DecodeProblem
from ...core.integers import round_up
from ...core.problem import Problem
from ...devices import GENERATIONS
from ..gpu import auxiliary_arrays
from ..gpu.auxiliary_arrays import LONGEST_TILE
from ..gpu.launch import MAX_GRID, WARPGROUP_ROWS, shared_memory
from ..gpu.ptx import draft_bits
from ..gpu.ptx.mma_sync import Grid
from ..gpu.ptx.threads import UNIT
from .common.shares import ScoreParts, score_parts
from .common.smem_tiles import (
    DTYPES,
    HEAD_DIM_MULTIPLE,
    WIDEST_ALONE,
    buffer,
    warpgroups_of,
    widths,
)

WARPGROUPS = 2  # of the fused backward
WIDTH_UNIT = 16 * WARPGROUPS  # columns of K and V: each warpgroup has whole units of ldmatrix
OF_V, OF_K = range(WARPGROUPS)  # what dV is made of, and dK
# Of Q in the dK/dV kernel and of K in that of dQ. The first and the last matmul of a step read it,
# so its next tile goes to another slot. dO or V is free before the last matmul, which hides the
# copy of its next tile.
SLOTS = 2


class Exchange(NamedTuple):
    """Shared memory that P passes through in the forward."""

    weights: Any  # [rows, columns]
    factors: Any  # f32[rows], of O


class ForwardSmem(NamedTuple):
    """Shared memory of the forward."""

    q: Any  # [rows, the wider head dim], in the end O
    k: Any  # [slots, columns, H]
    v: Any  # [slots, columns, Hv]; None where V takes turns with K
    exchange: Exchange | None  # where weights are shared
    scores: ScoreParts | None  # of two warpgroups

    @property
    def whole(self) -> ForwardSmem:
        """The same with every tile, in whichever place."""
        return self if self.v is not None else self._replace(v=self.k)


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


class TangentSmem(NamedTuple):
    """Shared memory of the tangent kernel; in the end q has dO."""

    q: Any  # [rows, the wider head dim]
    dq: Any  # likewise
    k: Any  # [columns, H]
    dk: Any
    v: Any  # [columns, Hv]
    dv: Any


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


class DecodeSmem(NamedTuple):
    """Shared memory of the decode kernel."""

    q: Any  # [rows, H]
    k: Any  # [columns, H]
    v: Any  # [columns, Hv]
    raw: Any = None  # (k, v) of a cache in eight bits, before they are widened


def _score_parts(problem: Problem, tile: TileSizes, interpret: bool) -> ScoreParts | None:
    alone = warpgroups_of(problem) == 1
    return None if alone else score_parts(tile.rows, tile.columns, interpret)


def forward_layout(problem: Problem, tile: TileSizes, interpret: bool = False) -> ForwardSmem:
    """Returns the shared memory to allocate for a CTA of the forward."""
    width, v_width = widths(problem)
    most = max(width, v_width)
    exchange = None
    if tile.shared_weights:
        weights = buffer((tile.rows, tile.columns), problem.dtype)
        exchange = Exchange(weights, plgpu.SMEM((tile.rows,), jnp.float32))
    return ForwardSmem(
        q=buffer((tile.rows, most), problem.dtype),
        k=buffer((tile.slots, tile.columns, most if tile.turns else width), problem.dtype),
        v=None if tile.turns else buffer((tile.slots, tile.columns, v_width), problem.dtype),
        exchange=exchange,
        scores=_score_parts(problem, tile, interpret),
    )


def _owned_and_streamed(problem: Problem, tile: TileSizes | ScoreLines, *slots: tuple[int, ...]):
    """Returns two tiles that a CTA owns, of head dims H and Hv, and two of what streams by.

    `slots` are the leading axes of the latter, (number of slots,) or () for each. Where tiles take
    turns, there is one of either kind, of one slot.
    """
    if tile.turns:
        most = max(widths(problem))
        own = buffer((tile.rows, most), problem.dtype)
        return [own, None, buffer((1, tile.columns, most), problem.dtype), None]
    for_each = zip(slots, widths(problem), strict=True)
    owned = [buffer((tile.rows, width), problem.dtype) for width in widths(problem)]
    return owned + [buffer((*lead, tile.columns, w), problem.dtype) for lead, w in for_each]


def dkv_layout(problem: Problem, tile: TileSizes, interpret: bool = False) -> DkvSmem:
    """Returns the shared memory to allocate for a CTA of the dK/dV kernel."""
    scores = _score_parts(problem, tile, interpret)
    return DkvSmem(*_owned_and_streamed(problem, tile, (SLOTS,), ()), scores=scores)


def dq_layout(problem: Problem, tile: TileSizes, interpret: bool = False) -> DqSmem:
    """Returns the shared memory to allocate for a CTA of the dQ kernel."""
    scores = _score_parts(problem, tile, interpret)
    return DqSmem(*_owned_and_streamed(problem, tile, (SLOTS,), ()), scores=scores)


def tangent_layout(problem: Problem, tile: TileSizes) -> TangentSmem:
    """Returns the shared memory to allocate for a CTA of the tangent kernel."""
    width, v_width = widths(problem)
    tile_buffer = lambda rows, columns: buffer((rows, columns), problem.dtype)
    q, k, v = (
        tile_buffer(tile.rows, max(width, v_width)),
        tile_buffer(tile.columns, width),
        tile_buffer(tile.columns, v_width),
    )
    return TangentSmem(q, q, k, k, v, v)


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
    return LinesSmem(*_owned_and_streamed(problem, tile, slots, slots))


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


def decode_layout(problem: DecodeProblem, blocks: PortableDecodeBlocks) -> DecodeSmem:
    """Returns the shared memory to allocate for a CTA of the decode kernel."""
    width, v_width = widths(problem)[0], round_up(part_columns(problem), 16)
    of_keys = lambda dtype: [buffer((blocks.columns, w), dtype) for w in (width, v_width)]
    k, v = of_keys(problem.dtype)
    raw = tuple(of_keys(problem.kv_dtype)) if problem.quantised else None
    return DecodeSmem(buffer((blocks.rows, width), problem.dtype), k, v, raw)


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
MANY_MODIFIERS = 5


def _for_width(table: dict[int, Any], width: int) -> Any:
    """Returns a table's entry of the narrowest head dim that `width` does not exceed."""
    return next(entry for widest, entry in table.items() if width <= widest)


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
        pairs: one instruction adds the floats of two registers; see blocks.PAIRS.
    """
    limit = fused_width(problem)
    if limit > WIDEST_ALONE:
        return None
    heads, unmasked = _heads_at_once(problem), problem.spec.mask.is_trivial
    count = modifiers(problem)
    plain = unmasked and problem.kv_len % 128 == 0 and not pairs and not problem.is_listed
    table = _MODIFIED if count else _PLAIN_FUSED if plain else _SHAPES
    table = table if count < MANY_MODIFIERS else _SMALLER
    shapes = _for_width(table, limit)
    for rows, columns, slots in shapes:
        # Masked tiles of a list have a loop of their own: a mask_mod costs more than a loop.
        mask_all = not problem.is_listed
        tile = FusedSizes(rows, columns, slots, vector, heads, mask_all, stagger=unmasked)
        if fused_bytes(tile, problem) <= shared:
            return tile
    return None


def modifiers(problem: Problem) -> int:
    """Returns the number of score modifiers, not counting the band and lists of blocks."""
    return len(problem.features - {"block_lists"}) + len(problem.spec.modifiers - {"dropout_rate"})


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
        return _turns_fault(self)


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
        return _turns_fault(self)


def _turns_fault(tile: TileSizes | ScoreTiles | ScoreLines) -> str | None:
    return "slots must be 1 where tiles take turns" if tile.turns and tile.slots != 1 else None


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
        tiles = tuple(ScoreTiles(*shape, keep_bias=keep) for shape in _for_width(table, limit))
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
        tiles = tuple(ScoreLines(*shape) for shape in _for_width(table, limit))
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


SMALLEST = 99 * 1024  # bytes of shared memory, what every GPU of devices.py has for one block
RESERVED = 1024  # bytes that are kept for each block; a block that asks for the rest may be refused
WIDEST = WIDEST_ALONE  # head dim of one warpgroup
WIDEST_SHARED = 512  # head dim that two warpgroups share: 256 columns of each
MOST_COLUMNS = 256  # auxiliary_arrays.LONGEST_TILE: vectors are padded for no longer tiles
FEWEST_COLUMNS = 16  # of a tile: one mma sums as many
# From 10.0 on additions of two neighbours are one instruction on pairs of registers. On 10.0 the
# forward then spills 120 to 320 bytes with the tiles of _PLAIN; on 12.0 it spills none.
PAIRS = "10."


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tile sizes of one kernel.

    Attributes:
        rows: rows of a CTA of four warps, a multiple of 64: queries, or keys in the dK/dV kernel.
        columns: what streams by in a step, a multiple of 16: keys, or queries in the dK/dV kernel.
        slots: number of K tiles, and of V tiles, that the forward buffers, 1 or 2; 1 in other
            kernels.
        shared_weights: P goes through shared memory (forward.SharedWeights); only in the forward,
            and not above head dim 256.
        turns: V takes the place of K in every step, and in the backward dO that of Q; with one
            slot.
    """

    rows: int
    columns: int
    slots: int = 1
    shared_weights: bool = False
    turns: bool = False


@dataclasses.dataclass(frozen=True)
class SplitSizes:
    """Tile sizes of the deterministic backward, which also runs where no fused tile fits."""

    dkv: TileSizes
    dq: TileSizes


@dataclasses.dataclass(frozen=True)
class PortableBlocks:
    """Tile sizes of the kernels that a call and its gradient run."""

    forward: TileSizes
    backward: FusedSizes | SplitSizes
    scores: ScoreBlocks = ScoreBlocks()


def choose_blocks(
    problem: Problem, override: dict[str, Any] | None, capability: str
) -> PortableBlocks:
    """Chooses tile sizes and replaces the fields that `override` names.

    Args:
        problem: what is computed.
        override: fields of the sizes to replace, by kernel.
        capability: compute capability of the GPU, such as "8.0".

    Raises:
        ValueError: `override` names a kernel that does not run or an unknown field, or gives sizes
            that the kernel cannot take.
    """
    chosen, most = _choose(problem, capability), memory_of(capability) - RESERVED
    vector = most_added(capability)
    fused = choose_fused(problem, vector, most, pairs=capability.startswith(PAIRS))
    if not problem.spec.deterministic and fused:
        chosen = {"forward": chosen["forward"], "fused": fused}
    chosen |= choose_scores(problem, most)
    chosen = {name: _dividing(name, tile, problem) for name, tile in chosen.items()}
    for name, fields in (override or {}).items():
        tile = chosen[name] = _overridden(name, fields, chosen)
        taken = bytes_of(name, tile, problem)
        reason = _fault(name, tile, vector, warpgroups_of(problem))
        if reason is None and tile != _dividing(name, tile, problem):
            reason = (
                f"rows and columns must divide the blocks of block_mask, {problem.spec.block_shape}"
                " of (queries, keys): pass fewer, or make a mask of larger blocks"
            )
        if reason is None and taken > most:
            reason = f"takes {taken} bytes of shared memory of {most}: pass fewer rows or columns"
        if reason:
            raise ValueError(f"blocks[{name!r}] is {tile}: {reason}")
    backward = chosen.get("fused") or SplitSizes(chosen["dkv"], chosen["dq"])
    scores = ScoreBlocks(chosen.get("score_tiles"), chosen.get("score_lines"))
    return PortableBlocks(chosen["forward"], backward, scores)


def memory_of(capability: str) -> int:
    """Returns the bytes of shared memory that a CTA may have."""
    known = GENERATIONS.get(capability)
    return SMALLEST if known is None else known.shared_memory


def most_added(capability: str) -> int:
    """Returns how many floats in device memory one instruction adds to (PTX ISA 9.0, red)."""
    major = capability.split(".")[0]
    return 4 if major.isdecimal() and int(major) >= 9 else 1


# Tiles by the largest head dim: those without spills with any modifiers, causal or not (compile
# report), on every GPU. What streams by is read from shared memory once for every 64 rows, so the
# forward has 128 where they and the accumulator fit in 255 registers.
_TILES = {
    64: {"forward": TileSizes(128, 64), "dkv": TileSizes(64, 64), "dq": TileSizes(64, 64)},
    128: {"forward": TileSizes(128, 32), "dkv": TileSizes(64, 32), "dq": TileSizes(64, 32)},
    WIDEST: {"forward": TileSizes(64, 32), "dkv": TileSizes(64, 16), "dq": TileSizes(64, 16)},
}
# Those of forward mode, likewise: sums of 64 rows and two tiles of scores take registers.
_TANGENT_TILES = {64: TileSizes(64, 64), 128: TileSizes(64, 32), WIDEST: TileSizes(64, 16)}


def choose_tangent(problem: Problem, capability: str) -> TileSizes | None:
    """Chooses the tile sizes of the tangent kernel; None where no tile fits into shared memory.

    At head dim 256 tiles of Q and of its tangent take 68 KB of 99, and above it there is none.
    """
    if warpgroups_of(problem) > 1:
        return None
    tile = _for_width(_TANGENT_TILES, max(widths(problem)))
    if _crowded(problem):
        tile = dataclasses.replace(tile, columns=max(tile.columns // 2, FEWEST_COLUMNS))
    tile = _dividing("tangent", tile, problem)
    taken = shared_memory(tangent_layout(problem, tile))
    return tile if taken <= memory_of(capability) - RESERVED else None


# The forward's where nothing but a causal mask changes scores: 3 to 9 % faster on an H200 than
# those above (benchmarks/NOTES.md). The first of which an SM holds two blocks, else the
# first that fits: four warps alone are one for each scheduler, and nothing runs while it waits.
_PLAIN = {
    64: (TileSizes(128, 128), TileSizes(128, 64)),
    128: (TileSizes(128, 64),),
    192: (TileSizes(64, 64), TileSizes(64, 48)),
    WIDEST: (TileSizes(64, 64), TileSizes(64, 48), TileSizes(64, 32)),
}
_FEW_COLUMNS = 128  # of O, up to which the warp of a row's weights adds to all of them


def bytes_of(name: str, tile, problem: Problem) -> int:
    """Returns the bytes of shared memory that a CTA of a kernel takes."""
    layouts = {
        "forward": forward_layout,
        "fused": fused_layout,
        "dkv": dkv_layout,
        "dq": dq_layout,
        "score_tiles": score_tiles,
        "score_lines": score_lines,
    }
    return shared_memory(layouts[name](problem, tile))


# Above head dim 256, of two warpgroups: the first that fits.
_WIDE = {
    "forward": (
        TileSizes(64, 64),
        TileSizes(64, 48),
        TileSizes(64, 32),
        TileSizes(64, 16),
        TileSizes(64, 16, turns=True),
    ),
    "dkv": (
        TileSizes(64, 32),
        TileSizes(64, 16),
        TileSizes(64, 32, turns=True),
        TileSizes(64, 16, turns=True),
    ),
    "dq": (
        TileSizes(64, 32),
        TileSizes(64, 16),
        TileSizes(64, 32, turns=True),
        TileSizes(64, 16, turns=True),
    ),
}


def _choose_wide(problem: Problem, capability: str) -> dict[str, TileSizes]:
    """Chooses the tiles of head dims above 256; all fit into 99 KB up to WIDEST_SHARED."""
    most, chosen = memory_of(capability) - RESERVED, {}
    for name, tiles in _WIDE.items():
        fits = (tile for tile in tiles if bytes_of(name, tile, problem) <= most)
        chosen[name] = next(fits)
    return chosen


def _choose(problem: Problem, capability: str) -> dict[str, Any]:
    if warpgroups_of(problem) > 1:
        return _choose_wide(problem, capability)
    limit = max(widths(problem))
    chosen = dict(_for_width(_TILES, limit))
    if _is_plain(problem) and not capability.startswith(PAIRS):
        tiles = _for_width(_PLAIN, limit)
        if _shares(problem):
            tiles = tuple(dataclasses.replace(tile, shared_weights=True) for tile in tiles)
        chosen["forward"] = _roomy(problem, tiles, memory_of(capability))
    elif _shares(problem):
        chosen["forward"] = dataclasses.replace(chosen["forward"], shared_weights=True)
    if not _crowded(problem):
        return chosen
    half = lambda tile: dataclasses.replace(tile, columns=max(tile.columns // 2, FEWEST_COLUMNS))
    return {name: half(tile) for name, tile in chosen.items()}


def _shares(problem: Problem) -> bool:
    """Returns whether O has so many columns that P goes through shared memory.

    For 64 rows, 64 keys and 256 columns a warp then reads and writes 58 KB instead of 72 KB. For
    128 rows and 128 columns it would be 44 KB instead of 40 KB.
    """
    columns = widths(problem)[1]
    return columns > _FEW_COLUMNS and Grid.of(WARPGROUP_ROWS, columns).across > 1


def _is_plain(problem: Problem) -> bool:
    """Returns whether nothing but a causal mask changes the scores of Q and K.

    A window's tiles are masked at both ends, which is wasted work where they are wide. They also
    take a third loop over keys: 28 bytes of spills with 128 columns on 9.0, 160 with 64 at head dim
    128.
    """
    spec = problem.spec
    if spec.modifiers or spec.mask.left is not None:
        return False
    changing = {"bias", "mask", "alibi_slopes", "kv_lengths", "q_lengths"}
    return not problem.features & changing and not problem.hides_by_arrays


def _roomy(problem: Problem, tiles: tuple[TileSizes, ...], shared: int) -> TileSizes:
    """Returns the first tile of which two CTAs fit on an SM, else the first of which one does."""
    for blocks in (2, 1):
        for tile in tiles:
            taken = bytes_of("forward", tile, problem) + 2 * RESERVED
            if blocks * taken <= shared + RESERVED:
                return tile
    raise AssertionError(f"{problem}: a block must have {shared} bytes of shared memory or fewer")


def _crowded(problem: Problem) -> bool:
    """Returns whether a bias or mask meets another modifier.

    Either takes as many registers as the scores do, besides its addresses. At head dims 64 and 128
    that leaves room for the band and little else. With all columns, a bias and a mask, or a bias
    with segment ids and dropout, make dK/dV spill 8 to 96 bytes, and all modifiers at once make the
    forward spill 96 to 184.
    """
    return bool(problem.features & {"bias", "mask"}) and modifiers(problem) > 1


def _dividing(name: str, tile, problem: Problem):
    """Returns a kernel's tile, or if it does not divide a problem's blocks one that does."""
    if problem.spec.block_shape is None:
        return tile
    block_q, block_kv = problem.spec.block_shape
    rows, columns = block_q, block_kv
    if name in ("dkv", "fused"):
        rows, columns = block_kv, block_q
    if name == "score_lines":  # rows are queries or keys
        rows = columns = math.gcd(block_q, block_kv)
    return dataclasses.replace(
        tile, rows=_divisor(tile.rows, rows), columns=_divisor(tile.columns, columns)
    )


def _divisor(size: int, block: int) -> int:
    """Returns `size` if it divides a block, a multiple of 64, else a smaller power of two."""
    return size if block % size == 0 else min(64, 1 << (size.bit_length() - 1))


def _overridden(name, fields, chosen):
    if name not in chosen:
        raise ValueError(
            f"blocks has {name!r}: on the portable backend this call runs the kernels "
            f"{', '.join(map(repr, chosen))}; pass blocks={{{next(iter(chosen))!r}: {{...}}}}"
        )
    known = {field.name for field in dataclasses.fields(chosen[name])}
    if not isinstance(fields, dict) or not known.issuperset(fields):
        raise ValueError(f"blocks[{name!r}] is {fields!r}: a dict with keys of {sorted(known)}")
    for field, value in fields.items():
        kind = type(getattr(chosen[name], field))
        if type(value) is not kind or (kind is int and value < 1):
            wanted = "True or False" if kind is bool else "a positive int"
            raise ValueError(f"blocks[{name!r}][{field!r}] is {value!r}: {wanted}")
    return dataclasses.replace(chosen[name], **fields)


def _fault(name: str, tile, vector: int, warpgroups: int) -> str | None:
    if isinstance(tile, FusedSizes):
        return fault(tile, vector)
    if isinstance(tile, ScoreTiles | ScoreLines):
        return tile.fault
    if tile.slots not in ((1, 2) if name == "forward" else (1,)):
        return "slots must be 1, or 2 of the forward"
    if tile.rows not in (64, 128) or tile.columns % 16 or not 0 < tile.columns <= MOST_COLUMNS:
        return f"rows must be 64 or 128, columns a multiple of 16 up to {MOST_COLUMNS}"
    if tile.shared_weights and warpgroups > 1:
        return f"shared_weights must be False above head dim {WIDEST_ALONE}"
    return _turns_fault(tile)


CTAS_PER_SM = 2  # one computes or starts while the other's copies are on their way
MIN_KEYS = 256  # of a range: fewer, and its start and its partial result cost as much as the keys

MOST_DECODE_COLUMNS, LEAST_COLUMNS = (
    64,
    32,
)  # keys of a step: a tile of K or of V is always on its way
WIDE = 128  # above this head dim 64 columns spill: of head dim 256, 64 to 704 bytes on a B200
WIDEST_DECODED = (576, 512)  # head dims of q and k, and of v: those of multi-head latent attention
WIDEST_MULTIPLE = 16  # of a head dim above WIDEST, so that a half of V is copied in whole units


@dataclasses.dataclass(frozen=True)
class PortableDecodeBlocks:
    """Tile sizes and number of splits of a decode call.

    Attributes:
        columns: keys per step, 32 or 64; 16 above head dim 256, where 32 do not fit.
        num_splits: number of splits in which the keys of a sequence are read.
        rows: rows of a CTA of four warps; a row is a (query, head of a group).
    """

    columns: int
    num_splits: int
    rows: int = WARPGROUP_ROWS


def row_tiles(problem: DecodeProblem) -> int:
    """Returns the number of row tiles that the queries and heads of one KV head fill."""
    return -(-problem.q_len * problem.group // WARPGROUP_ROWS)


def value_parts(problem: DecodeProblem) -> int:
    """Returns into how many parts the columns of V and of O are split, each with CTAs of its own.

    256 columns of O are 128 registers of each thread. CTAs of both parts compute the same scores
    and run side by side, so that one of them finds K in L2.
    """
    return -(-problem.v_head_dim // WIDEST)


def part_columns(problem: DecodeProblem) -> int:
    """Returns the number of columns of one part of V."""
    return problem.v_head_dim // value_parts(problem)


def unsupported(problem: DecodeProblem, shared: int) -> str | None:
    """Returns why the kernel does not take this problem, or None.

    Args:
        problem: what is computed.
        shared: bytes of shared memory that a CTA may have.
    """
    if problem.dtype not in DTYPES:
        return f"decodes bfloat16 and float16, not {problem.dtype}: cast q and the cache"
    if reason := draft_bits.unsupported(problem):
        return reason
    if problem.quantised and (reason := _unsupported_eight_bits(problem)):
        return reason
    if problem.spec.v_first:
        return VALUES_BEHIND_KEYS
    head_dims = problem.head_dim, problem.v_head_dim
    for name, width, most in zip(("q and k", "v"), head_dims, WIDEST_DECODED, strict=True):
        if width > most:
            return f"decodes head dims of {name} up to {most}, not {width}"
        if rest := -width % (HEAD_DIM_MULTIPLE if width <= WIDEST else WIDEST_MULTIPLE):
            return f"would have to copy a cache with head dim {width}: pad it to {width + rest}"
    least = decode_bytes(problem, FEWEST_COLUMNS)
    if least > shared - RESERVED:
        return (
            f"takes {least} bytes of shared memory for head dims {problem.head_dim} and "
            f"{problem.v_head_dim}, and this GPU has {shared - RESERVED}"
        )
    # Both are the third grid dimension.
    if problem.batch * (problem.spec.num_splits or 1) > MAX_GRID:
        return f"takes batches times num_splits up to {MAX_GRID}: split the batch"
    return None


def _unsupported_eight_bits(problem: DecodeProblem) -> str | None:
    """Returns why the kernel does not take a cache in eight bits, or None."""
    if "page_scales" in problem.features and problem.dtype == jnp.float16:
        return "multiplies float16 weights by no scales of pages: cast q to bfloat16"
    for width in (problem.head_dim, problem.v_head_dim):
        # Above WIDEST a half of V is copied in whole units.
        if rest := -width % (UNIT if width <= WIDEST else 2 * UNIT):
            return f"would have to copy a cache with head dim {width}: pad it to {width + rest}"
    return None


def choose(problem: DecodeProblem, num_sms: int, shared: int) -> PortableDecodeBlocks:
    """Chooses tile sizes and a number of splits, with the aim of two CTAs per SM.

    Above head dim 256 it may be one that has the shared memory of an SM for itself.

    Args:
        problem: what is computed.
        num_sms: number of SMs of the GPU.
        shared: bytes of shared memory that a CTA may have.
    """
    columns = _columns(problem, shared)
    together = CTAS_PER_SM
    if max(widths(problem)) > WIDEST:
        together = (shared + RESERVED) // (decode_bytes(problem, columns) + RESERVED)
    splits = problem.spec.num_splits or _splits(problem, num_sms * min(together, CTAS_PER_SM))
    return PortableDecodeBlocks(columns, splits)


def decode_bytes(problem: DecodeProblem, columns: int) -> int:
    """Returns the bytes of shared memory that a CTA takes with so many keys per step."""
    return shared_memory(decode_layout(problem, PortableDecodeBlocks(columns, 1)))


def _columns(problem: DecodeProblem, shared: int) -> int:
    """Returns 64 where two CTAs then share an SM and head dims are at most WIDE, else 32.

    At head dim 128 two CTAs with 64 columns take 104 KB. Q and 32 keys of head dims 576 and 512
    take 130 KB, which GPUs with 99 KB do not have; they have 16 keys of 512 and 512 (93 KB).
    """
    width, v_width = widths(problem)
    if max(width, v_width) > WIDEST:
        fits = decode_bytes(problem, LEAST_COLUMNS) <= shared - RESERVED
        return LEAST_COLUMNS if fits else FEWEST_COLUMNS
    most = decode_bytes(problem, MOST_DECODE_COLUMNS)
    # An SM has what one block may have and what is kept for it.
    two_fit = CTAS_PER_SM * (most + RESERVED) <= shared + RESERVED
    return MOST_DECODE_COLUMNS if two_fit and max(width, v_width) <= WIDE else LEAST_COLUMNS


def _splits(problem: DecodeProblem, ctas: int) -> int:
    """Returns enough splits for so many CTAs, of at least MIN_KEYS keys each.

    A sliding window shortens what is read.
    """
    visible = problem.kv_len
    if problem.spec.window_left is not None:
        visible = min(visible, problem.spec.window_left + problem.q_len)
    split_ctas = problem.batch * problem.kv_heads * row_tiles(problem) * value_parts(problem)
    wanted = -(-ctas // split_ctas)
    return max(1, min(wanted, visible // MIN_KEYS, MAX_SPLITS))
