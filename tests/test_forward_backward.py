"""Backends x cases x one check: all outputs and all gradients against the oracle."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from . import checks
from .cases import CASES, FEATURES, named

SMALL_BLOCKS = {"block_q": 32, "block_kv": 16}


@pytest.mark.thorough(
    always=[
        "length_1",
        "lengths_113x203_causal",
        "bfloat16_gqa_causal",
        "head_dim_256",
        "scale_negative",
    ]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla(case):
    checks.assert_matches_oracle(checks.bind("xla"), case)


@pytest.mark.thorough(always=["everything"])
@pytest.mark.parametrize(
    "case",
    named(
        "lengths_113x203_causal",
        "lengths_203x113",
        "bottom_right_113x203",
        "gqa_causal",
        "offset_negative",
        "offset_array",
        "wide_values_causal",
    )
    + FEATURES,
    ids=str,
)
def test_xla_with_many_small_blocks(case):
    checks.assert_matches_oracle(checks.bind("xla", SMALL_BLOCKS), case)


@pytest.mark.thorough(always=["bias_infinite", "bias_infinite_both"])
@pytest.mark.parametrize(
    "name", ["everything", "everything_bfloat16", "bias_infinite", "bias_infinite_both"]
)
def test_xla_in_float64(name):
    """Checks that nothing is rounded to less than float64: both agree to the last digits."""
    case = dataclasses.replace(*named(name), dtype="float64")
    exact = checks.oracle(case)
    with jax.enable_x64(True):
        found = checks.run(checks.bind("xla", SMALL_BLOCKS), case)
    for field, x in exact.items():
        np.testing.assert_allclose(found[field], x, rtol=1e-11, atol=1e-11, err_msg=field)


@pytest.mark.thorough(always=["offset_negative"])
@pytest.mark.parametrize(
    "name",
    [
        "offset_negative",
        "offset_hides_all",
        "offset_array",
        "mask_BNTS",
        "padded",
        "kv_lengths_zero",
        "lengths_causal",
        "bias_infinite",
    ],
)
def test_rows_without_keys_are_exactly_zero(name):
    (case,) = named(name)
    found = checks.run(checks.bind("xla"), case)
    hidden = np.isneginf(checks.oracle(case)["lse"])  # [B, N, T]
    assert hidden.any()
    np.testing.assert_array_equal(np.isneginf(found["lse"]), hidden)
    rows = hidden.transpose(0, 2, 1)  # [B, T, N]
    assert not found["o"][rows].any() and not found["dq"][rows].any()


def test_rows_without_keys_have_their_sink_for_a_log_sum_exp():
    (case,) = named("sinks_hidden_rows")
    found = checks.run(checks.bind("xla"), case)
    sinks = np.asarray(case.inputs().side["sinks"])
    hidden = -case.q_offset
    np.testing.assert_allclose(
        found["lse"][..., :hidden], np.broadcast_to(sinks[:, None], (2, 4, hidden)), rtol=1e-6
    )
    assert not found["o"][:, :hidden].any() and not found["dq"][:, :hidden].any()


def test_rows_without_keys_leave_the_others_alone():
    (case,) = named("offset_negative")
    hidden, call = -case.q_offset, checks.bind("xla", SMALL_BLOCKS)
    x = case.inputs()
    o, lse = call(x.q, x.k, x.v, **case.arguments(x))
    later, later_lse = call(x.q[:, hidden:], x.k, x.v, causal=True)
    np.testing.assert_allclose(o[:, hidden:], later, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse[..., hidden:], later_lse, rtol=1e-6, atol=1e-6)


NOTICED = [
    *((name, field) for name in ("bfloat16_causal", "gqa_causal") for field in checks.ALWAYS),
    ("bias_bfloat16", "dbias"),
    ("alibi_per_entry", "dalibi_slopes"),
    ("sinks_bfloat16_gqa", "dsinks"),
    ("score_mod_bfloat16_causal", "dcaptured"),
    ("max_logit", "max_logit"),
    *(("everything", field) for field in ("dbias", "dalibi_slopes", "dsinks", "dcaptured")),
]


@pytest.mark.thorough(always=[f"bfloat16_causal-{field}" for field in checks.ALWAYS])
@pytest.mark.parametrize(("name", "field"), NOTICED, ids=str)
def test_the_check_notices_a_wrong_result(name, field):
    (case,) = named(name)
    exact = dict(checks.oracle(case))
    checks.assert_results_match(exact, case)
    with pytest.raises(AssertionError, match=f"{field}: "):
        checks.assert_results_match(exact | {field: 1.05 * exact[field]}, case)


@pytest.mark.parametrize("field", checks.ALWAYS)
def test_the_check_notices_a_nan(field):
    (case,) = named("length_5")
    exact = dict(checks.oracle(case))
    wrong = exact[field].copy()
    wrong[0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match=f"{field}: "):
        checks.assert_results_match(exact | {field: wrong}, case)


def test_the_check_notices_an_ignored_cotangent_of_the_lse():
    (case,) = named("bfloat16_causal")
    call = checks.bind("xla")

    def ignoring(q, k, v, **arguments):
        o, lse = call(q, k, v, **arguments)
        return o, jax.lax.stop_gradient(lse)

    with pytest.raises(AssertionError, match="dq: "):
        checks.assert_matches_oracle(ignoring, case)


def test_the_check_notices_a_mask_that_is_off_by_one():
    (case,) = named("bfloat16_causal")
    shifted = dataclasses.replace(case, q_offset=1)
    with pytest.raises(AssertionError, match="o: "):
        checks.assert_results_match(checks.oracle(shifted), case)
