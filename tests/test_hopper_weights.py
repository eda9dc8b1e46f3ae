"""Exponentials on the multiply-add units: the meaning that the interpreter runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.hopper import inline_weights
from flash_pallas.backends.hopper.inline_weights import Powers


def test_the_polynomial_is_right_to_its_bound():
    x = np.linspace(-125.0, 127.0, 1_000_001, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    found = np.asarray(inline_weights.exp2_polynomial(jnp.asarray(x)), np.float64)
    assert abs(found / exact - 1).max() < 2.8e-6


@pytest.mark.parametrize("x", [-127.0, -128.0, -1e30, -np.inf])
def test_hidden_weights_are_exactly_zero(x):
    assert inline_weights.exp2_polynomial(jnp.full((1,), x, jnp.float32)) == 0.0


def test_a_nan_stays_one():
    assert jnp.isnan(inline_weights.exp2_polynomial(jnp.full((1,), jnp.nan, jnp.float32)))[0]


def test_near_the_smallest_numbers_the_polynomial_is_small():
    x = jnp.linspace(-127.5, -125.0, 1001, dtype=jnp.float32)
    found = inline_weights.exp2_polynomial(x)
    assert ((found >= 0) & (found < 2.0**-124.9)).all()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_every_thread_computes_its_share_of_polynomials(share):
    """A thread holds columns c and c + 1 of every 8."""
    columns = np.arange(128).reshape(16, 4, 2)
    chosen = np.vectorize(lambda c: inline_weights.is_polynomial(int(c), share))(columns)
    np.testing.assert_array_equal(chosen.mean(axis=(0, 2)), share)
    x = jnp.linspace(-20.0, 0.0, 128, dtype=jnp.float32)[None]
    found = np.asarray(inline_weights.plain(x, Powers(share, bounded=False)))[0]
    one = np.asarray(inline_weights.exp2_polynomial(x))[0]
    np.testing.assert_array_equal(found == one, chosen.ravel() | (found == one))
    np.testing.assert_allclose(found, np.exp2(np.asarray(x, np.float64))[0], rtol=3e-6)
