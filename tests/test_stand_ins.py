"""Stand-ins for primitives that Mosaic GPU cannot lower: same values, same gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flash_pallas import explain, flash_attention
from flash_pallas.backends.gpu import stand_ins
from flash_pallas.backends.gpu.launch import refusal
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.core import elementwise
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.transforms import derivatives

SHAPE = (8, 16)
FUNCTIONS = {
    "acosh": lambda x: jnp.arccosh(jnp.abs(x) + 1.5),
    "add_any": lambda x: x * x,
    "asinh": jnp.arcsinh,
    "atanh": lambda x: jnp.arctanh(x / 16.0),
    "cbrt": lax.cbrt,
    "ceil": lambda x: lax.ceil(x) * x,
    "cosh": lambda x: jnp.cosh(x / 4.0),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "expm1": jnp.expm1,
    "floor": lambda x: lax.floor(x) * x,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "integer_pow": lambda x: (jnp.abs(x) + 1.0) ** -3 / (x * x + 1.0),
    "is_finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "log2": lambda x: jnp.log2(jnp.abs(x) + 0.5),
    "logistic": jax.nn.sigmoid,
    "not": lambda x: jnp.where(~(x > 0.0), x, 2.0 * x),
    "pow": lambda x: lax.pow(jnp.abs(x) + 0.5, x),
    "pow_negative": lambda x: lax.pow(-jnp.abs(x) - 0.5, jnp.full_like(x, 3.0)),
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 0.7)),
    "sinh": lambda x: jnp.sinh(x / 4.0),
    "stop_gradient": lambda x: x * lax.stop_gradient(x),
    "softplus": jax.nn.softplus,
    "tan": lambda x: jnp.tan(x / 4.0),
    "tanh": jnp.tanh,
}


def _x():
    return jnp.asarray(np.random.default_rng(0).normal(size=SHAPE) * 2.0, jnp.float32)


def _pull(function):
    return lambda x, d: jax.vjp(function, x)[1](d)[0]


@pytest.mark.thorough(always=["erf", "tanh", "pow", "softplus"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_value(name):
    found = stand_ins.call(FUNCTIONS[name], SHAPE, _x())
    np.testing.assert_allclose(found, FUNCTIONS[name](_x()), rtol=2e-6, atol=1e-6)


@pytest.mark.thorough(always=["erf", "tanh", "pow", "softplus"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient(name):
    pull = _pull(FUNCTIONS[name])
    found = stand_ins.call(pull, SHAPE, _x(), _x() + 1.0)
    np.testing.assert_allclose(found, pull(_x(), _x() + 1.0), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(("name", "count"), [("tanh", 1), ("logistic", 1), ("rem", 1), ("gelu", 1)])
def test_divisions_of_stand_ins_are_the_kernels_own(name, count):
    shapes = []

    def divide(x, y):
        shapes.append((x.shape, y.shape))
        return x / y

    found = stand_ins.call(FUNCTIONS[name], SHAPE, _x(), divide=divide)
    np.testing.assert_allclose(found, FUNCTIONS[name](_x()), rtol=2e-6, atol=1e-6)
    assert shapes == [(SHAPE, SHAPE)] * count


def test_integers():
    i = jnp.arange(128, dtype=jnp.int32).reshape(SHAPE) - 40
    function = lambda i: ~(i // 7) + i % 5 - lax.rem(i, jnp.int32(9))
    np.testing.assert_array_equal(stand_ins.call(function, SHAPE, i), function(i))


def test_stand_ins_are_of_primitives_that_a_mod_may_use():
    beside = {"broadcast_in_dim", "reshard"}
    assert set(stand_ins.STAND_INS) - beside <= elementwise.ELEMENTWISE
    assert not set(stand_ins.STAND_INS) & stand_ins.UNSUPPORTED


def _lowers(score_mod):
    """Checks that the Hopper forward and backward with this score_mod become kernels."""
    backend = HopperBackend(num_sms=132)
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def loss(q, k, v):
        call = validate.canonicalize(q, k, v, Arguments(score_mod=score_mod))
        assert refusal(call.problem) is None
        blocks = backend.attention.plan(call.problem)
        return (
            derivatives.attend(backend, call.spec, blocks, call.operands)[0]
            .astype(jnp.float32)
            .sum()
        )

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x)
    return "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.thorough
def test_functions_of_scores_lower():
    assert _lowers(lambda s, b, n, i, j: sum(f(s) for f in FUNCTIONS.values()))


def test_functions_of_positions_lower():
    def score_mod(s, b, n, i, j):
        number = (~(i // 7) + i % 5 - lax.rem(i, jnp.int32(9))) ^ (lax.clz(i) | (j << 2))
        return s + number.astype(s.dtype)

    assert _lowers(score_mod)


@pytest.mark.thorough(always=["atan"])
@pytest.mark.parametrize("name", ["lgamma", "atan"])
def test_functions_that_only_xla_has(name):
    """Checks that GPU kernels name what they cannot compute; xla runs it with its derivatives."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 9, 2, 8))
    function = getattr(lax, name)
    call = lambda q, k, v, attend: attend(
        q, k, v, score_mod=lambda s, b, n, i, j: function(jnp.abs(s) + 1.0)
    )
    problem = explain(flash_attention, q, k, v, score_mod=lambda s, b, n, i, j: function(s)).problem
    assert refusal(problem) == f"cannot compile {name} of score_mod"

    def plain(q, k, v, score_mod):
        s = score_mod(jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(8.0), 0, 0, 0, 0)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    loss = lambda attend: lambda q, k, v: jnp.sum(jnp.sin(call(q, k, v, attend)))
    found, expected = (jax.grad(loss(f), (0, 1, 2))(q, k, v) for f in (flash_attention, plain))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
