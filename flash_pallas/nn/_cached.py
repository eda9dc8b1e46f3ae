"""Caches of both layers: new keys are appended, and queries see them and earlier ones. No Flax."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ..api import flash_attention
from ..cache import KVCache, append_kv, check_fits, gather_pages, positions
from ..core import mesh_axes, rope
from ..core.decode import QUANTISED, STEP_TOKENS
from ..core.integers import round_up
from ..decode import decode_from_ring, flash_decode
from ..frontend.arguments import as_int32, check_room, is_computed, is_known, known
from ..frontend.readable import readable
from ..frontend.words import Words
from ..typing import AnyArray, Array, Float, Int
from ._options import CallArguments

# Rows that a copy of a ring which a step reads in place brings at once; the last is the fewest.
# Kernels read blocks of 64 keys, or 128 at narrow heads. Copies of 16 rows cost 7 % at 16
# sequences of 8,192 keys, of 64 2 % (H200).
RING_ROWS = (128, 64, 32, 16)
# What layers call the arguments of `flash_decode`, and of `flash_attention` with a cache.
WORDS = Words(
    {
        "kv_lengths": "cache.lengths",
        "kv_starts": "cache.starts",
        "k_scale": "cache.k_scale",
        "v_scale": "cache.v_scale",
        "alibi_slopes": "alibi",
    }
)


class RingCache(NamedTuple):
    """The last S keys and values of each sequence; new tokens overwrite the oldest.

    It is for layers whose window reaches at most S - 1 keys back. Position p is stored in row
    `p % S`. Pad prompts on the right, with `new_lengths`, because a ring has no starts.

    `lengths` may be set to 0 for a new sequence. It may also be set back, for example when drafts
    are rejected, by at most the number of rows by which S exceeds the window. Further back, keys
    that the window needs may have been overwritten. This raises an error if the values of both
    `lengths` and `written` are known.

    Attributes:
        k: keys [B, S, K, H].
        v: values [B, S, K, Hv].
        lengths: int32 [B], number of tokens that each sequence has received.
        written: int32 [B], the largest value that `lengths` has had since it was 0; the layer
            updates it. None means `lengths`.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]
    lengths: Int[Array, " B"]
    written: Int[Array, " B"] | None = None

    def __repr__(self) -> str:
        return readable(self)

    @classmethod
    def empty(
        cls,
        batch: int,
        window: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        drafts: int = 0,
    ) -> RingCache:
        """Makes an empty cache for a window of `window` keys, including the query's own key.

        With `drafts`, at least this many tokens can be taken back. The cache then has room for them
        as well, rounded up to a multiple of 16 to 128 rows; a step of one token reads it in place.

        Raises:
            TypeError: window is no int, or no layer computes in this dtype; 8-bit dtypes would need
                scales.
            ValueError: drafts is negative.
        """
        if not isinstance(window, (int, np.integer)):
            raise TypeError(
                f"window is {window!r}: it must be an int, the number of keys with the query's "
                "own, which is 8 for a layer with window=(7, 0)"
            )
        if window < 1:
            raise ValueError(
                f"window is {window}: it must be at least 1, as it counts the query's own key"
            )
        if drafts < 0:
            raise ValueError(f"drafts is {drafts}: it must be at least 0, tokens to be taken back")
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            raise TypeError(
                f"a RingCache has no scales and dtype is {jnp.dtype(dtype)}: pass the dtype that "
                "the layer computes in, or use a ScaledCache, which keeps all tokens in eight bits"
            )
        room = window + drafts
        if drafts:
            # Padding is up to a sixteenth of the rows, or 15 of them.
            rows = next(size for size in RING_ROWS if size <= max(room // 16, RING_ROWS[-1]))
            room = round_up(room, rows)
        cache = KVCache.empty(batch, room, kv_heads, head_dim, dtype)
        return cls(cache.k, cache.v, cache.lengths, jnp.zeros_like(cache.lengths))


class ScaledCache(NamedTuple):
    """Keys and values in eight bits with the scales that dequantize them; contiguous or in pages.

    Scales are chosen once, for example as the largest number expected in a head, divided by 127 for
    int8 or by 448 for float8_e4m3fn. Larger numbers are clipped. The layer does not change the
    scales.

    Attributes:
        k: keys [B, S, K, H], or pages [P, page_size, K, H], in int8 or float8_e4m3fn.
        v: values [B, S, K, Hv], or pages [P, page_size, K, Hv], in int8 or float8_e4m3fn.
        lengths: int32 [B], number of tokens of each sequence, including padding on the left.
        k_scale: scale of the keys, as in `flash_decode`: [K], [B, K], or for pages [P, K].
        v_scale: scale of the values, of the same shapes.
        starts: int32 [B], number of padding tokens on the left; None means no padding.
    """

    k: Array
    v: Array
    lengths: Int[Array, " B"]
    k_scale: Float[AnyArray, "*#rows K"] | None
    v_scale: Float[AnyArray, "*#rows K"] | None
    starts: Int[Array, " B"] | None = None

    def __repr__(self) -> str:
        return readable(self)

    @classmethod
    def empty(
        cls,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        k_scale: Float[AnyArray, "*#rows K"] | None,
        v_scale: Float[AnyArray, "*#rows K"] | None,
    ) -> ScaledCache:
        """Makes an empty contiguous cache with room for `length` tokens of each sequence."""
        cache = KVCache.empty(batch, length, kv_heads, head_dim, dtype)
        return cls(cache.k, cache.v, cache.lengths, k_scale, v_scale)

    @property
    def scales(self) -> dict[str, Any]:
        """Keywords for `append_kv` and `flash_decode` in addition to the cache."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


Cache = KVCache | RingCache | ScaledCache


class New(NamedTuple):
    """Optional arguments of a call with a cache; None means that an argument is not given."""

    lengths: AnyArray | None = None  # int [B]: real tokens among the new ones
    page_table: AnyArray | None = None  # int32 [B, max_pages]


def check(layer, cache, call: CallArguments, cross: bool, dropout_key, shape) -> None:
    """Checks that a call with this cache is consistent.

    Raises:
        TypeError: the cache is not one.
        ValueError: the layer or an argument does not work with a cache.
    """
    if not isinstance(cache, (KVCache, RingCache, ScaledCache)):
        raise TypeError(
            f"cache must be a KVCache, a RingCache or a ScaledCache, got {type(cache).__name__}."
        )
    if cache.v is None:
        raise ValueError(
            "cache.v is None: a layer projects values of its own. Make it with shared=False, or "
            "call append_kv and flash_decode."
        )
    if len(shape) != 3:
        raise ValueError(
            f"inputs has shape {shape}: with a cache it must be [batch, length, features]"
        )
    count, sequences = jnp.shape(cache.lengths), shape[0]
    if count != (sequences,):
        raise ValueError(
            f"inputs has {sequences} sequences and cache.lengths shape {count}: the cache must be "
            f"made with batch={sequences}"
        )
    if not layer.causal:
        raise ValueError("A cache needs causal=True: what comes later is not there yet.")
    if layer.attention is not flash_attention or layer.context_parallel is not None:
        raise ValueError(
            "A cache is read by flash_decode: leave attention= and context_parallel= as they are."
        )
    refused = [name for name, x in call._asdict().items() if x is not None]
    refused = [name for name in refused if name != "positions"]
    refused += ["inputs_kv"] * cross + ["dropout"] * (dropout_key is not None)
    if refused:
        raise ValueError(
            f"A call with a cache takes no {', '.join(refused)}. Padding on the right is "
            "new_lengths, padding on the left is in the cache, as in cache._replace(starts=...)."
        )
    if isinstance(cache, RingCache):
        left = layer.window[0] if isinstance(layer.window, (tuple, list)) else layer.window
        if left is None or cache.k.shape[1] <= left:
            raise ValueError(
                f"A RingCache of {cache.k.shape[1]} keys is for a layer whose window reaches no "
                f"further back, as window=({cache.k.shape[1] - 1}, 0), this one has {layer.window}."
            )


def check_absent(new: New) -> None:
    """Raises ValueError if an argument for a cache is given without one, as it would be ignored."""
    names = ("new_lengths", "page_table")
    unused = [name for name, x in zip(names, new, strict=True) if x is not None]
    if unused:
        raise ValueError(
            f"{' and '.join(unused)} without a cache would have no effect: pass cache=."
        )


def rotated(layer, cache, call: CallArguments, qkv):
    """Applies RoPE to queries and keys. By default, positions continue after the cache's tokens."""
    query, key, value = qkv
    if layer.rope_theta is None:
        places = call.positions
    else:
        places = positions(cache, query.shape[1]) if call.positions is None else call.positions
    return *rope.rotate_query_key(query, key, places, places, layer.rope_theta), value


@WORDS
def attend(layer, cache, qkv, new: New, slopes, sinks):
    """Computes (o [B, T, N, H], cache) of T new tokens, already rotated if the layer rotates.

    Args:
        layer: has window, softcap, scale, precision, num_splits and backend.
        cache: a KVCache, RingCache or ScaledCache that passes `check`.
        qkv: queries [B, T, N, H], and keys and values [B, T, K, H].
        new: the optional arguments of this call.
        slopes: ALiBi slopes, one for each head, or None.
        sinks: [N], or None.
    """
    (q, k, v), original = qkv, cache
    cache = cache._replace(lengths=as_int32("cache.lengths", cache.lengths))
    cache = _with_starts(cache)
    # The caller's own lengths: those in numpy can be read; converted, they are not computed yet.
    _check_fits(cache._replace(lengths=original.lengths), k, v, new)
    options = {"softcap": layer.softcap, "scale": layer.scale, "backend": layer.backend}
    options |= {"sinks": sinks} if sinks is not None else {}
    if slopes is not None:
        options |= {"alibi_slopes": jnp.asarray(slopes, jnp.float32)}
    if isinstance(cache, RingCache):
        if new.page_table is not None:
            raise ValueError("A RingCache has no pages: leave page_table out.")
        cache = _with_written(cache)
        _check_rewind(original, cache.k.shape[1] - _reach(layer))
        return _attend_to_ring(layer, cache, (q, k, v), new.lengths, options)
    start, table = cache.lengths, new.page_table
    scales = cache.scales if isinstance(cache, ScaledCache) else {}
    added = append_kv(
        KVCache(*cache[:3]), k, v, new_lengths=new.lengths, page_table=table, **scales
    )
    cache = cache._replace(k=added.k, v=added.v, lengths=added.lengths)
    options |= {"kv_lengths": cache.lengths, "q_offset": start, "window": layer.window}
    if q.shape[1] <= STEP_TOKENS:
        options |= {"page_table": table, "num_splits": layer.num_splits} | scales
        options["kv_starts"] = cache.starts
        return flash_decode(q, cache.k, cache.v, **options), cache
    stored = (cache.k, scales.get("k_scale")), (cache.v, scales.get("v_scale"))
    k, v = (_whole(*x, table, q.dtype) for x in stored)
    if cache.starts is not None:
        options |= mesh_axes.compiled_as_auto(
            partial(_ids, q.shape[1], k.shape[1]),
            (cache.starts,),
            dict.fromkeys(
                ("q_segment_ids", "kv_segment_ids"),
                PartitionSpec(*mesh_axes.spec_of(cache.starts), None),
            ),
        )
    return _attend(layer, q, k, v, **options), cache


def _ids(q_len: int, kv_len: int, starts):
    """Returns segment ids that hide the keys before `starts`, as arguments of `flash_attention`."""
    queries = jnp.zeros((len(starts), q_len), jnp.int32)
    keys = jnp.arange(kv_len, dtype=jnp.int32)[None] < starts[:, None]
    return {"q_segment_ids": queries, "kv_segment_ids": jnp.where(keys, -1, 0)}


def _with_starts(cache):
    """Returns the cache with its starts, if it has any, as int32.

    Raises:
        TypeError: starts are not integers.
        ValueError: there is not one start for each sequence.
    """
    starts = getattr(cache, "starts", None)
    if starts is None:
        return cache
    starts = as_int32("cache.starts", starts)
    if starts.shape != cache.lengths.shape:
        raise ValueError(
            f"cache.starts has shape {starts.shape}: it must be one for each sequence, as "
            f"cache.lengths has, {cache.lengths.shape}"
        )
    return cache._replace(starts=starts)


def _check_fits(cache, k, v, new: New) -> None:
    """Checks that the new keys and values fit into the cache, as far as values are known.

    Known lengths are checked, which waits for their computation, except for those of a ring. Under
    jit they cannot be checked: tokens without room are dropped, and later outputs lack them.

    Raises:
        TypeError: the dtype of the cache differs from that in which the layer computes.
        ValueError: heads, head_dim or lengths do not fit.
    """
    for name, x in (("k", k), ("v", v)):
        own = getattr(cache, name)
        if not isinstance(cache, ScaledCache) and own.dtype != x.dtype:
            way_out = (
                "eight bits need the scales of a ScaledCache"
                if own.dtype.name in QUANTISED
                else f"make the cache with dtype={x.dtype}, or the layer with dtype={own.dtype}"
            )
            raise TypeError(
                f"cache.{name} has dtype {own.dtype} and the layer computes in {x.dtype}: {way_out}"
            )
        if own.shape[2:] != x.shape[2:]:
            raise ValueError(
                f"cache.{name} has {own.shape[2]} heads of {own.shape[3]} and the layer "
                f"{x.shape[2]} of {x.shape[3]}: make it with kv_heads={x.shape[2]}, "
                f"head_dim={x.shape[3]}"
            )
    if isinstance(cache, RingCache):
        if new.lengths is not None:
            check_room("new_lengths", new.lengths, k.shape[1], "the number of new tokens")
        return
    pages = 1 if new.page_table is None else jnp.shape(new.page_table)[-1]
    room, added = cache.k.shape[1] * pages, k.shape[1] if new.lengths is None else new.lengths
    if is_known(cache.lengths) and is_known(added):
        check_fits(room, k.shape[1], known(cache.lengths), new_lengths=known(added))


def _whole(x, scale, page_table, dtype):
    """Returns [B, S, K, H] in this dtype: a copy, unless x is contiguous and has it."""
    page_size = x.shape[1]
    if scale is not None:
        scale = jnp.asarray(scale, jnp.float32)
        scale = jnp.broadcast_to(scale, (len(x), x.shape[2]))[:, None, :, None]
    if page_table is not None:
        x = gather_pages(x, page_table)
        if scale is not None:
            scale = mesh_axes.repeated(gather_pages(scale, page_table), page_size, axis=1)
    if scale is not None:
        x = x.astype(jnp.float32) * scale
    return x.astype(dtype)


def _attend(layer, q, k, v, **options):
    return flash_attention(q, k, v, causal=True, precision=layer.precision, **options)


def _attend_to_ring(layer, cache: RingCache, qkv, new_lengths, options):
    """Computes what `attend` does for a ring.

    A single token reads the ring in place; several see it put in order, and one another. Where all
    rows are in the window their order matters to ALiBi alone.
    """
    q, k, v = qkv
    count, room, window = q.shape[1], cache.k.shape[1], _reach(layer)
    before, after = cache, _append_to_ring(cache, k, v, new_lengths)
    if count == 1 and room == window and "alibi_slopes" not in options:
        lengths = jnp.minimum(after.lengths, room)
        options |= {"kv_lengths": lengths, "q_offset": room, "num_splits": layer.num_splits}
        return flash_decode(q, after.k, after.v, **options), after
    if count == 1 and room % RING_ROWS[-1] == 0:
        options |= {"num_splits": layer.num_splits, "window": layer.window}
        return decode_from_ring(q, *after, **options)[0], after
    specs = tuple(map(mesh_axes.spec_of, (*before[:2], before.lengths[:, None])))
    k, v, ids = mesh_axes.compiled_as_auto(partial(_in_order, window), (before, k, v), specs)
    options |= {
        "q_offset": window,
        "window": layer.window,
        "q_segment_ids": jnp.zeros((len(q), count), jnp.int32),
        "kv_segment_ids": jnp.pad(ids, ((0, 0), (0, count))),
    }
    return _attend(layer, q, k, v, **options), after


def _reach(layer) -> int:
    """Returns how many keys the window of a layer with a ring has, the query's own included."""
    return 1 + (layer.window[0] if isinstance(layer.window, (tuple, list)) else layer.window)


def _with_written(cache: RingCache) -> RingCache:
    """Returns the ring with the most tokens that were written, of sequences that have any."""
    if cache.written is None:
        return cache._replace(written=cache.lengths)
    written = as_int32("cache.written", cache.written)
    if written.shape != cache.lengths.shape:
        raise ValueError(
            f"cache.written has shape {written.shape}: it must be one for each sequence, as "
            f"cache.lengths has, {cache.lengths.shape}"
        )
    return cache._replace(written=written)


def _check_rewind(cache: RingCache, spare: int) -> None:
    """Checks that no key that the window needs has been overwritten; waits for no array.

    Raises:
        ValueError: lengths that are negative, or set back by more than `spare` tokens in a ring
            that has been full.
    """
    written = cache.lengths if cache.written is None else cache.written
    if not is_computed(cache.lengths) or not is_computed(written):
        return
    lengths, written = known(cache.lengths), known(written)
    if lengths.min(initial=0) < 0:
        raise ValueError(f"cache.lengths is {lengths}: lengths must be at least 0")
    rewound, room = written - lengths, cache.k.shape[1]
    for b in np.flatnonzero((rewound > spare) & (written > room) & (lengths > 0))[:1]:
        raise ValueError(
            f"cache.lengths[{b}] is {lengths[b]}, set back by {rewound[b]} tokens: it must be at "
            f"most {spare}, the rows that this ring of {room} has beyond the window, as older keys "
            "that the window needs have been overwritten; make the ring with "
            f"RingCache.empty(..., drafts={rewound[b]}), or set the length to 0 and begin anew"
        )


def _in_order(window: int, cache: RingCache, k, v):
    """Returns the last keys and values of a ring in order, the new ones behind, and their ids.

    An id is -1 where the ring has no key, or no longer has it, else 0.
    """
    room, lengths, written = cache.k.shape[1], cache.lengths, cache.written
    assert written is not None  # `_with_written` has set it
    # Positions of the ring's keys, in order.
    place = (lengths - window)[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
    order = jnp.mod(place, room)[..., None, None]
    old = (jnp.take_along_axis(x, order, axis=1) for x in (cache.k, cache.v))
    k, v = (jnp.concatenate(pair, axis=1) for pair in zip(old, (k, v), strict=True))
    # Of the last `window` keys the first that there is.
    first = jnp.maximum(jnp.maximum(lengths - window, written - room), 0)
    return k, v, jnp.where(place < first[:, None], -1, 0)


def _append_to_ring(cache: RingCache, k, v, new_lengths) -> RingCache:
    specs = jax.tree.map(mesh_axes.spec_of, cache)
    return mesh_axes.compiled_as_auto(_appended, (cache, k, v, new_lengths), specs)


def _appended(cache: Any, k, v, new_lengths) -> RingCache:
    count, room = k.shape[1], cache.k.shape[1]
    added = jnp.full_like(cache.lengths, count)
    if new_lengths is not None:
        added = jnp.clip(as_int32("new_lengths", new_lengths), 0, count)
    step = jnp.arange(count, dtype=jnp.int32)[None]
    # Of more tokens than the ring has room for, keep the last.
    kept = (step < added[:, None]) & (step >= added[:, None] - room)
    place = jnp.where(kept, jnp.mod(positions(cache, count), room), room)
    indices = jnp.arange(len(place), dtype=jnp.int32)[:, None], place
    write = lambda x, new: x.at[indices].set(new.astype(x.dtype), mode="drop")
    after = cache.lengths + added
    written = jnp.where(cache.lengths == 0, after, jnp.maximum(cache.written, after))
    return RingCache(write(cache.k, k), write(cache.v, v), after, written)
