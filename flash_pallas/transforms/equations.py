"""The two linear equations of attention's derivatives, each the transpose of the other.

    tangents      tangents of the operands -> those of O and of the log-sum-exp
    gradients     its transpose: the first backward, that of `derivatives`

Both are one primitive. They are linear in what they are given and depend on the operands besides,
by the forward's results. What they depend on those by is differentiated in jnp, by
`backends.xla.any_order`, which has every order.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ..backends.base import Backend
from ..backends.xla import XlaBackend, any_order
from ..core import padding, softmax
from ..core.problem import AttentionSpec, Operands, Outputs, Tangents, describe
from . import derivatives

# The operands that have derivatives; score_params only where they are floats.
MOVING = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "score_params")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call.

    Attributes:
        backend: the backend that runs it.
        spec: static parameters.
        blocks: tile sizes, from `backend.blocks`.
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

    def pushes(self, operands: Operands, given: Operands, *, primal: bool) -> bool:
        """Returns whether the backend has forward mode for these tangents; see Backend.pushes."""
        problem, moves = describe(operands, self.spec), moves_of(given)
        return self.backend.pushes(problem, self.blocks, moves, primal=primal)

    def push(self, operands: Operands, given: Operands, found: Outputs | None) -> Tangents:
        """Computes the backend's forward mode, and the share of the sinks; see Backend.push."""
        rows = () if found is None else (found._replace(max_logit=None),)
        full = given._replace(**{name: _zeros(operands, given, name) for name in ("q", "k", "v")})
        found_ = derivatives.push_of(self.backend, self.spec)(operands, full, *rows)
        out = found_ if found is None else found_._replace(**dict(zip(SHARED, found, strict=False)))
        do, dlse = with_sinks(operands, given.sinks, out, describe(operands, self.spec).unit)
        # The output of padding is constant.
        do, dlse = padding.cleared_queries(operands, do), padding.cleared_rows(operands, dlse)
        return out._replace(do=do, dlse=dlse)

    def public(self, operands: Operands, out: Outputs):
        """Returns (o, lse, max_logit, what the backward needs of the forward's own lse)."""
        lse = softmax.natural(out.lse_log2, out.shift, describe(operands, self.spec).unit)
        return out.o, lse, out.max_logit, (out.lse_log2, out.shift)

    def smooth(self, operands: Operands) -> tuple[Any, Any]:
        """Computes (o, natural log-sum-exp) in jnp that JAX differentiates."""
        problem = describe(operands, self.spec)
        blocks = XlaBackend().blocks(problem, None)
        out = any_order.attention(self.spec, blocks, operands)
        return out.o, softmax.natural(out.lse_log2, None, problem.unit)


SHARED = ("o", "lse_log2", "shift")  # fields of Outputs and of Tangents


def moves_of(given: Operands) -> frozenset[str]:
    """Returns the names of the operands that have tangents."""
    return frozenset(name for name in MOVING if jax.tree.leaves(getattr(given, name)))


def _zeros(operands: Operands, given: Operands, name: str):
    tangent = getattr(given, name)
    return jnp.zeros_like(getattr(operands, name)) if tangent is None else tangent


def with_sinks(operands: Operands, dsinks, out: Tangents, unit: float):
    """Returns the tangents (of o, of the log-sum-exp) with those of sinks, [B, N], added.

    A sink is a logit without a value: its weight takes its tangent into the log-sum-exp, from
    which all other weights follow.
    """
    if dsinks is None:
        return out.do, out.dlse
    sink = operands.sinks.astype(out.lse_log2.dtype)[..., None]
    above = sink if out.shift is None else sink - out.shift * unit
    weight = jnp.exp2(above * softmax.LOG2E - out.lse_log2)
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


# --- The two equations ----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """The residuals: all that the two equations depend on besides what they are linear in.

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


def tangents(call: Call, saved: Saved, given: Operands) -> list[Any]:
    """Computes the tangents of o and lse; `given`: those of the operands, None where they are 0."""
    if call.pushes(saved.operands, given, primal=False):
        out = Outputs(saved.o, saved.lse_log2, saved.shift)
        found = call.push(saved.operands, given, out)
        return [found.do, found.dlse]
    return list(smooth_tangents(call, saved.fixed, saved.moving, given))


def gradients(call: Call, saved: Saved, given, wanted: Operands) -> list[Any]:
    """Computes the gradients of the operands that are not None in `wanted`, as a list.

    Args:
        call: what is static.
        saved: the residuals.
        given: (do, dlse); dlse may be None, for 0.
        wanted: the operands that are asked for.
    """
    names = frozenset(n for n in derivatives.EXTRA_GRADS if jax.tree.leaves(getattr(wanted, n)))
    out = Outputs(saved.o, saved.lse_log2, saved.shift)
    do, dlse = given
    found = derivatives.gradients(
        call.backend, call.spec, call.blocks, saved.operands, out, do, dlse, names
    )
    return jax.tree.leaves(_only(wanted, found))


def smooth_tangents(call: Call, fixed: Operands, moving: Operands, given: Operands):
    """Computes the tangents of (o, lse) in jnp, which JAX differentiates."""
    zeros = lambda x, t: jnp.zeros_like(x) if x is not None and t is None else t
    full = jax.tree.map(zeros, moving, given, is_leaf=_is_none)
    return jax.jvp(lambda moving: call.smooth(joined(moving, fixed)), (moving,), (full,))[1]


