"""Dense attention in numpy and float64, with its gradients, which shares no code with `core`.

Every function takes complex arrays too, of which the imaginary part is STEP times a tangent: the
imaginary part of a result is then STEP times its tangent (complex-step differentiation), so that
the same lines say what tangents and Hessian-vector products are.

`rounded` stands for what any implementation in a small dtype rounds: weights, their gradients and
results. With it the same lines tell how large an error has to be expected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

STEP = 2.0**-60  # a square of it is nothing next to 1 in float64
MOD_STRENGTH = 0.1  # of `score_mod`


def exactly(x):
    """Returns x: nothing is rounded."""
    return x


def to(dtype: str, *, in_parts: bool = False) -> Callable:
    """Returns the function that rounds to a dtype; `in_parts` to a sum of two bfloat16 numbers."""
    half = np.dtype(ml_dtypes.bfloat16)
    kind = half if in_parts or dtype == "bfloat16" else np.dtype(dtype)

    def rounded(x):
        if np.iscomplexobj(x):
            return rounded(x.real) + 1j * STEP * rounded(x.imag / STEP)
        high = x.astype(kind).astype(np.float64)
        return high + (x - high).astype(half).astype(np.float64) if in_parts else high

    return rounded


@dataclasses.dataclass(frozen=True)
class Dense:
    """Record of what a call computes, without its arrays of floats.

    Attributes:
        scale: multiplies q @ k^T.
        visible: bool[B, N, T, S].
        rows: bool[B, 1, T], the queries that there are; of others nothing comes, not of a sink.
        positions: int[B, T] of queries and int[B, S] of keys.
        softcap: as in `flash_attention`.
        kept: float[B, N, T, S], 0 where dropout drops a weight and the gain elsewhere; None: 1.
    """

    scale: float
    visible: np.ndarray
    rows: np.ndarray
    positions: tuple[np.ndarray, np.ndarray]
    softcap: float | None = None
    kept: np.ndarray | None = None

    @property
    def distance(self) -> np.ndarray:
        """Distances of queries and keys, float[B, 1, T, S]."""
        i, j = self.positions
        return np.abs(i[:, None, :, None] - j[:, None, None]).astype(np.float64)

    @property
    def pattern(self) -> np.ndarray:
        """Factor of the term that `score_mod` adds, float[B, 1, T, S]."""
        i, j = self.positions
        return MOD_STRENGTH * ((i[:, None, :, None] + j[:, None, None]) % 3)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Softmax of one call, with what its gradient needs.

    Attributes:
        p: weights before dropout [B, N, T, S].
        of_sinks: weights of the sinks [B, N, T].
        lse: log-sum-exp [B, N, T]; -inf for a query without keys.
        capped: scores after the softcap [B, N, T, S].
    """

    p: Any
    of_sinks: Any
    lse: Any
    capped: Any


Arrays = Mapping[str, Any]


def softmax(call: Dense, x: Arrays) -> Weights:
    """Computes the weights of all keys."""
    group = x["q"].shape[2] // x["k"].shape[2]
    s = call.scale * np.einsum("btnh,bsnh->bnts", x["q"], np.repeat(x["k"], group, 2))
    s = np.where(call.visible, s, 0.0)
    if "bias" in x:
        s = s + np.where(call.visible, x["bias"], 0.0)
    if "alibi_slopes" in x:
        s = s - x["alibi_slopes"][:, None, None] * call.distance
    if call.softcap is not None:
        s = call.softcap * np.tanh(s / call.softcap)
    capped = s
    if "strength" in x:
        s = s + x["strength"][:, None, None] * call.pattern * s * s
    largest = np.where(call.visible, s.real, -np.inf).max(-1)
    sinks = x["sinks"][None, :, None] if "sinks" in x else np.full((1, 1, 1), -np.inf)
    largest = np.maximum(largest, sinks.real)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    p = np.where(call.visible, np.exp(s - largest[..., None]), 0.0)
    of_sinks = np.where(call.rows, np.exp(sinks - largest), 0.0)
    total = p.sum(-1) + of_sinks
    empty = total == 0.0
    total = np.where(empty, 1.0, total)
    lse = np.where(empty, -np.inf, largest + np.log(total))
    return Weights(p / total[..., None], of_sinks / total, lse, capped)


def outputs(call: Dense, x: Arrays, rounded: Callable = exactly) -> dict[str, Any]:
    """Computes o [B, T, N, Hv] and lse [B, N, T]."""
    attention = softmax(call, x)
    weights = attention.p if call.kept is None else attention.p * call.kept
    group = x["q"].shape[2] // x["v"].shape[2]
    o = np.einsum(
        "bnts,bsnh->btnh", _operand(weights, attention.lse, rounded), np.repeat(x["v"], group, 2)
    )
    return {"o": rounded(o), "lse": attention.lse}


