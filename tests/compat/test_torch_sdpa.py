"""compat.torch_sdpa against the formula in PyTorch's documentation; `torch_live.py` runs torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.compat.torch_sdpa import (
    causal_lower_right,
    causal_upper_left,
    scaled_dot_product_attention,
)

from . import sdpa_cases
from .formulas import assert_close, gradients


@pytest.mark.thorough(always=["float mask, empty row", "no heads"])
@pytest.mark.parametrize("name", sdpa_cases.CASES)
def test_the_documented_formula(name):
    arrays, options = sdpa_cases.CASES[name].drawn()
    with jax.enable_x64(True):
        arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
        call = lambda *x: scaled_dot_product_attention(
            **dict(zip(arrays, x, strict=True)), **options
        )
        given = [x for x in arrays.values() if x.dtype != bool]
        hidden = [x for x in arrays.values() if x.dtype == bool]
        o, got = gradients(lambda *x: call(*x, *hidden), given)
        formula = lambda *x: sdpa_cases.formula(
            **dict(zip(arrays, (*x, *hidden), strict=True)), **options
        )
        o_want, pulled = gradients(formula, given)
        assert_close(o, o_want)
        for one, other in zip(got, pulled, strict=True):
            assert_close(one, other)


def test_causal_masks_are_those_of_torch():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    q, k = x[:, :, :2], x
    first = scaled_dot_product_attention(q, k, k, causal_upper_left(2, 4))
    np.testing.assert_array_equal(first, scaled_dot_product_attention(q, k, k, is_causal=True))
    last = scaled_dot_product_attention(q, k, k, causal_lower_right(2, 4))
    seen = np.tril(np.ones((2, 4), bool), 2)
    wanted = scaled_dot_product_attention(q, k, k, jnp.asarray(seen))
    np.testing.assert_allclose(last, wanted, rtol=0, atol=1e-6)


def test_dropout_needs_a_seed_and_uses_it():
    x = jax.random.normal(jax.random.key(0), (1, 2, 32, 8))
    drop = lambda seed: scaled_dot_product_attention(x, x, x, dropout_p=0.5, dropout_seed=seed)
    np.testing.assert_array_equal(drop(1), drop(1))
    assert not np.array_equal(drop(1), drop(2))
    with pytest.raises(ValueError, match="dropout_seed"):
        scaled_dot_product_attention(x, x, x, None, 0.5)


MASK = jnp.ones((4, 4), bool)
REFUSED = [
    ({"attn_mask": MASK, "is_causal": True}, "attn_mask is given and is_causal is True"),
    ({"key": jnp.ones((1, 1, 4, 8)), "value": jnp.ones((1, 1, 4, 8))}, "enable_gqa=True"),
    ({"attn_mask": causal_lower_right(4, 5)}, "make it for these lengths"),
    ({"attn_mask": jnp.ones((4, 4), int)}, "attn_mask has dtype int32.*bool"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED)
def test_what_is_refused(options, told):
    x = jnp.ones((1, 2, 4, 8))
    with pytest.raises((ValueError, TypeError), match=told):
        scaled_dot_product_attention(**{"query": x, "key": x, "value": x, **options})
