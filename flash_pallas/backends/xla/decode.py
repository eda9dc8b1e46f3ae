"""Decoding in jnp: a few queries against a KV cache, whose blocks are gathered one at a time.

Blocks between the first and the last that any sequence of the batch sees are read; the cache is
never copied as a whole. The block that holds a key depends on its position alone, so contiguous and
paged caches give the same bits wherever a page size divides the block size.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...core import decode, drafts, softmax
from ...core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ...core.integers import round_up
from ...core.mask import DraftMask, Mask
from ...core.problem import Operands, Outputs, Problem
from . import online
from .grid import Grid, XlaBlocks
from .tiles import Tiles

# A step of B=4, S=8192, N=8, K=2, H=64, float32 on two cores of a CPU took 14, 8 and 11 ms with
# blocks of 128, 512 and 2048 keys (15, 13 and 17 ms from pages of 64), dense jnp 142.
BLOCK = 512


@dataclasses.dataclass(frozen=True)
class XlaDecodeBlocks:
    """Block size and number of splits of a call.

    Attributes:
        block_kv: number of keys gathered at a time; whole pages.
        num_splits: number of ranges of blocks that have a result of their own.
    """

    block_kv: int
    num_splits: int


def choose_blocks(problem: DecodeProblem) -> XlaDecodeBlocks:
    """Returns blocks of about BLOCK keys; one range by default, as XLA runs ranges in turn."""
    page = problem.spec.page_size or 1
    size = round_up(min(BLOCK, problem.kv_len), page)
    return XlaDecodeBlocks(block_kv=size, num_splits=problem.spec.num_splits or 1)


class Drafts(NamedTuple):
    """Keys that a draft mask makes visible, and positions that it gives.

    Attributes:
        start: int32[B], the first draft, among the keys.
        mask: bool[B, T, T], the drafts that a query sees, in its window.
        depth: int32[B, T], of each draft in the tree.
        first: int32[B, T], the first key that a query sees; None: key 0.
    """

    start: Any
    mask: Any
    depth: Any
    first: Any

    @classmethod
    def of(cls, problem: DecodeProblem, operands: DecodeOperands) -> Drafts:
        """Returns the drafts of a call whose arrays are in range."""
        mask, start = operands.draft_mask, operands.q_offset[:, None]
        left = operands.window_left
        left = problem.spec.window_left if left is None else left[:, None]
        depth = drafts.depths(mask)
        starts = None if operands.kv_starts is None else operands.kv_starts[:, None]
        seen = DraftMask(left, 0, problem.drafts, start)
        first, _ = seen.keys_of(start + depth, operands.kv_lengths[:, None], starts)
        if first is not None:
            first = jnp.broadcast_to(first, depth.shape)
        return cls(start[:, 0], drafts.in_window(mask, left), depth, first)

    def shown(self, place):
        """Returns bool[B, T, block_kv], which of the keys [block_kv] are visible to each query."""
        draft = place[None] - self.start[:, None]
        column = jnp.clip(draft, 0, self.mask.shape[-1] - 1)[:, None]
        shown = jnp.take_along_axis(self.mask, column, axis=2) | (draft < 0)[:, None]
        return shown if self.first is None else shown & (place[None, None] >= self.first[..., None])

    def placed(self, problem: DecodeProblem, sides: Operands) -> Operands:
        """Returns the operands of tiles, which get the distances of ALiBi from positions."""
        sides = sides._replace(q_first=None)
        if sides.alibi_slopes is None:
            return sides
        start = self.start[:, None]
        key = jnp.arange(problem.kv_len, dtype=jnp.int32)[None] - start
        column = jnp.clip(key, 0, self.depth.shape[1] - 1)
        key = jnp.where(key < 0, key, jnp.take_along_axis(self.depth, column, axis=1))
        return sides._replace(q_positions=start + self.depth, kv_positions=start + key)


def attend(spec: DecodeSpec, blocks: XlaDecodeBlocks, operands: DecodeOperands) -> Outputs:
    """Computes attention to a cache; see `Decode.run` of backends/base.py."""
    dtype, quantised = operands.q.dtype, operands.k.dtype != operands.q.dtype
    if quantised and dtype != jnp.float64:  # keys and values are dequantized to q's dtype
        operands = operands._replace(q=operands.q.astype(jnp.float32))
    problem = decode.describe(operands, spec)
    if problem.of_heads:
        problem, operands = _by_heads(problem, operands)
    operands, rows = _in_range(problem, operands)
    grid = Grid(_as_attention(problem), XlaBlocks(problem.q_len, blocks.block_kv))
    tree = None if operands.draft_mask is None else Drafts.of(problem, operands)
    sides = Operands(
        operands.q,
        None,
        None,
        q_offset=operands.q_offset,
        kv_lengths=operands.kv_lengths,
        q_first=tree.first if tree else _first_keys(problem, operands),
        alibi_slopes=operands.alibi_slopes,
    )
    tiles = Tiles.of(grid, tree.placed(problem, sides) if tree else sides)
    inputs, q = (tiles, tree, rows), grid.split_q(operands.q)[0]
    ranges = _split(grid.kv_steps(sides).ranges[0], -(-problem.kv_len // blocks.block_kv), blocks)
    o, lse_log2, shift = lax.map(partial(_range, inputs, operands, spec.v_first, q), ranges)
    sinks = online.per_row(operands.sinks, shift[0])
    o, *rows = softmax.merge(o, lse_log2, shift, sinks, problem.unit)
    o, rows = grid.join_q(o[None]).astype(dtype), [grid.join_rows(x[None]) for x in rows]
    if problem.of_heads:
        entries = len(o) // operands.k.shape[2]
        o = jnp.moveaxis(o.reshape(entries, -1, *o.shape[1:]), 1, 2)
        o = o.reshape(*o.shape[:2], -1, o.shape[-1])
        rows = [x.reshape(entries, -1, x.shape[-1]) for x in rows]
    return Outputs(o, *rows)


def _by_heads(problem: DecodeProblem, operands: DecodeOperands):
    """Returns (problem, operands) with every KV head as a sequence of its own.

    Pages stay as they are: that sequence reads its head of them.
    """
    heads, group = problem.kv_heads, problem.group
    q = operands.q.reshape(*operands.q.shape[:2], heads, group, -1)
    entries = problem.batch * heads
    sinks = operands.sinks
    operands = operands._replace(
        q=jnp.moveaxis(q, 2, 1).reshape(entries, problem.q_len, group, -1),
        kv_lengths=operands.kv_lengths.reshape(entries),
        page_table=operands.page_table.reshape(entries, -1),
        sinks=None if sinks is None else sinks.reshape(entries, group),
    )
    return dataclasses.replace(problem, batch=entries, q_heads=group, kv_heads=1), operands


def _in_range(problem: DecodeProblem, operands: DecodeOperands):
    """Clips lengths and fills in the position of query 0. Pages are clipped when gathered.

    Returns:
        (operands, int32[B] or None: the row of a ring that key 0 of each sequence has, where keys
        are counted from its first one).
    """
    rows = None
    if problem.spec.ring:
        first = jnp.maximum(operands.kv_starts - problem.overwritten, 0)
        operands = operands._replace(kv_lengths=operands.kv_lengths - first, kv_starts=None)
        rows = first % problem.kv_len
    lengths, offset = problem.key_range(operands.kv_lengths, operands.q_offset)
    return operands._replace(kv_lengths=lengths, q_offset=offset), rows


def _first_keys(problem: DecodeProblem, operands: DecodeOperands):
    """Returns int32[B, T]: the first key of each query by arrays; None where there are none."""
    starts, window = operands.kv_starts, operands.window_left
    if window is None:
        shape = problem.batch, problem.q_len
        return None if starts is None else jnp.broadcast_to(starts[:, None], shape)
    step = jnp.arange(problem.q_len, dtype=jnp.int32)
    first = (operands.q_offset - window)[:, None] + step[None]
    return first if starts is None else jnp.maximum(first, starts[:, None])


def _as_attention(problem: DecodeProblem) -> Problem:
    """Returns the same problem as attention of all queries to all keys that there is room for."""
    p = problem
    sizes = (p.batch, p.q_len, p.kv_len, p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim)
    slopes, spec = p.features & {"alibi_slopes"}, p.spec.attention
    if p.drafts:
        spec = dataclasses.replace(spec, mask=Mask())
    return Problem(*sizes, dtype=p.dtype, spec=spec, features=slopes)


def _split(block_range, num_blocks: int, blocks: XlaDecodeBlocks):
    """Returns int32[num_splits, 2]: a block range, cut at the ends of equal splits."""
    size = -(-num_blocks // blocks.num_splits)
    start = jnp.arange(blocks.num_splits, dtype=jnp.int32) * size
    ends = jnp.stack([start, start + size], axis=-1)
    return jnp.clip(ends, block_range[0], block_range[1])


def _range(
    inputs: tuple[Tiles, Drafts | None, Any], operands: DecodeOperands, v_first: int, q, block_range
):
    """Computes (o, lse_log2, shift) of q [B, K, G, T, H] over one range, without sinks."""
    tiles, tree, rows = inputs
    grid, heads = tiles.grid, tiles.grid.problem.kv_heads
    head_dim, v_head_dim = grid.problem.head_dim, grid.problem.v_head_dim
    v_columns = slice(v_first, v_first + v_head_dim)

    def step(kv_block, seen):
        place = kv_block * grid.blocks.block_kv + jnp.arange(grid.blocks.block_kv, dtype=jnp.int32)
        own = place if rows is None else rows[:, None] + place[None]
        gathered = lambda x: _gather(x, operands.page_table, own, heads)
        scaled = lambda x, scale: _scaled(x, scale, operands, place, heads)
        k, v_scale = gathered(operands.k), operands.v_scale
        if operands.v is None:
            v, v_scale = k[..., v_columns], operands.k_scale if v_scale is None else v_scale
        else:
            v = gathered(operands.v)
        k, v = scaled(k[..., :head_dim], operands.k_scale), scaled(v, v_scale)
        # A weight of 0 times a NaN in V is a NaN. A NaN in K only reaches scores that are hidden.
        valid = place[None] < operands.kv_lengths[:, None]
        if operands.kv_starts is not None:
            valid &= place[None] >= operands.kv_starts[:, None]
        v = jnp.where(valid[:, None, :, None], v, lax.full_like(v, 0))
        shown = tree.shown(place) if tree else None
        return online.fold(tiles, (0, q), (kv_block, k, v), seen, shown)

    start = online.no_keys(grid, q, v_head_dim)
    rows = lax.fori_loop(block_range[0], block_range[1], step, start)
    inverse, *lse_and_shift = online.finished(grid, rows)
    return rows.acc * inverse[..., None], *lse_and_shift


def _scaled(kv, scale, operands: DecodeOperands, place, heads: int):
    """Dequantizes keys or values of the cache to q's dtype, [B, K, block_kv, H]."""
    kv = kv.astype(operands.q.dtype)
    if scale is None:
        return kv
    if heads < operands.k.shape[2]:
        pages = _pages(operands.page_table, operands.k.shape[1], place)
        rows = pages if len(scale) > 1 else jnp.zeros_like(pages)
        scale = scale.at[rows, _own_head(pages, operands.k)[:, None]].get(mode="clip")
        scale = jnp.repeat(scale, operands.k.shape[1], axis=1)[:, None, :, None]
    elif operands.page_table is None or len(scale) == 1:
        scale = scale[:, :, None, None]
    else:
        page_size = operands.k.shape[1]
        scale = jnp.take(scale, _pages(operands.page_table, page_size, place), axis=0, mode="clip")
        scale = jnp.repeat(scale, page_size, axis=1).transpose(0, 2, 1)[..., None]
    return kv * scale.astype(kv.dtype)


