"""Tile sizes: the largest that fit in shared memory, twice where that is possible."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.integers import round_up
from ...core.problem import Problem
from .tiles import buffer_bytes

# Shared memory of one block at most, and of all blocks of a multiprocessor, by compute capability
# (CUDA C++ Programming Guide 13.0, table of technical specifications). Each block takes 1 KB more.
SHARED_MEMORY = {
    "8.0": (163 * 1024, 164 * 1024),
    "8.6": (99 * 1024, 100 * 1024),
    "8.9": (99 * 1024, 100 * 1024),
    "9.0": (227 * 1024, 228 * 1024),
    "10.0": (227 * 1024, 228 * 1024),
    "10.3": (227 * 1024, 228 * 1024),
    "12.0": (99 * 1024, 100 * 1024),
    "12.1": (99 * 1024, 100 * 1024),
}
SMALLEST = "8.6"  # what runs everywhere
RESERVED = 1024  # bytes of shared memory that a block takes beside its own
WIDEST = 256  # head dim


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Of one kernel.

    Attributes:
        rows: of a block of four warps, a multiple of 64: queries, or keys in the dK/dV kernel.
        columns: that stream by, a multiple of 16.
    """

    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class PortableBlocks:
    """Of the three kernels."""

    forward: TileSizes
    dkv: TileSizes
    dq: TileSizes


def choose_blocks(
    problem: Problem, override: dict[str, Any] | None, shared: tuple[int, int]
) -> PortableBlocks:
    """Tile sizes for this much shared memory, with fields of `override` put in.

    Raises:
        ValueError: an unknown kernel or field, or sizes that the kernels cannot take.
    """
    head_dims = widths(problem)
    chosen = {name: _choose(name, head_dims, shared) for name in KERNELS}
    for name, fields in (override or {}).items():
        chosen[name] = _overridden(name, fields, chosen, head_dims, shared)
    return PortableBlocks(**chosen)


def widths(problem: Problem) -> tuple[int, int]:
    """Columns of tiles of Q and K, and of V and O."""
    return round_up(problem.head_dim, 16), round_up(problem.v_head_dim, 16)


def forward_bytes(tile: TileSizes, head_dims: tuple[int, int]) -> int:
    """Q, whose room O takes in the end, K and V."""
    own = buffer_bytes(tile.rows, max(head_dims))
    return own + sum(buffer_bytes(tile.columns, width) for width in head_dims)


def backward_bytes(tile: TileSizes, head_dims: tuple[int, int]) -> int:
    """Two arrays that stay, and two that stream by, of which the next of one is on its way."""
    width, v_width = head_dims
    own = buffer_bytes(tile.rows, width) + buffer_bytes(tile.rows, v_width)
    return own + buffer_bytes(2, tile.columns, width) + buffer_bytes(tile.columns, v_width)


# Shared memory of each kernel, and its tiles from the most wanted on. The columns of a product go
# through shared memory once per 64 rows, so many rows are wanted first; 128 of them hold the
# accumulator and the scores of 64 columns in 255 registers up to head dim 128.
_MANY = [TileSizes(128, n) for n in (64, 32)]
_FEW = [TileSizes(64, n) for n in (64, 32, 16)]
KERNELS = {
    "forward": (forward_bytes, _MANY + _FEW),
    "dkv": (backward_bytes, _FEW),
    "dq": (backward_bytes, _FEW),
}


def _choose(name: str, head_dims: tuple[int, int], shared: tuple[int, int]) -> TileSizes:
    size, tiles = KERNELS[name]
    if max(head_dims) > 128:  # an accumulator of 64 rows takes half of the registers
        tiles = [tile for tile in tiles if tile.rows == 64]
        tiles = [tile for tile in tiles if tile.columns < 64 or name == "forward"]
    for blocks in (2, 1):  # of a multiprocessor
        for tile in tiles:
            taken = size(tile, head_dims)
            if blocks == 2 and tile.columns < 32:
                continue
            if taken <= shared[0] and blocks * (taken + RESERVED) <= shared[1]:
                return tile
    raise AssertionError(f"no tile of {name} for {head_dims=} in {shared=}")


def _overridden(name, fields, chosen, head_dims, shared) -> TileSizes:
    if name not in KERNELS:
        raise ValueError(
            f"blocks names {name!r}: backend 'portable' knows the kernels {sorted(KERNELS)}"
        )
    known = {field.name for field in dataclasses.fields(TileSizes)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(
            f"blocks[{name!r}] has unknown fields {unknown}: there are {sorted(known)}"
        )
    tile = dataclasses.replace(chosen[name], **fields)
    if tile.rows not in (64, 128) or tile.columns not in (16, 32, 64, 128):
        raise ValueError(
            f"blocks[{name!r}] is {tile}: rows must be 64 or 128, columns 16, 32, 64 or 128"
        )
    taken = KERNELS[name][0](tile, head_dims)
    if taken > shared[0]:
        raise ValueError(
            f"blocks[{name!r}] is {tile}, which takes {taken} bytes of shared memory of "
            f"{shared[0]}: pass fewer rows or columns"
        )
    return tile
