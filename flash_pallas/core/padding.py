"""Queries and keys that are padding: beyond a length, or with a negative segment id.

A weight of 0 times a NaN is a NaN, so padding is replaced by 0 before a matmul sums over it. A
matmul that does not sum over it needs no such care: a NaN in Q or K stays in scores that are hidden
or discarded. `cleared` costs one copy of each array; kernels that clear tiles in shared memory need
`valid_queries` and `valid_keys` alone. Padding is made by `pad_axis`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .problem import Operands, Outputs
from .softmax import EMPTY_ROW


def cleared(operands: Operands, arrays: Operands | None = None) -> Operands:
    """Returns `arrays` (the operands, or their gradients) with 0 for padding in q, k, v."""
    arrays = operands if arrays is None else arrays
    keys = valid_keys(operands)
    return arrays._replace(
        q=cleared_queries(operands, arrays.q),
        k=_clear(keys, arrays.k),
        v=_clear(keys, arrays.v),
    )


def cleared_queries(operands: Operands, x):
    """Returns x [B, T, ...] with 0 in place of padding."""
    return _clear(valid_queries(operands), x)


def cleared_rows(operands: Operands, x):
    """Returns x [B, N, T] with 0 in place of padding."""
    valid = valid_queries(operands)
    return x if valid is None else jnp.where(valid[:, None], x, lax.full_like(x, 0))


def finite(operands: Operands, x):
    """Returns x [B, S, ...] with 0 in place of padding that is NaN or infinite."""
    valid = valid_keys(operands)
    return x if valid is None else jnp.where(jnp.isfinite(x), x, _clear(valid, x))


def valid_queries(operands: Operands):
    """Returns bool[B, T]: which queries are not padding; None without lengths and segment ids."""
    return _valid(operands.q, operands.q_lengths, operands.q_segments)


def queries_within(operands: Operands):
    """Returns bool[B, T]: which queries lie within q_lengths; None without lengths."""
    return _valid(operands.q, operands.q_lengths, None)


def valid_keys(operands: Operands):
    """Returns bool[B, S]: which keys are not padding; None without lengths and segment ids."""
    return _valid(operands.k, operands.kv_lengths, operands.kv_segments)


def discarded(operands: Operands, out: Outputs) -> Outputs:
    """Returns the outputs with queries beyond their length turned into rows without keys.

    Where each query has an interval of keys, theirs is empty, and O is 0 as it is.
    """
    valid = queries_within(operands)
    if valid is None:
        return out
    bounded = operands.q_first is not None or operands.q_last is not None
    per_row = lambda x, other: None if x is None else jnp.where(valid[:, None], x, other)
    return Outputs(
        o=out.o if bounded else _clear(valid, out.o),
        lse_log2=per_row(out.lse_log2, EMPTY_ROW),
        shift=per_row(out.shift, 0.0),
        max_logit=per_row(out.max_logit, -jnp.inf),
    )


def pad_axis(x, axis: int, size: int, value: float = 0):
    """Pads x to `size` along one axis; returns x itself if it already has that size."""
    if x.shape[axis] == size:
        return x
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=jnp.asarray(value, x.dtype))


def _valid(x, lengths, segments):
    """Returns bool[B, length]: what is not padding; None without lengths and segment ids."""
    valid = None if segments is None else segments >= 0
    if lengths is not None:
        length = (x if segments is None else segments).shape[1]  # a backend may have padded x
        within = jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]
        valid = within if valid is None else valid & within
    return valid


def _clear(valid, x):
    if valid is None:
        return x
    shape = valid.shape + (1,) * (x.ndim - 2)
    return jnp.where(valid.reshape(shape), x, lax.full_like(x, 0))
