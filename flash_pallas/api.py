"""The public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from . import dispatch, validate, vjp
from .dispatch import Explanation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

# One jit for the whole program: an eager call finds its compiled version instead of tracing anew.
_attend = jax.jit(vjp.attend, static_argnums=(0, 1, 2))


def flash_attention(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | Int32[Array, "*B"] = 0,
    deterministic: bool = False,
    backend: str = "auto",
    blocks: Mapping[str, Any] | None = None,
) -> Float[Array, "*B T N Hv"]:
    """Exact attention, softmax(scale * q @ k^T) @ v, in memory linear in T and S.

    FlashAttention-2 (https://arxiv.org/abs/2307.08691). Differentiable once, in reverse mode; works
    under jit, vmap, scan, checkpoint (see `save_attention`) and shard_map.

    A query that sees no key (a negative `q_offset`, or no keys at all) returns zeros, has zero
    gradients and never makes a NaN. `jax.nn.dot_product_attention` returns the mean of `v` there.

    Args:
        q: queries [*B, T, N, H], bfloat16, float16, float32 or float64. Any number of leading batch
            dimensions, none included. Numpy arrays are taken too.
        k: keys [*B, S, K, H] in q's dtype. N is a multiple of K: query head n reads key head
            n // (N // K), which is never repeated in memory (grouped-query attention).
        v: values [*B, S, K, Hv] in q's dtype.
        causal: the query at position i sees the keys at positions up to and including i.
        scale: multiplies the scores, a Python number; None is 1 / sqrt(H).
        q_offset: position of query 0, where key 0 has position 0. The default aligns the first
            query with the first key, S - T the last with the last. An int, or an int32 array [*B]
            (or a scalar), which may be traced and changes without recompiling. Read by `causal`.
        deterministic: gradients must be bit-identical from run to run, at some cost in speed.
        backend: "auto" takes the fastest that can run the call; "hopper" or "xla" takes this one or
            raises.
        blocks: tile sizes to use instead of the tuned ones, by field name; see `explain`.

    Returns:
        o [*B, T, N, Hv] in q's dtype. Sums are float32 inside (float64 for float64).

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: shapes that do not fit together, or a value out of range.
        UnsupportedByBackend: the backend asked for by name cannot run this call, and why.
        NotImplementedError: a dtype that no backend takes; a second derivative.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flash_pallas import flash_attention
        >>> q = jnp.ones((2, 128, 8, 64), jnp.bfloat16)
        >>> k = v = jnp.ones((2, 128, 2, 64), jnp.bfloat16)
        >>> flash_attention(q, k, v, causal=True).shape
        (2, 128, 8, 64)
    """
    return flash_attention_with_lse(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        q_offset=q_offset,
        deterministic=deterministic,
        backend=backend,
        blocks=blocks,
    )[0]


def flash_attention_with_lse(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | Int32[Array, "*B"] = 0,
    deterministic: bool = False,
    backend: str = "auto",
    blocks: Mapping[str, Any] | None = None,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T"]]:
    """`flash_attention`, and the log-sum-exp of the scores of every query.

    FlashAttention-2, section 3.1.1 (https://arxiv.org/abs/2307.08691). With it, attention over
    parts of the keys can be merged into attention over all. Both outputs are differentiable.

    Args:
        q: as in `flash_attention`, as are all the others.
        k: keys.
        v: values.
        causal: whether later keys are hidden.
        scale: multiplies the scores.
        q_offset: position of query 0.
        deterministic: bit-identical gradients.
        backend: which implementation.
        blocks: tile sizes.

    Returns:
        o [*B, T, N, Hv] in q's dtype, and lse [*B, N, T] in float32 (float64 for float64), the
        natural logarithm; -inf for a query that sees no key.

    Raises:
        TypeError: as `flash_attention`, as are the others.
        ValueError: bad shapes or values.
        UnsupportedByBackend: the named backend cannot run this call.
        NotImplementedError: an unsupported dtype; a second derivative.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import flash_attention_with_lse
        >>> x = jnp.ones((16, 4, 64))
        >>> o, lse = flash_attention_with_lse(x, x, x)
        >>> o.shape, lse.shape
        ((16, 4, 64), (4, 16))
    """
    override = validate.check_blocks(blocks)
    call = validate.canonicalize(
        q, k, v, causal=causal, scale=scale, q_offset=q_offset, deterministic=deterministic
    )
    if call.is_empty:
        dispatch.check_name(backend)
        return call.empty_result()
    chosen = dispatch.select(call.problem, backend)
    tiles = chosen.blocks(call.problem, override)
    return call.unfold(*_attend(chosen, call.spec, tiles, call.operands)[:2])


def explain(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | Int32[Array, "*B"] = 0,
    deterministic: bool = False,
    backend: str = "auto",
    blocks: Mapping[str, Any] | None = None,
) -> Explanation:
    """Which backend and which tiles `flash_attention` would use here, and why not the others.

    Nothing is run.

    Args:
        q: as in `flash_attention`, as are all the others.
        k: keys.
        v: values.
        causal: whether later keys are hidden.
        scale: multiplies the scores.
        q_offset: position of query 0.
        deterministic: bit-identical gradients.
        backend: which implementation.
        blocks: tile sizes.

    Returns:
        An `Explanation`; print it.

    Raises:
        TypeError: as `flash_attention`, as are the others.
        ValueError: bad shapes or values.
        UnsupportedByBackend: the named backend cannot run this call.
        NotImplementedError: an unsupported dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import explain
        >>> x = jnp.ones((1, 1024, 4, 64))
        >>> print(explain(x, x, x, backend="xla", blocks={"block_q": 64, "block_kv": 256}).blocks)
        XlaBlocks(block_q=64, block_kv=256)
    """
    override = validate.check_blocks(blocks)
    call = validate.canonicalize(
        q, k, v, causal=causal, scale=scale, q_offset=q_offset, deterministic=deterministic
    )
    return dispatch.explanation(call.problem, backend, override)


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias=None,
    mask=None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation: str | None = None,
    return_residual: bool = False,
):
    """`flash_attention` behind the signature of `jax.nn.dot_product_attention`.

    FlashAttention-2 (https://arxiv.org/abs/2307.08691). What is not supported raises: nothing is
    ignored. One difference: a query that sees no key (S = 0) returns zeros, where `jax.nn` returns
    the mean of `value`.

    Args:
        query: [*B, T, N, H], or [T, N, H].
        key: [*B, S, K, H]; N is a multiple of K.
        value: [*B, S, K, Hv]; unlike in `jax.nn`, Hv may differ from H.
        bias: must be None.
        mask: must be None.
        scale: multiplies the scores, a Python number; None is 1 / sqrt(H).
        is_causal: the query i sees the keys up to and including i.
        query_seq_lengths: must be None.
        key_value_seq_lengths: must be None.
        local_window_size: must be None.
        implementation: None or "auto", "hopper" or "xla": `backend` of `flash_attention`.
        return_residual: also return the log-sum-exp.

    Returns:
        o [*B, T, N, Hv] in query's dtype; with `return_residual` the pair of o and the natural
        log-sum-exp [*B, T, N] in float32, heads last as in `jax.nn`.

    Raises:
        NotImplementedError: an argument that must be None is not; the message names another way.
        TypeError: as `flash_attention`, as are the others.
        ValueError: bad shapes or values.
        UnsupportedByBackend: the named implementation cannot run this call.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import dot_product_attention
        >>> x = jnp.ones((2, 16, 4, 64))
        >>> dot_product_attention(x, x, x, is_causal=True).shape
        (2, 16, 4, 64)
    """
    _refuse("bias", bias, "jax.nn.dot_product_attention(..., bias=bias)")
    _refuse("mask", mask, "is_causal=True for a causal mask, or jax.nn.dot_product_attention")
    lengths = "slicing the arrays to their lengths, or jax.nn.dot_product_attention"
    _refuse("query_seq_lengths", query_seq_lengths, lengths)
    _refuse("key_value_seq_lengths", key_value_seq_lengths, lengths)
    window = "is_causal=True for an unbounded causal window, or jax.nn.dot_product_attention"
    _refuse("local_window_size", local_window_size, window)
    o, lse = flash_attention_with_lse(
        query,
        key,
        value,
        causal=is_causal,
        scale=scale,
        backend="auto" if implementation is None else implementation,
    )
    return (o, jnp.swapaxes(lse, -1, -2)) if return_residual else o


def _refuse(name: str, value, alternative: str):
    if value is not None:
        raise NotImplementedError(
            f"flash_pallas.dot_product_attention does not support {name}, got "
            f"{type(value).__name__}; pass None, or use {alternative}"
        )
