"""Bounds of the GPU fuzz: for every element the deviation that a right result may have.

Any implementation rounds weights and their gradients to the dtype of q before it multiplies them,
rounds what it returns, saves O rounded, and computes the rest in float32. Each of these roundings
adds its variance, computed from the reference itself, to that of an element. A result is right if
no element is further off than `ELEMENT` deviations and no row than `ROW` in the root mean square.
One wrong key of 300 moves a row by about 18.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .dense_reference import (
    STEP,
    Backward,
    Dense,
    Forward,
    captured_sum,
    change,
    heads_first,
    modified,
    over_group,
    summed,
)

ELEMENT, ROW = 9.0, 6.0
# Root mean square of one rounding, relative, at the lower end of a binade.
ROUNDING = 12.0**-0.5
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# The GPU's tanh, see checks.py, as a root mean square.
TANH = 1.1e-5
# Smallest steps. Below the smallest normal float32, exp2 on a GPU is 0.
STEPS = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126, "float64": 0.0}
# Of weights next to a cache in eight bits, which kernels may keep in float16, times 2^14.
STEP_IN_EIGHT_BITS = 2.0**-38
# Hopper's float32: products of parts in bfloat16, each right to 2^-15 and to 2^-18 in the mean.
IN_PARTS = 2.0**-17
# Logits that are only a bias which hides keys.
LARGE = 1e8


@dataclasses.dataclass(frozen=True)
class Unit:
    """Relative errors of an implementation.

    Attributes:
        rounded: of one rounding to the dtype of q.
        single: of one operation of its sums.
        product: of a product of operands that are kept in parts.
        tanh: of its tanh.
        smallest: error of the smallest numbers, which is not relative.
    """

    rounded: float
    single: float
    product: float
    tanh: float
    smallest: float

    @classmethod
    def of(cls, dtype: str, kernels: bool, *, eight_bits: bool = False) -> Unit:
        """Returns those for q of this dtype, on a GPU's kernels or in jnp; of a cache's dtype."""
        single = EPS["float64" if dtype == "float64" else "float32"]
        parts = IN_PARTS if kernels and dtype == "float32" else 0.0
        # Without tensor cores a GPU's jnp has the same tanh.
        tanh = 0.0 if dtype == "float64" else TANH
        smallest = max(STEPS[dtype], STEP_IN_EIGHT_BITS * ROUNDING if eight_bits else 0.0)
        if dtype == "float16":
            smallest *= ROUNDING
        return cls(EPS[dtype] * ROUNDING, single, parts, tanh, smallest)


def of_forward(d: Dense, f: Forward, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of o [B, T, N, Hv], lse and max_logit [B, N, T]."""
    v = heads_first(d.v, d.group)
    x = of_logits(d, f, unit)
    square = np.square(f.w)
    var = square * (unit.rounded**2 + unit.product**2 + x * x) + _of_least(d, f, unit)
    var = np.matmul(var, v * v)
    var += np.square(f.o) * (square * x * x).sum(-1, keepdims=True)
    sums = 4.0 * unit.single * np.matmul(f.w, np.abs(v))
    if d.mean:
        sums += 4.0 * unit.single * np.abs(v).mean(2, keepdims=True)
    var += np.square(unit.rounded * f.o) + np.square(sums) + unit.smallest**2
    lse = np.where(np.isfinite(f.lse), f.lse, 0.0)
    total = unit.single * (1.0 + np.abs(lse)) + np.sqrt((np.square(f.p * x)).sum(-1))
    total += np.where(f.seen, f.p * x, 0.0).sum(-1) / 3.0  # what does not cancel
    if d.sinks is not None:
        total = total + unit.single * np.abs(d.sinks[..., None])
    top = np.where(np.isfinite(f.most), f.most, 0.0)
    most = np.where(f.seen & (f.x >= top[..., None] - 1e-3), x, 0.0).max(-1, initial=0.0)
    most = most + unit.single * np.abs(top) + 1e-12
    return {"o": np.sqrt(var).swapaxes(1, 2), "lse": total, "max_logit": most}


