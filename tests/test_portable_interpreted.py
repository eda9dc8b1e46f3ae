"""The portable kernels themselves, on CPU: right, and no tile read before it has arrived."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from flash_pallas.backends.portable import PortableBackend

from . import checks
from .hopper_cases import INTERPRETED, MAXIMA, MODIFIERS
from .interpreter import race_checked

BACKEND = PortableBackend(interpret=True, capability="8.0")

# Cases that differ from others in which Hopper kernels run, and are one kernel here; they all run
# on a GPU.
SAME_KERNEL = (
    *("_split", "document_", "long_", "bias_shared", "softcap_saturated", "softcap_wide"),
    *("softcap_small", "softcap_straddles", "softcap_scale", "rising_", "whole_key_blocks"),
)
CASES = [
    case
    for case in (*INTERPRETED, *MODIFIERS, *MAXIMA)
    if not any(part in case.name for part in SAME_KERNEL)
]


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case):
    assert_right(case)


# Whose deterministic backward runs too; all of those that are so anyway do.
SPLIT = (
    *("d64", "d64_ragged", "d128_causal", "d256", "d80_padded_narrow_values", "window_causal_128"),
    *("padded", "kv_lengths", "bias_1NTS", "mask_bias", "softcap_dropout", "alibi", "everything"),
)


def assert_right(case, blocks=None, backend=BACKEND):
    """Free of races, and as near to the oracle as it has to be."""
    with race_checked():
        checks.assert_matches_oracle(checks.bind(backend, blocks), case, kernels=True)


def named(name: str):
    (case,) = (case for case in CASES if case.name == name)
    return case


@pytest.mark.interpret
@pytest.mark.parametrize("mask_all", [False, True])
def test_keys_past_the_end_weigh_nothing(mask_all):
    """Their score is 0, which is so far above all others that e to the difference is infinite."""
    q = jnp.full((1, 64, 1, 64), 30.0, jnp.bfloat16)
    call = checks.bind(BACKEND, {"fused": {"mask_all": mask_all}})
    with race_checked():
        of = lambda q: call(q, -q[:, :40], q[:, :40])[0].astype(jnp.float32).sum()
        dq = jax.jit(jax.grad(of))(q)
        assert jnp.isfinite(dq).all()


@pytest.mark.interpret
@pytest.mark.parametrize("name", SPLIT)
def test_deterministic_kernels(name):
    assert_right(dataclasses.replace(named(name), deterministic=True))


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["everything", "packed_causal", "d64"])
def test_other_tiles(name):
    """Sizes that a caller may ask for: everything is as it was."""
    blocks = {
        "forward": {"rows": 64, "columns": 48, "slots": 2},
        "dkv": {"rows": 128, "columns": 16},
        "dq": {"rows": 128, "columns": 32},
    }
    assert_right(dataclasses.replace(named(name), deterministic=True), blocks)


@pytest.mark.interpret
@pytest.mark.parametrize("fields", [{"slots": 2}, {"rows": 64}], ids=str)
@pytest.mark.parametrize("name", ["everything", "jump_128", "d80_padded_narrow_values", "sinks"])
def test_weights_through_shared_memory(name, fields):
    """Also where O has few columns: everything is as it was."""
    assert_right(named(name), {"forward": fields | {"shared_weights": True}})


@pytest.mark.interpret
@pytest.mark.parametrize(
    "fields",
    [
        {"rows": 64, "columns": 64, "slots": 2},
        {"columns": 64, "mask_all": False, "heads": 3},
        {"mask_all": True, "stagger": True, "heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["d64_causal", "everything", "d64_ragged", "window"])
def test_other_tiles_of_the_fused_backward(name, fields):
    assert_right(named(name), {"fused": fields})


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["d128_causal", "window_causal_128", "dropout_causal_128"])
def test_weights_that_registers_have_no_room_for(name):
    """The fused backward reads them back; not where dropout needs them as they were."""
    backend = dataclasses.replace(BACKEND, capability="9.0")
    assert_right(named(name), {"fused": {"columns": 128, "slots": 1}}, backend)
