"""The KV cache of flash-attn: its rows or pages, its rotary embedding, and attention to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..api import flash_attention_with_lse
from ..cache import KVCache, check_fits, gather_pages
from ..core.decode import PAGE_SIZES, STEP_TOKENS
from ..core.rope import wide_dtype
from ..decode import flash_decode
from ..frontend import validate
from ..frontend.arguments import as_int32, check_room, is_known, known
from ._refusal import refuse
from ._scores import Scores


@dataclasses.dataclass(frozen=True)
class Rows:
    """Place of the sequences in a cache: rows of it, or pages."""

    batch_idx: Any
    page_table: Any

    def room(self, cache) -> int:
        """Returns how many keys of one sequence there is room for."""
        pages = 1 if self.page_table is None else jnp.shape(self.page_table)[1]
        return jnp.shape(cache)[1] * pages

    def read(self, cache) -> Any:
        return cache if self.batch_idx is None else jnp.take(cache, self.batch_idx, axis=0)

    def written(self, cache, new) -> Any:
        return new if self.batch_idx is None else jnp.asarray(cache).at[self.batch_idx].set(new)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Parts of a cache that are read: pages, first keys, number of splits."""

    page_table: Any
    starts: Any
    num_splits: int


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Rotary embedding by tables of cosines and sines [positions, rotary_dim / 2]."""

    cos: Any
    sin: Any
    interleaved: bool
    room: int

    def __post_init__(self):
        if self.cos is None or self.sin is None or jnp.shape(self.cos) != jnp.shape(self.sin):
            raise ValueError(
                "rotary_cos and rotary_sin must be given together, arrays of one shape"
            )
        if jnp.ndim(self.cos) != 2 or jnp.shape(self.cos)[0] < self.room:
            raise ValueError(
                f"rotary_cos has shape {jnp.shape(self.cos)}: it must be [positions, rotary_dim / "
                f"2] with a row for each of the {self.room} keys that the cache has room for"
            )

    def __call__(self, x, positions):
        """Rotates the first entries of x [B, T, heads, H] by positions [B, T]."""
        half = jnp.shape(self.cos)[1]
        if 2 * half > jnp.shape(x)[-1]:
            raise ValueError(
                f"rotary_cos has {half} columns, for a rotary_dim of {2 * half}: the head_dim is "
                f"{jnp.shape(x)[-1]}, give it at most half as many columns"
            )
        x = jnp.asarray(x)
        # Products in float32: bfloat16 has 8 bits.
        wide = wide_dtype(x.dtype)
        cos, sin = (
            jnp.take(table, positions, axis=0, mode="clip").astype(wide)[:, :, None]
            for table in (self.cos, self.sin)
        )
        turned, kept = x[..., : 2 * half].astype(wide), x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        pair = a * cos - b * sin, a * sin + b * cos
        if self.interleaved:
            turned = jnp.stack(pair, axis=-1).reshape(turned.shape)
        else:
            turned = jnp.concatenate(pair, axis=-1)
        return jnp.concatenate([turned.astype(x.dtype), kept], axis=-1)


def attend(q, cache: KVCache, scores: Scores, reading: Reading):
    """Returns (o, lse) of queries at the end of a cache."""
    tokens, lengths = jnp.shape(q)[1], cache.lengths
    left, right = scores.window
    sees_all = not scores.causal and (left, right) == (None, None) and scores.slopes is None
    paged = reading.page_table is not None
    if (
        tokens <= STEP_TOKENS
        and (not paged or cache.k.shape[1] in PAGE_SIZES)
        and (scores.causal or sees_all or tokens == 1)
        and not scores.caps_before_alibi
    ):
        return flash_decode(
            q,
            cache.k,
            cache.v,
            kv_lengths=lengths,
            kv_starts=reading.starts,
            # At this position a query sees every key. Nothing else depends on it.
            q_offset=lengths if sees_all else None,
            window=None if left is None else (left, None),
            softcap=scores.softcap,
            alibi_slopes=scores.slopes,
            scale=scores.scale,
            num_splits=reading.num_splits or "auto",
            page_table=reading.page_table,
            return_lse=True,
        )
    refuse(
        "num_splits",
        reading.num_splits,
        0,
        "only flash_decode splits keys, which runs steps of up to 16 causal queries; leave it 0",
    )
    k, v = (gather_pages(x, reading.page_table) if paged else x for x in (cache.k, cache.v))
    hidden: dict[str, Any] = {}
    if reading.starts is not None:
        starts = as_int32("cache_leftpad", reading.starts)[:, None]
        before = jnp.arange(k.shape[1], dtype=jnp.int32)[None] < starts
        hidden = {
            "q_segment_ids": jnp.zeros((len(q), tokens), jnp.int32),
            "kv_segment_ids": jnp.where(before, -1, 0).astype(jnp.int32),
        }
    return flash_attention_with_lse(
        q, k, v, q_offset=lengths - tokens, kv_lengths=lengths, **scores.options(), **hidden
    )


def packed_pages(pages, block_table, cu_seqlens_k):
    """Returns the keys and values of all sequences one after the other, copied from pages.

    They have as many rows as the sequences have keys, where that is known, else as the table has
    room for.
    """
    for name, x in zip("kv", pages, strict=True):
        if len(shape := tuple(validate.as_array(name, x).shape)) != 4:
            raise ValueError(
                f"{name} has shape {shape}: with block_table it must be [num_pages, page_size, "
                "heads, head_dim]"
            )
    table, ends = as_int32("block_table", block_table), as_int32("cu_seqlens_k", cu_seqlens_k)
    if table.ndim != 2 or ends.shape != (len(table) + 1,):
        raise ValueError(
            f"block_table has shape {table.shape} and cu_seqlens_k {ends.shape}: they must be "
            "[sequences, max_pages] and [sequences + 1]"
        )
    size = jnp.shape(pages[0])[1]
    room = table.shape[1] * size
    if is_known(cu_seqlens_k):
        rows = int(known(cu_seqlens_k)[-1])
        if (longest := np.diff(known(cu_seqlens_k)).max()) > room:
            raise ValueError(
                f"cu_seqlens_k has a sequence of {longest} keys: block_table has room for {room} "
                f"in pages of {size}; give it more columns"
            )
    else:
        rows = len(table) * room
    row = jnp.arange(rows, dtype=jnp.int32)
    sequence = jnp.clip(jnp.searchsorted(ends, row, side="right") - 1, 0, len(table) - 1)
    place = jnp.clip(row - ends[sequence], 0, room - 1)
    page = table[sequence, place // size]
    return tuple(jnp.asarray(x)[page, place % size] for x in pages)


def check_together(new, cache_seqlens, block_table, cache_batch_idx):
    """Raises ValueError for arguments that exclude one another, or of which one is missing."""
    missing = [x is None for x in new]
    if any(missing) and not all(missing):
        raise ValueError(
            f"{'k' if missing[0] else 'v'} is None and the other is not: new keys need their "
            "values, pass both or neither"
        )
    if not any(missing) and cache_seqlens is None:
        raise ValueError(
            "cache_seqlens is None and k is given: pass how many keys each sequence has already"
        )
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(
            "block_table and cache_batch_idx are both given: a page table says itself where each "
            "sequence lies, pass block_table[cache_batch_idx] alone"
        )
    if block_table is not None and cache_seqlens is None:
        raise ValueError(
            "cache_seqlens is None and block_table is given: pass how many keys each sequence has"
        )


def check_counts(room: int, count: int, cache_seqlens, cache_leftpad):
    """Raises ValueError for computed numbers that are negative or beyond the room of a cache."""
    if cache_leftpad is not None:
        check_room("cache_leftpad", cache_leftpad, room, "the keys that the cache has room for")
    if cache_seqlens is not None:
        way_out = "give k_cache and v_cache more rows, or block_table more columns"
        check_fits(room, count, cache_seqlens, name="cache_seqlens", way_out=way_out)


def lengths_of(cache_seqlens, batch: int, room: int):
    """Returns int32[B]: the number of keys of every sequence."""
    if cache_seqlens is None:
        return jnp.full((batch,), room, jnp.int32)
    lengths = as_int32("cache_seqlens", cache_seqlens)
    if lengths.shape not in ((), (batch,)):
        raise ValueError(
            f"cache_seqlens has shape {lengths.shape}: it must be one number or [{batch}], one for "
            "each sequence of q"
        )
    return jnp.broadcast_to(lengths, (batch,))
