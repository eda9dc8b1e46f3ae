"""Hooks of other libraries, on modules that stand in for one; the libraries: tests/clients."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from flash_pallas import integrations
from flash_pallas.integrations._hooks import Client, Hook, Patch

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
