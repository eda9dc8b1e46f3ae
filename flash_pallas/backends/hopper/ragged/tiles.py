"""Tiles of packed queries: tile sizes, which sequence each is of, and the order in which they run.

A tile is `tile_rows` consecutive rows of packed q, of one sequence and one query head. TMA tiles
begin at multiples of 8 rows, so the first of a sequence may begin with up to 7 rows of the sequence
before, and its last may end with rows of the one behind. They are computed, at positions below and
above those of the sequence, and not stored.

Rows of no sequence, before the first and behind the last, are two more of them, without keys: their
tiles write zeros in one step, where a pass over all of o would take longer than short prompts do.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ....core import ragged
from ....core.decode import UNBOUNDED, DecodeProblem
from ....core.problem import Problem
from ....core.ragged import RaggedOperands, RaggedProblem
from ..common.pipeline import LENGTH_MULTIPLE, fits
from ..forward.cta import SWIZZLE_BYTES
from ..forward.tiles import NATIVE_HEAD_DIMS, ForwardBlocks, choose_forward, without_producer
from ..forward.tiles import scratch as forward_scratch

# --- Which problems there are tiles for, and which tiles ------------------------------------------

# Longest q for which tiles are chosen. Tuned tiles of a longer one suit one long sequence, and how
# long the sequences of a call are is only known on the device.
TUNED_FOR = 4096
BLOCKS_KV = (128, 96, 64)  # keys of a step


def as_forward(problem: RaggedProblem) -> Problem:
    """Returns the problem of the forward kernel: a batch of sequences, each with room for all q."""
    steps = problem.steps
    return Problem(
        batch=steps.batch,
        q_len=problem.tokens,
        kv_len=steps.kv_len,
        q_heads=steps.q_heads,
        kv_heads=steps.kv_heads,
        head_dim=steps.head_dim,
        v_head_dim=steps.v_head_dim,
        dtype=steps.dtype,
        spec=steps.spec.attention,
        features=frozenset({"kv_lengths"} | steps.features & {"sinks", "alibi_slopes"}),
    )


def unsupported_chunks(problem: RaggedProblem) -> str | None:
    """Returns why the kernel cannot run `problem`, or None."""
    steps = problem.steps
    if steps.dtype not in (jnp.bfloat16, jnp.float16):
        return f"runs chunks in bfloat16 and float16, not {steps.dtype}: cast q and the pages"
    if steps.quantised:
        return f"runs chunks over pages of q's dtype, {steps.dtype}, not {steps.kv_dtype}"
    if steps.shares_kv:
        return "runs chunks over pages of keys and pages of values: pass v_pages"
    for name, width in (("q and k", steps.head_dim), ("v", steps.v_head_dim)):
        if width not in NATIVE_HEAD_DIMS:
            return (
                f"runs chunks with head dims of {name} of "
                f"{', '.join(map(str, NATIVE_HEAD_DIMS))}, not {width}: pad it"
            )
    if _choice(problem, num_sms=1) is None:
        return (
            f"runs chunks over pages that divide {_widest(steps)} keys or are multiples "
            f"of 64, not pages of {steps.spec.page_size}"
        )
    return None


def choose_chunk_blocks(
    problem: RaggedProblem, num_sms: int, producer: bool = True
) -> ForwardBlocks:
    """Returns the forward kernel's tiles for prompts, with blocks of keys that suit the pages.

    Not called where `unsupported_chunks` has a reason.

    Args:
        problem: a ragged problem.
        num_sms: number of SMs that the tiles are to keep busy.
        producer: whether a producer warpgroup loads; it takes registers that can be traded.
    """
    blocks = _choice(problem, num_sms)
    if blocks is None:
        raise AssertionError(f"no tiles suit pages of {problem.steps.spec.page_size} keys")
    return blocks if producer else without_producer(blocks, as_forward(problem))


def _choice(problem: RaggedProblem, num_sms: int) -> ForwardBlocks | None:
    forward = as_forward(problem)
    one_sequence = dataclasses.replace(
        forward,
        batch=1,
        q_len=min(forward.q_len, TUNED_FOR),
        features=forward.features - {"kv_lengths"},
    )
    blocks = choose_forward(one_sequence, num_sms)
    page_size = problem.steps.spec.page_size or 0
    sizes = (blocks.block_kv, *(size for size in BLOCKS_KV if size < blocks.block_kv))
    for size in sizes:
        resized = dataclasses.replace(blocks, block_kv=size)
        if suits(size, page_size) and fits(scratch(forward, resized, page_size)):
            return resized
    return None


def suits(block_kv: int, page_size: int) -> bool:
    """Returns whether a block of keys is a number of whole pages, or a part of one."""
    return block_kv % page_size == 0 or page_size % block_kv == 0


def piece_rows(block_kv: int, page_size: int) -> int:
    """Returns the keys of a piece of a block, which one copy loads: a page, or all of the block."""
    return min(block_kv, page_size)


def _widest(steps: DecodeProblem) -> int:
    return 64 if max(steps.head_dim, steps.v_head_dim) > 192 else 128


def scratch(problem: Problem, blocks: ForwardBlocks, page_size: int, *arrays):
    """Returns the shared memory and the barriers of a CTA; see the forward's `scratch`."""
    smem = forward_scratch(problem, blocks, *arrays)
    pieces = blocks.block_kv // piece_rows(blocks.block_kv, page_size)
    return smem._replace(
        k_ring=smem.k_ring.filled_by(pieces),
        v_ring=smem.v_ring.filled_by(pieces),
        v_arrived=dataclasses.replace(smem.v_arrived, num_arrivals=pieces),
    )


