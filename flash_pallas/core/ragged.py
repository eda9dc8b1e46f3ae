"""Records of ragged attention over pages: prompts and steps of decoding of a batch in one call.

The queries of all sequences are packed, one sequence after the other. A sequence with at most
`step_tokens` of them is a step, which is memory-bound and runs as decoding does, its keys split
into ranges; one with more is a chunk of a prompt, which is compute-bound and runs as attention
does, in tiles of queries. Which are which is known on the device alone, so every mix of a padded
size is one compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import decode
from .decode import DecodeOperands, DecodeProblem, DecodeSpec
from .problem import Outputs
from .softmax import EMPTY_ROW


class RaggedOperands(NamedTuple):
    """The arrays of one ragged call; an absent one is None.

    Row cu_q_lens[s] + t of q is query t of sequence s < num_seqs. It sits at position
    kv_lengths[s] - its number of queries + t, so that the last query is the last key, and sees what
    `DecodeOperands` says. Rows of no sequence may hold NaN. `in_range` makes the integers safe.
    """

    q: Any  # [tokens, N, H]
    k: Any  # pages [num_pages, page_size, K, H]
    v: Any  # pages [num_pages, page_size, K, Hv]; None: columns of k
    # int32[S], new tokens included; keys beyond may hold NaN. May be more than pages have room for.
    kv_lengths: Any
    page_table: Any  # int32[S, max_pages]. Clipped to [0, num_pages)
    cu_q_lens: Any  # int32[S + 1]
    num_seqs: Any  # int32[]
    sinks: Any = None  # f32[S, N], natural logits
    alibi_slopes: Any = None  # f32[S, N]
    k_scale: Any = None  # f32[1, K] or f32[num_pages, K], as in DecodeOperands
    v_scale: Any = None
    kv_starts: Any = None  # int32[S]
    window_left: Any = None  # int32[S], where the spec has none
    prefix_lengths: Any = None  # int32[S], keys that it shares, where the spec shares a prefix


@dataclasses.dataclass(frozen=True)
class RaggedSpec:
    """Static parameters of one ragged call.

    Attributes:
        decode: those that decoding has too; its page_size is an int.
        step_tokens: number of queries, 1 to MAX_TOKENS, up to which a sequence is a step.
    """

    decode: DecodeSpec
    step_tokens: int = 1


@dataclasses.dataclass(frozen=True)
class RaggedProblem:
    """Shapes, dtypes and spec of a ragged call.

    Attributes:
        tokens: number of rows of q, padding included.
        steps: the decode problem of all sequences with `step_tokens` queries each.
    """

    operation: ClassVar[str] = "ragged"  # of backends.base.Backend
    tokens: int
    steps: DecodeProblem

    @property
    def num_seqs(self) -> int:
        """Number of sequences that there is room for."""
        return self.steps.batch

    @property
    def is_empty(self) -> bool:
        """True if there is no query, as in `Shapes.is_empty`; there always is a key."""
        return not self.tokens

    def empty_result(self) -> tuple[Any, Any]:
        """Returns (o [0, N, Hv], lse [N, 0]) of no query."""
        none = dataclasses.replace(self.steps, batch=1, q_len=0)
        return tuple(x[0] for x in none.empty_result())

    @property
    def has_chunks(self) -> bool:
        """False if there is no room for a sequence that is not a step."""
        return self.tokens > self.steps.q_len


@dataclasses.dataclass(frozen=True)
class RaggedBlocks:
    """Tile sizes of a ragged call.

    Attributes:
        steps: those of the decode call of all steps, from the backend's `decode.plan`.
        chunks: those of chunks of prompts; None where there can be none.
        chunks_on: name of the backend whose code runs the chunks.
    """

    steps: Any
    chunks: Any
    chunks_on: str


class Rows(NamedTuple):
    """Rows of q of each sequence, int32[S]; both 0 for a sequence that is not there."""

    first: Any
    count: Any


def describe(operands: RaggedOperands, spec: RaggedSpec) -> RaggedProblem:
    """Returns the RaggedProblem of these operands, which may be `jax.ShapeDtypeStruct`s."""
    shape = (operands.kv_lengths.shape[0], spec.step_tokens, *operands.q.shape[1:])
    q = jax.ShapeDtypeStruct(shape, operands.q.dtype)
    return RaggedProblem(
        tokens=operands.q.shape[0],
        steps=decode.describe(decode_operands(operands, q), spec.decode),
    )


def attend(
    decode: Callable[[DecodeOperands], Outputs],
    chunks: Callable[[RaggedProblem, RaggedOperands], Outputs],
    spec: RaggedSpec,
    operands: RaggedOperands,
    joined: Callable | None = None,
) -> Outputs:
    """Computes a ragged call from what a backend has for steps and for chunks.

    Args:
        decode: decodes the operands of `as_steps`.
        chunks: computes the rows of sequences with more queries than a step, of operands
            `in_range`, as `join` takes them. Not called where there can be none.
        spec: static parameters.
        operands: the arrays of the call.
        joined: a backend's own `join`, of the same arguments; None: `join`.

    Returns:
        Outputs of all rows: o [tokens, N, Hv], lse_log2 and shift [N, tokens].
    """
    operands = in_range(operands)
    problem = describe(operands, spec)
    chunk_outputs = chunks(problem, operands) if problem.has_chunks else None
    return (joined or join)(spec, operands, decode(as_steps(spec, operands)), chunk_outputs)


def in_range(operands: RaggedOperands) -> RaggedOperands:
    """Returns operands whose cu_q_lens never decrease and stay within q, and 0 <= num_seqs <= S.

    Lengths become 0 to UNBOUNDED. They may be beyond the room of the pages, as the positions of
    queries come from them. Sequences past num_seqs have no queries.
    """
    tokens, seqs = operands.q.shape[0], len(operands.kv_lengths)
    num_seqs = jnp.clip(operands.num_seqs, 0, seqs)
    ends = lax.cummax(jnp.clip(operands.cu_q_lens, 0, tokens))
    ends = ends[jnp.minimum(jnp.arange(seqs + 1, dtype=jnp.int32), num_seqs)]
    return operands._replace(
        kv_lengths=jnp.clip(operands.kv_lengths, 0, decode.UNBOUNDED),
        cu_q_lens=ends,
        num_seqs=num_seqs,
    )


def rows_of(operands: RaggedOperands, *, least: int, most: int | None = None) -> Rows:
    """Returns the rows of the sequences with `least` to `most` queries, of operands `in_range`."""
    first = operands.cu_q_lens[:-1]
    count = operands.cu_q_lens[1:] - first
    wanted = count >= max(least, 1)
    if most is not None:
        wanted &= count <= most
    return Rows(jnp.where(wanted, first, 0), jnp.where(wanted, count, 0))


def as_steps(spec: RaggedSpec, operands: RaggedOperands) -> DecodeOperands:
    """Returns the steps, of operands `in_range`, as a decode call with `step_tokens` queries each.

    The queries of a sequence are its last ones; a sequence that is no step has no keys, which costs
    no reads. Queries that are not there are rows of q nearby: they may be NaN, and nobody reads
    their results.
    """
    number = spec.step_tokens
    rows = rows_of(operands, least=1, most=number)
    place = (rows.first + rows.count)[:, None] + jnp.arange(-number, 0, dtype=jnp.int32)[None]
    q = jnp.take(operands.q, place, axis=0, mode="clip")
    return decode_operands(operands, q)._replace(
        kv_lengths=jnp.where(rows.count > 0, operands.kv_lengths, 0),
        prefix_lengths=operands.prefix_lengths,
    )


def decode_operands(operands: RaggedOperands, q) -> DecodeOperands:
    """Returns the operands of a decode call with these queries of every sequence."""
    return DecodeOperands(
        q,
        operands.k,
        operands.v,
        kv_lengths=operands.kv_lengths,
        q_offset=None,
        page_table=operands.page_table,
        sinks=operands.sinks,
        alibi_slopes=operands.alibi_slopes,
        k_scale=operands.k_scale,
        v_scale=operands.v_scale,
        kv_starts=operands.kv_starts,
        window_left=operands.window_left,
    )


def join(spec: RaggedSpec, operands: RaggedOperands, steps: Outputs, chunks: Outputs | None):
    """Returns Outputs of all rows of q: those of steps, of chunks, and of neither.

    Args:
        spec: static parameters.
        operands: operands `in_range`.
        steps: what a backend decodes of `as_steps`: o [S, step_tokens, N, Hv].
        chunks: o [tokens, N, Hv], lse_log2 and shift f32[N, tokens], in rows of chunks; the others
            may hold anything. None where there can be none.
    """
    number, ends = spec.step_tokens, operands.cu_q_lens
    places = places_of(operands)
    seq, exists = places.seq, places.exists
    is_step = exists & (ends[seq + 1] - ends[seq] <= number)
    token = jnp.clip(places.row - ends[seq + 1] + number, 0, number - 1)
    of_step = lambda x: jnp.moveaxis(x, 2, 1)[seq, token].T
    shift = jnp.zeros_like(steps.lse_log2) if steps.shift is None else steps.shift
    o, lse, shift = steps.o[seq, token], of_step(steps.lse_log2), of_step(shift)
    others = empty_rows = (jnp.zeros_like(o), jnp.full_like(lse, EMPTY_ROW), jnp.zeros_like(shift))
    if chunks is not None:
        chunk_rows = (
            chunks.o,
            chunks.lse_log2,
            empty_rows[2] if chunks.shift is None else chunks.shift,
        )
        others = [_where(exists, x, none) for x, none in zip(chunk_rows, empty_rows, strict=True)]
    pairs = zip((o, lse, shift), others, strict=True)
    return Outputs(*(_where(is_step, x, other) for x, other in pairs))


class Places(NamedTuple):
    """The sequence of each row of q; int32[tokens] each, bool for `exists`."""

    row: Any  # its own number
    seq: Any  # in [0, S), whether the row exists or not
    exists: Any  # False for padding, rows of no sequence


def places_of(operands: RaggedOperands) -> Places:
    """Returns the sequence of each row of q, of operands `in_range`."""
    ends = operands.cu_q_lens
    row = jnp.arange(operands.q.shape[0], dtype=jnp.int32)
    # Up to 2**24 comparisons one kernel is faster than the steps of a binary search.
    method = "compare_all" if len(ends) * len(row) <= 1 << 24 else "scan"
    # The last sequence that starts at the row or before, among those with queries.
    seq = jnp.searchsorted(ends[1:], row, side="right", method=method).astype(jnp.int32)
    exists = (row >= ends[0]) & (row < ends[-1])
    return Places(row, jnp.minimum(seq, len(ends) - 2), exists)


def _where(rows, x, other):
    """Selects by row: the first axis of o [tokens, N, Hv], the last of a value per row."""
    return jnp.where(rows[:, None, None] if x.ndim == 3 else rows, x, other)
