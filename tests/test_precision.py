"""float32 and `precision`: what is accepted, the matmuls that run, and how precise they are."""

from __future__ import annotations

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.launch import SplitBlocks
from flash_pallas.backends.hopper.common.pipeline import Matmuls
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.nn import attention_fn
from flash_pallas.nn import linen as fp_linen
from flash_pallas.nn import nnx as fp_nnx

from .feature_table import _ALL, B, N, S, T

HOPPER = HopperBackend(interpret=True)
MEANING = {
    None: "high",
    "default": "default",
    "high": "high",
    "highest": "highest",
    jax.lax.Precision.DEFAULT: "default",
    jax.lax.Precision.HIGH: "high",
    jax.lax.Precision.HIGHEST: "highest",
}


def problem(head_dim=16, v_head_dim=None, dtype=jnp.float32, **arguments):
    shapes = (B, T, N, head_dim), (B, S, 2, head_dim), (B, S, 2, v_head_dim or head_dim)
    arrays = [jnp.zeros(shape, dtype) for shape in shapes]
    return validate.canonicalize(*arrays, Arguments(**arguments)).problem


@pytest.mark.parametrize("given", MEANING, ids=str)
def test_names_and_jax_s_own(given):
    assert problem(precision=given).spec.precision == MEANING[given]
    # Products of 16 bits are exact in float32: one program serves all.
    assert problem(dtype=jnp.bfloat16, precision=given).spec.precision == "high"


@pytest.mark.parametrize("given", ["HIGHEST", "tf32", 3, ("high", "high"), jnp.float32])
def test_anything_else_is_refused(given):
    x = jnp.ones((8, 2, 16))
    message = r"precision is .*choose one of 'default', 'high', 'highest'.*None for 'high'"
    explained = functools.partial(fp.explain, fp.flash_attention)
    for function in (fp.flash_attention, explained, attention_fn):
        with pytest.raises(ValueError, match=message):
            function(x, x, x, precision=given)


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_multiplies_float32_in_full_unless_told(precision, dtype):
    x = jnp.ones((8, 2, 16), dtype)
    call = lambda *a: fp.flash_attention(*a, precision=precision, backend="xla").sum()
    text = str(jax.make_jaxpr(jax.grad(call, (0, 1, 2)))(x, x, x))
    products = re.findall(r"dot_general\[.*?\]\s", text, re.DOTALL)
    found = [re.search(r"precision=\(Precision\.(\w+)", product) for product in products]
    each = "DEFAULT" if precision == "default" else "HIGHEST"
    expected = [each if dtype == "float32" else None] * 7 + ["HIGHEST"]  # the last: rows of o * do
    assert [match and match[1] for match in found] == expected


def test_hopper_says_what_it_does_not_take():
    assert HOPPER.attention.refusal(problem(128)) is None
    assert HOPPER.attention.refusal(problem(256, dtype=jnp.bfloat16, precision="highest")) is None
    assert "precision='high'" in HOPPER.attention.refusal(problem(precision="highest"))
    assert "up to 128, not 136: cast" in HOPPER.attention.refusal(problem(136))
    assert "up to 128, not 192: cast" in HOPPER.attention.refusal(problem(64, 192))


@pytest.mark.parametrize("widths", [(8, 8), (32, 128), (128, 32), (96, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("arguments", [{}, _ALL, _ALL | {"score_mod": None}], ids=len)
def test_tiles_for_everything_at_once(widths, arguments):
    blocks = HOPPER.attention.plan(problem(*widths, **arguments))
    assert isinstance(blocks.backward, SplitBlocks)


def test_parts_are_as_precise_as_stated():
    draw = np.random.default_rng(0).standard_normal
    a, b = (jnp.asarray(draw((1, 8, 1, 512)) * 10.0**e, jnp.float32) for e in (3, -5))
    products = Matmuls(jnp.dtype("float32"))
    stored = [products.operand(x, 512) for x in (a, b)]
    exact = [np.asarray(x, np.float64) for x in (a, b)]
    for x, parts in zip(exact, stored, strict=True):
        assert parts.dtype == jnp.bfloat16 and parts.shape == (1, 8, 1, 1024)
        joined = np.asarray(products.joined(parts), np.float64)
        assert np.abs(joined / x - 1.0).max() <= 2.0**-17
    (a_hi, a_lo), (b_hi, b_lo) = (
        np.split(np.asarray(x).astype(np.float64), 2, axis=-1) for x in stored
    )
    error = (a_hi * b_hi + a_hi * b_lo + a_lo * b_hi) / (exact[0] * exact[1]) - 1.0
    assert np.abs(error).max() <= 2.0**-15
    assert np.sqrt(np.mean(error**2)) <= 2.0**-17.5


def test_the_parts_of_registers_are_those_of_memory():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 64, 1, 64)), jnp.float32)
    interpreted, stored = Matmuls(x.dtype, interpret=True), Matmuls(x.dtype).operand(x, 64)
    # Under jit, where XLA takes a conversion there and back for nothing.
    parts = jnp.concatenate(jax.jit(interpreted.split)(x), axis=-1)
    np.testing.assert_array_equal(parts, stored)
    assert np.abs(np.asarray(parts[..., 64:], np.float32)).max() > 0.0


@pytest.mark.parametrize("layer", ["attention_fn", "linen", "nnx"])
def test_flax_hands_it_on(layer, monkeypatch):
    seen = []

    def record(q, k, v, **keywords):
        seen.append(keywords.get("precision"))
        return v

    x, highest = jnp.ones((1, 8, 16)), jax.lax.Precision.HIGHEST
    if layer == "attention_fn":
        home = importlib.import_module("flash_pallas.nn.attention_fn")  # not the function
        monkeypatch.setattr(home, "flash_attention", record)
        module = linen.MultiHeadDotProductAttention(2, precision=highest, attention_fn=attention_fn)
        module.init_with_output(jax.random.key(0), x)
    elif layer == "linen":
        module = fp_linen.FlashAttention(2, precision=highest, attention=record)
        module.init_with_output(jax.random.key(0), x)
    else:
        rngs = fp_nnx.nnx.Rngs(0)
        fp_nnx.FlashAttention(2, 16, precision=highest, attention=record, rngs=rngs)(x)
    assert seen == [highest]
