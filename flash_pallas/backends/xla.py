"""Attention one block at a time in jnp: any device, any float dtype, memory linear in the length.

Algorithms 1 and 2 of FlashAttention-2 (arXiv:2307.08691), with batch and heads carried along in
every product. Query heads that share a key head are an axis of their own, so keys and values are
never repeated. The backward goes once over the tiles: five products each, dQ added up in place.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import manual_axes, softmax
from ..core.integers import round_up
from ..core.problem import AttentionSpec, Cotangents, Grads, Operands, Outputs, Problem, describe
from ..core.tile import Tile

# On a CPU the tile should stay in the cache. Gradients of B=2, T=1024, N=4, K=2, H=64, float32,
# causal on two cores took 94, 45, 53 and 107 ms with blocks of 64, 128, 256 and 512; dense jnp 221.
CPU_BLOCK = 128
# Elsewhere each product is a launch, so the tile should be large.
ACCELERATOR_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class XlaBlocks:
    """Tile sizes.

    Attributes:
        block_q: queries per tile.
        block_kv: keys per tile.
    """

    block_q: int
    block_kv: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"blocks[{field.name!r}] is {size!r}: it must be a positive int, such as 128"
                )


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

    def forward(self, spec: AttentionSpec, blocks: XlaBlocks, operands: Operands):
        """(o [B, T, N, Hv] in q's dtype, lse_log2 [B, N, T] in the accumulation dtype)."""
        grid = _Grid.of(spec, blocks, operands)
        q, k, v = grid.split_q(operands.q), grid.split_kv(operands.k), grid.split_kv(operands.v)
        indices = jnp.arange(len(q), dtype=jnp.int32)
        o, lse_log2 = lax.map(partial(_query_block, grid, k, v), (indices, q))
        return Outputs(grid.join_q(o), grid.join_rows(lse_log2))

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
        grid = _Grid.of(spec, blocks, operands)
        q, k, v = grid.split_q(operands.q), grid.split_kv(operands.k), grid.split_kv(operands.v)
        # Rows past the end have an infinite log-sum-exp, hence weights of zero.
        lse_log2 = grid.split_rows(lse_log2, fill=softmax.EMPTY_ROW)
        queries = (q, grid.split_q(do), lse_log2, grid.split_rows(delta, fill=0.0))
        dq = grid.zeros(q.shape, q)
        indices = jnp.arange(len(k), dtype=jnp.int32)
        dq, (dk, dv) = lax.scan(partial(_key_block, grid, queries), dq, (indices, k, v))
        return Grads(
            q=grid.join_q(dq * spec.scale).astype(operands.q.dtype),
            k=grid.join_kv(dk * spec.scale).astype(operands.k.dtype),
            v=grid.join_kv(dv).astype(operands.v.dtype),
        )


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How one call is cut into tiles, and what is visible in each.

    Blocks of queries are [B, K, G, block_q, H], blocks of keys [B, K, block_kv, H], scores
    [B, K, G, block_q, block_kv]: then every product is a batched one without a transposition.
    """

    problem: Problem
    blocks: XlaBlocks
    q_offset: Any  # int, or int32[B]

    @classmethod
    def of(cls, spec: AttentionSpec, blocks: XlaBlocks, operands: Operands) -> _Grid:
        offset = spec.q_offset if operands.q_offset is None else operands.q_offset
        return cls(describe(operands, spec), blocks, offset)

    @property
    def dtype(self):
        """Of sums and of everything between two products."""
        return jnp.float64 if self.problem.dtype == jnp.float64 else jnp.float32

    def zeros(self, shape, like):
        return manual_axes.spread(jnp.zeros(shape, self.dtype), manual_axes.varying(like))

    def split_q(self, x):
        """[B, T, N, H] -> [query blocks, B, K, G, block_q, H]."""
        x = _pad(x, 1, self.blocks.block_q, 0.0)
        batch, _, _, width = x.shape
        heads = (self.problem.kv_heads, self.problem.group)
        x = x.reshape(batch, -1, self.blocks.block_q, *heads, width)
        return x.transpose(1, 0, 3, 4, 2, 5)

    def join_q(self, x):
        """The inverse of split_q."""
        batch, width = x.shape[1], x.shape[-1]
        x = x.transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(batch, -1, self.problem.q_heads, width)[:, : self.problem.q_len]

    def split_kv(self, x):
        """[B, S, K, H] -> [key blocks, B, K, block_kv, H]."""
        x = _pad(x, 1, self.blocks.block_kv, 0.0)
        batch, _, heads, width = x.shape
        return x.reshape(batch, -1, self.blocks.block_kv, heads, width).transpose(1, 0, 3, 2, 4)

    def join_kv(self, x):
        """The inverse of split_kv."""
        _, batch, heads, _, width = x.shape
        x = x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)
        return x[:, : self.problem.kv_len]

    def split_rows(self, x, fill):
        """[B, N, T] -> [query blocks, B, K, G, block_q]."""
        x = _pad(x, 2, self.blocks.block_q, fill)
        heads = (self.problem.kv_heads, self.problem.group)
        return x.reshape(x.shape[0], *heads, -1, self.blocks.block_q).transpose(3, 0, 1, 2, 4)

    def join_rows(self, x):
        """The inverse of split_rows."""
        x = x.transpose(1, 2, 3, 0, 4)
        return x.reshape(x.shape[0], self.problem.q_heads, -1)[..., : self.problem.q_len]

    def kv_blocks(self, q_block):
        """(first, last + 1) key block that some query of this block sees in some batch entry."""
        low, high = self._offsets()
        find = partial(
            self.problem.spec.mask.kv_blocks,
            q_rows=self.blocks.block_q,
            kv_len=self.problem.kv_len,
            block_kv=self.blocks.block_kv,
        )
        start = q_block * self.blocks.block_q
        return jnp.int32(find(start + low).start), jnp.int32(find(start + high).stop)

    def q_blocks(self, kv_block):
        """(first, last + 1) query block that sees some key of this block in some batch entry."""
        low, high = self._offsets()
        find = partial(
            self.problem.spec.mask.q_blocks,
            kv_rows=self.blocks.block_kv,
            q_len=self.problem.q_len,
            block_q=self.blocks.block_q,
        )
        start = kv_block * self.blocks.block_kv
        return jnp.int32(find(start - high).start), jnp.int32(find(start - low).stop)

    def _offsets(self):
        """The smallest and the largest query offset of the batch."""
        if isinstance(self.q_offset, int):
            return self.q_offset, self.q_offset
        return jnp.min(self.q_offset), jnp.max(self.q_offset)

    def logits(self, q, k, q_block, kv_block):
        """Base-2 logits of a tile, -inf where a query does not see a key."""
        x = self.dot("bkgqh,bksh->bkgqs", q, k) * (self.problem.spec.scale * softmax.LOG2E)
        keep = self._keep(q_block, kv_block)
        return x if keep is None else jnp.where(keep, x, -jnp.inf)

    def _keep(self, q_block, kv_block):
        """bool[1 or B, 1, 1, block_q, block_kv], or None if every tile is wholly visible."""
        mask, kv_len = self.problem.spec.mask, self.problem.kv_len
        tail = kv_len if kv_len % self.blocks.block_kv else None
        if mask.is_trivial and tail is None:
            return None
        shape = (self.blocks.block_q, self.blocks.block_kv)
        q_start, kv_start = q_block * self.blocks.block_q, kv_block * self.blocks.block_kv

        def keep(offset):
            return Tile(q_start + offset, kv_start, shape).limits(mask, tail).keep(shape)

        if isinstance(self.q_offset, int):
            return keep(self.q_offset)[None, None, None]
        return jax.vmap(keep)(self.q_offset)[:, None, None]

    def dot(self, subscripts, a, b):
        """A product of two operands in their common dtype, summed in the accumulation dtype."""
        return jnp.einsum(subscripts, a, b, preferred_element_type=self.dtype)


def _query_block(grid: _Grid, k, v, query):
    """(o, lse_log2) of one block of queries: FlashAttention-2, Algorithm 1."""
    q_block, q = query

    def step(kv_block, carry):
        acc, m, l = carry
        x = grid.logits(q, k[kv_block], q_block, kv_block)
        m_new = jnp.maximum(m, x.max(-1))
        # A row that has seen no key yet: subtract 0, not -inf, from its logits of -inf.
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp2(x - shift[..., None])
        alpha = jnp.exp2(m - shift)
        pv = grid.dot("bkgqs,bksh->bkgqh", p.astype(v.dtype), v[kv_block])
        return acc * alpha[..., None] + pv, m_new, l * alpha + p.sum(-1)

    rows = grid.zeros(q.shape[:-1], q)
    acc = grid.zeros((*q.shape[:-1], v.shape[-1]), q)
    acc, m, l = lax.fori_loop(*grid.kv_blocks(q_block), step, (acc, rows - jnp.inf, rows))
    inverse, lse_log2 = softmax.finish(m, l)
    return (acc * inverse[..., None]).astype(q.dtype), lse_log2


def _key_block(grid: _Grid, queries, dq, key):
    """Adds one block of keys to dQ and returns its (dK, dV): FlashAttention-2, Algorithm 2."""
    kv_block, k, v = key

    def step(q_block, carry):
        dq, dk, dv = carry
        q, do, lse_log2, delta = (x[q_block] for x in queries)
        p = jnp.exp2(grid.logits(q, k, q_block, kv_block) - lse_log2[..., None])
        dv = dv + grid.dot("bkgqs,bkgqh->bksh", p.astype(do.dtype), do)
        dp = grid.dot("bkgqh,bksh->bkgqs", do, v)
        ds = (p * (dp - delta[..., None])).astype(q.dtype)
        dk = dk + grid.dot("bkgqs,bkgqh->bksh", ds, q)
        dq_block = dq[q_block] + grid.dot("bkgqs,bksh->bkgqh", ds, k)
        return lax.dynamic_update_index_in_dim(dq, dq_block, q_block, 0), dk, dv

    start = (dq, grid.zeros(k.shape, k), grid.zeros(v.shape, k))
    dq, dk, dv = lax.fori_loop(*grid.q_blocks(kv_block), step, start)
    return dq, (dk, dv)


def _pad(x, axis: int, multiple: int, fill: float):
    """x lengthened along `axis` to a multiple of `multiple`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, round_up(x.shape[axis], multiple) - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)
