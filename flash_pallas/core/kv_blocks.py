"""Chosen blocks of a KV cache: a decode call that reads no others, as one of a paged cache.

The kernels look pages up in a table anyway. A table for every KV head that names the chosen blocks
alone, in ascending order, is all that they need: keys keep their order, the block in which the keys
end comes last, and a single query that is the last key sees every key that is left.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from . import block_lists
from .decode import DecodeOperands, DecodeSpec


def as_pages(spec: DecodeSpec, operands: DecodeOperands) -> tuple[DecodeSpec, DecodeOperands]:
    """Returns the same call with page tables of heads in place of `kv_blocks`, if it has any.

    A contiguous cache is cut into pages of a block, which copies nothing.
    """
    if operands.kv_blocks is None:
        return spec, operands
    size, (rows, length) = spec.block_size or 0, operands.k.shape[:2]
    table, heads = operands.page_table, operands.k.shape[2]
    room = length if table is None else table.shape[1] * length
    count, number, lengths = _kept(operands, size, room)
    page = size if table is None else length
    if size > page:
        inside = jnp.arange(size // page, dtype=jnp.int32).reshape(1, 1, 1, -1)
        number = (number[..., None] * (size // page) + inside).reshape(*count.shape, -1)
    cache = {name: getattr(operands, name) for name in ("k", "v", "k_scale", "v_scale")}
    if table is None:
        pages = length // page
        number += jnp.arange(rows, dtype=jnp.int32)[:, None, None] * pages
        for name in ("k", "v"):
            x = cache[name]
            cache[name] = x if x is None else x.reshape(rows * pages, page, *x.shape[2:])
        for name in ("k_scale", "v_scale"):
            scale = cache[name]
            if scale is not None and len(scale) > 1:
                cache[name] = jnp.repeat(scale, pages, axis=0)
    else:
        number = jnp.take_along_axis(table[:, None], number, axis=-1, mode="clip")
    operands = operands._replace(
        **cache,
        kv_blocks=None,
        kv_lengths=jnp.broadcast_to(lengths, (len(lengths), heads)),
        page_table=jnp.broadcast_to(number, (len(number), heads, number.shape[-1])),
    )
    return dataclasses.replace(spec, page_size=page, block_size=None), operands


def _kept(operands: DecodeOperands, size: int, room: int):
    """Returns (number of blocks, their numbers, number of keys in them) for entries and heads.

    Blocks ascend; what is no number of a block with keys, or repeated, is left out.

    Args:
        operands: with `kv_blocks`.
        size: keys in a block.
        room: keys that there is room for.
    """
    length = jnp.clip(operands.kv_lengths, 0, room)[:, None]
    last = (length - 1) // size
    index = jnp.where(operands.kv_blocks <= last[..., None], operands.kv_blocks, -1)
    lists = block_lists.of_indices(index[:, :, None], block_lists.WHOLE, -(-room // size))[:, :, 0]
    count, number = lists[..., 1], lists[..., block_lists.COUNTS :]
    at_end = jnp.max(index, axis=-1) == last  # the last block is the one in which the keys end
    missing = jnp.where(at_end & (count > 0), (last + 1) * size - length, 0)
    return count, number, count * size - missing
