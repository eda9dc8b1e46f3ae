"""Attention of arrays that are sharded over a mesh: every device computes its own part.

Batch entries and query heads are independent, so arrays sharded over them need no communication in
the forward. In the backward a gradient is summed over the devices that share its operand.
core/shards.py decides, in one place, which mesh axes shard what. The sharding of arrays is known

- in types, where mesh axes are `Explicit`: `OnShards` is a `jax.shard_map`;
- to the partitioner alone, where they are `Auto`: `per_shard` tells it what it may shard;
- to the caller, inside a `jax.shard_map` of theirs, where nothing is left to do.

Plain jnp around attention, as where a cache grows, is the business of core/mesh_axes.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ..core import mesh_axes
from ..core.problem import own_width
from ..core.shards import PLACES, Shards


def per_shard(call, enabled: bool):
    """Wraps a call of a backend so that the partitioner runs one for each shard.

    Shards are of the batch and of the heads. The call computes in its `own_width`, and its results
    vary over the mesh axes of its operands.

    Args:
        call: (Operands, ...) -> a record, of whole arrays and of parts alike.
        enabled: False leaves nothing to the partitioner.
    """

    def run(*args):
        mesh = jax.sharding.get_abstract_mesh()
        # Inside a shard_map, and where all axes are Explicit, the partitioner cuts nothing.
        decided = mesh.manual_axes or (mesh.axis_names and not mesh.auto_axes)
        if enabled and jax.device_count() > 1 and not decided:
            return _partitioned(per_shard(call, enabled=False), args)
        with own_width(args[0]):
            results = call(*args)
        return mesh_axes.spread(results, mesh_axes.varying(args[0]))

    return run


def _partitioned(call, args):
    results = []

    def noted(*args):
        record = call(*args)
        results.append(jax.tree.map(jax.typeof, record))
        return record

    # jit takes in constants, such as the table of tiles: custom_partitioning allows none.
    cut, shapes = custom_partitioning(jax.jit(noted)), jax.tree.map(jax.typeof, args)
    cut.def_partition(
        partial(_partition, call),
        # Names of mesh axes are found here: a part of a mesh axis has no PartitionSpec.
        decode_shardings=False,
        sharding_rule=lambda *_: _rule(shapes, results[0]),
    )
    return cut(*args)


def placed(operands):
    """Reshards operands to what the shards of `OnShards` read; a no-op without a mesh.

    Raises:
        ValueError: the axis of queries or of keys is sharded.
    """
    mesh = mesh_axes.mesh_of(operands[:3])
    if mesh is None:
        return operands
    cuts = [mesh_axes.names_of(x) for x in _qkv(operands)]
    return _resharded(operands, Shards.of(operands, cuts, dict(mesh.shape)).specs(operands), mesh)


def on_shards(function, operands, results):
    """Runs function(Operands) -> a record on every shard of Explicit axes; JAX differentiates it.

    Args:
        function: of one shard's operands.
        operands: whole arrays, `placed`.
        results: type of the record, whose specs `Shards.result_specs` knows.
    """
    mesh: Any = mesh_axes.mesh_of(operands[:3])
    cuts = [mesh_axes.names_of(x) for x in _qkv(operands)]
    shards = Shards.of(operands, cuts, dict(mesh.shape))
    cut = jax.shard_map(
        partial(shards.run, function),
        mesh=mesh,
        in_specs=(shards.specs(operands),),
        out_specs=shards.result_specs(results),
        axis_names=_axes_of(mesh),
    )
    return cut(operands)


def _qkv(operands) -> tuple:
    """Returns (q, k, v), where values that are columns of the keys are sharded as these are."""
    q, k, v = operands[:3]
    return q, k, k if v is None else v


def _axes_of(mesh) -> set[str]:
    """Returns `axis_names` of a shard_map over all Explicit axes.

    An empty set is all axes but those that a vmap around has taken, which types hide.
    """
    return set() if mesh.are_all_axes_explicit else set(mesh.explicit_axes)


@dataclasses.dataclass(frozen=True, eq=False)
class OnShards:
    """A call by `jax.shard_map` over all Explicit axes, where types say how arrays are sharded.

    JAX does not vmap a shard_map along an axis that the mesh shards: here vmap is inside of it.

    Attributes:
        call: the function of one shard.
        results: type of what it returns: Outputs, or Operands where they are gradients.
        levels: levels of vmap, the innermost first; each says which of the arguments' arrays have
            its axis. These axes come before an array's own, the outermost first.
    """

    call: Any
    results: Any
    levels: tuple = ()

    def __call__(self, *args):
        run = custom_vmap(self._run)
        run.def_vmap(self._with_another_level)
        return run(*args)

    def _with_another_level(self, size, is_batched, *args):
        deeper = dataclasses.replace(self, levels=(*self.levels, tuple(is_batched)))
        record = deeper(*args)
        return record, jax.tree.map(lambda _: True, record)

    def _run(self, *args):
        mesh: Any = mesh_axes.mesh_of(args)
        levels = self._names_of_levels(args)
        own = lambda x, *flags: jax.ShapeDtypeStruct(x.shape[sum(flags) :], x.dtype)
        members = jax.tree.map(own, args, *self.levels)
        shards = self._shards(args[0], members[0], dict(mesh.shape), levels)
        specs = jax.tree.map(
            lambda spec, *flags: _behind(levels, flags, spec),
            tuple(map(shards.specs, members)),
            *self.levels,
        )
        every = (True,) * len(levels)
        out_specs = jax.tree.map(partial(_behind, levels, every), shards.result_specs(self.results))
        local = partial(shards.run, self.call)
        for level in self.levels:
            local = jax.vmap(local, in_axes=jax.tree.map(lambda own: 0 if own else None, level))
        cut = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=specs,
            out_specs=out_specs,
            axis_names=_axes_of(mesh),
        )
        return cut(*_resharded(args, specs, mesh))

    def _names_of_levels(self, args) -> list[tuple[str, ...]]:
        """Returns the mesh axes that shard each level of vmap."""
        flags = list(zip(*map(jax.tree.leaves, self.levels), strict=True))
        names_of_levels: list[tuple[str, ...]] = []
        for level in range(len(self.levels)):
            cuts = [
                mesh_axes.names_of(x)[sum(own[level + 1 :])]
                for x, own in zip(jax.tree.leaves(args), flags, strict=True)
                if own[level]
            ]
            taken = {name for names in names_of_levels for name in names}
            names_of_levels.append(
                next((names for names in cuts if names and taken.isdisjoint(names)), ())
            )
        return names_of_levels

    def _shards(self, operands, members, sizes, levels) -> Shards:
        taken = {name for names in levels for name in names}
        cuts = [
            [
                tuple(a for a in axes if a not in taken)
                for axes in mesh_axes.names_of(x)[x.ndim - 4 :]
            ]
            for x in _qkv(operands)
        ]
        return Shards.of(members, cuts, sizes)


def _behind(levels, flags, spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of an array with the axes of the levels that its flags name in front."""
    own = [names or None for names, has in zip(levels, flags, strict=True) if has]
    return PartitionSpec(*own[::-1], *spec)


