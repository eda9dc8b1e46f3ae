"""The numerical check of forward mode: `checks` for the tangents of O and of the log-sum-exp."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import reference
from flash_pallas.core import dropout
from flash_pallas.frontend import dispatch, validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.transforms import any_order

from . import checks
from .cases import Case, Inputs

NAMES = ("o", "lse", "do", "dlse")


def bind(backend):
    """Returns (q, k, v, **arguments) -> (o, lse) of every order on a backend, object or name."""
    backend = dispatch.BACKENDS[backend] if isinstance(backend, str) else backend

    def call(q, k, v, **arguments):
        call = validate.canonicalize(q, k, v, Arguments(**arguments, differentiable="any"))
        blocks = backend.attention.plan(call.problem)
        o, lse, _ = any_order.attend(backend, call.spec, blocks, call.operands)
        return call.unfold(call.with_empty_rows(o, lse), lse, None)[:2]

    return call


def given(case: Case, seed: int = 0) -> Inputs:
    """Returns tangents of all that has them: q, k, v and floats of `side`; None for the others."""
    x, key = case.inputs(seed), jax.random.key(1 + seed)
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    draw = lambda i, a: jax.random.normal(jax.random.fold_in(key, i), a.shape).astype(a.dtype)
    side = {name: a for name, a in x.side.items() if is_float(a)}
    tangents = [draw(i, a) for i, a in enumerate((x.q, x.k, x.v))]
    moved = {name: draw(3 + i, a) for i, (name, a) in enumerate(sorted(side.items()))}
    none = dict.fromkeys(Inputs._fields)
    return Inputs(**none | dict(zip("qkv", tangents, strict=True)) | {"side": moved})


def run(call, case: Case, seed: int = 0, how: str = "jvp"):
    """Runs forward mode of a case in one jitted program.

    Args:
        call: (q, k, v, **arguments) -> (o, lse).
        case: problem to solve.
        seed: seed of the inputs.
        how: "jvp", or "linearize": O is computed first, and its tangent after it.
    """
    function = partial(_forward_mode, call, case, how=how)
    with case.width:
        return checks._widen(jax.jit(function)(case.inputs(seed), given(case, seed)))


def _forward_mode(call, case: Case, x: Inputs, tangents: Inputs, *, how="jvp", own=Case.arguments):
    def outputs(q, k, v, side):
        o, lse = call(q, k, v, **own(case, x._replace(side=x.side | side)))[:2]
        return o, lse, jnp.where(jnp.isfinite(lse), lse, 0.0)

    moving = {name: x.side[name] for name in tangents.side}
    primals, moved = (x.q, x.k, x.v, moving), (*tangents[:3], tangents.side)
    if how == "jvp":
        (o, lse, _), (do, _, dlse) = jax.jvp(outputs, primals, moved)
    else:
        (o, lse, _), push = jax.linearize(outputs, *primals)
        do, _, dlse = push(*moved)
    return dict(zip(NAMES, (o, lse, do, dlse), strict=True))


def _wide(x):
    widen = lambda a: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return jax.tree.map(lambda a: jnp.asarray(widen(np.asarray(a))), x)


@lru_cache(maxsize=64)
def oracle(case: Case, seed: int = 0):
    """Computes forward mode in float64, and for each result the sum of its terms' magnitudes."""
    with jax.enable_x64(True):
        x, tangents = _wide(case.inputs(seed)), _wide(given(case, seed))
        call = partial(reference.attention, full_precision=True, rounded_logits=case.rounds)
        exact = partial(_forward_mode, call, case, own=Case.oracle_arguments)
        terms = partial(_terms, case)
        return tuple(checks._widen(jax.jit(f)(x, tangents)) for f in (exact, terms))


def _terms(case: Case, x: Inputs, tangents: Inputs):
    m = reference.Modifiers(**case.oracle_arguments(x))
    group, scale = case.N // case.K, case.H**-0.5 if case.scale is None else case.scale
    q, k, v = m.cleared_queries(x.q), m.cleared_keys(x.k), m.cleared_keys(x.v)
    dq, dk, dv = m.cleared_queries(tangents.q), *map(m.cleared_keys, (tangents.k, tangents.v))
    k, v, dk, dv = (jnp.repeat(a, group, axis=2) for a in (k, v, dk, dv))
    dot = lambda a, b: jnp.einsum("btnh,bsnh->bnts", a, b)
    size = jnp.abs
    qk, dqk = scale * dot(q, k), size(scale) * (dot(size(dq), size(k)) + dot(size(q), size(dk)))
    keep = m.visible(qk.shape)

    def logits(qk, side):
        m = reference.Modifiers(**case.oracle_arguments(x._replace(side=x.side | side)))
        return m.logits(qk, keep, rounded=case.rounds)

    moving = {name: x.side[name] for name in tangents.side}
    s, slope = jax.jvp(lambda qk: logits(qk, moving), (qk,), (jnp.ones_like(qk),))
    keep &= s > -jnp.inf
    dz = dqk * size(slope)
    if moving:
        dz = dz + size(jax.jvp(lambda side: logits(qk, side), (moving,), (tangents.side,))[1])
    p, lse, _ = m.softmax(s, keep)
    dz = jnp.where(keep, dz, 0.0)
    mu = (p * dz).sum(-1)
    if "sinks" in moving:
        sink = x.side["sinks"][None, :, None]
        weight = jnp.where(jnp.isfinite(lse), jnp.exp(sink - lse), 0.0)
        mu = mu + weight * size(tangents.side["sinks"])[None, :, None]
    gain = 1.0
    if case.dropout_rate:
        gain = jnp.where(m.kept(qk.shape), dropout.gain(case.dropout_rate), 0.0)
    over = lambda p, v: jnp.einsum("bnts,bsnh->btnh", p * gain, size(v))
    finite = jnp.where(jnp.isfinite(lse), size(lse), 0.0)
    largest = jnp.where(keep, size(s), 0.0).max(-1) + size(scale) * dot(size(q), size(k)).max(-1)
    found = over(p, v), 1.0 + finite + largest, over(p * (dz + mu[..., None]), v) + over(p, dv), mu
    return dict(zip(NAMES, found, strict=True))


