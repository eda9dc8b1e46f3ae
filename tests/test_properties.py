"""Random combinations of features, shapes, dtypes and groups on xla, by the one numerical check.

FLASH_PALLAS_EXAMPLES=500 looks further than the few of the default run; what it draws is the same
every time.
"""

from __future__ import annotations

import functools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import flash_pallas as fp

from . import checks, tangent_checks
from .random_cases import Sizes, packed, random_case, random_packed_case

PARTS = 10  # tests that may run side by side
EXAMPLES = int(os.environ.get("FLASH_PALLAS_EXAMPLES", "30"))


class Drawn:
    """Implements random_cases.Draws with hypothesis, which shrinks towards fewer features."""

    def __init__(self, draw):
        self.draw = draw

    def one_of(self, values):
        return self.draw(st.sampled_from(values))

    def chance(self, p: float) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 * (1 - p)

    def between(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))


cases = st.composite(lambda draw, sizes: random_case(Drawn(draw), sizes))


def examples(count: int, part: int):
    """Decorates a check to run `count` examples, the same ones every time."""

    def decorate(check):
        settings = hypothesis.settings(
            max_examples=count,
            phases=[
                hypothesis.Phase.explicit,
                hypothesis.Phase.generate,
            ],  # shrinking takes minutes
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        return hypothesis.seed(part)(settings(check))

    return decorate


@pytest.mark.thorough(always=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_any_combination_matches_the_oracle(part):
    @examples(-(-EXAMPLES // PARTS), part)
    @hypothesis.given(cases(Sizes()), st.sampled_from([32, 64, 100]), st.sampled_from([16, 64]))
    def check(case, block_q, block_kv):
        hypothesis.note(repr(case))
        blocks = None if case.block_mask else {"block_q": block_q, "block_kv": block_kv}
        checks.assert_matches_oracle(checks.bind("xla", blocks), case)

    check()


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_tangents_of_any_combination_match_the_oracle(part):
    @examples(-(-EXAMPLES // PARTS), part)
    @hypothesis.given(cases(Sizes()))
    def check(case):
        hypothesis.note(repr(case))
        tangent_checks.assert_matches_oracle(tangent_checks.bind("xla"), case)

    check()


packed_cases = st.composite(lambda draw, sizes: random_packed_case(Drawn(draw), sizes))


@pytest.mark.thorough(always=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_packed_documents_match_the_oracle(part):
    @examples(-(-EXAMPLES // (3 * PARTS)), part)
    @hypothesis.given(packed_cases(Sizes(length=150)), st.sampled_from([32, 100]))
    def check(case, block):
        hypothesis.note(repr(case))
        options = {"backend": "xla", "blocks": {"block_q": block, "block_kv": 64}}
        call = packed(functools.partial(fp.flash_attention_varlen, **options))
        checks.assert_matches_oracle(call, case)

    check()


SMALL = Sizes(length=40, batch=2, group=2, head_dims=(8,), v_head_dims=(None, 16))


@pytest.mark.thorough
@examples(-(-EXAMPLES // 5), 0)
@hypothesis.given(cases(SMALL), st.sampled_from([np.int64, np.uint64, np.uint32]))
def test_wide_integers_are_the_same_numbers(case, dtype):
    """Compares wide integers of numpy, which jit never sees, with int32, bit for bit."""
    x = case.inputs()
    arguments = case.arguments(x)
    wide = {
        name: np.asarray(a).astype(dtype)
        for name, a in x.given.items()
        if name != "prefix" and jnp.issubdtype(a.dtype, jnp.integer) and (np.asarray(a) >= 0).all()
    }
    found, usual = (fp.flash_attention(x.q, x.k, x.v, **(arguments | w)) for w in (wide, {}))
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(usual, np.float32))


@pytest.mark.thorough
@examples(-(-EXAMPLES // 5), 1)
@hypothesis.given(cases(SMALL))
def test_a_gradient_inside_stop_gradient_is_a_constant(case):
    """Checks first-order meta-learning: an inner step whose own derivative is not wanted."""
    x = case.inputs()

    def loss(q):
        o = fp.flash_attention(q, x.k, x.v, **case.arguments(x))
        return jnp.vdot(o.astype(jnp.float32), x.do.astype(jnp.float32))

    def outer(q, inner):
        return loss(q - lax.stop_gradient(inner(q)) * jnp.asarray(0.125, q.dtype))

    step = jax.grad(loss)(x.q)
    found = jax.grad(lambda q: outer(q, jax.grad(loss)))(x.q)
    usual = jax.grad(lambda q: outer(q, lambda _: step))(x.q)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(usual, np.float32))
