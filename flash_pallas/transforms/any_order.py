"""Attention with derivatives of every order, forward and reverse.

    attend      custom_jvp: O, log-sum-exp; their tangents are a linear equation of `equations`
    _together   where the backend can: both in one kernel, for `jax.jvp`

`jax.grad` transposes the equation, so that it saves the residuals of `derivatives.attend`, and runs
the kernels that it runs. `jax.jvp` runs the equation itself, or one kernel for O and its tangent.
`jax.linearize` and `jax.grad` take that apart again: O belongs to what is known, the equation to
what is linear.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, Var, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from ..backends.base import Backend
from ..core import mesh_axes
from ..core.problem import AttentionSpec, Operands, Outputs
from . import derivatives, sharding
from .equations import (
    Call,
    Saved,
    Tangents,
    apart,
    fold,
    joined,
    linear_p,
    params_of,
    smooth_tangents,
    tangents,
    traced,
    unfold,
)


def attend(backend: Backend, spec: AttentionSpec, blocks: Any, operands: Operands):
    """Computes what `derivatives.attend` does; differentiable to any order, in either mode."""
    call = Call(backend, spec, blocks)
    operands = sharding.placed(mesh_axes.spread(operands, mesh_axes.varying(operands)))
    if mesh_axes.mesh_of(operands[:3]) is None:
        outputs: Any = _attend(call, *apart(operands))
        return outputs[:3]

    def of_shard(operands: Operands) -> Outputs:
        o, lse, max_logit, _ = cast(Any, _attend(call, *apart(operands)))
        return Outputs(o, lse, None, max_logit)

    out = sharding.on_shards(of_shard, operands, Outputs)
    return out.o, out.lse_log2, out.max_logit


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: Call, moving: Operands, fixed: Operands):
    """Returns (o, lse, max_logit, what the backward needs of the forward's own lse)."""
    operands = joined(moving, fixed)
    out = call.forward(operands)
    names = derivatives.SAVED_NAMES
    out = out._replace(
        o=checkpoint_name(out.o, names[0]),
        lse_log2=checkpoint_name(out.lse_log2, names[1]),
        shift=None if out.shift is None else checkpoint_name(out.shift, names[1]),
    )
    return call.public(operands, out)


def _attend_jvp(call: Call, primals, direction):
    moving, fixed = primals
    is_zero = lambda x: isinstance(x, SymbolicZero)
    direction = jax.tree.map(lambda t: None if is_zero(t) else t, direction[0], is_leaf=is_zero)
    if not jax.tree.leaves(direction):
        outputs: Any = _attend(call, moving, fixed)
        return outputs, jax.tree.map(jnp.zeros_like, outputs)
    if call.pushes(joined(moving, fixed), direction, primal=True):
        outputs, do, dlse = together(call, moving, fixed, direction)
    else:
        outputs, do, dlse = one_by_one(call, moving, fixed, direction)
    # The other two outputs need no tangents: `Call.smooth` does not read them.
    return outputs, (do, dlse, *jax.tree.map(jnp.zeros_like, outputs[2:]))


_attend.defjvp(_attend_jvp, symbolic_zeros=True)


def one_by_one(call: Call, moving: Operands, fixed: Operands, direction: Operands):
    """Computes (outputs of `_attend`, tangents of o and of lse), by two equations.

    `direction` holds the tangents of `moving`, None where they are 0.
    """
    outputs: Any = _attend(call, moving, fixed)
    do, dlse = tangents(call, _saved(moving, fixed, outputs), direction)
    return outputs, do, dlse


def _saved(moving: Operands, fixed: Operands, outputs) -> Saved:
    o, _, _, (lse_log2, shift) = outputs
    return Saved(moving, fixed, o, lse_log2, shift)


# --- O and its tangent in one kernel --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """The static part of a call; its arguments are the leaves of (moving, fixed) and `direction`.

    Attributes:
        call: what is static of the call.
        operands: structure of (moving, fixed).
        direction: structure of the tangents of `moving`.
    """

    call: Call
    operands: Any
    direction: Any

    def parts(self, args):
        """Returns (moving, fixed, direction) of a list of arguments: arrays or anything else."""
        count = self.operands.num_leaves
        return *self.operands.unflatten(args[:count]), self.direction.unflatten(args[count:])

    def __call__(self, *args) -> list[Any]:
        """Computes the leaves of the results of `one_by_one`."""
        return self.call.either(self._kernel, Split(self), *args)

    def _kernel(self, *args) -> list[Any]:
        moving, fixed, direction = self.parts(args)
        operands = joined(moving, fixed)
        jvp = self.call.push(operands, direction, None)
        out = Outputs(jvp.o, jvp.lse_log2, jvp.shift)
        return jax.tree.leaves((self.call.public(operands, out), jvp.do, jvp.dlse))


@dataclasses.dataclass(frozen=True)
class Split:
    """The function of a Pair's arguments that computes its results by two equations."""

    pair: Pair

    def __call__(self, *args) -> list[Any]:
        moving, fixed, direction = self.pair.parts(args)
        return jax.tree.leaves(one_by_one(self.pair.call, moving, fixed, direction))


def together(call: Call, moving: Operands, fixed: Operands, direction: Operands):
    """Computes what `one_by_one` does in one kernel."""
    structure, args = jax.tree.structure, jax.tree.leaves((moving, fixed, direction))
    pair = Pair(call, structure((moving, fixed)), structure(direction))
    out = _together.bind(*args, pair=pair, jaxpr=traced(pair)(*args))
    return _outputs_of(out), *out[-2:]


def _outputs_of(leaves):
    """Returns the outputs of `_attend` from the leaves of a Pair's; there is no max_logit."""
    o, lse, lse_log2, *shift = leaves[:-2]
    return o, lse, None, (lse_log2, shift[0] if shift else None)


_together = Primitive("flash_attention_jvp")
_together.multiple_results = True


@lru_cache(maxsize=1024)
def _jitted(pair: Pair):
    return jax.jit(pair)


def _jvp(args, dots, *, pair: Pair, jaxpr):
    """Returns the outputs and their tangents, for tangents of the operands and of `direction`."""
    out = _together.bind(*args, pair=pair, jaxpr=jaxpr)
    call, (moving, fixed, direction) = pair.call, pair.parts(args)
    saved = _saved(moving, fixed, _outputs_of(out))
    moves, _, direction_moves = pair.parts([type(t) is not ad.Zero for t in dots])
    dmoving, _, ddirection = pair.parts([ad.instantiate_zeros(t) for t in dots])
    out_tangents: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    second_order = []
    if any(jax.tree.leaves(moves)):
        kept = jax.tree.map(lambda moves, t: t if moves else None, moves, dmoving)
        out_tangents[0], out_tangents[1] = tangents(call, saved, kept)
        function = lambda moving: smooth_tangents(call, fixed, moving, direction)
        second_order.append(jax.jvp(function, (moving,), (dmoving,))[1])
    if any(jax.tree.leaves(direction_moves)):
        kept = jax.tree.map(lambda moves, t: t if moves else None, direction_moves, ddirection)
        second_order.append(tangents(call, saved, kept))
    if second_order:
        out_tangents[-2:] = [sum(x[1:], x[0]) for x in zip(*second_order, strict=True)]
    return out, out_tangents


def _batch(args, axes, *, pair: Pair, jaxpr):
    """Folds the vmapped axis into the batch; O of operands without it is computed once."""
    count = pair.operands.num_leaves
    if any(axis is not None for axis in axes[:count]):
        size, folded = fold(args, axes)
        if size:
            out = unfold(size, _together.bind(*folded, pair=pair, jaxpr=traced(pair)(*folded)))
            return out, [0] * len(out)
    # If all members share the operands, they share every output but the last two, the tangents.
    alike = all(axis is None for axis in axes[:count])
    out_axes = (None if alike else 0,) * (len(jaxpr.out_avals) - 2) + (0, 0)
    split = lambda *args: tuple(Split(pair)(*args))
    out = jax.vmap(split, in_axes=tuple(axes), out_axes=out_axes)(*args)
    return list(out), list(out_axes)


def _partial_eval(trace, *tracers, pair: Pair, jaxpr):
    """Takes the pair apart where only the tangents are unknown."""
    count = pair.operands.num_leaves
    known = [t.is_known() for t in tracers]
    if all(known) or not all(known[:count]):
        params = {"pair": pair, "jaxpr": jaxpr}
        return trace.default_process_primitive(_together, tracers, params)
    moving, fixed = pair.operands.unflatten([t.pval.get_known() for t in tracers[:count]])
    outputs: Any = _attend(pair.call, moving, fixed)
    saved = _saved(moving, fixed, outputs)
    args = [*jax.tree.leaves(saved), *tracers[count:]]
    params = params_of(Tangents(pair.call, jax.tree.structure(saved), pair.direction), args)
    unknown = trace.default_process_primitive(linear_p, args, params)
    return [*jax.tree.leaves(outputs), *unknown]


def _partial_eval_jaxpr(saveable, unknown, instantiated, eqn):
    """Does likewise with an equation of a jaxpr, as `jax.checkpoint` wants it."""
    pair, count = eqn.params["pair"], eqn.params["pair"].operands.num_leaves
    if any(unknown) and not any(unknown[:count]):
        split = jax.make_jaxpr(jax.jit(Split(pair)))(*(x.aval for x in eqn.invars)).eqns[0]
        rule = partial_eval.partial_eval_jaxpr_custom_rules[split.primitive]
        split = split.replace(invars=eqn.invars, outvars=eqn.outvars)
        return rule(saveable, unknown, instantiated, split)
    unknown_out = [any(unknown)] * len(eqn.outvars)
    residuals = [
        x for x, own in zip(eqn.invars, instantiated, strict=True) if isinstance(x, Var) and not own
    ]
    known = None if any(unknown) else eqn
    return known, eqn, unknown_out, [True] * len(unknown_out), residuals


def _avals(*avals, pair: Pair, jaxpr):
    return jaxpr.out_avals, jaxpr.effects


def _run(*args, pair: Pair, jaxpr):
    return jaxpr_as_fun(jaxpr)(*args)


_together.def_impl(lambda *args, pair, jaxpr: _jitted(pair)(*args))
_together.def_effectful_abstract_eval(_avals)
ad.primitive_jvps[_together] = _jvp
batching.primitive_batchers[_together] = _batch
partial_eval.custom_partial_eval_rules[_together] = _partial_eval
partial_eval.partial_eval_jaxpr_custom_rules[_together] = _partial_eval_jaxpr
mlir.register_lowering(_together, mlir.lower_fun(_run, multiple_results=True))
