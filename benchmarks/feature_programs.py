"""Programs of the calls of features.py, traced in any process for the one that times them."""

from __future__ import annotations

import importlib
from typing import Any

import jax

from . import tracing
from .features import Sizes, Variant


def inputs_of(sizes: Sizes, variant: Variant) -> tuple:
    """Returns (q, k, v, arrays whose gradients are asked for, do)."""
    *qkv, do = sizes.arrays()
    extra = variant.make(sizes, jax.random.key(1)) if variant.differentiated else {}
    return *qkv, *(extra[name] for name in variant.differentiated), do


def export(sizes: Sizes, variant: Variant, package: str | None = None, **static: Any):
    """Traces a call and its gradient as `tracing.export` does.

    Arrays that have no gradient are constants of the program. `package`: another version, which has
    the function by its name. `static`: further arguments.
    """
    fixed = {} if variant.differentiated else variant.make(sizes, jax.random.key(1))
    function = variant.function
    if package is not None:
        function = getattr(importlib.import_module(package), function.__name__)
    static = dict(variant.static) | static

    def run(q, k, v, *wanted):
        named = dict(zip(variant.differentiated, wanted, strict=True))
        return function(q, k, v, **static, **fixed, **named)

    like = jax.eval_shape(lambda: inputs_of(sizes, variant))
    return tracing.export(tracing.Attention(run), like)
