"""From sums of dS to gradients of the operands, in their shapes and dtypes."""

from __future__ import annotations

import jax.numpy as jnp

from ...core.problem import Operands, Problem
from .arrays import BackwardArrays
from .backward_scores import score_sums
from .side_inputs import SideInputs


def score_grads(
    problem: Problem,
    operands: Operands,
    arrays: BackwardArrays,
    wanted: frozenset[str],
    producer: bool,
    interpret: bool,
):
    """{"bias", "alibi_slopes", "score_params"} of those of core.problem.EXTRA_GRADS in `wanted`."""
    launch = lambda *sums: score_sums(problem, sums, operands, arrays, producer, interpret)
    grads, by_row = {}, []
    if "bias" in wanted:
        kind = SideInputs(problem, q_axis=0).kind(problem.bias_shape)
        if kind == "tile":
            grads["bias"] = _of_tiles(problem, launch("tile", ("bias",))[0])
        elif kind == "columns":
            found = launch("columns", ("bias",))[0].sum(axis=2)
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
        if "bias" in found:
            grads["bias"] = _shared(problem, found["bias"][:, :, : problem.q_len, None])
        if "alibi_slopes" in found:
            grads["alibi_slopes"] = found["alibi_slopes"].sum(axis=2)
        of_head = lambda i, x: found[i].sum(axis=2).astype(x.dtype) if i in found else None
        grads["score_params"] = tuple(of_head(i, x) for i, x in enumerate(params))
    return grads


def _of_tiles(problem: Problem, found):
    """The bias's gradient from one array, or from several that are to be added up."""
    entries, _, q_len, kv_len = problem.bias_shape
    found = found[:, :, :q_len, :kv_len]
    if found.shape[0] > entries:
        found = found.reshape(-1, *problem.bias_shape).sum(axis=0)
    return found.astype(problem.bias_dtype)


def _shared(problem: Problem, found):
    """[B, N, T, 1] or [B, N, 1, S] summed over what shares one element of the bias."""
    entries, heads = problem.bias_shape[:2]
    found = found.reshape(entries, problem.batch // entries, heads, -1, *found.shape[2:])
    found = found.sum(axis=(1, 3))
    axes = tuple(axis for axis in (2, 3) if problem.bias_shape[axis] == 1)
    return found.sum(axis=axes, keepdims=True).astype(problem.bias_dtype)
