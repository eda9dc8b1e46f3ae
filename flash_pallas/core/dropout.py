"""Which weights dropout keeps: a function of (seed, batch, head, query, key), stored nowhere.

Every backend, tile size and pass asks `keep` and so sees the same bits. A row key is a full hash of
(seed, batch entry, head, query position) and a column key one of the key position without bit 3;
their exclusive or, mixed once more, yields 32 bits: the low half for the key whose bit 3 is 0, the
high half for the one eight further on. In the register layout of a warpgroup product one thread
holds both, in either orientation, so a kernel mixes once for two weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LEVELS = 1 << 16  # rates are multiples of 1 / LEVELS
PAIR_BIT = 8  # positions that differ in this bit share one hash
FACTORS, SHIFT = (0x7FEB352D, 0x846CA68B), 15  # of `spread`


def threshold(rate: float) -> int:
    """Weights whose 16 bits are below it are dropped."""
    return min(round(rate * LEVELS), LEVELS - 1)


def gain(rate: float) -> float:
    """What kept weights are multiplied by: 1 / (the share that is really kept)."""
    return LEVELS / (LEVELS - threshold(rate))


def call_keys(seed, batch: int, heads: int):
    """uint32[batch, heads]: the seed of each (batch entry, head) of a call.

    Args:
        seed: uint32[words].
        batch: entries of the batch; 1 shares the mask between them all.
        heads: likewise.
    """
    state = jnp.uint32(0x243F6A88)
    for i in range(seed.shape[0]):
        state = mix(mix(state) ^ seed[i])
    entries, members = jnp.arange(batch, dtype=jnp.uint32), jnp.arange(heads, dtype=jnp.uint32)
    per_entry = mix(mix(state) ^ entries)
    return mix(mix(per_entry)[:, None] ^ members[None, :])


def row_keys(call_key, q_pos):
    """uint32 of each query: of its (batch entry, head) key and its position."""
    return mix(mix(_uint32(q_pos)) ^ call_key)


def column_keys(kv_pos):
    """uint32 of each key: of its position without bit 3."""
    return mix(_uint32(lax.bitwise_and(kv_pos, jnp.int32(~PAIR_BIT))) ^ jnp.uint32(0x9E3779B9))


def pair_bits(rows, columns):
    """32 bits for the two keys that share a column key, from keys spread over the tile."""
    return mix(rows ^ columns)


def keep(call_key, q_pos, kv_pos, rate: float):
    """True where the weight of query q_pos and key kv_pos is kept; all broadcast against another.

    Args:
        call_key: uint32, an element of `call_keys`.
        q_pos: int32, positions of queries (index plus query offset); of the rank of kv_pos.
        kv_pos: int32, positions of keys.
        rate: in [0, 1).
    """
    bits = pair_bits(row_keys(call_key, q_pos), column_keys(kv_pos))
    return kept(bits, kv_pos, rate)


def kept(bits, kv_pos, rate: float):
    """True where these of `pair_bits` keep the weight of the key at kv_pos."""
    high = lax.bitwise_and(kv_pos, jnp.int32(PAIR_BIT)) != 0
    half = jnp.where(high, bits >> jnp.uint32(16), bits & jnp.uint32(LEVELS - 1))
    return half >= jnp.uint32(threshold(rate))


def mix(x):
    """A bijection of uint32 in which every bit depends on every other.

    The constants are those of the `lowbias32` search by C. Wellons (2018, public domain).
    """
    return fold(spread(fold(x)))


def fold(x):
    """x with its high half put over its low half; fold(a ^ b) is fold(a) ^ fold(b)."""
    return lax.bitwise_xor(x, lax.shift_right_logical(x, _like(x, 16)))


def spread(x):
    """The part of `mix` between its two folds."""
    x = x * _like(x, FACTORS[0])
    x = lax.bitwise_xor(x, lax.shift_right_logical(x, _like(x, SHIFT)))
    return x * _like(x, FACTORS[1])


def _like(x, value: int):
    return lax.full_like(x, value)


def _uint32(x):
    return lax.convert_element_type(x, jnp.uint32)


def seed_words(seed) -> jax.Array:
    """uint32[words] of an int, an integer array or a PRNG key (typed or raw)."""
    if isinstance(seed, int):
        return jnp.asarray([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], jnp.uint32)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.dtype.itemsize > 4:
        seed = jnp.stack([seed, seed >> 32], axis=-1)
    return lax.convert_element_type(seed, jnp.uint32).reshape(-1)
