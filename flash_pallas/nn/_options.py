"""Keywords of `flash_attention`, derived from the arguments of a Flax module or of its call.

`attention_fn` and both layers share them. They do not need Flax.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from ..api import flash_attention
from ..core import rope
from ..frontend.arguments import as_int32, band, check_broadcasts
from ..frontend.validate import as_array
from ..frontend.words import Words
from ..parallel import ContextParallel
from ..typing import AnyArray, Array, Bool, Float, Int


class CallOptions(TypedDict, total=False):
    """Arguments of a layer's call that do not affect the type of its result."""

    positions: Int[AnyArray, "*#B T"] | None
    kv_positions: Int[AnyArray, "*#B S"] | None
    segment_ids: Int[AnyArray, "*B T"] | None
    kv_segment_ids: Int[AnyArray, "*B S"] | None
    lengths: Int[AnyArray, "*B"] | None
    kv_lengths: Int[AnyArray, "*B"] | None
    mask: Bool[AnyArray, "*#B #N #T #S"] | None
    bias: Float[AnyArray, "*#B #N #T #S"] | None
    deterministic: bool | None
    new_lengths: Int[AnyArray, " B"] | None
    page_table: Int[AnyArray, "B max_pages"] | None


class CallArguments(NamedTuple):
    """Optional arguments of a layer's call, besides its inputs; None means not given."""

    positions: AnyArray | None = None
    kv_positions: AnyArray | None = None
    segment_ids: AnyArray | None = None
    kv_segment_ids: AnyArray | None = None
    lengths: AnyArray | None = None
    kv_lengths: AnyArray | None = None
    mask: AnyArray | None = None
    bias: AnyArray | None = None

    def of_self_attention(self) -> CallArguments:
        """Fills in the keys' arguments from those of the queries, as both are the same tokens."""
        of_keys = {
            name: getattr(self, name.removeprefix("kv_")) if array is None else array
            for name, array in self._asdict().items()
            if name.startswith("kv_")
        }
        return self._replace(**of_keys)


# What layers call the arguments of `flash_attention`.
WORDS = Words(
    {
        "q_segment_ids": "segment_ids",
        "q_lengths": "lengths",
        "deterministic": "deterministic_backward",
        "alibi_slopes": "alibi",
    }
)


def check_inputs(inputs, inputs_kv, features=(None, None)) -> None:
    """Checks the inputs of a layer.

    Args:
        inputs: [*batch, length, features].
        inputs_kv: the same, or None.
        features: sizes that the last axes of both must have; None accepts any size.

    Raises:
        TypeError: the inputs are not arrays.
        ValueError: an input has fewer than two axes or other features, or batch dimensions differ.
    """
    arrays = {"inputs": inputs, "inputs_kv": inputs_kv}
    for (name, x), size in zip(arrays.items(), features, strict=True):
        if x is None:
            continue
        shape = as_array(name, x).shape
        if len(shape) < 2:
            raise ValueError(
                f"{name} has shape {shape}: it must be [*batch, length, features]; for one token "
                "insert its axis, as in x[None]"
            )
        if size not in (None, shape[-1]):
            raise ValueError(
                f"{name} has shape {shape}: it must be [*batch, length, features] with {size} "
                "features, as the layer was made"
            )
    if inputs_kv is not None and inputs.shape[:-2] != inputs_kv.shape[:-2]:
        raise ValueError(
            f"inputs has shape {inputs.shape} and inputs_kv {inputs_kv.shape}: their batch "
            "dimensions must be the same; repeat the smaller with jnp.broadcast_to"
        )


def attend(layer, call: CallArguments, qkv, slopes, sinks, dropout_key):
    """Computes o [*B, T, N, H] of a call without a cache; rotates first, if the layer does.

    Args:
        layer: has attention, context_parallel, rope_theta and what `keywords` reads.
        call: arguments of this call, complete.
        qkv: queries [*B, T, N, H], and keys and values [*B, S, K, H].
        slopes: ALiBi slopes, from `alibi`.
        sinks: the parameter, or None.
        dropout_key: the dropout key; None without dropout.
    """
    query, key, value = qkv
    call = in_context(layer, call, query.shape[-3])
    query, key = rope.rotate_query_key(
        query, key, call.positions, call.kv_positions, layer.rope_theta
    )
    options = keywords(layer, call, scores_shape(query, key), slopes, sinks, dropout_key)
    options |= placed(layer, query.shape[-3], key.shape[-3])
    with WORDS:
        return attention(layer)(query, key, value, **options)


