"""The user's functions and block masks among the arguments of a call, checked and traced."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core import block_mask, mods, scores
from ..core.block_mask import AUTOMATIC_BLOCK, BlockMask
from .arguments import Arguments, Sizes, is_array, per_query_head


def of_call(a: Arguments, sizes: Sizes, positions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of AttentionSpec and of Operands that score_mod, mask_mod, block_mask set.

    `positions` are those of queries and of keys, as `mods.trace` has them.
    """
    spec: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    if a.block_mask is not None:
        arrays["block_lists"], spec["block_shape"] = _lists(a, sizes), a.block_mask.block
    if (score_mod := mod("score_mod", a.score_mod, sizes)) is not None:
        spec["score_mod"], arrays["score_params"] = score_mod.mod, score_mod.params
    mask_mod = mod("mask_mod", a.mask_mod, sizes, positions)
    if (own_lists := _lists_of_mod(a, mask_mod, sizes)) is not None:
        arrays["block_lists"], spec["block_shape"] = own_lists, AUTOMATIC_BLOCK
    if (mask_mod := _with_block_mod(a, mask_mod, sizes)) is not None:
        spec["mask_mod"], arrays["mask_params"] = mask_mod.mod, mask_mod.params
        arrays |= marks(mask_mod)
    return spec, arrays


def mod(name: str, function, sizes: Sizes, positions=None) -> mods.Traced | None:
    """Traces a user's function; None without one.

    `positions` are those of queries and of keys, as `mods.trace` has them.
    """
    if function is None:
        return None
    if not callable(function):
        raise TypeError(f"{name} must be a function, got {function!r}")
    dtype = sizes.score_dtype if name == "score_mod" else None
    try:
        shape, wide = (sizes.batch, sizes.q_heads), sizes.dtype == jnp.float64
        traced = mods.trace(function, *shape, dtype, sizes.first, positions, wide)
    except mods.NotElementwise as error:
        # JAX's own error, if there is one, shows the line of the user's function.
        raise ValueError(f"{name} cannot be traced into a kernel: {error}") from error.__cause__
    return _of_call(traced, sizes)


def _of_call(traced: mods.Traced, sizes: Sizes) -> mods.Traced:
    """Repeats what a traced function reads for every batch entry and query head of a call."""
    entries, full = sizes.batch, (sizes.batch, sizes.q_heads)
    params = (jnp.broadcast_to(per_query_head(x, sizes), full) for x in traced.params)
    vectors = (jnp.broadcast_to(x, (entries, x.shape[1])) for x in traced.vectors)
    return dataclasses.replace(traced, params=tuple(params), vectors=tuple(vectors))


def marks(traced: mods.Traced) -> dict[str, Any]:
    """Returns a mask_mod's vectors by the names of Operands.

    Raises:
        ValueError: there are more than two of queries, or of keys.
    """
    for side, index_name in enumerate(("i, the query", "j, the key")):
        if (count := traced.mod.vectors.count(side)) > len(scores.MARKS[side]):
            raise ValueError(
                f"mask_mod looks up {count} values by {index_name}: at most "
                f"{len(scores.MARKS[side])}; combine them into one array before the call, as in "
                "array = 2 * ids + flags"
            )
    return dict(zip(scores.marks(traced.mod), traced.vectors, strict=True))


def _lists(a: Arguments, sizes: Sizes):
    """Checks a block mask and returns its lists, int32[B or 1, N or 1, Q blocks, 2 + M].

    Where the call hides keys by a mask or a mask_mod of its own, no block is whole.

    Raises:
        TypeError: no BlockMask.
        ValueError: it does not fit the call.
    """
    blocks = a.block_mask
    if not isinstance(blocks, BlockMask):
        type_name = (
            "an array" if is_array(blocks) else f"{type(blocks).__module__}.{type(blocks).__name__}"
        )
        raise TypeError(
            f"block_mask must be a flash_pallas.BlockMask, got {type_name}: make one by "
            "BlockMask.from_mask_mod, from_indices or from_dense"
        )
    blocks.check(sizes.q_len, sizes.kv_len, sizes.batch, (sizes.q_heads, sizes.kv_heads))
    places = {name: getattr(a, name) for name in ("q_offset", "q_positions", "kv_positions")}
    moved = [name for name, x in places.items() if x is not None and not _is_zero(x)]
    if moved and blocks.traced is not None:
        value = places[moved[0]]
        raise ValueError(
            f"{moved[0]} is {'an array' if is_array(value) else value} and block_mask was made "
            "from a mask_mod, whose positions are those of the arrays. Put the offset into the "
            "mask_mod, as in lambda b, n, i, j: f(b, n, i + offset, j), and what is causal too"
        )
    lists = per_query_head(blocks.lists, sizes)
    if a.mask is None and a.mask_mod is None:
        return lists
    return lists.at[..., 0].set(lists[..., 1])


def _lists_of_mod(a: Arguments, traced: mods.Traced | None, sizes: Sizes):
    """Returns the lists of a mask_mod that reads positions alone, where they pay; or None.

    A block mask of a function counts from 0, so there is none where positions do not.
    """
    moved = [x for x in (a.q_offset, a.q_positions, a.kv_positions, a.within) if x is not None]
    if traced is None or a.block_mask is not None or any(not _is_zero(x) for x in moved):
        return None
    lengths = sizes.q_len, sizes.kv_len
    if traced.params or traced.vectors or not block_mask.is_looked_at(*lengths):
        return None
    lists, empty = block_mask.lists_of_positions(traced.mod, *lengths)
    if empty < block_mask.LEAST_EMPTY:
        return None
    if a.mask is not None:  # it may hide keys of any block, so none is whole
        lists = np.concatenate([lists[..., 1:2], lists[..., 1:]], axis=-1)
    return jnp.asarray(lists)


def _with_block_mod(a: Arguments, traced: mods.Traced | None, sizes: Sizes) -> mods.Traced | None:
    """Returns the mask_mod of a call, joined with that of its block mask, each if there is one."""
    if a.block_mask is None or a.block_mask.traced is None:
        return traced
    of_blocks = _of_call(a.block_mask.traced, sizes)
    return of_blocks if traced is None else mods.joined(operator.and_, of_blocks, traced)


def _is_zero(x) -> bool:
    return isinstance(x, (int, np.integer)) and x == 0
