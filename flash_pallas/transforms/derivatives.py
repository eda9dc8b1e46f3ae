"""Differentiation, batching and sharding types of attention: once, for every backend.

    custom_vjp( first order only, on shards of Explicit axes( fold vmapped axes into the batch(
        on shards of Auto axes( backend ) ) ) )

The residuals are Q, K, V, O and the log-sum-exp in two parts (and the caller's own arrays), so
memory stays linear in the length. Both outputs carry names for rematerialization policies.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import AxisType

from ..backends.base import Backend
from ..core import mesh_axes, padding, softmax, undifferentiable
from ..core.decode import DecodeOperands
from ..core.problem import (
    EXTRA_GRADS,
    AttentionSpec,
    Cotangents,
    Operands,
    Outputs,
    describe,
)
from . import sharding

SAVED_NAMES = ("flash_attention_out", "flash_attention_lse")

save_attention = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
"""A policy for `jax.checkpoint`: keep O and the log-sum-exp, recompute everything else.

With this policy, a rematerialized layer does not run the forward kernel a second time. The backward
pass starts from both arrays, so a policy that keeps neither of them runs the kernel again. So does
one that keeps only what a model itself names as the result of attention, such as
`save_only_these_names("context")`. To avoid that, combine such a policy with this one,

    jax.checkpoint_policies.save_from_both_policies(theirs, save_attention)