def _smooth_gradients(call: Call, fixed: Operands, moving: Operands, given, wanted: Operands):
    """Computes the gradients of the wanted operands likewise, as a list."""
    operands = joined(moving, fixed)
    (o, lse), pull = jax.vjp(lambda moving: call.smooth(joined(moving, fixed)), moving)
    do, dlse = given
    # The output of padding is constant, whatever its cotangent holds.
    do = padding.cleared_queries(operands, do.astype(o.dtype))
    dlse = jnp.zeros_like(lse) if dlse is None else padding.cleared_rows(operands, dlse)
    (found,) = pull((do, dlse))
    return jax.tree.leaves(_only(wanted, found))


def _only(wanted: Operands, found: Operands) -> Operands:
    """Returns `found` with None wherever `wanted` has None."""
    return jax.tree.map(lambda w, x: None if w is None else x, wanted, found, is_leaf=_is_none)


def _is_none(x) -> bool:
    return x is None


# --- The primitive of both ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Equation:
    """The static part of an equation, whose arguments are the leaves of `saved` and of `given`.

    Attributes:
        call: what is static of the call.
        saved: structure of the `Saved`.
        given: structure of what the equation is linear in.
        wanted: structure of the operands whose gradients are computed; None: the equation computes
            the tangents of o and lse.
    """

    call: Call
    saved: Any
    given: Any
    wanted: Any = None

    def parts(self, args) -> tuple[Any, Any]:
        """Returns (saved, given) of a list of arguments, which may be arrays or anything else."""
        count = self.saved.num_leaves
        return self.saved.unflatten(args[:count]), self.given.unflatten(args[count:])

    @property
    def asked(self) -> Operands:
        """The wanted operands, True in the place of an array."""
        return self.wanted.unflatten([True] * self.wanted.num_leaves)

    def __call__(self, *args) -> list[Any]:
        """Computes the results."""
        saved, given = self.parts(args)
        if self.wanted is None:
            return tangents(self.call, saved, given)
        return gradients(self.call, saved, given, self.asked)

    def smooth(self, moving: Operands, saved: Saved, given) -> list[Any]:
        """Computes the results in jnp, which JAX differentiates, for other values of `moving`."""
        if self.wanted is None:
            return list(smooth_tangents(self.call, saved.fixed, moving, given))
        return _smooth_gradients(self.call, saved.fixed, moving, given, self.asked)


def linear(call: Call, saved: Saved, given, wanted: Operands | None = None) -> list[Any]:
    """Returns the results of the equation that is linear in `given`."""
    structure = jax.tree.structure
    asked = None if wanted is None else structure(wanted)
    return _bind(Equation(call, structure(saved), structure(given), asked), (saved, given))


def _bind(equation: Equation, args) -> list[Any]:
    args = jax.tree.leaves(args)
    return linear_p.bind(*args, **params_of(equation, args))


def params_of(equation: Equation, args) -> dict[str, Any]:
    """Returns the parameters of the primitive `linear_p`, for such arguments."""
    # Tangents that one device computes are often transposed, and not run.
    some = equation.wanted is not None or jax.device_count() > 1 or not equation.call.is_pure
    return {"equation": equation, "jaxpr": traced(equation)(*args) if some else None}


@lru_cache(maxsize=1024)
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


@lru_cache(maxsize=1024)
def _jitted(equation: Equation):
    return jax.jit(equation)


def _avals(*avals, equation: Equation, jaxpr):
    if jaxpr is not None:
        return jaxpr.out_avals, jaxpr.effects
    saved, _ = equation.parts(avals)
    return [saved.o, saved.lse_log2], set()


def _jvp(args, given, *, equation: Equation, jaxpr):
    out = linear_p.bind(*args, equation=equation, jaxpr=jaxpr)
    count, parts = equation.saved.num_leaves, []
    if any(type(t) is not ad.Zero for t in given[count:]):
        inputs = [*args[:count], *map(ad.instantiate_zeros, given[count:])]
        parts.append(linear_p.bind(*inputs, equation=equation, jaxpr=jaxpr))
    # Its results o, lse_log2 and shift follow from the operands, and are not read by `smooth`.
    (saved, values), (moves, _) = map(
        equation.parts, (args, [type(t) is not ad.Zero for t in given])
    )
    if any(jax.tree.leaves(moves.moving)):
        dots = equation.parts([ad.instantiate_zeros(t) for t in given])[0].moving
        function = lambda moving: equation.smooth(moving, saved, values)
        parts.append(jax.jvp(function, (saved.moving,), (dots,))[1])
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    return out, [sum(x[1:], x[0]) for x in zip(*parts, strict=True)] if parts else zeros


def _transpose(cotangents, *args, equation: Equation, jaxpr):
    del jaxpr
    saved, given = equation.parts(args)
    is_zero = lambda x: type(x) is ad.Zero
    if all(map(is_zero, cotangents)):
        return [None] * len(args)
    if equation.wanted is None:
        do, dlse = cotangents
        pair = ad.instantiate_zeros(do), None if is_zero(dlse) else dlse
        unknown = ad.is_undefined_primal
        asked = jax.tree.map(lambda x: unknown(x) or None, given, is_leaf=unknown)
        found = linear(equation.call, saved, pair, asked)
    else:
        moved = equation.wanted.unflatten([None if is_zero(x) else x for x in cotangents])
        both = linear(equation.call, saved, moved)
        # Of (do, dlse) one may be known while the other is transposed.
        values = args[equation.saved.num_leaves :]
        found = [x for x, t in zip(both, values, strict=False) if ad.is_undefined_primal(t)]
    results, undefined = iter(found), [ad.is_undefined_primal(x) for x in args]
    return [next(results) if u else None for u in undefined]


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
