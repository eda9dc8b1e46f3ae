"""KV caches, contiguous or in pages: appending new tokens and checking page tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from .core import mesh_axes, ragged
from .core.decode import QUANTISED, UNBOUNDED
from .core.ragged import RaggedOperands
from .core.rope import apply_rope
from .frontend.arguments import as_int32, check_room, is_computed, known
from .frontend.readable import readable
from .frontend.validate_decode import cache_scale
from .frontend.validate_ragged import RaggedArguments, places_of
from .typing import AnyArray, Array, Float, Int, Integer, Values


class KVCache(NamedTuple, Generic[Values]):  # noqa: UP046, as its parameter has a default
    """Keys and values of the tokens so far. A tuple (k, v, lengths) may be used in its place.

    Attributes:
        k: keys [B, S, K, H], or pages [P, page_size, K, H].
        v: values [B, S, K, Hv], or pages [P, page_size, K, Hv]. None means that the values are the
            first columns of k, as `v_head_dim` of `flash_decode` says (multi-head latent
            attention). The type of such a cache is KVCache[None].
        lengths: int32 [B], number of tokens of each sequence, including padding on the left.
        starts: int32 [B], number of padding tokens on the left. Pass it to `flash_decode` as
            `kv_starts`, which hides them. None means no padding.
    """

    k: Array
    v: Values
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"] | None = None

    def __repr__(self) -> str:
        return readable(self)

    @overload
    @classmethod
    def empty(
        cls,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        starts: Array | None = None,
        shared: Literal[False] = False,
    ) -> KVCache[Array]: ...
    @overload
    @classmethod
    def empty(
        cls,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        starts: Array | None = None,
        *,
        shared: Literal[True],
    ) -> KVCache[None]: ...
    @classmethod
    def empty(
        cls,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        starts: Int[Array, " B"] | None = None,
        shared: bool = False,
    ) -> KVCache[Any]:
        """Makes an empty contiguous cache with room for `length` tokens of each sequence.

        With `shared`, the values are columns of the keys, and v is None.
        """
        shape = batch, length, kv_heads, head_dim
        for name, size in zip(("batch", "length", "kv_heads", "head_dim"), shape, strict=True):
            if isinstance(size, (bool, float, str)) or (isinstance(size, int) and size < 0):
                raise ValueError(
                    f"{name} is {size!r}: it must be an int of at least 0; the order is batch, "
                    "length, kv_heads, head_dim, dtype"
                )
        zeros = lambda: jnp.zeros(shape, dtype)
        values: Any = None if shared else zeros()
        return cls(zeros(), values, jnp.zeros(batch, jnp.int32), starts)


def append_kv[V: Array | None](
    cache: KVCache[V] | tuple[Array, V, Array],
    k: Float[AnyArray, "B T K H"],
    v: Float[AnyArray, "B T K Hv"] | None = None,
    *,
    new_lengths: Int[AnyArray, " B"] | None = None,
    page_table: Int[AnyArray, "B max_pages"] | None = None,
    k_scale: Float[AnyArray, "*#rows K"] | None = None,
    v_scale: Float[AnyArray, "*#rows K"] | None = None,
    rope_theta: float | None = None,
) -> KVCache[V]:
    """Appends T new tokens to every sequence of a cache, each sequence at its own end.

    The function is pure. The cache is updated in place if it is donated, as in
    `jax.jit(step, donate_argnums=...)`.

    Nothing is written beyond the room of a sequence (S, or max_pages * page_size), and nothing
    wraps around. If all numbers are known, tokens without room raise an error. Under jit they are
    dropped, but the length still counts them, because `flash_decode` derives the position of a
    query from it. So the tokens that found room get the same results as in a longer cache. Tokens
    whose page id is out of range are also dropped and counted; `check_pages` finds such ids
    beforehand. Two sequences that share a page must not both write to it: copy the page first.

    Args:
        cache: keys, values and lengths; see `KVCache`.
        k: keys [B, T, K, H] of the new tokens, for any T. They are in the cache's dtype, or with
            `k_scale` in any float dtype.
        v: values [B, T, K, Hv], of the same dtypes; None for a cache whose v is None.
        new_lengths: int32 [B]: how many of the T tokens, counted from the first, are real. The
            others are padding and are not written, as for prompts of different lengths. None means
            all of them. At most T; under jit it is clipped to [0, T].
        page_table: int32 [B, max_pages], for a cache of pages: token j of sequence b goes to row j
            % page_size of page page_table[b, j // page_size].
        k_scale: for a cache in float8_e4m3fn or int8. Keys are divided by it, rounded, and clipped
            to the range of the dtype (for int8, 127 in either direction); a scale of 0 gives 0.
            Shapes are as in `flash_decode`: [K], [B, K], or for pages [P, K].
        v_scale: the same for the values.
        rope_theta: base of a rotary embedding. Before keys are stored, they are rotated by their
            positions in the sequence, as `apply_rope` does; rotate the queries by their positions
            too. The first token after `cache.starts` has position 0. None means no rotation.

    Returns:
        A `KVCache` of the same shapes and dtypes, with starts unchanged. Its lengths are int32 and
        count all tokens that each sequence has received, including those without room.

    Raises:
        TypeError: an argument is not a cache or an array, or its dtype differs from the cache's.
        ValueError: shapes do not match, or known lengths, starts or new_lengths are negative or
            beyond the room.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import KVCache, append_kv
        >>> cache = KVCache(*jnp.zeros((2, 2, 16, 1, 4)), lengths=jnp.array([0, 7]))
        >>> k = v = jnp.ones((2, 3, 1, 4))
        >>> append_kv(cache, k, v).lengths
        Array([ 3, 10], dtype=int32)
    """
    old = _checked_cache(cache)
    scales = (("k", k_scale), ("v", v_scale))
    if v is None or old.v is None:
        _check_shared(old, v, v_scale, rope_theta)
        scales = scales[:1]
    for x, (name, scale) in zip((k, v), scales, strict=False):
        _check_new(name, x, scale, getattr(old, name), len(old.lengths))
    if v is not None and k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}: each key needs its value")
    if page_table is not None:
        page_table = _integers("page_table", page_table, 2, len(old.lengths))
    elif len(old.k) != len(old.lengths):
        raise ValueError(
            f"cache has keys of shape {old.k.shape} for {len(old.lengths)} sequences: pass "
            "page_table if these are pages"
        )
    original_lengths = new_lengths
    if new_lengths is not None:
        new_lengths = _integers("new_lengths", new_lengths, 1, len(old.lengths))
    room = old.k.shape[1] * (1 if page_table is None else page_table.shape[1])
    check_fits(room, k.shape[1], cache[2], *cache[3:], new_lengths=original_lengths)
    if rope_theta is not None:
        _check_rotates(rope_theta, k)
    scales = {name: cache_scale(f"{name}_scale", s, getattr(old, name)) for name, s in scales}
    new = _New(k, v, new_lengths, page_table, scales["k"], scales.get("v"))
    old = jax.tree.map(jnp.asarray, old)
    # The result is sharded like the cache, because it is an operand of the next step.
    specs = jax.tree.map(mesh_axes.spec_of, old)
    return mesh_axes.compiled_as_auto(partial(_appended, rope_theta), (old, new), specs)


LONGER = (
    "make a longer one, as in KVCache.empty(length=...), or say by new_lengths=0 which sequences "
    "have ended"
)


def check_fits(
    room: int,
    count: int,
    lengths,
    starts=None,
    *,
    new_lengths=None,
    name: str = "cache.lengths",
    way_out: str = LONGER,
) -> None:
    """Checks the lengths of a cache and of new tokens, as far as their values are known.

    Args:
        room: number of tokens for which a sequence has room.
        count: number of new tokens, including padding.
        lengths: number of tokens of each sequence before the call.
        starts: the first token of each sequence that is not padding, or None.
        new_lengths: number of new tokens that are real; None means all.
        name: name that the caller uses for the lengths.
        way_out: advice to give if there is too little room.

    Raises:
        ValueError: a number is negative or beyond the room, or there are more tokens than room.
    """
    check_room(name, lengths, room, "the tokens that the cache has room for")
    if starts is not None:
        check_room("cache.starts", starts, room, "the tokens that the cache has room for")
    if new_lengths is not None:
        check_room("new_lengths", new_lengths, count, "the number of new tokens")
    added = count if new_lengths is None else new_lengths
    if not is_computed(lengths) or not is_computed(added):
        return
    longest = int((known(lengths).astype(np.int64) + known(added).astype(np.int64)).max(initial=0))
    if longest > room:
        raise ValueError(
            f"the cache has room for {room} tokens of a sequence and, {name} and the new ones "
            f"together, would have {longest}: {way_out}. Under jit such tokens would be dropped "
            "without a word"
        )


class RaggedKVOptions(TypedDict, total=False):
    """Arguments of `append_ragged_kv` for the places of tokens and for scales."""

    kv_lengths: Required[Int[AnyArray, " S"]]
    page_table: Required[Int[AnyArray, "S max_pages"]]
    cu_q_lens: Required[Int[AnyArray, " S+1"]]
    num_seqs: Integer | Int[AnyArray, ""] | Int[AnyArray, " 1"] | None
    k_scale: Float[AnyArray, "*#P K"] | None
    v_scale: Float[AnyArray, "*#P K"] | None


@overload
def append_ragged_kv(
    pages: tuple[AnyArray, AnyArray],
    k: AnyArray,
    v: AnyArray,
    **options: Unpack[RaggedKVOptions],
) -> tuple[Array, Array]: ...
@overload
def append_ragged_kv(
    pages: tuple[AnyArray, None],
    k: AnyArray,
    v: None = None,
    **options: Unpack[RaggedKVOptions],
) -> tuple[Array, None]: ...
def append_ragged_kv(
    pages: tuple[Float[AnyArray, "P page_size K H"], Float[AnyArray, "P page_size K Hv"] | None],
    k: Float[AnyArray, "tokens K H"],
    v: Float[AnyArray, "tokens K Hv"] | None = None,
    *,
    kv_lengths: Int[AnyArray, " S"],
    page_table: Int[AnyArray, "S max_pages"],
    cu_q_lens: Int[AnyArray, " S+1"],
    num_seqs: Integer | Int[AnyArray, ""] | Int[AnyArray, " 1"] | None = None,
    k_scale: Float[AnyArray, "*#P K"] | None = None,
    v_scale: Float[AnyArray, "*#P K"] | None = None,
) -> tuple[Array, Array | None]:
    """Writes the packed new tokens of all sequences into their pages.

    `ragged_paged_attention` does this itself if it gets the tokens as `new_k` and `new_v`. The
    function is pure; the pages are updated in place if they are donated.

    Row cu_q_lens[s] + t of k and v is new token t of sequence s. The last new token of a sequence
    becomes key kv_lengths[s] - 1. These tokens are dropped: rows of no sequence (padding), tokens
    beyond the room of a sequence or before its first key, and tokens whose page id is out of range.
    Two sequences that share a page must not both write to it: copy the page first.

    Args:
        pages: (keys [P, page_size, K, H], values [P, page_size, K, Hv]). The values are None if
            they are columns of the keys.
        k: keys [tokens, K, H], in the pages' dtype, or with `k_scale` in any float dtype.
        v: values [tokens, K, Hv], of the same dtypes; None if the pages have no values.
        kv_lengths: int32 [S]: number of keys of each sequence, including its new tokens.
        page_table: int32 [S, max_pages], as in `ragged_paged_attention`.
        cu_q_lens: int32 [S + 1], as in `ragged_paged_attention`.
        num_seqs: number of sequences in use, as in `ragged_paged_attention`.
        k_scale: for pages in float8_e4m3fn or int8, as in `append_kv`: [K], or [P, K].
        v_scale: the same for the values.

    Returns:
        The pair of pages, of the same shapes and dtypes.

    Raises:
        TypeError: an argument is not an array, or its dtype differs from the pages'.
        ValueError: shapes do not match, or known integers are out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import append_ragged_kv
        >>> pages, k = jnp.zeros((4, 16, 1, 8)), jnp.ones((5, 1, 8))
        >>> places = {"kv_lengths": jnp.array([3, 20]), "cu_q_lens": jnp.array([0, 3, 4])}
        >>> table = jnp.array([[2, 0], [1, 3]])
        >>> new, _ = append_ragged_kv((pages, pages), k, k, page_table=table, **places)
        >>> new[:, :, 0, 0].sum(axis=1)
        Array([0., 0., 3., 1.], dtype=float32)
    """
    places = RaggedArguments(kv_lengths, page_table, cu_q_lens, num_seqs)
    scaled = dataclasses.replace(places, k_scale=k_scale, v_scale=v_scale)
    return append_packed(_checked_pages(pages), (k, v), scaled, _PAGES)


def append_packed(pages, new, a: RaggedArguments, names: dict[str, tuple[str, str]]):
    """Computes `append_ragged_kv` for callers whose arguments have other names.

    Args:
        pages: (keys, values or None), arrays of rank 4.
        new: (keys, values or None) of the new tokens.
        a: places of the tokens, and scales.
        names: for "k" and "v", the names of the new array and of the pages, for messages.

    Returns:
        The pair of pages.
    """
    old, (k, v) = _Pages(*pages), new
    _check_values(old.v, v, names["v"])
    scales = {}
    for name, x, scale in (("k", k, a.k_scale), ("v", v, a.v_scale)):
        stored, (new_name, old_name) = getattr(old, name), names[name]
        if stored is None:
            if scale is not None:
                raise ValueError(
                    f"{name}_scale is given and {old_name} is None: the values are columns of the "
                    f"keys and have their scale; leave {name}_scale out"
                )
            continue
        _check_dtype(new_name, x, scale, (old_name, stored.dtype))
        if x.ndim != 3 or x.shape[1:] != stored.shape[2:]:
            raise ValueError(
                f"{new_name} has shape {x.shape}: it must be [tokens, heads, head_dim], with heads "
                f"and head_dim {stored.shape[2:]} of {old_name}"
            )
        scales[name] = cache_scale(f"{name}_scale", scale, stored)
    if v is not None and len(k) != len(v):
        shapes = f"{names['k'][0]} has shape {k.shape} and {names['v'][0]} {v.shape}"
        raise ValueError(f"{shapes}: each key needs its value")
    places = places_of(a, len(k), pages[0].shape[1])
    added = _New(k, v, None, places["page_table"], scales["k"], scales.get("v"))
    old = jax.tree.map(jnp.asarray, old)
    # The result is sharded like the pages, because it is an operand of the next step.
    specs = jax.tree.map(mesh_axes.spec_of, old)
    return tuple(mesh_axes.compiled_as_auto(_ragged_appended, (old, added, places), specs))


_PAGES = {"k": ("k", "pages[0]"), "v": ("v", "pages[1]")}


def _check_values(pages, v, names: tuple[str, str]):
    """Checks that new values are given exactly if there are pages of values."""
    if (pages is None) == (v is None):
        return
    new_name, old_name = names
    if v is None:
        raise ValueError(
            f"{new_name} is None and {old_name} has shape {pages.shape}: pass values of the new "
            "tokens, or make pages without values, which are then columns of the keys"
        )
    raise ValueError(
        f"{new_name} is given and {old_name} is None: its values are columns of the keys; leave "
        f"{new_name} out"
    )


def gather_pages(
    pages: Float[AnyArray, "P page_size K H"], page_table: Int[AnyArray, "B max_pages"]
) -> Float[Array, "B S K H"]:
    """Gathers the keys or values of every sequence from its pages into a contiguous copy.

    S = max_pages * page_size. Use it for more new tokens than `flash_decode` takes, such as a
    prompt that continues an earlier one: `flash_attention(q, gather_pages(k, table),
    gather_pages(v, table), causal=True, q_offset=..., kv_lengths=...)`. Since many queries read
    each key, the copy costs little in comparison.

    Args:
        pages: [P, page_size, K, H].
        page_table: int32 [B, max_pages]; ids out of range are clipped.

    Returns:
        [B, max_pages * page_size, K, H]. Beyond a sequence's length, it may hold any values.

    Raises:
        TypeError: page_table does not hold integers.
        ValueError: an array has the wrong rank.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import gather_pages
        >>> gather_pages(jnp.ones((8, 16, 2, 64)), jnp.array([[3, 0], [1, 7]])).shape
        (2, 32, 2, 64)
    """
    pages = jnp.asarray(pages)
    if pages.ndim != 4:
        raise ValueError(
            f"pages has shape {pages.shape}: it must be [num_pages, page_size, heads, head_dim]"
        )
    table = _integers("page_table", page_table, 2, None)
    spec = PartitionSpec(*mesh_axes.spec_of(table)[:1], None, *mesh_axes.spec_of(pages)[2:])
    return mesh_axes.compiled_as_auto(_gathered, (pages, table), spec)


def check_pages(
    page_table: Int[AnyArray, "B max_pages"] | Sequence[Sequence[int]],
    kv_lengths: Int[AnyArray, " B"] | Sequence[int],
    num_pages: int,
    page_size: int,
) -> None:
    """Checks that every key of every sequence lies in an existing page. Does not work under jit.

    `flash_decode` cannot look at values. It clips lengths and page ids, and computes a result with
    them. This function checks the values on the host, and waits for the arrays to be computed.

    Args:
        page_table: ints [B, max_pages].
        kv_lengths: ints [B].
        num_pages: number of pages of the cache.
        page_size: number of keys of a page.

    Raises:
        ValueError: a length is negative or more than max_pages * page_size, or a page id within a
            sequence's length is not in [0, num_pages). Other page ids are never read and may have
            any value.
        TypeError: an array is traced or does not hold integers.

    Example:
        >>> from flash_pallas import check_pages
        >>> check_pages([[3, 0], [1, -1]], [128, 5], num_pages=4, page_size=64)
        >>> check_pages([[3, 4]], [65], num_pages=4, page_size=64)
        Traceback (most recent call last):
        ...
        ValueError: page_table[0, 1] is 4: it must be in [0, 4), as kv_lengths[0] is 65 (2 pages)
    """
    for name, x in (("page_table", page_table), ("kv_lengths", kv_lengths)):
        if isinstance(x, jax.core.Tracer):
            raise TypeError(f"{name} is traced: check_pages needs values, call it outside jax.jit")
    for name, x in (("num_pages", num_pages), ("page_size", page_size)):
        if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or x < 1:
            raise ValueError(f"{name} is {x!r}: it must be a positive int, as of the cache")
    lengths = np.asarray(_integers("kv_lengths", np.asarray(kv_lengths), 1, None))
    table = np.asarray(_integers("page_table", np.asarray(page_table), 2, len(lengths)))
    room = table.shape[1] * page_size
    for b in np.flatnonzero((lengths < 0) | (lengths > room))[:1]:
        raise ValueError(
            f"kv_lengths[{b}] is {lengths[b]}: it must be in [0, {room}], as the page table has "
            f"{table.shape[1]} pages of {page_size} a sequence; give it more columns"
        )
    used = -(-lengths // page_size)
    bad = (table < 0) | (table >= num_pages)
    bad &= np.arange(table.shape[1])[None] < used[:, None]
    for b, i in np.argwhere(bad)[:1]:
        raise ValueError(
            f"page_table[{b}, {i}] is {table[b, i]}: it must be in [0, {num_pages}), as "
            f"kv_lengths[{b}] is {lengths[b]} ({used[b]} pages)"
        )


def _gathered(pages, page_table):
    gathered = jnp.take(pages, page_table, axis=0, mode="clip")
    return gathered.reshape(len(gathered), -1, *pages.shape[2:])


class _Pages(NamedTuple):
    """Keys and values of all sequences, in pages."""

    k: Any
    v: Any


class _New(NamedTuple):
    """Arrays that `append_kv` adds, checked; scales are f32[1 or rows of the cache, K]."""

    k: Any
    v: Any
    lengths: Any
    page_table: Any
    k_scale: Any
    v_scale: Any


def _appended(rope_theta: float | None, old: KVCache, new: _New) -> KVCache:
    count, table = new.k.shape[1], new.page_table
    room = old.k.shape[1] * (1 if table is None else table.shape[1])
    # Not clipped to the room: beyond it nothing is written, but lengths still count the tokens.
    lengths = jnp.clip(old.lengths.astype(jnp.int32), 0, UNBOUNDED - count)
    step = jnp.arange(count, dtype=jnp.int32)[None]
    added = jnp.full_like(lengths, count)
    if new.lengths is not None:
        added = jnp.clip(jnp.asarray(new.lengths).astype(jnp.int32), 0, count)
    place = jnp.where(step < added[:, None], lengths[:, None] + step, room)
    entry = jnp.arange(len(place), dtype=jnp.int32)[:, None]
    indices = _rows(entry, place, room, old.k.shape, table)
    if rope_theta is not None:
        token_positions = positions(old._replace(lengths=lengths), count)
        rotated = apply_rope(jnp.asarray(new.k), token_positions, rope_theta)
        new = new._replace(k=rotated)
    return _written(old, new, indices)._replace(lengths=lengths + added)


def _ragged_appended(old: _Pages, new: _New, places: dict[str, Any]) -> _Pages:
    table, room = new.page_table, old.k.shape[1] * new.page_table.shape[1]
    operands = ragged.in_range(RaggedOperands(new.k, *old, **places))
    of_row = ragged.places_of(operands)
    # Not clipped to the room: a token beyond it is dropped and does not become the last key.
    place = operands.kv_lengths[of_row.seq] - operands.cu_q_lens[of_row.seq + 1] + of_row.row
    place = jnp.where(of_row.exists & (place >= 0), place, room)
    indices = _rows(of_row.seq, place, room, old.k.shape, table)
    return _written(old, new, indices)


def _written(old, new: _New, indices):
    """Returns keys and values with the new ones written at these indices, those in bounds."""
    written = {}
    for name in ("k", "v"):
        stored, x, scale = getattr(old, name), getattr(new, name), getattr(new, f"{name}_scale")
        if stored is not None:
            x = x if scale is None else _quantised(x, scale, indices[0], stored.dtype)
            written[name] = stored.at[indices].set(x, mode="drop")
    return old._replace(**written)


def positions(cache, count: int):
    """Returns int32[B, count]: the positions of the next tokens; 0 for padding on the left."""
    index = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    starts = getattr(cache, "starts", None)
    return index if starts is None else jnp.maximum(index - jnp.maximum(starts, 0)[:, None], 0)


def _rows(entry, place, room: int, shape, page_table):
    """Returns indices into a cache of this shape, out of bounds if a token is to be dropped.

    Args:
        entry: int32, the sequence of each token.
        place: int32, its position; `room` for one to be dropped.
        room: number of tokens that a sequence has room for.
        shape: that of the cache.
        page_table: int32[B, max_pages], or None.
    """
    if page_table is None:
        return entry, place
    num_pages, page_size = shape[:2]
    column = jnp.minimum(place // page_size, page_table.shape[1] - 1)
    page = page_table[entry, column]
    # A negative index would count from the end.
    exists = (place < room) & (page >= 0)
    return jnp.where(exists, page, num_pages), place % page_size


def _quantised(x, scale, rows, dtype):
    """Quantizes x [..., K, H] to the cache's dtype, divided by the scale of its row."""
    scale = scale if len(scale) == 1 else jnp.take(scale, rows, axis=0, mode="clip")
    scale = jnp.broadcast_to(scale, x.shape[:-1])[..., None]
    # With a scale of 0, as of a head of zeros, store 0: the quotient would be NaN.
    x = jnp.where(scale == 0, 0.0, jnp.asarray(x).astype(jnp.float32) / scale)
    if jnp.issubdtype(dtype, jnp.integer):
        x, largest = jnp.round(x), float(jnp.iinfo(dtype).max)
    else:
        largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def _check_rotates(theta, k):
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise ValueError(f"rope_theta is {theta!r}: it must be None or a positive number")
    if not jnp.issubdtype(k.dtype, jnp.floating) or k.dtype.itemsize == 1:
        raise TypeError(f"k has dtype {k.dtype}: to be rotated by rope_theta it must be wider")


def _checked_pages(pages) -> _Pages:
    if not isinstance(pages, tuple) or len(pages) != 2:
        raise TypeError(
            f"pages must be a tuple (keys, values), got {type(pages).__name__}; values are None "
            "where they are columns of the keys"
        )
    old = _Pages(*pages)
    for name, x in zip(("keys", "values"), old, strict=True):
        if name == "values" and x is None:
            continue
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"pages has {name} of type {type(x).__name__}: they must be an array")
        if x.ndim != 4:
            raise ValueError(
                f"pages has {name} of shape {x.shape}: it must be [num_pages, page_size, heads, "
                "head_dim]"
            )
    if old.v is not None and old.k.shape[:3] != old.v.shape[:3]:
        raise ValueError(
            f"pages has keys of shape {old.k.shape} and values {old.v.shape}: all but the head dim "
            "must be the same"
        )
    return old


