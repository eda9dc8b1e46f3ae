"""The two passes over the tiles: Algorithms 1 and 2 of FlashAttention-2 (arXiv:2307.08691).

Batch and heads are carried along in every matmul. Query heads that share a KV head are an axis of
their own, so keys and values are never repeated. The backward goes once over the tiles: five
matmuls each, dQ accumulated in place. Memory is linear in the lengths.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core import dropout, padding, softmax
from ...core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ...core.problem import (
    AttentionSpec,
    Cotangents,
    Operands,
    Outputs,
    Problem,
    describe,
)
from ...core.ragged import RaggedBlocks, RaggedOperands, RaggedProblem, RaggedSpec
from ...core.ragged import attend as attend_ragged
from .. import base
from . import decode, list_rows, online, ragged, unnamed
from .decode import XlaDecodeBlocks
from .grid import Grid, Steps, XlaBlocks
from .tiles import Tiles

# On a CPU the tile should stay in the cache. Gradients of B=2, T=1024, N=4, K=2, H=64, float32,
# causal on two cores took 94, 45, 53 and 107 ms with blocks of 64, 128, 256 and 512; dense jnp 221.
CPU_BLOCK = 128
# Wider heads do more work a tile. Forward and gradients of B=1, T=2048, N=4, H=512, float32, on two
# cores with blocks of 128, 256 and 512: 217 and 659, 155 and 508, 141 and 458 ms; causal 106 and
# 298, 90 and 271, 95 and 334. Dense jnp, which keeps all weights: 132 and 304, causal 132 and 361.
WIDE_HEADS, WIDE_CPU_BLOCK = 256, 256
# Elsewhere each product is a launch, and a tile should be as large as memory allows: its scores, in
# float32 and of all heads, take at most this. Time relative to dense jnp, forward and gradients,
# with 256 MiB and with 1 GiB on an H100 (benchmarks/results/jnp_blocks.txt):
# B=1, T=8192, N=4, H=512, causal 0.97 and 0.94, 0.94 and 0.92; without a mask 1.61 and 1.35, 1.24
# and 1.04. B=4, T=4096, N=16, H=128, causal 0.82 and 0.86, 0.83 and 0.87; without a mask 1.73 and
# 1.55, 1.49 and 1.29, where dense jnp takes 10 GiB and this 3.5.
TILE_BYTES = 1 << 30
LEAST_BLOCK = 128
# Operands that may have gradients, of one array each.
_ARRAYS = ("q", "k", "v", "bias", "alibi_slopes")


@dataclasses.dataclass(frozen=True)
class XlaBackend:
    """The fallback that runs everywhere.

    Attributes:
        unasked: "auto" took it, and there is no GPU here: it warns where it is lowered for one.
    """

    unasked: bool = False
    name = "xla"
    note = None
    partitionable = True
    jvp = base.Refused("has no forward mode but that of jnp")
    jvp_of_vjp = base.Refused("has no tangents of gradients but those of jnp")

    @property
    def attention(self) -> XlaAttention:
        """The pass over the tiles that computes O."""
        return XlaAttention(self)

    @property
    def vjp(self) -> XlaVjp:
        """The pass over the tiles that computes gradients."""
        return XlaVjp(self)

    @property
    def decode(self) -> XlaDecode:
        """Attention to a cache, block by block."""
        return XlaDecode(self)

    @property
    def ragged(self) -> XlaRagged:
        """Attention over pages, block by block."""
        return XlaRagged(self)

    def warned(self, operands):
        """Returns the operands; a program that reads them warns where it is lowered for a GPU."""
        return operands._replace(q=unnamed.passed(operands.q)) if self.unasked else operands


class _Operation:
    def __init__(self, backend: XlaBackend):
        self.backend = backend


class XlaAttention(_Operation, base.Attention):
    """Algorithm 1 over tiles, in jnp."""

    def refusal(self, problem: Problem) -> None:
        """Returns None, as jnp takes every problem."""

    def plan(self, problem: Problem, override: dict[str, Any] | None = None) -> XlaBlocks:
        """Returns the default tiles, no larger than the problem, with the caller's fields put in.

        Raises:
            ValueError: an unknown field, or a size that is not a positive int.
        """
        names = [field.name for field in dataclasses.fields(XlaBlocks)]
        override = override or {}
        if unknown := sorted(set(override) - set(names)):
            raise ValueError(f"blocks has unknown fields {unknown}: backend 'xla' knows {names}")
        block_q, block_kv = problem.spec.block_shape or _tile(problem)
        fitted = XlaBlocks(min(block_q, problem.q_len), min(block_kv, problem.kv_len))
        blocks = dataclasses.replace(fitted, **override)
        if problem.spec.block_shape and blocks != fitted:
            raise ValueError(
                f"blocks is {override}: tiles are the blocks of block_mask, {fitted}; leave blocks "
                "out, or make a mask of other blocks"
            )
        return blocks

    def run(self, spec: AttentionSpec, blocks: XlaBlocks, operands: Operands) -> Outputs:
        """Computes attention; per-row scalars have the accumulation dtype (float64 for float64)."""
        operands = padding.cleared(self.backend.warned(operands))
        return list_rows.forward(partial(_forward, spec, blocks), operands)


class XlaVjp(_Operation, base.Vjp):
    """Algorithm 2 over tiles, in jnp."""

    def run(
        self,
        spec: AttentionSpec,
        blocks: XlaBlocks,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Operands:
        """Computes gradients in the dtypes of the operands."""
        lse_log2, do, delta, shift = cotangents[:4]
        operands, do = padding.cleared(operands), padding.cleared_queries(operands, do)
        rows = Cotangents(lse_log2, do, delta, shift)
        call = partial(_backward, spec, blocks, wanted)
        sums = list_rows.backward(call, operands, rows)
        cast = lambda d, x: None if d is None else d.astype(x.dtype)
        params = map(cast, sums.score_params, operands.score_params)
        grads = {name: cast(getattr(sums, name), getattr(operands, name)) for name in _ARRAYS}
        return sums._replace(**grads, score_params=tuple(params))


class XlaDecode(_Operation, base.Decode):
    """Attention to a cache, in jnp."""

    def refusal(self, problem: DecodeProblem) -> None:
        """Returns None, as jnp takes every problem."""

    def plan(self, problem: DecodeProblem) -> XlaDecodeBlocks:
        """Returns blocks of about decode.BLOCK keys, and one range unless the caller wants more."""
        return decode.choose_blocks(problem)

    def run(self, spec: DecodeSpec, blocks: XlaDecodeBlocks, operands: DecodeOperands) -> Outputs:
        """Computes attention to a cache; scalars and partial results as in `XlaAttention.run`."""
        operands = self.backend.warned(operands)
        if spec.shares_prefix:
            return self.run_shared(spec, operands)
        return decode.attend(spec, blocks, operands)


class XlaRagged(_Operation, base.Ragged):
    """Attention over pages, in jnp."""

    def refusal(self, problem: RaggedProblem) -> None:
        """Returns None, as jnp takes every problem."""

    def plan(self, problem: RaggedProblem) -> RaggedBlocks:
        """Returns blocks of keys as of decoding, and tiles of queries of chunks."""
        return ragged.choose_blocks(problem)

    def run(self, spec: RaggedSpec, blocks: RaggedBlocks, operands: RaggedOperands) -> Outputs:
        """Computes ragged attention over pages; scalars as in `XlaAttention.run`."""
        operands = self.backend.warned(operands)
        steps = partial(self.backend.decode.run, spec.decode, blocks.steps)
        chunks = partial(ragged.chunks, blocks.chunks)
        return attend_ragged(steps, chunks, spec, operands)


def _tile(problem: Problem) -> tuple[int, int]:
    """Returns the number of queries and of keys of a tile, on JAX's default backend."""
    if jax.default_backend() == "cpu":
        wide = max(problem.head_dim, problem.v_head_dim) > WIDE_HEADS
        size = WIDE_CPU_BLOCK if wide else CPU_BLOCK
        return size, size
    scores = max(TILE_BYTES // (4 * problem.batch * problem.q_heads), LEAST_BLOCK**2)
    power = lambda n: 1 << (n.bit_length() - 1)
    rows = power(scores // problem.kv_len or 1)
    # Rows of all keys need no rescaling, but pass over all of dK and dV: 1.02 to 1.20 without a
    # mask and up to 8 times as long as high, and 0.94 to 0.96 causal, as fewer tiles are left out.
    if problem.spec.mask.is_trivial and rows * 8 >= problem.kv_len:
        return rows, problem.kv_len
    return (power(math.isqrt(scores)),) * 2


def _forward(spec: AttentionSpec, blocks: XlaBlocks, operands: Operands) -> Outputs:
    """Computes attention of operands whose padding is cleared."""
    grid = Grid(describe(operands, spec), blocks)
    tiles, steps = Tiles.of(grid, operands), grid.kv_steps(operands)
    q, k, v = grid.split_q(operands.q), grid.kv_blocks(operands.k), grid.kv_blocks(operands.v)
    indices = jnp.arange(len(q), dtype=jnp.int32)
    blocks_of_queries = (indices, steps.ranges, q)
    o, *rows = lax.map(partial(_query_block, tiles, steps, k, v), blocks_of_queries)
    lse_log2, shift, most = map(grid.join_rows, rows)
    return Outputs(grid.join_q(o), lse_log2, shift, most if spec.max_logit else None)


def _backward(
    spec: AttentionSpec,
    blocks: XlaBlocks,
    wanted: frozenset[str],
    operands: Operands,
    rows: Cotangents,
) -> Operands:
    """Computes gradients of operands whose padding is cleared, in the dtypes of their sums."""
    grid = Grid(describe(operands, spec), blocks)
    tiles, steps = Tiles.of(grid, operands, wanted), grid.q_steps(operands)
    q, k, v = grid.split_q(operands.q), grid.split_kv(operands.k), grid.split_kv(operands.v)
    # Rows past the end have an infinite log-sum-exp, hence weights of zero.
    lse_log2 = grid.split_rows(rows.lse_log2, fill=softmax.EMPTY_ROW)
    shift = jnp.zeros_like(rows.delta) if rows.shift is None else rows.shift
    rows_of = (lse_log2, grid.split_rows(shift, fill=0.0), grid.split_rows(rows.delta, fill=0.0))
    queries = (q, grid.split_q(rows.do), *rows_of)
    start = grid.zeros(q.shape, q), tiles.no_extras(q)
    blocks_of_keys = (jnp.arange(len(k), dtype=jnp.int32), steps.ranges, k, v)
    call = partial(_key_block, tiles, steps, queries)
    (dq, extras), (dk, dv) = lax.scan(call, start, blocks_of_keys)
    return Operands(
        grid.join_q(dq * spec.scale),
        grid.join_kv(dk * spec.scale),
        grid.join_kv(dv),
        **tiles.finished(extras, operands)._asdict(),
    )


def _query_block(tiles: Tiles, steps: Steps, k, v, query):
    """Computes (o, lse_log2, shift, max logit) of a Q block: FlashAttention-2, Algorithm 1."""
    q_block, kv_range, q = query

    def step(number, seen):
        kv_block = steps.block(number)
        return online.fold(tiles, (q_block, q), (kv_block, k(kv_block), v(kv_block)), seen)

    start = online.no_keys(tiles.grid, q, tiles.grid.problem.v_head_dim)
    rows = lax.fori_loop(kv_range[0], kv_range[1], step, start)
    inverse, lse_log2, shift = online.finished(tiles.grid, rows, tiles.sides.sinks)
    if tiles.spec.dropout_rate:
        inverse = inverse * dropout.gain(tiles.spec.dropout_rate)
    o = (rows.acc * inverse[..., None]).astype(q.dtype)
    return o, lse_log2, shift, rows.m * tiles.grid.problem.unit


def _key_block(tiles: Tiles, steps: Steps, queries, carry, key):
    """Adds one KV block's part to dQ and to the side inputs' gradients; returns its (dK, dV).

    FlashAttention-2, Algorithm 2.
    """
    grid = tiles.grid
    kv_block, q_range, k, v = key

    def step(number, carry):
        q_block = steps.block(number)
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
