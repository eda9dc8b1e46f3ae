"""Ring attention: keys and values travel from device to device, and queries stay in place.

Ring attention (https://arxiv.org/abs/2310.01889). Every step computes attention to the current keys
while the next keys are being sent. It merges the result with those of earlier steps through the
log-sum-exp, in float32. The backward pass is another round: with the final log-sum-exp and delta,
the gradients of all steps are independent. The gradients of keys and values travel with them.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from ..core import mesh_axes, softmax
from ..core.problem import AttentionSpec, Cotangents, Operands, Outputs, describe
from ..frontend import dispatch
from ..transforms import any_order, derivatives
from .layout import local_positions, names_of
from .plan import Piece, Plan


@dataclasses.dataclass(frozen=True)
class Ring:
    """Static parameters of a call.

    Attributes:
        axis: the mesh axis, or a tuple of them.
        plan: the schedule, which defines the work of each device.
        spec: spec of the whole attention.
        backend: name of the backend, or "auto".
    """

    axis: str | tuple[str, ...]
    plan: Plan
    spec: AttentionSpec
    backend: str

    @property
    def unit(self) -> float:
        """Factor from unscaled logits to natural ones, as in `Problem.unit`.

        Rings have neither a bias nor ALiBi.
        """
        return self.spec.unit(added=False)


class _Keys(NamedTuple):
    """Arrays that travel around the ring."""

    k: Any
    v: Any
    segments: Any  # of keys; None without
    positions: Any  # of keys; None where the plan knows them


class _Sums(NamedTuple):
    """Results of attention to the keys so far."""

    o: Any  # f32[B, T, N, Hv]
    lse_log2: Any  # f32[B, N, T]
    shift: Any  # f32[B, N, T]


def attend(ring: Ring, operands: Operands):
    """Computes (o [B, T, N, Hv], natural lse [B, N, T]) of this device's queries and all keys.

    It runs inside `jax.shard_map`. All operands except sinks are this device's parts.
    """
    axes = mesh_axes.varying(operands)
    # Without shard_map's check of varying axes no value has any, and none may be added.
    axes = axes | frozenset(names_of(ring.axis)) if axes else axes
    operands = mesh_axes.spread(operands, axes)
    if ring.spec.differentiable == "any":
        # JAX differentiates the merging and the ring, and keeps the keys of every step.
        return _public(ring, _forward(ring, operands))
    return _jitted(ring, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands):
    return _public(ring, _forward(ring, operands))


def _attend_fwd(ring: Ring, primals: Operands):
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    operands = jax.tree.map(lambda x: x.value, primals, is_leaf=is_primal)
    names = _Sums(derivatives.SAVED_NAMES[0], *(derivatives.SAVED_NAMES[1],) * 2)
    sums = jax.tree.map(checkpoint_name, _forward(ring, operands), names)
    return _public(ring, sums), (operands, sums)


def _attend_bwd(ring: Ring, residuals, output_cotangents):
    operands, (o, lse_log2, shift) = residuals
    do, dlse = output_cotangents
    do = jnp.zeros_like(o) if isinstance(do, SymbolicZero) else do
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    delta = derivatives.delta_of(operands, o, do, dlse, lse_log2)
    cotangents = Cotangents(lse_log2, do, delta, shift, o, dlse)
    dq, dk, dv = _backward(ring, operands, cotangents)
    none = operands._replace(**dict.fromkeys(Operands._fields))
    sinks = operands.sinks
    dsinks = None if sinks is None else derivatives.sink_gradient(sinks, cotangents, ring.unit)
    none = none._replace(score_params=(), mask_params=())
    return (none._replace(q=dq, k=dk, v=dv, sinks=dsinks),)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)

# `jax.shard_map` outside jit takes no custom_vjp with symbolic zeros (jax 0.11 and 0.12).
_jitted = jax.jit(_attend, static_argnums=0)


def _public(ring: Ring, sums: _Sums):
    """Returns (o, natural lse)."""
    return sums.o, softmax.natural(sums.lse_log2, sums.shift, ring.unit)


def _forward(ring: Ring, operands: Operands) -> _Sums:
    """Computes attention to all keys, o in q's dtype."""
    q, v = operands.q, operands.v
    dtype = softmax.sum_dtype(q.dtype)
    rows = (q.shape[0], q.shape[2], q.shape[1])
    sums = _Sums(
        jnp.zeros((*q.shape[:3], v.shape[3]), dtype),
        jnp.full(rows, softmax.EMPTY_ROW, dtype),
        jnp.zeros(rows, dtype),
    )
    sums = _like(operands, sums)
    keys = _keys(operands)
    for step in range(ring.plan.last_step + 1):
        # Sent before the keys at hand are used, so that the copy overlaps with the kernel.
        arriving = _rotated(ring, keys) if step < ring.plan.last_step else None
        fold = lambda wrapped, sums, keys, step=step: _fold(
            ring, step, wrapped, operands, sums, keys
        )
        sums = _either(ring, step, fold, sums, keys)
        keys = arriving
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks.astype(dtype)[..., None], rows)
        sums = _merged(ring, jax.tree.map(lambda x: x[None], sums), sinks)
    return sums._replace(o=sums.o.astype(q.dtype))


