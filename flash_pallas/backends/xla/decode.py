"""A few queries against a cache of keys: blocks of the cache are gathered one at a time.

Blocks between the first and the last that any sequence of the batch sees are read; the cache is
never copied as a whole. Which block a key is in depends on its position alone, so contiguous and
paged caches give the same bits wherever a page size divides the block size.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
from jax import lax

from ...core import decode, softmax
from ...core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ...core.integers import round_up
from ...core.problem import Operands, Outputs, Problem
from . import online
from .grid import Grid, XlaBlocks
from .tiles import Tiles

# A step of B=4, S=8192, N=8, K=2, H=64, float32 on two cores of a CPU took 14, 8 and 11 ms with
# blocks of 128, 512 and 2048 keys (15, 13 and 17 ms from pages of 64), dense jnp 142.
BLOCK = 512


@dataclasses.dataclass(frozen=True)
class XlaDecodeBlocks:
    """How a call is cut.

    Attributes:
        block_kv: keys gathered at a time; whole pages.
        num_splits: ranges of blocks with a result of their own.
    """

    block_kv: int
    num_splits: int


def choose_blocks(problem: DecodeProblem) -> XlaDecodeBlocks:
    """About BLOCK keys. One range by default: XLA runs them one after the other."""
    page = problem.spec.page_size or 1
    size = round_up(min(BLOCK, problem.kv_len), page)
    return XlaDecodeBlocks(block_kv=size, num_splits=problem.spec.num_splits or 1)


def attend(spec: DecodeSpec, blocks: XlaDecodeBlocks, operands: DecodeOperands) -> Outputs:
    """See backends.base.Backend.decode."""
    dtype, quantised = operands.q.dtype, operands.k.dtype != operands.q.dtype
    if quantised and dtype != jnp.float64:  # Keys and values become numbers of q's dtype.
        operands = operands._replace(q=operands.q.astype(jnp.float32))
    problem = decode.describe(operands, spec)
    operands = _in_range(problem, operands)
    grid = Grid(_as_attention(problem), XlaBlocks(problem.q_len, blocks.block_kv))
    sides = Operands(
        operands.q,
        None,
        None,
        q_offset=operands.q_offset,
        kv_lengths=operands.kv_lengths,
        alibi_slopes=operands.alibi_slopes,
    )
    tiles, q = Tiles.of(grid, sides), grid.split_q(operands.q)[0]
    ranges = _split(grid.kv_ranges(sides)[0], -(-problem.kv_len // blocks.block_kv), blocks)
    o, lse_log2, shift = lax.map(partial(_range, tiles, operands, q), ranges)
    sinks = online.per_row(operands.sinks, shift[0])
    o, *rows = softmax.merge(o, lse_log2, shift, sinks, problem.unit)
    return Outputs(grid.join_q(o[None]).astype(dtype), *(grid.join_rows(x[None]) for x in rows))


def _in_range(problem: DecodeProblem, operands: DecodeOperands) -> DecodeOperands:
    """Lengths clipped, the position of query 0 said. Pages are clipped where they are gathered."""
    lengths, offset = jnp.clip(operands.kv_lengths, 0, problem.kv_len), operands.q_offset
    offset = lengths - problem.q_len if offset is None else offset
    return operands._replace(kv_lengths=lengths, q_offset=offset)


def _as_attention(problem: DecodeProblem) -> Problem:
    """The same as attention of all the queries to all the keys that there is room for."""
    p = problem
    sizes = (p.batch, p.q_len, p.kv_len, p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim)
    slopes = p.features & {"alibi_slopes"}
    return Problem(*sizes, dtype=p.dtype, spec=p.spec.attention, features=slopes)


def _split(found, num_blocks: int, blocks: XlaDecodeBlocks):
    """int32[num_splits, 2]: the range `found` of blocks, cut where `num_splits` equal ones end."""
    size = -(-num_blocks // blocks.num_splits)
    start = jnp.arange(blocks.num_splits, dtype=jnp.int32) * size
    ends = jnp.stack([start, start + size], axis=-1)
    return jnp.clip(ends, found[0], found[1])


def _range(tiles: Tiles, operands: DecodeOperands, q, blocks_of_keys):
    """(o, lse_log2, shift) of the queries q [B, K, G, T, H] and one range, without sinks."""
    grid = tiles.grid

    def step(kv_block, seen):
        place = kv_block * grid.blocks.block_kv + jnp.arange(grid.blocks.block_kv, dtype=jnp.int32)
        k, v = (
            _scaled(_gather(x, operands.page_table, place), scale, operands, place)
            for x, scale in ((operands.k, operands.k_scale), (operands.v, operands.v_scale))
        )
        # A weight of 0 times a NaN is a NaN; in k one stays in scores that are hidden.
        valid = place[None] < operands.kv_lengths[:, None]
        v = jnp.where(valid[:, None, :, None], v, lax.full_like(v, 0))
        return online.fold(tiles, (0, q), (kv_block, k, v), seen)

    start = online.no_keys(grid, q, operands.v.shape[-1])
    rows = lax.fori_loop(blocks_of_keys[0], blocks_of_keys[1], step, start)
    inverse, *found = online.finished(grid, rows)
    return rows.acc * inverse[..., None], *found


def _scaled(found, scale, operands: DecodeOperands, place):
    """[B, K, block_kv, H] in q's dtype: keys or values of the cache as numbers."""
    found = found.astype(operands.q.dtype)
    if scale is None:
        return found
    if operands.page_table is None or len(scale) == 1:
        scale = scale[:, :, None, None]
    else:
        page_size = operands.k.shape[1]
        scale = jnp.take(scale, _pages(operands.page_table, page_size, place), axis=0, mode="clip")
        scale = jnp.repeat(scale, page_size, axis=1).transpose(0, 2, 1)[..., None]
    return found * scale.astype(found.dtype)


def _gather(cache, page_table, place):
    """[B, K, block_kv, H]: the keys or values at these positions, anything beyond the cache."""
    if page_table is None:
        found = jnp.take(cache, place, axis=1, mode="clip")
    else:
        page_size = cache.shape[1]
        pages = _pages(page_table, page_size, place)
        found = jnp.take(cache, pages, axis=0, mode="clip")
        found = found.reshape(len(pages), len(place), *cache.shape[2:])
    return found.transpose(0, 2, 1, 3)


def _pages(page_table, page_size: int, place):
    """int32[B, number]: the pages in which these positions lie, whole pages of them."""
    return jnp.take(page_table, place[::page_size] // page_size, axis=1, mode="clip")
