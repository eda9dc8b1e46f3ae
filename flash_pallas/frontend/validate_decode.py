"""Canonical form of a user's call of `flash_decode`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.decode import MAX_SPLITS, MAX_TOKENS, PAGE_SIZES, QUANTISED, DecodeOperands, DecodeSpec
from ..core.shared_prefix import tile_sequences
from . import arguments as checks
from . import validate
from .arguments import as_int32

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """The optional arguments that `flash_decode` and `ragged_paged_attention` have in common."""

    window: Any = None
    softcap: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    scale: Any = None
    num_splits: Any = AUTO
    k_scale: Any = None
    v_scale: Any = None
    kv_starts: Any = None
    v_head_dim: Any = None
    shared_prefix: Any = None


@dataclasses.dataclass(frozen=True)
class DecodeArguments(CacheArguments):
    """The optional arguments of `flash_decode`, with their defaults; no `backend`, `return_lse`."""

    kv_lengths: Any = None
    q_offset: Any = None
    page_table: Any = None
    kv_blocks: Any = None
    kv_block_size: Any = None
    draft_mask: Any = None


def canonicalize(q, k, v, arguments: DecodeArguments) -> tuple[DecodeSpec, DecodeOperands]:
    """Checks the arguments of `flash_decode` and puts them in canonical form.

    Raises:
        TypeError: an argument of the wrong kind or dtype, or traced where it must be static.
        ValueError: shapes that do not fit together, or a value out of range.
        NotImplementedError: a floating dtype that no backend takes.
    """
    a = arguments
    q, k = (validate.as_array(name, x) for name, x in (("q", q), ("k", k)))
    v = None if v is None else validate.as_array("v", v)
    columns = v_columns(a.v_head_dim, a.v_scale, k, v)
    check_dtypes(q, k, k if v is None else v)
    table = None if a.page_table is None else _page_table(a.page_table, len(q) if q.ndim else 0)
    _check_shapes(q, k, k if v is None else v, paged=table is not None)
    page_size, kv_len = None, k.shape[1]
    if table is not None:
        page_size, kv_len = known_page_size(k), table.shape[1] * k.shape[1]
        if a.kv_lengths is None:
            raise ValueError(
                "kv_lengths is None and page_table is given: pass how many keys each sequence has, "
                f"int32 ({len(q)},); nobody else knows which pages are filled"
            )
    sizes = checks.Sizes(q.shape[:1], q.shape[1], kv_len, q.shape[2], k.shape[2], q.dtype)
    lengths = checks.lengths("kv_lengths", a.kv_lengths, kv_len, sizes, clips=False)
    if lengths is None:
        lengths = jnp.full((sizes.batch,), kv_len, jnp.int32)
    left, window_left = window_sides(a.window, sizes)
    chosen, block_size = _kv_blocks(a, q, k, page_size)
    shares_prefix, prefix_lengths = shared_prefix(a, sizes, page_size, f"q has {q.shape[1]} tokens")
    if prefix_lengths is not None:
        checks.check_room("shared_prefix", a.shared_prefix, kv_len)
    q, scale = validate.positive_scale(q, checks.valid_scale(a.scale, q.shape[-1]))
    spec = DecodeSpec(
        scale=scale,
        window_left=left,
        softcap=checks.valid_softcap(a.softcap),
        num_splits=known_splits(a.num_splits),
        page_size=page_size,
        block_size=block_size,
        v_columns=columns,
        shares_prefix=shares_prefix,
    )
    return spec, DecodeOperands(
        q,
        k,
        v,
        kv_lengths=lengths,
        q_offset=_offset(a.q_offset, sizes),
        page_table=table,
        sinks=checks.sinks(a.sinks, sizes),
        alibi_slopes=checks.slopes(a.alibi_slopes, sizes),
        k_scale=cache_scale("k_scale", a.k_scale, k),
        v_scale=None if v is None else cache_scale("v_scale", a.v_scale, v),
        kv_starts=checks.lengths("kv_starts", a.kv_starts, kv_len, sizes, clips=False),
        window_left=window_left,
        kv_blocks=chosen,
        prefix_lengths=prefix_lengths,
        draft_mask=_draft_mask(a, sizes),
    )


def cache_scale(name: str, value, cache):
    """Returns f32[1 or rows of the cache, K] for a cache [rows, length, K, H], or None.

    Raises:
        TypeError: not floats, or the cache's dtype needs no scale.
        ValueError: a shape that does not fit.
    """
    if value is None:
        return None
    value = validate.as_array(name, value)
    if cache.dtype.name not in QUANTISED:
        raise TypeError(
            f"{name} is given and the cache has dtype {cache.dtype}: only caches of "
            f"{' and '.join(QUANTISED)} are scaled"
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {value.dtype}: it must be a float")
    rows, _, heads = cache.shape[:3]
    if value.shape not in ((heads,), (rows, heads)):
        raise ValueError(
            f"{name} has shape {value.shape}: it must be one per head of the cache, {(heads,)}, or "
            f"one per sequence or page and head, {(rows, heads)}"
        )
    return value.astype(jnp.float32).reshape(-1, heads)


def v_columns(size, v_scale, k, v) -> int | None:
    """Checks v_head_dim; returns how many columns of the keys are the values, None where v is."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer))):
        raise TypeError(
            f"v_head_dim is {size!r}: it must be an int, the number of columns of k that are the "
            "values"
        )
    if v is not None:
        if size is not None and v.ndim and size != v.shape[-1]:
            raise ValueError(
                f"v_head_dim is {size} and v has shape {v.shape}: it is the number of columns of k "
                "that are the values; leave v out to have them read there, or leave v_head_dim out"
            )
        return None
    if v_scale is not None:
        raise ValueError(
            "v_scale is given and v is None: the values are columns of k and have its k_scale; "
            "leave v_scale out"
        )
    widest = k.shape[-1] if k.ndim else 0
    if size is not None and not 1 <= size <= widest:
        raise ValueError(
            f"v_head_dim is {size} and k has head dim {widest}: without v the values are the first "
            f"columns of k, so it must be 1 to {widest}, or None for all of them"
        )
    return widest if size is None else int(size)


