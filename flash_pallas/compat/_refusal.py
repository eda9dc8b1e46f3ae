"""Refusal of other libraries' arguments that have no counterpart here."""

from __future__ import annotations

from typing import Any

from ..frontend import validate


def refuse(name: str, value: Any, default: Any, way_out: str) -> None:
    """Raises ValueError, with what to do instead, unless an argument has its default."""
    if value is default or (type(value) is type(default) and value == default):
        return
    raise ValueError(f"{name} is {value!r}, which has no counterpart here: {way_out}")


def check_heads_first(arrays: dict[str, Any], enable_gqa: bool, *, has_heads: bool = True) -> None:
    """Checks queries, keys and values [*batch, heads, length, head_dim], by their names.

    Args:
        arrays: the three arrays by name.
        enable_gqa: whether keys may have fewer heads than queries.
        has_heads: whether the arrays have an axis of heads.

    Raises:
        TypeError: an argument is not an array.
        ValueError: the arrays do not fit together, or heads differ without `enable_gqa`.
    """
    shapes = [tuple(validate.as_array(name, x).shape) for name, x in arrays.items()]
    described = ", ".join(f"{name} {shape}" for name, shape in zip(arrays, shapes, strict=True))
    query, key, value = arrays
    layout = f"the layout is [*batch, {'heads, ' * has_heads}length, head_dim]"
    if min(map(len, shapes)) < 3 or len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"{query}, {key} and {value} must have the same rank, at least 3, got {described}: "
            f"{layout}"
        )
    q, k, v = shapes if has_heads else [(*x[:-2], 1, *x[-2:]) for x in shapes]
    if not q[:-3] == k[:-3] == v[:-3]:
        raise ValueError(
            f"the batch dimensions differ ({described}): repeat the smaller with jnp.broadcast_to; "
            f"{layout}"
        )
    if k[-3:-1] != v[-3:-1]:
        raise ValueError(
            f"{key} and {value} differ in heads or length ({described}): each key needs its value; "
            f"{layout}"
        )
    if q[-1] != k[-1]:
        raise ValueError(
            f"{query} and {key} differ in head_dim ({described}): it must be the same; {layout}"
        )
    if q[-3] != k[-3] and not enable_gqa:
        raise ValueError(
            f"{query} has {q[-3]} heads and {key} {k[-3]}: pass enable_gqa=True, or check that "
            f"{layout}"
        )
    if k[-3] == 0 or q[-3] % k[-3]:
        raise ValueError(
            f"{query} has {q[-3]} heads and {key} {k[-3]}: the first must be a multiple of the "
            f"second; {layout}"
        )
