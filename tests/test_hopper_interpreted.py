"""The Hopper kernels themselves, on CPU: right, free of races and deadlocks."""

from __future__ import annotations

from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flash_pallas.backends.gpu import bias_tiles
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward import dq_sums
from flash_pallas.backends.hopper.backward.dbias import tiles as dbias_tiles
from flash_pallas.backends.hopper.backward.fused import launches
from flash_pallas.backends.hopper.common import tile_lists

from . import checks
from .hopper_cases import (
    DIAGONAL,
    FLOAT32,
    FORWARD_BLOCKS,
    FUSED_BLOCKS,
    INTERPRETED,
    MAXIMA,
    MODIFIERS,
    PAIRED_BLOCKS,
    PAIRS,
    ROTATED,
    SECTIONS,
    WIDE,
    WITHOUT_PRODUCER,
)
from .interpreter import DeadlockError, RaceError, race_checked

BACKEND = HopperBackend(interpret=True, num_sms=2)


@pytest.mark.thorough(always=["d64_split", "everything"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", (*INTERPRETED, *MODIFIERS, *FLOAT32, *MAXIMA), ids=str)
def test_kernels(case):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, kernels=True)


@pytest.mark.interpret
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"score_mod": lambda s, b, n, i, j: s * s}])
def test_a_query_that_is_nan_stays_nan_next_to_keys_that_a_bias_hides(options):
    """Kernels mark hidden keys by NaN for a while, of which those of the user are told apart."""
    shape = 1, 128, 1, 64
    q, k, v = (jnp.full(shape, x, jnp.bfloat16) for x in (0.5, 0.25, 1.0))
    bias = jnp.zeros((1, 1, 128, 128), jnp.bfloat16).at[..., 3:].set(-jnp.inf)
    with race_checked():
        attend = checks.bind(BACKEND)
        o, lse = attend(q.at[:, 5].set(jnp.nan), k, v, bias=bias, **options)[:2]
    others = np.arange(128) != 5
    assert np.isnan(o[0, 5]).all() and np.isnan(lse[0, 0, 5])
    np.testing.assert_array_equal(o[0, others], 1.0)


@pytest.mark.thorough(always=["wide_320_causal"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_heads(case):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, kernels=True)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("case", "blocks"), FUSED_BLOCKS, ids=[case.name for case, _ in FUSED_BLOCKS]
)
def test_fused_blocks(case, blocks):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND, {"fused": blocks}), case)


@pytest.mark.thorough(always=["paired_dropout"])
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("case", "blocks"), PAIRED_BLOCKS, ids=[case.name for case, _ in PAIRED_BLOCKS]
)
def test_paired_blocks(case, blocks):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND, {"paired": blocks}), case)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("case", "blocks"), FORWARD_BLOCKS, ids=[case.name for case, _ in FORWARD_BLOCKS]
)
def test_forward_blocks(case, blocks):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND, {"forward": blocks}), case)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", WITHOUT_PRODUCER, ids=str)
def test_compute_warpgroups_that_load(case):
    backend = HopperBackend(interpret=True, num_sms=2, trades_registers=False)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(backend), case)


@pytest.mark.thorough
@pytest.mark.interpret
def test_sections_of_heads_and_batch(monkeypatch):
    """Runs two of nine (head, batch entry) pairs at a time; the ninth runs alone."""
    monkeypatch.setattr(dq_sums, "AT_ONCE_BYTES", 2 * 8 * SECTIONS.T * SECTIONS.H)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), SECTIONS)


@pytest.mark.thorough(always=["diagonal_64"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", DIAGONAL, ids=str)
def test_dq_is_stored_at_the_diagonal(monkeypatch, case):
    cleared = mock.Mock(wraps=dq_sums.cleared)
    monkeypatch.setattr(dq_sums, "cleared", cleared)
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(dq_sums, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(launches, "ENOUGH", 1)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, kernels=True)
    assert cleared.called


@pytest.mark.interpret
def test_ctas_that_wait_for_later_ones_are_a_deadlock(monkeypatch):
    monkeypatch.setattr(dq_sums, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(dq_sums, "block_of", lambda launch, index: index)
    with pytest.raises(DeadlockError, match="found bits 0x0 of word 0, not 0x6"), race_checked():
        checks.run(checks.bind(BACKEND), DIAGONAL[0])


@pytest.mark.thorough
@pytest.mark.interpret
def test_ctas_that_do_not_wait_for_what_they_add_to_race(monkeypatch):
    monkeypatch.setattr(dq_sums, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(dq_sums.OwnTiles, "await_others", lambda own: None)
    monkeypatch.setattr(dq_sums.OwnTiles, "await_flags", lambda own: None)
    with pytest.raises(RaceError, match="reduction of"), race_checked():
        checks.run(checks.bind(BACKEND), DIAGONAL[0])


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairs_of_ctas_sum_gradients_of_a_bias(monkeypatch, case):
    """Sums over all members in one sum: an odd number of tiles, in sections of one CTA pair."""
    monkeypatch.setattr(dbias_tiles, "PAIRS_FROM", 1)
    monkeypatch.setattr(dbias_tiles, "ENOUGH_CTAS", 1)
    monkeypatch.setattr(bias_tiles, "SECTION_TILES", 2)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", ROTATED, ids=str)
def test_rotated_lists(monkeypatch, case):
    monkeypatch.setattr(tile_lists, "STREAMED_BYTES", 0)
    monkeypatch.setattr(tile_lists, "AT_ONCE", 2)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, kernels=True)


@pytest.mark.interpret
@pytest.mark.parametrize("ctas", [1, 2, 200])
def test_zeros_reach_the_end(monkeypatch, ctas):
    """Clears tiles of 128 rows, the last with 72 rows or 96; more tiles than CTAs, and fewer."""
    monkeypatch.setattr(dq_sums, "ZEROS_CTAS", ctas)
    shapes = [(2, 70, 3, 128), (1, 32, 192)]
    with race_checked():
        found = dq_sums.zeros(shapes, True)
    for x, shape in zip(found, shapes, strict=True):
        np.testing.assert_array_equal(x, np.zeros(shape, np.float32))


@pytest.mark.thorough
@pytest.mark.interpret
def test_float32_is_as_precise_as_documented():
    with race_checked():
        checks.assert_precision_of_float32(checks.bind(BACKEND))
