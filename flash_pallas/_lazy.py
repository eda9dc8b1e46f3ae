"""Modules that are imported when somebody asks for them as attributes of their package."""

from __future__ import annotations

import importlib
from types import ModuleType


def module_of(package: str, names: tuple[str, ...], name: str) -> ModuleType:
    """Returns a module of a package: what its `__getattr__` does (PEP 562).

    Raises:
        AttributeError: `name` is not one of `names`.
    """
    if name not in names:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(f"{package}.{name}")
