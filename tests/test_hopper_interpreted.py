"""The Hopper kernels themselves, on CPU: right, free of races and deadlocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.gpu import bias_tiles
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward import preprocess
from flash_pallas.backends.hopper.backward.dbias import tiles as dbias_tiles
from flash_pallas.backends.hopper.backward.fused import kernel, tiles
from flash_pallas.backends.hopper.common import tile_lists
from flash_pallas.core.problem import AttentionSpec, Cotangents, Operands, describe
from flash_pallas.core.softmax import EMPTY_ROW

from . import checks
from .hopper_cases import (
    FLOAT32,
    FORWARD_BLOCKS,
    FUSED_BLOCKS,
    INTERPRETED,
    MAXIMA,
    MODIFIERS,
    PAIRED_BLOCKS,
    PAIRS,
    PERSISTENT_SECTIONS,
    ROTATED,
    SECTIONS,
    WIDE,
    WITHOUT_PRODUCER,
)
from .interpreter import race_checked

BACKEND = HopperBackend(interpret=True, num_sms=2)


@pytest.mark.thorough(always=["d64_split", "everything", "float32_32_window_dropout"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", (*INTERPRETED, *MODIFIERS, *FLOAT32, *MAXIMA), ids=str)
def test_kernels(case):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, kernels=True)


PREPROCESSING = [case for case in INTERPRETED if case.name in ("d128", "d192", "d64_split")]


@pytest.mark.thorough(always=["d128"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", PREPROCESSING, ids=str)
def test_kernels_with_one_for_delta(case):
    backend = dataclasses.replace(BACKEND, preprocesses=True)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(backend), case, kernels=True)


@pytest.mark.thorough(always=["wide_320_causal", "wide_384_float16"])
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


@pytest.mark.thorough(always=["paired_late_dq"])
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
    monkeypatch.setattr(tiles, "AT_ONCE_BYTES", 2 * 8 * SECTIONS.T * SECTIONS.H)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), SECTIONS)


@pytest.mark.thorough
@pytest.mark.interpret
def test_sections_of_a_persistent_grid(monkeypatch):
    """Runs nine pairs, two at a time but for the last, with two KV blocks each, on four CTAs."""
    case, blocks = PERSISTENT_SECTIONS, {"fused": {"persistent_clusters": 4}}
    monkeypatch.setattr(tiles, "AT_ONCE_BYTES", 2 * 8 * case.T * case.H)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND, blocks), case)


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


@pytest.mark.thorough(always=["blocks_listed"])
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
    monkeypatch.setattr(kernel, "ZEROS_CTAS", ctas)
    shapes = [(2, 70, 3, 128), (1, 32, 192)]
    with race_checked():
        found = kernel.zeros(shapes, True, np.ones(3, np.float32))
    for x, shape in zip(found, shapes, strict=True):
        np.testing.assert_array_equal(x, np.zeros(shape, np.float32))


# (T, Hv, dtype, columns of dQ, CTAs): lengths end inside a tile of 64 rows and of 128, columns
# inside a tile; each CTA has several tiles, or one; O and dQ have different head dims.
PREPROCESSED = [
    (136, 40, "float16", 64, 3),
    (72, 128, "bfloat16", 192, 4),
    (200, 96, "bfloat16", 96, 200),
    (64, 256, "bfloat16", None, 1),
]


@pytest.mark.thorough(always=["False-72_128", "True-136_40"])
@pytest.mark.interpret
@pytest.mark.parametrize("given", PREPROCESSED, ids=lambda given: f"{given[0]}_{given[1]}")
@pytest.mark.parametrize("with_dlse", [False, True])
def test_delta_and_zeros(monkeypatch, given, with_dlse):
    """Computes delta of rows with keys and without, whose cotangents may be NaN."""
    length, width, dtype, columns, ctas = given
    monkeypatch.setattr(preprocess, "CTAS", ctas)
    rng, batch, heads = np.random.default_rng(length), 2, 3
    o, do = (jnp.asarray(rng.normal(size=(batch, length, heads, width)), dtype) for _ in range(2))
    lse_log2, dlse = (rng.normal(size=(batch, heads, length)).astype(np.float32) for _ in range(2))
    lse_log2[1, 2, 5:9] = EMPTY_ROW
    dlse[lse_log2 == EMPTY_ROW] = np.nan
    do = do.at[1, 5:9, 2].set(jnp.nan)
    problem = describe(Operands(o, o, o), AttentionSpec(scale=1.0))
    cotangents = Cotangents(lse_log2, do, None, o=o, dlse=dlse if with_dlse else None)
    assert preprocess.takes(problem)
    with race_checked():
        delta, dq = preprocess.preprocess(problem, cotangents, columns, True)
    exact = [np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (o, do)]
    wanted = np.sum(exact[0] * exact[1], axis=-1) - (dlse if with_dlse else 0.0)
    wanted = np.where(lse_log2 == EMPTY_ROW, 0.0, wanted)
    np.testing.assert_allclose(delta[:, :, :length], wanted, atol=1e-6 * width)
    np.testing.assert_array_equal(delta[:, :, length:], 0.0)
    if columns is None:
        assert dq is None
    else:
        np.testing.assert_array_equal(dq, np.zeros((batch, length, heads, columns), np.float32))


def test_what_delta_is_left_to():
    """Checks that XLA computes delta where TMA would need copies, and where sinks read it."""

    def takes(length, width, dtype="bfloat16", **given):
        q = jax.ShapeDtypeStruct((2, length, 3, width), dtype)
        return preprocess.takes(describe(Operands(q, q, q)._replace(**given), AttentionSpec(1.0)))

    assert takes(200, 64) and takes(200, 80) and takes(200, 256)
    assert not takes(200, 64, "float32") and not takes(200, 264) and not takes(200, 72)
    assert not takes(204, 64)
    assert not takes(200, 64, sinks=jax.ShapeDtypeStruct((2, 3), jnp.float32))


@pytest.mark.thorough
@pytest.mark.interpret
def test_float32_is_as_precise_as_documented():
    with race_checked():
        checks.assert_precision_of_float32(checks.bind(BACKEND))
