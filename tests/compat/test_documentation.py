"""The docstrings of flash_pallas.compat: arguments are described, and examples run."""

from __future__ import annotations

import doctest
import inspect
import re

import jax
import pytest

from flash_pallas import compat

MODULES = {
    name: getattr(compat, name)
    for name in ("flash_attn", "flex", "ragged_paged_attention", "splash", "torch_sdpa")
}


def functions(module):
    """Returns the functions that a module defines for its users, by name."""
    own = {name: x for name, x in vars(module).items() if name[0] != "_" and inspect.isfunction(x)}
    return {name: x for name, x in own.items() if x.__module__ == module.__name__}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        found = doctest.testmod(MODULES[name])
    assert found.failed == 0 and found.attempted >= 2


@pytest.mark.parametrize("name", MODULES)
def test_arguments_are_described(name):
    for function in functions(MODULES[name]).values():
        told = inspect.getdoc(function) or ""
        parameters = inspect.signature(function).parameters
        small = len(told.splitlines()) == 1 and {"mask_mods", "q_idx"} & set(parameters)
        for parameter in () if small else parameters:
            described = re.search(rf"^    [*]{{0,2}}{parameter}: ", told, re.MULTILINE)
            assert described, f"{function.__name__}: {parameter}"
