"""Shared prefixes of a paged cache: leading pages that several sequences name are read once.

Where page tables of sequences begin with the same pages, as with a common system prompt, the
queries of all of them are rows of one tile that reads the prefix once, as in cascade inference
(https://flashinfer.ai/2024/02/02/cascade-inference.html) and Hydragen
(https://arxiv.org/abs/2402.05099). Every sequence then reads the rest of its keys, and the
log-sum-exps join both parts. The prefix is whole pages before the first of the new tokens, so that
every query sees all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from . import softmax
from .decode import MAX_TOKENS, DecodeOperands, DecodeSpec
from .problem import Outputs

TILE_ROWS = 64  # of queries and heads that share a KV head, in one tile of the decode kernels


class Sharing(NamedTuple):
    """The tiles of sequences that read a prefix together, and each sequence's place there.

    A tile has room for `tile_sequences` of a group.
    """

    members: Any  # int32[tiles, sequences of a tile], 0 where there is none
    lengths: Any  # int32[tiles], keys of the prefix; 0: the tile is empty
    leaders: Any  # int32[tiles], the sequence in whose page table the prefix is
    tile: Any  # int32[B], the tile of each sequence; `tiles` if it shares nothing
    slot: Any  # int32[B], its place there
    prefix: Any  # int32[B], keys that each sequence has read there; 0 if it shares nothing


def tile_sequences(q_len: int, group: int = 1) -> int:
    """Returns how many sequences of `q_len` new tokens read a prefix together; 1: none do.

    They are as many as fill the rows of a tile of the decode kernels, each with `group` heads: more
    would be another tile, which reads the keys again. Sequences that fill one by themselves still
    share keys by two, in the L2.
    """
    return min(max(TILE_ROWS // (q_len * group), 2), max(MAX_TOKENS // q_len, 1))


def sharing(operands: DecodeOperands, q_len: int) -> Sharing:
    """Finds the groups of sequences whose page tables begin alike, on the device.

    Sequences with the same first page are a group, and its prefix is the pages that all of them
    share with the first of them. With `prefix_lengths` these say how many keys that is.

    Args:
        operands: paged; of q only the heads count.
        q_len: number of new tokens of a sequence.
    """
    table, page_size = operands.page_table, operands.k.shape[1]
    batch, q_heads = len(table), operands.q.shape[-2]
    index = jnp.arange(batch, dtype=jnp.int32)
    room = table.shape[1] * page_size
    # Pages whose keys all queries of the sequence see.
    seen = jnp.clip(jnp.clip(operands.kv_lengths, 0, room) - q_len, 0) // page_size
    first = jnp.where(seen > 0, table[:, 0], -1 - index)  # if none: a group of its own
    alike = first[:, None] == first[None]
    leader = jnp.argmax(alike, axis=1).astype(jnp.int32)
    if operands.prefix_lengths is None:
        equal = jnp.cumprod(table == table[leader], axis=1, dtype=jnp.int32)
        pages = jnp.minimum(jnp.sum(equal, axis=1, dtype=jnp.int32), seen)
    else:
        pages = jnp.clip(operands.prefix_lengths // page_size, 0, seen)
    pages = jnp.min(jnp.where(alike, pages[None], room), axis=1)
    size = jnp.sum(alike, axis=1, dtype=jnp.int32)
    most = tile_sequences(q_len, q_heads // operands.k.shape[2])
    return _placed(leader, alike, jnp.where(size > 1, pages * page_size, 0), most)


def _placed(leader, alike, prefix, most: int) -> Sharing:
    """Returns the Sharing of groups: leader and keys of the prefix of each sequence, int32[B].

    `alike` is bool[B, B]: both are of one group. A tile has room for `most` sequences.
    """
    batch = len(leader)
    # Groups of two, or of one more than a tile has room for, take the most tiles per sequence.
    tiles = max(batch // 2, 2 * batch // (most + 1), 1)
    index = jnp.arange(batch, dtype=jnp.int32)
    shares = prefix > 0
    rank = jnp.sum(alike & (index[None] < index[:, None]), axis=1, dtype=jnp.int32)
    opens = shares & (rank % most == 0)
    # Tiles are numbered as their first members are: by group, then by rank.
    order = leader * batch + rank
    earlier = opens[None] & (order[None] < (order - rank % most)[:, None])
    tile = jnp.where(shares, jnp.sum(earlier, axis=1, dtype=jnp.int32), tiles)
    place = lambda x, slots: (
        jnp.zeros((tiles, *slots[1:]), jnp.int32).at[slots[0]].set(x, mode="drop")
    )
    members = jnp.zeros((tiles, most), jnp.int32).at[tile, rank % most].set(index, mode="drop")
    opening = (jnp.where(opens, tile, tiles),)
    return Sharing(
        members=members,
        lengths=place(prefix, opening),
        leaders=place(leader, opening),
        tile=tile,
        slot=rank % most,
        prefix=prefix,
    )


def attend(
    decode: Callable[[DecodeSpec, DecodeOperands, int], Outputs],
    spec: DecodeSpec,
    operands: DecodeOperands,
) -> Outputs:
    """Computes a decode call whose shared prefixes are read once.

    Args:
        decode: computes one without; its last argument is the number of sequences that the splits
            are to suit.
        spec: static parameters, with `shares_prefix`.
        operands: paged, without what depends on the places of keys.
    """
    (batch, q_len), sinks = operands.q.shape[:2], operands.sinks
    calls = divided(spec, operands, operands.q)
    of_prefix = decode(calls.spec, calls.prefix, calls.few)
    parts = _of_sequences(of_prefix, calls.sharing, q_len), decode(calls.spec, calls.rest, batch)
    unit = spec.attention.unit(added=False)
    return _merged(parts, None if sinks is None else sinks[:, :, None], unit)


class Calls(NamedTuple):
    """The two decode calls of one whose shared prefixes are read once, without its sinks."""

    spec: DecodeSpec  # of both
    sharing: Sharing
    prefix: DecodeOperands  # tiles of queries, and the keys of their prefix
    few: int  # number of tiles when all are full: splits of the keys are to keep a GPU busy then
    rest: DecodeOperands  # all sequences, and the keys after the prefix


def divided(spec: DecodeSpec, operands: DecodeOperands, q, first=None) -> Calls:
    """Returns the calls that `attend` makes.

    Args:
        spec: as there.
        operands: as there; of q only the shape counts, and it is q of `Calls.rest`.
        q: queries [B, T, N, H], or packed [tokens, N, H].
        first: int32[B], the row of each sequence's only query; None: q is not packed.
    """
    groups = sharing(operands, operands.q.shape[1])
    operands = operands._replace(prefix_lengths=None, sinks=None)
    rows = groups.members if first is None else first[groups.members]
    return Calls(
        dataclasses.replace(spec, shares_prefix=False),
        groups,
        _prefix(operands, groups, q[rows]),
        -(-len(operands.q) // groups.members.shape[1]),
        operands._replace(kv_starts=groups.prefix),
    )


def _prefix(operands: DecodeOperands, groups: Sharing, q) -> DecodeOperands:
    """Returns the queries of each tile's sequences, after all keys of the prefix."""
    heads = q.shape[-2:]
    return operands._replace(
        q=q.reshape(len(q), -1, *heads),
        draft_mask=None,  # every draft comes after the prefix
        kv_lengths=groups.lengths,
        q_offset=groups.lengths,
        page_table=operands.page_table[groups.leaders],
    )


