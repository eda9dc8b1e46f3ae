"""The linear equations of attention's derivatives, all of them one primitive.

    Tangents    tangents of the operands -> those of O and of the log-sum-exp
    Gradients   its transpose: the first backward, that of `derivatives`
    Pushed      tangents of the operands and cotangents of Gradients -> those of its results

They are linear in what they are given, and depend on the operands besides, by the forward's
results. What they depend on those by is differentiated in jnp, by `backends.xla.any_order`, which
has every order; where the backend has a kernel for it, Gradients is differentiated by Pushed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ..backends.base import Backend
from ..backends.target import TargetBackend, by_platform
from ..backends.xla import XlaBackend, any_order
from ..core import padding, softmax
from ..core.problem import (
    AttentionSpec,
    Cotangents,
    Operands,
    Outputs,
    describe,
    own_width,
)
from ..core.problem import Tangents as Results
from . import derivatives

# The operands that have derivatives; score_params only where they are floats.
MOVING = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "score_params")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call.

    Attributes:
        backend: the backend that runs it.
        spec: static parameters.
        blocks: tile sizes, from `backend.attention.plan`.
    """

    backend: Backend
    spec: AttentionSpec
    blocks: Any

    def forward(self, operands: Operands) -> Outputs:
        """Computes the backend's forward."""
        return derivatives.forward_of(self.backend, self.spec, self.blocks)(operands)

    @property
    def is_pure(self) -> bool:
        """True if the backend runs compiled, without the effects of the interpreter."""
        return self.backend.partitionable

    def pushes(self, operands: Operands, tangents: Operands, *, primal: bool) -> bool:
        """Returns whether the backend has forward mode for these tangents; see `Jvp.refusal`."""
        problem, moves = describe(operands, self.spec), moves_of(tangents)
        refusal = self.backend.jvp.refusal(problem, self.blocks, moves, primal=primal)
        return refusal is None

    def push(self, operands: Operands, tangents: Operands, outputs: Outputs | None) -> Results:
        """Computes the backend's forward mode, and the share of the sinks; see `Jvp.run`."""
        rows = () if outputs is None else (outputs._replace(max_logit=None),)
        full = with_zeros(operands, tangents)
        moved = derivatives.push_of(self.backend, self.spec)(operands, full, *rows)
        out = (
            moved if outputs is None else moved._replace(**dict(zip(SHARED, outputs, strict=False)))
        )
        # Padding sees no keys. Its log-sum-exp is its sink, unless it lies beyond a length.
        do, dlse = (
            padding.cleared_queries(operands, out.do),
            padding.cleared_rows(operands, out.dlse),
        )
        out = out._replace(do=do, dlse=dlse)
        do, dlse = with_sinks(operands, tangents.sinks, out, describe(operands, self.spec).unit)
        return out._replace(do=do, dlse=dlse)

    def either(self, kernels, smooth, *args):
        """Computes kernels(*args), or smooth(*args), jnp, where the backend runs no kernels.

        That is outside of CUDA, if the call is traced for a `target`.
        """
        if isinstance(self.backend, TargetBackend):
            return by_platform(self.backend.device, kernels, smooth, *args)
        return kernels(*args)

    def public(self, operands: Operands, out: Outputs):
        """Returns (o, lse, max_logit, what the backward needs of the forward's own lse)."""
        lse = softmax.natural(out.lse_log2, out.shift, describe(operands, self.spec).unit)
        return out.o, lse, out.max_logit, (out.lse_log2, out.shift)

    def smooth(self, operands: Operands) -> tuple[Any, Any]:
        """Computes (o, natural log-sum-exp) in jnp that JAX differentiates."""
        problem = describe(operands, self.spec)
        blocks = XlaBackend().attention.plan(problem)
        with own_width(operands):
            out = any_order.attention(self.spec, blocks, operands)
        return out.o, softmax.natural(out.lse_log2, None, problem.unit)


SHARED = ("o", "lse_log2", "shift")  # fields of Outputs and of Tangents


def moves_of(tangents: Operands) -> frozenset[str]:
    """Returns the names of the operands that have tangents."""
    return frozenset(name for name in MOVING if jax.tree.leaves(getattr(tangents, name)))