or put the names "flash_attention_out" and "flash_attention_lse" among its own names. They should
replace the model's own name for the result, because that name stores O a second time. Policies that
offload accept the same names.
"""


def attend(backend: Backend, spec: AttentionSpec, blocks: Any, operands: Operands):
    """Computes attention of one canonical call.

    Args:
        backend: the backend that runs it; static, as are `spec` and `blocks`.
        spec: static parameters of the call.
        blocks: tile sizes, from `backend.attention.plan`.
        operands: the arrays, see `Operands`.

    Returns:
        o [B, T, N, Hv] in q's dtype and lse [B, N, T], natural logarithm, -inf for rows without
        keys, both differentiable once, in reverse mode; and, if spec.max_logit, the largest logit
        of every row [B, N, T], which is not differentiated, else None.
    """
    # Outside the custom_vjp, so that the transpose sums the gradients of replicated operands, and
    # leaves them cut as the caller has them.
    operands = sharding.placed(mesh_axes.spread(operands, mesh_axes.varying(operands)))
    return _attend(backend, spec, blocks, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(backend, spec, blocks, operands):
    return _public(spec, operands, forward_of(backend, spec, blocks)(operands))


def _attend_fwd(backend, spec, blocks, primals):
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    operands = jax.tree.map(lambda x: x.value, primals, is_leaf=is_primal)
    out = forward_of(backend, spec, blocks)(operands)
    out = out._replace(
        o=checkpoint_name(out.o, SAVED_NAMES[0]),
        lse_log2=checkpoint_name(out.lse_log2, SAVED_NAMES[1]),
        shift=None if out.shift is None else checkpoint_name(out.shift, SAVED_NAMES[1]),
    )
    asked = jax.tree.map(lambda x: x.perturbed, primals, is_leaf=is_primal)
    wanted = {name: None for name in EXTRA_GRADS if any(jax.tree.leaves(getattr(asked, name)))}
    residuals = (operands, out._replace(max_logit=None), wanted)
    return _public(spec, operands, out), residuals


def gradients(backend, spec, blocks, residuals, cotangents) -> tuple[Operands]:
    """Computes the gradients of one call.

    Args:
        backend: the backend that runs it, as are `spec` and `blocks` of `attend`.
        spec: static parameters.
        blocks: tile sizes.
        residuals: (operands, Outputs of the forward, those of EXTRA_GRADS that are asked for).
        cotangents: of (o, natural log-sum-exp, and maybe more, which is not looked at); None for
            the second, or a symbolic zero for either, is 0.

    Returns:
        The gradients of operands that have one, None for all others; the only one of a tuple, as a
        rule of jax.custom_vjp returns it.
    """
    operands, out, wanted = residuals
    do, dlse, *_ = cotangents
    do = jnp.zeros_like(out.o) if isinstance(do, SymbolicZero) else do
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    if backend.vjp.reads_output:
        cotangents = Cotangents(out.lse_log2, do, None, out.shift, out.o, dlse)
    else:
        delta = delta_of(operands, out.o, do, dlse, out.lse_log2)
        cotangents = Cotangents(out.lse_log2, do, delta, out.shift)
    grads = backward_of(backend, spec, blocks, frozenset(wanted))(operands, cotangents)
    if spec.score_mod is not None:
        # Hidden scores have a gradient of 0 times the user's derivative, which may be anything.
        grads = padding.cleared(operands, grads)
    sinks = None
    if operands.sinks is not None:
        sinks = sink_gradient(operands.sinks, cotangents, describe(operands, spec).unit)
    params = grads.score_params or (None,) * len(operands.score_params)
    no_params = (None,) * len(operands.mask_params)
    return (grads._replace(sinks=sinks, score_params=params, mask_params=no_params),)


_attend.defvjp(_attend_fwd, gradients, symbolic_zeros=True)


def _public(spec, operands, out: Outputs):
    """Returns (o, lse, max_logit) in natural units."""
    unit = describe(operands, spec).unit
    return out.o, softmax.natural(out.lse_log2, out.shift, unit), out.max_logit


def delta_of(operands, o, do, dlse, lse_log2):
    """Computes what the softmax's Jacobian subtracts from dP: rowsum(o * do) - dlse, [B, N, T].

    `dlse` is the cotangent of the natural logarithm, None for zero. The gradient of lse with
    respect to the scores is P itself: that is why it joins here and costs the kernels nothing.
    """
    dtype = lse_log2.dtype
    exact = jax.lax.Precision.HIGHEST  # the default may be TF32
    delta = jnp.einsum("btnh,btnh->bnt", o.astype(dtype), do.astype(dtype), precision=exact)
    # The output of padding is constant, whatever its cotangent holds.
    delta = padding.cleared_rows(operands, delta)
    if dlse is None:
        return delta
    # The cotangent of lse = -inf may be anything (logaddexp makes a NaN of it); its row has no P.
    return delta - jnp.where(lse_log2 >= softmax.EMPTY_ROW / 2, 0.0, dlse)


def sink_gradient(sinks, rows: Cotangents, unit: float):
    """Computes the gradient of the sinks, [B, N].

    A sink is a logit without a value, so its dP is 0; `unit` is that of softmax.finish.
    """
    weight = sink_weight(sinks, rows.lse_log2, rows.shift, unit)
    return -jnp.sum(weight * rows.delta, axis=-1).astype(sinks.dtype)


def sink_weight(sinks, lse_log2, shift, unit: float):
    """Computes the weight of the sinks in every row, [B, N, T]; arguments as of sink_gradient."""
    sink = sinks.astype(lse_log2.dtype)[..., None]
    above = sink if shift is None else sink - shift * unit
    return jnp.exp2(above * softmax.LOG2E - lse_log2)


@lru_cache(maxsize=1024)
def forward_of(backend, spec, blocks):
    """Returns operands -> Outputs: the backend's forward, wrapped as described in the module."""

    def forward(operands):
        return padding.discarded(operands, backend.attention.run(spec, blocks, operands))

    call = fold_vmap(sharding.per_shard(forward, backend.partitionable))
    return partial(_first_order_only, call, Outputs)


@lru_cache(maxsize=1024)
def backward_of(backend, spec, blocks, wanted):
    """Returns (operands, Cotangents) -> gradients, as Operands: the backend's backward.

    It is wrapped like its forward; `wanted` is that of `Vjp.run`.
    """
    backward = partial(backend.vjp.run, spec, blocks, wanted=wanted)
    call = fold_vmap(sharding.per_shard(backward, backend.partitionable), wanted)
    return partial(_first_order_only, call, Operands)


