"""The forward's guess that row maxima do not grow: where it is made, and how tests challenge it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.gpu.ptx import inline
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.forward.tiles import MOST_HALF, SPECULATES

from .cases import Case
from .hopper_cases import FORWARD_BLOCKS, MAXIMA


def _blocks(T=512, H=128, **fields):
    case = Case("any", **({"T": T, "S": T, "N": 1, "K": 1, "H": H, "dtype": "bfloat16"} | fields))
    spec = dataclasses.replace(case.problem.spec, max_logit=case.max_logit)
    problem = dataclasses.replace(case.problem, spec=spec)
    return HopperBackend().attention.plan(problem).forward


@pytest.mark.parametrize("limit", [2.0**14, 2.0**20])
@pytest.mark.parametrize(
    ("factor", "exceeds"),
    [(0.0, 0), (1.0, 0), (1.001, 1), (2.0, 1), (np.inf, 1), (np.nan, 1)],
)
def test_one_sum_above_the_limit_is_enough(limit, factor, exceeds):
    sums = jnp.ones((64, 8), jnp.float32).at[17, 3].set(factor * limit)
    assert inline.exceeds(sums, limit, interpret=True) == exceeds


@pytest.mark.parametrize("head_dims", [(16, 16), (64, 64), (80, 80), (128, 128), (192, 128)])
def test_half_precision_speculates(head_dims):
    H, Hv = head_dims
    assert _blocks(H=H, Hv=Hv).speculates == SPECULATES
    assert _blocks(H=H, Hv=Hv, dtype="float16").speculates == MOST_HALF


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"softcap": 100.0}, SPECULATES), ({"softcap": 5.0, "dtype": "float16"}, MOST_HALF)],
    ids=str,
)
def test_capped_logits_whose_weights_may_overflow_speculate(fields, limit):
    assert _blocks(**fields).speculates == limit


def test_limits_keep_weights_and_their_sums_finite():
    """Checks float16 weights, and float32 rows of a million keys with values of 2**80."""
    assert np.finfo(np.float16).max >= 2.0 ** (MOST_HALF + 1)
    assert np.finfo(np.float32).max >= 2.0 ** (SPECULATES + 20 + 80)


@pytest.mark.parametrize(
    "fields",
    [
        {"H": 256},
        {"dtype": "float32"},
        {"max_logit": True},
        {"softcap": 5.0},
    ],
    ids=str,
)
def test_what_has_no_use_for_it_does_not(fields):
    assert _blocks(**fields).speculates == 0.0


@pytest.mark.parametrize(
    ("fields", "long"),
    [
        ({"T": 4096}, True),
        ({"T": 4096, "dtype": "float16", "sinks": True}, True),
        ({"T": 4095}, False),
        ({"T": 4096, "S": 1024}, False),
        ({"T": 4096, "causal": True}, False),
        ({"T": 8192, "causal": True}, True),
        ({"T": 8192, "causal": True, "window": (100, 0)}, False),
        ({"T": 8192, "kv_lengths": (8000,)}, False),
        ({"T": 8192, "max_logit": True}, False),
        ({"T": 8192, "dtype": "float32"}, False),
        ({"T": 8192, "H": 64}, False),
    ],
    ids=str,
)
def test_long_sequences_have_three_warpgroups(fields, long):
    blocks = _blocks(**fields)
    assert ((blocks.warpgroups, blocks.block_kv) == (3, 64)) == long


@pytest.mark.parametrize("H", [64, 128])
def test_dropout_speculates_in_two_warpgroups(H):
    blocks = _blocks(H=H, T=8192, dropout_rate=0.5)
    assert (blocks.warpgroups, blocks.speculates) == (2, SPECULATES)


@pytest.mark.parametrize("block_kv", [64, 128])
def test_the_cases_guess_wrong_as_they_say(block_kv):
    """Counts steps, from right to left, whose row max exceeds the limit, by rows."""
    cases = (*MAXIMA, *(case for case, _ in FORWARD_BLOCKS))
    named = lambda recipe: [case for case in cases if case.maxima == recipe and not case.bias]
    for case in named("rising"):
        assert _wrong_guesses(case, block_kv).all()
    for case in named("jump"):
        # Into the 64 keys far above all others; a lower jump may be another.
        often = _wrong_guesses(case, block_kv).sum(axis=0)
        assert (often >= 1).all() and (often <= 2).all()
    for case in named("wide"):
        wrong = _wrong_guesses(case, block_kv)
        assert wrong.any() and not wrong.any(axis=0).all()


def _wrong_guesses(case: Case, block_kv: int):
    """Returns bool[steps after the first, rows], ignoring whatever hides keys."""
    x = case.inputs()
    q, k = (np.asarray(a, np.float64)[0, :, 0] for a in (x.q, x.k))
    logits = q @ k.T * case.H**-0.5
    if case.softcap is not None:
        logits = np.tanh(logits / case.softcap) * case.softcap
    logits *= np.log2(np.e)
    stops = range(-(-case.S // block_kv) * block_kv, 0, -block_kv)
    most = np.array([logits[:, stop - block_kv : stop].max(axis=1) for stop in stops])
    seen = np.maximum.accumulate(most, axis=0)
    return most[1:] - seen[:-1] > (MOST_HALF if case.dtype == "float16" else SPECULATES)
