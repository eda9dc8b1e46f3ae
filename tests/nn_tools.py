"""Tools for the tests of flash_pallas.nn: the rule for errors, and the layer written out densely.

The rule is that of `checks`: our error may be at most twice (gradients: three times) that of the
plain version in the same dtype, in the maximum and in the root mean square, both measured against
the plain version in float64. The floor is one eps of the result's own size, for results in which
the plain version happens to be exact.

Both are measured over DRAWS inputs that are all but equal. At a single input, the gradient of a
bias has 24 rounding errors, of which the largest is at times four times that of the plain version,
though over many inputs the two are level.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from .checks import FLOOR, GRADIENT_FACTOR, OUTPUT_FACTOR

# Gradients of Flax's causal layer, the worst of 30 seeds with jax 0.12: the error is 1.11 of what
# is allowed with one draw, 0.75 with two or four, 0.61 with eight.
DRAWS = 4


def in_float64(f, *arguments):
    """Calls f with its arguments' floats widened to float64; returns numpy arrays."""
    arguments = jax.tree.map(np.asarray, arguments)
    # Flax's normalisation mixes float64 with float32 and needs the standard promotion.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        widen = lambda x: jnp.asarray(x, jnp.float64) if np.issubdtype(x.dtype, np.floating) else x
        return jax.tree.map(np.asarray, jax.jit(f)(*jax.tree.map(widen, arguments)))


def value_and_grads(f):
    """Returns (params, x) -> ((output,), (d/dparams, d/dx) of half the sum of its squares)."""

    def call(params, x):
        out, pull = jax.vjp(f, params, x)
        return (out,), pull(out)

    return call


def assert_no_worse(ours, plain, params, x):
    """Checks that output and gradients of `ours` keep the rule against those of `plain`.

    Args:
        ours: (params, x) -> output.
        plain: the same in plain jnp, for any float dtype.
        params: pytree of float32.
        x: float32.
    """
    dense = value_and_grads(plain)
    run, run_plain = jax.jit(value_and_grads(ours)), jax.jit(dense)
    draws = []
    for near in _all_but_equal((params, x)):
        draws.append((in_float64(dense, *near), run(*near), run_plain(*near)))
    exact, found, baseline = (jax.tree.map(_stacked, *same) for same in zip(*draws, strict=True))
    for part, factor in ((0, OUTPUT_FACTOR), (1, GRADIENT_FACTOR)):
        leaves = jax.tree.leaves_with_path(exact[part])
        ours_leaves, plain_leaves = jax.tree.leaves(found[part]), jax.tree.leaves(baseline[part])
        for (path, e), o, p in zip(leaves, ours_leaves, plain_leaves, strict=True):
            _assert_leaf(jax.tree_util.keystr(path), e, o, p, factor)


def _all_but_equal(x):
    """Yields x and DRAWS - 1 trees within about 2^-12 of it, with which all rounds differently."""
    yield x
    rng = np.random.default_rng(0)
    near = lambda a: a * (1 + 2.0**-12 * rng.normal(size=a.shape)).astype(a.dtype)
    for _ in range(DRAWS - 1):
        yield jax.tree.map(near, x)


def _stacked(*draws):
    return np.stack([np.asarray(a) for a in draws])


def _assert_leaf(name, exact, found, baseline, factor):
    assert found.shape == exact.shape, name
    eps = float(jnp.finfo(found.dtype).eps)
    found, baseline = (a.astype(np.float64) for a in (found, baseline))
    for size in (np.max, lambda a: np.sqrt(np.mean(np.square(a)))):
        error, allowed = (size(np.abs(a - exact)) for a in (found, baseline))
        allowed = factor * allowed + FLOOR * eps * size(np.abs(exact))
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def dense_layer(params, x, *, rope_theta=None, qk_norm=None, positions=None, **modifiers):
    """Computes flash_pallas.nn's layer in plain jnp: repeated K/V heads, complex rotation.

    Args:
        params: parameters of the layer, boxes removed.
        x: [B, T, features].
        rope_theta: base of the rotary angles; None: no rotation.
        qk_norm: None, "rms" or "layer".
        positions: [B, T]; None counts from 0.
        **modifiers: keyword arguments of `dense_attention`.
    """
    project = lambda name: _with_bias(
        jnp.einsum("btd,dnh->btnh", x, params[name]["kernel"]), params[name]
    )
    q, k, v = (project(name) for name in ("query", "key", "value"))
    if qk_norm is not None:
        suffix = {"rms": "norm", "layer": "ln"}[qk_norm]
        q, k = (
            _normalized(a, params[f"{name}_{suffix}"]["scale"], qk_norm)
            for a, name in ((q, "query"), (k, "key"))
        )
    if rope_theta is not None:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        q, k = (_rotated(a, positions, rope_theta) for a in (q, k))
    o = dense_attention(q, k, v, sinks=params.get("sinks"), **modifiers)
    return _with_bias(jnp.einsum("btnh,nhd->btd", o, params["out"]["kernel"]), params["out"])


def dense_attention(
    q, k, v, *, causal=False, scale=None, keep=None, bias=None, softcap=None, sinks=None
):
    """Computes attention with the matrix of logits in memory; a query without keys gives 0.

    Args:
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, H], the values.
        causal: whether a query sees keys up to its own index only.
        scale: factor of the logits; None is 1 / sqrt(H).
        keep: bool, broadcasts to [B, N, T, S] and has its rank.
        bias: float, with such a shape too.
        softcap: bound of the logits.
        sinks: [N].
    """
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    spread = lambda a: jnp.broadcast_to(a, logits.shape)
    logits = logits if bias is None else logits + spread(bias.astype(logits.dtype))
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    seen = jnp.ones(logits.shape, bool) if keep is None else spread(keep)
    if causal:
        seen = seen & spread(jnp.tril(jnp.ones(logits.shape[2:], bool))[None, None])
    if sinks is not None:
        column = (*logits.shape[:3], 1)
        sink = jnp.broadcast_to(sinks.astype(logits.dtype)[None, :, None, None], column)
        logits = jnp.concatenate([logits, sink], -1)
        seen = jnp.concatenate([seen, jnp.ones(column, bool)], -1)
    some = jnp.any(seen, -1, keepdims=True)
    logits = jnp.where(seen, logits, jnp.where(some, -jnp.inf, 0.0).astype(logits.dtype))
    p = jnp.where(some, jax.nn.softmax(logits), 0.0)[..., : k.shape[1]]
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def _with_bias(y, params):
    return y + jnp.broadcast_to(params["bias"], y.shape) if "bias" in params else y


def _normalized(x, scale, kind):
    if kind == "layer":
        x = x - jnp.mean(x, -1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x * jnp.broadcast_to(scale, x.shape)


def _rotated(x, positions, theta):
    half = x.shape[-1] // 2
    pairs = jax.lax.complex(x[..., :half], x[..., half:])
    frequency = jnp.asarray(theta ** (-np.arange(half) / half), x.dtype)
    angle = positions.astype(x.dtype)[:, :, None, None] * frequency[None, None, None]
    pairs = pairs * jnp.exp(jax.lax.complex(jnp.zeros_like(angle), angle))
    return jnp.concatenate([pairs.real, pairs.imag], axis=-1)


def quadratic_arrays(jaxpr, length: int) -> int:
    """Counts arrays of a jaxpr, inner ones included, with two dimensions of at least `length`."""
    found = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            found += sum(n >= length for n in getattr(variable.aval, "shape", ())) >= 2
        for inner in jaxprs_in_params(equation.params):
            found += quadratic_arrays(inner, length)
    return found
