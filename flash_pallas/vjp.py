"""Differentiation, batching and sharding types of attention: once, for every backend.

    custom_vjp( first order only( fold vmapped axes into the batch( backend ) ) )

The residuals are Q, K, V, O and the log-sum-exp (and the caller's query offsets), so memory stays
linear in the length. Both outputs carry names for rematerialisation policies.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from .backends.base import Backend
from .core import manual_axes, softmax
from .core.problem import AttentionSpec, Operands

SAVED_NAMES = ("flash_attention_out", "flash_attention_lse")

save_attention = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
"""A policy for `jax.checkpoint`: keep O and the log-sum-exp, recompute the rest.

With it a rematerialised layer does not run the forward kernel a second time.
"""


def attend(backend: Backend, spec: AttentionSpec, blocks: Any, operands: Operands):
    """Attention of one canonical call.

    Args:
        backend: runs it; static, as are `spec` and `blocks`.
        spec: what is computed.
        blocks: tile sizes, from `backend.blocks`.
        operands: q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], q_offset int32[B] or None.

    Returns:
        o [B, T, N, Hv] in q's dtype and lse [B, N, T], natural logarithm, -inf for rows without
        keys. Both are differentiable once, in reverse mode.
    """
    # Outside the custom_vjp, so that the transpose sums the gradients of replicated operands.
    operands = manual_axes.spread(operands, manual_axes.varying(operands))
    return _attend(backend, spec, blocks, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(backend, spec, blocks, operands):
    o, lse_log2 = _forward(backend, spec, blocks)(operands)
    return o, softmax.natural(lse_log2)


def _attend_fwd(backend, spec, blocks, primals):
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    operands = jax.tree.map(lambda x: x.value, primals, is_leaf=is_primal)
    o, lse_log2 = _forward(backend, spec, blocks)(operands)
    o = checkpoint_name(o, SAVED_NAMES[0])
    lse_log2 = checkpoint_name(lse_log2, SAVED_NAMES[1])
    return (o, softmax.natural(lse_log2)), (operands, o, lse_log2)


def _attend_bwd(backend, spec, blocks, residuals, cotangents):
    operands, o, lse_log2 = residuals
    do, dlse = cotangents
    if isinstance(do, SymbolicZero):
        do = jnp.zeros_like(o)
    delta = _delta(o, do, None if isinstance(dlse, SymbolicZero) else dlse, lse_log2)
    grads = _backward(backend, spec, blocks)(operands, lse_log2, do, delta)
    return (Operands(q=grads.q, k=grads.k, v=grads.v, q_offset=None),)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


def _delta(o, do, dlse, lse_log2):
    """What the Jacobian of the softmax subtracts from dP: rowsum(o * do) - dlse, [B, N, T].

    `dlse` is the cotangent of the natural logarithm, None for zero. The gradient of lse with
    respect to the scores is P itself: that is why it joins here and costs the kernels nothing.
    """
    dtype = lse_log2.dtype
    delta = jnp.einsum("btnh,btnh->bnt", o.astype(dtype), do.astype(dtype))
    if dlse is None:
        return delta
    # The cotangent of lse = -inf may be anything (logaddexp makes a NaN of it); its row has no P.
    return delta - jnp.where(lse_log2 >= softmax.EMPTY_ROW / 2, 0.0, dlse)


@lru_cache(maxsize=1024)
def _forward(backend, spec, blocks):
    """operands -> (o, lse_log2), wrapped as the module's docstring says."""

    def forward(operands):
        outputs = backend.forward(spec, blocks, operands)
        return manual_axes.spread(outputs, manual_axes.varying(operands))

    return partial(_first_order_only, _fold_vmap(forward))


@lru_cache(maxsize=1024)
def _backward(backend, spec, blocks):
    """(operands, lse_log2, do, delta) -> Grads, wrapped likewise."""

    def backward(operands, *rows):
        grads = backend.backward(spec, blocks, operands, *rows)
        return manual_axes.spread(grads, manual_axes.varying(operands))

    return partial(_first_order_only, _fold_vmap(backward))


def _fold_vmap(call):
    """`call` with a vmapped axis folded into the batch, axis 0 of every argument and result.

    A kernel then sees one larger batch instead of one more grid axis. What is not batched is
    repeated.
    """
    folding = custom_vmap(call)

    @folding.def_vmap
    def fold(axis_size, is_batched, *args):
        args = jax.tree.map(partial(_fold_axis, axis_size), args, tuple(is_batched))
        out = folding(*args)
        out = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return folding


def _fold_axis(axis_size, x, is_batched):
    x = x if is_batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
    return x.reshape(axis_size * x.shape[1], *x.shape[2:])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first_order_only(call, *args):
    return call(*args)


@_first_order_only.defjvp
def _second_order(call, primals, tangents):
    raise NotImplementedError(
        "flash_attention has no second-order derivatives (grad of grad, hessian, jvp of grad): its "
        "kernels compute the first gradient only. Differentiate flash_pallas.reference.attention "
        "instead, which is plain jnp and differentiable to any order, at O(T * S) memory"
    )
