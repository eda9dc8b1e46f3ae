"""Exponentials and tangents on the multiply-add units: the meaning that the interpreter runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.gpu.ptx import online_softmax
from flash_pallas.backends.gpu.ptx.softcap import SMALL, Cap, is_large

from .checks import TANH_ERROR
from .hopper_cases import MODIFIERS


def test_the_polynomial_is_right_to_its_bound():
    x = np.linspace(-125.0, 127.0, 1_000_001, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    found = np.asarray(online_softmax.exp2_polynomial(jnp.asarray(x)), np.float64)
    assert abs(found / exact - 1).max() < 2.8e-6


@pytest.mark.parametrize("x", [-127.0, -128.0, -1e30, -np.inf])
def test_hidden_weights_are_exactly_zero(x):
    assert online_softmax.exp2_polynomial(jnp.full((1,), x, jnp.float32)) == 0.0


def test_a_nan_stays_one():
    assert jnp.isnan(online_softmax.exp2_polynomial(jnp.full((1,), jnp.nan, jnp.float32)))[0]


def test_near_the_smallest_numbers_the_polynomial_is_small():
    x = jnp.linspace(-127.5, -125.0, 1001, dtype=jnp.float32)
    found = online_softmax.exp2_polynomial(x)
    assert ((found >= 0) & (found < 2.0**-124.9)).all()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_every_thread_computes_its_share_of_polynomials(share):
    """Checks the share per thread, which holds columns c and c + 1 of every 8."""
    columns = np.arange(128).reshape(16, 4, 2)
    chosen = np.vectorize(lambda c: online_softmax.is_polynomial(int(c), share))(columns)
    np.testing.assert_array_equal(chosen.mean(axis=(0, 2)), share)
    x = jnp.linspace(-20.0, 0.0, 128, dtype=jnp.float32)[None]
    found = np.asarray(online_softmax.plain(x, share))[0]
    one = np.asarray(online_softmax.exp2_polynomial(x))[0]
    np.testing.assert_array_equal(found == one, chosen.ravel() | (found == one))
    np.testing.assert_allclose(found, np.exp2(np.asarray(x, np.float64))[0], rtol=3e-6)


@pytest.mark.parametrize("factor", [0.0025, -0.3, 2.0**-20, 2.0**20])
def test_the_polynomial_of_tangents_is_right_to_its_bound(factor):
    cap = Cap(80.0, factor, small=True)
    x = np.linspace(-cap.largest, cap.largest, 1_000_000, dtype=np.float32)  # without 0
    exact = 80.0 * np.tanh(x.astype(np.float64) * factor)
    found = np.asarray(cap.plain(jnp.asarray(x)), np.float64) * cap.log2_scale
    assert cap.representable and abs(found / exact - 1).max() < TANH_ERROR


@pytest.mark.parametrize("factor", [0.0, 2.0**-21, -(2.0**21), 1e-300, 1e300])
def test_polynomials_out_of_range_are_not_used(factor):
    assert not Cap(80.0, factor).representable


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_element_makes_a_tile_large(sign):
    cap = Cap(40.0, -0.25)
    x = jnp.zeros((64, 128)).at[3, 77].set(sign * cap.largest)
    assert is_large(x, cap, interpret=True) == 0
    assert is_large(x * 1.001, cap, interpret=True) == 1


def test_the_case_straddles_what_the_polynomial_serves():
    """Checks that tiles lie on either side of the threshold, and none beyond twice of it."""
    case = next(case for case in MODIFIERS if case.name == "softcap_straddles")
    x = case.inputs()
    q, k = (np.asarray(a, np.float64) for a in (x.q, x.k))
    relative = abs(np.einsum("btnh,bskh->nts", q, k)) * (case.scale / case.softcap)
    rows, keys = case.T // 64 * 64, case.S // 128 * 128
    tops = relative[:, :rows, :keys].reshape(case.N, -1, 64, keys // 128, 128).max((2, 4))
    assert tops.min() < 0.95 * SMALL < 1.05 * SMALL < tops.max() < 2 * SMALL