def with_zeros(operands: Operands, tangents: Operands) -> Operands:
    """Returns tangents of which those of q, k and v are arrays, of zeros where they were None."""
    return tangents._replace(
        **{n: _zero_for_none(getattr(operands, n), getattr(tangents, n)) for n in ("q", "k", "v")}
    )


def with_sinks(operands: Operands, dsinks, out: Results, unit: float):
    """Returns the tangents (of o, of the log-sum-exp) with those of sinks, [B, N], added.

    A sink is a logit without a value: its weight takes its tangent into the log-sum-exp, from
    which all other weights follow.
    """
    if dsinks is None:
        return out.do, out.dlse
    weight = derivatives.sink_weight(operands.sinks, out.lse_log2, out.shift, unit)
    moved = weight * dsinks.astype(weight.dtype)[..., None]
    less = jnp.swapaxes(moved, 1, 2)[..., None] * out.o.astype(moved.dtype)
    return (out.do.astype(moved.dtype) - less).astype(out.do.dtype), out.dlse + moved


def apart(operands: Operands) -> tuple[Operands, Operands]:
    """Splits operands into those that have derivatives and those that have none."""
    none = operands._replace(**dict.fromkeys(Operands._fields))
    floats = lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None
    moving = {name: jax.tree.map(floats, getattr(operands, name)) for name in MOVING}
    moving = none._replace(**moving, mask_params=(None,) * len(operands.mask_params))
    rest = lambda m, x: x if m is None else None
    return moving, jax.tree.map(rest, moving, operands, is_leaf=_is_none)


def joined(moving: Operands, fixed: Operands) -> Operands:
    """Returns the operands of which `apart` has made two parts."""
    return jax.tree.map(lambda a, b: b if a is None else a, moving, fixed, is_leaf=_is_none)