def _keys(operands: Operands) -> _Keys:
    """Returns this device's keys, with which the ring begins."""
    return _Keys(operands.k, operands.v, operands.kv_segments, operands.kv_positions)


def _fold(ring: Ring, step: int, wrapped: bool, operands: Operands, sums: _Sums, keys):
    """Merges what one step adds into `sums`."""
    for piece in ring.plan.pieces(step, wrapped):
        spec, part = _part(ring, step, wrapped, piece, operands, keys)
        out = _outputs(ring, spec, part)
        half = _halves(operands.q.shape[1], piece.rows)
        mine = _Sums(sums.o[:, half], sums.lse_log2[:, :, half], sums.shift[:, :, half])
        shift = jnp.zeros_like(mine.shift) if out.shift is None else out.shift
        theirs = _Sums(out.o.astype(mine.o.dtype), out.lse_log2, shift)
        merged = _merged(ring, jax.tree.map(lambda *x: jnp.stack(x), mine, theirs))
        replace = lambda x, part, axis, rows=piece.rows: _replaced(x, part, axis, rows)
        sums = jax.tree.map(replace, sums, merged, _Sums(1, 2, 2))
    return sums


def _outputs(ring: Ring, spec: AttentionSpec, part: Operands) -> Outputs:
    """Computes attention of one piece, as the call is to be differentiated."""
    chosen, blocks = dispatch.plan(describe(part, spec), ring.backend, ())
    if spec.differentiable != "any":
        return derivatives.forward_of(chosen, spec, blocks)(part)
    o, lse, _ = any_order.attend(chosen, spec, blocks, part)
    seen = lse > -jnp.inf
    lse_log2 = jnp.where(seen, jnp.where(seen, lse, 0.0) * softmax.LOG2E, softmax.EMPTY_ROW)
    return Outputs(o, lse_log2)


def _merged(ring: Ring, parts: _Sums, sinks=None) -> _Sums:
    """Merges stacked results of attention to parts of the keys into that to all of them."""
    last = lambda x: jnp.swapaxes(x, -1, -2)  # [.., N, T] to [.., T, N]
    sinks = None if sinks is None else last(sinks)
    o, *rows = softmax.merge(parts.o, last(parts.lse_log2), last(parts.shift), sinks, ring.unit)
    return _Sums(o, *map(last, rows))


def _backward(ring: Ring, operands: Operands, cotangents: Cotangents):
    """Computes (dq, dk, dv) in the dtypes of the operands."""
    dtype = cotangents.lse_log2.dtype
    zeros = lambda x: _like(operands, jnp.zeros(x.shape, dtype))
    dq: Any = zeros(operands.q)
    travelling: Any = None
    keys = _keys(operands)
    last = ring.plan.last_step
    for step in range(last + 1):
        arriving = _rotated(ring, keys) if step < last else None
        start = (dq, zeros(operands.k), zeros(operands.v))
        gradients = lambda wrapped, sums, keys, step=step: _gradients(
            ring, step, wrapped, operands, cotangents, sums, keys
        )
        dq, *own = _either(ring, step, gradients, start, keys)
        # The arriving sums were sent in the step before, while this step's kernels ran.
        own = own if travelling is None else jax.tree.map(jnp.add, own, travelling)
        travelling = _rotated(ring, own, -last if step == last else 1)
        keys = arriving
    pairs = zip((dq, *travelling), (operands.q, operands.k, operands.v), strict=True)
    return tuple(gradient.astype(x.dtype) for gradient, x in pairs)


