"""Mesh axes over which a value varies inside `jax.shard_map`.

shard_map (check_vma=True, its default) types every value by these axes. A loop wants the same type
going in and out, a custom_vjp wants cotangents typed like their primals, and a Pallas kernel drops
the type of its outputs, so each of these places states it. Outside shard_map all of this is empty.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun


def varying(*trees) -> frozenset[str]:
    """Returns the mesh axes over which any array of the trees varies."""
    types = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(trees))
    return frozenset().union(*(t.varying for t in types))


def spread(tree, axes: frozenset[str]):
    """Marks values as varying over `axes` too; the transpose sums over the axes that it added."""
    return jax.tree.map(lambda x: _spread(x, axes), tree)


def _spread(x, axes):
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def untyped(call):
    """Wraps `call` to see arguments that vary over no axis: Pallas refuses others within warps."""

    def run(*args):
        if not varying(args):
            return call(*args)
        bare = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(args)]
        bare = jax.tree.unflatten(jax.tree.structure(args), bare)
        closed, results = jax.make_jaxpr(call, return_shape=True)(*bare)
        found = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(results), found)

    return run
