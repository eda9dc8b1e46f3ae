"""Logits and their derivative, compared with a second implementation and with jax.grad."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flash_pallas.core import dropout, mods, scores
from flash_pallas.core.mask import Tile
from flash_pallas.core.problem import AttentionSpec
from flash_pallas.core.softmax import LOG2E

from ..mods import SCORE_MODS

Q, KV, Q_START, KV_START = 5, 7, 11, 3
SCALE = 0.3
RNG = np.random.default_rng(0)
QK = 3.0 * RNG.standard_normal((Q, KV)).astype(np.float32)
BIAS = RNG.standard_normal((Q, KV)).astype(np.float32)
UPSTREAM = RNG.standard_normal((Q, KV)).astype(np.float32)
SLOPE, CAPTURED = np.float32(0.2), np.float32(0.7)

FEATURES = list(itertools.product([False, True], repeat=4))


def score_mod(score, b, n, i, j, captured):
    return score - captured * score * score + 0.1 * (i - 2 * j).astype(score.dtype)


def built(bias, alibi, softcap, mod, q_axis):
    """Builds (spec, Tile, qk, TileInputs) with these features."""
    turn = (lambda x: jnp.asarray(x)) if q_axis == 0 else (lambda x: jnp.asarray(x.T))
    traced, params = None, ()
    if mod:
        captured = jnp.full((1, 1), CAPTURED)
        function = lambda s, b, n, i, j: score_mod(s, b, n, i, j, captured[b, n])
        found = mods.trace(function, 1, 1, jnp.float32)
        traced, params = found.mod, found.params
    spec = AttentionSpec(SCALE, softcap=1.5 if softcap else None, score_mod=traced)
    tile = Tile(Q_START, KV_START, (Q, KV) if q_axis == 0 else (KV, Q), q_axis)
    inputs = scores.TileInputs(
        bias=turn(BIAS) if bias else None,
        slope=jnp.asarray(SLOPE) if alibi else None,
        score_params=tuple(p[0, 0] for p in params),
    )
    return spec, tile, turn(QK), inputs


def written_out(bias, alibi, softcap, mod):
    """Returns (scale * qk, bias, slope, captured) -> natural logits, by the contract's words."""
    i = Q_START + jnp.arange(Q, dtype=jnp.int32)[:, None]
    j = KV_START + jnp.arange(KV, dtype=jnp.int32)[None]

    def logits(x, added, slope, captured):
        x = x + added if bias else x
        x = x - slope * jnp.abs(i - j).astype(x.dtype) if alibi else x
        x = 1.5 * jnp.tanh(x / 1.5) if softcap else x
        return score_mod(x, 0, 0, i, j, captured) if mod else x

    return logits


@pytest.mark.parametrize("q_axis", [0, 1])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_logits_and_their_derivatives(features, q_axis):
    spec, tile, qk, inputs = built(*features, q_axis)
    turn = (lambda x: np.asarray(x)) if q_axis == 0 else (lambda x: np.asarray(x).T)
    z = scores.logits(spec, tile, qk, inputs)
    assert isinstance(z.log2_scale, float)
    logits = written_out(*features)
    exact, pull = jax.vjp(logits, SCALE * QK, BIAS, SLOPE, CAPTURED)
    np.testing.assert_allclose(turn(z.x) * z.log2_scale, exact * LOG2E, rtol=1e-5, atol=1e-5)
    dx, dparams = z.pull(jnp.asarray(UPSTREAM if q_axis == 0 else UPSTREAM.T))
    exact_dx, exact_dbias, exact_dslope, exact_dcaptured = pull(jnp.asarray(UPSTREAM))
    np.testing.assert_allclose(turn(dx), exact_dx, rtol=1e-4, atol=1e-5)
    bias, alibi, _, mod = features
    if bias:
        np.testing.assert_allclose(turn(dx), exact_dbias, rtol=1e-4, atol=1e-5)
    if alibi:
        np.testing.assert_allclose(
            scores.slope_pull(tile, dx).sum(), exact_dslope, rtol=1e-4, atol=1e-4
        )
    assert len(dparams) == (1 if mod else 0)
    if mod:
        np.testing.assert_allclose(dparams[0].sum(), exact_dcaptured, rtol=1e-4, atol=1e-4)