def _gradients(ring: Ring, step, wrapped, operands: Operands, cotangents: Cotangents, sums, keys):
    """Adds what one step contributes to `sums`, (dq, dk, dv)."""
    dq, dk, dv = sums
    for piece in ring.plan.pieces(step, wrapped):
        spec, part = _part(ring, step, wrapped, piece, operands, keys)
        chosen, blocks = dispatch.plan(describe(part, spec), ring.backend, ())
        half = _halves(operands.q.shape[1], piece.rows)
        of_rows = _of_rows(cotangents, half)
        if not chosen.vjp.reads_output:
            of_rows = of_rows._replace(o=None, dlse=None)
        grads = derivatives.backward_of(chosen, spec, blocks, frozenset())(part, of_rows)
        cols = _halves(keys.k.shape[1], piece.cols)
        add = lambda x, g, part, half: _replaced(x, x[:, part] + g.astype(x.dtype), 1, half)
        dq = add(dq, grads.q, half, piece.rows)
        dk = add(dk, grads.k, cols, piece.cols)
        dv = add(dv, grads.v, cols, piece.cols)
    return dq, dk, dv


def _of_rows(cotangents: Cotangents, half: slice) -> Cotangents:
    """Returns the cotangents of some of the queries."""
    cut = lambda name, x: x[:, half] if name in ("do", "o") else x[:, :, half]
    fields = cotangents._asdict().items()
    return Cotangents(**{name: None if x is None else cut(name, x) for name, x in fields})


def _part(ring: Ring, step: int, wrapped: bool, piece: Piece, operands: Operands, keys: _Keys):
    """Returns (spec, operands) of one piece."""
    rows = _halves(operands.q.shape[1], piece.rows)
    cols = _halves(keys.k.shape[1], piece.cols)
    spec = dataclasses.replace(ring.spec, mask=piece.mask, q_offset=piece.offset)
    offset, ahead = None, step - ring.plan.shards if wrapped else step
    if piece.far:
        distance = ring.plan.far_distance(ahead, lax.axis_index(ring.axis))
        offset = jnp.full(operands.q.shape[:1], piece.far * distance, jnp.int32)
    cut = lambda x, places: None if x is None else x[:, places]
    part = Operands(
        operands.q[:, rows],
        keys.k[:, cols],
        keys.v[:, cols],
        q_offset=offset,
        q_segments=cut(operands.q_segments, rows),
        kv_segments=cut(keys.segments, cols),
        q_first=cut(operands.q_first, rows),
        q_last=cut(operands.q_last, rows),
        kv_positions=cut(keys.positions, cols),
    )
    if spec.dropout_rate:
        part = _with_places(ring, ahead, operands, part, (rows, cols))
    return spec, mesh_axes.spread(part, mesh_axes.varying(part))


def _with_places(ring: Ring, ahead: int, operands: Operands, part: Operands, cut) -> Operands:
    """Adds to `part` what dropout needs: it drops by positions in the whole sequence."""
    plan, me, batch = ring.plan, lax.axis_index(ring.axis), len(operands.q)
    places = (
        local_positions(device, plan.length, plan.shards, plan.zigzag)[None, half]
        for device, half in zip((me, me - ahead), cut, strict=True)
    )
    q_places, kv_places = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in places)
    keys = operands.dropout_keys
    return part._replace(dropout_keys=keys, q_places=q_places, kv_places=kv_places)


def _either(ring: Ring, step: int, fold, sums, keys):
    """Calls fold(wrapped, sums, keys) as it is for this device; a no-op if no device has work."""
    has_pieces = [bool(ring.plan.pieces(step, wrapped)) for wrapped in (False, True)]
    if step == 0:
        return fold(False, sums, keys)
    if not any(has_pieces):
        return sums
    return lax.cond(
        lax.axis_index(ring.axis) >= step, partial(fold, False), partial(fold, True), sums, keys
    )


def _rotated(ring: Ring, tree, shift: int = 1):
    """Sends every device's arrays to the device `shift` places behind it."""
    size = ring.plan.shards
    if not shift % size:
        return tree
    permutation = [(i, (i + shift) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axis, permutation), tree)


def _halves(length: int, half: int | None) -> slice:
    return slice(None) if half is None else slice(half * length // 2, (half + 1) * length // 2)


def _replaced(x, part, axis: int, half: int | None):
    """Replaces one half of an axis of x, or all of x, by `part`."""
    if half is None:
        return part
    halves = jnp.split(x, 2, axis)
    halves[half] = part
    return jnp.concatenate(halves, axis)


def _like(operands: Operands, tree):
    """Types constants by mesh axes, for shard_map, as the operands are."""
    return mesh_axes.spread(tree, mesh_axes.varying(operands))
