"""Block ranges where arrays decide what a block reads: lengths, segment ids, traced offsets.

XLA computes them from per-block minima and maxima, never from pairs of positions; a kernel reads
two integers per block. Where everything is known at trace time, `Mask.kv_blocks` alone answers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import integers as ints
from .problem import Operands, Problem

_MOST = jnp.iinfo(jnp.int32).max


def kv_bounds(problem: Problem, operands: Operands, block_q: int, block_kv: int):
    """Returns int32[B, Q blocks, 2]: first and one past the last KV block that each Q block reads.

    Blocks between them may still hide everything (ids need not be sorted); none outside is visible.
    An empty range is (0, 0).
    """
    q_blocks = -(-problem.q_len // block_q)
    start = jnp.arange(q_blocks, dtype=jnp.int32) * block_q
    position = start[None] + _offsets(problem, operands)[:, None]
    found = _each(
        lambda p: problem.spec.mask.kv_blocks(p, block_q, problem.kv_len, block_kv), position
    )
    overlap = _overlap(operands.q_segments, operands.kv_segments, block_q, block_kv)
    return _bounds(found, overlap, _length_blocks(operands, block_kv))


def kv_whole(operands: Operands, block_q: int, block_kv: int):
    """Returns int32[B, Q blocks, 2]: a range of KV blocks in which segment ids hide no pair."""
    return _one_document(operands.q_segments, operands.kv_segments, block_q, block_kv)


def q_whole(operands: Operands, block_q: int, block_kv: int):
    """Returns int32[B, KV blocks, 2]: a range of Q blocks in which segment ids hide no pair."""
    return _one_document(operands.kv_segments, operands.q_segments, block_kv, block_q)


def q_bounds(problem: Problem, operands: Operands, block_q: int, block_kv: int):
    """Returns int32[B, KV blocks, 2]: first and one past the last Q block that reads a KV block."""
    kv_blocks = -(-problem.kv_len // block_kv)
    start = jnp.arange(kv_blocks, dtype=jnp.int32) * block_kv
    position = start[None] - _offsets(problem, operands)[:, None]
    found = _each(
        lambda p: problem.spec.mask.q_blocks(p, block_kv, problem.q_len, block_q), position
    )
    overlap = _overlap(operands.kv_segments, operands.q_segments, block_kv, block_q)
    bounds = _bounds(found, overlap, None)
    if operands.kv_lengths is None:
        return bounds
    dead = start[None] >= operands.kv_lengths[:, None]
    return jnp.where(dead[..., None], 0, bounds)


def _each(find, position):
    """Returns (start, stop), int32 each, of the BlockRange that `find` gives for every position."""

    def ends(p):
        found = find(p)
        return jnp.int32(found.start), jnp.int32(found.stop)

    return jax.vmap(jax.vmap(ends))(position)


def _bounds(found, overlap, stop):
    low, high = found
    if stop is not None:
        high = jnp.minimum(high, stop[:, None])
    if overlap is not None:
        low, high = jnp.maximum(low, overlap[0]), jnp.minimum(high, overlap[1])
    empty = low >= high
    return jnp.stack([jnp.where(empty, 0, low), jnp.where(empty, 0, high)], axis=-1)


def _length_blocks(operands: Operands, block_kv: int):
    if operands.kv_lengths is None:
        return None
    return jax.vmap(lambda n: ints.ceil_div(n, block_kv))(operands.kv_lengths)


def _offsets(problem: Problem, operands: Operands):
    if operands.q_offset is not None:
        return operands.q_offset
    return jnp.full((problem.batch,), problem.spec.q_offset, jnp.int32)


def _overlap(own, other, own_block: int, other_block: int):
    """Returns (first, one past the last) block of `other` that shares an id with each `own` block.

    The id ranges of two blocks must meet, which is necessary for a shared id. None without ids.
    """
    if own is None:
        return None
    low, high = _ranges(own, own_block)
    other_low, other_high = _ranges(other, other_block)
    meets = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    index = jnp.arange(other_low.shape[1], dtype=jnp.int32)[None, None]
    first = jnp.min(jnp.where(meets, index, _MOST), axis=-1)
    return first, jnp.max(jnp.where(meets, index + 1, 0), axis=-1)


def _one_document(own, other, own_block: int, other_block: int):
    """Returns int32[B, own blocks, 2]: (first, one past the last) of the last run of whole blocks.

    A block of `other` is whole if all of it lies in the same document as all of the `own` block.
    (Padding does not, as it has another id in queries than in keys, nor does a block that reaches
    past the end.) With unsorted ids, other whole blocks may precede the run; a caller must not rely
    on the range to hold all of them.
    """
    (low, high), (other_low, other_high) = _extremes(own, own_block), _extremes(other, other_block)
    same = (low[:, :, None] == other_low[:, None]) & (high[:, :, None] == other_high[:, None])
    whole = same & (low == high)[:, :, None]
    index = jnp.arange(other_low.shape[1], dtype=jnp.int32)[None, None]
    stop = jnp.max(jnp.where(whole, index + 1, 0), axis=-1)
    before = ~whole & (index < stop[..., None])
    return jnp.stack([jnp.max(jnp.where(before, index + 1, 0), axis=-1), stop], axis=-1)


def _extremes(ids, block: int):
    """Returns (smallest, largest) id of every block of int32[B, length], with -1 past the end."""
    pad = -ids.shape[1] % block
    ids = jnp.pad(ids, ((0, 0), (0, pad)), constant_values=-1)
    ids = ids.reshape(ids.shape[0], -1, block)
    return jnp.min(ids, axis=-1), jnp.max(ids, axis=-1)


def _ranges(ids, block: int):
    """Returns (smallest, largest) id of every block of int32[B, length], without padding (ids < 0).

    A block that is all padding gets (largest int32, -1), which overlaps nothing.
    """
    pad = -ids.shape[1] % block
    ids = jnp.pad(ids, ((0, 0), (0, pad)), constant_values=-1)
    ids = ids.reshape(ids.shape[0], -1, block)
    return jnp.min(jnp.where(ids < 0, _MOST, ids), axis=-1), jnp.max(
        jnp.where(ids < 0, -1, ids), axis=-1
    )
