"""Which weights dropout keeps: a function of (seed, batch, head, query, key), stored nowhere.

Every backend, tile size and pass asks `keep` and so sees the same bits. A row key is a full hash of
(seed, batch entry, head, query position) and a column key one of the key position without bit 3.
The two halves of their product, folded by an exclusive or, are 32 bits: 15 from the low half for
the key whose bit 3 is 0, 15 from the high half for the one eight further on. In the register layout
of a warpgroup product one thread holds both, in either orientation, so a kernel multiplies once for
two weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LEVELS = 1 << 15  # rates are multiples of 1 / LEVELS; a kernel compares by carrying into bit 15
PAIR_BIT = 8  # positions that differ in this bit share one hash


def threshold(rate: float) -> int:
    """Weights whose 15 bits are below it are dropped."""
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
    """uint32 of each query, not 0: of its (batch entry, head) key and its position."""
    key = mix(mix(_uint32(q_pos)) ^ call_key)
    return lax.max(key, _like(key, 1))  # a row of zeros would lose all of its weights


def column_keys(kv_pos):
    """uint32 of each key: of its position without bit 3."""
    return mix(_uint32(lax.bitwise_and(kv_pos, jnp.int32(~PAIR_BIT))) ^ jnp.uint32(0x9E3779B9))


def pair_bits(rows, columns):
    """uint32: bits for the two keys that share a column key, from keys spread over the tile."""
    return high_product(rows, columns) ^ rows * columns


def high_product(a, b):
    """The upper half of the 64 bits of a * b, from products of 16 bits each."""
    low_mask, half = _like(a, 0xFFFF), _like(a, 16)
    a_low, a_high = a & low_mask, a >> half
    b_low, b_high = b & low_mask, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low_mask)
    return a_high * b_high + (middle >> half) + (other >> half)


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
    half = jnp.where(high, bits >> jnp.uint32(16), bits) & jnp.uint32(LEVELS - 1)
    return half >= jnp.uint32(threshold(rate))


def mix(x):
    """A bijection of uint32 in which every bit depends on every other.

    The constants are those of the `lowbias32` search by C. Wellons (2018, public domain).
    """
    x = _fold(x) * _like(x, 0x7FEB352D)
    x = lax.bitwise_xor(x, lax.shift_right_logical(x, _like(x, 15)))
    return _fold(x * _like(x, 0x846CA68B))


def _fold(x):
    return lax.bitwise_xor(x, lax.shift_right_logical(x, _like(x, 16)))


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
