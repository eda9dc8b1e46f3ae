"""Suggestions of errors and warnings where an argument looks like a known mistake."""

from __future__ import annotations

import itertools
import os
import warnings

MANY_HEADS = 256  # more than any model of note has


def missing_axes(name: str, shape, full) -> str:
    """Returns the ways in which axes of 1 make a mask or bias fit, as the end of a message.

    Args:
        name: name of the argument.
        shape: shape of the array that does not fit; a layer has put axes of 1 in front.
        full: [*batch, heads, q_length, kv_length].
    """
    few = tuple(shape)
    if len(few) == len(full):
        few = few[next((i for i, n in enumerate(few) if n > 1), len(few)) :]
    labels = (*["batch"] * (len(full) - 3), "heads", "q_length", "kv_length")
    ways = []
    for before in itertools.combinations(range(len(full) - 1), max(len(few) - 1, 0)):
        places = (*before, len(full) - 1)  # what hides nothing by keys is no mask
        fits = len(few) == len(places) < len(full) and all(
            n in (1, full[i]) for n, i in zip(few, places, strict=True)
        )
        if fits:
            index = ", ".join(":" if i in places else "None" for i in range(len(full)))
            ways.append(f"{name}[{index}] if it is [{', '.join(labels[i] for i in places)}]")
    return f"; add axes, as in {' or '.join(ways[:3])}" if ways else ""


def one_causal_query(kv_len: int) -> str:
    """Returns the message for a decoding step written for another alignment of causal masks."""
    return (
        f"q has one query, k {kv_len} keys, and causal=True (or window=(.., 0)) without q_offset "
        "puts the query at position 0, where it sees key 0 alone: pass "
        f"q_offset={kv_len - 1} if it is the last token, or q_offset=0 if it is meant to be the "
        "first; for a cache call flash_decode, or a layer with cache="
    )


def warn_of_swapped_axes(q, k) -> None:
    """Warns if [length, heads, head_dim] of q and k look like PyTorch's [heads, length, dim]."""
    (q_len, q_heads, _), (kv_len, kv_heads, _) = q, k
    if q_heads == kv_heads > max(MANY_HEADS, 4 * q_len, 4 * kv_len):
        warnings.warn(
            f"q has {q_heads} heads and length {q_len}: the layout is [*batch, length, heads, "
            "head_dim]. If the arrays are [batch, heads, length, head_dim], as in PyTorch, pass "
            "jnp.swapaxes(x, -3, -2) of each",
            UserWarning,
            skip_file_prefixes=(os.path.dirname(os.path.dirname(__file__)),),
        )
