"""The functions of flash-attn 2 on JAX arrays (https://github.com/Dao-AILab/flash-attention, 2.8).

Layouts, defaults and the order of arguments are those of flash-attn. Causal masks, windows and
ALiBi are aligned at the bottom right: the last query has the position of the last key.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, cast, overload

import jax.numpy as jnp

from ..api import flash_attention
from ..cache import KVCache, append_kv
from ..frontend import validate
from ..frontend.arguments import dropout_rate as checked_rate
from ..frontend.validate import suggested
from ..frontend.words import Words
from ..typing import AnyArray, Array, Float, Int, Integer
from ..varlen import flash_attention_varlen
from ._kvcache import (
    Reading,
    Rotation,
    Rows,
    attend,
    check_counts,
    check_together,
    lengths_of,
    packed_pages,
)
from ._refusal import refuse
from ._scores import Scores, Window

NAMES = {
    "dropout_rate": "dropout_p",
    "scale": "softmax_scale",
    "window": "window_size",
    "cu_seqlens_kv": "cu_seqlens_k",
    "None is no cap": "0.0 is no cap",
    "for a batch call flash_attention": "for a batch call flash_attn_func",
}
WORDS = Words(NAMES)
# For calls that read a cache: flash-attn's k and v are the new tokens.
CACHE_WORDS = Words(
    NAMES
    | {
        "k": "k_cache",
        "v": "v_cache",
        "page_table": "block_table",
        "kv_lengths": "cache_seqlens",
        "kv_starts": "cache_leftpad",
        "'auto'": "0",
    }
)
APPEND_WORDS = Words(
    {
        "cache.k": "k_cache",
        "cache.v": "v_cache",
        "cache.lengths": "cache_seqlens",
        "page_table": "block_table",
    }
)
NO_PROBABILITIES = (
    "the weights are never in memory. For the log-sum-exp call flash_pallas."
    "flash_attention_with_lse, or flash_pallas.reference.attention for small tests"
)


@suggested
def flash_attn_func(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K Hv"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[AnyArray, "*#B N"] | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    dropout_seed: Integer | AnyArray | None = None,
) -> Float[Array, "B T N Hv"]:
    """Computes attention with the arguments and conventions of flash-attn's `flash_attn_func`.

    flash-attn 2.8, flash_attn/flash_attn_interface.py. A score is modified in the order scale,
    softcap, ALiBi, and then masked. A query that sees no key returns zeros.

    Args:
        q: queries [B, T, N, H] in any dtype of `flash_attention`.
        k: keys [B, S, K, H]; N is a multiple of K.
        v: values [B, S, K, Hv].
        dropout_p: fraction of the weights that is dropped. Requires `dropout_seed`.
        softmax_scale: factor of the scores, a Python number; None is 1 / sqrt(H).
        causal: query i sees the keys up to i + S - T.
        window_size: (left, right): query i sees the keys from i + S - T - left to
            i + S - T + right; a negative number or None is unbounded.
        softcap: scores become softcap * tanh(scores / softcap). 0.0 means no softcap.
        alibi_slopes: [N] or [B, N]: slope * |i + S - T - j| is subtracted from scores.
            Differentiable here.
        deterministic: make gradients bit-identical from run to run.
        return_attn_probs: refused, because the weights are never in memory.
        dropout_seed: an int, an integer array or a key of jax.random. (torch keeps a seed in global
            state.)

    Returns:
        o [B, T, N, Hv] in q's dtype.

    Raises:
        ValueError: `return_attn_probs` is set, or `flash_attention` refuses the call.
        TypeError: an argument has the wrong kind or dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.flash_attn import flash_attn_func
        >>> q, k = jnp.ones((2, 3, 4, 64)), jnp.ones((2, 10, 2, 64))
        >>> flash_attn_func(q, k, k, causal=True, window_size=(4, -1)).shape
        (2, 3, 4, 64)
    """
    refuse("return_attn_probs", return_attn_probs, False, NO_PROBABILITIES)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    _check_ranks(q=q, k=k, v=v)
    offset = jnp.shape(k)[1] - jnp.shape(q)[1]
    options = {"q_offset": offset, "deterministic": deterministic, **scores.options()}
    with WORDS:
        options |= _dropout(dropout_p, dropout_seed)
        return flash_attention(q, k, v, **options)


class _FlashAttnOptions(TypedDict, total=False):
    """Arguments of `flash_attn_func` by name, for its packed variants."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: Float[AnyArray, "*#B N"] | None
    deterministic: bool
    return_attn_probs: Literal[False]
    dropout_seed: Integer | AnyArray | None


