"""Block ranges where arrays decide what a block reads: lengths, segment ids, positions, offsets.

XLA computes them from per-block minima and maxima, never from pairs of positions; a kernel reads
two integers per block. Where everything is known at trace time, `Mask.kv_blocks` alone answers.
"""

from __future__ import annotations

import functools
import operator

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
    ranges = _block_ranges(
        lambda p: problem.spec.mask.kv_blocks(p, block_q, problem.kv_len, block_kv), position
    )
    stop = _length_blocks(operands, block_kv)
    return _bounds(ranges, _extent(meets(problem, operands, block_q, block_kv)), stop)


def kv_whole(operands: Operands, block_q: int, block_kv: int):
    """Returns int32[B, Q blocks, 2]: a range of KV blocks in which no array hides a pair."""
    return _last_run(whole(operands, block_q, block_kv))


def q_whole(operands: Operands, block_q: int, block_kv: int):
    """Returns int32[B, KV blocks, 2]: a range of Q blocks in which no array hides a pair."""
    return _last_run(whole(operands, block_q, block_kv).swapaxes(1, 2))


def q_bounds(problem: Problem, operands: Operands, block_q: int, block_kv: int):
    """Returns int32[B, KV blocks, 2]: first and one past the last Q block that reads a KV block."""
    kv_blocks = -(-problem.kv_len // block_kv)
    start = jnp.arange(kv_blocks, dtype=jnp.int32) * block_kv
    position = start[None] - _offsets(problem, operands)[:, None]
    ranges = _block_ranges(
        lambda p: problem.spec.mask.q_blocks(p, block_kv, problem.q_len, block_q), position
    )
    pairs = meets(problem, operands, block_q, block_kv)
    bounds = _bounds(ranges, _extent(None if pairs is None else pairs.swapaxes(1, 2)), None)
    if operands.kv_lengths is None:
        return bounds
    dead = start[None] >= operands.kv_lengths[:, None]
    return jnp.where(dead[..., None], 0, bounds)


def _block_ranges(find, position):
    """Returns (start, stop), int32 each, of the BlockRange that `find` gives for every position."""

    def ends(p):
        block_range = find(p)
        return jnp.int32(block_range.start), jnp.int32(block_range.stop)

    return jax.vmap(jax.vmap(ends))(position)


def _bounds(ranges, overlap, stop):
    low, high = ranges
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


def meets(problem: Problem, operands: Operands, block_q: int, block_kv: int):
    """Returns bool[B, Q blocks, KV blocks]: where arrays may leave a pair visible; None: anywhere.

    The id ranges of two blocks must meet, which is necessary for a shared id, and so must the range
    of positions of the keys and that of what the queries see.
    """
    conditions = []
    if operands.q_segments is not None:
        low, high = _ranges(operands.q_segments, block_q)
        other_low, other_high = _ranges(operands.kv_segments, block_kv)
        conditions.append(
            (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
        )
    key_positions = lambda: _key_positions(operands.kv_positions, problem.kv_len, block_kv)
    if operands.q_first is not None:
        first = _reduced(operands.q_first, block_q, jnp.min, _MOST)
        conditions.append(first[:, :, None] <= key_positions()[1][:, None])
    if operands.q_last is not None:
        last = _reduced(operands.q_last, block_q, jnp.max, -_MOST)
        conditions.append(key_positions()[0][:, None] <= last[:, :, None])
    return functools.reduce(operator.and_, conditions) if conditions else None


def whole(operands: Operands, block_q: int, block_kv: int):
    """Returns bool[B, Q blocks, KV blocks]: where no array hides a pair.

    With segment ids two blocks are whole if all of both lies in one document. (Padding does not, as
    it has another id in queries than in keys.) A KV block that reaches past the end is never whole.
    """
    conditions = []
    if operands.q_segments is not None:
        low, high = _extremes(operands.q_segments, block_q)
        other_low, other_high = _extremes(operands.kv_segments, block_kv)
        same = (low[:, :, None] == other_low[:, None]) & (high[:, :, None] == other_high[:, None])
        conditions.append(same & (low == high)[:, :, None])
    length = operands.k.shape[1]
    low, high = _key_positions(operands.kv_positions, length, block_kv)
    if operands.q_first is not None:
        first = _reduced(operands.q_first, block_q, jnp.max, -_MOST)
        conditions.append(first[:, :, None] <= low[:, None])
    if operands.q_last is not None:
        last = _reduced(operands.q_last, block_q, jnp.min, _MOST)
        conditions.append(high[:, None] <= last[:, :, None])
    index = jnp.arange(-(-length // block_kv), dtype=jnp.int32)
    conditions.append(((index + 1) * block_kv <= length)[None, None])
    return functools.reduce(operator.and_, conditions)


def _key_positions(positions, length: int, block_kv: int):
    """Returns (smallest, largest) position of a key in every block, int32[B or 1, KV blocks].

    Args:
        positions: int32[B, length], or None: a key's position is its index.
        length: number of keys.
        block_kv: number of keys of a block.
    """
    if positions is not None:
        low = _reduced(positions, block_kv, jnp.min, _MOST)
        return low, _reduced(positions, block_kv, jnp.max, -_MOST)
    start = jnp.arange(0, length, block_kv, dtype=jnp.int32)[None]
    return start, jnp.minimum(start + block_kv, length) - 1


def _reduced(x, block: int, reduce, fill: int):
    """Reduces every block of int32[B, length]; `fill` is what is past the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), constant_values=fill)
    return reduce(x.reshape(x.shape[0], -1, block), axis=-1)


def _extent(meets):
    """Returns (first, one past the last) other block that each meets, int32[B, blocks] each."""
    if meets is None:
        return None
    index = jnp.arange(meets.shape[2], dtype=jnp.int32)[None, None]
    first = jnp.min(jnp.where(meets, index, _MOST), axis=-1)
    return first, jnp.max(jnp.where(meets, index + 1, 0), axis=-1)


def _last_run(whole):
    """Returns int32[B, blocks, 2]: (first, one past the last) of the last run of whole blocks.

    Other whole blocks may precede the run, as with ids that are not sorted; a caller must not rely
    on the range to hold all of them.
    """
    index = jnp.arange(whole.shape[2], dtype=jnp.int32)[None, None]
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
