"""Zigzag layout: the assignment of tokens to devices that balances causal work.

A sequence is cut into 2 P chunks, and device i of P has chunks i and 2 P - 1 - i. Early chunks see
few keys and late chunks see many, so both together see the same number on every device.
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
        shards: number of devices over which it is sharded.

    Raises:
        ValueError: the length is not such a multiple.

    Example:
        >>> from flash_pallas.parallel import zigzag_positions
        >>> print(zigzag_positions(8, 2))
        [0 1 6 7 2 3 4 5]
    """
    return _moved(np.arange(length, dtype=np.int32), _order(shards), 0, np)


def to_zigzag(x: AnyArray, shards: int, axis: int = 1) -> Array:
    """Permutes the sequence axis of x to zigzag layout.

    Args:
        x: an array whose tokens are in order along `axis`.
        shards: number of devices over which the axis is sharded.
        axis: the sequence axis.

    Returns:
        An array of the same shape. Permute rotary positions in the same way, or take them from
        `zigzag_positions`.

    Raises:
        ValueError: the length of the axis is not a multiple of 2 * shards.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.parallel import to_zigzag
        >>> print(to_zigzag(jnp.arange(8)[None], shards=2))
        [[0 1 6 7 2 3 4 5]]
    """
    return _moved(x, _order(shards), axis)


def from_zigzag(x: AnyArray, shards: int, axis: int = 1) -> Array:
    """Restores the order of the sequence axis of x, which undoes `to_zigzag`.

    Args:
        x: an array in zigzag layout along `axis`.
        shards: number of devices over which the axis is sharded.
        axis: the sequence axis.

    Returns:
        An array of the same shape.

    Raises:
        ValueError: the length of the axis is not a multiple of 2 * shards.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.parallel import from_zigzag, to_zigzag
        >>> print(from_zigzag(to_zigzag(jnp.arange(8)[None], shards=2), shards=2))
        [[0 1 2 3 4 5 6 7]]
    """
    return _moved(x, np.argsort(_order(shards)), axis)


def names_of(axes) -> tuple[str, ...]:
    """Returns the names of mesh axes that are given as one name, several names or None."""
    return () if axes is None else tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def local_positions(device, length: int, shards: int, zigzag: bool):
    """Returns int32[length]: the positions of one device's tokens.

    Args:
        device: index of the device, which may be traced.
        length: length of its part of the sequence; an even number in zigzag layout.
        shards: number of devices over which the sequence is sharded.
        zigzag: True for the zigzag layout. Otherwise every device has consecutive tokens.
    """
    index = jnp.arange(length, dtype=jnp.int32)
    if not zigzag:
        return device * length + index
    half = length // 2
    late = (2 * shards - 2 - device) * half  # less the half before it, which index counts too
    return jnp.where(index < half, device * half, late) + index


def _order(shards: int) -> np.ndarray:
    """Returns the indices of the 2 * shards chunks in the order in which they are stored."""
    first = np.arange(shards)
    return np.stack([first, 2 * shards - 1 - first], axis=1).reshape(-1)


def _moved(x, chunks: np.ndarray, axis: int, numpy=jnp):
    """Reorders the chunks of an axis of x with few indices, however long the axis is."""
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
