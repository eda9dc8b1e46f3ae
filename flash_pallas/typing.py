"""Types of arguments, for code that calls this package: `backend: BackendName = "auto"`.

A type checker reads `Float[Array, "*B T N H"]` as `Array`; the dtype and the shape are for human
readers. An axis with `#` may be 1, and `*` stands for any number of axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal
from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int

import jax
import numpy as np
from jax import Array as Array

__all__ = [
    "Alignment",
    "AnyArray",
    "Array",
    "BackendName",
    "Bool",
    "Differentiable",
    "EmptyRows",
    "Float",
    "Int",
    "Integer",
    "Layout",
    "MaskMod",
    "MeshAxes",
    "NumSplits",
    "Precision",
    "QkNorm",
    "ScoreMod",
    "Strategy",
    "Values",
    "Window",
]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default, which typing has from Python 3.13 on

    Values = TypeVar("Values", bound=Array | None, default=Array)
else:
    from typing import TypeVar

    Values = TypeVar("Values")

AnyArray = Array | np.ndarray
"""A JAX or numpy array."""
Integer = int | np.integer
"""An integer that is known while tracing."""
MeshAxes = str | tuple[str, ...] | None
"""Mesh axes that shard one axis of an array."""

BackendName = Literal["auto", "hopper", "cudnn", "portable", "xla"]
"""`backend` of every function and layer."""
Differentiable = Literal["reverse", "any"]
"""`differentiable` of `flash_attention`: once in reverse mode, or to any order in both modes."""
EmptyRows = Literal["zero", "mean"]
"""`empty_rows` of `flash_attention`: the result of a query that sees no key."""
Precision = Literal["default", "high", "highest"] | jax.lax.Precision
"""`precision` of `flash_attention`: the precision of float32 matmuls."""
Alignment = Literal["start", "end"]
"""`alignment` of `flash_attention_varlen`: how a document's queries are aligned with its keys."""
NumSplits = Integer | Literal["auto"]
"""`num_splits` of `flash_decode`: the number of ranges into which the keys are split."""
Strategy = Literal["ring", "all_gather", "ulysses"]
"""`strategy` of `context_parallel_attention`."""
Layout = Literal["contiguous", "zigzag"]
"""`layout` of `context_parallel_attention`: the order of the tokens of a sharded sequence."""
QkNorm = Literal["rms", "layer"]
"""`qk_norm` of the layers."""

_Side = Integer | AnyArray | None
Window = Integer | AnyArray | tuple[_Side, _Side]
"""`window` of `flash_attention`: an int for both sides, or (left, right); None is unbounded."""
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
"""`score_mod` of `flash_attention`: (score, b, n, i, j) -> score."""
MaskMod = Callable[[Any, Any, Any, Any], Any]
"""`mask_mod` of `flash_attention`: (b, n, i, j) -> bool."""
