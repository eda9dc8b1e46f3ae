"""Zigzag layout: the assignment of tokens to devices that balances causal work.

A sequence is cut into 2 P chunks, and device i of P has chunks i and 2 P - 1 - i: the early ones
see few keys and the late ones many, and together every device sees the same number.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ..core import mesh_axes
from ..typing import AnyArray, Array


def zigzag_positions(length: int, shards: int) -> np.ndarray:
    """Returns int32[length]: the position of every token of a sequence in zigzag layout.

    Args:
        length: length of the sequence, a multiple of 2 * shards.
        shards: number of devices that it is sharded over.

    Raises:
        ValueError: the length is no such multiple.

    Example:
        >>> from flash_pallas.parallel import zigzag_positions
        >>> print(zigzag_positions(8, 2))
        [0 1 6 7 2 3 4 5]
    """
    return _moved(np.arange(length, dtype=np.int32), _order(shards), 0, np)


def to_zigzag(x: AnyArray, shards: int, axis: int = 1) -> Array:
    """Permutes the sequence axis of x to zigzag layout.

    Args:
        x: an array with the tokens in order along `axis`.
        shards: number of devices that the axis is sharded over.
        axis: the sequence axis.

    Returns:
        An array of the same shape. Permute rotary positions in the same way, or take them from
        `zigzag_positions`.

    Raises:
        ValueError: the axis is not a multiple of 2 * shards long.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.parallel import to_zigzag
        >>> print(to_zigzag(jnp.arange(8)[None], shards=2))
        [[0 1 6 7 2 3 4 5]]
    """
    return _moved(x, _order(shards), axis)


def from_zigzag(x: AnyArray, shards: int, axis: int = 1) -> Array:
    """Puts the sequence axis of x in order again, which undoes `to_zigzag`.

    Args:
        x: an array in zigzag layout along `axis`.
        shards: number of devices that the axis is sharded over.
        axis: the sequence axis.

    Returns:
        An array of the same shape.

    Raises:
        ValueError: the axis is not a multiple of 2 * shards long.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.parallel import from_zigzag, to_zigzag
        >>> print(from_zigzag(to_zigzag(jnp.arange(8)[None], shards=2), shards=2))
        [[0 1 2 3 4 5 6 7]]
    """
    return _moved(x, np.argsort(_order(shards)), axis)


def names_of(axes) -> tuple[str, ...]:
    """Returns the names of mesh axes given as one name, several or None."""
    return () if axes is None else tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def local_positions(device, length: int, shards: int, zigzag: bool):
    """Returns int32[length]: the positions of one device's tokens.

    Args:
        device: its number, which may be traced.
        length: length of its part of the sequence; an even number in zigzag layout.
        shards: number of devices that the sequence is sharded over.
        zigzag: True for the zigzag layout; else every device has consecutive tokens.
    """
    index = jnp.arange(length, dtype=jnp.int32)
    if not zigzag:
        return device * length + index
    half = length // 2
    late = (2 * shards - 2 - device) * half  # less the half before it, which index counts too
    return jnp.where(index < half, device * half, late) + index


def _order(shards: int) -> np.ndarray:
    """Returns the numbers of the 2 * shards chunks in the order in which they lie."""
    first = np.arange(shards)
    return np.stack([first, 2 * shards - 1 - first], axis=1).reshape(-1)


def _moved(x, chunks: np.ndarray, axis: int, numpy=jnp):
    """Reorders the chunks of an axis of x; it takes few indices, however long the axis is."""
    axis = axis % x.ndim
    length, count = x.shape[axis], len(chunks)
    if length % count:
        raise ValueError(
            f"the length is {length}: the zigzag layout over {count // 2} devices wants a multiple "
            f"of {count}; pad the sequence, with segment ids of -1"
        )

    def moved(x):
        cut = x.reshape(*x.shape[:axis], count, length // count, *x.shape[axis + 1 :])
        return numpy.take(cut, chunks, axis=axis).reshape(x.shape)

    return mesh_axes.compiled_as_auto(moved, (x,), mesh_axes.spec_of(x))