def _operand(weights, lse, rounded: Callable):
    """Rounds weights before they multiply V.

    The tangent of a weight is P * (dS - mu), where mu is that of the log-sum-exp, known only after
    the last key. So it is P * dS that is rounded and multiplied; mu * O is subtracted from the sum.
    """
    if not np.iscomplexobj(weights):
        return rounded(weights)
    less = weights.real * (lse.imag / STEP)[..., None]
    moved = rounded(weights.imag / STEP + less) - less
    return rounded(weights.real) + 1j * STEP * moved


def gradients(
    call: Dense, x: Arrays, rounded: Callable = exactly, *, by_row: bool = False
) -> dict[str, Any]:
    """Computes the gradients of all arrays from the cotangents x["do"] and x["dlse"].

    With `by_row` those of arrays of numbers of heads are the terms of their sums, [B, N, T].
    """
    attention = softmax(call, x)
    kept = 1.0 if call.kept is None else call.kept
    group = x["q"].shape[2] // x["k"].shape[2]
    k, v = (np.repeat(x[name], group, 2) for name in "kv")
    weights = rounded(attention.p * kept)
    dp = np.einsum("btnh,bsnh->bnts", x["do"], v) * kept
    o = rounded(np.einsum("bnts,bsnh->btnh", weights, v))
    delta = np.einsum("btnh,btnh->bnt", x["do"], o) - x["dlse"]
    ds = attention.p * (dp - delta[..., None])
    grads, of_rows = {}, {}
    if "sinks" in x:
        of_rows["sinks"] = -(attention.of_sinks * delta)
    if "strength" in x:
        term = call.pattern * attention.capped * attention.capped
        of_rows["strength"] = (ds * term).sum(3)
        by_score = 2.0 * x["strength"][:, None, None] * call.pattern * attention.capped
        ds = ds * (1.0 + by_score)
    if call.softcap is not None:
        ds = ds * (1.0 - (attention.capped / call.softcap) ** 2)
    if "alibi_slopes" in x:
        of_rows["alibi_slopes"] = -(ds * call.distance).sum(3)
    if "bias" in x:
        axes = tuple(i for i, size in enumerate(x["bias"].shape) if size == 1)
        grads["bias"] = rounded(ds.sum(axes, keepdims=True))
    ds = rounded(ds)
    of_kv = lambda d: d.reshape(*d.shape[:2], -1, group, d.shape[-1]).sum(3)
    dk = of_kv(np.einsum("bnts,btnh->bsnh", ds, x["q"])) * call.scale
    dv = of_kv(np.einsum("bnts,btnh->bsnh", weights, x["do"]))
    dq = np.einsum("bnts,bsnh->btnh", ds, k) * call.scale
    grads |= {name: y if by_row else y.sum((0, 2)) for name, y in of_rows.items()}
    grads |= {"q": rounded(dq), "k": rounded(dk), "v": rounded(dv)}
    return {f"d{name}": grad for name, grad in grads.items()}


def tangents(function: Callable, call: Dense, x: Arrays, moves: Arrays, rounded=exactly) -> dict:
    """Computes the tangents of the results of a function above, given those of its arrays."""
    moved = {name: a + 1j * STEP * moves[name] if name in moves else a for name, a in x.items()}
    with np.errstate(invalid="ignore"):  # -inf of rows without keys
        complex_results = function(call, moved, rounded)
    return {f"{name}_tangent": np.imag(y) / STEP for name, y in complex_results.items()}


# --- Dropout --------------------------------------------------------------------------------------
# A hash of seed, batch entry, head and query, one of the key, and 15 bits of their product.


def kept(seed: int, rate: float, batch: int, heads: int, positions: tuple[Any, Any]) -> np.ndarray:
    """Returns float[B, N, T, S]: 0 where a weight is dropped, else what kept weights gain.

    Args:
        seed: a number below 2**31.
        rate: the dropout rate.
        batch: B.
        heads: N.
        positions: int[B, T] of queries and int[B, S] of keys, which the mask counts.
    """
    q_pos, kv_pos = (np.asarray(x).astype(np.uint32) for x in positions)
    with np.errstate(over="ignore"):
        state = np.full((), 0x243F6A88, np.uint32)
        for word in (seed, 0):  # low and high half
            state = _mix(_mix(state) ^ np.uint32(word))
        entries, members = (np.arange(size, dtype=np.uint32) for size in (batch, heads))
        call = _mix(_mix(_mix(_mix(state) ^ entries))[:, None] ^ members)
        rows = _mix(_mix(q_pos)[:, None, :] ^ call[:, :, None]) | np.uint32(1)
        pairs = _mix((kv_pos >> np.uint32(1)) ^ np.uint32(0x9E3779B9)) | np.uint32(1)
        columns = np.where(kv_pos % 2 == 0, pairs, pairs * np.uint32(2891336453))
        bits = rows[..., None] * columns[:, None, None, :]
    limit = round(rate * 2**15)
    keep = (bits >> np.uint32(16) & np.uint32(2**15 - 1)) >= limit
    return keep * (2**15 / (2**15 - limit))


def _mix(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