def placed(layer, q_len: int, kv_len: int) -> dict[str, Any]:
    """Returns the q_offset of a causal layer with fewer queries than keys, as a keyword.

    Both count from 0, as in Flax.

    Raises:
        ValueError: there is a single query, as in a decoding step.
    """
    own = layer.attention is flash_attention and layer.context_parallel is None
    right = band(layer.causal, layer.window)[1]
    if not own or q_len >= kv_len or not isinstance(right, int) or right != 0:
        return {}
    if q_len == 1:
        raise ValueError(
            f"inputs has one token, inputs_kv {kv_len}, and causal=True (or window=(.., 0)) puts "
            "it at position 0, where it sees key 0 alone: pass cache= for a decoding step, or make "
            "the layer with causal=False, whose queries see every key"
        )
    return {"q_offset": 0}


def keywords(layer, call: CallArguments, full, slopes, sinks, dropout_key) -> dict[str, Any]:
    """Returns the keywords of `flash_attention`, without those that are not in use.

    So a function that replaces it only needs to support what its user asks for.

    Args:
        layer: has causal, window, scale, softcap, dropout_rate, broadcast_dropout, precision,
            deterministic_backward, differentiable and backend.
        call: arguments of this call, complete.
        full: shape of the scores, from `scores_shape`.
        slopes: ALiBi slopes, from `alibi`.
        sinks: the parameter, or None.
        dropout_key: the dropout key; None without dropout.
    """
    optional = {
        "window": layer.window,
        "softcap": layer.softcap,
        "precision": layer.precision,
        "differentiable": None if layer.differentiable == "reverse" else layer.differentiable,
        "alibi_slopes": None if slopes is None else jnp.asarray(slopes, jnp.float32),
        "sinks": sinks,
        "q_segment_ids": call.segment_ids,
        "kv_segment_ids": call.kv_segment_ids,
        "q_lengths": call.lengths,
        "kv_lengths": call.kv_lengths,
        "mask": truth(call.mask, full),
        "bias": with_rank("bias", call.bias, full),
    }
    if dropout_key is not None:
        optional |= {
            "dropout_rate": layer.dropout_rate,
            "dropout_seed": dropout_key,
            "broadcast_dropout": layer.broadcast_dropout,
        }
    always = {
        "causal": layer.causal,
        "scale": layer.scale,
        "deterministic": layer.deterministic_backward,
        "backend": layer.backend,
    }
    return always | {name: x for name, x in optional.items() if x is not None}


def attention(layer):
    """Returns the function that the layer calls for attention.

    Raises:
        TypeError: the field is not a function, or not a ContextParallel.
        ValueError: fields contradict each other.
    """
    if layer.context_parallel is None:
        if not callable(layer.attention):
            raise TypeError(
                f"attention is {layer.attention!r}: it must be a function (q, k, v, **options); "
                "which kernel runs is chosen by backend="
            )
        return layer.attention
    if not isinstance(layer.context_parallel, ContextParallel):
        raise TypeError(
            f"context_parallel is {layer.context_parallel!r}: pass "
            "flash_pallas.parallel.ContextParallel(axis), with the name of a mesh axis"
        )
    if layer.attention is not flash_attention:
        raise ValueError("context_parallel replaces attention=: set only one of them.")
    return layer.context_parallel.attend


def in_context(layer, call: CallArguments, length: int) -> CallArguments:
    """Fills in the positions of context parallelism, if none are given."""
    if layer.context_parallel is None or layer.rope_theta is None:
        return call
    default = layer.context_parallel.positions(length)
    q_positions = default if call.positions is None else call.positions
    return call._replace(
        positions=q_positions,
        kv_positions=default if call.kv_positions is None else call.kv_positions,
    )


