"""Static numbers among the arguments of `flash_attention`, checked."""

from __future__ import annotations

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import dropout

# Beyond these, scale / softcap and what is computed with it leave the range of float32.
MAX_SCALE, SOFTCAPS = 1e30, (1e-6, 1e30)


def scale(value, head_dim: int) -> float:
    """Checks the factor of the scores; None becomes 1 / sqrt(head_dim)."""
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    factor = _number("scale", value)
    if abs(factor) > MAX_SCALE:
        raise ValueError(f"scale is {value}: its magnitude must be at most {MAX_SCALE}")
    return factor


def softcap(value) -> float | None:
    """Checks the bound of the logits; None is no bound."""
    if value is None:
        return None
    cap = _number("softcap", value)
    if cap <= 0.0:
        raise ValueError(f"softcap must be finite and positive, got {value}; None is no cap")
    if not SOFTCAPS[0] <= cap <= SOFTCAPS[1]:
        raise ValueError(
            f"softcap is {value}: it must be in [{SOFTCAPS[0]}, {SOFTCAPS[1]}], because float32 "
            "loses scores divided by one that is larger; None is no cap"
        )
    return cap


def _number(name: str, value) -> float:
    if isinstance(value, jax.core.Tracer):
        way_out = "multiply q by it instead and pass scale=1.0, or " if name == "scale" else ""
        raise TypeError(
            f"{name} is traced, but it must be static: {way_out}list it in static_argnames"
        )
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    if not is_number or isinstance(value, bool) or np.ndim(value) or not np.isrealobj(value):
        raise TypeError(f"{name} must be a Python number or None, got {value!r}")
    if not math.isfinite(value):
        default = "None is 1 / sqrt(head_dim)" if name == "scale" else "None is no cap"
        raise ValueError(f"{name} must be finite, got {value}; {default}")
    return float(value)


INT32 = jnp.iinfo(jnp.int32)


def as_int32(name: str, value) -> jax.Array:
    """Converts an integer, or an array of any integer dtype, to an int32 array.

    Values out of range raise where they are known; where they are traced they are clipped, so that
    a length or an offset keeps its meaning.

    Args:
        name: name of the argument, for messages.
        value: an int, or a numpy or jax array.

    Raises:
        TypeError: neither an int nor an array of integers.
        ValueError: a known value that does not fit int32.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        _refuse_wide(f"{name} is", value)
        return jnp.asarray(value, jnp.int32)
    if not is_array(value) or isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{name} must be an integer or an array of integers, got {type(value).__name__}: "
            f"{value!r}"
        )
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{name} has dtype {value.dtype}: it must be int32; cast with {name}.astype(jnp.int32)"
        )
    own = jnp.iinfo(value.dtype)
    if INT32.min <= own.min and own.max <= INT32.max:
        return jnp.asarray(value).astype(jnp.int32)
    if is_known(value):
        host = known(value)
        if host.size:
            _refuse_wide(f"{name} contains", int(host.min()))
            _refuse_wide(f"{name} contains", int(host.max()))
        return jnp.asarray(host.astype(np.int32))
    value = jnp.asarray(value)
    low, high = (np.asarray(x, value.dtype) for x in (max(own.min, INT32.min), INT32.max))
    return lax.clamp(low, value, high).astype(jnp.int32)


def is_array(value) -> bool:
    """Returns True for an array, or for what has `__jax_array__`, as parameters of Flax do."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) or hasattr(value, "__jax_array__")


def is_known(value) -> bool:
    """Returns True if an array's values can be read: not traced, and all in this process."""
    if isinstance(value, jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def known(value) -> np.ndarray:
    """Returns the values of an array for which `is_known`; waits for a jax array to be computed."""
    return np.asarray(jax.device_get(value))


def _refuse_wide(what: str, value: int):
    if not INT32.min <= value <= INT32.max:
        raise ValueError(
            f"{what} {value}: integers must fit int32, from -2**31 to 2**31 - 1; number segment "
            "ids from 0, and clip lengths and positions to the arrays"
        )


def seed_words(seed) -> jax.Array:
    """Returns the uint32[words] of `dropout_seed`: the same for equal numbers of any type.

    Raises:
        TypeError: neither an integer, nor integers, nor a key.
        ValueError: an int of more than 64 bits, or no number at all.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer, np.ndarray, jax.Array)):
        raise TypeError(f"dropout_seed must be an int, an integer array or a key, got {seed!r}")
    if isinstance(seed, (jax.Array, np.ndarray)):
        is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        if not (is_key or jnp.issubdtype(seed.dtype, jnp.integer)):
            raise TypeError(
                f"dropout_seed has dtype {seed.dtype}: it must be an integer or a key of jax.random"
            )
        if not seed.size:
            raise ValueError(
                f"dropout_seed has shape {seed.shape} and no number in it: pass an int or a key"
            )
    elif not -(2**63) <= operator.index(seed) < 2**64:
        raise ValueError(f"dropout_seed is {seed}: it must fit 64 bits; pass a key of jax.random")
    return dropout.seed_words(seed)
