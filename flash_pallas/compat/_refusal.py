"""Refusal of arguments of other libraries that have no counterpart here."""

from __future__ import annotations

from typing import Any


def refuse(name: str, value: Any, default: Any, way_out: str) -> None:
    """Raises ValueError, with what to do instead, unless an argument has its default."""
    if value is default or (type(value) is type(default) and value == default):
        return
    raise ValueError(f"{name} is {value!r}, which has no counterpart here: {way_out}")
