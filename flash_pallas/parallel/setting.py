"""Context parallelism of a layer, as one value next to the layer's other settings."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..typing import AnyArray, Array, Layout, MeshAxes, Strategy
from .context import context_parallel_attention, sharded_attention
from .layout import local_positions, names_of, zigzag_positions


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Sharding of a layer's sequences over devices: the value of its field `context_parallel`.

    The layer may run under `jax.jit` on whole arrays. It may also run inside a `jax.shard_map` over
    `axis`, on one device's part of the arrays. Everything that depends on positions uses those of
    the whole sequence: causal masks, windows, dropout, and rotary positions unless the call gives
    others.

    Attributes:
        axis: the mesh axis that shards the sequence, or a tuple of axes.
        strategy: as in `context_parallel_attention`.
        layout: layout of the sequences that the layer gets, as in `context_parallel_attention`:
            "contiguous", or "zigzag" as from `to_zigzag`.
        batch_axis: the mesh axes that shard the batch. If an axis shards the batch and is not named
            here, the batch is gathered over it.
        head_axis: the mesh axes that shard the heads.
        mesh: the mesh; None means that of `jax.set_mesh`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from flash_pallas.nn.nnx import FlashAttention
        >>> from flash_pallas.parallel import ContextParallel
        >>> layer = FlashAttention(
        ...     4, 64, causal=True, context_parallel=ContextParallel("context"), rngs=nnx.Rngs(0)
        ... )
        >>> with jax.set_mesh(jax.make_mesh((1,), ("context",))):
        ...     print(layer(jnp.ones((2, 16, 64))).shape)
        (2, 16, 64)
    """

    axis: str | tuple[str, ...]
    strategy: Strategy = "ring"
    layout: Layout = "contiguous"
    batch_axis: MeshAxes = None
    head_axis: MeshAxes = None
    mesh: jax.sharding.Mesh | None = None

    def attend(self, q: AnyArray, k: AnyArray, v: AnyArray, **options: Any) -> Array:
        """Computes attention of q [B, T, N, H] to k and v [B, T, K, H].

        Args:
            q: queries, whole or of this device.
            k: keys, whole or of this device.
            v: values, whole or of this device.
            **options: options of `flash_attention` that `sharded_attention` also has.

        Returns:
            o [B, T, N, H], sharded like q.

        Raises:
            ValueError: an option is not supported, or there is no mesh.
        """
        refused = sorted(set(options) - set(inspect.signature(sharded_attention).parameters))
        if refused:
            raise ValueError(
                f"context_parallel and {', '.join(refused)}: attention to a sequence that is cut "
                "over devices takes causal, window, scale, softcap, segment ids (negative ones are "
                "padding), sinks and dropout"
            )
        arrangement = {"axis": self.axis, "strategy": self.strategy, "layout": self.layout}
        if self._inside:
            axes = (self.batch_axis, self.head_axis)
            return sharded_attention(q, k, v, shard_axes=axes, **arrangement, **options)
        axes = {"batch_axis": self.batch_axis, "head_axis": self.head_axis}
        return context_parallel_attention(
            q, k, v, mesh=self._mesh, **axes, **arrangement, **options
        )

    def positions(self, length: int) -> Array:
        """Returns int32[length]: the positions of the tokens of a call, for RoPE.

        Args:
            length: length of the sequences; inside `jax.shard_map`, length of this device's part.

        Raises:
            ValueError: there is no mesh, or the zigzag layout does not allow the length.
        """
        zigzag = self.layout == "zigzag"
        if self._inside:
            return local_positions(
                lax.axis_index(self.axis), length, lax.axis_size(self.axis), zigzag
            )
        if not zigzag:
            return jnp.arange(length, dtype=jnp.int32)
        shards = math.prod(self._mesh.shape[name] for name in names_of(self.axis))
        return jnp.asarray(zigzag_positions(length, shards))

    @property
    def _inside(self) -> bool:
        """True inside a `jax.shard_map` over the axis."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return set(names_of(self.axis)) <= set(manual)

    @property
    def _mesh(self):
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        missing = [name for name in names_of(self.axis) if name not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"context_parallel has axis {self.axis!r} and the mesh has {mesh.axis_names}: call "
                "the layer under jax.set_mesh(mesh), or pass ContextParallel(..., mesh=mesh)"
            )
        return mesh
