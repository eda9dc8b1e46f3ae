"""Bounds of the GPU fuzz: for every element the deviation that a right result may have.

Any implementation rounds weights and their gradients to the dtype of q before it multiplies them,
rounds what it returns, saves O rounded, and computes the rest in float32. Each of these roundings
adds its variance, computed from the reference itself, to that of an element. A result is right if
no element is further off than `ELEMENT` deviations and no row than `ROW` in the root mean square.
One wrong key of 300 moves a row by about 18.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .dense_reference import (
    Backward,
    Dense,
    Forward,
    captured_sum,
    change,
    heads_first,
    over_group,
    summed,
)

ELEMENT, ROW = 9.0, 6.0
# Root mean square of one rounding, relative, at the lower end of a binade.
ROUNDING = 12.0**-0.5
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# The GPU's tanh, see checks.py, as a root mean square.
TANH = 1.1e-5
# Hopper's float32: products of parts in bfloat16, each right to 2^-15 and to 2^-18 in the mean.
IN_PARTS = 2.0**-17


@dataclasses.dataclass(frozen=True)
class Unit:
    """Relative errors of an implementation.

    Attributes:
        rounded: of one rounding to the dtype of q.
        single: of one operation of its sums.
        product: of a product of operands that are kept in parts.
        tanh: of its tanh.
        smallest: error of the smallest numbers of the dtype, which are not relative.
    """

    rounded: float
    single: float
    product: float
    tanh: float
    smallest: float = 0.0

    @classmethod
    def of(cls, dtype: str, kernels: bool) -> Unit:
        """Returns those for q of this dtype, on a GPU's kernels or in jnp."""
        single = EPS["float64" if dtype == "float64" else "float32"]
        parts = IN_PARTS if kernels and dtype == "float32" else 0.0
        # Without tensor cores a GPU's jnp has the same tanh.
        tanh = 0.0 if dtype == "float64" else TANH
        smallest = 2.0**-24 * ROUNDING if dtype == "float16" else 0.0
        return cls(EPS[dtype] * ROUNDING, single, parts, tanh, smallest)


