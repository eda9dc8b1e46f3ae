"""Tangents on the multiply-add units: the meaning that the interpreter runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.gpu.ptx.softcap import SMALL, Cap, is_large

from .checks import TANH_ERROR
from .hopper_cases import MODIFIERS


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
