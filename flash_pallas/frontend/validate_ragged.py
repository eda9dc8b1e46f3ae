"""Canonical form of a user's call of `ragged_paged_attention`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.decode import MAX_TOKENS, DecodeSpec
from ..core.ragged import RaggedOperands, RaggedSpec
from . import arguments as checks
from . import validate, validate_decode
from .arguments import as_int32
from .validate_decode import CacheArguments


@dataclasses.dataclass(frozen=True)
class RaggedArguments(CacheArguments):
    """The arguments of `ragged_paged_attention` but for q, the pages and what is new.

    Attributes:
        v_first: the first column of the keys that is one of the values, where there is no v: of
            pages that hold both, keys first.
    """

    kv_lengths: Any
    page_table: Any
    cu_q_lens: Any
    num_seqs: Any = None
    step_tokens: Any = 1
    v_first: int = 0


def canonicalize(q, k, v, arguments: RaggedArguments) -> tuple[RaggedSpec, RaggedOperands]:
    """Checks the arguments of `ragged_paged_attention` and puts them in canonical form.

    Raises:
        TypeError: an argument of the wrong kind or dtype, or traced where it must be static.
        ValueError: shapes that do not fit together, or a value out of range.
        NotImplementedError: a floating dtype that no backend takes.
    """
    a = arguments
    q, k = validate.as_array("q", q), validate.as_array("k_pages", k)
    v = None if v is None else validate.as_array("v_pages", v)
    if a.v_first:
        columns, keys = a.v_head_dim, jax.ShapeDtypeStruct((*k.shape[:3], a.v_first), k.dtype)
    else:
        columns, keys = validate_decode.v_columns(a.v_head_dim, a.v_scale, k, v), k
    validate_decode.check_dtypes(q, k, k if v is None else v)
    _check_shapes(q, keys, keys if v is None else v)
    page_size = validate_decode.known_page_size(k)
    places = places_of(a, len(q), page_size)
    table = places["page_table"]
    room = table.shape[1] * page_size
    step_tokens = _step_tokens(a.step_tokens)
    shape = (len(table),), step_tokens, room, q.shape[1], k.shape[2]
    sizes = checks.Sizes(*shape, q.dtype)
    left, window_left = validate_decode.window_sides(a.window, sizes)
    _check_room(a, "kv_starts", room)
    if not isinstance(a.shared_prefix, str):
        _check_room(a, "shared_prefix", room)
    shares_prefix, prefix_lengths = validate_decode.shared_prefix(
        a, sizes, page_size, f"step_tokens is {step_tokens}"
    )
    q, scale = validate.positive_scale(q, checks.valid_scale(a.scale, q.shape[-1]))
    spec = DecodeSpec(
        scale=scale,
        window_left=left,
        softcap=checks.valid_softcap(a.softcap),
        num_splits=validate_decode.known_splits(a.num_splits),
        page_size=page_size,
        v_columns=columns,
        v_first=a.v_first,
        shares_prefix=shares_prefix,
    )
    return RaggedSpec(spec, step_tokens), RaggedOperands(
        q,
        k,
        v,
        **places,
        sinks=checks.sinks(a.sinks, sizes),
        alibi_slopes=checks.slopes(a.alibi_slopes, sizes),
        k_scale=validate_decode.cache_scale("k_scale", a.k_scale, k),
        v_scale=validate_decode.cache_scale("v_scale", a.v_scale, k if v is None else v),
        kv_starts=checks.lengths("kv_starts", a.kv_starts, None, sizes),
        window_left=window_left,
        prefix_lengths=prefix_lengths,
    )


def places_of(arguments, tokens: int, page_size: int) -> dict[str, Any]:
    """Checks which rows belong to which sequence, and where its pages are.

    Args:
        arguments: has kv_lengths, page_table, cu_q_lens and num_seqs.
        tokens: number of rows of q, padding included.
        page_size: keys of a page.

    Returns:
        These arrays, by the names of RaggedOperands.

    Raises:
        TypeError: no integers.
        ValueError: shapes that do not fit together, or known values out of range.
    """
    a = arguments
    lengths = as_int32("kv_lengths", a.kv_lengths)
    if lengths.ndim != 1 or not len(lengths):
        raise ValueError(
            f"kv_lengths has shape {lengths.shape}: it must be [sequences], one length for each "
            "that there is room for, and at least one; those past num_seqs may be anything"
        )
    seqs = len(lengths)
    table = as_int32("page_table", a.page_table)
    if table.ndim != 2 or len(table) != seqs or not table.shape[1]:
        raise ValueError(
            f"page_table has shape {table.shape}: it must be [sequences, max_pages], one row for "
            f"each of the {seqs} sequences of kv_lengths and at least one page"
        )
    ends = as_int32("cu_q_lens", a.cu_q_lens)
    if ends.shape != (seqs + 1,):
        raise ValueError(
            f"cu_q_lens has shape {ends.shape}: it must be {(seqs + 1,)}, one more than the {seqs} "
            "sequences of kv_lengths, as in jnp.array([0, 100, 101]) for 100 queries and 1"
        )
    num_seqs = _num_seqs(a.num_seqs, seqs)
    _check_ends(a.cu_q_lens, seqs if a.num_seqs is None else a.num_seqs, tokens)
    _check_room(a, "kv_lengths", table.shape[1] * page_size)
    return {
        "kv_lengths": lengths,
        "page_table": table,
        "cu_q_lens": ends,
        "num_seqs": num_seqs,
    }


def _num_seqs(value, seqs: int):
    """Checks the number of sequences; returns int32[]."""
    if value is None:
        return jnp.int32(seqs)
    num_seqs = as_int32("num_seqs", value)
    if num_seqs.shape not in ((), (1,)):
        raise ValueError(
            f"num_seqs has shape {num_seqs.shape}: it must be one integer, () or (1,), or None for "
            "all"
        )
    if checks.is_known(value) and not 0 <= (known := int(checks.known(value).item())) <= seqs:
        raise ValueError(
            f"num_seqs is {known}: it must be 0 to {seqs}, the sequences that kv_lengths has room "
            "for"
        )
    return num_seqs.reshape(())


def _check_ends(cu_q_lens, num_seqs, tokens: int):
    """Checks the values of cu_q_lens up to num_seqs, where both are known."""
    # As the caller passed it: inside `explain`, arrays of ints are traced once converted.
    if not checks.is_known(cu_q_lens) or not checks.is_known(num_seqs):
        return
    known = checks.known(cu_q_lens)[: int(checks.known(num_seqs).item()) + 1]
    if known[0] != 0 or np.any(np.diff(known) < 0) or known[-1] > tokens:
        raise ValueError(
            f"cu_q_lens is {known} up to num_seqs: it must begin with 0, never decrease, and end "
            f"at most at the number of rows of q, {tokens}; it is the cumulative sum of the "
            "numbers of queries, with a 0 in front"
        )


def _check_room(a: RaggedArguments, name: str, room: int):
    """Checks lengths or starts of the sequences up to num_seqs, where both are computed."""
    value, seqs = getattr(a, name), a.num_seqs
    if value is None or not checks.is_computed(value) or not checks.is_computed(seqs):
        return
    if seqs is not None and np.ndim(value):
        value = checks.known(value)[: int(checks.known(seqs).item())]
    checks.check_room(name, value, room, "the keys that the pages of a sequence have room for")


def _step_tokens(value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"step_tokens must be an int, got {value!r}: it is static, the most queries of a "
            "sequence that runs as decoding does"
        )
    if not 1 <= value <= MAX_TOKENS:
        raise ValueError(
            f"step_tokens is {value}: it must be 1 to {MAX_TOKENS}; a sequence with more queries "
            "runs as a chunk of a prompt"
        )
    return int(value)


def _check_shapes(q, k, v):
    shapes = f"q {q.shape}, k_pages {k.shape}, v_pages {v.shape}"
    if q.ndim != 3 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            "q must be [tokens, heads, head_dim], the queries of all sequences one after the "
            f"other, and pages [num_pages, page_size, heads, head_dim], got {shapes}"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"the pages differ ({shapes}): all but the head dim must be the same")
    if not k.shape[0]:
        raise ValueError(f"there is no page ({shapes}): there must be at least one")
    validate.check_sizes(q.shape, k.shape[1:], v.shape[1:])
