"""The end of the online softmax, rows without keys included."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core import softmax


def test_finish_and_natural_give_the_log_sum_exp():
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    logits = x * softmax.LOG2E
    m = logits.max(-1)
    l = np.exp2(logits - m[:, None]).sum(-1)
    inverse, lse_log2 = softmax.finish(jnp.asarray(m), jnp.asarray(l))
    np.testing.assert_allclose(inverse, 1 / l, rtol=1e-6)
    expected = np.log(np.exp(x.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(softmax.natural(lse_log2), expected, rtol=1e-6)


def test_a_row_without_keys():
    inverse, lse_log2 = softmax.finish(jnp.array([-jnp.inf]), jnp.zeros(1))
    assert inverse.tolist() == [0.0] and jnp.isfinite(lse_log2).all()
    assert jnp.exp2(3e4 - lse_log2).tolist() == [0.0]
    assert softmax.natural(lse_log2).tolist() == [-np.inf]


@pytest.mark.parametrize("sink", [-np.inf, -3.0, 0.5, 40.0])
def test_a_sink_joins_the_sum_alone(sink):
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    logits = x * softmax.LOG2E
    m = logits.max(-1)
    l = np.exp2(logits - m[:, None]).sum(-1)
    inverse, lse_log2 = softmax.finish(
        jnp.asarray(m), jnp.asarray(l), jnp.full(5, sink * softmax.LOG2E, jnp.float32)
    )
    total = np.exp(x.astype(np.float64)).sum(-1) + np.exp(sink)
    np.testing.assert_allclose(softmax.natural(lse_log2), np.log(total), rtol=1e-6)
    np.testing.assert_allclose(inverse, np.exp2(m.astype(np.float64)) / total, rtol=1e-5)


@pytest.mark.parametrize("sink", [-np.inf, -3.0, 40.0])
def test_a_row_without_keys_has_its_sink(sink):
    inverse, lse_log2 = softmax.finish(
        jnp.array([-jnp.inf]), jnp.zeros(1), jnp.array([sink * softmax.LOG2E])
    )
    assert inverse.tolist() == [0.0]
    np.testing.assert_allclose(softmax.natural(lse_log2), [sink], rtol=1e-6)
