"""One step of the online softmax: a KV block is folded into rows of queries.

FlashAttention-2, Algorithm 1 (https://arxiv.org/abs/2307.08691). Used by the forward and by
decoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ...core import softmax
from ...core.softmax import LOG2E
from .grid import Grid
from .tiles import Tiles


class Rows(NamedTuple):
    """Running state of the online softmax of a Q block."""

    acc: Any  # [B, K, G, block_q, Hv], the sum of weights times values
    m: Any  # [B, K, G, block_q], the largest logit, as core.scores.Logits.x; -inf before any key
    l: Any  # [B, K, G, block_q], the sum of weights


def no_keys(grid: Grid, q, v_head_dim: int) -> Rows:
    """Returns the rows of the queries q [B, K, G, block_q, H] before the first KV block."""
    rows = grid.zeros(q.shape[:-1], q)
    return Rows(grid.zeros((*q.shape[:-1], v_head_dim), q), rows - jnp.inf, rows)


def fold(tiles: Tiles, queries, keys, seen: Rows, shown=None) -> Rows:
    """Folds one more KV block into the rows.

    Args:
        tiles: the call's side inputs.
        queries: (index of the Q block, q [B, K, G, block_q, H]).
        keys: (index of the KV block, k [B, K, block_kv, H], v [B, K, block_kv, Hv]).
        seen: the rows before.
        shown: bool[B, block_q, block_kv]: which of what the tiles show is visible; None: all of it.
    """
    (q_block, q), (kv_block, k, v) = queries, keys
    x, kept = tiles.logits(tiles.grid.dot("bkgqh,bksh->bkgqs", q, k), q_block, kv_block)
    x = x if shown is None else jnp.where(shown[:, None, None], x, -jnp.inf)
    m, log2_scale = jnp.maximum(seen.m, x.max(-1)), tiles.grid.problem.unit * LOG2E
    shift = finite(m)
    # Scaled after the subtraction, which is exact where it matters, for logits of any size.
    p = jnp.exp2((x - shift[..., None]) * log2_scale)
    alpha = jnp.exp2((seen.m - shift) * log2_scale)
    l = seen.l * alpha + p.sum(-1)
    p = p if kept is None else jnp.where(kept, p, 0.0)
    pv = tiles.grid.dot("bkgqs,bksh->bkgqh", p.astype(v.dtype), v)
    return Rows(seen.acc * alpha[..., None] + pv, m, l)


def finite(m):
    """Returns m with 0 for rows that have seen no key: it is subtracted from logits of -inf."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def finished(grid: Grid, rows: Rows, sinks=None):
    """Computes softmax.finish of the rows; sinks are [B, N] or None."""
    unit = grid.problem.unit
    m, shift = softmax.parted(rows.m, unit, softmax.far(grid.dtype))
    return softmax.finish(m, rows.l, shift, per_row(sinks, m), unit)


def per_row(sinks, rows):
    """Broadcasts sinks [B, N] to each row [B, K, G, block_q] of `rows`; None without sinks."""
    if sinks is None:
        return None
    per_head = sinks.astype(rows.dtype).reshape(*rows.shape[:3], 1)
    return jnp.broadcast_to(per_head, rows.shape)
