"""From what a Flax module or its caller says to the keywords of `flash_attention`.

Shared by `attention_fn` and both layers; needs no Flax.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..api import flash_attention
from ..integer_arguments import as_int32


class CallArguments(NamedTuple):
    """What a call of a layer may say beside its inputs; None is not said."""

    positions: Any = None
    kv_positions: Any = None
    segment_ids: Any = None
    kv_segment_ids: Any = None
    lengths: Any = None
    kv_lengths: Any = None
    mask: Any = None
    bias: Any = None

    def of_self_attention(self) -> CallArguments:
        """What is said of the queries alone is said of the keys too: they are the same tokens."""
        both = {
            name: getattr(self, name.removeprefix("kv_")) if found is None else found
            for name, found in self._asdict().items()
            if name.startswith("kv_")
        }
        return self._replace(**both)


def check_inputs(**inputs):
    """Refuses what has no axis of tokens; None is left out.

    Raises:
        ValueError: fewer than two axes.
    """
    for name, x in inputs.items():
        if x is not None and x.ndim < 2:
            raise ValueError(
                f"{name} has shape {x.shape}: it must be [*batch, length, features]; for one token "
                "insert its axis, as in x[None]"
            )


def keywords(layer, given: CallArguments, rank: int, slopes, sinks, dropout_key) -> dict[str, Any]:
    """The keywords of `flash_attention`. What is off is left out.

    So a function that replaces it need not know what its user does not ask for.

    Args:
        layer: has causal, window, scale, softcap, dropout_rate, broadcast_dropout, precision,
            deterministic_backward and backend.
        given: of this call, complete.
        rank: of the queries [*batch, length, heads, head_dim].
        slopes: of ALiBi, from `alibi`.
        sinks: the parameter, or None.
        dropout_key: None without dropout.
    """
    optional = {
        "window": layer.window,
        "softcap": layer.softcap,
        "precision": layer.precision,
        "alibi_slopes": None if slopes is None else jnp.asarray(slopes, jnp.float32),
        "sinks": sinks,
        "q_segment_ids": given.segment_ids,
        "kv_segment_ids": given.kv_segment_ids,
        "q_lengths": given.lengths,
        "kv_lengths": given.kv_lengths,
        "mask": truth(given.mask, rank),
        "bias": with_rank(given.bias, rank),
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
    """What the layer calls for attention.

    Raises:
        ValueError: fields that contradict each other.
    """
    if layer.context_parallel is None:
        return layer.attention
    if layer.attention is not flash_attention:
        raise ValueError("context_parallel replaces attention=: set only one of them.")
    return layer.context_parallel.attend


def in_context(layer, given: CallArguments, length: int) -> CallArguments:
    """`given` with the positions that context parallelism has where none are given."""
    if layer.context_parallel is None or layer.rope_theta is None:
        return given
    at = layer.context_parallel.positions(length)
    own = at if given.positions is None else given.positions
    return given._replace(
        positions=own, kv_positions=at if given.kv_positions is None else given.kv_positions
    )


def truth(mask, rank: int):
    """A mask of any dtype (Flax makes float32 of 0 and 1) as a bool one of this rank, or None."""
    mask = with_rank(mask, rank)
    return mask if mask is None or mask.dtype == jnp.bool_ else mask != 0


def with_rank(x, rank: int):
    """x with axes of 1 in front up to this rank, as broadcasting would have it, or None."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def alibi(setting, num_heads: int) -> tuple[float, ...] | None:
    """The slopes that a layer's field asks for.

    Args:
        setting: False for none, True for `alibi_slopes`, or one number per head.
        num_heads: query heads.

    Raises:
        ValueError: not one number per head.
    """
    if setting is None or isinstance(setting, (bool, np.bool_)):
        return tuple(alibi_slopes(num_heads).tolist()) if setting else None
    slopes = np.asarray(setting, np.float32)
    if slopes.shape != (num_heads,):
        raise ValueError(
            f"alibi must be a bool or one slope for each of the {num_heads} heads, got shape "
            f"{slopes.shape}."
        )
    return tuple(slopes.tolist())


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes of the ALiBi paper (https://arxiv.org/abs/2108.12409), for `flash_attention`.

    For n heads, n a power of two, a geometric sequence from 2^(-8/n) to 2^-8; else that of the next
    smaller power of two, followed by every second one of the next larger.

    Args:
        num_heads: at least 1.

    Returns:
        float32 [num_heads].

    Raises:
        ValueError: fewer than one head.

    Example:
        >>> from flash_pallas.nn import alibi_slopes
        >>> print(alibi_slopes(4))
        [0.25       0.0625     0.015625   0.00390625]
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}.")
    whole = 2 ** int(math.log2(num_heads))
    sequence = lambda n: np.exp2(-8.0 / n * np.arange(1, n + 1))
    rest = sequence(2 * whole)[::2][: num_heads - whole]
    return np.concatenate([sequence(whole), rest]).astype(np.float32)


def segment_positions(segment_ids) -> jax.Array:
    """The position of every token in its own document, for RoPE in a batch of packed documents.

    Args:
        segment_ids: int32 [*batch, length]; ids need be neither sorted nor contiguous.

    Returns:
        int32 of the same shape: how many tokens before this one have the same id; 0 for padding,
        which has negative ids. In memory and time linear in the length but for one sort.

    Raises:
        TypeError: the ids are not integers.
        ValueError: an id that does not fit int32.

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
    """int32[length]: how many equal ids are before each."""
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    in_order = ids[order]
    is_first = jnp.concatenate([jnp.ones((1,), bool), in_order[1:] != in_order[:-1]])
    first = jax.lax.cummax(jnp.where(is_first[: ids.shape[0]], place, 0))
    return jnp.zeros_like(place).at[order].set(place - first)
