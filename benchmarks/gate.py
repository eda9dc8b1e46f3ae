"""No number without a correct result: every provider's output is compared with a float32 oracle.

The bound is the 2x rule: the error may be twice that of plain jnp attention in the same dtype,
three times for gradients, in the maximum and in the root mean square. Both sides are computed for
every batch element and head, one KV head at a time, so that one head's scores are in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flash_pallas import reference

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
FORWARD, BACKWARD = ("o", "lse"), ("dq", "dk", "dv")


class Inputs(NamedTuple):
    """The arrays q and do [B, T, N, H], k and v [B, S, K, H], all of one dtype."""

    q: Any
    k: Any
    v: Any
    do: Any


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Error of one tensor from the oracle and its bound, each as (maximum, root mean square)."""

    error: tuple[float, float]
    bound: tuple[float, float]

    @property
    def ok(self) -> bool:
        """True within both bounds; a NaN is not."""
        return all(e <= b for e, b in zip(self.error, self.bound, strict=True))

    @property
    def used(self) -> float:
        """The larger of error / bound: 1 is the limit."""
        return max(
            e / b if b else float(e > 0) for e, b in zip(self.error, self.bound, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Exact results of one cell, and how far others may be from them.

    Attributes:
        exact: float32 tensors by name, in the layout of the public API.
        bounds: the largest allowed (maximum, root mean square) of the error, by name.
    """

    exact: dict[str, Any]
    bounds: dict[str, tuple[float, float]]

    def check(self, found: dict[str, Any]) -> dict[str, Verdict]:
        """Returns a verdict on each tensor that was found.

        Raises:
            ValueError: a tensor has another shape than the oracle's.
        """
        verdicts = {}
        for name, value in found.items():
            if value.shape != self.exact[name].shape:
                raise ValueError(f"{name} is {value.shape}, not {self.exact[name].shape}")
            error = _sizes(value, self.exact[name])
            verdicts[name] = Verdict(tuple(map(float, error)), self.bounds[name])
        return verdicts


def input_shapes(shape, dtype=jnp.bfloat16) -> Inputs:
    """Returns the shapes and dtypes of a cell's arrays."""
    q_shape = (shape.batch, shape.q_len, shape.q_heads, shape.head_dim)
    kv_shape = (shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    return Inputs(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))


def random_inputs(shape, dtype=jnp.bfloat16, seed: int = 0) -> Inputs:
    """Draws standard normal arrays: zeros would draw less power and flatter everybody."""
    keys = jax.random.split(jax.random.key(seed), 4)
    wanted = zip(keys, input_shapes(shape, dtype), strict=True)
    return Inputs(*(jax.random.normal(key, like.shape, like.dtype) for key, like in wanted))


def build_oracle(inputs: Inputs, causal: bool) -> Oracle:
    """Computes the float32 results and the bounds for inputs of this dtype."""
    return compile_oracle(inputs, causal)(inputs)


def compile_oracle(like: Inputs, causal: bool) -> Callable[[Inputs], Oracle]:
    """Compiles `build_oracle` for inputs of these shapes."""
    return functools.partial(_judge, _both.lower(like, causal).compile())


def _judge(compiled, inputs: Inputs) -> Oracle:
    exact, plain, lse_floor = compiled(inputs)
    bounds = {}
    for name in exact:
        factor = OUTPUT_FACTOR if name in FORWARD else GRADIENT_FACTOR
        bounds[name] = tuple(factor * float(e) for e in _sizes(plain[name], exact[name]))
    # Plain attention keeps its scores in float32, so its LSE is as good as the oracle's, and twice
    # that error says little: one float32 rounding of the terms that are added is allowed on top.
    floor = float(jnp.finfo(jnp.float32).eps) * float(lse_floor)
    bounds["lse"] = tuple(b + floor for b in bounds["lse"])
    return Oracle(exact, bounds)


# Nothing here is timed, and tuning matrix products takes XLA longer than running them.
@functools.partial(jax.jit, static_argnums=1, compiler_options={"xla_gpu_autotune_level": 0})
def _both(inputs: Inputs, causal: bool):
    """Returns (exact, plain, largest sum of absolute terms of an LSE), one KV head at a time."""
    batch, _, kv_heads, _ = inputs.k.shape

    def one_head(head: Inputs):
        wide = Inputs(*(x.astype(jnp.float32) for x in head))
        oracle = functools.partial(reference.attention, causal=causal, full_precision=True)
        exact = _run(oracle, wide)
        terms = jnp.einsum("btgh,bskh->bkgts", jnp.abs(head.q), jnp.abs(head.k))
        largest = jnp.max(terms.astype(jnp.float32)) * head.q.shape[-1] ** -0.5
        floor = 1.0 + largest + jnp.max(jnp.abs(exact["lse"]))
        return exact, _run(functools.partial(_plain, causal=causal), head), floor

    exact, plain, floor = lax.map(one_head, Inputs(*(_split(x, kv_heads) for x in inputs)))
    merge = lambda tree: {
        name: x.reshape(batch, -1, x.shape[-1]) if name == "lse" else _join(x, batch)
        for name, x in tree.items()
    }
    return merge(exact), merge(plain), jnp.max(floor)


def _split(x, kv_heads: int):
    """Reshapes [B, T, N, H] to [B * K, 1, T, N / K, H]."""
    batch, length, heads, dim = x.shape
    x = x.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    return x.transpose(0, 2, 1, 3, 4).reshape(batch * kv_heads, 1, length, heads // kv_heads, dim)


def _join(x, batch: int):
    """Inverts _split: reshapes [B * K, 1, T, N / K, H] to [B, T, N, H]."""
    slices, _, length, group, dim = x.shape
    x = x.reshape(batch, slices // batch, length, group, dim).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, length, -1, dim)


def _run(attention, inputs: Inputs):
    """Computes outputs and gradients by name."""
    q, k, v, do = inputs
    o, pullback, lse = jax.vjp(attention, q, k, v, has_aux=True)
    return dict(zip((*FORWARD, *BACKWARD), (o, lse, *pullback(do.astype(o.dtype))), strict=True))


def _plain(q, k, v, *, causal: bool):
    """Computes attention as one writes it in jnp, for one KV head.

    The softmax is in float32, the rest in q's dtype.
    """
    k, v = k[:, :, 0], v[:, :, 0]
    scores = jnp.einsum("btgh,bsh->bgts", q, k, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(visible, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgts,bsh->btgh", weights, v), lse


@jax.jit
def _sizes(found, exact):
    """Returns (maximum, root mean square) of the difference."""
    error = jnp.abs(found.astype(jnp.float32) - exact.astype(jnp.float32))
    return jnp.max(error), jnp.sqrt(jnp.mean(jnp.square(error)))
