"""cuDNN's attention in dense jnp, for a CPU: jax.nn's own path to cuDNN, with another end.

jax calls cuDNN by two primitives, a forward and a backward, around which it has a `custom_vjp`,
rules for vmap and for the partitioner, and checks. All of that runs as on a GPU; only the
primitives, which no CPU has, compute the same in jnp. They are as careless as cuDNN may be: NaN for
queries that see no key, and in gradients beyond the lengths and of a bias where a mask hides it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as engine
from jax._src.interpreters import mlir

VERSION = 91900
_f32 = lambda x: x.astype(jnp.float32)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Lets jax.nn find a cuDNN on a GPU of compute capability 9.0."""
    _register()
    with (
        mock.patch.object(engine, "check_cudnn_version", lambda: VERSION),
        mock.patch.object(engine, "check_compute_capability", lambda _: True),
        mock.patch.object(engine, "is_cuda_compute_capability_equal", lambda _: False),
    ):
        yield


def _register():
    lower = lambda end: mlir.lower_fun(end, multiple_results=True)
    mlir.register_lowering(engine._dot_product_attention_fwd_p, lower(_forward), platform="cpu")
    mlir.register_lowering(engine._dot_product_attention_bwd_p, lower(_backward), platform="cpu")


def _per_query(x, q):
    """Repeats heads of keys for the query heads that read them."""
    return _f32(jnp.repeat(x, q.shape[2] // x.shape[2], axis=2))


def _weights(q, k, bias, lengths, static):
    """Returns (scores, what is visible, queries within their lengths), each [B, N, T, S]."""
    s = static["scale"] * jnp.einsum("btnh,bsnh->bnts", _f32(q), _per_query(k, q))
    if static["variadic_args"][0]:
        assert bias.dtype == q.dtype and bias.shape[2:] == s.shape[2:]
        s = s + _f32(bias)
    row, column = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
    keep = jnp.ones(s.shape, bool)
    kind, window = static["mask_type"], static["sliding_window_length"]
    if kind in (engine.MaskType.CAUSAL, engine.MaskType.PADDING_CAUSAL):
        keep &= column <= row
    if window:
        keep &= row - column < window
    within_q, within_kv = jnp.ones_like(keep), jnp.ones_like(keep)
    if engine.has_padding(kind):
        q_lengths, kv_lengths = (x[:, None, None, None] for x in lengths)
        within_q, within_kv = row < q_lengths, column < kv_lengths
    return s, keep & within_q & within_kv, within_q[:, :1, :, 0], within_kv[:, :1, 0]


def _forward(q, k, v, bias, q_lengths, kv_lengths, *_, is_training, **static):
    s, keep, *_ = _weights(q, k, bias, (q_lengths, kv_lengths), static)
    s = jnp.where(keep, s, -jnp.inf)
    most = s.max(-1, keepdims=True)
    p = jnp.exp(s - most)  # NaN without a key
    log = jnp.log(p.sum(-1, keepdims=True))
    p = (p * jnp.exp(-log)).astype(q.dtype)
    o = jnp.einsum("bnts,bsnh->btnh", _f32(p), _per_query(v, q)).astype(q.dtype)
    return (o, (most + log)[..., 0]) if is_training else (o,)


def _backward(q, k, v, bias, q_lengths, kv_lengths, _0, _1, _2, _3, lse, o, do, *_, **static):
    s, keep, within_q, within_kv = _weights(q, k, bias, (q_lengths, kv_lengths), static)
    p = jnp.where(keep, jnp.exp(s - lse[..., None]), 0.0)
    dp = jnp.einsum("btnh,bsnh->bnts", _f32(do), _per_query(v, q))
    delta = jnp.einsum("btnh,btnh->bnt", _f32(o), _f32(do))
    ds = p * (dp - delta[..., None])
    of_q, of_k = (_f32(x.astype(q.dtype)) for x in (ds, p))
    dq = static["scale"] * jnp.einsum("bnts,bsnh->btnh", of_q, _per_query(k, q))
    dk = static["scale"] * jnp.einsum("bnts,btnh->bsnh", of_q, _f32(q))
    dv = jnp.einsum("bnts,btnh->bsnh", of_k, _f32(do))
    shared = lambda x: x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).sum(3)
    beyond = lambda x, within: jnp.where(jnp.swapaxes(within, 1, 2)[..., None], x, jnp.nan)
    within_q &= keep.any(-1)[:, :1]
    grads = beyond(dq, within_q), beyond(shared(dk), within_kv), beyond(shared(dv), within_kv)
    if static["variadic_args"][1]:
        axes = tuple(i for i in (0, 1) if bias.shape[i] == 1)
        hides = static["mask_type"] != engine.MaskType.NO_MASK
        grads = *grads, jnp.where(keep | (not hides), ds, jnp.nan).sum(axes, keepdims=True)
    return tuple(x.astype(q.dtype) for x in grads)
