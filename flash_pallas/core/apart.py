"""Evaluation of known values while something else is traced."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax


def apart(function: Callable[[], Any]) -> Any:
    """Returns function(), called in a thread of its own.

    There is no trace, no mesh and no map around it, but the same width of numbers.
    """
    wide = jax.config.jax_enable_x64

    def run():
        with jax.enable_x64(wide):
            return function()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
