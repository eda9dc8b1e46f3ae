"""Gradients of the operands, in their shapes and dtypes, from sums of dS.

A kernel of each backend adds up dS; `axes` says over what:

    tile     batch entries and heads that share a bias: [parts * Bb, N1, T or more, S or more]
    columns  queries, for every key: [B, N, S or more]
    rows     keys, for every query: [B, N, T or more]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...core import scores
from ...core.problem import Operands, Problem
from . import auxiliary_arrays
from .register_tile import RegisterTile


def score_grads(
    problem: Problem, operands: Operands, wanted: frozenset[str], launch: Callable[..., tuple]
) -> dict[str, Any]:
    """Computes the gradients by name: those of core.problem.EXTRA_GRADS that are in `wanted`.

    The names are "bias", "alibi_slopes" and "score_params".

    Args:
        problem: what is computed.
        operands: of the call.
        wanted: names.
        launch: (axes, names) -> one sum for each name: "bias", "alibi_slopes" or the index of a
            score_param. Only "rows" has more than one. What it holds of queries and keys that do
            not exist is not looked at; of keys beyond a length it is 0.
    """
    grads, by_row = {}, []
    if "bias" in wanted:
        kind = auxiliary_arrays.kind(problem.bias_shape, q_axis=0)
        if kind == "tile":
            grads["bias"] = _of_tiles(problem, launch("tile", ("bias",))[0])
        elif kind == "columns":
            found = launch("columns", ("bias",))[0]
            grads["bias"] = _shared(problem, found[:, :, None, : problem.kv_len])
        else:
            by_row.append("bias")
    if "alibi_slopes" in wanted:
        by_row.append("alibi_slopes")
    params = operands.score_params if "score_params" in wanted else ()
    floats = [i for i, x in enumerate(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    if by_row or floats:
        names = (*by_row, *floats)
        found = dict(zip(names, launch("rows", names), strict=True))
        found = {name: x[:, :, : problem.q_len] for name, x in found.items()}
        if "bias" in found:
            grads["bias"] = _shared(problem, found["bias"][..., None])
        if "alibi_slopes" in found:
            grads["alibi_slopes"] = found["alibi_slopes"].sum(axis=2)
        of_head = lambda i, x: found[i].sum(axis=2).astype(x.dtype) if i in found else None
        grads["score_params"] = tuple(of_head(i, x) for i, x in enumerate(params))
    return grads


def term(name, tile: RegisterTile, dz, dparams):
    """Returns what each element of a tile adds to the gradient of `name` (per head, query, key).

    Args:
        name: as in `launch` of `score_grads`.
        tile: position of the tile.
        dz: the gradient of scale * q @ k^T.
        dparams: gradients of score_params as `pull` of core.scores.Logits returns them.
    """
    if name == "bias":
        return dz
    return scores.slope_pull(tile, dz) if name == "alibi_slopes" else dparams[name]


def _of_tiles(problem: Problem, found):
    """Returns the bias's gradient from one array, or from several that are to be added up."""
    entries, _, q_len, kv_len = problem.bias_shape
    found = found[:, :, :q_len, :kv_len]
    if found.shape[0] > entries:
        found = found.reshape(-1, *problem.bias_shape).sum(axis=0)
    return found.astype(problem.bias_dtype)


def _shared(problem: Problem, found):
    """Sums [B, N, T, 1] or [B, N, 1, S] over all that share one element of the bias."""
    entries, heads = problem.bias_shape[:2]
    found = found.reshape(entries, problem.batch // entries, heads, -1, *found.shape[2:])
    found = found.sum(axis=(1, 3))
    axes = tuple(axis for axis in (2, 3) if problem.bias_shape[axis] == 1)
    return found.sum(axis=axes, keepdims=True).astype(problem.bias_dtype)