def flash_attn_qkvpacked_func(
    qkv: Float[AnyArray, "B T 3 N H"], *args: Any, **options: Unpack[_FlashAttnOptions]
) -> Float[Array, "B T N H"]:
    """Computes `flash_attn_func` of queries, keys and values that are stored in one array.

    flash-attn 2.8, flash_attn/flash_attn_interface.py.

    Args:
        qkv: queries, keys and values [B, T, 3, N, H].
        *args: arguments of `flash_attn_func` from `dropout_p` on, in its order.
        **options: arguments of `flash_attn_func` by name.

    Returns:
        o [B, T, N, H] in qkv's dtype.

    Raises:
        ValueError: qkv has another shape.
        Exception: the same exceptions as `flash_attn_func`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(jnp.ones((2, 16, 3, 4, 64)), causal=True).shape
        (2, 16, 4, 64)
    """
    q, k, v = _unpacked("qkv", qkv, 3)
    with Words(dict.fromkeys("qkv", "qkv")):
        return flash_attn_func(q, k, v, *args, **cast(Any, options))


def flash_attn_kvpacked_func(
    q: Float[AnyArray, "B T N H"],
    kv: Float[AnyArray, "B S 2 K H"],
    *args: Any,
    **options: Unpack[_FlashAttnOptions],
) -> Float[Array, "B T N H"]:
    """Computes `flash_attn_func` of keys and values that are stored in one array.

    flash-attn 2.8, flash_attn/flash_attn_interface.py.

    Args:
        q: queries [B, T, N, H].
        kv: keys and values [B, S, 2, K, H].
        *args: arguments of `flash_attn_func` from `dropout_p` on, in its order.
        **options: arguments of `flash_attn_func` by name.

    Returns:
        o [B, T, N, H] in q's dtype.

    Raises:
        ValueError: kv has another shape.
        Exception: the same exceptions as `flash_attn_func`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(jnp.ones((2, 3, 4, 64)), jnp.ones((2, 16, 2, 2, 64))).shape
        (2, 3, 4, 64)
    """
    k, v = _unpacked("kv", kv, 2)
    with Words(dict.fromkeys("kv", "kv")):
        return flash_attn_func(q, k, v, *args, **cast(Any, options))


@suggested
def flash_attn_varlen_func(
    q: Float[AnyArray, "total_q N H"],
    k: Float[AnyArray, "total_k K H"],
    v: Float[AnyArray, "total_k K Hv"],
    cu_seqlens_q: Int[AnyArray, " documents+1"],
    cu_seqlens_k: Int[AnyArray, " documents+1"],
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[AnyArray, " N"] | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    block_table: Any = None,
    *,
    dropout_seed: Integer | AnyArray | None = None,
) -> Float[Array, "total_q N Hv"]:
    """Computes attention of packed sequences, like flash-attn's `flash_attn_varlen_func`.

    flash-attn 2.8, flash_attn/flash_attn_interface.py. Masks, windows and ALiBi are aligned at the
    end of each sequence: its last query has the position of its last key.

    Args:
        q: queries [total_q, N, H] of all sequences, one after the other.
        k: keys [total_k, K, H]; N is a multiple of K. With `block_table`, pages of keys
            [num_pages, page_size, K, H].
        v: values [total_k, K, Hv], or pages [num_pages, page_size, K, Hv].
        cu_seqlens_q: integers [documents + 1]: the row at which the queries of each sequence begin,
            and finally the end. May be traced.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: accepted for compatibility and not used.
        max_seqlen_k: accepted for compatibility and not used.
        dropout_p: as in `flash_attn_func`, like all arguments that follow.
        softmax_scale: a number or None.
        causal: in a sequence of T queries and S keys, query i sees the keys up to i + S - T.
        window_size: (left, right); a negative number or None is unbounded.
        softcap: 0.0 means no softcap.
        alibi_slopes: [N]; slopes for each sequence are refused.
        deterministic: make gradients bit-identical from run to run.
        return_attn_probs: refused.
        block_table: integers [documents, max_pages]: pages of each sequence. They are copied into
            packed arrays.
        dropout_seed: as in `flash_attn_func`.

    Returns:
        o [total_q, N, Hv] in q's dtype; zeros beyond the last sequence.

    Raises:
        ValueError: an argument is refused.
        TypeError: an argument has the wrong kind or dtype.
        Exception: the same exceptions as `flash_attention_varlen`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.flash_attn import flash_attn_varlen_func
        >>> q, k = jnp.ones((7, 4, 64)), jnp.ones((30, 2, 64))
        >>> of_q, of_k = jnp.array([0, 3, 7]), jnp.array([0, 10, 30])
        >>> flash_attn_varlen_func(q, k, k, of_q, of_k, 4, 20, causal=True).shape
        (7, 4, 64)
    """
    refuse("return_attn_probs", return_attn_probs, False, NO_PROBABILITIES)
    if alibi_slopes is not None and jnp.ndim(alibi_slopes) != 1:
        raise ValueError(
            f"alibi_slopes has shape {jnp.shape(alibi_slopes)}: it must be [heads]; for slopes of "
            "each sequence pad the sequences and call flash_attn_func"
        )
    scores = Scores.of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is not None:
        k, v = packed_pages((k, v), block_table, cu_seqlens_k)
    options: dict[str, Any] = {"deterministic": deterministic, **scores.options()}
    with WORDS:
        options |= _dropout(dropout_p, dropout_seed)
        o: Any = flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_k,
            alignment="end",
            **options,
        )
    return o


