"""The GPU fuzz on a CPU: its reference, its bounds, its draws on jnp, its processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time

import ml_dtypes
import numpy as np
import pytest

from flash_pallas.core import dropout
from flash_pallas.coverage import digests

from . import dense_reference, fuzzing, gpu_fuzz, rounding_bounds
from .dense_reference import Dense
from .rounding_bounds import Unit


def problem(dtype=np.float32, **fields) -> Dense:
    """Returns a plain problem of 300 keys."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype).astype(np.float64)
    q, k, v = draw(1, 7, 2, 16), draw(1, 300, 1, 16), draw(1, 300, 1, 8)
    seen = np.ones((1, 1, 7, 300), bool)
    return Dense(q, k, v, seen, 0.25, np.arange(7)[None], np.arange(300)[None], **fields)


def everything() -> Dense:
    """Returns a problem with all that moves logits."""
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((1, 2, 1, 300))
    bias[..., ::7] = -np.inf
    d = problem(bias=bias, slopes=np.array([[0.1, 0.02]]), softcap=3.0, mod="square")
    return dataclasses.replace(
        d,
        captured=np.array(0.3),
        sinks=np.array([[0.5, -1.0]]),
        kept=rng.random((1, 2, 7, 300)) < 0.7,
        gain=1 / 0.7,
    )


def test_forward_is_the_sum_over_keys_one_by_one():
    d = everything()
    f = dense_reference.forward(d)
    for n in range(2):
        total, o = math.exp(d.sinks[0, n]), np.zeros(8)
        for j in range(300):
            if d.bias[0, n, 0, j] == -np.inf:
                continue
            x = 0.25 * d.q[0, 3, n] @ d.k[0, j, 0] + d.bias[0, n, 0, j]
            x = 3.0 * math.tanh((x - d.slopes[0, n] * abs(3 - j)) / 3.0)
            x -= 0.125 * 0.3 * x * x
            total += math.exp(x)
            o += math.exp(x) * d.kept[0, n, 3, j] / 0.7 * d.v[0, j, 0]
        np.testing.assert_allclose(f.o[0, n, 3], o / total, rtol=1e-12)
        assert f.lse[0, n, 3] == pytest.approx(math.log(total), rel=1e-12)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "slopes", "sinks", "captured"])
def test_gradients_are_slopes_of_the_forward(name):
    d, rng = everything(), np.random.default_rng(2)
    do, dlse = rng.standard_normal((1, 7, 2, 8)), rng.standard_normal((1, 2, 7))
    found = dense_reference.backward(d, dense_reference.forward(d), do, dlse).gradients
    step = rng.standard_normal(np.shape(getattr(d, name)))
    there = dense_reference.forward(dense_reference.moved(d, {name: step}))
    o, lse = dense_reference.tangent(there).values()
    key = "dalibi_slopes" if name == "slopes" else f"d{name}"
    assert np.sum(found[key] * step) == pytest.approx(np.sum(o * do) + np.sum(lse * dlse))