def _smallest(f: Forward, unit: Unit):
    return np.where(f.seen, unit.smallest**2, 0.0)


def _of_least(d: Dense, f: Forward, unit: Unit):
    """Returns the variance of weights after dropout that is not relative."""
    least = _smallest(f, unit)
    return least if d.kept is None else np.where(d.kept, d.gain**2 * least, 0.0)


def _of_raw(d: Dense, unit: Unit):
    """Returns the deviation of scale * q k^T, and of what is added to it."""
    q, k = heads_first(d.q).real, heads_first(d.k, d.group).real
    norm = lambda x: np.sqrt(np.square(x).sum(-1))
    size = abs(d.scale) * norm(q)[..., None] * norm(k)[:, :, None]
    # Tensor cores cut 16 columns at a time off toward zero: wide heads have more of them.
    error = 2.0 * unit.single * size * max(1.0, d.q.shape[-1] / 96)
    error = np.sqrt(np.square(error) + np.square(unit.product * size * d.q.shape[-1] ** -0.5))
    if d.bias is not None:
        bias = np.abs(d.bias.real)
        error = error + unit.single * np.where(np.isinf(bias), 0.0, bias)
    if d.slopes is not None:
        error = error + unit.single * np.abs(d.slopes.real[:, :, None, None] * d.distance)
    return error


class _Bends(NamedTuple):
    """Deviations of derivatives, where a softcap or a score_mod makes them.

    Attributes:
        slope: of f.slope.
        curve: of the derivative of f.slope by the raw logit.
        captured: of f.of_captured.
    """

    slope: Any = 0.0
    curve: Any = 0.0
    captured: Any = 0.0


def _bends(d: Dense, f: Forward, unit: Unit) -> _Bends:
    """Returns the deviations: of a tanh, and of logits where a derivative depends on them."""
    if d.softcap is None and d.mod is None:
        return _Bends()
    raw, at_raw, of_score, twice, mixed = _of_raw(d, unit), 1.0, 1.0, 0.0, 0.0
    score = raw
    if d.mod is not None:
        real = dataclasses.replace(d, captured=d.captured.real)
        _, by_score, by_captured = modified(real, f.score.real + 1j * STEP)
        of_score, twice, mixed = np.abs(by_score.real), change(by_score), change(by_captured)
    slope = curve = 0.0
    if d.softcap is not None:
        tanh, error = np.tanh(f.raw.real / d.softcap), unit.tanh + unit.single
        at_raw = 1.0 - tanh * tanh
        bend = 2.0 * np.abs(tanh) * at_raw / d.softcap
        slope = of_score * (2.0 * error + bend * raw)
        # Neither (1 - t^2)'' nor the derivative of t (1 - t^2) is above 2.
        curve = of_score * (4.0 * error + 2.0 * raw / d.softcap) / d.softcap
        curve = curve + 4.0 * at_raw * np.abs(twice) * error
        score = at_raw * raw + error * np.abs(f.score.real)
    slope = slope + np.abs(at_raw * twice) * score
    return _Bends(slope, curve, np.abs(mixed) * score)


def of_logits(d: Dense, f: Forward, unit: Unit):
    """Returns the deviation of each logit; those of its row's largest and of its LSE are in it."""
    error = _of_raw(d, unit)
    slope = np.abs(f.slope)
    error = error * slope
    if d.softcap is not None:
        error = error + unit.tanh * d.softcap * np.abs(f.of_score)
    # exp2 of a difference, whose terms are both rounded.
    lse = np.where(np.isfinite(f.lse), np.abs(f.lse), 0.0)[..., None]
    error = error + unit.single * (np.abs(f.x) + lse)
    if d.rounded:  # what is so large is a number of float32, and its differences are exact
        error = np.where(np.abs(f.x) > LARGE, 0.0, error)
    return np.where(f.seen, error + unit.single, 0.0)