# --- The equations --------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """The residuals: all that Tangents and Gradients depend on besides what they are linear in.

    Attributes:
        moving, fixed: the operands, `apart`.
        o, lse_log2, shift: results of the forward.
    """

    moving: Operands
    fixed: Operands
    o: Any
    lse_log2: Any
    shift: Any

    @property
    def operands(self) -> Operands:
        """Operands of the call, whole."""
        return joined(self.moving, self.fixed)

    @property
    def outputs(self) -> Outputs:
        """Results of the forward."""
        return Outputs(self.o, self.lse_log2, self.shift)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedBoth:
    """Residuals of Pushed: those of the others, and the cotangents (do, dlse)."""

    residuals: Saved
    cotangents: Any

    @property
    def moving(self) -> tuple[Operands, Any]:
        """All that has derivatives."""
        return self.residuals.moving, self.cotangents


@dataclasses.dataclass(frozen=True)
class Equation:
    """The static part of an equation, whose arguments are the leaves of `saved` and of `linear`.

    Attributes:
        call: what is static of the call.
        saved: structure of the residuals.
        linear: structure of what the equation is linear in.
    """

    call: Call
    saved: Any
    linear: Any

    def parts(self, args) -> tuple[Any, Any]:
        """Returns (saved, linear) of a list of arguments, which may be arrays or anything else."""
        count = self.saved.num_leaves
        return self.saved.unflatten(args[:count]), self.linear.unflatten(args[count:])

    def __call__(self, *args) -> list[Any]:
        """Computes the results."""
        return self.run(*self.parts(args))

    def run(self, saved, linear) -> list[Any]:
        """Computes the results."""
        raise NotImplementedError

    def smooth(self, moving, saved, linear) -> list[Any]:
        """Computes the results in jnp, which JAX differentiates, for other `saved.moving`."""
        raise NotImplementedError

    def transposed(self, cotangents, saved, linear) -> list[Any]:
        """Returns the cotangents of those leaves of `linear` that are ad.UndefinedPrimal."""
        raise NotImplementedError

    def pushed(self, saved, linear, dsaved, dlinear) -> list[Any] | None:
        """Returns the tangents of the results, or None where they are those of `smooth`.

        Args:
            saved: the residuals.
            linear: what the equation is linear in.
            dsaved: tangents of `saved.moving`; None is 0.
            dlinear: tangents of `linear`, likewise.
        """
        return None


@dataclasses.dataclass(frozen=True)
class Tangents(Equation):
    """Tangents of the operands, None where they are 0 -> those of o and lse."""

    def run(self, saved: Saved, linear: Operands) -> list[Any]:
        """Computes the tangents of o and lse."""

        def kernels(saved, linear):
            moved = self.call.push(saved.operands, linear, saved.outputs)
            return [moved.do, moved.dlse]

        smooth = lambda saved, linear: self.smooth(saved.moving, saved, linear)
        if self.call.pushes(saved.operands, linear, primal=False):
            return self.call.either(kernels, smooth, saved, linear)
        return smooth(saved, linear)

    def smooth(self, moving, saved: Saved, linear: Operands) -> list[Any]:
        """Computes them in jnp."""
        return list(smooth_tangents(self.call, saved.fixed, moving, linear))

    def transposed(self, cotangents, saved: Saved, linear: Operands) -> list[Any]:
        """Returns the gradients of the operands whose tangents are wanted."""
        do, dlse = cotangents
        pair = ad.instantiate_zeros(do), None if type(dlse) is ad.Zero else dlse
        unknown = ad.is_undefined_primal
        asked = jax.tree.map(lambda x: unknown(x) or None, linear, is_leaf=unknown)
        return gradients(self.call, saved, pair, asked)


@dataclasses.dataclass(frozen=True)
class OfGradients(Equation):
    """An equation whose results have the form of gradients.

    Attributes:
        wanted: structure of the operands whose gradients are computed.
    """

    wanted: Any

    @property
    def asked(self) -> Operands:
        """The wanted operands, True in the place of an array."""
        return self.wanted.unflatten([True] * self.wanted.num_leaves)


class Gradients(OfGradients):
    """(do, dlse) -> the gradients of operands; dlse may be None, for 0."""

    def run(self, saved: Saved, linear) -> list[Any]:
        """Computes the gradients."""
        of_extra, call = moves_of(self.asked) & set(derivatives.EXTRA_GRADS), self.call
        residuals = saved.operands, saved.outputs, of_extra
        (operand_gradients,) = derivatives.gradients(
            call.backend, call.spec, call.blocks, residuals, linear
        )
        return jax.tree.leaves(_only(self.asked, operand_gradients))

    def smooth(self, moving, saved: Saved, linear) -> list[Any]:
        """Computes them in jnp."""
        return _smooth_gradients(self.call, saved.fixed, moving, linear, self.asked)

    def transposed(self, cotangents, saved: Saved, linear) -> list[Any]:
        """Returns the tangents of o and lse that are wanted."""
        is_zero = lambda x: type(x) is ad.Zero
        moved = self.wanted.unflatten([None if is_zero(x) else x for x in cotangents])
        both = tangents(self.call, saved, moved)
        # Of (do, dlse) one may be known while the other is transposed.
        values = jax.tree.leaves(linear, is_leaf=ad.is_undefined_primal)
        return [x for x, t in zip(both, values, strict=False) if ad.is_undefined_primal(t)]

    def pushed(self, saved: Saved, linear, dsaved: Operands, dlinear) -> list[Any] | None:
        """Returns the tangents of the gradients, where the backend has a kernel for them."""
        problem = describe(saved.operands, self.call.spec)
        moves = moves_of(dsaved), moves_of(self.asked)
        if self.call.backend.jvp_of_vjp.refusal(problem, *moves):
            return None
        both, structure = SavedBoth(saved, linear), jax.tree.structure
        equation = Pushed(self.call, structure(both), structure((dsaved, dlinear)), self.wanted)
        return _bind(equation, (both, (dsaved, dlinear)))


class Pushed(OfGradients):
    """(tangents of the operands, of (do, dlse)) -> the tangents of the gradients of operands."""

    def run(self, saved: SavedBoth, linear) -> list[Any]:
        """Computes the tangents by kernels: those of O and of the log-sum-exp first."""
        smooth = lambda saved, linear: self.smooth(saved.moving, saved, linear)
        return self.call.either(self._kernels, smooth, saved, linear)

    def _kernels(self, saved: SavedBoth, linear) -> list[Any]:
        call, residuals, (do, dlse) = self.call, saved.residuals, saved.cotangents
        operands, out = residuals.operands, residuals.outputs
        moved, (ddo, ddlse) = linear
        moved = with_zeros(operands, moved)
        ddo = jnp.zeros_like(do) if ddo is None else ddo
        out_tangents = call.push(operands, moved, out)
        delta = functools.partial(derivatives.delta_of, operands)
        rows = Cotangents(out.lse_log2, do, delta(out.o, do, dlse, out.lse_log2), out.shift)
        of_o = delta(out_tangents.do, do, None, out.lse_log2)
        of_do = delta(out.o, ddo, ddlse, out.lse_log2)
        run = derivatives.push_backward_of(call.backend, call.spec)
        grads = run(operands, rows, moved, Cotangents(out_tangents.dlse, ddo, of_o + of_do))
        named = {name: getattr(grads, name) for name in ("q", "k", "v")}
        return jax.tree.leaves(_only(self.asked, residuals.moving._replace(**named)))

    def smooth(self, moving, saved: SavedBoth, linear) -> list[Any]:
        """Computes them in jnp."""
        fixed = saved.residuals.fixed
        function = lambda x, linear: _smooth_gradients(self.call, fixed, x, linear, self.asked)
        full = jax.tree.map(_zero_for_none, moving, linear, is_leaf=_is_none)
        return jax.jvp(function, moving, full)[1]

    def transposed(self, cotangents, saved: SavedBoth, linear) -> list[Any]:
        """Returns the cotangents of what is wanted, by jnp."""
        unknown = ad.is_undefined_primal
        leaves, structure = jax.tree.flatten(linear, is_leaf=unknown)
        wanted = [jnp.zeros(x.aval.shape, x.aval.dtype) for x in leaves if unknown(x)]

        def results(*wanted):
            unknowns = iter(wanted)
            values = [next(unknowns) if unknown(x) else jnp.zeros_like(x) for x in leaves]
            return self.smooth(saved.moving, saved, structure.unflatten(values))

        pull = jax.vjp(results, *wanted)[1]
        return list(pull([ad.instantiate_zeros(x) for x in cotangents]))


def tangents(call: Call, saved: Saved, moved: Operands) -> list[Any]:
    """Returns the tangents of o and lse; `moved`: those of the operands, None where they are 0."""
    return _bind(Tangents(call, *map(jax.tree.structure, (saved, moved))), (saved, moved))


def gradients(call: Call, saved: Saved, cotangents, wanted: Operands) -> list[Any]:
    """Returns the gradients of the operands that are not None in `wanted`, as a list.

    Args:
        call: what is static.
        saved: the residuals.
        cotangents: (do, dlse); dlse may be None, for 0.
        wanted: the operands that are asked for.
    """
    structures = map(jax.tree.structure, (saved, cotangents, wanted))
    return _bind(Gradients(call, *structures), (saved, cotangents))


def smooth_tangents(call: Call, fixed: Operands, moving: Operands, moved: Operands):
    """Computes the tangents of (o, lse) in jnp, which JAX differentiates."""
    full = jax.tree.map(_zero_for_none, moving, moved, is_leaf=_is_none)
    return jax.jvp(lambda moving: call.smooth(joined(moving, fixed)), (moving,), (full,))[1]


def _smooth_gradients(call: Call, fixed: Operands, moving: Operands, cotangents, wanted: Operands):
    """Computes the gradients of the wanted operands likewise, as a list."""
    operands = joined(moving, fixed)
    (o, lse), pull = jax.vjp(lambda moving: call.smooth(joined(moving, fixed)), moving)
    do, dlse = cotangents
    # The output of padding is constant, whatever its cotangent holds, as is a log-sum-exp of -inf.
    do = padding.cleared_queries(operands, do.astype(o.dtype))
    dlse = jnp.zeros_like(lse) if dlse is None else jnp.where(lse > -jnp.inf, dlse, 0.0)
    (grads,) = pull((do, dlse))
    return jax.tree.leaves(_only(wanted, grads))


def _only(wanted: Operands, grads: Operands) -> Operands:
    """Returns `grads` with None wherever `wanted` has None."""
    return jax.tree.map(lambda w, x: None if w is None else x, wanted, grads, is_leaf=_is_none)


def _zero_for_none(x, tangent):
    return jnp.zeros_like(x) if x is not None and tangent is None else tangent


def _is_none(x) -> bool:
    return x is None


# --- The primitive of all -------------------------------------------------------------------------


def _bind(equation: Equation, args) -> list[Any]:
    args = jax.tree.leaves(args)
    return linear_p.bind(*args, **params_of(equation, args))


def params_of(equation: Equation, args) -> dict[str, Any]:
    """Returns the parameters of the primitive `linear_p`, for such arguments."""
    # Tangents that one device computes are often transposed, and not run.
    lazy = isinstance(equation, Tangents) and jax.device_count() == 1 and equation.call.is_pure
    return {"equation": equation, "jaxpr": None if lazy else traced(equation)(*args)}


@functools.lru_cache(maxsize=1024)
def traced(function):
    """Returns the function that makes jaxprs of a hashable one, for parameters of primitives.

    JAX looks into such jaxprs for what needs the devices while it is lowered (custom_partitioning)
    and for effects (the interpreter's).
    """
    return jax.make_jaxpr(function)


linear_p = Primitive("flash_attention_linear")
linear_p.multiple_results = True


def _run(*args, equation: Equation, jaxpr):
    return equation(*args) if jaxpr is None else jaxpr_as_fun(jaxpr)(*args)


@functools.lru_cache(maxsize=1024)
def _jitted(equation: Equation):
    return jax.jit(equation)


def _avals(*avals, equation: Equation, jaxpr):
    if jaxpr is not None:
        return jaxpr.out_avals, jaxpr.effects
    saved, _ = equation.parts(avals)
    return [saved.o, saved.lse_log2], set()


def _jvp(args, dots, *, equation: Equation, jaxpr):
    out, count = linear_p.bind(*args, equation=equation, jaxpr=jaxpr), equation.saved.num_leaves
    saved, linear = equation.parts(args)
    moves, linear_moves = equation.parts([type(t) is not ad.Zero for t in dots])
    dsaved, dlinear = equation.parts([ad.instantiate_zeros(t) for t in dots])
    kept = lambda moves, t: t if moves else None
    # Results of the forward follow from the operands, and are not read by `smooth`.
    if any(jax.tree.leaves(moves.moving)):
        some = [
            jax.tree.map(kept, *x) for x in ((moves.moving, dsaved.moving), (linear_moves, dlinear))
        ]
        pushed = equation.pushed(saved, linear, *some)
        if pushed is not None:
            return out, pushed
    parts = []
    if any(jax.tree.leaves(linear_moves)):
        inputs = [*args[:count], *jax.tree.leaves(dlinear)]
        parts.append(linear_p.bind(*inputs, equation=equation, jaxpr=jaxpr))
    if any(jax.tree.leaves(moves.moving)):
        function = lambda moving: equation.smooth(moving, saved, linear)
        parts.append(jax.jvp(function, (saved.moving,), (dsaved.moving,))[1])
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    return out, [sum(x[1:], x[0]) for x in zip(*parts, strict=True)] if parts else zeros


def _transpose(cotangents, *args, equation: Equation, jaxpr):
    del jaxpr
    if all(type(x) is ad.Zero for x in cotangents):
        return [None] * len(args)
    results = iter(equation.transposed(cotangents, *equation.parts(args)))
    return [next(results) if ad.is_undefined_primal(x) else None for x in args]


def _batch(args, axes, *, equation: Equation, jaxpr):
    size, folded = fold(args, axes)
    if size:
        out = unfold(size, _bind(equation, folded))
    else:
        members = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in folded]
        shapes, _ = _avals(*members, equation=equation, jaxpr=jaxpr)
        out = [jnp.zeros((0, *x.shape), x.dtype) for x in shapes]
    return out, [0] * len(out)


def fold(args, axes) -> tuple[int, list[Any]]:
    """Folds a vmapped axis into the batch, as the outer one; what is shared is repeated.

    Returns (its size, arguments); without members these are the types of those of one.
    """
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    args = [batching.bdim_at_front(x, axis, size) for x, axis in zip(args, axes, strict=True)]
    if not size:
        return 0, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in args]
    return size, [x.reshape(size * x.shape[1], *x.shape[2:]) for x in args]


def unfold(size: int, results):
    """Returns results of folded arguments with the vmapped axis in front."""
    return [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results]


linear_p.def_impl(lambda *args, equation, jaxpr: _jitted(equation)(*args))
linear_p.def_effectful_abstract_eval(_avals)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=True))
