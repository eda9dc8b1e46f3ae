"""What the package exports, that it is documented, and that its examples run."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas import api

NAMES = [
    "Explanation",
    "UnsupportedByBackend",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "save_attention",
]
DELEGATING = ["explain", "flash_attention_with_lse", "flash_attention_with_max_logit"]
FUNCTIONS = ["dot_product_attention", "flash_attention", *DELEGATING]


def test_the_exported_names():
    assert sorted(fp.__all__) == NAMES
    assert all(hasattr(fp, name) for name in NAMES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documentation(name):
    function = getattr(fp, name)
    doc = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in doc
    described = doc[doc.index("Args:") : doc.index("Returns:")]
    for parameter in inspect.signature(function).parameters:
        delegated = name in DELEGATING and parameter not in ("q", "k", "v", "backend", "blocks")
        assert delegated or f"\n    {parameter}: " in described, parameter
    assert name not in DELEGATING or "every other argument of `flash_attention`" in described


@pytest.mark.parametrize("name", ["Explanation", "UnsupportedByBackend"])
def test_classes_are_documented(name):
    assert inspect.getdoc(getattr(fp, name))


def test_examples():
    results = doctest.testmod(api)
    assert results.attempted >= 10 and results.failed == 0


def test_one_signature():
    parameters = lambda f: list(inspect.signature(f).parameters.items())
    strings = lambda f: [str(p) for p in parameters(f)]
    for name in DELEGATING:
        assert strings(fp.flash_attention) == strings(getattr(fp, name))


def test_unknown_argument():
    x = jnp.ones((2, 16, 4, 64))
    with pytest.raises(TypeError, match=r"explain.*unexpected keyword argument 'window_size'"):
        fp.explain(x, x, x, window_size=3)


def test_the_signature_of_jax_nn():
    ours = inspect.signature(fp.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


def inputs(*batch):
    rng = np.random.default_rng(0)
    shapes = ((*batch, 9, 4, 16), (*batch, 12, 2, 16), (*batch, 12, 2, 16))
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dot_product_attention_agrees_with_jax_nn(batch, is_causal):
    args = inputs(*batch)
    keywords = {"scale": 0.3, "is_causal": is_causal, "return_residual": True}
    found = fp.dot_product_attention(*args, **keywords)
    expected = jax.nn.dot_product_attention(*args, **keywords)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    alone = fp.dot_product_attention(*args, scale=0.3, is_causal=is_causal, implementation="xla")
    np.testing.assert_allclose(alone, found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["bias", "mask", "query_seq_lengths", "key_value_seq_lengths", "local_window_size"],
)
def test_dot_product_attention_ignores_nothing(name):
    with pytest.raises(NotImplementedError, match=f"support {name}.*jax.nn.dot_product_attention"):
        fp.dot_product_attention(*inputs(2), **{name: jnp.ones((2, 4, 9, 12))})


def test_dot_product_attention_knows_its_implementations():
    with pytest.raises(ValueError, match="'cudnn': choose one of 'auto'"):
        fp.dot_product_attention(*inputs(2), implementation="cudnn")


def test_importing_does_not_start_a_device():
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import flash_pallas, jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'importing initialised a backend'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
