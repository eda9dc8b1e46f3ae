"""Drafts: new tokens of which each sees those that a mask names, as in a tree of proposals.

Drafts follow each other in the cache whatever their places in the tree are. The depth of one, the
number of other drafts that it sees, says where it would stand in the sequence: in a tree these are
its ancestors, and siblings have one position.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

WORD_BITS = 32


def depths(mask):
    """Returns int32[B, T], the number of other drafts that each draft sees, from bool[B, T, T].

    Whether a draft sees itself changes nothing.
    """
    others = ~jnp.eye(mask.shape[-1], dtype=bool)[None]
    return jnp.sum(mask & others, axis=-1, dtype=jnp.int32)


def in_window(mask, left):
    """Returns bool[B, T, T]: the mask without drafts that lie before the window of a query.

    Args:
        mask: bool[B, T, T], True where query t sees draft u.
        left: positions before its own that a query sees, an int or int32[B]; None is all.
    """
    if left is None:
        return mask
    depth = depths(mask)
    distance = depth[:, :, None] - depth[:, None]
    return mask & (distance <= jnp.reshape(jnp.asarray(left, jnp.int32), (-1, 1, 1)))


def words(mask):
    """Packs bool[B, T, T] into int32[B, words, T]: bit u % 32 of word u // 32 of query t."""
    batch, tokens, _ = mask.shape
    number = -(-tokens // WORD_BITS)
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, number * WORD_BITS - tokens)))
    bits = bits.reshape(batch, tokens, number, WORD_BITS).astype(jnp.uint32)
    places = jnp.arange(WORD_BITS, dtype=jnp.uint32).reshape(1, 1, 1, -1)
    packed = jnp.sum(bits << places, axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32).swapaxes(1, 2)
