"""Tile sizes of the portable forward and tangents, and the choice for all kernels of a call.

The bytes of a launch are counted from its own layout, before tiles are chosen, and tiles step down
until they fit. backward/tiles.py has those of the backward, decode/tiles.py those of decoding.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from ..gpu.launch import WARPGROUP_ROWS, shared_memory
from ..gpu.ptx.mma_sync import Grid
from .backward.tiles import (
    FusedSizes,
    ScoreBlocks,
    ScoreLines,
    ScoreTiles,
    SplitSizes,
    choose_fused,
    choose_scores,
    dkv_layout,
    dq_layout,
    fault,
    fused_layout,
    score_lines,
    score_tiles,
)
from .common.shares import ScoreParts
from .common.smem_tiles import WIDEST_ALONE, buffer, warpgroups_of, widths
from .common.tiles import (
    FEWEST_COLUMNS,
    MOST_COLUMNS,
    PAIRS,
    RESERVED,
    WIDEST,
    TileSizes,
    for_width,
    memory_of,
    modifiers,
    most_added,
    parts_of_scores,
    turns_fault,
)


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


class TangentSmem(NamedTuple):
    """Shared memory of the tangent kernel; in the end q has dO."""

    q: Any  # [rows, the wider head dim]
    dq: Any  # likewise
    k: Any  # [columns, H]
    dk: Any
    v: Any  # [columns, Hv]
    dv: Any


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
        scores=parts_of_scores(problem, tile, interpret),
    )


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
    tile = for_width(_TANGENT_TILES, max(widths(problem)))
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
    chosen = dict(for_width(_TILES, limit))
    if _is_plain(problem) and not capability.startswith(PAIRS):
        tiles = for_width(_PLAIN, limit)
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
    return turns_fault(tile)
