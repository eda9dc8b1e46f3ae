"""The two passes over the tiles: Algorithms 1 and 2 of FlashAttention-2 (arXiv:2307.08691).

Batch and heads are carried along in every product. Query heads that share a key head are an axis of
their own, so keys and values are never repeated. The backward goes once over the tiles: five
products each, dQ added up in place. Memory is linear in the lengths.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core import dropout, padding, softmax
from ...core.problem import AttentionSpec, Cotangents, Grads, Operands, Outputs, Problem, describe
from .grid import Grid, XlaBlocks
from .tiles import Tiles

# On a CPU the tile should stay in the cache. Gradients of B=2, T=1024, N=4, K=2, H=64, float32,
# causal on two cores took 94, 45, 53 and 107 ms with blocks of 64, 128, 256 and 512; dense jnp 221.
CPU_BLOCK = 128
# Elsewhere each product is a launch, so the tile should be large.
ACCELERATOR_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class XlaBackend:
    """The fallback that runs everywhere."""

    name = "xla"

    def unsupported(self, problem: Problem) -> str | None:
        """None: it takes every problem."""
        return None

    def blocks(self, problem: Problem, override: dict[str, Any] | None) -> XlaBlocks:
        """The default tiles, no larger than the problem, with the caller's fields put in.

        Raises:
            ValueError: an unknown field, or a size that is not a positive int.
        """
        names = [field.name for field in dataclasses.fields(XlaBlocks)]
        override = override or {}
        if unknown := sorted(set(override) - set(names)):
            raise ValueError(f"blocks has unknown fields {unknown}: backend 'xla' knows {names}")
        size = CPU_BLOCK if jax.default_backend() == "cpu" else ACCELERATOR_BLOCK
        fitted = XlaBlocks(block_q=min(size, problem.q_len), block_kv=min(size, problem.kv_len))
        return dataclasses.replace(fitted, **override)

    def forward(self, spec: AttentionSpec, blocks: XlaBlocks, operands: Operands) -> Outputs:
        """The rows' scalars are in the accumulation dtype: float64 for float64 inputs."""
        operands = padding.cleared(operands)
        grid = Grid(describe(operands, spec), blocks)
        tiles = Tiles.of(grid, operands)
        q, k, v = grid.split_q(operands.q), grid.split_kv(operands.k), grid.split_kv(operands.v)
        indices = jnp.arange(len(q), dtype=jnp.int32)
        blocks_of_queries = (indices, grid.kv_ranges(operands), q)
        o, lse_log2, most = lax.map(partial(_query_block, tiles, k, v), blocks_of_queries)
        most = grid.join_rows(most) if spec.max_logit else None
        return Outputs(grid.join_q(o), grid.join_rows(lse_log2), most)

    def backward(
        self,
        spec: AttentionSpec,
        blocks: XlaBlocks,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Grads:
        """Gradients in the dtypes of the operands."""
        lse_log2, do, delta = cotangents
        operands, do = padding.cleared(operands), padding.cleared_queries(operands, do)
        grid = Grid(describe(operands, spec), blocks)
        tiles = Tiles.of(grid, operands, wanted)
        q, k, v = grid.split_q(operands.q), grid.split_kv(operands.k), grid.split_kv(operands.v)
        # Rows past the end have an infinite log-sum-exp, hence weights of zero.
        lse_log2 = grid.split_rows(lse_log2, fill=softmax.EMPTY_ROW)
        queries = (q, grid.split_q(do), lse_log2, grid.split_rows(delta, fill=0.0))
        start = grid.zeros(q.shape, q), tiles.no_extras(q)
        blocks_of_keys = (jnp.arange(len(k), dtype=jnp.int32), grid.q_ranges(operands), k, v)
        (dq, extras), (dk, dv) = lax.scan(
            partial(_key_block, tiles, queries), start, blocks_of_keys
        )
        return Grads(
            grid.join_q(dq * spec.scale).astype(operands.q.dtype),
            grid.join_kv(dk * spec.scale).astype(operands.k.dtype),
            grid.join_kv(dv).astype(operands.v.dtype),
            *tiles.finished(extras, operands),
        )


def _query_block(tiles: Tiles, k, v, query):
    """(o, lse_log2, largest logit) of one block of queries: FlashAttention-2, Algorithm 1."""
    grid, spec = tiles.grid, tiles.spec
    q_block, kv_range, q = query

    def step(kv_block, carry):
        acc, m, l = carry
        x, kept = tiles.logits(grid.dot("bkgqh,bksh->bkgqs", q, k[kv_block]), q_block, kv_block)
        m_new = jnp.maximum(m, x.max(-1))
        # A row that has seen no key yet: subtract 0, not -inf, from its logits of -inf.
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp2(x - shift[..., None])
        alpha = jnp.exp2(m - shift)
        l = l * alpha + p.sum(-1)
        p = p if kept is None else jnp.where(kept, p, 0.0)
        pv = grid.dot("bkgqs,bksh->bkgqh", p.astype(v.dtype), v[kv_block])
        return acc * alpha[..., None] + pv, m_new, l

    rows = grid.zeros(q.shape[:-1], q)
    acc = grid.zeros((*q.shape[:-1], v.shape[-1]), q)
    carry = (acc, rows - jnp.inf, rows)
    acc, m, l = lax.fori_loop(kv_range[0], kv_range[1], step, carry)
    inverse, lse_log2 = softmax.finish(m, l, _sink_log2(tiles, m))
    if spec.dropout_rate:
        inverse = inverse * dropout.gain(spec.dropout_rate)
    return (acc * inverse[..., None]).astype(q.dtype), lse_log2, m


def _sink_log2(tiles: Tiles, m):
    """Of each row [B, K, G, block_q], base 2; None without sinks."""
    sinks = tiles.sides.sinks
    if sinks is None:
        return None
    per_head = sinks.astype(m.dtype).reshape(*m.shape[:3], 1) * softmax.LOG2E
    return jnp.broadcast_to(per_head, m.shape)


def _key_block(tiles: Tiles, queries, carry, key):
    """Adds one block of keys to dQ and to the side inputs' gradients and returns its (dK, dV).

    FlashAttention-2, Algorithm 2.
    """
    grid = tiles.grid
    kv_block, q_range, k, v = key

    def step(q_block, carry):
        dq, extras, dk, dv = carry
        q, do, *rows = (x[q_block] for x in queries)
        products = grid.dot("bkgqh,bksh->bkgqs", q, k), grid.dot("bkgqh,bksh->bkgqs", do, v)
        p, ds, part = tiles.weights_and_gradients(products, rows, q_block, kv_block)
        ds = ds.astype(q.dtype)
        dv = dv + grid.dot("bkgqs,bkgqh->bksh", p.astype(do.dtype), do)
        dk = dk + grid.dot("bkgqs,bkgqh->bksh", ds, q)
        dq_block = dq[q_block] + grid.dot("bkgqs,bksh->bkgqh", ds, k)
        dq = lax.dynamic_update_index_in_dim(dq, dq_block, q_block, 0)
        return dq, tiles.add(extras, part, q_block, kv_block), dk, dv

    start = (*carry, grid.zeros(k.shape, k), grid.zeros(v.shape, k))
    dq, extras, dk, dv = lax.fori_loop(q_range[0], q_range[1], step, start)
    return (dq, extras), (dk, dv)
