"""Parts shared by the linen and nnx layers: sizes, their checks, axis names and arithmetic."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core.rope import wide_dtype

# Logical axis names. Key/value heads have their own: with GQA there are fewer of them,
# and a mesh axis that divides the query heads need not divide these.
QUERY_AXES = ("embed", "heads", "kv")
KEY_VALUE_AXES = ("embed", "kv_heads", "kv")
OUT_AXES = ("heads", "kv", "embed")
NORM_AXES = ("kv",)
SINK_AXES = ("heads",)

# The suffix of the parameters' names; "ln" is what Flax calls the same parameters.
NORM_SUFFIX = {"rms": "norm", "layer": "ln"}
NORM_EPSILON = 1e-6

_LECUN = jax.nn.initializers.lecun_normal()


def lecun_normal(key, shape, dtype):
    """Calls the initializer of this name; pickle finds this function, so layers can be pickled."""
    return _LECUN(key, shape, dtype)


# Flax's defaults.
KERNEL_INIT = lecun_normal
BIAS_INIT = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of a layer's projections; see `resolve`."""

    query: int
    key_value: int
    dim: int
    out_features: int


def resolve(layer, features: int) -> Heads:
    """Returns the sizes that a layer's fields ask for, checked.

    Args:
        layer: has num_heads, num_kv_heads, head_dim, out_features, qk_norm, rope_theta.
        features: number of features of the input.

    Raises:
        ValueError: fields that contradict each other.
    """
    num_heads = layer.num_heads
    num_kv_heads = num_heads if layer.num_kv_heads is None else layer.num_kv_heads
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a positive multiple of num_kv_heads ({num_kv_heads})."
        )
    if layer.head_dim is None and features % num_heads:
        raise ValueError(
            f"features ({features}) must be a multiple of num_heads ({num_heads}); or set head_dim."
        )
    head_dim = features // num_heads if layer.head_dim is None else layer.head_dim
    if head_dim < 1:
        raise ValueError(
            f"head_dim is {head_dim}: it must be positive, or None for features / num_heads"
        )
    if layer.rope_theta is not None and head_dim % 2:
        raise ValueError(f"rope_theta needs an even head_dim, got {head_dim}.")
    theta = layer.rope_theta
    is_number = isinstance(theta, (int, float, np.number)) and not isinstance(theta, bool)
    if theta is not None and not (is_number and 0 < theta < math.inf):
        raise ValueError(
            f"rope_theta is {theta!r}: it must be a positive number, as 10000.0, or None for no "
            "rotation"
        )
    if layer.qk_norm not in (None, *NORM_SUFFIX):
        raise ValueError(f"qk_norm must be None, 'rms' or 'layer', got {layer.qk_norm!r}.")
    out_features = features if layer.out_features is None else layer.out_features
    return Heads(num_heads, num_kv_heads, head_dim, out_features)


def flat_init(init, contracted: int):
    """Wraps `init` to see a kernel as a matrix, with the true fan-in and fan-out.

    Args:
        init: a jax.nn initializer, or any function of (key, shape, dtype).
        contracted: number of leading dimensions of the kernel that are summed over.
    """

    def initializer(key, shape, dtype):
        matrix = (math.prod(shape[:contracted]), math.prod(shape[contracted:]))
        return init(key, matrix, dtype).reshape(shape)

    return initializer


def project(x, kernel, bias, contracted: int, dtype=None, sharded_like=None):
    """Sums the last `contracted` dimensions of x against the first of kernel, and adds bias.

    Args:
        x: [..., *inputs].
        kernel: [*inputs, *outputs].
        bias: [*outputs] or None.
        contracted: len(inputs).
        dtype: dtype to compute in; None is the promoted dtype of the arrays.
        sharded_like: [..., features]: on a mesh with Explicit axes the result is sharded like this
            array. None where JAX infers the sharding. It cannot where x and kernel are both sharded
            along `inputs`, as in the projection of heads that tensor parallelism divides.

    Returns:
        [..., *outputs].
    """
    arrays = [x, kernel] if bias is None else [x, kernel, bias]
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    inputs = tuple(range(x.ndim - contracted, x.ndim))
    dimensions = ((inputs, tuple(range(contracted))), ((), ()))
    sharding = None if sharded_like is None else _explicit_sharding(sharded_like, kernel.shape[-1])
    y = lax.dot_general(x.astype(dtype), kernel.astype(dtype), dimensions, out_sharding=sharding)
    if bias is not None:
        if sharding is not None:
            bias = jax.sharding.reshard(bias, sharding.update(spec=sharding.spec[-1:]))
        y += bias.astype(dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return y


def _explicit_sharding(sharded_like, features: int) -> NamedSharding | None:
    """Returns the sharding of this array [..., any] for one with this number of features.

    It is None if no mesh axis is Explicit: the type of an array then does not tell its sharding.
    """
    sharding = jax.typeof(sharded_like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    *lead, last = sharding.spec
    names = () if last is None else last if isinstance(last, tuple) else (last,)
    divided = features % math.prod(sharding.mesh.shape[name] for name in names) == 0
    return sharding.update(spec=PartitionSpec(*lead, last if divided else None))


def normalize(x, scale, kind: str):
    """Applies RMS ("rms") or layer ("layer") normalization to each head.

    Statistics are computed in float32 or wider.

    Args:
        x: [..., head_dim].
        scale: [head_dim].
        kind: "rms" or "layer".

    Returns:
        An array of x's shape and dtype.
    """
    wide = x.astype(wide_dtype(x.dtype))
    if kind == "layer":
        wide -= wide.mean(axis=-1, keepdims=True)
    wide *= lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + NORM_EPSILON)
    wide *= scale.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)
    return wide.astype(x.dtype)
