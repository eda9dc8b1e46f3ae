"""Grid of one call: how it is cut into tiles, and which of them are read."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...core import block_lists, bounds, mesh_axes
from ...core.block_lists import BlockLists
from ...core.integers import round_up
from ...core.problem import Operands, Problem


@dataclasses.dataclass(frozen=True)
class XlaBlocks:
    """Tile sizes of the XLA backend.

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
class Grid:
    """The tiles of one call.

    Q blocks are [B, K, G, block_q, H], KV blocks [B, K, block_kv, H], scores
    [B, K, G, block_q, block_kv]: then every product is a batched matmul without a transposition.
    """

    problem: Problem
    blocks: XlaBlocks

    @property
    def dtype(self):
        """Accumulation dtype: that of sums and of everything between two matmuls."""
        return jnp.float64 if self.problem.dtype == jnp.float64 else jnp.float32

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Number of queries and of keys of a tile."""
        return self.blocks.block_q, self.blocks.block_kv

    def zeros(self, shape, like, dtype=None):
        """Returns zeros, typed by the mesh axes of `like`."""
        zeros = jnp.zeros(shape, self.dtype if dtype is None else dtype)
        return mesh_axes.spread(zeros, mesh_axes.varying(like))

    def dot(self, subscripts, a, b):
        """Multiplies two operands in their common dtype and sums in the accumulation dtype."""
        precision = None
        if self.problem.dtype == jnp.float32:
            # HIGH would be TF32 on a GPU, as DEFAULT is.
            default = self.problem.spec.precision == "default"
            precision = lax.Precision.DEFAULT if default else lax.Precision.HIGHEST
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=self.dtype)

    def split_q(self, x):
        """Splits [B, T, N, H] into [Q blocks, B, K, G, block_q, H]."""
        x = pad(x, 1, self.blocks.block_q, 0.0)
        batch, _, _, width = x.shape
        heads = (self.problem.kv_heads, self.problem.group)
        x = x.reshape(batch, -1, self.blocks.block_q, *heads, width)
        return x.transpose(1, 0, 3, 4, 2, 5)

    def join_q(self, x):
        """Joins Q blocks again: the inverse of split_q."""
        batch, width = x.shape[1], x.shape[-1]
        x = x.transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(batch, -1, self.problem.q_heads, width)[:, : self.problem.q_len]

    def split_kv(self, x):
        """Splits [B, S, K, H] into [KV blocks, B, K, block_kv, H]."""
        x = pad(x, 1, self.blocks.block_kv, 0.0)
        batch, _, heads, width = x.shape
        return x.reshape(batch, -1, self.blocks.block_kv, heads, width).transpose(1, 0, 3, 2, 4)

    def kv_blocks(self, x):
        """Returns the function from a KV block's number to that block of x, [B, K, block_kv, H].

        Several Q blocks read every key again, so keys are put into blocks beforehand. A single Q
        block reads them where they lie: the copy took longer than all the rest (T=1, S=8192,
        N=K=8, H=64, float32, two cores of a CPU: 84 ms, without it 17, jnp 44).
        """
        if self.problem.q_len > self.blocks.block_q:
            blocks = self.split_kv(x)
            return lambda i: blocks[i]
        places = jnp.arange(self.blocks.block_kv, dtype=jnp.int32)
        read = lambda i: jnp.take(x, i * self.blocks.block_kv + places, axis=1, mode="clip")
        return lambda i: read(i).transpose(0, 2, 1, 3)

    def join_kv(self, x):
        """Joins KV blocks again: the inverse of split_kv."""
        _, batch, heads, _, width = x.shape
        x = x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)
        return x[:, : self.problem.kv_len]

    def split_rows(self, x, fill):
        """Splits [B, N, T] into [Q blocks, B, K, G, block_q]."""
        x = pad(x, 2, self.blocks.block_q, fill)
        heads = (self.problem.kv_heads, self.problem.group)
        return x.reshape(x.shape[0], *heads, -1, self.blocks.block_q).transpose(3, 0, 1, 2, 4)

    def join_rows(self, x):
        """Joins per-row scalars again: the inverse of split_rows."""
        x = x.transpose(1, 2, 3, 0, 4)
        return x.reshape(x.shape[0], self.problem.q_heads, -1)[..., : self.problem.q_len]

    def kv_steps(self, operands: Operands) -> Steps:
        """Returns the KV blocks that each Q block reads, for any entry of the batch."""
        if operands.block_lists is not None:
            return _listed(block_lists.of_queries(self.problem, operands, self.tile_shape))
        return Steps(_union(bounds.kv_bounds(self.problem, operands, *self.tile_shape)))

    def q_steps(self, operands: Operands) -> Steps:
        """Returns the Q blocks that read each KV block, for any entry of the batch."""
        if operands.block_lists is not None:
            return _listed(block_lists.of_keys(self.problem, operands, self.tile_shape))
        return Steps(_union(bounds.q_bounds(self.problem, operands, *self.tile_shape)))


class Steps(NamedTuple):
    """The blocks of the other sequence that each block reads.

    Attributes:
        ranges: int32[blocks, 2]: first and one past the last.
        index: int32[entries]: what the ranges count, entries of this list; None: block numbers.
    """

    ranges: Any
    index: Any = None

    def block(self, step):
        """Returns the number of the block of a step."""
        return step if self.index is None else self.index[step]


def _listed(lists: BlockLists) -> Steps:
    """Returns the steps of a call whose batch and heads have one list; see list_rows.py."""
    return Steps(lists.bounds[0, 0][:, ::2], lists.index[0, 0])


def _union(ranges):
    """Reduces [B, blocks, 2] to [blocks, 2]: from the first start to the last stop of any entry."""
    start, stop = ranges[..., 0], ranges[..., 1]
    last = jnp.max(stop, axis=0)
    first = jnp.min(jnp.where(start < stop, start, last[None]), axis=0)
    return jnp.stack([first, last], axis=-1)


def pad(x, axis: int, multiple: int, fill):
    """Pads x along `axis` to a multiple of `multiple`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, round_up(x.shape[axis], multiple) - x.shape[axis])
    return x if widths[axis] == (0, 0) else jnp.pad(x, widths, constant_values=fill)
