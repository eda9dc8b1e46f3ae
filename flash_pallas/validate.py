"""From what the user wrote to what a backend reads. Every TypeError and ValueError is raised here.

Layout: q [*B, T, N, H], k [*B, S, K, H], v [*B, S, K, Hv], any number of leading batch dimensions.
Positions: query i sits at q_offset + i, key j at j, so q_offset = 0 aligns the first query with the
first key and q_offset = S - T the last query with the last key.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .core.mask import Mask
from .core.problem import AttentionSpec, Operands, Problem, describe

DTYPES = ("bfloat16", "float16", "float32", "float64")

# Positions are int32 inside the kernels, and sums of an offset and a length must not wrap.
MAX_OFFSET = 2**30


@dataclasses.dataclass(frozen=True)
class Call:
    """One call in canonical form.

    Attributes:
        spec: what is computed.
        operands: on what; the batch dimensions folded into one.
        problem: the shapes of both.
        batch_shape: the user's batch dimensions, to be restored by `unfold`.
    """

    spec: AttentionSpec
    operands: Operands
    problem: Problem
    batch_shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """There is no query or no key: the answer is known without a backend."""
        return 0 in (self.problem.batch, self.problem.q_len, self.problem.kv_len)

    def empty_result(self):
        """(o, lse) of an empty call, unfolded: rows without keys."""
        p = self.problem
        lse_dtype = jnp.float64 if p.dtype == jnp.float64 else jnp.float32
        o = jnp.zeros((*self.batch_shape, p.q_len, p.q_heads, p.v_head_dim), p.dtype)
        return o, jnp.full((*self.batch_shape, p.q_heads, p.q_len), -jnp.inf, lse_dtype)

    def unfold(self, o, lse):
        """The outputs with the user's batch dimensions."""
        if len(self.batch_shape) == 1:
            return o, lse
        o, lse = (x.reshape(*self.batch_shape, *x.shape[1:]) for x in (o, lse))
        return o, lse


def canonicalize(q, k, v, *, causal, scale, q_offset, deterministic) -> Call:
    """Check the arguments of `flash_attention` and put them in canonical form.

    Raises:
        TypeError: an argument of the wrong kind or dtype, or traced where it must be static.
        ValueError: shapes that do not fit together, or a value out of range.
        NotImplementedError: a floating dtype that no backend takes.
    """
    q, k, v = _array("q", q), _array("k", k), _array("v", v)
    _check_dtypes(q, k, v)
    _check_shapes(q, k, v)
    causal = _flag("causal", causal)
    batch_shape = q.shape[:-3]
    static_offset, traced_offset = _offset(q_offset, batch_shape)
    if not causal:  # Without a mask positions mean nothing, and one compiled call serves them all.
        static_offset, traced_offset = 0, None
    q, scale = _positive_scale(q, _scale(scale, q.shape[-1]))
    spec = AttentionSpec(
        scale=scale,
        mask=Mask.causal() if causal else Mask(),
        q_offset=static_offset,
        deterministic=_flag("deterministic", deterministic),
    )
    batch = math.prod(batch_shape)
    fold = lambda x: x if len(batch_shape) == 1 else x.reshape(batch, *x.shape[len(batch_shape) :])
    offset = None if traced_offset is None else traced_offset.reshape(batch)
    operands = Operands(fold(q), fold(k), fold(v), offset)
    return Call(spec, operands, describe(operands, spec), batch_shape)


def check_blocks(blocks) -> dict[str, Any] | None:
    """The tile sizes asked for, as a dict.

    Raises:
        TypeError: not a mapping from field names.
    """
    if blocks is None:
        return None
    if not isinstance(blocks, Mapping) or not all(isinstance(name, str) for name in blocks):
        raise TypeError(
            f"blocks must be None or a dict such as {{'block_q': 128}}, got {blocks!r}; "
            "flash_pallas.explain(q, k, v) shows the fields and what would run"
        )
    return dict(blocks)


def _array(name: str, x):
    is_array = isinstance(x, (jax.Array, np.ndarray, np.generic)) or hasattr(x, "__jax_array__")
    if not is_array:
        raise TypeError(
            f"{name} must be an array, got {type(x).__name__}: convert it with jnp.asarray({name})"
        )
    return jnp.asarray(x)