@lru_cache(maxsize=1024)
def push_of(backend, spec):
    """Returns (operands, their tangents, Outputs) -> Tangents: the backend's forward mode.

    Without Outputs, those are computed too; both are as `Jvp.run` has them. Of the wraps of
    `forward_of` it has that of the partitioner alone.
    """

    def push(operands, tangents, outputs=None):
        result = backend.jvp.run(spec, operands, tangents, outputs)
        if outputs is not None:
            return result
        out = padding.discarded(operands, Outputs(*result[:3]))
        return result._replace(o=out.o, lse_log2=out.lse_log2, shift=out.shift)

    return sharding.per_shard(push, backend.partitionable)


@lru_cache(maxsize=1024)
def push_backward_of(backend, spec):
    """Returns (operands, Cotangents, their tangents) -> Operands: forward mode of the backward.

    Arguments are those of `JvpOfVjp.run`; the wrap is that of `push_of`.
    """
    return sharding.per_shard(partial(backend.jvp_of_vjp.run, spec), backend.partitionable)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _first_order_only(call, results, *args):
    """Runs `call` on each shard where types say how arrays are sharded; else on the whole.

    Args:
        call: (Operands, ...) -> a record of the type `results`.
        results: Outputs, or Operands where they are gradients.
        *args: arguments of `call`.
    """
    if mesh_axes.mesh_of(args[0][:3]) is None:
        return call(*args)
    return sharding.OnShards(call, results)(*args)


@_first_order_only.defjvp
def _second_order(call, results, primals, tangents):
    out = _first_order_only(call, results, *primals)
    return out, undifferentiable.tangents(out, tangents, NO_SECOND_ORDER)


NO_SECOND_ORDER = (
    "flash_attention has no second-order derivatives (grad of grad, hessian, jvp of grad) where "
    "differentiable is 'reverse': pass differentiable='any', or differentiate "
    "flash_pallas.reference.attention, which is plain jnp, at O(T * S) memory. Where none are "
    "needed, as in first-order meta-learning, put jax.lax.stop_gradient around the gradient"
)


# --- vmap of attention: the vmapped axis becomes part of the batch --------------------------------
# A kernel then sees one larger batch instead of one more grid axis. Operands that are not batched
# are repeated, except a bias or a mask: entry b of a batch of B reads entry b // (B // Bb) of a
# bias of Bb entries. So a bias shared by the entries of a member needs the members folded
# outermost, and one shared by the members needs them innermost; the order is the one that repeats
# fewer bytes.

# Operands whose batch may be a divisor of the batch.
SHARED = ("bias", "mask", "block_lists")


def fold_vmap(call, wanted: frozenset[str] = frozenset()):
    """Wraps `call` so that a vmapped axis is folded into axis 0 of every argument and result.

    Args:
        call: (Operands, ...) -> a tree of arrays, all with the batch first.
        wanted: shared operands that `call` returns a gradient of: vmap wants one for each of its
            members, so these are repeated.
    """
    folding = custom_vmap(call)

    @folding.def_vmap
    def fold(axis_size, is_batched, operands, *rest):
        if not axis_size:
            out = of_no_members(call, is_batched, (operands, *rest))
            return out, jax.tree.map(lambda _: True, out)
        batch = operands.q.shape[1 if is_batched[0].q else 0]
        shared = {name: getattr(operands, name) for name in SHARED}
        # A gradient comes in its operand's own entries: those of an inner fold would be repeated.
        inner = wanted.isdisjoint(SHARED) and _inner_is_cheaper(
            axis_size, batch, shared, is_batched[0], tie=_may_be_cut(operands.q)
        )
        fold = _Fold(axis_size, batch, inner)
        one = {
            name: x if x is None else fold.shared(x, getattr(is_batched[0], name), name in wanted)
            for name, x in shared.items()
        }
        bare = operands._replace(**dict.fromkeys(SHARED))
        kinds = is_batched[0]._replace(**dict.fromkeys(SHARED))
        folded = jax.tree.map(fold.one, bare, kinds)._replace(**one)
        others = jax.tree.map(fold.one, rest, tuple(is_batched[1:]))
        out = folding(folded, *others)
        return jax.tree.map(fold.undone, out), jax.tree.map(lambda _: True, out)

    return folding