def _of_sequences(out: Outputs, groups: Sharing, q_len: int) -> Outputs:
    """Returns what each sequence has of the prefix; rows without keys where it shares nothing."""
    tiles, most = groups.members.shape
    shift = jnp.zeros_like(out.lse_log2) if out.shift is None else out.shift
    tile = jnp.minimum(groups.tile, tiles - 1)
    o = out.o.reshape(tiles, most, q_len, *out.o.shape[2:])[tile, groups.slot]
    of_row = lambda x: x.reshape(tiles, -1, most, q_len)[tile, :, groups.slot]
    shares = (groups.tile < tiles)[:, None, None]
    lse_log2 = jnp.where(shares, of_row(out.lse_log2), softmax.EMPTY_ROW)
    # The output of an empty tile may be uninitialized.
    o = jnp.where(shares[..., None], o, lax.full_like(o, 0))
    return Outputs(o, lse_log2, jnp.where(shares, of_row(shift), 0.0))


def _merged(parts: tuple[Outputs, Outputs], sinks, unit: float) -> Outputs:
    """Joins both parts of the keys; `sinks` are f32[B, N, 1] or None."""
    dtype = parts[0].lse_log2.dtype
    stacked = lambda name: jnp.stack([getattr(x, name) for x in parts])
    o = jnp.swapaxes(stacked("o"), 2, 3).astype(dtype)
    o, lse_log2, shift = softmax.merge(o, stacked("lse_log2"), stacked("shift"), sinks, unit)
    return Outputs(jnp.swapaxes(o, 1, 2).astype(parts[0].o.dtype), lse_log2, shift)
