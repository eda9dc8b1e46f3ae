"""Equations of a traced function, with calls inlined, and the primitives that are elementwise."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType

# Primitives that work element by element, with their parameters unchanged by the shape.
_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul mulhi
ne neg nextafter not one_minus_square or polygamma population_count pow reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_NAMES.split())
# Primitives that choose at run time what is computed next.
CONTROL_FLOW = frozenset({"cond", "scan", "while"})
# Primitives that only call another jaxpr, by the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


@dataclasses.dataclass
class Tape:
    """Equations of a jaxpr with all calls inlined: (primitive, params, inputs, outputs)."""

    equations: list[tuple[Any, dict, list, list]] = dataclasses.field(default_factory=list)
    constants: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def inline(self, jaxpr, constants, inputs: list) -> list:
        """Appends the equations of `jaxpr` called on `inputs`; returns what stands for its results.

        A value is a fresh object per equation output, so the same jaxpr may be inlined twice.
        """
        names = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            names[var] = object()
            self.constants[names[var]] = constant
        read = lambda atom: _plain(atom) if isinstance(atom, Literal) else names[atom]
        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            if eqn.primitive.name in CALLS:
                inner = eqn.params[CALLS[eqn.primitive.name]]
                body, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                names.update(zip(eqn.outvars, self.inline(body, consts, operands), strict=True))
                continue
            if eqn.primitive.name == "pvary" or _leaves_types(eqn):
                # Only the value's type changes; the code that evaluates the equations sets types.
                names.update(zip(eqn.outvars, operands, strict=True))
                continue
            results = [object() for _ in eqn.outvars]
            names.update(zip(eqn.outvars, results, strict=True))
            self.equations.append((eqn.primitive, dict(eqn.params), operands, results))
        return [read(x) for x in jaxpr.outvars]

    def needed(self, results: list) -> list:
        """Returns the equations that the results depend on."""
        wanted, kept = {x for x in results if not isinstance(x, Literal)}, []
        for equation in reversed(self.equations):
            _, _, operands, outputs = equation
            if not wanted.isdisjoint(outputs):
                kept.append(equation)
                wanted.update(x for x in operands if not isinstance(x, Literal))
        return kept[::-1]


def _plain(literal: Literal) -> Literal:
    """Returns a literal whose type names no mesh, as those of `jax.sharding.auto_axes` do."""
    if jax.typeof(literal.val).sharding.mesh.empty:
        return literal
    value = np.asarray(literal.val)
    return Literal(value, jax.typeof(value))


def _leaves_types(eqn) -> bool:
    """Returns whether a value enters `jax.sharding.auto_axes`, as those of jax.random do."""
    mesh = getattr(eqn.params.get("dst_sharding"), "mesh", None)
    return mesh is not None and AxisType.Explicit not in mesh.axis_types


def fill(x, shape: tuple[int, ...]):
    """Returns the scalar x spread over a tile of this shape; x itself if it is such a tile."""
    if jnp.shape(x) == shape:
        return x
    if isinstance(x, jax.core.Tracer):
        return lax.broadcast_in_dim(x, shape, ())
    return lax.full(shape, np.asarray(x).item(), jnp.result_type(x))
