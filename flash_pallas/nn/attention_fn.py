"""`attention_fn` for flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention.

Linen passes only the keywords that it finds in the signature, so a function of **kwargs would lose
the mask without a word; nnx passes a fixed set, unfiltered. Hence every keyword of either is named
here, and one that cannot be honoured is refused, never dropped. Both functions live at module
level: Flax hashes a module together with its attention_fn, and a fresh lambda or partial per
module would be traced again each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..api import flash_attention
from ..frontend.validate import as_array, check_shapes
from ..frontend.words import LONG_NAMES, Words
from ..typing import AnyArray, Array, Bool, Float, Precision
from ._options import scores_shape, truth, with_rank

WORDS = Words({**LONG_NAMES, "causal": "is_causal", "dropout_seed": "dropout_rng"})


def attention_fn(
    query: Float[AnyArray, "*B T N H"],
    key: Float[AnyArray, "*B S K H"],
    value: Float[AnyArray, "*B S K Hv"],
    bias: Float[AnyArray, "*#B #N #T #S"] | None = None,
    mask: Bool[AnyArray, "*#B #N #T #S"] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision | None = None,
    module: None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: None = None,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    input_positions: None = None,
) -> Float[Array, "*B T N Hv"]:
    """Computes exact attention in O(length) memory, as Flax's attention modules expect it.

    A query that sees no key gives 0, where Flax's default gives the mean of the values.

    Args:
        query: [*batch, q_length, heads, head_dim], any number of batch dimensions, none included.
        key: [*batch, kv_length, kv_heads, head_dim]; heads is a multiple of kv_heads.
        value: [*batch, kv_length, kv_heads, v_head_dim].
        bias: floats added to the scaled scores, of a shape that broadcasts to
            [*batch, heads, q_length, kv_length]; of lower rank too. It is never expanded.
        mask: what is false or 0 is hidden, whatever the dtype; of the same shapes.
        broadcast_dropout: share the dropout mask between all batch entries and heads.
        dropout_rng: a key of jax.random, typed or raw; for dropout only.
        dropout_rate: share of the weights that is dropped, in [0, 1). The mask is not Flax's for
            the same key, but has the same distribution.
        deterministic: True switches dropout off.
        dtype: dtype to compute in; None is the promoted dtype of the three arrays.
        precision: precision of float32 matmuls, as in `flash_attention`, where None is "high".
        module: must be None: there are no attention weights to sow.
        force_fp32_for_softmax: accepted; the softmax is never computed in less than float32.
        einsum_dot_general: must be None.
        qk_attn_weights_einsum: must be None.
        attn_weights_value_einsum: must be None.
        promote_dtype: called as promote_dtype((query, key, value), dtype=dtype) in place of the
            promotion described under dtype.
        is_causal: query i sees keys 0 to i, of those that the mask leaves visible.
        input_positions: must be None: rotate query and key before attention.

    Returns:
        [*batch, q_length, heads, v_head_dim] in the dtype computed in.

    Raises:
        NotImplementedError: an argument that cannot be honoured; the message says what to do.
        ValueError: shapes that do not fit together, or dropout without a key.
    """
    _refuse(
        module=module,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        input_positions=input_positions,
    )
    for name, x in (("query", query), ("key", key), ("value", value)):
        as_array(name, x)
    if promote_dtype is None:
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    with WORDS:
        check_shapes(query, key, value)
        full = scores_shape(query, key)
        return flash_attention(
            query,
            key,
            value,
            causal=bool(is_causal),
            q_offset=0,  # as Flax: a single causal query sees key 0
            bias=with_rank("bias", bias, full),
            mask=truth(mask, full),
            precision=precision,
            **_dropout(dropout_rate, dropout_rng, broadcast_dropout, deterministic),
        )


def causal_attention_fn(
    query: Float[AnyArray, "*B T N H"],
    key: Float[AnyArray, "*B S K H"],
    value: Float[AnyArray, "*B S K Hv"],
    bias: Float[AnyArray, "*#B #N #T #S"] | None = None,
    mask: Bool[AnyArray, "*#B #N #T #S"] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision | None = None,
    module: None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: None = None,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = True,
    input_positions: None = None,
) -> Float[Array, "*B T N Hv"]:
    """Computes a causal `attention_fn` unasked: for linen, whose modules have no is_causal.

    A dense causal mask is not needed with it; a mask hides further keys. Arguments, result and
    errors are those of `attention_fn`, except that is_causal has no effect (nnx passes False where
    its caller says nothing), and that a single query with a mask sees what the mask leaves visible:
    with decode=True Flax passes the newest token alone and says by the mask which part of the cache
    is filled.
    """
    return attention_fn(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        dtype=dtype,
        precision=precision,
        module=module,
        force_fp32_for_softmax=force_fp32_for_softmax,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        promote_dtype=promote_dtype,
        is_causal=mask is None or jnp.shape(query)[-3] > 1,
        input_positions=input_positions,
    )


_FLAX_DEFAULT = "use Flax's default attention_fn"
_EINSUM = f"is not used by a fused kernel; {_FLAX_DEFAULT}"
_WAY_OUT = {
    "module": (
        "(sow_weights=True) asks for the attention weights, which are never formed; "
        f"{_FLAX_DEFAULT} to look at them"
    ),
    "einsum_dot_general": _EINSUM,
    "qk_attn_weights_einsum": _EINSUM,
    "attn_weights_value_einsum": _EINSUM,
    "input_positions": (
        "is not supported: use flash_pallas.nn.nnx.FlashAttention(rope_theta=...), or rotate query "
        "and key before attention"
    ),
}


def _refuse(**arguments):
    for name, argument in arguments.items():
        if argument is not None:
            raise NotImplementedError(f"flash_pallas attention_fn: {name} {_WAY_OUT[name]}.")


def _dropout(rate, rng, broadcast, deterministic):
    """Returns the keywords of `flash_attention` for dropout."""
    if deterministic or rate == 0.0:
        return {}
    if rng is None:
        raise ValueError(
            f"flash_pallas attention_fn: dropout_rate={rate} needs dropout_rng, a key; pass "
            "rngs={'dropout': key} to the module, or deterministic=True."
        )
    return {"dropout_rate": rate, "dropout_seed": rng, "broadcast_dropout": bool(broadcast)}
