"""Attention in jnp that JAX itself differentiates: forward, backward and to any order.

It reads tiles as the forward does, but in loops of known length, which have derivatives in both
modes. The row maxima are constants: O and the log-sum-exp do not depend on what is subtracted from
the logits. So a sum over tiles is all that is differentiated, of which nothing is kept: a tile is
computed again (`jax.checkpoint`), within the rows of a Q block that are computed again. Memory is
linear in the length at every order, and each order in reverse mode computes all scores once more.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ...core import dropout, mesh_axes, padding, softmax
from ...core.problem import AttentionSpec, Operands, Outputs, describe
from . import list_rows, online
from .grid import Grid, Steps, XlaBlocks
from .tiles import Tiles


def attention(spec: AttentionSpec, blocks: XlaBlocks, operands: Operands) -> Outputs:
    """Computes what `XlaAttention.run` does, but for the shift, by which lse is relative to 0.

    Args:
        spec: static parameters of the call; `max_logit` is ignored.
        blocks: tile sizes.
        operands: the arrays of the call.
    """
    seen = _without_padding(padding.cleared(operands))
    out = padding.discarded(operands, list_rows.forward(partial(_attention, spec, blocks), seen))
    return mesh_axes.spread(out, mesh_axes.varying(operands))


def _without_padding(operands: Operands) -> Operands:
    """Returns operands in which queries beyond their length see no key, whatever a bias holds."""
    within = padding.queries_within(operands)
    if within is None:
        return operands
    most, last = jnp.iinfo(jnp.int32).max, operands.q_last
    last = jnp.full(within.shape, most, jnp.int32) if last is None else last
    return operands._replace(q_last=jnp.where(within, last, -most))


def _attention(spec: AttentionSpec, blocks: XlaBlocks, operands: Operands) -> Outputs:
    """Computes attention of operands whose padding is cleared."""
    grid = Grid(describe(operands, spec), blocks)
    tiles, steps = Tiles.of(grid, operands), grid.kv_steps(operands)
    tiles = dataclasses.replace(tiles, clears=True)
    q, k, v = grid.split_q(operands.q), grid.split_kv(operands.k), grid.split_kv(operands.v)
    rows = jax.checkpoint(partial(_query_block, tiles, steps, k, v), prevent_cse=False)
    o, lse_log2 = lax.map(rows, (jnp.arange(len(q), dtype=jnp.int32), steps.ranges, q))
    return Outputs(grid.join_q(o), grid.join_rows(lse_log2))


def _query_block(tiles: Tiles, steps: Steps, k, v, query):
    """Computes (o, lse_log2) of a Q block, [B, K, G, block_q, Hv] and [B, K, G, block_q]."""
    grid, (q_block, kv_range, q) = tiles.grid, query
    seen = _maxima(tiles.constant(), steps, lax.stop_gradient(k), lax.stop_gradient(query))
    m = online.finite(seen)
    log2_scale = grid.problem.unit * softmax.LOG2E

    def tile(kv_block):
        x, kept = tiles.logits(grid.dot("bkgqh,bksh->bkgqs", q, k[kv_block]), q_block, kv_block)
        p = jnp.exp2((x - m[..., None]) * log2_scale)
        used = p if kept is None else jnp.where(kept, p, 0.0)
        return grid.dot("bkgqs,bksh->bkgqh", used.astype(v.dtype), v[kv_block]), p.sum(-1)

    start = online.no_keys(grid, q, v.shape[-1])[::2]

    # The checkpoint encloses the branch, whose residuals would be all of K and V in every step.
    @partial(jax.checkpoint, prevent_cse=False)
    def part(n):
        number = kv_range[0] + n
        nothing = lambda: jax.tree.map(jnp.zeros_like, start)
        return lax.cond(number < kv_range[1], lambda: tile(steps.block(number)), nothing)

    def step(sums, n):
        return jax.tree.map(jnp.add, sums, part(n)), None

    (acc, l), _ = lax.scan(step, start, jnp.arange(len(k), dtype=jnp.int32))
    rows = online.Rows(acc, seen, l)
    inverse, lse_log2, shift = online.finished(grid, rows, tiles.sides.sinks)
    lse_log2 = lse_log2 + shift * log2_scale
    if tiles.spec.dropout_rate:
        inverse = inverse * dropout.gain(tiles.spec.dropout_rate)
    return (acc * inverse[..., None]).astype(q.dtype), lse_log2


def _maxima(tiles: Tiles, steps: Steps, k, query):
    """Computes the largest logit of each row, -inf where there is none, as a constant."""
    q_block, kv_range, q = query

    def step(number, m):
        kv_block = steps.block(number)
        products = tiles.grid.dot("bkgqh,bksh->bkgqs", q, k[kv_block])
        return jnp.maximum(m, tiles.logits(products, q_block, kv_block)[0].max(-1))

    start = online.no_keys(tiles.grid, q, 1).m
    return lax.stop_gradient(lax.fori_loop(kv_range[0], kv_range[1], step, start))
