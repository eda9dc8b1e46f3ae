"""Inputs of score modifiers, besides Q, K and V, as they lie in device memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...core import dropout, scores
from ...core.integers import round_up
from ...core.padding import pad_axis
from ...core.problem import EXTRA_GRADS, Operands, Problem
from ...core.scores import TileInputs

LONGEST_TILE = 256  # rows or columns of any kernel's tile, at most
# Vectors beyond the last query or key. Kernels mask keys there by the length; rows do not count.
PADDING = dict.fromkeys(scores.VECTORS[0] + scores.VECTORS[1], 0) | {
    "q_segments": -1,
    "kv_segments": -2,
}
MASK_DTYPE = jnp.bfloat16  # of a mask in shared memory: 1 is visible


class AuxiliaryGmem(NamedTuple):
    """Device memory; None where the call has no such input."""

    kv_lengths: Any = None  # int32[B]
    row_vectors: tuple = ()  # int32[B, rows] each, as scores.vectors names them
    column_vectors: tuple = ()  # int32[B, columns] each, likewise
    bias: Any = None  # [Bb, N1, T, S], or f32[Bb, N1, T or S or 1] unless a tile
    mask: Any = None  # likewise, a tile is of MASK_DTYPE
    slopes: Any = None  # f32[B, N]
    sinks: Any = None  # f32[B, N], natural
    dropout_keys: Any = None  # int32[B, N], the bits of uint32
    row_keys: Any = None  # int32[B, N, rows], or [1, 1, rows] where rows are keys; of dropout
    column_keys: Any = None  # likewise of columns
    score_params: tuple = ()  # [B, N] each
    mask_params: tuple = ()  # [B, N] each
    # In the backward, where the log-sum-exp of a row may have a shift.
    shift: Any = None  # f32[B * N * rows]
    # int32[B, K]: 0, or where it is not 0 for some query of a head of the group, 1 + the place of
    # the group's first.
    far: Any = None
    any_far: Any = None  # int32[1], the largest of far, where a launch asks for it


def gmem(problem: Problem, q_axis: int, operands: Operands) -> AuxiliaryGmem:
    """Returns the operands as a kernel reads them whose rows are queries (q_axis 0) or keys (1)."""
    vectors = [_vectors(problem, axis, operands) for axis in (0, 1)]
    rows, columns = vectors[:: -1 if q_axis else 1]
    row_keys, column_keys = _dropout_keys(problem, q_axis, operands)
    keys = operands.dropout_keys
    return AuxiliaryGmem(
        kv_lengths=operands.kv_lengths,
        row_vectors=rows,
        column_vectors=columns,
        bias=None if operands.bias is None else _prepared(operands.bias),
        mask=None if operands.mask is None else _prepared(operands.mask.astype(MASK_DTYPE)),
        slopes=operands.alibi_slopes,
        sinks=operands.sinks,
        dropout_keys=None if keys is None else lax.bitcast_convert_type(keys, jnp.int32),
        row_keys=row_keys,
        column_keys=column_keys,
        score_params=operands.score_params,
        mask_params=operands.mask_params,
    )


# --- Tangents of these inputs, which a kernel reads as it does the inputs of another call ---------


def moves_of(tangents: Operands) -> frozenset[str]:
    """Returns the names of the inputs that have tangents, but the sinks: they move no score."""
    return frozenset(name for name in EXTRA_GRADS if jax.tree.leaves(getattr(tangents, name)))


def of_tangents(problem: Problem, moves: frozenset[str]) -> Problem:
    """Returns the problem whose inputs are the tangents of `moves`, and no others."""
    shape, dtype = problem.bias_shape, problem.bias_dtype
    if "bias" not in moves:
        shape = dtype = None
    return dataclasses.replace(
        problem, features=moves, bias_shape=shape, bias_dtype=dtype, mask_shape=None
    )


def only(tangents: Operands, moves: frozenset[str]) -> Operands:
    """Returns the tangents of `moves` as operands of a call that has no others."""
    none = tangents._replace(**dict.fromkeys(Operands._fields))
    kept = {name: getattr(tangents, name) for name in moves}
    return none._replace(score_params=(), mask_params=())._replace(**kept)


def with_shift(arrays: AuxiliaryGmem, shift, kv_heads: int) -> AuxiliaryGmem:
    """Returns `arrays` with the shift of the log-sum-exp, f32[B, N, rows], or None.

    A kernel that knows `far` of a group of heads knows whether any of its rows is shifted and where
    these rows lie: one register, where the indices of entry and head would take two.
    """
    if shift is None:
        return arrays
    batch, heads, rows = shift.shape
    per_group = heads // kv_heads * rows
    first = jnp.arange(batch * kv_heads, dtype=jnp.int32).reshape(batch, kv_heads, 1) * per_group
    # In these words it is one reduction, and nothing after it: one launch.
    some = shift.reshape(batch, kv_heads, per_group) != 0.0
    far = jnp.max(jnp.where(some, first + 1, 0), axis=2)
    return arrays._replace(shift=shift.reshape(-1), far=far)


def kind(shape, q_axis: int) -> str | None:
    """Classifies a bias or mask by its shape: "scalar", "rows", "columns" or "tile"; None for None.

    It says what a tile of scores reads of it whose rows are queries (q_axis 0) or keys (1).
    """
    if shape is None:
        return None
    row_axis = 2 + q_axis
    many_rows, many_columns = shape[row_axis] > 1, shape[5 - row_axis] > 1
    if many_columns:
        return "tile" if many_rows else "columns"
    return "rows" if many_rows else "scalar"


def entry(problem: Problem, shape, batch, head):
    """Returns (batch entry, head) of a bias or mask that may be shared between several."""
    repeat = problem.batch // shape[0]
    shared_entry = lax.div(batch, jnp.int32(repeat)) if shape[0] > 1 else 0
    return shared_entry, head if shape[1] > 1 else 0


def scalars(arrays: AuxiliaryGmem, batch, head) -> TileInputs:
    """Loads the inputs of a tile that are one number for each batch entry and head."""
    scalar = lambda x: None if x is None else x[batch, head]
    keys = scalar(arrays.dropout_keys)
    return TileInputs(
        slope=scalar(arrays.slopes),
        score_params=tuple(map(scalar, arrays.score_params)),
        mask_params=tuple(map(scalar, arrays.mask_params)),
        dropout_key=None if keys is None else lax.convert_element_type(keys, jnp.uint32),
    )


def _dropout_keys(problem: Problem, q_axis: int, operands: Operands):
    """Returns (keys of rows, keys of columns), hashed once here instead of in every tile."""
    if operands.dropout_keys is None:
        return None, None
    calls, (q_places, kv_places) = operands.dropout_keys[..., None], _places(problem, operands)
    q_keys, kv_keys = dropout.row_keys(calls, q_places), dropout.column_keys(kv_places)
    as_int32 = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return tuple(map(as_int32, (q_keys, kv_keys)[:: -1 if q_axis else 1]))


def _places(problem: Problem, operands: Operands):
    """Returns dropout's positions: of queries [B or 1, 1, T] and of keys [1, 1, S], padded."""
    if operands.q_places is not None:
        pad = lambda x: pad_axis(x, 1, within_reach(x.shape[1]))[:, None]
        return pad(operands.q_places), pad(operands.kv_places[:1])
    offset = problem.spec.q_offset
    if operands.q_offset is not None:
        offset = operands.q_offset[:, None, None]
    index = lambda length: jnp.arange(within_reach(length), dtype=jnp.int32)[None, None]
    return index(problem.q_len) + offset, index(problem.kv_len)


def _prepared(x):
    """Prepares a bias or mask: a tile as TMA wants it (rows of 128 bytes), else a vector of f32."""
    _, _, q_len, kv_len = x.shape
    if q_len > 1 and kv_len > 1:
        x = pad_axis(x, 2, round_up(q_len, 8))
        return pad_axis(x, 3, round_up(kv_len, 128 // x.dtype.itemsize))
    x = x.astype(jnp.float32).reshape(*x.shape[:2], -1)
    return x if q_len == kv_len else pad_axis(x, 2, within_reach(x.shape[2]))


def _vectors(problem: Problem, axis: int, operands: Operands) -> tuple:
    """Returns the vectors of queries (axis 0) or keys (1), padded so that none is seen there."""
    arrays = ((name, getattr(operands, name)) for name in scores.vectors(problem, axis))
    return tuple(pad_axis(x, 1, within_reach(x.shape[1]), PADDING[name]) for name, x in arrays)


def within_reach(length: int) -> int:
    """Returns a padded length that no tile reaches past, if it starts inside the array."""
    return round_up(length - 1 + LONGEST_TILE, 128)