def _check_dtypes(q, k, v):
    dtypes = {"q": q.dtype, "k": k.dtype, "v": v.dtype}
    for name, dtype in dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{name} has dtype {dtype}: attention takes {', '.join(DTYPES)}; "
                f"cast with {name}.astype(jnp.bfloat16)"
            )
        if dtype.name not in DTYPES:
            raise NotImplementedError(
                f"{name} has dtype {dtype}: supported are {', '.join(DTYPES)}; "
                f"cast with {name}.astype(jnp.bfloat16)"
            )
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"q, k and v must have one dtype, got {found}: cast them to the same")


def _check_shapes(q, k, v):
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            f"q, k and v must have the same rank, got {q.ndim}, {k.ndim} and {v.ndim} ({shapes}): "
            "add the missing batch dimensions, as in k[None]"
        )
    if q.ndim < 3:
        raise ValueError(
            f"q has shape {q.shape}: expected [*batch, length, heads, head_dim], at least rank 3; "
            "for one head insert its axis, as in q[:, None, :]"
        )
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"the batch dimensions differ ({shapes}): repeat the smaller with jnp.broadcast_to, "
            "or share it between calls with jax.vmap(..., in_axes=(0, None, None))"
        )
    _check_sizes(q.shape[-3:], k.shape[-3:], v.shape[-3:])


def _check_sizes(q, k, v):
    """Of the last three dimensions: length, heads, head_dim."""
    for name, (_, heads, head_dim) in {"q": q, "k": k, "v": v}.items():
        if heads < 1 or head_dim < 1:
            raise ValueError(
                f"{name} has {heads} heads of head_dim {head_dim}: both must be positive; "
                "its layout is [*batch, length, heads, head_dim]"
            )
    if k[0] != v[0]:
        raise ValueError(f"k has length {k[0]} and v length {v[0]}: each key needs its value")
    if k[1] != v[1]:
        raise ValueError(f"k has {k[1]} heads and v {v[1]}: the number of heads must be the same")
    if q[1] % k[1]:
        raise ValueError(
            f"q has {q[1]} heads and k {k[1]}: the first must be a multiple of the second "
            "(grouped-query attention); the layout is [*batch, length, heads, head_dim]"
        )
    if q[2] != k[2]:
        raise ValueError(
            f"q has head_dim {q[2]} and k head_dim {k[2]}: they must be equal (v may differ)"
        )


def _flag(name: str, value) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{name} is an array, but it must be static, a Python bool: under jax.jit list it in "
            "static_argnames"
        )
    raise TypeError(f"{name} must be a bool, got {value!r} of type {type(value).__name__}")


def _scale(scale, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(
            "scale is traced, but it must be static: multiply q by it instead and pass scale=1.0, "
            "or list it in static_argnames"
        )
    is_number = isinstance(scale, (int, float, np.number, np.ndarray, jax.Array))
    if not is_number or isinstance(scale, bool) or np.ndim(scale) or not np.isrealobj(scale):
        raise TypeError(f"scale must be a Python number or None, got {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}; None is 1 / sqrt(head_dim)")
    return float(scale)


def _positive_scale(q, scale: float):
    """The same scores with a positive scale: the running maximum is taken before scaling."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (jnp.zeros_like(q), 1.0)


def _offset(q_offset, batch_shape: tuple[int, ...]):
    """(int, None) for an offset known now, (0, int32[*B]) for an array."""
    if isinstance(q_offset, (jax.Array, np.ndarray)):
        return 0, _offset_array(jnp.asarray(q_offset), batch_shape)
    try:
        offset = operator.index(q_offset)
    except TypeError:
        offset = None
    if offset is None or isinstance(q_offset, (bool, np.bool_)):
        raise TypeError(
            f"q_offset must be an int or an int32 array of the batch's shape, got {q_offset!r}"
        )
    if abs(offset) > MAX_OFFSET:
        raise ValueError(f"q_offset is {offset}: its magnitude must be at most 2**30")
    return offset, None


def _offset_array(q_offset, batch_shape):
    if q_offset.dtype != jnp.int32:
        raise TypeError(
            f"q_offset has dtype {q_offset.dtype}: it must be int32; "
            "cast with q_offset.astype(jnp.int32)"
        )
    if q_offset.shape not in ((), batch_shape):
        raise ValueError(
            f"q_offset has shape {q_offset.shape}: it must be one per batch entry, {batch_shape}, "
            "or a scalar for all"
        )
    return jnp.broadcast_to(q_offset, batch_shape)
