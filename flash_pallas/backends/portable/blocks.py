"""Tile sizes of the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.decode import DecodeProblem
from ...core.integers import round_up
from ...core.problem import Problem
from .fused_blocks import FusedSizes, choose_fused, fault, fused_bytes, modifiers
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
    """

    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class SplitSizes:
    """Of the deterministic backward, which also runs where no tile of the fused one fits."""

    dkv: TileSizes
    dq: TileSizes


@dataclasses.dataclass(frozen=True)
class PortableBlocks:
    """Of the kernels that a call and its gradient run."""

    forward: TileSizes
    backward: FusedSizes | SplitSizes


def choose_blocks(
    problem: Problem, override: dict[str, Any] | None, capability: str
) -> PortableBlocks:
    """Tile sizes, with fields of `override` put in.

    Those of the forward and of the deterministic backward fit on every GPU.

    Args:
        problem: what is computed.
        override: by kernel, fields of its sizes.
        capability: of the GPU, such as "8.0".

    Raises:
        ValueError: a kernel that does not run, an unknown field, or sizes that it cannot take.
    """
    chosen, most = _choose(problem), shared_memory(capability) - RESERVED
    vector = most_added(capability)
    if not problem.spec.deterministic and (fused := choose_fused(problem, vector, most)):
        chosen = {"forward": chosen["forward"], "fused": fused}
    for name, fields in (override or {}).items():
        tile = chosen[name] = _overridden(name, fields, chosen)
        taken = bytes_of(name, tile, problem)
        reason = fault(tile, vector) if isinstance(tile, FusedSizes) else _fault(tile)
        if reason is None and taken > most:
            reason = f"takes {taken} bytes of shared memory of {most}: pass fewer rows or columns"
        if reason:
            raise ValueError(f"blocks[{name!r}] is {tile}: {reason}")
    if "fused" in chosen:
        return PortableBlocks(chosen["forward"], chosen["fused"])
    return PortableBlocks(chosen["forward"], SplitSizes(chosen["dkv"], chosen["dq"]))


def shared_memory(capability: str) -> int:
    """Bytes that a block may have."""
    return SHARED_MEMORY.get(capability, SMALLEST)


def most_added(capability: str) -> int:
    """Floats in device memory that one instruction adds to (PTX ISA 9.0, red)."""
    major = capability.split(".")[0]
    return 4 if major.isdecimal() and int(major) >= 9 else 1


def widths(problem: Problem | DecodeProblem) -> tuple[int, int]:
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
_BYTES = {"forward": forward_bytes, "dkv": backward_bytes, "dq": backward_bytes}


def bytes_of(name: str, tile: TileSizes | FusedSizes, problem: Problem) -> int:
    """Shared memory of a kernel."""
    if isinstance(tile, FusedSizes):
        return fused_bytes(tile, problem)
    return _BYTES[name](tile, widths(problem))


def _choose(problem: Problem) -> dict[str, Any]:
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
    return bool(problem.features & {"bias", "mask"}) and modifiers(problem) > 1


def _overridden(name, fields, chosen):
    if name not in chosen:
        raise ValueError(
            f"blocks names {name!r}: on the portable backend this call runs the kernels "
            f"{', '.join(map(repr, chosen))}"
        )
    known = {field.name for field in dataclasses.fields(chosen[name])}
    if unknown := sorted(set(fields) - known):
        raise ValueError(
            f"blocks[{name!r}] has unknown fields {unknown}: there are {sorted(known)}"
        )
    return dataclasses.replace(chosen[name], **fields)


def _fault(tile: TileSizes) -> str | None:
    if tile.rows not in (64, 128) or tile.columns % 16 or not 0 < tile.columns <= MOST_COLUMNS:
        return f"rows must be 64 or 128, columns a multiple of 16 up to {MOST_COLUMNS}"
    return None
