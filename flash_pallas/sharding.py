"""Attention of arrays that are cut over the devices of a mesh: every device computes its own part.

Batch entries and query heads are independent, so what is cut over them needs no communication in
the forward. In the backward a gradient is summed over the devices that share its operand. How
arrays are cut is known

- in types, where mesh axes are `Explicit`: `over_explicit_axes` is a `jax.shard_map`;
- to the partitioner alone, where they are `Auto`: `per_shard` tells it what it may cut;
- to the caller, inside a `jax.shard_map` of theirs, where nothing is left to do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .core import softmax
from .core.problem import Grads, Operands

# The axes of every array: b batch, n query heads, k key heads, "." one that is never cut. B is the
# batch of a bias, a divisor of b, and N its heads, n or 1.
PLACES = {
    **dict.fromkeys(("q", "o", "do"), "b.n."),
    **dict.fromkeys(("k", "v"), "b.k."),
    **dict.fromkeys(("bias", "mask"), "BN.."),
    **dict.fromkeys(("q_offset", "q_lengths", "kv_lengths"), "b"),
    **dict.fromkeys(("q_segments", "kv_segments", "q_places", "kv_places"), "b."),
    **dict.fromkeys(("alibi_slopes", "sinks", "dropout_keys"), "bn"),
    **dict.fromkeys(("score_params", "mask_params"), "bn"),
    **dict.fromkeys(("lse_log2", "shift", "max_logit", "delta"), "bn."),
}


def per_shard(call, enabled: bool):
    """`call`, of which the partitioner runs one for each shard of the batch and of the heads.

    Args:
        call: (Operands, ...) -> Outputs or Grads, of whole arrays and of parts alike.
        enabled: False leaves `call` as it is.
    """

    def run(*args):
        manual = jax.sharding.get_abstract_mesh().manual_axes
        whole = not enabled or jax.device_count() == 1 or manual
        return call(*args) if whole else _partitioned(call, args)

    return run


def _partitioned(call, args):
    results = []

    def noted(*args):
        found = call(*args)
        results.append(jax.tree.map(jax.typeof, found))
        return found

    # jit keeps constants to itself, such as the table of tiles: there must be none outside.
    cut, shapes = custom_partitioning(jax.jit(noted)), jax.tree.map(jax.typeof, args)
    cut.def_partition(
        partial(_partition, call),
        # Names of mesh axes are found here: a part of a mesh axis has no PartitionSpec.
        decode_shardings=False,
        sharding_rule=lambda *_: _rule(shapes, results[0]),
    )
    return cut(*args)


def over_explicit_axes(call, operands: Operands, max_logit: bool):
    """`call` on each shard, where the types of q, k and v say how they are cut; else on the whole.

    Args:
        call: (Operands) -> (o, lse, max_logit or None).
        operands: of the whole call.
        max_logit: the third result is an array.

    Raises:
        ValueError: the axis of queries or of keys is cut.
    """
    types = [jax.typeof(x).sharding for x in operands[:3]]
    meshes = [t.mesh for t in types if AxisType.Explicit in t.mesh.axis_types]
    if not meshes:
        return call(operands)
    mesh = meshes[0]
    shards = Shards.of(operands, [_names(t.spec) for t in types], dict(mesh.shape))
    specs = shards.specs(operands)
    put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec))
    o, lse = shards.spec("o", operands.q.shape), shards.spec("lse_log2", operands.q.shape[:3])
    local = jax.shard_map(
        lambda mine: call(shards.selected(mine)),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(o, lse, lse if max_logit else None),
        axis_names=set(mesh.explicit_axes),
    )
    return local(jax.tree.map(put, operands, specs))


def first_of_shard(shard_axes, batch: int, heads: int):
    """Numbers of the first entry and the first head of a shard, int or int32.

    Args:
        shard_axes: None, or the mesh axes that cut the batch and those that cut the heads.
        batch: entries of the shard.
        heads: query heads of the shard.

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


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Over which mesh axes a call is cut, major first.

    Attributes:
        whole: the operands, or their shapes, before that.
        batch, heads: names of mesh axes.
        counts: into how many parts each of the two is cut.
    """

    whole: Operands
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    counts: tuple[int, int]

    @classmethod
    def of(cls, whole: Operands, cuts, sizes: dict[str, int]) -> Shards:
        """From the names that cut each axis of q, k and v, and the sizes of all mesh axes.

        Raises:
            ValueError: the axis of queries or of keys is cut.
        """
        for name, (_, length, _, _) in zip("qkv", cuts, strict=True):
            if length:
                raise ValueError(
                    f"the sequence axis of {name} is sharded over {length}: flash_attention wants "
                    "whole sequences. Call flash_pallas.parallel.context_parallel_attention, or "
                    f"gather them, as in jax.lax.with_sharding_constraint({name}, "
                    "jax.P('data', None, 'model')), or jax.sharding.reshard where axes are Explicit"
                )
        first = lambda axis: next((cut[axis] for cut in cuts if cut[axis]), ())
        count = lambda names: math.prod(sizes[a] for a in names)

        def dividing(axis, taken=()):
            names = tuple(a for a in first(axis) if a not in taken)
            while whole.q.shape[axis] % count(names):
                names = names[:-1]
            return names

        batch = dividing(0)
        heads = dividing(2, taken=batch)
        return cls(whole, batch, heads, (count(batch), count(heads)))

    def specs(self, record):
        """The PartitionSpecs of a NamedTuple of whole arrays."""
        one = lambda name: jax.tree.map(lambda x: self.spec(name, x.shape), getattr(record, name))
        return record._replace(**{name: one(name) for name in record._fields})

    def spec(self, name: str, shape) -> PartitionSpec:
        """The PartitionSpec of an array of PLACES."""
        return PartitionSpec(*(axes or None for axes in self._cuts(name, shape)))

    def _cuts(self, name: str, shape) -> list[tuple[str, ...]]:
        """The mesh axes that cut each axis of an array of PLACES.

        A PartitionSpec does not serve here: it stores a single name as a string, not as a tuple.
        """
        entries, members = self.counts
        cut = {"b": self.batch, "n": self.heads}
        if len(shape) == 4:
            cut["k"] = self.heads if shape[2] % members == 0 else ()
            cut["B"] = self.batch if shape[0] % entries == 0 else ()
            cut["N"] = self.heads if shape[1] % members == 0 else ()
        return [cut.get(place, ()) for place in PLACES[name]]

    def selected(self, mine: Operands) -> Operands:
        """One shard's operands, with those entries alone that it reads of what is not cut."""
        given = {name: getattr(mine, name) for name in ("k", "v", "bias", "mask")}
        return mine._replace(
            **{n: x if x is None else self._select(n)(x) for n, x in given.items()}
        )

    def summed(self, mine: Operands, grads: Grads) -> Grads:
        """Gradients of one shard's operands, from those of what `selected` made of them."""
        given = {name: (getattr(mine, name), getattr(grads, name)) for name in ("k", "v", "bias")}
        return grads._replace(
            **{n: None if g is None else self._sum(n, x, g) for n, (x, g) in given.items()}
        )

    def _select(self, name: str):
        """The function from a shard's array of this name to the entries that it reads."""
        x, q = getattr(self.whole, name), self.whole.q
        of_heads = PLACES[name] == "b.k."
        axis, names = (2, self.heads) if of_heads else (0, self.batch)
        entries, count = x.shape[axis], self.counts[of_heads]
        if entries == 1 or entries % count == 0:
            return lambda x: x
        mine, readers = q.shape[axis] // count, q.shape[axis] // entries
        together = math.gcd(mine, readers)  # so many neighbours of this shard share an entry

        def select(x):
            reader = jnp.arange(0, mine, together, dtype=jnp.int32) + lax.axis_index(names) * mine
            return jnp.take(x, reader // readers, axis=axis, mode="clip")

        return select

    def _sum(self, name: str, x, grad):
        """The gradient of x, over all shards that read it; in float32, as kernels sum."""
        cut = {a for axes in self._cuts(name, getattr(self.whole, name).shape) for a in axes}
        shared = tuple(a for a in self.batch + self.heads if a not in cut)
        if not shared:
            return grad
        exact = grad.astype(softmax.sum_dtype(grad.dtype))
        like = jax.ShapeDtypeStruct(x.shape, exact.dtype)
        (exact,) = jax.linear_transpose(self._select(name), like)(exact)
        return lax.psum(exact, shared).astype(grad.dtype)


def _names(spec) -> list[tuple[str, ...]]:
    """The mesh axes that cut each of four axes."""
    names = [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]
    return names + [()] * (4 - len(names))


def _rule(args, results) -> str:
    """What may be cut alike: the batch, and the heads.

    Key heads of grouped queries are a factor of their own, or the partitioner would divide a mesh
    axis between them and the group. `Shards` has the last word anyway.
    """
    batch, _, heads, _ = args[0].q.shape
    numbers = itertools.count()

    def factors(places, shape):
        named = {"b": "b", "n": "n"}
        if len(shape) == 4:
            named["k"] = "n" if shape[2] == heads else "m"
            named |= {"B": "b"} if shape[0] == batch else {}
            named |= {"N": "n"} if shape[1] == heads else {}
        return " ".join(named.get(place) or f"x{next(numbers)}" for place in places)

    def text(record):
        leaves = [
            (name, x) for name in record._fields for x in jax.tree.leaves(getattr(record, name))
        ]
        return ", ".join(factors(PLACES[name], x.shape) for name, x in leaves)

    return ", ".join(map(text, args)) + " -> " + text(results)


def _partition(call, mesh, args, results):
    """What the partitioner asks: (mesh, a shard's function, shardings of results and of args)."""
    cuts = [_cuts(x.sharding, mesh, x.shape) for x in args[0][:3]]
    shards = Shards.of(args[0], cuts, dict(mesh.shape))

    def local(mine, *rest):
        found = call(shards.selected(mine), *rest)
        return shards.summed(mine, found) if isinstance(found, Grads) else found

    named = lambda record: jax.tree.map(partial(NamedSharding, mesh), shards.specs(record))
    return mesh, local, named(results), tuple(map(named, args))


def _cuts(sharding, mesh, shape) -> list[tuple[str, ...]]:
    """For each axis of an array, the mesh axes that cut it and nothing else, major first."""
    slices = sharding.devices_indices_map(tuple(shape))
    devices = mesh.devices
    found: list[list] = [[] for _ in shape]
    for number, name in enumerate(mesh.axis_names):
        line = devices[tuple(slice(None) if i == number else 0 for i in range(devices.ndim))]
        starts = np.array([[s.start or 0 for s in slices[device]] for device in line])
        steps = np.diff(starts, axis=0)
        moving = np.flatnonzero(steps.any(axis=0))
        if len(moving) == 1 and (steps == steps[0]).all():
            found[moving[0]].append((-steps[0, moving[0]], name))
    return [tuple(name for _, name in sorted(names)) for names in found]
