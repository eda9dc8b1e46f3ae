"""Mesh axes in the types of arrays: Explicit ones, and those of `jax.shard_map`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# --- Plain jnp on arrays whose types carry their sharding: those of meshes with Explicit axes -----
# JAX finds the sharding of a result from the types of its operands, and raises where they leave a
# choice: where a sharded axis is indexed or merged with its neighbours. Where axes are Auto the
# compiler chooses; the functions here ask it to, and tell it how the result is to be sharded.


def mesh_of(*trees):
    """Returns the mesh with Explicit axes that the types of these arrays name, or None."""
    for x in jax.tree.leaves(trees):
        mesh = jax.typeof(x).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def names_of(x) -> list[tuple[str, ...]]:
    """Returns the mesh axes that shard each axis of an array, as its type says."""
    spec = jax.typeof(x).sharding.spec
    return [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]


def spec_of(x) -> PartitionSpec:
    """Returns the PartitionSpec of an array, as its type says."""
    return PartitionSpec(*(names or None for names in names_of(x)))


def compiled_as_auto(call, args: tuple, specs) -> Any:
    """Calls call(*args) with the sharding left to the compiler, as where axes are Auto.

    Without a mesh that has Explicit axes, it just calls.

    Args:
        call: any function of arrays.
        args: trees of arrays.
        specs: PartitionSpecs of the results.
    """
    mesh = mesh_of(args)
    if mesh is None:
        return call(*args)
    out = jax.tree.map(partial(NamedSharding, mesh), specs)
    return jax.sharding.auto_axes(call, axes=mesh.explicit_axes, out_sharding=out)(*args)


def whole(tree):
    """Returns arrays of which every device has all; a no-op where no Explicit axis shards them."""
    return jax.tree.map(_whole, tree)


def _whole(x):
    mesh = mesh_of(x)
    if mesh is None or not any(names_of(x)):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def whole_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters of a primitive whose results every device is to have whole."""
    return {
        name: NamedSharding(x.mesh, PartitionSpec()) if isinstance(x, NamedSharding) else x
        for name, x in params.items()
    }


def repeated(x, times: int, axis: int):
    """Returns x with every entry of an axis `times` times, sharded as x is."""
    repeat = lambda x: jnp.repeat(x, times, axis=axis)
    return compiled_as_auto(repeat, (x,), spec_of(x))


def folded(x, kept: int):
    """Returns x with all axes but the last `kept` folded into one.

    If the mesh shards any of the folded axes but the first, entries move between devices.
    """
    number = x.ndim - kept
    shape = (math.prod(x.shape[:number]), *x.shape[number:])
    mesh = mesh_of(x)
    if mesh is None or not any(names_of(x)[1:number]):
        return x.reshape(shape)
    names = tuple(name for axes in names_of(x)[:number] for name in axes)
    while shape[0] % math.prod(mesh.shape[name] for name in names):
        names = names[:-1]
    spec = PartitionSpec(names or None, *spec_of(x)[number:])
    return lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec))


def unfolded(x, shape: tuple[int, ...], like):
    """Returns x with its first axis replaced by axes of this shape.

    Args:
        x: an array [prod(shape), ...].
        shape: sizes of the new axes.
        like: an array whose first axes are these, before it was `folded`: they are sharded alike.
    """
    mesh, unfolded_shape = mesh_of(x), (*shape, *x.shape[1:])
    if mesh is None or not any(names_of(like)[1 : len(shape)]):
        return x.reshape(unfolded_shape)
    spec = PartitionSpec(*spec_of(like)[: len(shape)], *spec_of(x)[1:])
    return lax.reshape(x, unfolded_shape, out_sharding=NamedSharding(mesh, spec))


# --- Mesh axes over which a value varies inside `jax.shard_map` -----------------------------------
# shard_map (check_vma=True, its default) types every value by these axes. A loop wants the same
# type going in and out, a custom_vjp wants cotangents typed like their primals, and a Pallas kernel
# drops the type of its outputs, so each of these places states it. Outside shard_map all of this is
# empty.


def varying(*trees) -> frozenset[str]:
    """Returns the mesh axes over which any array of the trees varies."""
    types = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(trees))
    return frozenset().union(*(t.varying for t in types))


def spread(tree, axes: frozenset[str]):
    """Marks values as varying over `axes` too; the transpose sums over the axes that it added."""

    def marked(x):
        missing = tuple(sorted(axes - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(marked, tree) if axes else tree


def untyped(call):
    """Wraps `call` to see arguments that vary over no axis: Pallas refuses others within warps."""

    def run(*args):
        if not varying(args):
            return call(*args)
        bare = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(args)]
        bare = jax.tree.unflatten(jax.tree.structure(args), bare)
        closed, results = jax.make_jaxpr(call, return_shape=True)(*bare)
        leaves = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    return run
