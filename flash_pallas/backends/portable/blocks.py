"""Tile sizes of the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.problem import Problem
from ..mosaic.launch import WARPGROUP_ROWS, shared_memory
from . import layouts
from .fused_blocks import FusedSizes, choose_fused, fault, modifiers
from .grid import Grid
from .score_blocks import ScoreBlocks, ScoreLines, ScoreTiles, choose_scores
from .tiles import widths

# Shared memory of one block at most, by compute capability (CUDA C++ Programming Guide 13.0, table
# of technical specifications). A multiprocessor has 1 KB more, and keeps that for each block on it.
SHARED_MEMORY = {
    "8.0": 163 * 1024,
    "8.6": 99 * 1024,
    "8.9": 99 * 1024,
    "9.0": 227 * 1024,
    "10.0": 227 * 1024,
    "10.3": 227 * 1024,
    "12.0": 99 * 1024,
    "12.1": 99 * 1024,
}
SMALLEST = 99 * 1024  # what every one of them has
RESERVED = 1024  # bytes that are kept for each block; a block that asks for the rest may be refused
WIDEST = 256  # head dim
MOST_COLUMNS = 256  # side_arrays.LONGEST_TILE: vectors are padded for no longer tiles
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
        slots: number of K tiles, and of V tiles, that the forward buffers (key_stream.py), 1 or 2;
            1 in other kernels.
        shared_weights: P goes through shared memory (folding.py); only in the forward.
    """

    rows: int
    columns: int
    slots: int = 1
    shared_weights: bool = False


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
    for name, fields in (override or {}).items():
        tile = chosen[name] = _overridden(name, fields, chosen)
        taken = bytes_of(name, tile, problem)
        reason = _fault(name, tile, vector)
        if reason is None and taken > most:
            reason = f"takes {taken} bytes of shared memory of {most}: pass fewer rows or columns"
        if reason:
            raise ValueError(f"blocks[{name!r}] is {tile}: {reason}")
    backward = chosen.get("fused") or SplitSizes(chosen["dkv"], chosen["dq"])
    scores = ScoreBlocks(chosen.get("score_tiles"), chosen.get("score_lines"))
    return PortableBlocks(chosen["forward"], backward, scores)


def memory_of(capability: str) -> int:
    """Returns the bytes of shared memory that a CTA may have."""
    return SHARED_MEMORY.get(capability, SMALLEST)


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
# The forward's where nothing but a causal mask changes scores: 3 to 9 % faster on an H200 than
# those above (benchmarks/NOTES.md). The first of which a multiprocessor holds two blocks, else the
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
    layout = {"forward": layouts.forward, "dkv": layouts.dkv, "dq": layouts.dq}[name]
    return shared_memory(layout(problem, tile))


def _choose(problem: Problem, capability: str) -> dict[str, Any]:
    limit = max(widths(problem))
    chosen = dict(next(tiles for widest, tiles in _TILES.items() if limit <= widest))
    if _is_plain(problem) and not capability.startswith(PAIRS):
        tiles = next(tiles for widest, tiles in _PLAIN.items() if limit <= widest)
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
    changed = (spec.softcap, spec.score_mod, spec.mask_mod, spec.dropout_rate or None)
    if any(x is not None for x in (*changed, spec.mask.left)):
        return False
    changing = {"bias", "mask", "alibi_slopes", "q_segments", "kv_lengths", "q_lengths"}
    return not problem.features & changing


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


def _fault(name: str, tile, vector: int) -> str | None:
    if isinstance(tile, FusedSizes):
        return fault(tile, vector)
    if isinstance(tile, ScoreTiles | ScoreLines):
        return tile.fault
    if tile.slots not in ((1, 2) if name == "forward" else (1,)):
        return "slots must be 1, or 2 of the forward"
    if tile.rows not in (64, 128) or tile.columns % 16 or not 0 < tile.columns <= MOST_COLUMNS:
        return f"rows must be 64 or 128, columns a multiple of 16 up to {MOST_COLUMNS}"
    return None