def test_plain_logits_are_the_product_itself():
    spec, tile, qk, inputs = built(False, False, False, False, 0)
    z = scores.logits(spec, tile, qk, inputs)
    assert z.x is qk and z.log2_scale == SCALE * LOG2E
    assert z.pull(qk) == (qk, ()) and scores.visible(spec, tile, inputs) is None


def test_integers_that_a_score_mod_captured_have_no_gradient():
    function = lambda s, b, n, i, j: jnp.where(i > 3 * b, s, 2.0 * s)
    found = mods.trace(function, 1, 1, jnp.float32)
    mod, params = found.mod, found.params
    inputs = scores.TileInputs(score_params=tuple(p[0, 0] for p in params))
    tile = Tile(0, 0, (Q, KV))
    z = scores.logits(AttentionSpec(1.0, score_mod=mod), tile, jnp.asarray(QK), inputs)
    dx, dparams = z.pull(jnp.ones((Q, KV)))
    np.testing.assert_array_equal(dx, np.where(np.arange(Q)[:, None] > 0, 1.0, 2.0) * np.ones(KV))
    assert dparams == (None,) * len(params) and params


@pytest.mark.parametrize("q_axis", [0, 1])
@pytest.mark.parametrize("features", list(itertools.product([False, True], repeat=3)), ids=str)
def test_visible(features, q_axis):
    segments, mask, mod = features
    q_ids, kv_ids = np.array([0, 0, 1, -1, 5]), np.array([0, 1, 1, -2, 5, 5, 0])
    table = np.ones((Q, KV), bool)
    traced, params, given = None, (), RNG.random((Q, KV)) < 0.5
    if segments:
        table &= q_ids[:, None] == kv_ids
    if mask:
        table &= given
    if mod:
        function = lambda b, n, i, j: (i + 2 * j) % 3 != 1
        found = mods.trace(function, 1, 1)
        traced, params = found.mod, found.params
        i, j = Q_START + np.arange(Q)[:, None], KV_START + np.arange(KV)
        table &= (i + 2 * j) % 3 != 1
    tile = Tile(Q_START, KV_START, (Q, KV) if q_axis == 0 else (KV, Q), q_axis)
    inputs = scores.TileInputs(
        mask=jnp.asarray(given if q_axis == 0 else given.T) if mask else None,
        q_segments=jnp.asarray(q_ids, jnp.int32) if segments else None,
        kv_segments=jnp.asarray(kv_ids, jnp.int32) if segments else None,
        mask_params=tuple(p[0, 0] for p in params),
    )
    found = scores.visible(AttentionSpec(1.0, mask_mod=traced), tile, inputs)
    if not any(features):
        assert found is None
        return
    np.testing.assert_array_equal(found if q_axis == 0 else found.T, table)


@pytest.mark.thorough(always=["0"])
@pytest.mark.parametrize("q_axis", [0, 1])
def test_kept_from_a_key_and_from_hashed_keys(q_axis):
    tile = Tile(Q_START, KV_START, (Q, KV) if q_axis == 0 else (KV, Q), q_axis)
    spec = AttentionSpec(1.0, dropout_rate=0.4)
    key = dropout.call_keys(dropout.seed_words(9), 1, 1)[0, 0]
    i, j = (start + jnp.arange(n, dtype=jnp.int32) for start, n in ((Q_START, Q), (KV_START, KV)))
    expected = dropout.keep(key, i[:, None], j[None], 0.4)
    expected = np.asarray(expected if q_axis == 0 else expected.T)
    found = scores.kept(spec, tile, scores.TileInputs(dropout_key=key))
    np.testing.assert_array_equal(found, expected)
    hashed = (dropout.row_keys(key, i), dropout.column_keys(j))
    rows, columns = (lax.bitcast_convert_type(x, jnp.int32) for x in hashed)
    found = scores.kept(spec, tile, scores.TileInputs(q_keys=rows, kv_keys=columns))
    np.testing.assert_array_equal(found, expected)


def test_the_mods_of_the_cases_are_what_they_say():
    """Checks that every mod changes scores: a case whose mod does not would test nothing."""
    for name, (axes, make) in SCORE_MODS.items():
        function = make(jnp.ones((2,) * len(axes)))
        moved = [
            float(function(jnp.float32(1.3), *(jnp.int32(x) for x in place))) != np.float32(1.3)
            for place in itertools.product(range(2), range(2), range(4), range(4))
        ]
        assert any(moved), name
