"""Results without a derivative, which is an error only if somebody asks for it.

An error in a rule of `jax.custom_jvp` comes too early: `jax.grad` of a function that contains
`stop_gradient(f(x))` applies the rule of f, and only then drops the tangent. So the tangent here is
an equation that raises when it is transposed, compiled or run, and disappears where it is dropped.
"""

from __future__ import annotations

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def tangents(outputs, inputs, message: str):
    """Returns tangents of `outputs` that raise NotImplementedError where they are used.

    Args:
        outputs: a tree of arrays.
        inputs: a tree of the tangents that these depend on.
        message: text of the error.
    """
    is_real = lambda x: jax.typeof(x).dtype != jax.dtypes.float0
    real = [x for x in jax.tree.leaves(inputs) if is_real(x)]
    leaves, tree = jax.tree.flatten(outputs)
    return jax.tree.unflatten(tree, _missing.bind(*leaves, *real, count=len(leaves), say=message))


_missing = Primitive("missing_derivative")
_missing.multiple_results = True


def _raise(*_, say: str, **__):
    raise NotImplementedError(say)


def _avals(*avals, count: int, say: str):
    return list(avals[:count])


def _jvp(primals, tangents, *, count: int, say: str):
    out = _missing.bind(*primals, count=count, say=say)
    real = [x for x in tangents if type(x) is not ad.Zero]
    return out, _missing.bind(*out, *real, count=count, say=say)


def _transpose(cotangents, *args, say: str, **_):
    if all(type(x) is ad.Zero for x in cotangents):
        return [None] * len(args)
    raise NotImplementedError(say)


def _batch(args, axes, *, count: int, say: str):
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    args = [batching.bdim_at_front(x, axis, size) for x, axis in zip(args, axes, strict=True)]
    return _missing.bind(*args, count=count, say=say), [0] * count


_missing.def_impl(_raise)
_missing.def_abstract_eval(_avals)
ad.primitive_jvps[_missing] = _jvp
ad.primitive_transposes[_missing] = _transpose
batching.primitive_batchers[_missing] = _batch
mlir.register_lowering(_missing, lambda _, *args, say, **params: _raise(say=say))
