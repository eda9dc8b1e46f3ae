"""Programs of the calls of features.py, traced in any process for the one that times them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock

import jax

import flash_pallas

from . import block_masks, features, tracing
from .features import Sizes, Variant


def inputs_of(sizes: Sizes, variant: Variant) -> tuple:
    """Returns (q, k, v, arrays whose gradients are asked for, do)."""
    *qkv, do = sizes.arrays()
    extra = variant.make(sizes, jax.random.key(1)) if variant.differentiated else {}
    return *qkv, *(extra[name] for name in variant.differentiated), do


@contextlib.contextmanager
def calls_of(package: str):
    """Makes features.py call another version of the package, with block masks that it made."""
    module = importlib.import_module(package)
    made = getattr(module, "BlockMask", flash_pallas.BlockMask)  # early versions have none
    masks = mock.patch.object(block_masks, "BlockMask", made)
    with masks, mock.patch.object(features, "flash_pallas", module):
        yield module


def export(sizes: Sizes, variant: Variant, package: str | None = None, **static: Any):
    """Traces a call and its gradient as `tracing.export` does.

    Arrays that have no gradient are constants of the program. `package`: another version.
    `static`: further arguments.
    """
    with calls_of(package or flash_pallas.__name__) as module:
        fixed = {} if variant.differentiated else variant.make(sizes, jax.random.key(1))
        function = variant.function
        if function.__module__ != features.__name__:  # those look up in the module what they call
            function = getattr(module, function.__name__)
        static = dict(variant.static) | static

        def run(q, k, v, *wanted):
            named = dict(zip(variant.differentiated, wanted, strict=True))
            return function(q, k, v, **static, **fixed, **named)

        like = jax.eval_shape(lambda: inputs_of(sizes, variant))
        return tracing.export(tracing.Attention(run), like)