def _gather(cache, page_table, place, heads: int):
    """Gathers keys or values at these positions, [B, K, block_kv, H]; anything beyond the cache.

    `place` is int32[block_kv], or [B, block_kv] in rings. `heads` is the number of KV heads of a
    sequence: 1 for those of `_by_heads`.
    """
    if place.ndim == 2:
        row = (place % cache.shape[1])[..., None, None]
        gathered = jnp.take_along_axis(cache, row, axis=1)
    elif page_table is None:
        gathered = jnp.take(cache, place, axis=1, mode="clip")
    else:
        page_size = cache.shape[1]
        pages = _pages(page_table, page_size, place)
        if heads == 1 < cache.shape[2]:
            own = _own_head(pages, cache)[:, None, None]
            rows = jnp.arange(page_size, dtype=jnp.int32)[None, None]
            gathered = cache.at[pages[:, :, None], rows, own].get(mode="clip")
            return gathered.reshape(len(pages), 1, len(place), -1)
        gathered = jnp.take(cache, pages, axis=0, mode="clip")
        gathered = gathered.reshape(len(pages), len(place), *cache.shape[2:])
    return gathered.transpose(0, 2, 1, 3)


def _own_head(pages, cache):
    """Returns int32[B]: the head that each sequence of `_by_heads` reads of a page."""
    return jnp.arange(len(pages), dtype=jnp.int32) % cache.shape[-2]


def _pages(page_table, page_size: int, place):
    """Returns int32[B, number]: the pages of these positions, which are whole pages."""
    return jnp.take(page_table, place[::page_size] // page_size, axis=1, mode="clip")