class _KVCacheOptions(TypedDict, total=False):
    """Arguments of `flash_attn_with_kvcache` that do not affect the type of its result."""

    cache_batch_idx: Int[AnyArray, " B"] | None
    cache_leftpad: Int[AnyArray, " B"] | None
    block_table: Int[AnyArray, "B max_pages"] | None
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: Float[AnyArray, "*#B N"] | None
    num_splits: int


@overload
def flash_attn_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: None = None,
    v: None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: Integer | AnyArray | None = None,
    *,
    return_softmax_lse: Literal[False] = False,
    **options: Unpack[_KVCacheOptions],
) -> Array: ...
@overload
def flash_attn_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: None = None,
    v: None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: Integer | AnyArray | None = None,
    *,
    return_softmax_lse: Literal[True],
    **options: Unpack[_KVCacheOptions],
) -> tuple[Array, Array]: ...
@overload
def flash_attn_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: AnyArray,
    v: AnyArray,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: Integer | AnyArray | None = None,
    *,
    return_softmax_lse: Literal[False] = False,
    **options: Unpack[_KVCacheOptions],
) -> tuple[Array, Array, Array]: ...
@overload
def flash_attn_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: AnyArray,
    v: AnyArray,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: Integer | AnyArray | None = None,
    *,
    return_softmax_lse: Literal[True],
    **options: Unpack[_KVCacheOptions],
) -> tuple[Array, Array, Array, Array]: ...
@overload
def flash_attn_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: AnyArray | None = None,
    v: AnyArray | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: Integer | AnyArray | None = None,
    *,
    return_softmax_lse: bool,
    **options: Unpack[_KVCacheOptions],
) -> Any: ...
@suggested
def flash_attn_with_kvcache(
    q: Float[AnyArray, "B T N H"],
    k_cache: Float[AnyArray, "rows S K H"],
    v_cache: Float[AnyArray, "rows S K Hv"],
    k: Float[AnyArray, "B new K H"] | None = None,
    v: Float[AnyArray, "B new K Hv"] | None = None,
    rotary_cos: Float[AnyArray, "positions half"] | None = None,
    rotary_sin: Float[AnyArray, "positions half"] | None = None,
    cache_seqlens: Integer | Int[AnyArray, " B"] | None = None,
    cache_batch_idx: Int[AnyArray, " B"] | None = None,
    cache_leftpad: Int[AnyArray, " B"] | None = None,
    block_table: Int[AnyArray, "B max_pages"] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Float[AnyArray, "*#B N"] | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes attention to a KV cache, like flash-attn's `flash_attn_with_kvcache`.

    flash-attn 2.8, flash_attn/flash_attn_interface.py. JAX arrays cannot be written in place, so if
    k and v are given, the updated caches are returned too. Under jit, donate the old caches.

    `flash_decode` runs steps of up to 16 queries. `flash_attention` runs everything else: more
    queries, a window or ALiBi without `causal`, a softcap with ALiBi, and page sizes that
    `flash_decode` does not take. For it, pages are first gathered into a contiguous copy. Calls
    that run `flash_decode` are not differentiable, as in flash-attn.

    Args:
        q: queries [B, T, N, H].
        k_cache: keys [B, S, K, H]. With `cache_batch_idx`, any number of rows. With `block_table`,
            pages [num_pages, page_size, K, H] of any size.
        v_cache: the same for values.
        k: keys [B, new, K, H] that are put into the cache behind its `cache_seqlens` before
            attention. Keys without room raise an error if cache_seqlens is known. Under jit they
            are dropped, without affecting the other keys.
        v: values [B, new, K, Hv]; must be given together with k.
        rotary_cos: cosines [positions, rotary_dim / 2], by which k and q are rotated. k is rotated
            by its positions in the cache. The first query has the position of the first new key.
            Later queries have later positions if `causal` is set or there is a window, and
            otherwise the same one.
        rotary_sin: sines of the same shape.
        cache_seqlens: an int or integers [B]: number of keys before the new ones. None means the
            whole cache, which leaves no room for k.
        cache_batch_idx: integers [B]: the rows of the cache to use. They are copied.
        cache_leftpad: integers [B]: the number of keys at the start that are hidden.
        block_table: integers [B, max_pages]: pages of each sequence.
        softmax_scale: as in `flash_attn_func`.
        causal: query i of T sees the keys up to i + keys - T, where keys includes the new ones.
        window_size: as in `flash_attn_func`, with the same alignment.
        softcap: as in `flash_attn_func`.
        rotary_interleaved: rotate pairs of neighbours (GPT-J) instead of the two halves (GPT-NeoX).
        alibi_slopes: as in `flash_attn_func`.
        num_splits: number of ranges into which `flash_decode` splits the keys. 0 lets it choose,
            and is the only valid value where `flash_attention` runs.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        o [B, T, N, Hv] in q's dtype. If more is requested, a tuple: with `return_softmax_lse`, (o,
        lse [B, N, T] in float32). If k is given, k_cache and v_cache follow at the end.

    Raises:
        ValueError: arguments exclude or require one another, or known cache_seqlens or
            cache_leftpad are negative or beyond the room.
        TypeError: an argument has the wrong kind or dtype.
        Exception: the same exceptions as `flash_attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.flash_attn import flash_attn_with_kvcache
        >>> q, cache = jnp.ones((2, 1, 4, 64)), jnp.zeros((2, 32, 2, 64))
        >>> new = jnp.ones((2, 1, 2, 64))
        >>> lengths = jnp.array([7, 0])
        >>> o, k_cache, v_cache = flash_attn_with_kvcache(
        ...     q, cache, cache, new, new, cache_seqlens=lengths, causal=True
        ... )
        >>> print(o.shape, k_cache[0, 7, 0, 0])
        (2, 1, 4, 64) 1.0
    """
    _check_ranks(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    check_together((k, v), cache_seqlens, block_table, cache_batch_idx)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    rows = Rows(cache_batch_idx, block_table)
    lengths = lengths_of(cache_seqlens, len(q), rows.room(k_cache))
    count = jnp.shape(k)[1] if k is not None and jnp.ndim(k) == 4 else 0
    check_counts(rows.room(k_cache), count, cache_seqlens, cache_leftpad)
    if rotary_cos is not None or rotary_sin is not None:
        if k is None or cache_leftpad is not None:
            raise ValueError(
                "rotary_cos and rotary_sin are given, which need the new k and v and exclude "
                "cache_leftpad: rotate q before the call, as flash_pallas.apply_rope does"
            )
        rotation = Rotation(rotary_cos, rotary_sin, rotary_interleaved, rows.room(k_cache))
        steps = jnp.arange(jnp.shape(q)[1], dtype=jnp.int32)[None]
        local = causal or scores.window != (None, None)
        q = rotation(q, lengths[:, None] + (steps if local else jnp.zeros_like(steps)))
        k = rotation(k, lengths[:, None] + jnp.arange(jnp.shape(k)[1], dtype=jnp.int32)[None])
    cache = KVCache(rows.read(k_cache), rows.read(v_cache), lengths)
    if k is not None and v is not None:
        with APPEND_WORDS:
            cache = append_kv(cache, k, v, page_table=block_table)
    with CACHE_WORDS:
        outputs = attend(q, cache, scores, Reading(block_table, cache_leftpad, num_splits))
    outputs = outputs if return_softmax_lse else outputs[:1]
    if k is not None:
        outputs = (*outputs, rows.written(k_cache, cache.k), rows.written(v_cache, cache.v))
    return outputs if len(outputs) > 1 else outputs[0]


def _dropout(dropout_p, dropout_seed) -> dict[str, Any]:
    """Returns the arguments of `flash_attention` for dropout, none where nothing is dropped."""
    if not checked_rate(dropout_p):
        return {}
    return {"dropout_rate": dropout_p, "dropout_seed": dropout_seed}


def _check_ranks(**arrays) -> None:
    """Checks that arrays, by name, are [batch, length, heads, head_dim]; None is left out."""
    for name, x in arrays.items():
        if x is None:
            continue
        pages = ", or with block_table [num_pages, page_size, heads, head_dim]"
        pages = pages if name.endswith("_cache") else ""
        if len(shape := tuple(validate.as_array(name, x).shape)) != 4:
            raise ValueError(
                f"{name} has shape {shape}: it must be [batch, length, heads, head_dim]{pages}"
            )


def _unpacked(name: str, packed, count: int):
    """Splits [B, T, count, heads, H] into `count` arrays."""
    shape = jnp.shape(packed)
    if len(shape) != 5 or shape[2] != count:
        raise ValueError(f"{name} has shape {shape}: it must be [batch, length, {count}, heads, H]")
    return tuple(packed[:, :, i] for i in range(count))
