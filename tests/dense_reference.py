"""Attention in float64 from its definition, in numpy alone: what the GPU fuzz compares with.

Nothing of the package is imported here. Logits are an array of [B, N, T, S], and so is what is
visible of them. Every formula is analytic, so that a step along the imaginary axis gives
derivatives of outputs (a tangent) and of gradients (a Hessian-vector product) without error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

STEP = 1e-30  # of a derivative by a complex step; its square is nothing next to 1


class Mod(NamedTuple):
    """A score_mod: captured array and the places of all logits -> their new values.

    Attributes:
        axes: axes of the captured array, letters of "BN".
        call: (logits, captured [b, n, 1, 1], b, n, i, j) -> (values, their derivatives by the
            logit, and by the captured element).
    """

    axes: str
    call: Callable


def _relative(x, c, b, n, i, j):
    shape = np.tanh(0.125 * (i - j))
    return x + c * shape, np.ones_like(x), np.broadcast_to(shape, x.shape)


def _square(x, c, b, n, i, j):
    return x - 0.125 * c * x * x, 1.0 - 0.25 * c * x, -0.125 * x * x


def _per_entry(x, c, b, n, i, j):
    chosen = (i + 2 * j + b + n) % 3 == 0
    return (
        np.where(chosen, x * (1.0 + c), x),
        np.where(chosen, 1.0 + c, 1.0),
        np.where(chosen, x, 0),
    )


def _hiding(x, c, b, n, i, j):
    hidden = (i % 5 == 0) | ((i + j) % 7 == 0)
    return np.where(hidden, -1e9, x * c), np.where(hidden, 0.0, c), np.where(hidden, 0.0, x)


def _falling(x, c, b, n, i, j):
    below = 1.0 + (0.125 * c * x) ** 2
    return x / below, (2.0 - below) / below**2, -0.03125 * c * x**3 / below**2


# As tests/mods.py has them for the package.
MODS = {
    "relative": Mod("N", _relative),
    "square": Mod("", _square),
    "per_entry": Mod("BN", _per_entry),
    "hiding": Mod("N", _hiding),
    "falling": Mod("", _falling),
}


@dataclasses.dataclass
class Dense:
    """One problem, in float64; what is padding holds numbers, and `seen` hides it.

    Attributes:
        q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, Hv].
        seen: bool [B, N, T, S], each axis full or 1.
        scale: multiplies the products.
        i, j: positions [B or 1, T] and [B or 1, S].
        bias: [B, N, T, S], each axis full or 1; -inf hides.
        slopes, sinks: [B, N] or [1, N].
        softcap: limit of the logits.
        mod, captured: name in `MODS`, and the array that it captures.
        kept, gain: weights that dropout keeps, bool [B, N, T, S], and their factor.
        padding: queries that are padding, bool [B, T].
        mean: whether other queries that see no key return the mean of the values.
        rounded: whether logits are so large that rounding them to float32 is part of the result.
    """

    q: Any
    k: Any
    v: Any
    seen: Any
    scale: float
    i: Any
    j: Any
    bias: Any = None
    slopes: Any = None
    sinks: Any = None
    softcap: float | None = None
    mod: str | None = None
    captured: Any = None
    kept: Any = None
    gain: float = 1.0
    padding: Any = None
    mean: bool = False
    rounded: bool = False

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def distance(self):
        return np.abs(self.i[:, None, :, None] - self.j[:, None, None, :]).astype(float)


class Forward(NamedTuple):
    """Results [B, N, T, ...] and what the backward and bounds read of the way there."""

    o: Any
    lse: Any
    most: Any
    x: Any  # logits
    slope: Any  # derivative of the logits by scale * q k^T
    of_score: Any  # by what score_mod gets
    score: Any  # what score_mod gets
    raw: Any  # before the softcap
    of_captured: Any  # by the captured element
    seen: Any
    p: Any  # weights, before dropout
    w: Any  # and after
    empty: Any  # rows that see no key


def heads_first(x, group: int = 1):
    """Returns [B, N, T, H] of [B, T, K, H], each head `group` times."""
    return np.repeat(x.swapaxes(1, 2), group, axis=1)


def _matmul(a, b):
    return np.matmul(a, b)


def forward(d: Dense) -> Forward:
    """Computes attention; [B, N, T, ...]."""
    q, k, v = heads_first(d.q), heads_first(d.k, d.group), heads_first(d.v, d.group)
    x = d.scale * _matmul(q, k.swapaxes(2, 3))
    seen, of_captured = np.broadcast_to(d.seen, x.shape), None
    slope = of_score = np.ones(1)
    if d.bias is not None:
        infinite = np.isneginf(d.bias.real)
        seen = seen & ~infinite
        x = x + np.where(infinite, 0.0, d.bias)
    if d.slopes is not None:
        x = x - d.slopes[:, :, None, None] * d.distance
    if d.rounded:
        x = x.real.astype(np.float32).astype(np.float64)
    raw = x
    if d.softcap is not None:
        tanh = np.tanh(x / d.softcap)
        x, slope = d.softcap * tanh, 1.0 - tanh * tanh
    score = x
    if d.mod is not None:
        x, of_score, of_captured = modified(d, x)
        slope = slope * of_score
    top = np.where(seen, x.real, -np.inf).max(-1, initial=-np.inf)
    sinks = None if d.sinks is None else np.broadcast_to(d.sinks[..., None], top.shape)
    shift = top if sinks is None else np.maximum(top, sinks.real)
    shift = np.where(np.isfinite(shift), shift, 0.0)
    e = np.where(seen, np.exp(np.where(seen, x - shift[..., None], 0.0)), 0.0)
    total = e.sum(-1)
    if sinks is not None:
        total = total + np.exp(sinks - shift)
    none = total == 0
    p = e / np.where(none, 1.0, total)[..., None]
    lse = np.where(none, -np.inf, shift + np.log(np.where(none, 1.0, total)))
    w = p if d.kept is None else np.where(d.kept, p * d.gain, 0.0)
    o = _matmul(w, v)
    empty = ~seen.any(-1)
    if d.mean:
        o = np.where(_averaged(d, empty)[..., None], v.mean(2, keepdims=True), o)
    return Forward(o, lse, top, x, slope, of_score, score, raw, of_captured, seen, p, w, empty)


def modified(d: Dense, x):
    """Returns what score_mod makes of x [B, N, T, S], and its derivatives, see `Mod`."""
    return MODS[d.mod].call(x, _spread(d), *_places(d))


def _averaged(d: Dense, empty):
    """Returns which queries return the mean of the values."""
    if d.sinks is not None or not d.mean:
        return np.zeros_like(empty)
    return empty if d.padding is None else empty & ~d.padding[:, None]


def _spread(d: Dense):
    axes = MODS[d.mod].axes
    batch, heads = _sizes(d)
    return d.captured.reshape(batch if "B" in axes else 1, heads if "N" in axes else 1, 1, 1)


def _places(d: Dense):
    batch, heads = _sizes(d)
    b, n = np.arange(batch).reshape(-1, 1, 1, 1), np.arange(heads).reshape(1, -1, 1, 1)
    return b, n, d.i[:, None, :, None], d.j[:, None, None, :]


def _sizes(d: Dense) -> tuple[int, int]:
    return d.q.shape[0], d.q.shape[2]


def summed(x, shape):
    """Sums x over the axes that are 1 in `shape`."""
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] > 1)
    return x.sum(axes, keepdims=True)


def over_group(x, group: int):
    """Returns [B, S, K, H] of [B, N, S, H], summed over the heads of each KV head."""
    b, n, s, h = x.shape
    return x.reshape(b, n // group, group, s, h).sum(2).swapaxes(1, 2)


class Backward(NamedTuple):
    """Gradients by name, and what bounds read of the way there."""

    gradients: dict[str, Any]
    dx: Any  # of scale * q k^T + bias
    ds: Any  # of the logits
    delta: Any


def backward(d: Dense, f: Forward, do, dlse) -> Backward:
    """Computes the gradients of sum(do * o) + sum(dlse * lse), from do [B, T, N, Hv].

    Rows of LSE that are -inf have no gradient.
    """
    q, k, v = heads_first(d.q), heads_first(d.k, d.group), heads_first(d.v, d.group)
    do = heads_first(do)
    averaged = _averaged(d, f.empty)
    dmean = np.where(averaged[..., None], do, 0.0).sum(2, keepdims=True) / v.shape[2]
    do = np.where(averaged[..., None], 0.0, do)
    dlse = np.where(np.isneginf(f.lse.real), 0.0, dlse)
    dp = _matmul(do, v.swapaxes(2, 3))
    if d.kept is not None:
        dp = np.where(d.kept, dp * d.gain, 0.0)
    delta = (f.p * dp).sum(-1) - dlse
    ds = f.p * (dp - delta[..., None])
    dx = ds * f.slope
    found = {
        "dq": (d.scale * _matmul(dx, k)).swapaxes(1, 2),
        "dk": over_group(d.scale * _matmul(dx.swapaxes(2, 3), q), d.group),
        "dv": over_group(_matmul(f.w.swapaxes(2, 3), do) + dmean, d.group),
    }
    if d.bias is not None:
        found["dbias"] = summed(dx, d.bias.shape)
    if d.slopes is not None:
        found["dalibi_slopes"] = summed(-(dx * d.distance).sum((2, 3)), d.slopes.shape)
    if d.sinks is not None:
        weight = np.exp(np.where(np.isneginf(f.lse.real), -np.inf, d.sinks[..., None] - f.lse))
        found["dsinks"] = summed(-(weight * delta).sum(-1), d.sinks.shape)
    if d.mod is not None:
        found["dcaptured"] = captured_sum(d, (ds * f.of_captured).sum((2, 3)))
    return Backward(found, dx, ds, delta)


def captured_sum(d: Dense, x):
    """Sums [B, N] over the axes that the captured array does not have; returns its shape."""
    axes = tuple(n for n, a in enumerate("BN") if a not in MODS[d.mod].axes)
    return x.sum(axes).reshape(np.shape(d.captured))


def tangent(f: Forward) -> dict[str, Any]:
    """Returns the tangents of o [B, T, N, Hv] and lse from the forward of `moved`."""
    return {"to": change(f.o.swapaxes(1, 2)), "tlse": change(f.lse)}


def hessian_vector(b: Backward) -> dict[str, Any]:
    """Returns the derivatives of all gradients, from the backward of `moved`."""
    return {"h" + name[1:]: change(x) for name, x in b.gradients.items()}


def change(x):
    """Returns the derivative of what was computed from `moved`."""
    return np.imag(x) / STEP


def moved(d: Dense, moved: dict[str, Any]) -> Dense:
    """Returns the problem a step along the imaginary axis further, in these arrays by field."""
    return dataclasses.replace(d, **{n: getattr(d, n) + 1j * STEP * x for n, x in moved.items()})


# Dropout: the documented hash (docs of `dropout_seed`) of seed, entry, head, query and key.


def _mix(x):
    """Computes a bijection of 32 bits, lowbias32: every bit depends on every other."""
    x = np.atleast_1d(np.asarray(x, np.uint32))  # of scalars, numpy says that they overflow
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def kept(words, shape, first: Any, rate: float):
    """Returns bool [B, N, T, S], which weights dropout keeps.

    Args:
        words: the seed, uint32 numbers: of an int its low and high half, of a key its data.
        shape: (B, N, T, S); B and N are 1 where all share one pattern.
        first: number of the first query, int [B].
        rate: share that is dropped.
    """
    batch, heads, q_len, kv_len = shape
    state = np.uint32(0x243F6A88)
    for word in words:
        state = _mix(_mix(state) ^ np.uint32(word))
    entry = _mix(_mix(state) ^ np.arange(batch, dtype=np.uint32))
    member = _mix(_mix(entry)[:, None] ^ np.arange(heads, dtype=np.uint32))
    i = (np.asarray(first).reshape(-1, 1) + np.arange(q_len)).astype(np.int32).view(np.uint32)
    row = _mix(_mix(i)[:, None, :] ^ member[:, :, None]) | np.uint32(1)
    j = np.arange(kv_len, dtype=np.uint32)
    column = _mix((j >> np.uint32(1)) ^ np.uint32(0x9E3779B9)) | np.uint32(1)
    column = np.where(j % 2 == 0, column, column * np.uint32(2891336453))
    field = (row[..., None] * column) >> np.uint32(16) & np.uint32(0x7FFF)
    return field >= dropped_levels(rate)


def dropped_levels(rate: float) -> int:
    """Returns how many of 2**15 levels are dropped."""
    return min(round(rate * 2**15), 2**15 - 1)
