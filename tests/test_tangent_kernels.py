"""Forward mode of the kernels, on CPU: right, free of races and deadlocks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from flash_pallas import reference
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend

from . import tangent_checks, test_portable_interpreted
from .hopper_cases import FLOAT32, INTERPRETED, MAXIMA, MODIFIERS
from .interpreter import race_checked
from .test_any_order import TRANSFORMED

HOPPER = HopperBackend(interpret=True, num_sms=2)
CASES = (*INTERPRETED, *MODIFIERS, *FLOAT32, *MAXIMA)
# Where O has a kernel of its own, as in `jax.linearize`, though one kernel could have both.
AFTER_O = ("d64_ragged", "d64_causal", "d128_causal", "window", "softcap", "dropout", "float32")
ALONE = ("d64_causal", "d128", "packed_causal", "blocks_documents_128", "kv_lengths", "d256")
# Of the second order: what hides keys, and what changes weights but not by a function. With one key
# a row, `one_key` of the others, all tangents of gradients are 0 but for roundings.
SECOND_ORDER = (
    *("d64_causal", "d128", "d256_causal", "d80_padded_narrow_values", "d64_float16"),
    *("d128_offset_array", "window_causal_128", "packed_causal", "positions_causal"),
    *("kv_lengths", "mask_B1TS", "alibi", "sinks", "dropout", "d128_hidden_rows"),
)


def named(*names: str):
    return [case for case in CASES if case.name in names]


def assert_right(backend, case, how="jvp"):
    with race_checked():
        call = tangent_checks.bind(backend)
        tangent_checks.assert_matches_oracle(call, case, kernels=True, how=how)


@pytest.mark.thorough(always=["d64_causal"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hopper(case):
    assert_right(HOPPER, case)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", named(*AFTER_O), ids=str)
def test_hopper_after_the_forward(case):
    assert_right(HOPPER, case, "linearize")


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", named(*ALONE), ids=str)
def test_hopper_without_a_producer(case):
    assert_right(HopperBackend(interpret=True, num_sms=2, trades_registers=False), case)


@pytest.mark.thorough(always=["d64"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", test_portable_interpreted.CASES, ids=str)
def test_portable(case):
    assert_right(PortableBackend(interpret=True, capability="8.0"), case)


# Whole Jacobians have a tangent for each element. JAX differentiates no `jax.checkpoint` around
# kernels that have effects, as they have under the interpreter: GPUs run those two.
FEW, CHECKPOINTED = {"jacfwd", "jacrev", "hessian"}, {"loop", "saved"}


@pytest.mark.thorough(always=["MeanFlow"])
@pytest.mark.interpret
@pytest.mark.parametrize("name", [name for name in TRANSFORMED if name not in CHECKPOINTED])
def test_transformations_of_hopper(name):
    """Compares with dense jnp in float32, of which a product is right to 2^-15 of its terms."""
    shape = (1, 4, 1, 2) if name in FEW else (1, 24, 2, 16)
    given = jax.random.normal(jax.random.key(0), (6, *shape), jnp.float32)
    dense = functools.partial(reference.attention, causal=True)
    attend = functools.partial(tangent_checks.bind(HOPPER), causal=True)
    run = lambda f: jax.tree.leaves(jax.jit(functools.partial(TRANSFORMED[name], f))(*given))
    with race_checked():
        found = run(attend)
    for a, b in zip(found, run(dense), strict=True):
        assert jnp.abs(a - b).max() <= 2**-13 * jnp.abs(b).max()


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", named(*SECOND_ORDER), ids=str)
def test_hessian_vector_products_of_hopper(case):
    with race_checked():
        tangent_checks.assert_second_order_matches_oracle(tangent_checks.bind(HOPPER), case)
