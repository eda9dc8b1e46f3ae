"""PyTorch's `scaled_dot_product_attention` on JAX arrays (torch 2.13)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..api import flash_attention
from ..frontend import arguments as checks
from ..frontend.validate import as_array, suggested
from ..frontend.words import LONG_NAMES, Words
from ..typing import AnyArray, Array, Bool, Float, Integer
from ._refusal import check_heads_first

WORDS = Words(
    {
        **LONG_NAMES,
        "causal": "is_causal",
        "mask": "attn_mask",
        "bias": "attn_mask",
        "dropout_rate": "dropout_p",
    }
)


@dataclasses.dataclass(frozen=True)
class CausalBias:
    """A causal `attn_mask` that takes no memory, like torch.nn.attention.bias.CausalBias.

    Attributes:
        q_len: number of queries.
        kv_len: number of keys.
        q_offset: position of query 0, where key 0 has position 0.
    """

    q_len: int
    kv_len: int
    q_offset: int


def causal_upper_left(q_len: int, kv_len: int) -> CausalBias:
    """Returns the causal mask that aligns the first query with the first key.

    torch 2.13, torch.nn.attention.bias.causal_upper_left.

    Args:
        q_len: number of queries.
        kv_len: number of keys.

    Returns:
        An `attn_mask` of `scaled_dot_product_attention`.

    Example:
        >>> from flash_pallas.compat.torch_sdpa import causal_upper_left
        >>> causal_upper_left(3, 10)
        CausalBias(q_len=3, kv_len=10, q_offset=0)
    """
    return CausalBias(q_len, kv_len, 0)


def causal_lower_right(q_len: int, kv_len: int) -> CausalBias:
    """Returns the causal mask that aligns the last query with the last key.

    torch 2.13, torch.nn.attention.bias.causal_lower_right.

    Args:
        q_len: number of queries.
        kv_len: number of keys.

    Returns:
        An `attn_mask` of `scaled_dot_product_attention`.

    Example:
        >>> from flash_pallas.compat.torch_sdpa import causal_lower_right
        >>> causal_lower_right(3, 10)
        CausalBias(q_len=3, kv_len=10, q_offset=7)
    """
    return CausalBias(q_len, kv_len, kv_len - q_len)


@suggested
def scaled_dot_product_attention(
    query: Float[AnyArray, "*B N T E"],
    key: Float[AnyArray, "*B K S E"],
    value: Float[AnyArray, "*B K S Ev"],
    attn_mask: Bool[AnyArray, "*mask"] | Float[AnyArray, "*mask"] | CausalBias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_seed: Integer | AnyArray | None = None,
) -> Float[Array, "*B N T Ev"]:
    """Computes attention with the layout and arguments of PyTorch's function of this name.

    torch 2.13, torch.nn.functional.scaled_dot_product_attention. A query that sees no key returns
    zeros, as in torch from 2.5 on.

    Args:
        query: [*B, N, T, E], or [B, T, E] without heads.
        key: [*B, K, S, E]; K is N, or with `enable_gqa` a divisor of N. The batch dimensions must
            equal those of query. torch broadcasts them; here use `jnp.broadcast_to`.
        value: [*B, K, S, Ev].
        attn_mask: bool, where True means visible, or floats that are added to the scaled scores. It
            must broadcast to [*B, N, T, S]. It may also be the result of `causal_lower_right` or
            `causal_upper_left`. Floats have a gradient, and -inf in them hides keys.
        dropout_p: fraction of the weights that is dropped. Requires `dropout_seed`.
        is_causal: query i sees the keys up to i, so the first query is aligned with the first key.
        scale: factor of the scores, a Python number; None is 1 / sqrt(E).
        enable_gqa: allow K to differ from N.
        dropout_seed: an int, an integer array or a key of jax.random. (torch keeps a seed in global
            state.)

    Returns:
        o [*B, N, T, Ev] in query's dtype.

    Raises:
        ValueError: `attn_mask` is given with `is_causal`, heads differ without `enable_gqa`, or
            `flash_attention` refuses the call.
        TypeError: an argument has the wrong kind or dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.torch_sdpa import scaled_dot_product_attention
        >>> query, key = jnp.ones((2, 8, 16, 64)), jnp.ones((2, 2, 16, 64))
        >>> scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).shape
        (2, 8, 16, 64)
    """
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attn_mask is given and is_causal is True, which PyTorch's documentation excludes: put "
            "the causal mask into attn_mask, or call flash_attention(causal=True, mask=...)"
        )
    arrays_by_name = {"query": query, "key": key, "value": value}
    without_heads = {as_array(name, x).ndim for name, x in arrays_by_name.items()} == {3}
    check_heads_first(arrays_by_name, enable_gqa, has_heads=not without_heads)
    arrays = [_sequence_first(x, without_heads) for x in (query, key, value)]
    options: dict[str, Any] = {"causal": is_causal, "q_offset": 0, "scale": scale}
    if isinstance(attn_mask, CausalBias):
        options |= _of_bias(attn_mask, *arrays[:2])
    elif attn_mask is not None:
        full = (*jnp.shape(query)[:-1], jnp.shape(key)[-2])
        name = _kind_of_mask(attn_mask, full)
        options[name] = _of_rank(attn_mask, jnp.ndim(arrays[0]), without_heads)
    with WORDS:
        if checks.dropout_rate(dropout_p):
            options |= {"dropout_rate": dropout_p, "dropout_seed": dropout_seed}
        o = flash_attention(*arrays, **options)
    return o[..., 0, :] if without_heads else jnp.swapaxes(o, -3, -2)


def _sequence_first(x, without_heads: bool):
    """Changes [*B, N, T, E], or [B, T, E], to [*B, T, N, E]."""
    if without_heads:
        return x[..., None, :]
    return jnp.swapaxes(x, -3, -2) if jnp.ndim(x) > 2 else x


def _kind_of_mask(attn_mask, full: tuple[int, ...]) -> str:
    """Checks a mask for scores [*batch, heads, length, kv_length]; returns "mask" or "bias"."""
    if not checks.is_array(attn_mask):
        raise TypeError(
            f"attn_mask must be an array, got {type(attn_mask).__name__}: {attn_mask!r}; make one "
            "by jnp.array(...), or pass causal_lower_right(q_len, kv_len)"
        )
    shape, dtype = jnp.shape(attn_mask), jnp.result_type(attn_mask)
    if dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"attn_mask has dtype {dtype}: it must be bool (True is visible), or floats, which are "
            "added to the scores; cast a mask of 0 and 1 with attn_mask.astype(bool)"
        )
    room = full[len(full) - len(shape) :]
    fits = len(shape) <= len(full) and all(a in (1, b) for a, b in zip(shape, room, strict=True))
    if not fits:
        hint = checks.missing_axes("attn_mask", shape, full) if len(full) > 3 else ""
        raise ValueError(
            f"attn_mask has shape {shape}: it must broadcast to [*batch, heads, length, kv_length],"
            f" {full}{hint}"
        )
    return "mask" if dtype == jnp.bool_ else "bias"


def _of_rank(attn_mask, rank: int, without_heads: bool):
    """Broadcasts the rank of a mask as torch does: leading axes of 1 are added."""
    if without_heads and jnp.ndim(attn_mask) == 3:
        attn_mask = attn_mask[:, None]
    shape = jnp.shape(attn_mask)
    return jnp.reshape(attn_mask, (1,) * (rank - len(shape)) + shape)


def _of_bias(bias: CausalBias, q, k) -> dict[str, Any]:
    lengths = jnp.shape(q)[-3], jnp.shape(k)[-3]
    if (bias.q_len, bias.kv_len) != lengths:
        raise ValueError(
            f"attn_mask is {bias} for a query of length {lengths[0]} and a key of length "
            f"{lengths[1]}: make it for these lengths"
        )
    return {"causal": True, "q_offset": bias.q_offset}