def _checked_cache(cache) -> KVCache:
    if type(cache) not in (KVCache, tuple) or len(cache) not in (3, 4):
        raise TypeError(
            f"cache must be a KVCache or a tuple (k, v, lengths), got {type(cache).__name__}; "
            "layers take the other caches of flash_pallas.nn themselves, as cache="
        )
    old = KVCache(*cache)
    for name, rank in (("k", 4), ("v", 4)):
        x = getattr(old, name)
        if name == "v" and x is None:
            continue
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"cache.{name} must be an array, got {type(x).__name__}")
        if x.ndim != rank:
            raise ValueError(
                f"cache.{name} has shape {x.shape}: it must be [batch, length, heads, head_dim] or "
                "[num_pages, page_size, heads, head_dim]"
            )
    if old.v is not None and old.k.shape[:3] != old.v.shape[:3]:
        raise ValueError(
            f"cache.k has shape {old.k.shape} and cache.v {old.v.shape}: all but the head dim must "
            "be the same"
        )
    lengths = _integers("cache.lengths", old.lengths, 1, None)
    starts = old.starts
    if starts is not None:
        starts = _integers("cache.starts", starts, 1, len(lengths))
    return old._replace(lengths=lengths, starts=starts)


def _check_shared(cache: KVCache, v, v_scale, rope_theta):
    """Checks a call in which the cache, or the new tokens, have no values of their own."""
    if cache.v is not None:
        raise ValueError(
            f"v is None and cache.v has shape {cache.v.shape}: pass values of the new tokens, or "
            "make a cache without v, whose values are columns of the keys"
        )
    for name, x in (("v", v), ("v_scale", v_scale)):
        if x is not None:
            raise ValueError(
                f"{name} is given and cache.v is None: its values are columns of k, with the scale "
                f"of k; leave {name} out"
            )
    if rope_theta is not None:
        raise ValueError(
            f"rope_theta is {rope_theta!r} and cache.v is None: it would rotate the values, which "
            "are columns of k; rotate the other columns by apply_rope before, and leave it out"
        )


