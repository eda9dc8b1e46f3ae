"""Context parallelism in one move: keys go to all devices, or heads are exchanged between them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..api import flash_attention_with_lse
from .layout import from_zigzag, names_of, to_zigzag


def all_gather_attention(
    q, k, v, axis, shards: int, zigzag: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Computes (o, lse) of this device's queries and the gathered keys of all devices.

    The keys take the memory of the whole sequence. The gradients of k and v are summed by a
    reduce-scatter, the transpose of the all-gather.
    """
    length = q.shape[1]
    gather = lambda x: _ordered(lax.all_gather(x, axis, axis=1, tiled=True), shards, zigzag)
    k, v = gather(k), gather(v)
    of_keys = {name: options[name] for name in ("kv_segment_ids", "kv_positions")}
    of_keys = {name: None if x is None else gather(x) for name, x in of_keys.items()}
    q_ids, positions = options["q_segment_ids"], options["q_positions"]
    if positions is not None and options["dropout_rate"]:
        raise ValueError(
            "q_positions, kv_positions or a window that is data with dropout and "
            "strategy='all_gather': dropout counts places in the whole sequence, which positions "
            "replace here; take strategy='ring' or 'ulysses'"
        )
    me = lax.axis_index(axis)
    size = length // 2 if zigzag else length
    chunks = (me, 2 * shards - 1 - me) if zigzag else (me,)
    parts = []
    for number, chunk in enumerate(chunks):
        rows = slice(number * size, (number + 1) * size)
        arguments: dict[str, Any] = options | of_keys
        arguments["q_segment_ids"] = None if q_ids is None else q_ids[:, rows]
        if positions is None:
            arguments["q_offset"] = (chunk * size).astype(jnp.int32)
        else:
            arguments["q_positions"] = positions[:, rows]
        parts.append(flash_attention_with_lse(q[:, rows], k, v, **arguments))
    o, lse = zip(*parts, strict=True)
    return jnp.concatenate(o, axis=1), jnp.concatenate(lse, axis=2)


def ulysses_attention(
    q, k, v, axis, shards: int, zigzag: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Computes (o, lse) by all-to-all: each device has the whole sequence for some of the heads.

    DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509).

    Raises:
        ValueError: the heads cannot be divided between the devices.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % shards:
        raise ValueError(
            f"strategy is 'ulysses' and there are {heads} query heads for {shards} devices: they "
            "must be a multiple; take strategy='ring' or 'all_gather'"
        )
    repeats = shards // math.gcd(kv_heads, shards)
    k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
    to_heads = lambda x: _ordered(
        lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True), shards, zigzag
    )
    arguments = dict(options)
    for name in ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions"):
        if arguments[name] is not None:
            gathered = lax.all_gather(arguments[name], axis, axis=1, tiled=True)
            arguments[name] = _ordered(gathered, shards, zigzag)
    if arguments["sinks"] is not None:
        size = heads // shards
        arguments["sinks"] = lax.dynamic_slice_in_dim(
            arguments["sinks"], lax.axis_index(axis) * size, size
        )
    batch_axes, head_axes = arguments["shard_axes"] or (None, None)
    arguments["shard_axes"] = batch_axes, (*names_of(head_axes), *names_of(axis))
    o, lse = flash_attention_with_lse(to_heads(q), to_heads(k), to_heads(v), **arguments)
    to_sequence = lambda x, sequence, head: lax.all_to_all(
        _as_laid_out(x, shards, zigzag, sequence), axis, sequence, head, tiled=True
    )
    return to_sequence(o, 1, 2), to_sequence(lse, 2, 1)


def _ordered(x, shards: int, zigzag: bool):
    """Returns x [B, T, ...] of the whole sequence, in order."""
    return from_zigzag(x, shards) if zigzag else x


def _as_laid_out(x, shards: int, zigzag: bool, axis: int):
    """Returns x, whose sequence axis is in order, in the layout of the call."""
    return to_zigzag(x, shards, axis) if zigzag else x
