"""Calls a traced function of tiles in primitives that Mosaic GPU can lower.

Mosaic GPU takes fewer primitives than XLA, and fewer than differentiation makes: the derivative of
the product of a score with itself, say, needs `add_any`, and that of a quotient a negative
`integer_pow`. So the function is traced once more and evaluated one primitive at a time: calls are
inlined, scalars are filled, results that nobody reads are left out, and some primitives are
replaced by others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from ...core.elementwise import ELEMENTWISE, Tape, fill

# Elementwise primitives that have neither a lowering nor a stand-in.
_UNSUPPORTED_NAMES = """
acos asin atan atan2 bessel_i0e bessel_i1e digamma erf_inv igamma igamma_grad_a igammac lgamma mulhi
nextafter polygamma population_count reduce_precision regularized_incomplete_beta zeta
"""
UNSUPPORTED = frozenset(_UNSUPPORTED_NAMES.split())


def call(function: Callable, shape: tuple[int, ...], *args, divide: Callable = lax.div):
    """Calls function(*args), whose elementwise primitives work on tiles of `shape`.

    Args:
        function: what is called.
        shape: that of the tiles.
        *args: tiles and scalars.
        divide: the division of two float32 tiles.
    """
    closed, form = jax.make_jaxpr(function, return_shape=True)(*args)
    tape, inputs = Tape(), jax.tree.leaves(args)
    names = [object() for _ in inputs]
    results = tape.inline(closed.jaxpr, closed.consts, names)
    values = tape.constants | dict(zip(names, inputs, strict=True))
    read = lambda x: x.val if isinstance(x, Literal) else values[x]
    for primitive, params, operands, made in tape.needed(results):
        arguments = [read(x) for x in operands]
        if primitive.name in ELEMENTWISE or primitive.name == "broadcast_in_dim":
            arguments = [fill(x, shape) for x in arguments]
        values.update(zip(made, bind(primitive, params, arguments, shape, divide), strict=True))
    return jax.tree.unflatten(jax.tree.structure(form), [read(x) for x in results])


def bind(primitive, params: dict, operands: list, shape, divide: Callable) -> list:
    """Returns the results of a primitive, or of its stand-in, whose primitives are bound so too."""
    if primitive.name == "div" and operands[0].dtype == jnp.float32:
        return [divide(*operands)]
    if stand_in := STAND_INS.get(primitive.name):
        replacement = call(functools.partial(stand_in, **params), shape, *operands, divide=divide)
        if replacement is not None:
            return [replacement]
    if params.get("sharding") is not None:  # of arrays on a mesh; Mosaic GPU takes none
        params = {**params, "sharding": None}
    results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def _like(x, value):
    return lax.full_like(x, value)


def _floor(x):
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return nearest - lax.convert_element_type(nearest > x, x.dtype)


def _floored(x, **_):
    return _floor(x)


def _truncated_quotient(x, y):
    quotient = x / y
    return jnp.where(quotient < _like(x, 0), -_floor(-quotient), _floor(quotient))


def _rem(x, y):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x - y * _truncated_quotient(x, y)
    return None


def _integer_pow(x, *, y):
    if y > 1 or y == 0:
        return None
    if y == 1:
        return x
    return _like(x, 1) / (x if y == -1 else lax.integer_pow(x, -y))


def _not(x):
    return x == _like(x, False) if x.dtype == jnp.bool_ else None


def _cbrt(x, **_):
    size = jnp.exp2(jnp.log2(lax.abs(x)) * _like(x, 1 / 3))
    return lax.sign(x) * size


def _erfc_of_size(x):
    """Computes erfc(|x|), by Abramowitz and Stegun 7.1.26: off by 1.5e-7 at most."""
    size = lax.abs(x)
    t = _like(x, 1) / (_like(x, 1) + _like(x, 0.3275911) * size)
    total = _like(x, 0)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = (total + _like(x, factor)) * t
    return total * jnp.exp(-size * size)


def _erf(x, **_):
    return lax.sign(x) * (_like(x, 1) - _erfc_of_size(x))


def _erfc(x, **_):
    tail = _erfc_of_size(x)
    return jnp.where(x < _like(x, 0), _like(x, 2) - tail, tail)


def _asinh(x, **_):
    size = lax.abs(x)
    return lax.sign(x) * jnp.log(size + jnp.sqrt(size * size + _like(x, 1)))


def _acosh(x, **_):
    return jnp.log(x + jnp.sqrt((x - _like(x, 1)) * (x + _like(x, 1))))


def _atanh(x, **_):
    return _like(x, 0.5) * jnp.log((_like(x, 1) + x) / (_like(x, 1) - x))


def _pow(x, y):
    y = lax.convert_element_type(y, x.dtype)
    size = jnp.exp2(y * jnp.log2(lax.abs(x)))
    half, zero = y * _like(y, 0.5), _like(x, 0)
    negative_power = jnp.where(_floor(half) == half, size, -size)
    negative_power = jnp.where(_floor(y) == y, negative_power, _like(x, jnp.nan))
    return jnp.where(y == zero, _like(x, 1), jnp.where(x < zero, negative_power, size))


# By primitive; a result of None: the primitive itself will do. Right to a few float32 eps of 1
# where the primitive would be right to one of its result: the error of logits is absolute.
# `tanh` has a lowering too, to an instruction right to 1.1e-5 (measured on H100; softcap uses it,
# whose scores are rounded further anyway).
STAND_INS: dict[str, Callable] = {
    "acosh": _acosh,
    "add_any": lambda x, y: x + y,
    "asinh": _asinh,
    "atanh": _atanh,
    "broadcast_in_dim": lambda x, **_: x,  # already filled
    "cbrt": _cbrt,
    "ceil": lambda x, **_: -_floor(-x),
    "copy": lambda x: x,
    "cosh": lambda x, **_: _like(x, 0.5) * (jnp.exp(x) + jnp.exp(-x)),
    "erf": _erf,
    "erfc": _erfc,
    "expm1": lambda x, **_: jnp.exp(x) - _like(x, 1),
    "floor": _floored,
    "integer_pow": _integer_pow,
    "is_finite": lambda x: lax.abs(x) < _like(x, jnp.inf),
    "log1p": lambda x, **_: jnp.log(_like(x, 1) + x),
    "logistic": lambda x, **_: _like(x, 1) / (_like(x, 1) + jnp.exp(-x)),
    "not": _not,
    "pow": _pow,
    "rem": _rem,
    "reshard": lambda x, **_: x,
    "sinh": lambda x, **_: _like(x, 0.5) * (jnp.exp(x) - jnp.exp(-x)),
    "stop_gradient": lambda x, **_: x,
    "tan": lambda x, **_: jnp.sin(x) / jnp.cos(x),
    "tanh": lambda x, **_: _like(x, 1) - _like(x, 2) / (_like(x, 1) + jnp.exp(x + x)),
}
