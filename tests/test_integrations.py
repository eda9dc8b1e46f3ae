"""Hooks of other libraries, on modules that stand in for one; the libraries: tests/clients."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas import flash_attention, integrations
from flash_pallas.integrations import levanter, maxtext, transformers
from flash_pallas.integrations._hooks import Client, Hook, Patch
from flash_pallas.integrations._visible import Visible

MODULES = sorted(x.stem for x in Path(integrations.__file__).parent.glob("[a-z]*.py"))
CLIENT = Client("no-such-package", "nothing", "1.2.3")


@pytest.fixture
def library(monkeypatch):
    """A library whose function doubles, and a module that imported the function by its name."""
    library, user = types.ModuleType("some_library"), types.ModuleType("some_user")
    library.function = user.function = lambda x, factor=2: x * factor
    user.other = library.function
    for module in (library, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return library, user


@pytest.mark.parametrize("name", MODULES)
def test_a_library_that_is_missing_is_named(name):
    module = importlib.import_module(f"flash_pallas.integrations.{name}")
    tested = f"{module._CLIENT.package} {module._CLIENT.tested}"
    missing = f"{module._CLIENT.package} is not installed"
    with pytest.raises(ImportError, match=f"was tested with {tested}; {missing}.*Run pip install"):
        if name == "equinox":
            module.to_flash({})
        elif name == "transformers":
            module.install("llama")
        else:
            module.install()


def test_hooks_are_put_in_everywhere_and_taken_out(library):
    library, user = library
    theirs = library.function
    patch = Patch(lambda factor: [Hook(library, "function", lambda x: x * factor, everywhere=True)])
    with patch.installed(3):
        assert library.function(1) == user.function(1) == 3
        assert user.other(1) == 2  # another name is not looked at
        patch.install(5)  # takes the place of the first
        assert library.function(1) == user.function(1) == 5
    assert library.function is user.function is theirs
    patch.uninstall()
    assert library.function is theirs


def test_hooks_stay_where_they_were_imported_if_not_everywhere(library):
    library, user = library
    with Patch(lambda: [Hook(library, "function", abs)]).installed():
        assert library.function is abs and user.function(1) == 2


def test_derivatives_of_other_orders_are_asked_for_at_installation(monkeypatch):
    patch = Patch(lambda: [])
    with patch.installed(differentiable="any"):
        assert patch.differentiable == "any"
    patch.install()
    assert patch.differentiable == "reverse"
    with pytest.raises(ValueError, match="differentiable is 'twice': choose 'reverse', or 'any'"):
        patch.install(differentiable="twice")
    attend = levanter._of_arrays(abs, types.SimpleNamespace(AttentionMask=int))
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    call = lambda q: attend(q, x, x, None)
    with pytest.raises(TypeError, match="differentiable='any'"):
        jax.jvp(call, (x,), (x,))
    monkeypatch.setattr(levanter._PATCH, "differentiable", "any")
    value, tangent = jax.jvp(call, (x,), (0 * x,))
    np.testing.assert_allclose(value, call(x), rtol=0, atol=1e-6)
    assert not tangent.any()


def test_errors_name_the_arguments_of_the_library():
    full = types.SimpleNamespace(attention_type="full", attn_logits_soft_cap=None)
    kinds = types.SimpleNamespace(AttentionType=types.SimpleNamespace(FULL="full"))
    x = jnp.ones((2, 4, 2, 8))
    for change, arrays, told in (
        ({}, (x[..., :1, :], x, x), r"query has 1 heads and key 2"),
        ({"attn_logits_soft_cap": -1.0}, (x, x, x), r"attn_logits_soft_cap must be .* got -1\.0"),
        ({}, (x, x, x, jnp.zeros((2, 3), int)), r"decoder_segment_ids has shape \(2, 3\)"),
    ):
        q_ids = arrays[3] if len(arrays) > 3 else None
        layer = types.SimpleNamespace(**vars(full) | change)
        with pytest.raises(ValueError, match=told):
            maxtext._attend(layer, kinds, arrays[:3], q_ids, {})


def test_what_was_compiled_is_traced_again(library):
    library, _ = library
    call = jax.jit(lambda x: library.function(x))
    assert call(jnp.float32(1)) == 2
    patch = Patch(lambda: [Hook(library, "function", lambda x: x * 7)])
    with patch.installed():
        assert call(jnp.float32(1)) == 7
    assert call(jnp.float32(1)) == 2


def test_hooks_that_fail_leave_everything_as_it_was(library):
    library, _ = library
    theirs = library.function

    def hooks():
        CLIENT.named(library, "function", "x", "scale")
        return [Hook(library, "function", abs)]

    with pytest.raises(ImportError, match=r"has some_library[.]function\(x, factor\), not \(x, sc"):
        Patch(hooks).install()
    assert library.function is theirs


def test_what_a_library_must_have():
    owner = types.ModuleType("some_library")
    owner.function = lambda x, factor=2: x
    assert CLIENT.named(owner, "function") is CLIENT.named(owner, "function", "x", "factor")
    with pytest.raises(ImportError, match=r"None has no some_library[.]other[.] Install no-such"):
        CLIENT.named(owner, "other")
    with pytest.raises(ImportError, match="nothing_at_all cannot be imported"):
        CLIENT.imported("nothing_at_all")


def test_masks_that_are_kept_say_what_arrays_say():
    q_len, kv_len, rng = 9, 12, np.random.default_rng(0)
    kv_valid = rng.random((2, kv_len)) < 0.7
    both = (
        Visible(causal=True, q_offset=jnp.array([1, 3], jnp.int32), kv_valid=kv_valid)
        & Visible(window=(5, None))
        & Visible(window=(7, 2), mask=rng.random((1, 1, q_len, kv_len)) < 0.9)
    )
    assert both.window == (5, 2) and not both.hides_nothing and Visible().hides_nothing
    q, k = rng.standard_normal((2, q_len, 2, 8)), rng.standard_normal((2, kv_len, 2, 8))
    q, k = jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)
    mean = {"empty_rows": "mean"}  # as the clients have it
    found = flash_attention(q, k, k, **both.options(2, q_len, kv_len), **mean)
    wanted = flash_attention(q, k, k, mask=both.dense(q_len, kv_len), q_offset=0, **mean)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="two masks have a q_offset"):
        both & Visible(q_offset=1)


def test_steps_of_transformers_make_no_array_of_a_batch():
    """Makes a causal mask, joins padding, makes it a bias and adds one, as T5 does."""
    length, steps = 10, transformers._STEPS
    numpy, lax = steps["jnp"], steps["lax"]
    tokens = jnp.asarray(np.arange(length)[None] < np.array([[10], [6]]), jnp.int32)
    causal = steps["make_causal_mask"](tokens)
    padding = numpy.broadcast_to(numpy.expand_dims(tokens, (-3, -2)), causal.shape)
    mask = steps["combine_masks"](padding, numpy.broadcast_to(causal, causal.shape))
    zeros = jnp.zeros(mask.shape)
    hidden = lax.select(mask > 0, zeros, jnp.full(mask.shape, -1e30))
    rng = np.random.default_rng(0)
    added = jnp.asarray(rng.standard_normal((1, 2, length, length)), jnp.float32)
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, 2, 8)), jnp.float32) for _ in "qkv")
    weights = transformers._weights(q, k, bias=added + hidden)
    assert weights.options["bias"] is added and weights.options["mask"] is None
    found = numpy.einsum("...hqk,...khd->...qhd", weights, v)
    dense = np.tril(np.ones((length, length), bool)) & (np.asarray(tokens) > 0)[:, None, None]
    wanted = flash_attention(q, k, v, bias=added, mask=jnp.asarray(dense), q_offset=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    # Steps that are not known get the array.
    near = dense[:1] & ~np.tri(length, k=-3, dtype=bool)
    np.testing.assert_array_equal((causal ^ numpy.tril(causal, -3))[:1], near)
