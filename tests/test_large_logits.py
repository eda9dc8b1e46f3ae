"""Additive masks and other large logits: results are as right as those of jax.nn."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.fused import launches
from flash_pallas.backends.portable import PortableBackend

from . import checks
from .cases import ADDITIVE, HIDING, LARGE, Case, additive_cases
from .interpreter import race_checked

SMALL_BLOCKS = {"block_q": 32, "block_kv": 32}
HOPPER = HopperBackend(interpret=True, num_sms=2)
PORTABLE = PortableBackend(interpret=True, capability="8.0", num_sms=2)
# Of every size one, and the two ends, with one head: an entry is a kernel's block or more.
FEW = (-1e4, -1e7, -1e9, -1e15, float(np.finfo(np.float32).min), -np.inf, 1e9)
INTERPRETED = additive_cases(FEW, N=1)
# Of LARGE, all of which run on xla and on a GPU: a minute each under the interpreter.
ON_HOPPER, ON_PORTABLE = (
    tuple(case for case in LARGE if case.name in names)
    for names in (
        ("scores_of_2^18", "scores_of_2^30_float32", "sinks_beside_additive", "additive_softcap",
         "additive_max_logit", "additive_deterministic", "additive_256", "far_entries",
         "far_entries_128", "far_entries_96", "far_entries_96_full", "far_entries_float16",
         "far_entries_of_blocks", "far_entries_sinks", "far_entries_lengths",
         "far_entries_lengths_alibi", "far_entries_dropout", "far_entries_score_mod",
         "far_entries_mask_mod_lengths", "far_entries_softcap_dropout", "far_entries_everything"),
        ("scores_of_2^12_float16", "scores_and_sinks", "additive_dropout", "additive_segments",
         "additive_lengths_window", "additive_alibi", "additive_128"),
    )
)  # fmt: skip


@pytest.mark.thorough(always=["no_key_float32"])
@pytest.mark.parametrize("case", (*ADDITIVE, *LARGE), ids=str)
def test_xla(case):
    call = checks.bind("xla", None if case.block_mask else SMALL_BLOCKS)
    checks.assert_matches_oracle(call, case)
    assert_lse_of_every_row(checks.run(call, case), case)


def assert_lse_of_every_row(found, case):
    """Checks each row to a few roundings: among 1e4 and 1e38 a maximum would hide small rows."""
    exact = checks.oracle(case)["lse"]
    with np.errstate(invalid="ignore"):
        off = np.where(found["lse"] == exact, 0.0, np.abs(found["lse"] - exact))
    # Sums of up to 83 exponentials, and of their logarithm and the largest logit.
    assert (off <= 8 * np.finfo(np.float32).eps * np.maximum(1.0, np.abs(exact)))[
        np.isfinite(exact)
    ].all()


@pytest.mark.thorough(always=["one_key_bfloat16"])
@pytest.mark.parametrize("case", additive_cases([x for x in HIDING if np.isfinite(x)]), ids=str)
def test_no_worse_than_jax_nn(case):
    """Compares errors against float64 for a user who only replaces jax.nn by flash_pallas."""
    x, exact = case.inputs(), checks.oracle(case)

    def errors(call):
        def output(q, k, v):
            return call(q, k, v, bias=x.side["bias"], is_causal=case.causal)

        o, pull = jax.vjp(output, x.q, x.k, x.v)
        found = dict(zip(("o", "dq", "dk", "dv"), (o, *pull(x.do)), strict=True))
        return {n: np.abs(np.asarray(a, np.float64) - without_lse[n]) for n, a in found.items()}

    without_lse = checks.oracle(case) | gradients_of_o_alone(case)
    ours = errors(fp.dot_product_attention)
    theirs = []
    # Where a bias of the lowest number hides all keys up to a query, jax.nn sees those after it.
    if not case.causal:
        with jax.numpy_dtype_promotion("standard"):
            theirs.append(errors(jax.nn.dot_product_attention))
    if case.causal or case.dtype == "float32":
        theirs.append(errors(heads_first))
    if case.causal and case.dtype == "float32":
        theirs.append({"dv": np.abs(dv_in_sequence(case, x) - exact["dv"])})
    eps = float(jnp.finfo(case.dtype).eps)
    for name in ours:
        factor = checks.OUTPUT_FACTOR if name == "o" else checks.GRADIENT_FACTOR
        for size in (np.max, lambda a: np.sqrt(np.mean(np.square(a)))):
            floor = checks.FLOOR * eps * size(np.abs(exact[name]))
            most = max(size(found[name]) for found in theirs if name in found)
            assert size(ours[name]) <= factor * most + floor, name


def dv_in_sequence(case: Case, x):
    """Computes dV = P^T dO by float32 sums of one term after the other, of weights from float64.

    So do matmuls on a CPU. The first key that padding leaves has nearly all the weight of the first
    rows that see it: its sum of 94 terms is as large as 5.4 and, by chance, 9 ulp off.
    """
    q, k, do = (np.asarray(a, np.float64) for a in (x.q, x.k, x.do))
    logits = np.einsum("btnh,bsh->btns", q, k[:, :, 0]) * q.shape[-1] ** -0.5
    logits += np.asarray(x.side["bias"], np.float64)[:, 0, :, None]
    hidden = np.tri(q.shape[1], dtype=bool)[None, :, None] == 0
    logits = np.where(hidden, -np.inf, logits)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    total = np.zeros(x.k.shape, np.float32)
    for t, n in np.ndindex(p.shape[1:3]):
        total[:, :, 0] += (p[:, t, n, :, None] * do[:, t, n, None]).astype(np.float32)
    return total


def heads_first(q, k, v, *, bias, is_causal):
    """Computes attention in plain jnp by products of arrays [batch, heads, length, ...].

    These are what flash_pallas computes on a CPU. In float32 XLA rounds them more than those of
    jax.nn, whose heads come after the length. Where one row sees no key the largest error of O is
    1.1e-6 and 4.3e-7, though weights are right to 2.4e-8 here; of dV 7.5e-7 and 5.4e-7. So float32
    is compared with these as well; of 16 bits the roundings of operands hide the difference.
    """
    assert k.shape[2] == 1
    dot = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    k, v = k[:, :, 0], v[:, :, 0]
    logits = dot("bnth,bsh->bnts", q.swapaxes(1, 2), k) * q.shape[-1] ** -0.5
    logits = logits + bias.astype(jnp.float32)
    if is_causal:
        logits = jnp.where(jnp.tri(*logits.shape[2:], dtype=bool)[None, None], logits, -jnp.inf)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    o = dot("bnts,bsh->bnth", weights.astype(v.dtype), v) / weights.sum(-1, keepdims=True)
    return o.swapaxes(1, 2).astype(v.dtype)


def gradients_of_o_alone(case):
    """Computes the oracle's results with no LSE cotangent, because jax.nn has none."""
    x = case.inputs()
    silent = x._replace(dlse=jnp.zeros_like(x.dlse))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "inputs", lambda self, seed=0: silent)
        return checks.oracle.__wrapped__(case)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", (*INTERPRETED, *ON_HOPPER), ids=str)
def test_hopper_kernels(case, monkeypatch):
    monkeypatch.setattr(launches, "ENOUGH", 1)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(HOPPER), case, kernels=True)


PAIR_BIAS = [
    Case(f"{name}_pair_bias", N=2, K=2, B=2, T=70, S=300, bias="1NTS", dtype="bfloat16",
         magnitude=magnitude)
    for name, magnitude in (("near", 0), ("far", (0, 15)))
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", PAIR_BIAS, ids=str)
def test_launches_of_which_one_is_idle(case, monkeypatch):
    monkeypatch.setattr(launches, "ENOUGH", 1)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(HOPPER), case)


@pytest.mark.thorough(always=["scores_of_2^12_float16"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", (*INTERPRETED[3:], *ON_PORTABLE), ids=str)
def test_portable_kernels(case):
    if case.dtype == "float32":
        case = Case(**{**vars(case), "dtype": "float16"})
    with race_checked():
        checks.assert_matches_oracle(checks.bind(PORTABLE), case, kernels=True)