def check_dtypes(q, k, v):
    """Checks for one floating dtype, or a cache in one of QUANTISED."""
    if k.dtype == v.dtype and k.dtype.name in QUANTISED:
        k = v = q
    validate.check_dtypes(q, k, v)


def _check_shapes(q, k, v, paged: bool):
    cache = "[num_pages, page_size, heads, head_dim]" if paged else "[batch, length, ...]"
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"q, k and v must have rank 4, got {shapes}: q is [batch, tokens, heads, head_dim], "
            f"k and v are {cache}; add a missing axis, as in q[:, None], or map with jax.vmap"
        )
    if k.shape[0] != v.shape[0] or (not paged and k.shape[0] != q.shape[0]):
        counts = "pages of k and v" if paged else "batch sizes of q, k and v"
        raise ValueError(f"the {counts} differ ({shapes}): they must be the same")
    if not 1 <= q.shape[1] <= MAX_TOKENS:
        raise ValueError(
            f"q has {q.shape[1]} tokens: it must be 1 to {MAX_TOKENS}; for more use "
            "flash_attention(q, k, v, causal=True, q_offset=..., kv_lengths=...)"
        )
    validate.check_sizes(q.shape[1:], k.shape[1:], v.shape[1:])
    if paged and not k.shape[0]:
        raise ValueError(
            f"k and v have no page ({shapes}): there must be at least one; a sequence without keys "
            "has kv_lengths of 0"
        )


def _page_table(value, batch: int):
    """Checks a page table; returns int32[B, max_pages]."""
    value = as_int32("page_table", value)
    if value.ndim != 2 or value.shape[0] != batch or not value.shape[1]:
        raise ValueError(
            f"page_table has shape {value.shape}: it must be [batch, max_pages], one row for each "
            f"of the {batch} sequences of q and at least one page"
        )
    return value


def known_page_size(k) -> int:
    """Returns the number of keys of a page.

    Raises:
        ValueError: none of PAGE_SIZES.
    """
    size = k.shape[1]
    if size not in PAGE_SIZES:
        raise ValueError(
            f"k has pages of {size} keys: a page size must be a multiple of {PAGE_SIZES.step} from "
            f"{PAGE_SIZES[0]} to {PAGE_SIZES[-1]}; the layout is [num_pages, page_size, heads, "
            "head_dim]"
        )
    return size


def _kv_blocks(a: DecodeArguments, q, k, page_size: int | None):
    """Checks kv_blocks; returns (int32[B, 1 or K, M], keys of a block), or (None, None)."""
    if a.kv_blocks is None:
        if a.kv_block_size is not None:
            raise ValueError(
                f"kv_block_size is {a.kv_block_size} and kv_blocks is None: it is the size of the "
                "blocks that kv_blocks names"
            )
        return None, None
    value, heads = as_int32("kv_blocks", a.kv_blocks), (1, k.shape[2])
    if value.ndim != 3 or len(value) != len(q) or value.shape[1] not in heads or not value.shape[2]:
        raise ValueError(
            f"kv_blocks has shape {value.shape}: it must be [batch, heads, blocks], {len(q)} "
            f"sequences with one row for all KV heads or {k.shape[2]}, and at least one block"
        )
    others = ("q_offset", "window", "kv_starts", "alibi_slopes", "draft_mask")
    if conflicts := [name for name in others if getattr(a, name) is not None]:
        raise ValueError(
            f"kv_blocks is given and so is {conflicts[0]}: it depends on the places of keys, of "
            "which the chosen blocks keep only the order; leave it out, or choose blocks by it"
        )
    if q.shape[1] != 1:
        raise ValueError(
            f"kv_blocks is given and q has {q.shape[1]} tokens: it must be 1; for more, call "
            "flash_attention with a block_mask, or flash_decode once for each"
        )
    return value, _block_size(a.kv_block_size, k.shape[1], page_size)


