"""The one numerical check: no worse than twice plain jnp attention in the same dtype.

The error of outputs may be twice that of plain jnp, the error of gradients three times. Both are
measured against the oracle in float64 on the same (rounded) inputs, in the maximum and in the root
mean square. Where plain jnp happens to be exact (one key: its dq is 0) that bound would be 0, so
each result gets a floor: a fraction of a rounding of the sum of the absolute values of its terms.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp
from flash_pallas import reference
from flash_pallas.core import dropout
from flash_pallas.frontend import dispatch, validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.transforms import derivatives

from .cases import Case, Inputs

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# In units of eps, half an eps being one rounding, of the sum of absolute values. Rounding errors
# differ in sign and mostly cancel, so half of one rounding is much.
FLOOR = 0.25
# Of a rounding, the root mean square in units of eps.
ROUNDING = 12.0**-0.5
# exp2 and log2 of the kernels are the GPU's approximate ones, right to about one float32 eps.
LSE_FLOOR = 1.0
# Tensor cores add 16 columns to a score at a time and cut the sum off toward zero, so that these
# errors do not cancel (benchmarks/results/score_rounding.txt): half an eps of the score for 16
# columns, and scores are a third of the terms. Up to head dim 256 kernels keep to the floor above.
CUT_OFF_COLUMNS, NARROW = 3 * 2 * 16, 256
# The kernels' tanh is the GPU's MUFU.TANH, whose largest relative error is 1.06e-5
# (trial_tanh.txt at 20374d8), or a polynomial as right as that (backends/gpu/
# softcap.py), under the interpreter too. Plain jnp's is a rational function, right to an eps.
TANH_ERROR = 1.1e-5
# Rounding to bfloat16 loses 2^-8 of an operand. The kernels multiply float32 in bfloat16 parts, and
# such a product is wrong by 2^-15 (Matmuls of the hopper backend): that much of the former.
IN_PARTS = 2.0**-7

OUTPUTS = ("o", "lse", "max_logit")
ROW_SCALARS = ("lse", "max_logit")  # computed in float32 throughout, whatever q's dtype
# What every case has; others have "max_logit" or a "d..." for each array with a gradient.
ALWAYS = ("o", "lse", "dq", "dk", "dv")

Results = Mapping[str, Any]  # float64 numpy arrays by name


def explain_on(gpu: str | None, function, *args, **kwargs):
    """Explains a call within the `target` of a GPU; None is what is here."""
    with contextlib.nullcontext() if gpu is None else fp.target(gpu):
        return fp.explain(function, *args, **kwargs)


def bind(backend, blocks: dict[str, int] | None = None):
    """Returns (q, k, v, **arguments) -> (o, lse[, max_logit]) on a backend, an object or a name."""
    if isinstance(backend, str):
        backend = dispatch.BACKENDS[backend]

    def call(q, k, v, **arguments):
        call = validate.canonicalize(q, k, v, Arguments(**arguments))
        refusal = backend.attention.refusal(call.problem)
        assert refusal is None, refusal
        tiles = backend.attention.plan(call.problem, blocks)
        o, lse, most = derivatives.attend(backend, call.spec, tiles, call.operands)
        found = call.unfold(call.with_empty_rows(o, lse), lse, most)
        return found if call.spec.max_logit else found[:2]

    return call


def run(call, case: Case, seed: int = 0) -> Results:
    """Runs `call` on the case: outputs and gradients in one jitted program."""
    if case.deterministic:
        call = partial(call, deterministic=True)
    with case.width:
        return _widen(jax.jit(partial(_outputs_and_gradients, call, case))(case.inputs(seed)))


def _outputs_and_gradients(call, case: Case, x: Inputs, arguments=Case.arguments) -> Results:
    if case.max_logit:
        call = partial(call, max_logit=True)

    def outputs(q, k, v, side):
        o, lse, *most = call(q, k, v, **arguments(case, x._replace(side=side)))
        return (o, lse), {"max_logit": most[0]} if most else {}

    (o, lse), pull, most = jax.vjp(outputs, x.q, x.k, x.v, x.side, has_aux=True)
    dq, dk, dv, dside = pull((x.do.astype(o.dtype), x.dlse.astype(lse.dtype)))
    side = {f"d{name}": d for name, d in dside.items()}
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv} | most | side


def _widen(results) -> Results:
    return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


def _exact_inputs(case: Case, seed: int) -> Inputs:
    """Returns the inputs, rounded to the case's dtype, as float64. Works under x64 only."""
    widen = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(lambda x: jnp.asarray(widen(np.asarray(x))), case.inputs(seed))