def test_a_row_that_sees_no_key():
    d = problem()
    d.seen = d.seen & (np.arange(7) != 2)[:, None]
    f = dense_reference.forward(d)
    assert (f.o[:, :, 2] == 0).all() and (f.lse[:, :, 2] == -np.inf).all()
    ones = np.ones((1, 7, 2, 8)), np.ones((1, 2, 7))
    assert (dense_reference.backward(d, f, *ones).gradients["dq"][:, 2] == 0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_is_the_documented_one(shared):
    shape = (1, 1, 9, 40) if shared else (2, 3, 9, 40)
    words, first = dropout.seed_words(-5), np.array([-3, 8])
    keys = dropout.call_keys(words, *shape[:2])[..., None, None]
    i = (first[:, None] + np.arange(9))[:, None, :, None].astype(np.int32)
    right = dropout.keep(keys, i, np.arange(40, dtype=np.int32)[None, None, None], 0.3)
    found = dense_reference.kept([int(x) for x in words], shape, first, 0.3)
    np.testing.assert_array_equal(np.broadcast_to(found, right.shape), right)
    assert 0.6 < right.mean() < 0.8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_wrong_key_of_300_is_seen(dtype):
    d, unit = problem(np.float16), Unit.of(dtype, kernels=True)
    f = dense_reference.forward(d)
    do = np.random.default_rng(3).standard_normal((1, 7, 2, 8))
    right = dense_reference.backward(d, f, do, 0.0)
    limits = rounding_bounds.of_forward(d, f, unit)
    limits |= rounding_bounds.of_backward(d, f, right, do, unit)
    hidden = np.ones((1, 1, 7, 300), bool)
    hidden[..., 4, 150] = False
    wrong = dataclasses.replace(d, seen=hidden)
    g = dense_reference.forward(wrong)
    there = dense_reference.backward(wrong, g, do, 0.0).gradients
    pairs = {name: (there[name], x) for name, x in right.gradients.items()}
    pairs |= {"o": (g.o.swapaxes(1, 2), f.o.swapaxes(1, 2)), "lse": (g.lse, f.lse)}
    for name, (found, exact) in pairs.items():
        assert gpu_fuzz.difference(exact, exact, limits[name]) == (0.0, [])
        assert gpu_fuzz.difference(found, exact, limits[name])[1], name


@pytest.mark.parametrize("case", ["small weights", "slopes of either sign"])
def test_what_kernels_round_is_right(case):
    """Weights, O and dS in float16, where that hurts most."""
    rng = np.random.default_rng(6)
    d = dataclasses.replace(problem(np.float16), scale=1.0)
    kept = np.ones((1, 2, 7, 300), bool)
    if case == "small weights":
        kept = dense_reference.forward(d).p < 1e-5  # dropout took all others
    else:  # two keys, opposite and of equal weight: dS cancels, but not what delta is off by
        d = dataclasses.replace(d, mod="per_entry", captured=np.full((1, 2), -2.0))
        d.seen = d.seen & (np.arange(300) < 2)
        d.k[:, 1], d.v[:, 1] = -d.k[:, 0], d.v[:, 0] + 0.01 * d.v[:, 1]
    d = dataclasses.replace(d, kept=kept, gain=2.0)
    f, do = dense_reference.forward(d), rng.standard_normal((1, 7, 2, 8))
    right = dense_reference.backward(d, f, do, 0.0)
    limits = rounding_bounds.of_backward(d, f, right, do, Unit.of("float16", kernels=True))
    half = lambda x: x.astype(np.float16).astype(np.float64)
    k, v, do = np.repeat(d.k, 2, 2).swapaxes(1, 2), d.v.swapaxes(1, 2), do.swapaxes(1, 2)
    p, dp = half(f.p), np.where(kept, 2.0 * np.matmul(do, v.swapaxes(2, 3)), 0.0)
    o = half(np.matmul(np.where(kept, 2.0 * p, 0.0), v))
    ds = half(p * (dp - (o * do).sum(-1, keepdims=True)) * f.slope)
    dk = np.matmul(ds.swapaxes(2, 3), d.q.swapaxes(1, 2)).sum(1, keepdims=True).swapaxes(1, 2)
    found = {"dq": half(np.matmul(ds, k)).swapaxes(1, 2), "dk": half(dk)}
    for name, x in found.items():
        assert not gpu_fuzz.difference(x, right.gradients[name], limits[name])[1], name


def test_what_changes_of_weights_round_is_right():
    """Slopes move far logits by hundreds, and dS by what remains when their mean is taken off."""
    rng, half = np.random.default_rng(7), lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64)
    d = problem(ml_dtypes.bfloat16, slopes=np.array([[0.1, 0.02]]))
    d.seen = d.seen & (np.arange(300) % (20 + 40 * np.arange(7)[:, None]) == 19)
    moved = dense_reference.moved(d, {"slopes": np.ones((1, 2))})
    f, do = dense_reference.forward(moved), half(rng.standard_normal((1, 7, 2, 8)))
    right = dense_reference.backward(moved, f, do, 0.0)
    limits = rounding_bounds.of_hessian(moved, f, right, do, Unit.of("bfloat16", kernels=True))
    k, v, do = np.repeat(d.k, 2, 2).swapaxes(1, 2), d.v.swapaxes(1, 2), do.swapaxes(1, 2)
    e = np.where(f.seen, np.exp(f.x.real - f.most[..., None]), 0.0)
    de, total = -e * d.distance, e.sum(-1, keepdims=True)
    less = -de.sum(-1, keepdims=True) / total**2
    products = np.matmul(do, v.swapaxes(2, 3))
    by_o = lambda e: (np.matmul(half(e), v) * do).sum(-1, keepdims=True) / total
    delta, ddelta = by_o(e) / total, by_o(de) / total + 2.0 * by_o(e) * less
    ds = de * (half(products / total) - delta) + e * (half(products * less) - ddelta)
    dv = np.matmul(half(de).swapaxes(2, 3), half(do / total))
    dv += np.matmul(half(e).swapaxes(2, 3), half(do * less))
    found = {"hq": 0.25 * np.matmul(half(ds), k).swapaxes(1, 2)}
    found["hv"] = dv.sum(1, keepdims=True).swapaxes(1, 2)
    found["halibi_slopes"] = -(ds * d.distance).sum((2, 3))
    exact = dense_reference.hessian_vector(right)
    for name, x in found.items():
        assert not gpu_fuzz.difference(x, exact[name], limits[name])[1], name


