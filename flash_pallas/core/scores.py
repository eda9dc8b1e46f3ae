"""Logits from the product q @ k^T, and their derivative. One definition for every backend.

The order: scale, + bias, + ALiBi, softcap, score_mod; then `visible` and `Tile.limits` say what is
hidden, besides keys with a bias of -inf. Everything here is elementwise on one tile in either
orientation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from . import dropout
from .mask import Tile
from .mods import Mod
from .problem import AttentionSpec, Problem
from .softmax import LOG2E


class TileInputs(NamedTuple):
    """Inputs of the score modifiers at one tile; an absent one is None. Scalars are rank 0."""

    bias: Any = None  # of the tile's shape, in the dtype of the scores; with bias_look the array's
    bias_look: Any = None  # backends.gpu.score_tile.look, in kernels that may read a bias again
    mask: Any = None  # bool of the tile's shape
    q_segments: Any = None  # int32, one per query
    kv_segments: Any = None  # int32, one per key
    q_first: Any = None  # int32, one per query, as are the next two; see Operands
    q_last: Any = None
    q_positions: Any = None
    kv_positions: Any = None  # int32, one per key
    q_marks_0: Any = None  # int32, one per query; see Operands
    q_marks_1: Any = None
    kv_marks_0: Any = None  # int32, one per key
    kv_marks_1: Any = None
    slope: Any = None  # of ALiBi
    falls: Any = None  # what ALiBi adds, of the tile's shape, where rows have slopes of their own
    score_params: tuple = ()  # scalars
    mask_params: tuple = ()  # scalars
    dropout_key: Any = None  # uint32 scalar; or, in its place:
    q_keys: Any = None  # int32 or uint32, one per query: the bits of dropout.row_keys
    kv_keys: Any = None  # likewise, one per key: the bits of dropout.column_keys
    shift: Any = None  # backends.gpu.score_tile.row_shift, in kernels of the backward


# The inputs that have one int32 per query or per key, and those of them that hide keys. MARKS are
# the vectors of a mask_mod, in their order.
MARKS = ("q_marks_0", "q_marks_1"), ("kv_marks_0", "kv_marks_1")
VECTORS = (
    ("q_segments", "q_first", "q_last", "q_positions", *MARKS[0]),
    ("kv_segments", "kv_positions", *MARKS[1]),
)
HIDING = {"q_segments", "kv_segments", "q_first", "q_last"}


def vectors(problem: Problem, axis: int, *, hides: bool = True) -> tuple[str, ...]:
    """Returns the names of the vectors of queries (axis 0) or keys (1) that a tile reads.

    Args:
        problem: what is computed.
        axis: 0 for vectors of queries, 1 for those of keys.
        hides: False for a tile of which they hide nothing.
    """
    spec, asked = problem.spec, HIDING if hides else set()
    if hides and {"q_first", "q_last"} & problem.features:
        asked = asked | {"kv_positions"}
    if "alibi_slopes" in problem.features or spec.score_mod or spec.mask_mod:
        asked = asked | {"q_positions", "kv_positions"}
    if spec.mask_mod:
        asked = asked | set(marks(spec.mask_mod))
    asked = asked & problem.features
    return tuple([name for name in VECTORS[axis] if name in asked])


def marks(mod: Mod) -> tuple[str, ...]:
    """Returns the names of a mask_mod's vectors, in the order of its params."""
    taken = ([], [])
    names = []
    for side in mod.vectors:
        names.append(MARKS[side][len(taken[side])])
        taken[side].append(names[-1])
    return tuple(names)


class Logits(NamedTuple):
    """A tile of logits, kept unscaled so that exp2(x * log2_scale - m) is one multiply-add each.

    Attributes:
        x: unscaled logits; x * log2_scale are the logits in base 2.
        log2_scale: a Python float.
        pull: function of the gradient of the natural logits; returns (gradient of scale * qk, which
            is that of the bias too; what each element adds to the gradient of every score_param,
            None for integers). See `slope_pull`.
    """

    x: Any
    log2_scale: float
    pull: Callable


