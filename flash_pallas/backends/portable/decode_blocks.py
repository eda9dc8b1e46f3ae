"""Tile sizes and splits of the decode kernel, and the problems that it refuses."""

from __future__ import annotations

import dataclasses

from ...core.decode import MAX_SPLITS, DecodeProblem
from ..mosaic.launch import WARPGROUP_ROWS, shared_memory
from ..mosaic.refusals import MAX_GRID
from . import blocks as tiles
from . import layouts
from .limits import DTYPES, HEAD_DIM_MULTIPLE
from .tiles import widths

BLOCKS_PER_MULTIPROCESSOR = 2  # one computes or starts while the other's copies are on their way
MIN_KEYS = 256  # of a range: fewer, and its start and its partial result cost as much as the keys

MOST_COLUMNS, LEAST_COLUMNS = 64, 32  # keys of a step: a tile of K or of V is always on its way
WIDE = 128  # above this head dim 64 columns spill: of head dim 256, 64 to 704 bytes on a B200


@dataclasses.dataclass(frozen=True)
class PortableDecodeBlocks:
    """Tile sizes and number of splits of a decode call.

    Attributes:
        columns: keys per step, 32 or 64.
        num_splits: number of splits in which the keys of a sequence are read.
        rows: rows of a CTA of four warps; a row is a (query, head of a group).
    """

    columns: int
    num_splits: int
    rows: int = WARPGROUP_ROWS


def row_tiles(problem: DecodeProblem) -> int:
    """Returns the number of row tiles that the queries and heads of one KV head fill."""
    return -(-problem.q_len * problem.group // WARPGROUP_ROWS)


def unsupported(problem: DecodeProblem) -> str | None:
    """Returns why the kernel does not take this problem on any GPU, or None."""
    if problem.dtype not in DTYPES:
        return f"decodes bfloat16 and float16, not {problem.dtype}: cast q and the cache"
    if problem.quantised:
        return f"reads caches in the dtype of q, {problem.dtype}, not in {problem.kv_dtype}"
    for width in (problem.head_dim, problem.v_head_dim):
        if width > tiles.WIDEST:
            return f"takes head dims up to {tiles.WIDEST}, not {width}"
        if whole := -width % HEAD_DIM_MULTIPLE:
            return f"would have to copy a cache with head dim {width}: pad it to {width + whole}"
    # Both are the third grid dimension.
    if problem.batch * (problem.spec.num_splits or 1) > MAX_GRID:
        return f"takes batches times num_splits up to {MAX_GRID}: split the batch"
    return None


def choose(problem: DecodeProblem, multiprocessors: int, shared: int) -> PortableDecodeBlocks:
    """Chooses tile sizes and a number of splits, with the aim of two CTAs per SM.

    Args:
        problem: what is computed.
        multiprocessors: number of SMs of the GPU.
        shared: bytes of shared memory that a CTA may have.
    """
    splits = problem.spec.num_splits or _splits(problem, multiprocessors)
    return PortableDecodeBlocks(_columns(problem, shared), splits)


def _columns(problem: DecodeProblem, shared: int) -> int:
    """Returns 64 where two CTAs then share an SM and head dims are at most WIDE, else 32.

    At head dim 128 two CTAs with 64 columns take 104 KB.
    """
    width, v_width = widths(problem)
    most = shared_memory(layouts.decode(problem, PortableDecodeBlocks(MOST_COLUMNS, 1)))
    # A multiprocessor has what one block may have and what is kept for it.
    both = BLOCKS_PER_MULTIPROCESSOR * (most + tiles.RESERVED) <= shared + tiles.RESERVED
    return MOST_COLUMNS if both and max(width, v_width) <= WIDE else LEAST_COLUMNS


def _splits(problem: DecodeProblem, multiprocessors: int) -> int:
    """Returns enough splits for two CTAs per SM, of at least MIN_KEYS keys each.

    A sliding window shortens what is read.
    """
    visible = problem.kv_len
    if problem.spec.window_left is not None:
        visible = min(visible, problem.spec.window_left + problem.q_len)
    each = problem.batch * problem.kv_heads * row_tiles(problem)
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * multiprocessors // each)
    return max(1, min(wanted, visible // MIN_KEYS, MAX_SPLITS))