def test_products_in_parts_are_right_where_delta_cancels():
    """Gives a sink nearly all of a row's weight, and cancels nearly all of delta by dlse."""
    rng = np.random.default_rng(8)
    d = dataclasses.replace(problem(), scale=3.0, sinks=np.array([[3.0, 3.0]]))
    d.seen = d.seen & (np.arange(300) < 2)
    f, do = dense_reference.forward(d), rng.standard_normal((1, 7, 2, 8))
    cancels = (f.o * do.swapaxes(1, 2)).sum(-1)
    right = dense_reference.backward(d, f, do, cancels)
    limits = rounding_bounds.of_backward(d, f, right, do, Unit.of("float32", kernels=True))
    half = lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64)
    q, k = d.q.swapaxes(1, 2), np.repeat(d.k, 2, 2).transpose(0, 2, 3, 1)
    large, small = (half(x) for x in (q, k)), (half(x - half(x)) for x in (q, k))
    (a, b), (c, e) = large, small
    x = np.where(d.seen, 3.0 * (a @ b + a @ e + c @ b), -np.inf)
    weights = np.exp(x)
    total = weights.sum(-1, keepdims=True) + np.exp(3.0)
    o = weights @ d.v.swapaxes(1, 2) / total
    delta = (o * do.swapaxes(1, 2)).sum(-1) - cancels
    found = -(np.exp(3.0) / total[..., 0] * delta).sum(-1)
    assert abs(found / right.gradients["dsinks"] - 1.0).max() > 1e-3
    assert not gpu_fuzz.difference(found, right.gradients["dsinks"], limits["dsinks"])[1]


def test_products_in_parts_are_right_next_to_a_bias_that_hides_keys():
    d = problem(bias=np.where(np.arange(300) % 3 == 0, -1e10, 0.0)[None, None, None])
    d = dataclasses.replace(d, scale=3.0, rounded=True)
    f, half = dense_reference.forward(d), lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64)
    limits = rounding_bounds.of_forward(d, f, Unit.of("float32", kernels=True))
    q, k = d.q.swapaxes(1, 2), np.repeat(d.k, 2, 2).transpose(0, 2, 3, 1)
    rest_of_q, rest_of_k = half(q - half(q)), half(k - half(k))
    s = np.matmul(half(q), half(k) + rest_of_k) + np.matmul(rest_of_q, half(k))
    x = (3.0 * s + d.bias).astype(np.float32).astype(np.float64)
    lse = np.log(np.exp(x).sum(-1))
    assert not gpu_fuzz.difference(lse, f.lse, limits["lse"])[1]
    d.bias = d.bias - 1e10 * (np.arange(300) == f.p[0, 0, 0].argmax())  # hides one key more
    lse = dense_reference.forward(d).lse
    assert gpu_fuzz.difference(lse, f.lse, limits["lse"])[1]


