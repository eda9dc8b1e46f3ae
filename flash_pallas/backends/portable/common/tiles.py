"""Tile sizes of all portable kernels: limits of the GPU, tables, and tiles that several have."""

from __future__ import annotations

import dataclasses
from typing import Any

from ....core.problem import Problem
from ....devices import GENERATIONS
from .shares import ScoreParts, score_parts
from .smem_tiles import WIDEST_ALONE, buffer, warpgroups_of, widths

SMALLEST = 99 * 1024  # bytes of shared memory, what every GPU of devices.py has for one block
RESERVED = 1024  # bytes that are kept for each block; a block that asks for the rest may be refused
WIDEST = WIDEST_ALONE  # head dim of one warpgroup
WIDEST_SHARED = 512  # head dim that two warpgroups share: 256 columns of each
MOST_COLUMNS = 256  # auxiliary_arrays.LONGEST_TILE: vectors are padded for no longer tiles
FEWEST_COLUMNS = 16  # of a tile: one mma sums as many
# From 10.0 on additions of two neighbours are one instruction on pairs of registers. On 10.0 the
# forward then spills 120 to 320 bytes with the tiles of tiling.py's _PLAIN; on 12.0 none.
PAIRS = "10."
MANY_MODIFIERS = 5  # that change scores: from here on tables have smaller tiles


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


def memory_of(capability: str) -> int:
    """Returns the bytes of shared memory that a CTA may have."""
    known = GENERATIONS.get(capability)
    return SMALLEST if known is None else known.shared_memory


def most_added(capability: str) -> int:
    """Returns how many floats in device memory one instruction adds to (PTX ISA 9.0, red)."""
    major = capability.split(".")[0]
    return 4 if major.isdecimal() and int(major) >= 9 else 1


def for_width(table: dict[int, Any], width: int) -> Any:
    """Returns a table's entry of the narrowest head dim that `width` does not exceed."""
    return next(entry for widest, entry in table.items() if width <= widest)


def modifiers(problem: Problem) -> int:
    """Returns the number of score modifiers, not counting the band and lists of blocks."""
    return len(problem.features - {"block_lists"}) + len(problem.spec.modifiers - {"dropout_rate"})


def turns_fault(tile: Any) -> str | None:
    """Returns why sizes whose tiles take turns cannot be taken, or None."""
    return "slots must be 1 where tiles take turns" if tile.turns and tile.slots != 1 else None


def parts_of_scores(problem: Problem, tile: TileSizes, interpret: bool) -> ScoreParts | None:
    """Returns where two warpgroups exchange parts of S; None where one has all of it."""
    alone = warpgroups_of(problem) == 1
    return None if alone else score_parts(tile.rows, tile.columns, interpret)


def owned_and_streamed(problem: Problem, tile: Any, *slots: tuple[int, ...]):
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
