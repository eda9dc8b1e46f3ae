"""Tile sizes of the portable decode kernel, and the number of splits."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from ....core.decode import MAX_SPLITS, VALUES_BEHIND_KEYS, DecodeProblem
from ....core.integers import round_up
from ...gpu.launch import MAX_GRID, WARPGROUP_ROWS, shared_memory
from ...gpu.ptx import draft_bits
from ...gpu.ptx.threads import UNIT
from ..common.smem_tiles import DTYPES, HEAD_DIM_MULTIPLE, buffer, widths
from ..common.tiles import FEWEST_COLUMNS, RESERVED, WIDEST

CTAS_PER_SM = 2  # one computes or starts while the other's copies are on their way
MIN_KEYS = 256  # of a range: fewer, and its start and its partial result cost as much as the keys

# Keys of a step: a tile of K or of V is always on its way.
MOST_DECODE_COLUMNS, LEAST_COLUMNS = 64, 32
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


class DecodeSmem(NamedTuple):
    """Shared memory of the decode kernel."""

    q: Any  # [rows, H]
    k: Any  # [columns, H]
    v: Any  # [columns, Hv]
    raw: Any = None  # (k, v) of a cache in eight bits, before they are widened


def decode_layout(problem: DecodeProblem, blocks: PortableDecodeBlocks) -> DecodeSmem:
    """Returns the shared memory to allocate for a CTA of the decode kernel."""
    width, v_width = widths(problem)[0], round_up(part_columns(problem), 16)
    of_keys = lambda dtype: [buffer((blocks.columns, w), dtype) for w in (width, v_width)]
    k, v = of_keys(problem.dtype)
    raw = tuple(of_keys(problem.kv_dtype)) if problem.quantised else None
    return DecodeSmem(buffer((blocks.rows, width), problem.dtype), k, v, raw)


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