def of_backward(d: Dense, f: Forward, b: Backward, do, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of all gradients, in their shapes."""
    q, k, v = heads_first(d.q), heads_first(d.k, d.group), heads_first(d.v, d.group)
    do, x = heads_first(do), of_logits(d, f, unit)
    norm = lambda x: np.sqrt(np.square(x).sum(-1))
    dp, gain = np.matmul(do, v.swapaxes(2, 3)), _gain(d)
    # One error of delta is that of a whole row: O was saved in its dtype, and so were its weights.
    # What is more, the forward's own logits and products were not exact.
    row = (np.square(do) * (np.square(unit.rounded * f.o) + unit.smallest**2)).sum(-1)
    row += (np.square(f.w * dp) * (unit.product**2 + x * x)).sum(-1)
    row += np.square((do * f.o).sum(-1)) * np.square(f.w * x).sum(-1)
    row = np.sqrt(row + (np.square(dp) * _of_least(d, f, unit)).sum(-1))
    row = row + 4.0 * unit.single * (norm(do) * norm(f.o) + np.abs(b.delta))
    size = norm(do)[..., None] * norm(v)[:, :, None]
    own = np.square(b.ds) * (unit.rounded**2 + unit.product**2 + x * x) + _smallest(f, unit)
    # P may be rounded before it multiplies dP - delta.
    own += np.square(dp * gain - b.delta[..., None]) * _smallest(f, unit)
    own += np.square(f.w * size) * (4.0 * unit.single**2 + unit.product**2 / v.shape[-1])
    if d.kept is not None or d.sinks is not None or d.softcap is not None:
        own += np.square(f.p * x) * np.square(b.delta)[..., None]
    shared, of_ds, bends = f.p * row[..., None], own, _bends(d, f, unit)
    own = own * np.square(f.slope) + np.square((np.abs(b.ds) + shared) * bends.slope)
    shared = shared * f.slope
    sq = np.square
    dq = sq(d.scale) * (np.matmul(own, sq(k)) + sq(np.matmul(shared, k)))
    dk = sq(d.scale) * np.matmul((own + sq(shared)).swapaxes(2, 3), sq(q))
    dv = sq(f.w) * (unit.rounded**2 + unit.product**2 + x * x) + _of_least(d, f, unit)
    dv = np.matmul(dv.swapaxes(2, 3), sq(do))
    sums = lambda a, c: sq(4.0 * unit.single * np.matmul(np.abs(a), np.abs(c)))
    dq += sums(d.scale * b.dx, k)
    dk += sums(d.scale * b.dx.swapaxes(2, 3), q)
    dv += sums(f.w.swapaxes(2, 3), do)
    if d.mean:  # rows that return the mean of the values
        averaged = np.abs(np.where(f.empty[..., None], do, 0.0)).sum(2, keepdims=True)
        dv += sq(4.0 * unit.single * averaged / v.shape[2])
    g, floor = b.gradients, unit.rounded
    found = {
        "dq": dq.swapaxes(1, 2) + sq(floor * g["dq"]),
        "dk": over_group(dk, d.group) + sq(floor * g["dk"]),
        "dv": over_group(dv, d.group) + sq(floor * g["dv"]),
    }
    found = {name: x + unit.smallest**2 for name, x in found.items()}
    found |= _of_sides(d, f, b, (own, shared, row, x), unit)
    if d.mod is not None:
        of, row = f.of_captured, row[..., None]
        own = of_ds * sq(of) + sq((np.abs(b.ds) + f.p * row) * bends.captured)
        var = (own.sum(-1) + sq((f.p * row * of).sum(-1))).sum(-1)
        var += sq(4.0 * unit.single * (np.abs(b.ds * of)).sum((2, 3)))
        found["dcaptured"] = captured_sum(d, var)
    return {name: np.sqrt(x) for name, x in found.items()}


def _gain(d: Dense):
    return 1.0 if d.kept is None else np.where(d.kept, d.gain, 0.0)


def _of_sides(d: Dense, f: Forward, b: Backward, errors, unit: Unit) -> dict[str, Any]:
    """Returns the variances of gradients of side inputs; a row's error adds up over its keys."""
    own, shared, row, x = errors
    sq, g, found = np.square, b.gradients, {}
    if d.bias is not None:
        shape = d.bias.shape
        by_row = shared.sum(-1, keepdims=True) if shape[3] == 1 else shared
        own_bias = own.sum(-1, keepdims=True) if shape[3] == 1 else own
        found["dbias"] = summed(own_bias + sq(by_row), shape)
        found["dbias"] += sq(4.0 * unit.single * summed(np.abs(b.dx), shape))
        found["dbias"] += sq(unit.rounded * g["dbias"])
    if d.slopes is not None:
        far = d.distance
        var = ((own * far * far).sum(-1) + sq((shared * far).sum(-1))).sum(-1)
        var += sq(4.0 * unit.single * (np.abs(b.dx) * far).sum((2, 3)))
        found["dalibi_slopes"] = summed(var, d.slopes.shape)
    if d.sinks is not None:
        weight = np.exp(np.where(np.isneginf(f.lse), -np.inf, d.sinks[..., None] - f.lse))
        most = x.max(-1, initial=0.0) + unit.single * (np.abs(d.sinks[..., None]) + 1.0)
        var = (sq(weight) * (sq(row) + sq(b.delta * most))).sum(-1)
        var += sq(4.0 * unit.single * (weight * np.abs(b.delta)).sum(-1))
        found["dsinks"] = summed(var, d.sinks.shape)
    return found


# A derivative is a chain of more operations than its terms here.
CHAIN = 5.0


def of_tangent(d: Dense, f: Forward, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of the tangents of o and lse, from the forward of a moved problem."""
    sq, own = np.square, CHAIN * _whole(unit)
    v, p, x = heads_first(d.v, d.group), f.p.real, np.where(f.seen, change(f.x), 0.0)
    mean = (p * x).sum(-1, keepdims=True)
    bent = np.where(f.seen, change(f.raw) * _bends(d, f, unit).slope / own, 0.0)
    of_mean = sq(mean) + sq(p * bent).sum(-1, keepdims=True)
    least = _of_least(d, f, unit) / sq(own)
    terms = np.matmul(sq(f.w.real) * (sq(x) + sq(bent) + sq(mean)) + least, sq(v.real))
    terms += np.matmul(sq(f.w.real) + least, sq(change(v)))
    terms += sq(f.o.real) * of_mean + sq(change(f.o))
    # The mean of the changes times O, which was saved, from weights that were rounded.
    terms += sq(mean) * (np.matmul(least, sq(v.real)) + sq(unit.smallest / own))
    if d.mean:
        terms += sq(change(v)).sum(2, keepdims=True) / v.shape[2] ** 2
    of_lse = np.sqrt((sq(p * x) + sq(p * bent)).sum(-1)) + np.abs(change(f.lse))
    terms = _smooth(terms) + sq(unit.smallest / own)
    return {"to": own * np.sqrt(terms).swapaxes(1, 2) + 1e-12, "tlse": own * of_lse + 1e-12}


def of_hessian(d: Dense, f: Forward, b: Backward, do, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of Hessian-vector products, from the backward of a moved problem."""
    sq, u = np.square, CHAIN * _whole(unit)
    q, k, v = heads_first(d.q), heads_first(d.k, d.group), heads_first(d.v, d.group)
    do, p = heads_first(do), f.p.real
    dp, delta = np.matmul(do, v.swapaxes(2, 3)) * _gain(d), b.delta[..., None]
    size, least = sq(dp.real) + sq(delta.real), _smallest(f, unit) / sq(u)
    bends = _bends(d, f, unit)
    raw = np.abs(np.where(f.seen, change(f.raw), 0.0))
    of_slope, of_change = bends.slope / u, raw * bends.curve / u
    bent = sq(p * raw * of_slope)
    # A change of P is that of exp(x), which is rounded, less the mean change of its row.
    by = np.where(f.seen, change(f.x), 0.0)
    mean = (p * by).sum(-1, keepdims=True)
    of_exp = sq(by) + sq(mean)
    of_ds = (sq(p) * of_exp + bent) * size + sq(p) * (sq(change(dp)) + sq(change(delta)))
    terms = sq(f.slope.real) * of_ds + sq(b.ds.real) * sq(change(f.slope)) + sq(change(b.dx))
    terms = terms + sq(change(b.ds) * of_slope) + sq(b.ds.real * of_change) + least
    first = sq(p * f.slope.real) * size + sq(b.dx.real) + sq(b.ds.real * of_slope) + least
    row = (sq(do) * (sq(f.o.real) + sq(change(f.o)) + sq(unit.smallest / u))).sum(-1, keepdims=True)
    row += (bent * size + least * sq(dp.real)).sum(-1, keepdims=True)
    of_moved = np.sqrt(row * (1.0 + sq(mean)) + (sq(p * by * dp.real)).sum(-1, keepdims=True))
    row = np.sqrt(row)
    # Delta and its change have each an error of the row.
    both = p * f.slope.real * of_moved, change(f.p * f.slope) * row
    spread = terms + sq(both[0]) + sq(both[1])
    hq = np.matmul(terms, sq(k.real)) + np.matmul(first, sq(change(k)))
    hq += sum(sq(np.matmul(x, k.real)) for x in both) + sq(np.matmul(both[0], change(k)))
    hk = np.matmul(spread.swapaxes(2, 3), sq(q.real))
    hk += np.matmul((first + sq(both[0])).swapaxes(2, 3), sq(change(q)))
    of_w = sq(f.w.real) * (1.0 + of_exp) + 2.0 * _of_least(d, f, unit) / sq(u)
    hv = np.matmul(of_w.swapaxes(2, 3), sq(do))
    hq, hk = sq(d.scale) * hq, sq(d.scale) * hk
    var = {"hq": hq.swapaxes(1, 2), "hk": over_group(hk, d.group), "hv": over_group(hv, d.group)}
    var |= _of_hessian_sides(d, f, b, (terms, both, row[..., 0]))
    if d.mod is not None:
        of = f.of_captured
        of_row = of_ds * sq(of.real) + sq(b.ds.real * change(of))
        of_row = of_row + sq(change(b.ds) * bends.captured / u)
        of_row = of_row.sum(-1) + sq((p * row * of.real).sum(-1))
        of_row += sq((change(f.p * of) * row).sum(-1))
        var["hcaptured"] = captured_sum(d, of_row.sum(-1))
    var = {name: _smooth(x) if x.ndim == 4 else x for name, x in var.items()}
    exact = {name: change(b.gradients["d" + name[1:]]) for name in var}
    least = sq(unit.smallest / u) + 1e-24
    return {name: u * np.sqrt(x + sq(exact[name]) + least) for name, x in var.items()}


def _smooth(var):
    """Returns variances half of which is their mean over the head dim: terms are estimates."""
    return 0.5 * (var + var.mean(-1, keepdims=True))


def _of_hessian_sides(d: Dense, f: Forward, b: Backward, errors) -> dict[str, Any]:
    (terms, both, row), sq, var = errors, np.square, {}
    if d.bias is not None:
        by_row = terms + sum(sq(x) for x in both)
        if d.bias.shape[3] == 1:
            by_row = (terms.sum(-1) + sum(sq(x.sum(-1)) for x in both))[..., None]
        var["hbias"] = summed(by_row, d.bias.shape)
    if d.slopes is not None:
        far = d.distance
        of_row = (terms * sq(far)).sum(-1) + sum(sq((x * far).sum(-1)) for x in both)
        var["halibi_slopes"] = summed(of_row.sum(-1), d.slopes.shape)
    if d.sinks is not None:
        weight = np.exp(np.where(np.isneginf(f.lse.real), -np.inf, d.sinks[..., None] - f.lse))
        change_of = sq(change(weight) * b.delta.real) + sq(weight.real * change(b.delta))
        of_row = change_of + sq((np.abs(weight.real) + np.abs(change(weight))) * row)
        var["hsinks"] = summed(of_row.sum(-1), d.sinks.shape)
    return var


def _whole(unit: Unit) -> float:
    return unit.rounded + unit.product + 16.0 * unit.single + unit.tanh
