"""Which blocks a block of queries or keys goes through, and which of them it masks."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...core import integers as ints
from ...core.mask import BlockRange
from ...core.problem import Problem


def key_blocks(problem: Problem, at, position, tile, bounds, kv_length) -> BlockRange:
    """Of the queries of one tile.

    Args:
        problem: what is computed.
        at: (batch entry, query block).
        position: of the tile's first query.
        tile: (queries, keys).
        bounds: core.bounds.kv_bounds, or None.
        kv_length: keys of the batch entry where arrays say it, or None.
    """
    rows, block_kv = tile
    found = problem.spec.mask.kv_blocks(position, rows, problem.kv_len, block_kv)
    if kv_length is not None:
        whole = ints.floor_div(kv_length, block_kv)
        found = found._replace(full_stop=ints.minimum(found.full_stop, whole))
    return _bounded(problem, found, bounds, at)


def query_blocks(problem: Problem, at, position, tile, bounds) -> BlockRange:
    """Of the keys of one tile; the arguments are those of `key_blocks`.

    Queries past the end need no mask, their weights are 0. Neither do keys: what is summed for them
    is dropped.
    """
    block_q, rows = tile
    whole = ints.round_up(problem.q_len, block_q)
    found = problem.spec.mask.q_blocks(position, rows, whole, block_q)
    return _bounded(problem, found, bounds, at)


def _bounded(problem: Problem, found: BlockRange, bounds, at) -> BlockRange:
    start, full_start, full_stop, stop = found
    if bounds is not None:
        start, stop = (bounds[(*at, i)] for i in (0, 1))
    if "kv_segments" in problem.features:
        return BlockRange(start, start, start, stop)
    full_start = ints.clip(full_start, start, ints.maximum(start, stop))
    full_stop = ints.clip(full_stop, full_start, ints.maximum(full_start, stop))
    return BlockRange(start, full_start, full_stop, stop)


def fold(blocks: BlockRange, step, carry: Any):
    """step(block, carry, masked=) for each of them in turn; the last carry."""
    for low, high, masked in blocks.zones():
        body = functools.partial(step, masked=masked)
        carry = lax.fori_loop(jnp.int32(low), jnp.int32(high), body, carry)
    return carry