def logits(
    spec: AttentionSpec,
    tile: Tile,
    qk,
    inputs: TileInputs,
    *,
    hides: bool = True,
    relative: bool = False,
) -> Logits:
    """Computes the logits of a tile of products, before anything but a bias of -inf hides keys.

    A finite bias is a number like any other: the sum with it is rounded to float32 and not exact.

    Args:
        spec: what is computed.
        tile: place of the tile.
        qk: q @ k^T.
        inputs: inputs of score modifiers.
        hides: False if the caller hides keys with a bias of -inf behind a score_mod.
        relative: a bias is divided by the softcap before it is added, which costs nothing per
            element where rows or columns share it. Not below 1, relative to which the lowest
            float32 is infinite.
    """
    tile = placed(tile, inputs)
    x, scale, uncapped = qk, spec.scale, None
    cap = spec.softcap if relative and inputs.bias is not None else None
    unit = 1.0 if cap is None or cap < 1.0 else 1.0 / cap
    of_cap = lambda x: x if unit == 1.0 else x * unit
    if inputs.bias is not None or inputs.slope is not None or inputs.falls is not None:
        x, scale = x * of_cap(scale), 1.0
    if inputs.bias is not None:
        x = x + of_cap(inputs.bias)
    if inputs.falls is not None:
        x = x + of_cap(inputs.falls)
    if inputs.slope is not None:
        x = x + tile.distance(x.dtype) * _spread(tile, of_cap(-inputs.slope))
    if inputs.bias is not None and spec.score_modifiers and hides:
        uncapped = x  # softcap and score_mod would make a number of -inf
    pull = lambda d: (d, ())
    if spec.softcap is not None:
        x = tile.tanh(x if unit != 1.0 else x * (scale / spec.softcap))
        scale, pull = spec.softcap, _through_tanh(x)
    if not spec.score_modifiers - {"softcap"}:
        x = x if uncapped is None else tile.with_infinite(uncapped, x)
        return Logits(x, scale * LOG2E, pull)
    params = tuple(_spread(tile, p) for p in inputs.score_params)
    x = x if scale == 1.0 else x * scale
    score_mod = spec.score_mod
    if score_mod is not None:
        mod = lambda x, params: score_mod(tile, params, x)
        pull = _through_mod(functools.partial(_mod_pull, tile, mod, x, params), pull)
        x = tile.call(mod, x, params)
    if uncapped is not None:
        x = lax.select(uncapped == -math.inf, uncapped, x)
    return Logits(x, LOG2E, pull)


def _through_tanh(tanh):
    return lambda d: (d * (1.0 - tanh * tanh), ())


def _mod_pull(tile: Tile, mod, x, params, d):
    """Computes (gradient of the score, of each param or None for integers) when it is called."""

    def pull(x, params, d):
        dx, dparams = jax.vjp(mod, x, params)[1](d)
        return dx, tuple(None if p.dtype == jax.dtypes.float0 else p for p in dparams)

    return tile.call(pull, x, params, d)


def _through_mod(mod_pull, pull):
    def through(d):
        dx, dparams = mod_pull(d)
        return pull(dx)[0], dparams

    return through


def slope_pull(tile: Tile, dz):
    """Computes each element's part of the gradient of its head's ALiBi slope.

    dz is the gradient of scale * qk, and the tile is as `placed` returns it.
    """
    return -dz * tile.distance(dz.dtype)


def placed[T: Tile](tile: T, inputs: TileInputs) -> T:
    """Returns the tile with the positions that arrays give to its queries and keys."""
    if inputs.q_positions is None and inputs.kv_positions is None:
        return tile
    q_pos = None if inputs.q_positions is None else tile.per_q(inputs.q_positions)
    kv_pos = None if inputs.kv_positions is None else tile.per_kv(inputs.kv_positions)
    return dataclasses.replace(tile, positions=(q_pos, kv_pos))


def visible(spec: AttentionSpec, tile: Tile, inputs: TileInputs):
    """Returns a bool of the tile's shape: what arrays and mask_mod leave visible, or None.

    Static masks (causal, windows) and lengths are the business of `Tile.limits`.
    """
    tile, conditions = placed(tile, inputs), []
    if inputs.q_segments is not None:
        conditions.append(tile.per_q(inputs.q_segments) == tile.per_kv(inputs.kv_segments))
    if inputs.q_first is not None:
        conditions.append(tile.kv_pos >= tile.per_q(inputs.q_first))
    if inputs.q_last is not None:
        conditions.append(tile.kv_pos <= tile.per_q(inputs.q_last))
    if inputs.mask is not None:
        conditions.append(inputs.mask)
    mask_mod = spec.mask_mod
    if mask_mod is not None:
        params = tuple(_spread(tile, p) for p in inputs.mask_params)
        spread = tile.per_q, tile.per_kv
        sides_and_names = zip(mask_mod.vectors, marks(mask_mod), strict=True)
        params += tuple(spread[side](getattr(inputs, name)) for side, name in sides_and_names)
        conditions.append(tile.call(lambda p: mask_mod(tile, p), params))
    return functools.reduce(operator.and_, conditions) if conditions else None


def kept(spec: AttentionSpec, tile: Tile, inputs: TileInputs):
    """Returns a bool of the tile's shape: the dropout mask. Not called without dropout."""
    if inputs.q_keys is not None:
        return tile.kept(inputs.q_keys, inputs.kv_keys, spec.dropout_rate)
    return dropout.keep(inputs.dropout_key, tile.q_pos, tile.kv_pos, spec.dropout_rate)


def _spread(tile: Tile, scalar):
    return lax.broadcast_in_dim(scalar, tile.shape, ())
