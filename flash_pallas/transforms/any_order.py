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
        found: Any = _attend(call, *apart(operands))
        return found[:3]

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


def _attend_jvp(call: Call, primals, given):
    moving, fixed = primals
    is_zero = lambda x: isinstance(x, SymbolicZero)
    given = jax.tree.map(lambda t: None if is_zero(t) else t, given[0], is_leaf=is_zero)
    if not jax.tree.leaves(given):
        found: Any = _attend(call, moving, fixed)
        return found, jax.tree.map(jnp.zeros_like, found)
    if call.pushes(joined(moving, fixed), given, primal=True):
        found, do, dlse = together(call, moving, fixed, given)
    else:
        found, do, dlse = one_by_one(call, moving, fixed, given)
    # Nothing depends on the other two by its tangent: `Call.smooth` does not read them.
    return found, (do, dlse, *jax.tree.map(jnp.zeros_like, found[2:]))


_attend.defjvp(_attend_jvp, symbolic_zeros=True)


def one_by_one(call: Call, moving: Operands, fixed: Operands, given: Operands):
    """Computes (what `_attend` does, tangents of o and of lse), by two equations."""
    found: Any = _attend(call, moving, fixed)
    do, dlse = tangents(call, _saved(moving, fixed, found), given)
    return found, do, dlse


def _saved(moving: Operands, fixed: Operands, found) -> Saved:
    o, _, _, (lse_log2, shift) = found
    return Saved(moving, fixed, o, lse_log2, shift)


# --- O and its tangent in one kernel --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """The static part of a call whose arguments are the leaves of (moving, fixed) and of `given`.

    Attributes:
        call: what is static of the call.
        operands: structure of (moving, fixed).
        given: structure of the tangents of `moving`.
    """

    call: Call
    operands: Any
    given: Any

    def parts(self, args):
        """Returns (moving, fixed, given) of a list of arguments: arrays or anything else."""
        count = self.operands.num_leaves
        return *self.operands.unflatten(args[:count]), self.given.unflatten(args[count:])

    def __call__(self, *args) -> list[Any]:
        """Computes the leaves of the results of `one_by_one`."""
        return self.call.either(self._kernel, Split(self), *args)

    def _kernel(self, *args) -> list[Any]:
        moving, fixed, given = self.parts(args)
        operands = joined(moving, fixed)
        found = self.call.push(operands, given, None)
        out = Outputs(found.o, found.lse_log2, found.shift)
        return jax.tree.leaves((self.call.public(operands, out), found.do, found.dlse))


@dataclasses.dataclass(frozen=True)
class Split:
    """The function of a Pair's arguments that computes its results by two equations."""

    pair: Pair

    def __call__(self, *args) -> list[Any]:
        moving, fixed, given = self.pair.parts(args)
        return jax.tree.leaves(one_by_one(self.pair.call, moving, fixed, given))


def together(call: Call, moving: Operands, fixed: Operands, given: Operands):
    """Computes what `one_by_one` does in one kernel."""
    structure, args = jax.tree.structure, jax.tree.leaves((moving, fixed, given))
    pair = Pair(call, structure((moving, fixed)), structure(given))
    out = _together.bind(*args, pair=pair, jaxpr=traced(pair)(*args))
    return _found(out), *out[-2:]


def _found(leaves):
    """Returns what `_attend` does from the leaves that a Pair returns; there is no max_logit."""
    o, lse, lse_log2, *shift = leaves[:-2]
    return o, lse, None, (lse_log2, shift[0] if shift else None)


_together = Primitive("flash_attention_jvp")
_together.multiple_results = True


@lru_cache(maxsize=1024)
def _jitted(pair: Pair):
    return jax.jit(pair)


def _jvp(args, dots, *, pair: Pair, jaxpr):
    """Returns the results, and what they move by with the operands and with their tangents."""
    out = _together.bind(*args, pair=pair, jaxpr=jaxpr)
    call, (moving, fixed, given) = pair.call, pair.parts(args)
    saved = _saved(moving, fixed, _found(out))
    moves, _, given_moves = pair.parts([type(t) is not ad.Zero for t in dots])
    dmoving, _, dgiven = pair.parts([ad.instantiate_zeros(t) for t in dots])
    first: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    second = []
    if any(jax.tree.leaves(moves)):
        kept = jax.tree.map(lambda moves, t: t if moves else None, moves, dmoving)
        first[0], first[1] = tangents(call, saved, kept)
        function = lambda moving: smooth_tangents(call, fixed, moving, given)
        second.append(jax.jvp(function, (moving,), (dmoving,))[1])
    if any(jax.tree.leaves(given_moves)):
        kept = jax.tree.map(lambda moves, t: t if moves else None, given_moves, dgiven)
        second.append(tangents(call, saved, kept))
    if second:
        first[-2:] = [sum(x[1:], x[0]) for x in zip(*second, strict=True)]
    return out, first


def _batch(args, axes, *, pair: Pair, jaxpr):
    """Folds the vmapped axis into the batch; O of operands without it is computed once."""
    count = pair.operands.num_leaves
    if any(axis is not None for axis in axes[:count]):
        size, folded = fold(args, axes)
        if size:
            out = unfold(size, _together.bind(*folded, pair=pair, jaxpr=traced(pair)(*folded)))
            return out, [0] * len(out)
    # Results but for the last two are those of all members alike, if they are of operands alike.
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
    found: Any = _attend(pair.call, moving, fixed)
    saved = _saved(moving, fixed, found)
    args = [*jax.tree.leaves(saved), *tracers[count:]]
    params = params_of(Tangents(pair.call, jax.tree.structure(saved), pair.given), args)
    unknown = trace.default_process_primitive(linear_p, args, params)
    return [*jax.tree.leaves(found), *unknown]


def _partial_eval_jaxpr(saveable, unknown, instantiated, eqn):
    """Does likewise with an equation of a jaxpr, as `jax.checkpoint` wants it."""
    pair, count = eqn.params["pair"], eqn.params["pair"].operands.num_leaves
    if any(unknown) and not any(unknown[:count]):
        split = jax.make_jaxpr(jax.jit(Split(pair)))(*(x.aval for x in eqn.invars)).eqns[0]
        rule = partial_eval.partial_eval_jaxpr_custom_rules[split.primitive]
        split = split.replace(invars=eqn.invars, outvars=eqn.outvars)
        return rule(saveable, unknown, instantiated, split)
    several = [any(unknown)] * len(eqn.outvars)
    residuals = [
        x for x, own in zip(eqn.invars, instantiated, strict=True) if isinstance(x, Var) and not own
    ]
    known = None if any(unknown) else eqn
    return known, eqn, several, [True] * len(several), residuals


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
