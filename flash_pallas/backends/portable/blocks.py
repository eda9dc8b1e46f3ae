"""Tile sizes of the three kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.decode import DecodeProblem
from ...core.integers import round_up
from ...core.problem import Problem
from .tiles import buffer_bytes

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


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Of one kernel.

    Attributes:
        rows: of a block of four warps, a multiple of 64: queries, or keys in the dK/dV kernel.
        columns: that stream by, a multiple of 16.
        slots: 1 or 2 tiles of K and as many of V in the forward (key_stream.py); 1 elsewhere.
    """

    rows: int
    columns: int
    slots: int = 1


@dataclasses.dataclass(frozen=True)
class PortableBlocks:
    """Of the three kernels."""

    forward: TileSizes
    dkv: TileSizes
    dq: TileSizes


def choose_blocks(problem: Problem, override: dict[str, Any] | None, shared: int) -> PortableBlocks:
    """Tile sizes, which fit on every GPU, with fields of `override` put in.

    Args:
        problem: what is computed.
        override: by kernel, fields of TileSizes.
        shared: bytes of shared memory that a block may have.

    Raises:
        ValueError: an unknown kernel or field, or sizes that the kernels cannot take.
    """
    head_dims = widths(problem)
    chosen = _choose(problem)
    for name, fields in (override or {}).items():
        chosen[name] = _overridden(name, fields, chosen, head_dims, shared)
    return PortableBlocks(**chosen)


def widths(problem: Problem | DecodeProblem) -> tuple[int, int]:
    """Columns of tiles of Q and K, and of V and O."""
    return round_up(problem.head_dim, 16), round_up(problem.v_head_dim, 16)


def forward_bytes(tile: TileSizes, head_dims: tuple[int, int]) -> int:
    """Q, whose room O takes in the end, K and V."""
    own = buffer_bytes(tile.rows, max(head_dims))
    return own + sum(buffer_bytes(tile.slots, tile.columns, width) for width in head_dims)


def backward_bytes(tile: TileSizes, head_dims: tuple[int, int]) -> int:
    """Two arrays that stay, and two that stream by, of which the next of one is on its way."""
    width, v_width = head_dims
    own = buffer_bytes(tile.rows, width) + buffer_bytes(tile.rows, v_width)
    return own + buffer_bytes(2, tile.columns, width) + buffer_bytes(tile.columns, v_width)


# Tiles by the largest head dim: those without spills, causal or not (compile report; on 10.0, where
# kernels take more registers, the causal forward of 128 spills 96 bytes and dK of 256 has 8). What
# streams by is read from shared memory once for every 64 rows, so the forward has 128 where they
# and the accumulator fit in 255 registers. With 64 columns at head dim 128 it spills 8 to 60 bytes,
# and dK/dV 12 to 64.
_TILES = {
    64: {"forward": TileSizes(128, 64), "dkv": TileSizes(64, 64), "dq": TileSizes(64, 64)},
    128: {"forward": TileSizes(128, 32), "dkv": TileSizes(64, 32), "dq": TileSizes(64, 32)},
    WIDEST: {"forward": TileSizes(64, 32), "dkv": TileSizes(64, 16), "dq": TileSizes(64, 16)},
}
BYTES = {"forward": forward_bytes, "dkv": backward_bytes, "dq": backward_bytes}


def _choose(problem: Problem) -> dict[str, TileSizes]:
    limit = max(widths(problem))
    chosen = dict(next(tiles for widest, tiles in _TILES.items() if limit <= widest))
    if not _crowded(problem):
        return chosen
    half = lambda tile: dataclasses.replace(tile, columns=max(tile.columns // 2, FEWEST_COLUMNS))
    return {name: half(tile) for name, tile in chosen.items()}


def _crowded(problem: Problem) -> bool:
    """A bias or mask meets another modifier.

    Either takes as many registers as the scores do, beside its addresses. At head dims 64 and 128
    that leaves room for the band and little else: with all columns, a bias and a mask, or a bias
    with segment ids and dropout, cost dK/dV spills of 8 to 96 bytes, and every modifier at once the
    forward 96 to 184.
    """
    spec = problem.spec
    count = sum(x is not None for x in (spec.softcap, spec.score_mod, spec.mask_mod))
    return bool(problem.features & {"bias", "mask"}) and len(problem.features) + count > 1


def _overridden(name, fields, chosen, head_dims, shared: int) -> TileSizes:
    if name not in BYTES:
        raise ValueError(
            f"blocks names {name!r}: backend 'portable' knows the kernels {sorted(BYTES)}"
        )
    known = {field.name for field in dataclasses.fields(TileSizes)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(
            f"blocks[{name!r}] has unknown fields {unknown}: there are {sorted(known)}"
        )
    tile = dataclasses.replace(chosen[name], **fields)
    if tile.rows not in (64, 128) or tile.columns % 16 or not 0 < tile.columns <= MOST_COLUMNS:
        raise ValueError(
            f"blocks[{name!r}] is {tile}: rows must be 64 or 128, columns a multiple of 16 up to "
            f"{MOST_COLUMNS}"
        )
    taken = BYTES[name](tile, head_dims)
    if taken > shared - RESERVED:
        raise ValueError(
            f"blocks[{name!r}] is {tile}, which takes {taken} bytes of shared memory of "
            f"{shared - RESERVED}: pass fewer rows or columns"
        )
    return tile
