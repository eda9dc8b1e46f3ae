"""Tile sizes of the fused backward: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses

from ...core.problem import Problem
from ..mosaic.launch import shared_memory
from . import layouts
from .layouts import fused_width

AT_ONCE_BYTES = 16 << 20  # of Q, dO and dQ of the heads that are worked on at one time: stay in L2


@dataclasses.dataclass(frozen=True)
class FusedSizes:
    """Tile sizes of the fused backward.

    Attributes:
        rows: keys of a CTA of eight warps, 64 or 128.
        columns: queries of a step, 64 or 128.
        slots: slots for tiles of Q and dO. With two, the next tile has most of a step to arrive,
            and warps meet twice a step; with one, it has the time of dQ, and they meet three times.
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
# Bytes of shared memory read and written for each product decide (benchmarks/NOTES.md). At head
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
_PLAIN = _SHAPES | {128: ((128, 128, 1), *_SHAPES[128])}
# Each modifier takes registers; all of them together spill 500 to 700 bytes with the above.
_SMALLER = {
    64: ((128, 64, 2), (128, 64, 1)),
    128: ((64, 64, 2), (64, 64, 1)),
    256: _SHAPES[192],
}
MANY_MODIFIERS = 5


def fused_bytes(tile: FusedSizes, problem: Problem) -> int:
    """Returns the bytes of shared memory that a CTA takes."""
    return shared_memory(layouts.fused(problem, tile))


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
    heads, full = _heads_at_once(problem), problem.spec.mask.is_trivial
    count = modifiers(problem)
    plain = full and problem.kv_len % 128 == 0 and not pairs
    table = _MODIFIED if count else _PLAIN if plain else _SHAPES
    table = table if count < MANY_MODIFIERS else _SMALLER
    shapes = next(shapes for widest, shapes in table.items() if limit <= widest)
    for rows, columns, slots in shapes:
        tile = FusedSizes(rows, columns, slots, vector, heads, mask_all=True, stagger=full)
        if fused_bytes(tile, problem) <= shared:
            return tile
    return None


def modifiers(problem: Problem) -> int:
    """Returns the number of score modifiers, not counting the band."""
    spec = problem.spec
    functions = sum(x is not None for x in (spec.softcap, spec.score_mod, spec.mask_mod))
    return len(problem.features) + functions


def _heads_at_once(problem: Problem) -> int:
    each = 8 * problem.q_len * problem.head_dim * problem.group
    pairs = problem.kv_heads * problem.batch
    sections = -(-pairs // max(1, AT_ONCE_BYTES // each))
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