# One of every public function, x64 among them.
@pytest.mark.parametrize("number", [3, 12, 13, 30, 33, 45, 50, 61, 65, 102])
@pytest.mark.thorough(always=["3", "13", "30", "45", "50", "65"])
def test_draws_are_right_on_jnp(number):
    (found,) = gpu_fuzz.attempt(1, ("xla",), number)
    assert found.kind == "right", found.why


def _call(number: int) -> list[int]:
    if number == 1:
        os._exit(3)
    if number == 2:
        time.sleep(600.0)
    return [number]


@pytest.mark.thorough
def test_a_process_that_hangs_or_ends_is_replaced():
    arguments = argparse.Namespace(
        seed=0, first=0, count=5, minutes=9.0, processes=2, limit=3.0, json=None
    )
    late = lambda number, why: [f"{number}: {why}"]
    figures = lambda outcomes: {"outcomes": outcomes}
    found = fuzzing.run(_call, arguments, figures, late)
    right = [0, "1: the process ended", "2: not done in 3 seconds", 3, 4]
    assert found["outcomes"] == right and found["calls"] == 5


def test_a_host_without_a_gpu_knows_the_kernels_of_a_call():
    kernels = [gpu_fuzz.kernels(1, ("hopper", "portable"), n) for n in (0, 1, 3, 0)]
    assert kernels[0] == kernels[3] and len(set(kernels)) == 3
    assert all(len(x) == digests.LENGTH for x in kernels)


def test_calls_whose_kernels_have_changed_run_again():
    which = 1, ("hopper", "portable")
    outcomes = [
        gpu_fuzz.Outcome(n, which[1][n % 2], None, "flash_attention", False, kernels=f"old {n}")
        for n in range(12)
    ]
    provenance = {"calls": 12, "versions": {}, "commit": "before", "date": "2026-01-01"}
    file = gpu_fuzz.summary(*which, 0.0, outcomes) | provenance
    file = json.loads(json.dumps(file))
    assert gpu_fuzz.changed(*which, file["kernels"], 3) == [3]
    assert gpu_fuzz.changed(*which, {"3": gpu_fuzz.kernels(*which, 3)}, 3) == []

    waiting = gpu_fuzz.without(file, [3, 10])
    assert waiting[gpu_fuzz.WAITING] == [3, 10] and not {"3", "10"} & waiting["kernels"].keys()
    ran = [
        dataclasses.replace(outcomes[10], kernels="new 10", errors={"dq": 0.5}),
        dataclasses.replace(outcomes[3], kind="wrong", why="off"),
    ]
    again = gpu_fuzz.summary(*which, 0.0, ran[:1]) | provenance | {"calls": 1, "commit": "after"}
    right = gpu_fuzz.merged(waiting, again, ran[:1])
    assert right["kernels"]["10"] == "new 10" and right[gpu_fuzz.WAITING] == [3]
    assert right["by function"] == file["by function"] and right["calls"] == 12
    assert right[gpu_fuzz.LARGEST] == {"hopper dq": 0.5} and not right["wrong"]
    assert [run["commit"] for run in right["again"]] == ["after"]

    again = gpu_fuzz.summary(*which, 0.0, ran[1:]) | provenance
    wrong = gpu_fuzz.merged(right, again, ran[1:])
    assert [each["number"] for each in wrong["wrong"]] == [3] and not wrong[gpu_fuzz.WAITING]
    assert wrong["by backend"]["portable"] == {"right": 5, "wrong": 1}