@lru_cache(maxsize=256)
def oracle(case: Case, seed: int = 0) -> Results:
    """Computes the case in float64, from inputs rounded to its dtype."""
    with jax.enable_x64(True):
        call = partial(reference.attention, full_precision=True, rounded_logits=case.rounds)
        run = partial(_outputs_and_gradients, call, case, arguments=Case.oracle_arguments)
        return _widen(jax.jit(run)(_exact_inputs(case, seed)))


def plain(q, k, v, *, max_logit=False, **arguments):
    """Computes attention as one would write it in jnp: float32 softmax, the rest in q's dtype."""
    m = reference.Modifiers(**arguments)
    values = v
    q, k, v = m.cleared_queries(q), m.cleared_keys(k), m.cleared_keys(v)
    batch, q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = v.shape[1:3]
    scale = head_dim**-0.5 if m.scale is None else m.scale
    q = q.reshape(batch, q_len, kv_heads, q_heads // kv_heads, head_dim)
    dot = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)  # no TF32
    s = scale * dot("btkgh,bskh->bkgts", q, k)
    s = s.reshape(batch, q_heads, q_len, kv_len)
    keep = m.visible(s.shape)
    s = m.logits(s, keep)
    p, lse, most = m.softmax(s, keep)
    if m.dropout_rate:
        p = jnp.where(m.kept(p.shape), p * dropout.gain(m.dropout_rate), 0.0)
    p = p.astype(v.dtype).reshape(batch, kv_heads, -1, q_len, kv_len)
    o = dot("bkgts,bskh->btkgh", p, v)
    o = o.astype(v.dtype).reshape(batch, q_len, q_heads, v.shape[-1])
    if m.empty_rows == "mean" and m.sinks is None:
        values = jnp.where(jnp.isfinite(values), values, m.cleared_keys(values))
        mean = values.astype(jnp.float32).mean(1, keepdims=True).astype(o.dtype)
        mean = jnp.repeat(mean, q_heads // kv_heads, axis=2)
        o = jnp.where((lse == -jnp.inf).swapaxes(1, 2)[..., None], mean, o)
    o = m.cleared_queries(o)
    return (o, lse, most) if max_logit else (o, lse)


@lru_cache(maxsize=256)
def bounds(case: Case, seed: int = 0, kernels: bool = False) -> dict[str, tuple[float, float]]:
    """Computes the largest allowed (maximum, root mean square) of the error of each result.

    Args:
        case: problem to solve.
        seed: seed of the inputs.
        kernels: whether the Hopper kernels compute it, in 16 bits, with tangents right to
            TANH_ERROR.
    """
    tangents = TANH_ERROR * case.softcap if kernels and case.softcap else 0.0
    exact, terms = oracle(case, seed), _absolute_terms(case, seed)
    run = partial(_outputs_and_gradients, plain, case, arguments=Case.oracle_arguments)
    found = _widen(jax.jit(run)(case.inputs(seed)))
    limits = {}
    for name in exact:
        error = _sizes(_error(found[name], exact[name]))
        if (saved := terms.get(f"{name} of o")) is not None:
            unit = float(jnp.finfo(case.dtype).eps) * ROUNDING
            error = tuple(e + unit * f for e, f in zip(error, _sizes(saved), strict=True))
        floor = _sizes(terms[name])
        factor = OUTPUT_FACTOR if name in OUTPUTS else GRADIENT_FACTOR
        single = name in ROW_SCALARS
        unit = float(jnp.finfo(jnp.float32 if single else case.dtype).eps)
        unit *= LSE_FLOOR if single else FLOOR
        if single and kernels and case.H > NARROW and jax.default_backend() != "cpu":
            unit *= case.H / CUT_OFF_COLUMNS
        known = (0.0, 0.0)
        if single and tangents:
            known = _sizes(tangents * terms[f"{name} of a tangent"])
        limits[name] = tuple(
            factor * e + unit * f + g for e, f, g in zip(error, floor, known, strict=True)
        )
    return limits


def bounds_in_parts(case: Case, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Computes `bounds` of a float32 case for the Hopper kernels: IN_PARTS of those in bfloat16.

    Row scalars come from exact products there, so they get IN_PARTS of a rounding of their terms.
    """
    twin = dataclasses.replace(case, dtype="bfloat16")
    terms, limits = _absolute_terms(case, seed), {}
    for name, limit in bounds(twin, seed).items():
        unit = FLOOR * float(jnp.finfo(twin.dtype).eps) if name in ROW_SCALARS else 0.0
        sizes = _sizes(terms[name])
        limits[name] = tuple(IN_PARTS * (x + unit * f) for x, f in zip(limit, sizes, strict=True))
    return limits


def assert_matches_oracle(call, case: Case, seed: int = 0, *, kernels: bool = False):
    """Checks that all outputs and all gradients of `call` are within the bounds of this module.

    Args:
        call: (q, k, v, **arguments) -> (o, lse[, max_logit]), differentiable; see `bind`.
        case: problem to solve.
        seed: seed of the inputs.
        kernels: whether these are the Hopper kernels, which have bounds of their own.
    """
    usual = case.usual
    if kernels and case.dtype == "float32":
        limits = bounds_in_parts(usual, seed)
    else:
        limits = bounds(usual, seed, kernels)
    assert_results_match(run(call, case, seed), usual, seed, limits)


def assert_results_match(found: Results, case: Case, seed: int = 0, limits=None):
    """Checks results that are already computed; `limits` defaults to `bounds`."""
    exact = oracle(case, seed)
    limits = bounds(case, seed) if limits is None else limits
    assert set(found) == set(exact)
    failures = []
    for name in exact:
        error = _sizes(_error(found[name], exact[name]))
        for kind, e, limit in zip(("max", "rms"), error, limits[name], strict=True):
            if not e <= limit:  # A NaN fails too.
                failures.append(f"{name}: {kind} error {e:.3g}, allowed {limit:.3g}")
    assert not failures, f"{case}: " + "; ".join(failures)


def _absolute_terms(case: Case, seed: int) -> Results:
    """Computes for each result the sum of the absolute values of the terms that are added up.

    Gradients of side inputs add up terms of T * S scores and get the root of the sum of squares
    instead: with so many terms, roundings are certain to cancel.
    """
    with jax.enable_x64(True):
        terms = jax.jit(partial(_terms, case))(_exact_inputs(case, seed), dict(oracle(case, seed)))
        return _widen(terms)


def _terms(case: Case, x: Inputs, exact) -> Results:
    m = reference.Modifiers(**case.oracle_arguments(x))
    group, scale = case.N // case.K, abs(case.H**-0.5 if case.scale is None else case.scale)
    q, do = m.cleared_queries(x.q), m.cleared_queries(x.do)
    k, v = m.cleared_keys(x.k), m.cleared_keys(x.v)
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    qk = (scale if case.scale is None else case.scale) * jnp.einsum("btnh,bsnh->bnts", q, k)
    q, k, v, do, o = (jnp.abs(a) for a in (q, k, v, do, exact["o"]))
    keep = m.visible(qk.shape)

    def logits(given):
        qk, side = given
        m = reference.Modifiers(**case.oracle_arguments(x._replace(side=side)))
        return m.logits(qk, keep, rounded=case.rounds)

    s = logits((qk, x.side))
    keep &= s > -jnp.inf
    p, lse, _ = m.softmax(s, keep)
    lse = jnp.where(jnp.isfinite(exact["lse"]), lse, 0.0)
    size = jnp.where(keep, jnp.abs(s), 0.0)
    # exp(s - lse) inherits the rounding of s and of lse, in float32; but not where s is exact.
    relative = float(jnp.finfo(jnp.float32).eps / jnp.finfo(case.dtype).eps)
    relative = 0.0 if case.rounds else relative
    p = p * (1.0 + relative * (size + jnp.abs(lse)[..., None]))
    gain = 1.0
    if case.dropout_rate:
        gain = jnp.where(m.kept(qk.shape), dropout.gain(case.dropout_rate), 0.0)
    dlse = jnp.where(jnp.isfinite(exact["lse"]), jnp.abs(x.dlse), 0.0)
    delta = jnp.einsum("btnh,btnh->bnt", o, do) + dlse
    ds = p * (jnp.einsum("btnh,bsnh->bnts", do, v) * gain + delta[..., None])
    _, slope = jax.jvp(logits, ((qk, x.side),), ((jnp.ones_like(qk), _zeros(x.side)),))
    dqk = scale * jnp.where(keep, ds * jnp.abs(slope), 0.0)
    over_group = lambda a: a.reshape(case.B, case.S, case.K, group, a.shape[-1]).sum(3)
    found = {
        "o": jnp.einsum("bnts,bsnh->btnh", p * gain, v),
        "dq": jnp.einsum("bnts,bsnh->btnh", dqk, k),
        "dk": over_group(jnp.einsum("bnts,btnh->bsnh", dqk, q)),
        "dv": over_group(jnp.einsum("bnts,btnh->bsnh", p * gain, do)),
    }
    largest = scale * jnp.einsum("btnh,bsnh->bnts", q, k).max(-1) + size.max(-1)
    found["lse"] = found["max_logit"] = 1.0 + jnp.abs(lse) + largest
    _, pull = jax.vjp(logits, (qk, x.side))
    for name in x.side:
        tangent = _zeros(x.side) | {name: jnp.ones_like(x.side[name])}
        _, slope = jax.jvp(logits, ((qk, x.side),), ((jnp.zeros_like(qk), tangent),))
        squares = pull(jnp.where(keep, ds * ds * slope, 0.0))[0][1][name]
        if name == "sinks":
            sink = x.side[name][None, :, None]
            weight = jnp.exp(sink - lse) * (1.0 + relative * (jnp.abs(sink) + jnp.abs(lse)))
            weight = jnp.where(jnp.isfinite(exact["lse"]), weight, 0.0)
            squares = jnp.square(weight * delta).sum((0, 2))
        found[f"d{name}"] = jnp.sqrt(squares)
    found |= _of_saved_output(case, pull, p, o, do) | _of_tangents(case, x, qk, keep)
    return {name: x for name, x in found.items() if name.split(" of ")[0] in exact}


def _of_tangents(case: Case, x: Inputs, qk, keep) -> Results:
    """Computes what row scalars owe to an error of 1 in every capped logit: score_mod's slope."""
    if not case.softcap:
        return {}
    m = reference.Modifiers(**case.oracle_arguments(x))
    capped = dataclasses.replace(m, score_mod=None).logits(qk, keep, rounded=case.rounds)
    after = dataclasses.replace(m, bias=None, alibi_slopes=None, softcap=None)
    s, slope = jax.jvp(lambda z: after.logits(z, keep), (capped,), (jnp.ones_like(capped),))
    p, _, most = m.softmax(s, keep)
    slope = jnp.where(keep, jnp.abs(slope), 0.0)
    of_most = jnp.where(keep & (s == most[..., None]), slope, 0.0).max(-1)
    return {"lse of a tangent": (p * slope).sum(-1), "max_logit of a tangent": of_most}


def _of_saved_output(case: Case, pull, p, o, do) -> Results:
    """Computes what gradients of side inputs owe to the rounding of O, saved in its dtype.

    Plain jnp does not have this rounding. It is one error of delta per row, shared by all scores of
    the row, and its sign is arbitrary: this is the root mean square over a few draws of signs.
    """
    if not set(case.inputs().side) - {"sinks"}:
        return {}
    rows = jnp.einsum("btnh,btnh->bnt", o, do)
    draws = []
    for seed in range(8):
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], rows.shape)
        side = pull(p * (rows * signs)[..., None])[0][1]
        draws.append({name: jnp.square(x) for name, x in side.items() if name != "sinks"})
    mean = {name: jnp.sqrt(sum(d[name] for d in draws) / len(draws)) for name in draws[0]}
    return {f"d{name} of o": x for name, x in mean.items()}