def _check_new(name: str, x, scale, cache, batch: int):
    """Checks that one of the new arrays fits the cache that it goes to."""
    _check_dtype(name, x, scale, (f"cache.{name}", cache.dtype))
    if x.ndim != 4 or x.shape[0] != batch or x.shape[2:] != cache.shape[2:]:
        raise ValueError(
            f"{name} has shape {x.shape}: it must be [batch, tokens, heads, head_dim], with "
            f"{batch} sequences and heads and head_dim {cache.shape[2:]} of the cache"
        )


def _check_dtype(name: str, x, scale, cache: tuple[str, np.dtype]):
    """Checks that a new array is one, of a dtype for a cache of this (name, dtype)."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    cache_name, dtype = cache
    way_out = f"cast with {name}.astype({cache_name}.dtype)"
    fits = x.dtype == dtype
    if dtype.name in QUANTISED:
        argument = f"{name.removeprefix('new_')}_scale"
        way_out = f"pass {argument} to have floats divided by it and rounded"
        if scale is not None:
            way_out = f"leave {argument} out for what has been divided by it"
            fits = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != dtype
    if not fits:
        raise TypeError(f"{name} has dtype {x.dtype} and the cache {dtype}: {way_out}")


def _integers(name: str, x, rank: int, batch: int | None) -> jax.Array:
    """Returns an int32 array of this rank for `batch` sequences; None is any number."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{name} must be an array of integers, got {type(x).__name__}: convert it with "
            "jnp.array(...)"
        )
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype}: it must be int32")
    if x.ndim != rank or batch not in (None, x.shape[0]):
        shape = "[batch]" if rank == 1 else "[batch, max_pages]"
        count = "" if batch is None else f" for {batch} sequences"
        raise ValueError(f"{name} has shape {x.shape}: it must be {shape}{count}")
    return as_int32(name, x)