def bounds(case: Case, seed: int = 0, factor: float = 1.0, *, kernels: bool = False):
    """Computes the largest allowed (maximum, root mean square) of the error of each result.

    That is twice the error of plain jnp attention for outputs and three times for tangents, with
    the floors of `checks`, times `factor`; `kernels` is as of assert_matches_oracle.
    """
    exact, terms = oracle(case, seed)
    plain = partial(_forward_mode, checks.plain, case, own=Case.oracle_arguments)
    found = checks._widen(jax.jit(plain)(case.inputs(seed), given(case, seed)))
    limits = {}
    for name in NAMES:
        times = checks.OUTPUT_FACTOR if name in checks.OUTPUTS else checks.GRADIENT_FACTOR
        unit = checks.FLOOR * float(jnp.finfo(case.dtype).eps)
        if name == "lse":
            unit = checks.LSE_FLOOR * float(jnp.finfo(jnp.float32).eps)
        error = checks._sizes(checks._error(found[name], exact[name]))
        floor = checks._sizes(terms[name])
        capped = 0.0
        if kernels and case.softcap and name == "lse":
            capped = checks.TANH_ERROR * case.softcap
        limits[name] = tuple(
            factor * (times * e + unit * f) + capped for e, f in zip(error, floor, strict=True)
        )
    return limits


def _second_order(call, case: Case, x: Inputs, tangents: Inputs, moved, *, own=Case.arguments):
    """Computes the tangents of the gradients of q, k and v, given those of dO and dL in `moved`."""

    def outputs(q, k, v):
        o, lse = call(q, k, v, **own(case, x))[:2]
        return o, jnp.where(jnp.isfinite(lse), lse, 0.0)

    def gradients(q, k, v, do, dlse):
        (o, lse), pull = jax.vjp(outputs, q, k, v)
        return pull((do.astype(o.dtype), dlse.astype(lse.dtype)))

    given = (
        *tangents[:3],
        *(a.astype(b.dtype) for a, b in zip(moved, (x.do, x.dlse), strict=True)),
    )
    found = jax.jvp(gradients, (x.q, x.k, x.v, x.do, x.dlse), given)[1]
    return dict(zip(("ddq", "ddk", "ddv"), found, strict=True))


def assert_second_order_matches_oracle(call, case: Case, seed: int = 0):
    """Checks forward over reverse: its error is at most three times that of plain jnp.

    Of 16 bits the root mean square is compared, with a rounding of the result for a floor.
    """
    x, tangents = case.inputs(seed), given(case, seed)
    moved = jnp.flip(x.do, 1) * 0.5, jnp.flip(x.dlse, -1) * 0.5
    with jax.enable_x64(True):
        dense = partial(reference.attention, full_precision=True)
        wide = jax.tree.map(_wide, (x, tangents, moved))
        run = partial(_second_order, dense, case, own=Case.oracle_arguments)
        exact = checks._widen(jax.jit(run)(*wide))
    plain = partial(_second_order, checks.plain, case, own=Case.oracle_arguments)
    found, usual = (
        checks._widen(jax.jit(f)(x, tangents, moved))
        for f in (partial(_second_order, call, case), plain)
    )
    for name, value in exact.items():
        size = lambda a, value=value: checks._sizes(checks._error(a, value))[1]
        floor = float(jnp.finfo(case.dtype).eps) * checks.FLOOR * checks._sizes(value)[1]
        limit = checks.GRADIENT_FACTOR * size(usual[name]) + floor
        assert size(found[name]) <= limit, f"{case} {name}: {size(found[name])}, allowed {limit}"


def assert_matches_oracle(call, case: Case, seed: int = 0, *, kernels=False, how="jvp"):
    """Checks O, the log-sum-exp and their tangents by the bounds of this module.

    Args:
        call: see `bind`.
        case: problem to solve.
        seed: seed of the inputs.
        kernels: GPU kernels compute it: their tanh is right to checks.TANH_ERROR, and float32 is
            multiplied in bfloat16 parts, for checks.IN_PARTS of the bounds of bfloat16.
        how: as of `run`.
    """
    usual = case.usual
    if kernels and case.dtype == "float32":
        limits = bounds(dataclasses.replace(usual, dtype="bfloat16"), seed, checks.IN_PARTS)
        single = bounds(usual, seed)
        limits = {
            name: tuple(a + b for a, b in zip(limits[name], single[name], strict=True))
            for name in NAMES
        }
        # As in checks.bounds_in_parts: they come from exact products in bfloat16.
        unit = checks.IN_PARTS * checks.FLOOR * float(jnp.finfo(jnp.bfloat16).eps)
        terms = checks._sizes(oracle(usual, seed)[1]["lse"])
        limits["lse"] = tuple(x + unit * f for x, f in zip(limits["lse"], terms, strict=True))
    else:
        limits = bounds(usual, seed, kernels=kernels)
    found, exact = run(call, case, seed, how), oracle(usual, seed)[0]
    failures = []
    for name in NAMES:
        error = checks._sizes(checks._error(found[name], exact[name]))
        for kind, e, limit in zip(("max", "rms"), error, limits[name], strict=True):
            if not e <= limit:  # A NaN fails too.
                failures.append(f"{name}: {kind} error {e:.3g}, allowed {limit:.3g}")
    assert not failures, f"{case}: " + "; ".join(failures)