def shared_prefix(a: CacheArguments, sizes: checks.Sizes, page_size: int | None, tokens: str):
    """Checks shared_prefix; returns (whether prefixes are shared, int32[B] or None).

    Its values are left to the caller. `tokens` says, in a message, how many new tokens there are.
    """
    value = a.shared_prefix
    if value is None:
        return False, None
    if isinstance(value, str) and value != AUTO:
        raise ValueError(
            f"shared_prefix is {value!r}: it must be 'auto', or how many keys each sequence shares"
        )
    if page_size is None:
        raise ValueError(
            f"shared_prefix is {value!r} and page_table is None: sequences share pages; leave it "
            "out for a contiguous cache"
        )
    others = ("q_offset", "window", "kv_starts", "alibi_slopes", "kv_blocks")
    if conflicts := [name for name in others if getattr(a, name, None) is not None]:
        raise ValueError(
            f"shared_prefix is given and so is {conflicts[0]}: what a query sees of a shared "
            "prefix must not depend on its sequence; leave one of them out"
        )
    if tile_sequences(sizes.q_len) < 2:
        raise ValueError(
            f"shared_prefix is given and {tokens}: it must be 1 to {MAX_TOKENS // 2}, so that one "
            "tile has the queries of two sequences"
        )
    return True, None if isinstance(value, str) else checks.lengths(
        "shared_prefix", value, None, sizes
    )


def _draft_mask(a: DecodeArguments, sizes: checks.Sizes):
    """Checks a draft mask; returns bool[B, T, T], or None."""
    if a.draft_mask is None:
        return None
    value = validate.as_array("draft_mask", a.draft_mask)
    if value.dtype != jnp.bool_:
        raise TypeError(
            f"draft_mask has dtype {value.dtype}: it must be bool, True where the query of the row "
            "sees the new token of the column; cast a mask of 0 and 1 with draft_mask.astype(bool)"
        )
    tokens = (sizes.q_len,) * 2
    full = (*sizes.batch_shape, *tokens)
    if value.shape not in (tokens, full):
        raise ValueError(
            f"draft_mask has shape {value.shape}: it must be one row and one column for each new "
            f"token of q, {tokens}, or one such mask per sequence, {full}"
        )
    if a.q_offset is not None:
        raise ValueError(
            "draft_mask is given and so is q_offset: with a draft mask the last query is the last "
            "key; leave q_offset out, and count the new tokens in kv_lengths"
        )
    return jnp.broadcast_to(value, full)


def _block_size(value, length: int, page_size: int | None) -> int:
    size = page_size if value is None else value
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise TypeError(
            f"kv_block_size is {value!r}: it must be an int, the keys of a block of kv_blocks"
        )
    if page_size is not None and (size < page_size or size % page_size):
        raise ValueError(
            f"kv_block_size is {size}: it must be a multiple of the page size, {page_size}"
        )
    if page_size is None and (size not in PAGE_SIZES or length % size):
        raise ValueError(
            f"kv_block_size is {size}: it must be a multiple of {PAGE_SIZES.step} from "
            f"{PAGE_SIZES[0]} to {PAGE_SIZES[-1]}, and divide the {length} keys that the cache "
            "has room for"
        )
    return int(size)


def known_splits(value) -> int | None:
    """Checks num_splits; returns None for "auto"."""
    if isinstance(value, str) and value == AUTO:
        return None
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError("num_splits is an array, but it must be static, a Python int or 'auto'")
    number = int(value) if isinstance(value, (int, np.integer)) else None
    if number is None or isinstance(value, bool):
        raise TypeError(f"num_splits must be an int or 'auto', got {value!r}")
    if not 1 <= number <= MAX_SPLITS:
        raise ValueError(f"num_splits is {number}: it must be 1 to {MAX_SPLITS}, or 'auto'")
    return number


def window_sides(window, sizes: checks.Sizes):
    """Returns (left side, None) of a window that is known now, (None, int32[B]) of an array."""
    left, _ = checks.band(True, window)
    return (None, checks.window_side(left, sizes)) if checks.is_array(left) else (left, None)


def _offset(value, sizes: checks.Sizes):
    """Returns int32[B]: the position of the first query; None if the last query is the last key."""
    if value is None:
        return None
    static, traced = checks.offset(value, sizes)
    return jnp.full((sizes.batch,), static, jnp.int32) if traced is None else traced
