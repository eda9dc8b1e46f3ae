"""Chunks of prompts in jnp: tiles of queries of one sequence each, against its pages.

A tile is a decode call with more queries, so the same blocks of keys are gathered one at a time:
neither the cache is copied as a whole, nor is there a matrix of queries and keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...core import mesh_axes, ragged
from ...core.integers import round_up
from ...core.padding import pad_axis
from ...core.problem import Outputs
from ...core.ragged import RaggedBlocks, RaggedOperands, RaggedProblem, Rows
from ...core.softmax import EMPTY_ROW, sum_dtype
from . import decode
from .decode import XlaDecodeBlocks

# Queries of a tile. Chunks of 1,500 and 540 queries, with 4,096 and 64 keys, and six steps, N=8,
# K=2, H=64, float32, pages of 64, on two cores of a CPU: 468, 411, 237 and 230 ms with 32, 64, 128
# and 256. Larger tiles compute rows that a short chunk does not have.
BLOCK_Q = 128


@dataclasses.dataclass(frozen=True)
class XlaChunkBlocks:
    """Tile sizes of chunks.

    Attributes:
        block_q: queries of a tile.
        block_kv: number of keys gathered at a time; whole pages.
    """

    block_q: int
    block_kv: int


def choose_chunks(problem: RaggedProblem) -> XlaChunkBlocks | None:
    """Returns tiles of BLOCK_Q queries, or of all that there are; None if there are no chunks."""
    if not problem.has_chunks:
        return None
    block_kv = decode.choose_blocks(problem.steps).block_kv
    return XlaChunkBlocks(min(BLOCK_Q, round_up(problem.tokens, 8)), block_kv)


def choose_blocks(problem: RaggedProblem) -> RaggedBlocks:
    """Returns blocks of steps as `decode.choose_blocks` does, and of chunks."""
    return RaggedBlocks(decode.choose_blocks(problem.steps), choose_chunks(problem), "xla")


class _Tile(NamedTuple):
    """A tile of queries: int32[] each."""

    seq: Any  # its sequence
    first: Any  # row of its first query
    count: Any  # number of its queries; rows beyond them are other sequences'
    position: Any  # of its first query


def chunks(blocks: XlaChunkBlocks, problem: RaggedProblem, operands: RaggedOperands) -> Outputs:
    """Computes the rows of q of all sequences with more queries than a step.

    Args:
        blocks: tile sizes.
        problem: of these operands.
        operands: operands `in_range`.

    Returns:
        Outputs as `ragged.join` takes them; other rows are those of a query without keys.
    """
    steps, size = problem.steps, blocks.block_q
    rows = ragged.rows_of(operands, least=problem.steps.q_len + 1)
    stops = jnp.cumsum(-(-rows.count // size), dtype=jnp.int32)  # of the tiles of each sequence
    operands = operands._replace(q=pad_axis(operands.q, 0, problem.tokens + size))
    scalars = jnp.full((steps.q_heads, problem.tokens + size), EMPTY_ROW, sum_dtype(steps.dtype))
    o = jnp.zeros((problem.tokens + size, steps.q_heads, steps.v_head_dim), steps.dtype)
    start = mesh_axes.spread((o, scalars, jnp.zeros_like(scalars)), mesh_axes.varying(operands))

    def one(number, all_rows):
        tile = _tile(operands, rows, stops, number, size)
        return _written(all_rows, tile, _attend(problem, blocks, operands, tile))

    o, *scalars = lax.fori_loop(0, stops[-1], one, start)
    return Outputs(o[: problem.tokens], *(x[:, : problem.tokens] for x in scalars))


def _tile(operands: RaggedOperands, rows: Rows, stops, number, size: int) -> _Tile:
    """Returns the tile of this number, of those of all sequences one after the other."""
    seq = jnp.searchsorted(stops, number, side="right").astype(jnp.int32)
    before = jnp.where(seq > 0, stops[seq - 1], 0)
    passed = (number - before) * size
    position = operands.kv_lengths[seq] - rows.count[seq] + passed
    return _Tile(seq, rows.first[seq] + passed, rows.count[seq] - passed, position)


def _attend(
    problem: RaggedProblem, blocks: XlaChunkBlocks, operands: RaggedOperands, tile: _Tile
) -> Outputs:
    """Computes a tile of queries as a decode call of one sequence with so many of them."""
    own = lambda x: None if x is None else lax.dynamic_slice_in_dim(x, tile.seq, 1)
    q = lax.dynamic_slice_in_dim(operands.q, tile.first, blocks.block_q)
    # No row looks at another's query, but those of other sequences, or of padding, may be NaN.
    exists = jnp.arange(blocks.block_q, dtype=jnp.int32) < tile.count
    decode_operands = ragged.decode_operands(operands, jnp.where(exists[:, None, None], q, 0)[None])
    per_sequence = ("kv_lengths", "page_table", "sinks", "alibi_slopes", "kv_starts", "window_left")
    decode_operands = decode_operands._replace(
        **{name: own(getattr(decode_operands, name)) for name in per_sequence},
        q_offset=tile.position[None],
    )
    return decode.attend(problem.steps.spec, XlaDecodeBlocks(blocks.block_kv, 1), decode_operands)


def _written(all_rows, tile: _Tile, out: Outputs):
    """Returns `all_rows`, (o, lse_log2, shift), with those of a tile written into them.

    Rows past the tile's queries belong to the next tile, which is written later, or to no chunk.
    """
    put = lambda whole, x, axis: lax.dynamic_update_slice_in_dim(
        whole, x[0].astype(whole.dtype), tile.first, axis
    )
    o, lse_log2, shift = all_rows
    return put(o, out.o, 0), put(lse_log2, out.lse_log2, 1), put(shift, out.shift, 1)
