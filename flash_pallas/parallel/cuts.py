"""Sharding of the arrays of `context_parallel_attention` over the axes of a mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ..typing import MeshAxes
from .layout import names_of


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Mesh axes that shard sequence, batch and heads: each a name, a tuple of names or None."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    sequence: str | tuple[str, ...]
    batch: MeshAxes
    heads: MeshAxes

    @classmethod
    def of(cls, mesh, axis, batch_axis, head_axis) -> Cuts:
        """Makes Cuts from the arguments of `context_parallel_attention`, after checking them.

        Raises:
            TypeError: mesh is not a mesh.
            ValueError: the mesh does not have a name, or one axis shards two things.
        """
        if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
            raise TypeError(
                f"mesh is {mesh!r}: it must be a jax.sharding.Mesh with the axis that cuts the "
                "sequence, as in jax.make_mesh((8,), ('context',))"
            )
        axes_of = {"axis": axis, "batch_axis": batch_axis, "head_axis": head_axis}
        axes_of = {name: tuple(x) if isinstance(x, list) else x for name, x in axes_of.items()}
        if not names_of(axes_of["axis"]):
            raise ValueError(
                f"axis is {axis!r}: name the mesh axis that cuts the sequence, of "
                f"{mesh.axis_names}; flash_attention needs none"
            )
        of_name: dict[Any, str] = {}
        for argument, axes in axes_of.items():
            for name in names_of(axes):
                if name not in mesh.axis_names:
                    raise ValueError(
                        f"{argument} is {axes!r}: the mesh has the axes {mesh.axis_names}"
                    )
                if name in of_name:
                    raise ValueError(
                        f"{argument} and {of_name[name]} both have {name!r}: a mesh axis cuts one "
                        "of sequence, batch and heads, once"
                    )
                of_name[name] = argument
        return cls(mesh, *axes_of.values())

    def shards(self, axes) -> int:
        """Returns the number of parts into which these axes divide an array."""
        return math.prod(self.mesh.shape[name] for name in names_of(axes))

    def check_sizes(self, q, k, zigzag: bool):
        """Checks that batch and heads, and in zigzag layout also the sequence, can be sharded.

        Raises:
            ValueError: a size is not divisible by the number of devices.
        """
        of_batch = "pad it, or leave batch_axis out"
        of_heads = "repeat heads with jnp.repeat, or leave head_axis out"
        divisions = [
            ("the batch size", q.shape[0], "batch_axis", self.batch, 1, of_batch),
            ("the number of query heads", q.shape[2], "head_axis", self.heads, 1, of_heads),
            ("the number of key heads", k.shape[2], "head_axis", self.heads, 1, of_heads),
        ]
        if zigzag:
            of_tokens = "the zigzag layout has two chunks a device; pad with segment ids of -1"
            divisions.append(("the length", q.shape[1], "axis", self.sequence, 2, of_tokens))
        for dimension, size, argument, axes, chunks, way_out in divisions:
            shards = self.shards(axes)
            if size % (chunks * shards):
                raise ValueError(
                    f"{dimension} is {size} and {argument}={axes!r} has {shards} devices: it must "
                    f"be a multiple of {chunks * shards}; {way_out}"
                )

    def spec(self, name: str) -> PartitionSpec:
        """Returns the PartitionSpec of an array of this name; by default that of q, k, v and o."""
        of_rows = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
        return {
            **dict.fromkeys(of_rows, PartitionSpec(self.batch, self.sequence)),
            "sinks": PartitionSpec(self.heads),
            "dropout_seed": PartitionSpec(),
            "lse": PartitionSpec(self.batch, self.heads, self.sequence),
        }.get(name, PartitionSpec(self.batch, self.sequence, self.heads))


def shards_around(axis) -> int:
    """Returns the number of devices along an axis of the enclosing `jax.shard_map`.

    The axis may be a tuple of axes.

    Raises:
        ValueError: there is no `jax.shard_map` over the axis.
    """
    try:
        return lax.axis_size(axis)
    except NameError:
        manual_axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise ValueError(
            f"axis is {axis!r}: sharded_attention runs inside a jax.shard_map over that axis, and "
            f"here there are {manual_axes or 'none'}; on whole arrays call "
            "context_parallel_attention"
        ) from None