# --- The tiles of a call --------------------------------------------------------------------------


class TileRow(NamedTuple):
    """A row of the table but the first: a tile of a head, in int32."""

    seq: Any  # its sequence
    head: Any
    row: Any  # its first row of packed q, a multiple of 8
    position: Any  # of that row
    low: Any  # how many of its first rows belong to another sequence
    high: Any  # one past the last of its rows, counted in the tile, that belongs to the sequence
    length: Any  # keys of the sequence
    start: Any  # first key of the sequence; UNBOUNDED where none is left
    left: Any  # keys before its own position that a query sees


EMPTY = 2  # sequences without keys: the rows before the first sequence, and those behind the last


def most_tiles(problem: RaggedProblem, tile_rows: int) -> int:
    """Returns the number of tiles of one head that there may be."""
    seqs = min(problem.num_seqs, problem.tokens // (problem.steps.q_len + 1)) + EMPTY
    return (problem.tokens + (LENGTH_MULTIPLE - 1) * seqs) // tile_rows + seqs


def chunk_tiles(problem: RaggedProblem, operands: RaggedOperands, tile_rows: int):
    """Returns the table of the tiles of sequences with more than `step_tokens` queries.

    It is int32[1 + tiles * heads, 9]: a row that begins with how many there are, then one of
    TileRow for each tile and head; rows past the last tile may be any of them. Sequences S and
    S + 1 have the rows of no sequence. It has all that a tile needs, as a consumer looks it up
    between two tiles, where its tensor cores wait for each load and each division.

    A tile that begins last and takes long leaves other SMs idle, so those with most keys come
    first; of tiles with as many, those of one sequence follow each other. Some heads go through all
    tiles before the next ones do. Heads are fastest, so that those of a group read the same keys at
    one time.
    """
    ends, tokens = operands.cu_q_lens, problem.tokens
    first, count = ragged.rows_of(operands, least=problem.steps.q_len + 1)
    first = _and(first, 0, ends[-1])
    count = _and(count, ends[0], tokens - ends[-1])
    before = first % LENGTH_MULTIPLE  # rows of others in a sequence's first tile
    tiles = jnp.where(count > 0, -(-(count + before) // tile_rows), 0)
    position_of_row_0 = _and(operands.kv_lengths, 0, 0) - count - first
    lengths = _lengths(problem, operands)
    # One launch for both sums. Keys that do not fit into the L2 count as one more than do.
    fitting, most = _fitting_keys(problem.steps), most_tiles(problem, tile_rows)
    keys = jnp.where(count > 0, jnp.minimum(lengths, fitting + 1), 0)
    stops, keys = jnp.cumsum(jnp.stack([tiles, keys]), axis=1)
    together = _heads_together(problem.steps, keys[-1], fitting)
    index = jnp.arange(most, dtype=jnp.int32)
    # A comparison of all pairs is one small kernel, a binary search one for each of its steps.
    seq = jnp.sum(index[:, None] >= stops[None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, len(count) - 1)
    of_seq = lambda x: x[seq]  # of the tiles' sequences, here in the order of rows
    row = of_seq(first - before) + (index - of_seq(stops - tiles)) * tile_rows
    position = of_seq(position_of_row_0) + row
    start, left = _lower_bounds(problem, operands)
    keys = jnp.minimum(position + tile_rows, of_seq(lengths))
    keys -= jnp.maximum(jnp.maximum(position - of_seq(left), of_seq(start)), 0)
    keys = jnp.where(index < stops[-1], keys, -UNBOUNDED)
    _, seq, row = lax.sort((-keys, seq, row), num_keys=1, is_stable=True)
    heads = problem.steps.q_heads
    place = jnp.arange(1 + most * heads, dtype=jnp.int32)
    tile, head = _in_sections(jnp.maximum(place - 1, 0), stops[-1], together, (most, heads))
    seq, row = seq[tile], row[tile]
    of_seq = lambda x: x[seq]  # likewise, in the order in which tiles run
    table = TileRow(
        seq=jnp.where(place == 0, stops[-1] * heads, seq),  # a concatenation is one more launch
        head=head,
        row=row,
        position=of_seq(position_of_row_0) + row,
        low=jnp.clip(of_seq(first) - row, 0, tile_rows),
        high=jnp.clip(of_seq(first + count) - row, 0, tile_rows),
        length=of_seq(lengths),
        start=of_seq(start),
        left=of_seq(left),
    )
    return jnp.stack(table, axis=1).astype(jnp.int32)


def _in_sections(number, tiles, together, most: tuple[int, int]):
    """Returns (tile, head) of pairs of a tile and a head; of any past the last.

    Args:
        number: numbers of the pairs, int32.
        tiles: how many there are.
        together: how many heads go through all tiles before the next ones do.
        most: how many (tiles, heads) there may be.
    """
    of_section = jnp.maximum(tiles * together, 1)
    section, within = number // of_section, number % of_section
    head = section * together + within % together
    return jnp.minimum(within // together, most[0] - 1), jnp.minimum(head, most[1] - 1)


def _and(x, *others):
    """Returns int32[S + 2]: x of every sequence, then what the rows of no sequence have."""
    return jnp.concatenate([x, *(jnp.int32(other)[None] for other in others)])


def _lengths(problem: RaggedProblem, operands: RaggedOperands):
    """Returns the number of keys of each sequence, at most what its pages hold, int32[S + 2]."""
    return jnp.minimum(_and(operands.kv_lengths, 0, 0), problem.steps.kv_len)


def _lower_bounds(problem: RaggedProblem, operands: RaggedOperands):
    """Returns (first key, keys that a query sees before its own position), int32[S + 2] each."""
    lengths, window = _lengths(problem, operands), problem.steps.spec.window_left
    start = jnp.zeros_like(lengths)
    if operands.kv_starts is not None:
        start = jnp.maximum(_and(operands.kv_starts, 0, 0), 0)
        start = jnp.where(start < lengths, start, UNBOUNDED)
    if operands.window_left is not None:
        return start, _and(operands.window_left, 0, 0)
    return start, jnp.full_like(lengths, UNBOUNDED if window is None else window)


def _fitting_keys(steps: DecodeProblem) -> int:
    """Returns the number of keys, of one head of K and V, that stay in L2."""
    key_bytes = (steps.head_dim + steps.v_head_dim) * np.dtype(steps.kv_dtype).itemsize
    return SWIZZLE_BYTES // key_bytes


def _heads_together(steps: DecodeProblem, keys, fitting: int):
    """Returns the number of query heads whose keys stay in L2 together, those of one at least."""
    most = jnp.int32(1)
    for n in (n for n in range(2, steps.kv_heads + 1) if steps.kv_heads % n == 0):
        most = jnp.where(keys <= fitting // n, n, most)
    return most * steps.group
