"""The end of the online softmax, including rows without keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core import softmax

ZERO = jnp.zeros(1)


def drawn():
    """Draws (logits, their row max in base 2, row sums of the weights relative to it)."""
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    m = (x * softmax.LOG2E).max(-1)
    return x.astype(np.float64), m, np.exp2(x * softmax.LOG2E - m[:, None]).sum(-1)


def test_finish_and_natural_give_the_log_sum_exp():
    x, m, l = drawn()
    inverse, lse_log2, shift = softmax.finish(jnp.asarray(m), jnp.asarray(l), jnp.zeros(5))
    np.testing.assert_allclose(inverse, 1 / l, rtol=1e-6)
    assert not shift.any()
    np.testing.assert_allclose(softmax.natural(lse_log2), np.log(np.exp(x).sum(-1)), rtol=1e-6)


@pytest.mark.parametrize("far", [1e6, -1e10, -3e38])
def test_rows_that_are_far_have_a_shift(far):
    """Checks that sums of far rows keep their bits, though an LSE in one part has none left."""
    _, _, l = drawn()
    m, shift = softmax.parted(jnp.full(5, far, jnp.float32), 1.0, softmax.FAR_FLOAT32)
    assert not m.any()
    _, lse_log2, shift = softmax.finish(m, jnp.asarray(l), shift)
    np.testing.assert_array_equal(shift, np.float32(far))
    np.testing.assert_allclose(lse_log2, np.log2(l), rtol=1e-6)
    np.testing.assert_allclose(softmax.natural(lse_log2, shift), far + np.log(l), rtol=1e-6)


def test_rows_that_are_near_have_none():
    m, shift = softmax.parted(jnp.array([3.0, -100.0, -jnp.inf]), 1.0, softmax.FAR_FLOAT32)
    np.testing.assert_allclose(m[:2], np.array([3.0, -100.0]) * softmax.LOG2E, rtol=1e-6)
    assert m[2] == -jnp.inf and not shift.any()


def test_a_row_without_keys():
    inverse, lse_log2, shift = softmax.finish(jnp.array([-jnp.inf]), ZERO, ZERO)
    assert inverse.tolist() == [0.0] and jnp.isfinite(lse_log2).all() and shift.tolist() == [0.0]
    assert jnp.exp2(3e4 - lse_log2).tolist() == [0.0]
    assert softmax.natural(lse_log2, shift).tolist() == [-np.inf]


@pytest.mark.parametrize("sink", [-np.inf, -3.0, 0.5, 40.0, 1e5])
def test_a_sink_joins_the_sum_alone(sink):
    x, m, l = drawn()
    given = jnp.full(5, sink, jnp.float32)
    inverse, *lse = softmax.finish(jnp.asarray(m), jnp.asarray(l), jnp.zeros(5), given)
    total = np.logaddexp(np.log(np.exp(x).sum(-1)), sink)
    np.testing.assert_allclose(softmax.natural(*lse), total, rtol=1e-6)
    np.testing.assert_allclose(inverse, np.exp(m * np.log(2.0) - total), rtol=1e-5)


@pytest.mark.parametrize("sink", [-np.inf, -3.0, 40.0, -1e9])
def test_a_row_without_keys_has_its_sink(sink):
    given = jnp.array([sink], jnp.float32)
    inverse, *lse = softmax.finish(jnp.array([-jnp.inf]), ZERO, ZERO, given)
    assert inverse.tolist() == [0.0]
    np.testing.assert_allclose(softmax.natural(*lse), [sink], rtol=1e-6)