def of_no_members(call, is_batched, args):
    """Returns the results of a vmap of size 0: arrays without elements, in the shapes of `call`.

    Args:
        call: the function of one member.
        is_batched: says which of `args` have the vmapped axis, as their first.
        args: the arguments as vmap gives them.
    """
    member = lambda x, batched: jax.ShapeDtypeStruct(x.shape[1:] if batched else x.shape, x.dtype)
    shapes = jax.eval_shape(call, *jax.tree.map(member, args, tuple(is_batched)))
    return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)


def _inner_is_cheaper(size: int, batch: int, shared, is_batched, tie: bool) -> bool:
    """Returns whether members' own biases and masks are smaller than copies of the shared ones."""
    outer_bytes = inner_bytes = 0
    for name, x in shared.items():
        if x is None:
            continue
        nbytes = x.size * x.dtype.itemsize
        if getattr(is_batched, name):
            inner_bytes += batch * nbytes // x.shape[1]
        elif len(x) > 1:
            outer_bytes += size * nbytes
    return tie if inner_bytes == outer_bytes else inner_bytes < outer_bytes


def _may_be_cut(q) -> bool:
    """Returns whether the partitioner may shard the batch.

    The batch stays sharded only if it is the outer of two folded axes.
    """
    return AxisType.Auto in jax.typeof(q).sharding.mesh.axis_types


@dataclasses.dataclass(frozen=True)
class _Fold:
    """Folding of `size` members with `batch` entries each into one batch.

    Attributes:
        size: size of the vmapped axis.
        batch: number of entries of each member.
        inner: True if entry b of member i becomes b * size + i, else it becomes i * batch + b.
    """

    size: int
    batch: int
    inner: bool

    def one(self, x, is_batched):
        """Folds an array [batch, ...], or [size, batch, ...] if batched."""
        x = x if is_batched else jnp.broadcast_to(x[None], (self.size, *x.shape))
        x = jnp.swapaxes(x, 0, 1) if self.inner else x
        return x.reshape(-1, *x.shape[2:])

    def shared(self, x, is_batched, repeat):
        """Folds a shared operand: x [Bb, ...], or [size, Bb, ...] if batched."""
        if not is_batched and not repeat and (self.inner or len(x) == 1):
            return x
        if not self.inner:
            return self.one(x, is_batched)
        whole = jnp.repeat(x, self.batch // x.shape[1], axis=1)
        return self.one(whole, is_batched)

    def undone(self, x):
        """Unfolds a result to [size, batch, ...]."""
        if not self.inner:
            return x.reshape(self.size, -1, *x.shape[1:])
        return jnp.swapaxes(x.reshape(-1, self.size, *x.shape[1:]), 0, 1)


def fold_decode(size: int, is_batched: DecodeOperands, operands: DecodeOperands) -> DecodeOperands:
    """Folds a vmapped axis into the operands of one call, as the outer batch.

    Pages that all members share are not repeated; members' own pages are concatenated, and the
    page tables are shifted to match.

    Args:
        size: size of the vmapped axis.
        is_batched: says which operands have it, as their first.
        operands: the operands as vmap gives them.
    """
    of_cache = ("k", "v", "k_scale", "v_scale")
    own_cache = any(getattr(is_batched, name) for name in of_cache)
    rows = operands.k.shape[1 if is_batched.k else 0]
    fold = _Fold(size, 0, inner=False)
    folded = {}
    for name, x in operands._asdict().items():
        batched = getattr(is_batched, name)
        if x is None or (name in of_cache and operands.page_table is not None and not own_cache):
            folded[name] = x
            continue
        if name in ("k_scale", "v_scale"):  # One row is for all.
            axis = 1 if batched else 0
            x = jnp.broadcast_to(x, (*x.shape[:axis], rows, x.shape[-1]))
        folded[name] = fold.one(x, batched)
    if operands.page_table is not None and own_cache:
        table = jnp.clip(folded["page_table"], 0, rows - 1)
        first = jnp.repeat(jnp.arange(size, dtype=jnp.int32) * rows, len(folded["q"]) // size)
        folded["page_table"] = table + first.reshape(-1, *[1] * (table.ndim - 1))
    return DecodeOperands(**folded)
