"""`attention_fn` for flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention.

Linen passes only the keywords that it finds in the signature, so a function of **kwargs would
silently lose the mask. nnx passes a fixed set of keywords without filtering. Hence every keyword of
either is named here. One that cannot be honored is refused, never dropped. Both functions live at
module level, because Flax hashes a module together with its attention_fn: a new lambda or partial
for each module would be traced again each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..api import flash_attention
from ..frontend.validate import as_array, check_shapes, same_arguments
from ..frontend.words import LONG_NAMES, Words
from ..typing import AnyArray, Array, Bool, Differentiable, Float, Precision
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
    differentiable: Differentiable = "reverse",
) -> Float[Array, "*B T N Hv"]:
    """Computes exact attention in O(length) memory, with the interface of Flax's attention modules.

    A query that sees no key returns 0. With Flax's default function it returns the mean of the
    values.

    Args:
        query: [*batch, q_length, heads, head_dim], with any number of batch dimensions, including
            none.
        key: [*batch, kv_length, kv_heads, head_dim]; heads is a multiple of kv_heads.
        value: [*batch, kv_length, kv_heads, v_head_dim].
        bias: floats added to the scaled scores. The shape must broadcast to
            [*batch, heads, q_length, kv_length], and may have fewer axes. It is never expanded.
        mask: array of any dtype, of the same shapes as bias. Where it is False or 0, the key is
            hidden.
        broadcast_dropout: use one dropout mask for all batch entries and heads.
        dropout_rng: a key of jax.random, typed or raw; needed only for dropout.
        dropout_rate: fraction of the weights that is dropped, in [0, 1). For the same key, the
            dropout mask differs from Flax's but has the same distribution.
        deterministic: True switches dropout off.
        dtype: dtype of the computation; None is the promoted dtype of the three arrays.
        precision: precision of float32 matmuls, as in `flash_attention`, where None is "high".
        module: must be None, because there are no attention weights to sow.
        force_fp32_for_softmax: accepted without effect; the softmax is never computed in less than
            float32.
        einsum_dot_general: must be None.
        qk_attn_weights_einsum: must be None.
        attn_weights_value_einsum: must be None.
        promote_dtype: called as promote_dtype((query, key, value), dtype=dtype), instead of the
            promotion described under dtype.
        is_causal: query i sees keys 0 to i, except those that the mask hides.
        input_positions: must be None. Rotate query and key before attention instead.
        differentiable: "reverse" or "any", as in `flash_attention`. Flax passes none: give a module
            `functools.partial(attention_fn, differentiable="any")`, made once.

    Returns:
        [*batch, q_length, heads, v_head_dim] in the dtype of the computation.

    Raises:
        NotImplementedError: an argument cannot be honored; the message says what to do.
        ValueError: shapes do not match, or dropout has no key.
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
            differentiable=differentiable,
            **_dropout(dropout_rate, dropout_rng, broadcast_dropout, deterministic),
        )


@same_arguments(attention_fn)
def causal_attention_fn(
    query, key, value, *, mask=None, is_causal=False, **options
) -> Float[Array, "*B T N Hv"]:
    """Computes a causal `attention_fn`, even if not asked to: linen's modules have no is_causal.

    A dense causal mask is not needed with it; a mask hides further keys. Arguments, result and
    errors are those of `attention_fn`, with two exceptions. First, is_causal has no effect, because
    nnx passes False if its caller does not set it. Second, a single query with a mask sees whatever
    the mask leaves visible. With decode=True, Flax passes only the newest token, and its mask shows
    which part of the cache is filled.
    """
    options["is_causal"] = mask is None or jnp.shape(query)[-3] > 1
    return attention_fn(query, key, value, mask=mask, **options)


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
