"""Stand-ins for primitives that Mosaic GPU cannot lower: same values, same gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flash_pallas.backends.mosaic import stand_ins
from flash_pallas.core import elementwise

SHAPE = (8, 16)
FUNCTIONS = {
    "add_any": lambda x: x * x,
    "cbrt": lax.cbrt,
    "ceil": lambda x: lax.ceil(x) * x,
    "erf": lax.erf,
    "expm1": jnp.expm1,
    "floor": lambda x: lax.floor(x) * x,
    "integer_pow": lambda x: (jnp.abs(x) + 1.0) ** -3 / (x * x + 1.0),
    "is_finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "logistic": jax.nn.sigmoid,
    "not": lambda x: jnp.where(~(x > 0.0), x, 2.0 * x),
    "pow": lambda x: lax.pow(jnp.abs(x) + 0.5, x),
    "pow_negative": lambda x: lax.pow(-jnp.abs(x) - 0.5, jnp.full_like(x, 3.0)),
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 0.7)),
    "stop_gradient": lambda x: x * lax.stop_gradient(x),
    "softplus": jax.nn.softplus,
    "tan": lambda x: jnp.tan(x / 4.0),
    "tanh": jnp.tanh,
}


def _x():
    return jnp.asarray(np.random.default_rng(0).normal(size=SHAPE) * 2.0, jnp.float32)


def _pull(function):
    return lambda x, d: jax.vjp(function, x)[1](d)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_value(name):
    found = stand_ins.call(FUNCTIONS[name], SHAPE, _x())
    np.testing.assert_allclose(found, FUNCTIONS[name](_x()), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient(name):
    pull = _pull(FUNCTIONS[name])
    found = stand_ins.call(pull, SHAPE, _x(), _x() + 1.0)
    np.testing.assert_allclose(found, pull(_x(), _x() + 1.0), rtol=5e-6, atol=5e-6)


def test_integers():
    i = jnp.arange(128, dtype=jnp.int32).reshape(SHAPE) - 40
    function = lambda i: ~(i // 7) + i % 5 - lax.rem(i, jnp.int32(9))
    np.testing.assert_array_equal(stand_ins.call(function, SHAPE, i), function(i))


def test_stand_ins_are_of_primitives_that_a_mod_may_use():
    beside = {"broadcast_in_dim", "reshard"}
    assert set(stand_ins.STAND_INS) - beside <= elementwise.ELEMENTWISE
    assert not set(stand_ins.STAND_INS) & stand_ins.UNSUPPORTED