def of_forward(d: Dense, f: Forward, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of o [B, T, N, Hv], lse and max_logit [B, N, T]."""
    v = heads_first(d.v, d.group)
    x = of_logits(d, f, unit)
    square = np.square(f.w)
    var = square * (unit.rounded**2 + unit.product**2 + x * x) + _smallest(f, unit)
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


def of_logits(d: Dense, f: Forward, unit: Unit):
    """Returns the deviation of each logit; those of its row's largest and of its LSE are in it."""
    q, k = heads_first(d.q), heads_first(d.k, d.group)
    norm = lambda x: np.sqrt(np.square(x).sum(-1))
    size = abs(d.scale) * norm(q)[..., None] * norm(k)[:, :, None]
    # Tensor cores cut 16 columns at a time off toward zero: wide heads have more of them.
    error = 2.0 * unit.single * size * max(1.0, d.q.shape[-1] / 96)
    error = np.sqrt(np.square(error) + np.square(unit.product * size * d.q.shape[-1] ** -0.5))
    if d.bias is not None:
        error = error + unit.single * np.abs(np.where(np.isneginf(d.bias), 0.0, d.bias))
    if d.slopes is not None:
        error = error + unit.single * np.abs(d.slopes[:, :, None, None] * d.distance)
    slope = np.abs(f.slope)
    error = error * slope
    if d.softcap is not None:
        error = error + unit.tanh * d.softcap * np.abs(f.of_score)
    if d.rounded:
        error = 0.0 * error
    # exp2 of a difference, whose terms are both rounded.
    lse = np.where(np.isfinite(f.lse), np.abs(f.lse), 0.0)[..., None]
    x = np.abs(f.x)
    own = unit.single * (x + lse) if not d.rounded else 0.0 * x
    return np.where(f.seen, error + own + unit.single, 0.0)


def of_backward(d: Dense, f: Forward, b: Backward, do, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of all gradients, in their shapes."""
    q, k, v = heads_first(d.q), heads_first(d.k, d.group), heads_first(d.v, d.group)
    do, x = heads_first(do), of_logits(d, f, unit)
    norm = lambda x: np.sqrt(np.square(x).sum(-1))
    # One error of delta is that of a whole row: O was saved in its dtype.
    row = np.sqrt((np.square(do * f.o)).sum(-1)) * unit.rounded
    row = row + 4.0 * unit.single * (norm(do) * norm(f.o) + np.abs(b.delta))
    slope = np.abs(f.slope)
    size = norm(do)[..., None] * norm(v)[:, :, None]
    own = np.square(b.ds) * (unit.rounded**2 + unit.product**2 + x * x) + _smallest(f, unit)
    own += np.square(f.w * size) * (4.0 * unit.single**2 + unit.product**2 / v.shape[-1])
    if d.kept is not None or d.sinks is not None or d.softcap is not None:
        own += np.square(f.p * x) * np.square(b.delta)[..., None]
    shared = f.p * row[..., None]
    own, plain = own * slope * slope, np.abs(b.ds) + shared
    if d.softcap is not None:  # 1 - tanh^2 from a tanh that is off
        own += np.square(plain * 2.0 * (unit.tanh + unit.single) * f.of_score)
    shared = shared * slope
    sq = np.square
    dq = sq(d.scale) * (np.matmul(own, sq(k)) + sq(np.matmul(shared, k)))
    dk = sq(d.scale) * np.matmul((own + sq(shared)).swapaxes(2, 3), sq(q))
    dv = sq(f.w) * (unit.rounded**2 + unit.product**2 + x * x) + _smallest(f, unit)
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
    return {name: np.sqrt(x) for name, x in found.items()}


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
    if d.mod is not None:
        slope = np.maximum(np.abs(f.slope), 1e-6) * np.ones_like(f.x)
        of = np.abs(f.of_captured)
        own, shared = own / sq(slope) * sq(of), shared / slope * of
        var = (own.sum(-1) + sq(shared.sum(-1))).sum(-1)
        var += sq(4.0 * unit.single * (np.abs(b.ds) * of).sum((2, 3)))
        found["dcaptured"] = captured_sum(d, var)
    return found


# A derivative is a chain of more operations than its terms here.
CHAIN = 5.0


def of_tangent(d: Dense, f: Forward, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of the tangents of o and lse, from the forward of a moved problem."""
    sq, own = np.square, CHAIN * _whole(unit)
    v, p, x = heads_first(d.v, d.group), f.p.real, np.where(f.seen, change(f.x), 0.0)
    mean = (p * x).sum(-1, keepdims=True)
    terms = np.matmul(sq(f.w.real) * (sq(x) + sq(mean)), sq(v.real))
    terms += np.matmul(sq(f.w.real), sq(change(v))) + sq(f.o.real * mean) + sq(change(f.o))
    if d.mean:
        terms += sq(change(v)).sum(2, keepdims=True) / v.shape[2] ** 2
    of_lse = np.sqrt(sq(p * x).sum(-1)) + np.abs(change(f.lse))
    terms = _smooth(terms) + sq(unit.smallest / own)
    return {"to": own * np.sqrt(terms).swapaxes(1, 2) + 1e-12, "tlse": own * of_lse + 1e-12}


def of_hessian(d: Dense, f: Forward, b: Backward, do, unit: Unit) -> dict[str, Any]:
    """Returns the deviations of Hessian-vector products, from the backward of a moved problem."""
    sq, u = np.square, CHAIN * _whole(unit)
    q, k, v = heads_first(d.q), heads_first(d.k, d.group), heads_first(d.v, d.group)
    do, p, slope = heads_first(do), f.p.real, np.abs(f.slope.real)
    dp = np.matmul(do, v.swapaxes(2, 3))
    gain = 1.0 if d.kept is None else np.where(d.kept, d.gain, 0.0)
    dp, delta = dp * gain, b.delta[..., None]
    terms = sq(change(f.p)) * (sq(dp.real) + sq(delta.real))
    terms += sq(p) * (sq(change(dp)) + sq(change(delta)))
    terms = sq(slope) * terms + sq(b.ds.real) * sq(change(f.slope)) + sq(change(b.dx))
    row = np.sqrt((sq(do * f.o.real) + sq(do * change(f.o))).sum(-1, keepdims=True))
    first = sq(p * slope) * (sq(dp.real) + sq(delta.real)) + sq(b.dx.real)
    shared = p * slope * row + np.abs(change(f.p)) * slope * row
    hq = np.matmul(terms + sq(shared), sq(k.real)) + np.matmul(first, sq(change(k)))
    hq += sq(np.matmul(shared, k.real))
    hk = np.matmul((terms + sq(shared)).swapaxes(2, 3), sq(q.real))
    hk += np.matmul(first.swapaxes(2, 3), sq(change(q)))
    hv = np.matmul((sq(change(f.w)) + sq(f.w.real)).swapaxes(2, 3), sq(do))
    hq, hk = sq(d.scale) * hq, sq(d.scale) * hk
    var = {"hq": hq.swapaxes(1, 2), "hk": over_group(hk, d.group), "hv": over_group(hv, d.group)}
    var |= _of_hessian_sides(d, f, b, (terms, shared, row[..., 0]))
    var = {name: _smooth(x) if x.ndim == 4 else x for name, x in var.items()}
    exact = {name: change(b.gradients["d" + name[1:]]) for name in var}
    least = sq(unit.smallest / u) + 1e-24
    return {name: u * np.sqrt(x + sq(exact[name]) + least) for name, x in var.items()}


def _smooth(var):
    """Returns variances half of which is their mean over the head dim: terms are estimates."""
    return 0.5 * (var + var.mean(-1, keepdims=True))


def _of_hessian_sides(d: Dense, f: Forward, b: Backward, errors) -> dict[str, Any]:
    (terms, shared, row), sq, var = errors, np.square, {}
    if d.bias is not None:
        whole = (terms.sum(-1) + sq(shared.sum(-1)))[..., None]
        by_row = whole if d.bias.shape[3] == 1 else terms + sq(shared)
        var["hbias"] = summed(by_row, d.bias.shape)
    if d.slopes is not None:
        far = d.distance
        of_row = (terms * sq(far)).sum(-1) + sq((shared * far).sum(-1))
        var["halibi_slopes"] = summed(of_row.sum(-1), d.slopes.shape)
    if d.sinks is not None:
        weight = np.exp(np.where(np.isneginf(f.lse.real), -np.inf, d.sinks[..., None] - f.lse))
        change_of = sq(change(weight) * b.delta.real) + sq(weight.real * change(b.delta))
        of_row = change_of + sq((np.abs(weight.real) + np.abs(change(weight))) * row)
        var["hsinks"] = summed(of_row.sum(-1), d.sinks.shape)
    if d.mod is not None:
        of = np.abs(f.of_captured.real) / np.maximum(np.abs(f.slope.real), 1e-6)
        more = sq(b.ds.real * change(f.of_captured)) + terms * sq(of)
        of_row = more.sum(-1) + sq((shared * of).sum(-1))
        var["hcaptured"] = captured_sum(d, of_row.sum(-1))
    return var


def _whole(unit: Unit) -> float:
    return unit.rounded + unit.product + 16.0 * unit.single + unit.tanh