def _resharded(tree, specs, mesh):
    put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return jax.tree.map(put, tree, specs)


def first_of_shard(shard_axes, batch: int, heads: int):
    """Returns the numbers of the first entry and the first head of a shard, int or int32.

    Args:
        shard_axes: None, or the mesh axes that shard the batch and those that shard the heads.
        batch: number of entries of the shard.
        heads: number of query heads of the shard.

    Raises:
        ValueError: these are no names of mesh axes of a `jax.shard_map` around.
    """
    if shard_axes is None:
        return 0, 0
    if not isinstance(shard_axes, (tuple, list)) or len(shard_axes) != 2:
        raise ValueError(
            f"shard_axes is {shard_axes!r}: it must be a pair, the axes of the batch and those of "
            "the heads, each a name of a mesh axis, a tuple of names or None, as in ('data', None)"
        )
    try:
        numbers = [0 if axes is None else lax.axis_index(axes) for axes in shard_axes]
    except NameError as error:
        raise ValueError(
            f"shard_axes is {shard_axes!r}: {error}; inside jax.shard_map, name axes of its mesh"
        ) from None
    return numbers[0] * batch, numbers[1] * heads


def _rule(args, results) -> str:
    """Returns the sharding rule, which says what may be sharded alike: the batch, and the heads.

    KV heads of GQA are a factor of their own, or the partitioner would divide a mesh axis between
    them and the group. `Shards` has the last word anyway.
    """
    batch, _, heads, _ = args[0].q.shape
    numbers = itertools.count()

    def factors(places, shape):
        labels = {"b": "b", "n": "n"}
        if len(shape) == 4:
            labels["k"] = "n" if shape[2] == heads else "m"
            labels |= {"B": "b"} if shape[0] == batch else {}
            labels |= {"N": "n"} if shape[1] == heads else {}
        return " ".join(labels.get(place) or f"x{next(numbers)}" for place in places)

    def text(record):
        leaves = [
            (name, x) for name in record._fields for x in jax.tree.leaves(getattr(record, name))
        ]
        return ", ".join(factors(PLACES[name], x.shape) for name, x in leaves)

    return ", ".join(map(text, args)) + " -> " + text(results)


def _partition(call, mesh, args, results):
    """Answers the partitioner: (mesh, a shard's function, shardings of results and of args)."""
    cuts = [_cuts(x.sharding, mesh, len(x.shape)) for x in _qkv(args[0])]
    shards = Shards.of(args[0], cuts, dict(mesh.shape))
    shardings = lambda record: jax.tree.map(partial(NamedSharding, mesh), shards.specs(record))
    return mesh, partial(shards.run, call), shardings(results), tuple(map(shardings, args))


def _cuts(sharding, mesh, rank: int) -> list[tuple[str, ...]]:
    """Returns, for each axis of an array, the mesh axes that shard only it, major first."""
    devices = mesh.devices
    # The partitioner may shard an axis that its parts do not divide, so the slices are those of
    # axes with as many entries as there are devices.
    slices = sharding.devices_indices_map((devices.size,) * rank)
    cuts: list[list] = [[] for _ in range(rank)]
    for number, name in enumerate(mesh.axis_names):
        line = devices[tuple(slice(None) if i == number else 0 for i in range(devices.ndim))]
        starts = np.array([[s.start or 0 for s in slices[device]] for device in line])
        steps = np.diff(starts, axis=0)
        moving = np.flatnonzero(steps.any(axis=0))
        if len(moving) == 1 and (steps == steps[0]).all():
            cuts[moving[0]].append((-steps[0, moving[0]], name))
    return [tuple(name for _, name in sorted(names)) for names in cuts]