def scores_shape(query, key) -> tuple[int, ...]:
    """Returns [*batch, heads, q_length, kv_length] of [*batch, length, heads, head_dim] arrays."""
    return *query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3]


def truth(mask, full: tuple[int, ...]):
    """Converts a mask of any dtype (Flax makes float32 of 0 and 1) to bool of the scores' rank.

    None stays None.
    """
    mask = with_rank("mask", mask, full)
    return mask if mask is None or mask.dtype == jnp.bool_ else mask != 0


def with_rank(name: str, x, full: tuple[int, ...]):
    """Prepends axes of 1 to x up to the scores' rank, as broadcasting would; None stays None."""
    if x is None:
        return None
    x = jnp.asarray(x)
    check_broadcasts(name, x, full)
    return x.reshape((1,) * (len(full) - x.ndim) + x.shape)


def alibi(setting, num_heads: int) -> tuple[float, ...] | None:
    """Returns the slopes that a layer's field asks for, or None.

    Args:
        setting: False for none, True for `alibi_slopes`, or one number per head.
        num_heads: number of query heads.

    Raises:
        ValueError: not one number per head.
    """
    if setting is None or isinstance(setting, (bool, np.bool_)):
        return tuple(alibi_slopes(num_heads).tolist()) if setting else None
    try:
        slopes = np.asarray(setting, np.float32)
    except (TypeError, ValueError):
        slopes = None
    if slopes is None or slopes.shape != (num_heads,):
        raise ValueError(
            f"alibi is {setting!r}: it must be a bool, where True is the slopes of alibi_slopes, "
            f"or one number for each of the {num_heads} heads"
        )
    return tuple(slopes.tolist())


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the slopes of the ALiBi paper (https://arxiv.org/abs/2108.12409).

    Pass them to `flash_attention` as alibi_slopes. If the number n of heads is a power of two, they
    form a geometric sequence from 2^(-8/n) to 2^-8. Otherwise they are the sequence for the next
    smaller power of two, followed by every second number of the sequence for the next larger one.

    Args:
        num_heads: number of heads, at least 1.

    Returns:
        float32 [num_heads].

    Raises:
        ValueError: num_heads is not a positive int.

    Example:
        >>> from flash_pallas.nn import alibi_slopes
        >>> print(alibi_slopes(4))
        [0.25       0.0625     0.015625   0.00390625]
    """
    if not isinstance(num_heads, (int, np.integer)) or num_heads < 1:
        raise ValueError(f"num_heads is {num_heads!r}: it must be a positive int")
    power_of_two = 2 ** int(math.log2(num_heads))
    sequence = lambda n: np.exp2(-8.0 / n * np.arange(1, n + 1))
    interleaved = sequence(2 * power_of_two)[::2][: num_heads - power_of_two]
    return np.concatenate([sequence(power_of_two), interleaved]).astype(np.float32)


def segment_positions(segment_ids: Int[AnyArray, "*B T"]) -> Int[Array, "*B T"]:
    """Returns the position of every token in its own document, for RoPE of packed documents.

    Args:
        segment_ids: int32 [*batch, length]; ids need not be sorted or contiguous.

    Returns:
        int32 of the same shape: the number of earlier tokens with the same id, or 0 for padding,
        which has negative ids. Memory and time are linear in the length, except for one sort.

    Raises:
        TypeError: the ids are not integers.
        ValueError: an id does not fit int32.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.nn import segment_positions
        >>> print(segment_positions(jnp.array([0, 0, 0, 1, 1, 0, -1, -1])))
        [0 1 2 0 1 3 0 0]
    """
    ids = as_int32("segment_ids", segment_ids)
    rows = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1])
    return jnp.where(ids < 0, 0, jax.vmap(_ranks)(rows).reshape(ids.shape))


def _ranks(ids):
    """Returns int32[length]: the number of equal ids before each."""
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    in_order = ids[order]
    is_first = jnp.concatenate([jnp.ones((1,), bool), in_order[1:] != in_order[:-1]])
    first = jax.lax.cummax(jnp.where(is_first[: ids.shape[0]], place, 0))
    return jnp.zeros_like(place).at[order].set(place - first)
