"""The two passes over the tiles: Algorithms 1 and 2 of FlashAttention-2 (arXiv:2307.08691).

Batch and heads are carried along in every matmul. Query heads that share a KV head are an axis of
their own, so keys and values are never repeated. The backward goes once over the tiles: five
matmuls each, dQ accumulated in place. Memory is linear in the lengths.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core import dropout, padding, softmax
from ...core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ...core.problem import AttentionSpec, Cotangents, Grads, Operands, Outputs, Problem, describe
from . import decode, online
from .decode import XlaDecodeBlocks
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
    note = None
    partitionable = True

    def not_automatic(self, problem: Problem | DecodeProblem) -> str | None:
        """Returns None: "auto" may take this backend for every call that it can run."""
        return None

    def unsupported(self, problem: Problem) -> str | None:
        """Returns None: it takes every problem."""
        return None

    def blocks(self, problem: Problem, override: dict[str, Any] | None) -> XlaBlocks:
        """Returns the default tiles, no larger than the problem, with the caller's fields put in.

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

    def candidates(self, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        """Returns no candidates: there is nothing to time, as one size serves."""
        return {}

    def forward(self, spec: AttentionSpec, blocks: XlaBlocks, operands: Operands) -> Outputs:
        """Computes attention; per-row scalars have the accumulation dtype (float64 for float64)."""
        operands = padding.cleared(operands)
        grid = Grid(describe(operands, spec), blocks)
        tiles = Tiles.of(grid, operands)
        q, k, v = grid.split_q(operands.q), grid.kv_blocks(operands.k), grid.kv_blocks(operands.v)
        indices = jnp.arange(len(q), dtype=jnp.int32)
        blocks_of_queries = (indices, grid.kv_ranges(operands), q)
        o, *rows = lax.map(partial(_query_block, tiles, k, v), blocks_of_queries)
        lse_log2, shift, most = map(grid.join_rows, rows)
        return Outputs(grid.join_q(o), lse_log2, shift, most if spec.max_logit else None)

    def backward(
        self,
        spec: AttentionSpec,
        blocks: XlaBlocks,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Grads:
        """Computes gradients in the dtypes of the operands."""
        lse_log2, do, delta, shift = cotangents[:4]
        operands, do = padding.cleared(operands), padding.cleared_queries(operands, do)
        grid = Grid(describe(operands, spec), blocks)
        tiles = Tiles.of(grid, operands, wanted)
        q, k, v = grid.split_q(operands.q), grid.split_kv(operands.k), grid.split_kv(operands.v)
        # Rows past the end have an infinite log-sum-exp, hence weights of zero.
        lse_log2 = grid.split_rows(lse_log2, fill=softmax.EMPTY_ROW)
        shift = grid.split_rows(jnp.zeros_like(delta) if shift is None else shift, fill=0.0)
        queries = (q, grid.split_q(do), lse_log2, shift, grid.split_rows(delta, fill=0.0))
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

    def unsupported_decode(self, problem: DecodeProblem) -> str | None:
        """Returns None: it takes every problem."""
        return None

    def decode_blocks(self, problem: DecodeProblem) -> XlaDecodeBlocks:
        """Returns blocks of about decode.BLOCK keys, and one range unless the caller wants more."""
        return decode.choose_blocks(problem)

    def decode(
        self, spec: DecodeSpec, blocks: XlaDecodeBlocks, operands: DecodeOperands
    ) -> Outputs:
        """Computes attention to a cache; scalars and partial results as in `forward`."""
        return decode.attend(spec, blocks, operands)


def _query_block(tiles: Tiles, k, v, query):
    """Computes (o, lse_log2, shift, max logit) of a Q block: FlashAttention-2, Algorithm 1."""
    q_block, kv_range, q = query

    def step(kv_block, seen):
        return online.fold(tiles, (q_block, q), (kv_block, k(kv_block), v(kv_block)), seen)

    start = online.no_keys(tiles.grid, q, tiles.grid.problem.v_head_dim)
    rows = lax.fori_loop(kv_range[0], kv_range[1], step, start)
    inverse, lse_log2, shift = online.finished(tiles.grid, rows, tiles.sides.sinks)
    if tiles.spec.dropout_rate:
        inverse = inverse * dropout.gain(tiles.spec.dropout_rate)
    o = (rows.acc * inverse[..., None]).astype(q.dtype)
    return o, lse_log2, shift, rows.m * tiles.grid.problem.unit


def _key_block(tiles: Tiles, queries, carry, key):
    """Adds one KV block's part to dQ and to the side inputs' gradients; returns its (dK, dV).

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
