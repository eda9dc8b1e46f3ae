"""Public functions for context parallelism: attention to sequences sharded over a mesh axis."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import partial
from typing import Any, Literal, Required, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..frontend import arguments as checks
from ..frontend import dispatch, validate
from ..frontend.arguments import Arguments, as_int32, seed_words
from ..frontend.validate import unexpected
from ..typing import (
    AnyArray,
    Array,
    BackendName,
    Differentiable,
    Float,
    Int,
    Integer,
    Layout,
    MeshAxes,
    Precision,
    Strategy,
)
from . import gathered, ring
from .cuts import Cuts, shards_around
from .layout import local_positions
from .plan import Plan

STRATEGIES = get_args(Strategy)
LAYOUTS = get_args(Layout)
_IDS = ("q_segment_ids", "kv_segment_ids")


class ContextOptions(TypedDict, total=False):
    """Arguments of both functions that do not affect the type of the result."""

    axis: Required[str | tuple[str, ...]]
    strategy: Strategy
    layout: Layout
    causal: bool
    window: int | tuple[int | None, int | None] | None
    scale: float | None
    q_segment_ids: Int[AnyArray, "B T"] | None
    kv_segment_ids: Int[AnyArray, "B S"] | None
    q_positions: Int[AnyArray, "B T"] | None
    kv_positions: Int[AnyArray, "B S"] | None
    softcap: float | None
    sinks: Float[AnyArray, " N"] | None
    dropout_rate: float
    dropout_seed: Integer | AnyArray | None
    broadcast_dropout: bool
    deterministic: bool
    precision: Precision | None
    differentiable: Differentiable
    backend: BackendName


class WholeOptions(ContextOptions, total=False):
    """Arguments of `context_parallel_attention`, likewise."""

    mesh: Required[jax.sharding.Mesh | jax.sharding.AbstractMesh]
    batch_axis: MeshAxes
    head_axis: MeshAxes


class ShardOptions(ContextOptions, total=False):
    """Arguments of `sharded_attention`, likewise."""

    shard_axes: tuple[MeshAxes, MeshAxes] | None


@overload
def context_parallel_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[WholeOptions],
) -> Array: ...
@overload
def context_parallel_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[WholeOptions],
) -> tuple[Array, Array]: ...
@overload
def context_parallel_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[WholeOptions],
) -> Array | tuple[Array, Array]: ...
def context_parallel_attention(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K Hv"],
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axis: str | tuple[str, ...],
    strategy: Strategy = "ring",
    layout: Layout = "contiguous",
    batch_axis: MeshAxes = None,
    head_axis: MeshAxes = None,
    q_segment_ids: Int[AnyArray, "B T"] | None = None,
    kv_segment_ids: Int[AnyArray, "B S"] | None = None,
    q_positions: Int[AnyArray, "B T"] | None = None,
    kv_positions: Int[AnyArray, "B S"] | None = None,
    sinks: Float[AnyArray, " N"] | None = None,
    dropout_seed: Integer | AnyArray | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Computes `flash_attention` of a sequence that is sharded over a mesh axis.

    It runs ring attention (https://arxiv.org/abs/2310.01889) or another strategy under
    `jax.shard_map`. Up to rounding, the result is that of `flash_attention` on whole arrays. By
    default it is differentiable once, in reverse mode; with `differentiable="any"` in both modes
    and to any order.

    Args:
        q: queries [B, T, N, H], the whole array. If T is not a multiple of the number of devices of
            `axis`, the arrays are padded, which copies them. In zigzag layout, T must be a multiple
            of twice the number of devices.
        k: keys [B, S, K, H], with S = T.
        v: values [B, S, K, Hv].
        mesh: the mesh of the devices.
        axis: the mesh axis that shards the sequence, or a tuple of axes.
        strategy: "ring" sends keys from device to device while other keys are in use, and needs
            memory for twice the keys of one device. "all_gather" gathers all keys on every device.
            "ulysses" gives every device the whole sequence for some of the heads; N must be a
            multiple of the number of devices.
        layout: order of the tokens in q, k, v, ids and positions: "contiguous" is the natural
            order, "zigzag" is that of `to_zigzag`. With a causal mask, only "zigzag" gives every
            device of a ring equal work.
        batch_axis: the mesh axes that shard the batch.
        head_axis: the mesh axes that shard the heads, including those of k and v.
        q_segment_ids: as in `flash_attention`.
        kv_segment_ids: as in `flash_attention`.
        q_positions: as in `flash_attention`, sharded like q. None means the index in the whole
            sequence. With positions, a ring visits the keys of all devices, because no step is
            known to be empty before it runs; its kernels still skip tiles. Dropout then requires
            "ring" or "ulysses".
        kv_positions: the same for keys.
        sinks: as in `flash_attention`, one per head.
        dropout_seed: as in `flash_attention`.
        return_lse: also return the log-sum-exp.
        **options: options of `sharded_attention`: causal, window, scale, softcap, dropout_rate and
            so on.

    Returns:
        o [B, T, N, Hv] in q's dtype, with the layout and the sharding of q. With return_lse, the
        pair of o and lse [B, N, T] in float32.

    Raises:
        Exception: the same exceptions as `flash_attention`.
        ValueError: lengths or heads are not divisible by the number of devices, or a name is
            unknown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flash_pallas.parallel import context_parallel_attention
        >>> mesh = jax.make_mesh((1,), ("context",))
        >>> x = jnp.ones((2, 16, 4, 8))
        >>> context_parallel_attention(x, x, x, mesh=mesh, axis="context", causal=True).shape
        (2, 16, 4, 8)
    """
    parameters = inspect.signature(sharded_attention).parameters
    unknown = set(options) - set(parameters) | set(options) & {"shard_axes"}
    if unknown:
        raise TypeError(
            f"{unexpected('context_parallel_attention', unknown, parameters)}; it takes the "
            "arguments of sharded_attention, and padding is a segment id of -1"
        )
    q, k, v = (validate.as_array(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    _check_lengths(q, k)
    validate.check_shapes(q, k, v)
    cuts = Cuts.of(mesh, axis, batch_axis, head_axis)
    cuts.check_sizes(q, k, layout == "zigzag")
    # Before jit, which would truncate 64-bit integers of numpy.
    rows = {
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
    }
    rows = {name: as_int32(name, x) for name, x in rows.items() if x is not None}
    _check_rows(rows, q.shape[:2])
    arrays = rows | {
        "sinks": sinks,
        "dropout_seed": None if dropout_seed is None else seed_words(dropout_seed),
    }
    arrays = {name: x for name, x in arrays.items() if x is not None}
    static = {"strategy": strategy, "layout": layout, "return_lse": return_lse, **options}
    static = {name: _static(name, x, q.shape[3]) for name, x in static.items()}
    return _on_devices(cuts, tuple(sorted(static.items())), q, k, v, arrays)


def _static(name: str, value, head_dim: int):
    """Returns an option in a form that jit can hash.

    Raises:
        Exception: the same exceptions as `flash_attention`, for an invalid option.
    """
    if name in ("causal", "deterministic", "broadcast_dropout", "return_lse"):
        return checks.flag(name, value)
    if name == "scale":
        return checks.valid_scale(value, head_dim)
    if name == "softcap":
        return checks.valid_softcap(value)
    if name == "dropout_rate":
        return checks.dropout_rate(value)
    if name == "window":
        band = checks.static_band(False, value)
        return band.left, band.right
    return value if isinstance(value, Hashable) else repr(value)  # refused later, with its repr


@partial(jax.jit, static_argnums=(0, 1))
def _on_devices(cuts: Cuts, options, q, k, v, arrays):
    """Runs `sharded_attention` on every device; jitted, so that eager calls do not run op by op."""
    static = dict(options)
    length, uneven = q.shape[1], q.shape[1] % cuts.shards(cuts.sequence) > 0
    if uneven:
        if not set(_IDS) & set(arrays):
            arrays = arrays | dict.fromkeys(_IDS, jnp.zeros(q.shape[:2], jnp.int32))
        q, k, v = (_lengthened(cuts, name, x) for name, x in zip("qkv", (q, k, v), strict=True))
        arrays = {name: _lengthened(cuts, name, x) for name, x in arrays.items()}
    rows, specs = cuts.spec("o"), {name: cuts.spec(name) for name in arrays}
    axes = {"axis": cuts.sequence, "shard_axes": (cuts.batch, cuts.heads)}
    local = jax.shard_map(
        lambda q, k, v, arrays: sharded_attention(q, k, v, **axes, **static, **arrays),
        mesh=cuts.mesh,
        in_specs=(rows, rows, rows, specs),
        out_specs=(rows, cuts.spec("lse")) if static["return_lse"] else rows,
    )
    if AxisType.Explicit in cuts.mesh.axis_types:  # shard_map does not reshard on such a mesh
        reshard = lambda x, spec: jax.sharding.reshard(x, NamedSharding(cuts.mesh, spec))
        q, k, v = (reshard(x, rows) for x in (q, k, v))
        arrays = {name: reshard(x, specs[name]) for name, x in arrays.items()}
    outputs = local(q, k, v, arrays)
    return jax.tree.map(partial(_shortened, length), outputs) if uneven else outputs


@overload
def sharded_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ShardOptions],
) -> Array: ...
@overload
def sharded_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[ShardOptions],
) -> tuple[Array, Array]: ...
@overload
def sharded_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[ShardOptions],
) -> Array | tuple[Array, Array]: ...
def sharded_attention(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K Hv"],
    *,
    axis: str | tuple[str, ...],
    strategy: Strategy = "ring",
    layout: Layout = "contiguous",
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    q_segment_ids: Int[AnyArray, "B T"] | None = None,
    kv_segment_ids: Int[AnyArray, "B S"] | None = None,
    q_positions: Int[AnyArray, "B T"] | None = None,
    kv_positions: Int[AnyArray, "B S"] | None = None,
    softcap: float | None = None,
    sinks: Float[AnyArray, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Integer | AnyArray | None = None,
    broadcast_dropout: bool = False,
    shard_axes: tuple[MeshAxes, MeshAxes] | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    differentiable: Differentiable = "reverse",
    backend: BackendName = "auto",
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes one device's part of `context_parallel_attention`, inside `jax.shard_map`.

    Args:
        q: queries of this device, [B, T, N, H].
        k: keys of this device, [B, T, K, H].
        v: values of this device, [B, T, K, Hv].
        axis: the mesh axis that shards the sequence, or a tuple of axes.
        strategy: as in `context_parallel_attention`.
        layout: as in `context_parallel_attention`.
        causal: as in `flash_attention`. This and all other masks use positions in the whole
            sequence.
        window: as in `flash_attention`.
        scale: as in `flash_attention`.
        q_segment_ids: as in `flash_attention`, for this device's queries, [B, T].
        kv_segment_ids: as in `flash_attention`, for this device's keys, [B, T].
        q_positions: as in `context_parallel_attention`, for this device's queries, [B, T].
        kv_positions: as in `context_parallel_attention`, for this device's keys, [B, T].
        softcap: as in `flash_attention`.
        sinks: as in `flash_attention`, for this device's heads, [N].
        dropout_rate: as in `flash_attention`, with the same weights dropped.
        dropout_seed: as in `flash_attention`.
        broadcast_dropout: as in `flash_attention`.
        shard_axes: as in `flash_attention`.
        deterministic: as in `flash_attention`.
        precision: as in `flash_attention`.
        differentiable: as in `flash_attention`. With "any", the gradient of a ring stores the keys
            of all devices on each device, as "all_gather" does.
        backend: as in `flash_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        o [B, T, N, Hv] in q's dtype, for this device's queries. With return_lse, the pair of o and
        lse [B, N, T] in float32.

    Raises:
        Exception: the same exceptions as `context_parallel_attention`.
    """
    _check("strategy", strategy, STRATEGIES)
    _check("layout", layout, LAYOUTS)
    axis = tuple(axis) if isinstance(axis, list) else axis
    zigzag, shards = layout == "zigzag", shards_around(axis)
    q, k, v = (validate.as_array(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    _check_lengths(q, k)
    if zigzag:
        _check_zigzag(q)
    has_positions = any(
        x is not None for x in (q_positions, kv_positions)
    ) or checks.window_is_data(window)
    if has_positions:
        # Positions in the whole sequence; by default a part's would begin at 0.
        index = local_positions(lax.axis_index(axis), q.shape[1], shards, zigzag)
        index = jnp.broadcast_to(index, q.shape[:2])
        q_positions = index if q_positions is None else q_positions
        kv_positions = index if kv_positions is None else kv_positions
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "softcap": softcap,
        "sinks": sinks,
        "dropout_rate": dropout_rate,
        "dropout_seed": dropout_seed,
        "broadcast_dropout": broadcast_dropout,
        "shard_axes": shard_axes,
        "deterministic": deterministic,
        "precision": precision,
        "differentiable": differentiable,
    }
    if strategy == "ring":
        o, lse = _ring(q, k, v, axis, zigzag, backend, Arguments(**options))
    else:
        strategies = {
            "all_gather": gathered.all_gather_attention,
            "ulysses": gathered.ulysses_attention,
        }
        options["backend"] = backend
        o, lse = strategies[strategy](q, k, v, axis, shards, zigzag, options)
    return (o, lse) if return_lse else o


def _ring(q, k, v, axis, zigzag: bool, backend: str, arguments: Arguments) -> tuple[Any, Any]:
    """Computes (o, lse) by ring attention."""
    dispatch.check_name(backend)
    call = validate.canonicalize(q, k, v, arguments)
    if call.problem.is_empty:
        return call.empty_result()[:2]
    plan = Plan(lax.axis_size(axis), q.shape[1], zigzag, call.spec.mask)
    return ring.attend(ring.Ring(axis, plan, call.spec, backend), call.operands)


def _check(name: str, value, choices):
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(repr, choices))}")


def _lengthened(cuts: Cuts, name: str, x):
    """Pads an array [B, T, ...] so that the devices divide T; other arrays are unchanged."""
    if name in ("sinks", "dropout_seed"):
        return x
    if AxisType.Explicit in cuts.mesh.axis_types:  # only an unsharded axis may have any length
        batch, _, *heads = cuts.spec(name)
        unsharded = PartitionSpec(batch, None, *heads)
        x = jax.sharding.reshard(x, NamedSharding(cuts.mesh, unsharded))
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % cuts.shards(cuts.sequence))
    return jnp.pad(x, padding, constant_values=-1 if name in _IDS else 0)


def _shortened(length: int, x):
    """Cuts o [B, T, N, H] or lse [B, N, T] to this many queries.

    If its type says that the sequence axis is sharded, that axis is gathered.
    """
    axis = 1 if x.ndim == 4 else 2
    sharding = jax.typeof(x).sharding
    if sharding.spec[axis] is not None:
        spec = [None if i == axis else name for i, name in enumerate(sharding.spec)]
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _check_lengths(q, k):
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"q has shape {q.shape} and k {k.shape}: context parallelism wants [batch, length, "
            "heads, head_dim]; fold several batch dimensions into one"
        )
    if q.shape[1] != k.shape[1] or not q.shape[1]:
        raise ValueError(
            f"there are {q.shape[1]} queries and {k.shape[1]} keys: it must be as many of both"
        )


def _check_rows(rows: dict[str, Any], shape) -> None:
    """Checks that ids and positions are [B, T], as the devices cut them."""
    for name, x in rows.items():
        if x.shape != shape:
            raise ValueError(
                f"{name} has shape {x.shape}: it must be [batch, length], here {list(shape)}"
            )


def _check_zigzag(q):
    if q.shape[1] % 2:
        raise ValueError(
            f"a device has {q.shape[1]} tokens and layout is 'zigzag': it must be an even number"
        )
