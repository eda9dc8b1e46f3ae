"""Tile sizes of the kernels for gradients of what modifies scores: what is chosen, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.problem import Problem
from ..mosaic import side_arrays
from ..mosaic.launch import shared_memory
from ..mosaic.side_arrays import LONGEST_TILE
from . import layouts
from .fused_blocks import MANY_MODIFIERS, modifiers
from .tiles import widths

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
    """

    rows: int
    columns: int
    warpgroups: int
    slots: int
    keep_bias: bool

    def bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA."""
        return shared_memory(layouts.score_tiles(problem, self))

    @property
    def fault(self) -> str | None:
        """The reason why the kernel cannot take these sizes, or None."""
        if self.rows not in (64, 128) or not {self.warpgroups, self.slots} <= {1, 2}:
            return "rows must be 64 or 128, warpgroups and slots 1 or 2"
        if self.columns <= 0 or self.columns % (16 * self.warpgroups):
            return f"columns must be a multiple of {16 * self.warpgroups}"
        return None


@dataclasses.dataclass(frozen=True)
class ScoreLines:
    """Tile sizes of the sums over keys for every query, and over queries for every key.

    Attributes:
        rows: queries, or keys, that a CTA of four warps owns: 64 or 128.
        columns: keys, or queries, of a tile that streams by: a multiple of 16.
        slots: 1 or 2 tiles of what streams by.
    """

    rows: int
    columns: int
    slots: int

    def bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA."""
        return shared_memory(layouts.score_lines(problem, self))

    @property
    def fault(self) -> str | None:
        """The reason why the kernel cannot take these sizes, or None."""
        if self.rows not in (64, 128) or self.slots not in (1, 2):
            return "rows must be 64 or 128, slots 1 or 2"
        if self.columns % 16 or not 0 < self.columns <= LONGEST_TILE:
            return f"columns must be a multiple of 16 up to {LONGEST_TILE}"
        return None


@dataclasses.dataclass(frozen=True)
class ScoreBlocks:
    """Tile sizes of the kernels that a call's gradients may need; None where it needs none."""

    tile: Any = None  # ScoreTiles
    lines: Any = None  # ScoreLines


# By the largest head dim: (rows, columns, warpgroups, slots), the first that fits. A step copies
# rows + columns of two arrays each for rows x columns scores.
_TILES = {
    64: ((128, 128, 2, 2), (128, 128, 2, 1), (128, 64, 2, 1)),
    128: ((128, 128, 2, 1), (64, 64, 2, 1)),
    256: ((128, 64, 2, 1), (64, 64, 2, 1), (64, 16, 1, 1)),
}
# (rows, columns, slots): the first of which a multiprocessor holds two blocks, else the first that
# fits, as four warps alone leave nothing to run while they wait.
_LINES = {
    64: ((128, 64, 2), (64, 64, 2), (64, 32, 2)),
    128: ((128, 32, 2), (64, 32, 2), (64, 32, 1)),
    256: ((64, 32, 2), (64, 32, 1), (64, 16, 1)),
}
# Where more than a bias changes scores, a mask too: else 32 to 140 bytes of spills at head dim 128.
_MODIFIED_TILES = _TILES | {128: ((128, 64, 2, 2), (128, 64, 2, 1), (64, 64, 2, 1))}
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


def choose_scores(problem: Problem, shared: int) -> dict[str, ScoreTiles | ScoreLines]:
    """Chooses tile sizes by kernel name, for only those kernels whose gradients a call can have.

    Args:
        problem: what is computed.
        shared: bytes of shared memory that a CTA may ask for.
    """
    found: dict[str, ScoreTiles | ScoreLines] = {}
    tiled = side_arrays.kind(problem.bias_shape, q_axis=0) == "tile"
    if tiled:
        found["score_tiles"] = choose_tile(problem, shared)
    if problem.features & {"alibi_slopes", "score_params"} or (
        problem.bias_shape is not None and not tiled
    ):
        found["score_lines"] = choose_lines(problem, shared)
    return found


def choose_tile(problem: Problem, shared: int) -> ScoreTiles:
    """Chooses the sizes of score_tiles.py for `choose_scores`."""
    limit, plain = max(widths(problem)), _is_plain(problem)
    table = _TILES if plain else _MODIFIED_TILES
    if modifiers(problem) >= MANY_MODIFIERS:
        table = _TILES_OF_MANY
    shapes = next(shapes for widest, shapes in table.items() if limit <= widest)
    for shape in shapes:
        tile = ScoreTiles(*shape, keep_bias=plain and limit <= MOST_TO_KEEP)
        if tile.bytes(problem) <= shared:
            return tile
    raise AssertionError(f"{problem}: no tile fits into {shared} bytes of shared memory")


def choose_lines(problem: Problem, shared: int) -> ScoreLines:
    """Chooses the sizes of score_lines.py for `choose_scores`."""
    limit = max(widths(problem))
    table = _LINES_OF_MANY if modifiers(problem) >= MANY_MODIFIERS else _LINES
    shapes = next(shapes for widest, shapes in table.items() if limit <= widest)
    for blocks in (2, 1):
        for tile in (ScoreLines(*shape) for shape in shapes):
            if blocks * tile.bytes(problem) <= shared:
                return tile
    raise AssertionError(f"{problem}: no tile fits into {shared} bytes of shared memory")


def _is_plain(problem: Problem) -> bool:
    """Checks that a bias is all that changes scores, except scalars per batch entry and head."""
    spec = problem.spec
    changed = spec.softcap, spec.score_mod, spec.mask_mod, spec.dropout_rate or None
    if any(x is not None for x in changed) or not spec.mask.is_trivial:
        return False
    return problem.features <= {"bias", "sinks", "q_lengths", "q_offset"}