def _zeros(side):
    return {name: jnp.zeros_like(x) for name, x in side.items()}


def assert_precision_of_float32(call):
    """Checks README.md's claim in root mean squares: right to 2^-16, 100 times bfloat16."""
    case = Case("precision", T=130, S=130, N=2, K=1, causal=True)
    single = relative_errors(call, case)
    half = relative_errors(call, dataclasses.replace(case, dtype="bfloat16"))
    for name, error in single.items():
        assert error < 2.0**-16 and 100.0 * error < half[name], (name, error, half[name])


def relative_errors(call, case: Case) -> dict[str, float]:
    """Returns the relative RMS error of each result in `ALWAYS` that has a head dim."""
    found, exact = run(call, case), oracle(case)
    size = lambda x: _sizes(x)[1]
    names = [name for name in ALWAYS if name not in ROW_SCALARS]
    return {name: size(_error(found[name], exact[name])) / size(exact[name]) for name in names}


def _error(found, exact):
    """Computes the elementwise |found - exact|, where two equal infinities differ by 0."""
    with np.errstate(invalid="ignore"):
        return np.where(found == exact, 0.0, np.abs(found - exact))


def _sizes(x) -> tuple[float, float]:
    return float(np.max(x)), float(np.sqrt(np.mean(np.square(x))))
