"""Attention as the documents of other libraries define it, written out in jnp; nothing of ours.

All arrays are [B, T, N, H], float64, so that two right implementations differ by rounding alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Sums of some hundred terms of float64 in two orders: measured at most 2e-14 on these arrays.
CLOSE = 1e-12


def attention(q, k, v, *, visible=True, scale=None, change=lambda score: score):
    """Computes (o, lse [B, N, T]) of scores that `change` may change and `visible` may hide."""
    heads = q.shape[2]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    score = change(scale * jnp.einsum("btnh,bsnh->bnts", q, k))
    score = jnp.where(visible, score, -jnp.inf)
    most = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    most = jnp.where(jnp.isfinite(most), most, 0.0)
    # Hidden scores are 0 inside of the exponential, where an infinity would make a NaN gradient.
    seen = score > -jnp.inf
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, score, 0.0) - most), 0.0)
    total = weight.sum(-1, keepdims=True)
    divisor = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, jnp.log(divisor) + most, -jnp.inf)[..., 0]
    return jnp.einsum("bnts,bsnh->btnh", weight / divisor, v), lse


def flash_attn(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None):
    """Computes (o, lse) by the formula in the docstring of flash-attn 2.8's `flash_attn_func`."""
    i, j = (np.arange(x.shape[1])[None, None, None] for x in (q, k))
    i = i.reshape(1, 1, -1, 1) + k.shape[1] - q.shape[1]
    visible = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
    left, right = window
    if left >= 0:
        visible &= j >= i - left
    if causal:
        right = 0
    if right >= 0:
        visible &= j <= i + right

    def change(score):
        if softcap > 0:
            score = softcap * jnp.tanh(score / softcap)
        if slopes is None:
            return score
        slope = jnp.broadcast_to(slopes, (len(q), q.shape[2]))[:, :, None, None]
        return score - slope * np.abs(i - j).astype(score.dtype)

    return attention(q, k, v, visible=visible, scale=scale, change=change)


def flash_attn_varlen(q, k, v, cu_q, cu_k, **options):
    """Computes o [total, N, H] of documents one after the other; what follows the last is 0."""
    found = [jnp.zeros((0, q.shape[1], v.shape[-1]), q.dtype)]
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        if q1 > q0:
            one = q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]
            nothing = jnp.zeros((q1 - q0, q.shape[1], v.shape[-1]), q.dtype)
            found.append(flash_attn(*one, **options)[0][0] if k1 > k0 else nothing)
    found.append(jnp.zeros((len(q) - cu_q[-1], q.shape[1], v.shape[-1]), q.dtype))
    return jnp.concatenate(found)


def assert_close(found, wanted, bound: float = CLOSE) -> None:
    """Checks for equality, to a bound relative to the largest element; infinities are equal."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    assert found.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], wanted[~finite])
    size = max(1.0, np.abs(wanted[finite]).max(initial=0.0))
    assert np.abs(found[finite] - wanted[finite]).max(initial=0.0) <= bound * size


def assert_as_good(found, wanted, plain) -> None:
    """Checks that an error in a narrow dtype is at most twice that of plain jnp in this dtype.

    Where plain jnp happens to be exact, half of a rounding of the largest element is allowed.
    """
    found, wanted, plain = (np.asarray(x).astype(np.float64) for x in (found, wanted, plain))
    eps = float(jnp.finfo(jnp.bfloat16 if plain.dtype == object else jnp.float32).eps)
    error = lambda x: np.abs(x - wanted).max(initial=0.0)
    assert error(found) <= max(2 * error(plain), eps * np.abs(wanted).max(initial=0.0))


def seventh(x):
    """Returns a cotangent for x that treats no two neighbours alike."""
    return jnp.reshape(jnp.sin(7.0 * jnp.arange(float(x.size))), x.shape).astype(x.dtype)


def gradients(function, arrays):
    """Computes (o, gradients with respect to all arrays) of a function with one result."""
    o, pull = jax.vjp(function, *arrays)
    return o, pull(seventh(o))
