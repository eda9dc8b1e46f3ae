"""Workloads for launch overhead: single calls and stacks of layers, with few tiles each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

import flash_pallas

from . import suites

LAYERS = 32  # of a stack

ROWS = 128  # of most tiles of queries; an H200 has 132 SMs for them
SHAPES = (
    suites.Shape(1, 512, 16, 16, 128, "64 tiles of 128 rows: half of the GPU idles"),
    suites.Shape(1, 1024, 16, 16, 128, "128 tiles"),
    suites.Shape(1, 512, 8, 8, 64, "32 tiles, narrow heads"),
    suites.Shape(1, 512, 32, 8, 128, "128 tiles, grouped queries"),
)
ATTENTION: dict[str, Callable[..., Any]] = {
    "flash_pallas": functools.partial(flash_pallas.flash_attention, causal=True, backend="hopper"),
    "jax_cudnn": functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    ),
    "flash_pallas_xla": functools.partial(flash_pallas.flash_attention, causal=True, backend="xla"),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """Something to launch.

    Attributes:
        name: name in the table.
        calls: number of attention calls in one launch.
        function: takes (q, k, v, do) and is to be jitted; None means the public function, eagerly.
    """

    name: str
    calls: int
    function: Callable[..., Any] | None


def tiles(shape: suites.Shape) -> int:
    """Returns the number of Q tiles (of ROWS rows) in one call."""
    return shape.batch * shape.q_heads * -(-shape.q_len // ROWS)


def work(attention: Callable[..., Any]) -> tuple[Work, ...]:
    """Returns the workloads of one implementation."""
    return (
        Work("eager", 1, None),
        Work("jit", 1, lambda q, k, v, do: attention(q, k, v)),
        Work(f"scan of {LAYERS}", LAYERS, functools.partial(_stack, attention)),
        Work("jit, with gradient", 1, functools.partial(_gradient, attention)),
        Work(
            f"scan of {LAYERS}, with gradient",
            LAYERS,
            functools.partial(_gradient, functools.partial(_stack, attention)),
        ),
    )


def _stack(attention, q, k, v, do=None):
    """Runs LAYERS layers, each of which takes the previous one's output as its queries."""
    del do
    layer = lambda x, _: (attention(x, k, v), None)
    return lax.scan(layer, q, length=LAYERS)[0]


def _gradient(attention, q, k, v, do):
    """Returns the output and the gradients, as in a training step."""
    o, pullback = jax.vjp(attention, q, k, v)
    return o, pullback(do)
