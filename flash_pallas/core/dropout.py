"""Dropout mask as a function of (seed, batch, head, query, key), stored nowhere.

Every backend, tile size and pass asks `keep` and so sees the same bits. A row key is a full hash of
(seed, batch entry, head, query position) and a column key one of the key position; both are odd.
Bits 16 to 30 of their product modulo 2**32 decide: one multiplication per weight, and the product
with an odd number is a bijection. Neighbouring keys 2n and 2n + 1 share a hash, times `TWIN` for
the second: a kernel needs half of the column keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LEVELS = 1 << 15  # rates are multiples of 1 / LEVELS
FIELD = 16  # the lowest of the 15 bits of a product that are compared
TWIN = 2891336453  # a multiplier of L'Ecuyer (1999, table 4), good modulo 2**32


def threshold(rate: float) -> int:
    """Returns the threshold of a dropout rate: weights whose 15 bits are below it are dropped."""
    return min(round(rate * LEVELS), LEVELS - 1)


def gain(rate: float) -> float:
    """Returns the factor that scales kept weights: 1 / (the share that is really kept)."""
    return LEVELS / (LEVELS - threshold(rate))


def call_keys(seed, batch: int, heads: int, first=(0, 0)):
    """Returns uint32[batch, heads]: the seed of each (batch entry, head) of a call.

    Args:
        seed: uint32[words].
        batch: number of batch entries; 1 shares the mask between them all.
        heads: number of heads; 1 shares the mask between them all.
        first: numbers of the first entry and of the first head, int or int32.
    """
    state = jnp.uint32(0x243F6A88)
    for i in range(seed.shape[0]):
        state = mix(mix(state) ^ seed[i])
    count = lambda size, start: jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(start, jnp.uint32)
    entries, members = count(batch, first[0]), count(heads, first[1])
    per_entry = mix(mix(state) ^ entries)
    return mix(mix(per_entry)[:, None] ^ members[None, :])


def row_keys(call_key, q_pos):
    """Returns an odd uint32 per query, hashed from its (batch entry, head) key and its position."""
    key = mix(mix(_uint32(q_pos)) ^ call_key)
    return key | _like(key, 1)


def column_keys(kv_pos):
    """Returns an odd uint32 per key, hashed from its position."""
    pos = _uint32(kv_pos)
    one = _like(pos, 1)
    key = mix((pos >> one) ^ _like(pos, 0x9E3779B9)) | one
    return jnp.where((pos & one) == 0, key, key * _like(key, TWIN))


def keep(call_key, q_pos, kv_pos, rate: float):
    """Returns True where the weight of query q_pos and key kv_pos is kept; the arguments broadcast.

    Args:
        call_key: uint32, an element of `call_keys`.
        q_pos: int32, positions of queries (index plus query offset); of the rank of kv_pos.
        kv_pos: int32, positions of keys.
        rate: dropout rate in [0, 1).
    """
    return kept(row_keys(call_key, q_pos) * column_keys(kv_pos), rate)


def kept(products, rate: float):
    """Returns True where the product (uint32) of a row key and a column key keeps the weight."""
    field = products >> _like(products, FIELD) & _like(products, LEVELS - 1)
    return field >= _like(products, threshold(rate))


def mix(x):
    """Computes a bijection of uint32 in which every bit depends on every other.

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
    """Returns the uint32[words] of a seed; equal numbers give equal words, whatever their type.

    Args:
        seed: an int or an integer scalar of any dtype, which make two words, the low half and the
            sign-extended high half of 64 bits; or an array of integers or a PRNG key (typed or
            raw), which make one word for each element.
    """
    if isinstance(seed, (int, np.integer)):
        seed = np.asarray(int(seed) & 0xFFFFFFFFFFFFFFFF, np.uint64)
    elif jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    low, high = _halves(seed)
    if not low.ndim:
        return jnp.asarray(np.stack([low, high]) if isinstance(low, np.ndarray) else [low, high])
    # Nothing is added to numbers of 32 bits: their high half is their sign, and mix(0) is 0.
    low, high = jnp.asarray(low), jnp.asarray(high)
    sign = lax.bitwise_not(high >> _like(high, 31)) + _like(high, 1)
    return (low ^ mix(high ^ sign)).reshape(-1)


def _halves(x):
    """Returns (low, high) uint32 halves of integers in 64-bit two's complement.

    They are numpy arrays if x is one.
    """
    if isinstance(x, np.ndarray):  # jnp would cut off the high half without jax_enable_x64
        wide = x.astype(np.uint64)
        return wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)
    if x.dtype.itemsize < 4:
        x = lax.convert_element_type(x, jnp.int32)
    if x.dtype.itemsize > 4:
        return _uint32(x), _uint32(lax.shift_right_logical(x, _like(x, 32)))
    signed = lax.bitcast_convert_type(x, jnp.int32)
    sign = lax.shift_right_arithmetic(signed, _like(signed, 31))
    return _uint32(x), _like(_uint32(x), 0) if x.dtype == jnp.uint32 else _uint32(sign)
