"""Block masks that tests draw by name, for a Case of tests/cases.py."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from flash_pallas import BlockMask


def _window_and_global(batch, heads, q_len, kv_len, rng):
    """Shows a sliding window and the first keys: window attention with global tokens."""
    near = lambda b, n, i, j: (j <= i) & ((i - j < 100) | (j < 40))
    return BlockMask.from_mask_mod(near, 1, 1, q_len, kv_len)


def _tall(batch, heads, q_len, kv_len, rng):
    """Shows a prefix and a causal mask by blocks of 192 queries."""
    prefix = lambda b, n, i, j: (j <= i) | (j < 40)
    return BlockMask.from_mask_mod(prefix, 1, 1, q_len, kv_len, block=(192, 128))


def _prefix_of_heads(batch, heads, q_len, kv_len, rng):
    """Shows a prefix whose length is an array's, for each entry and head."""
    prefix = jnp.asarray(rng.integers(0, kv_len, (batch, heads[0])), jnp.int32)
    mod = lambda b, n, i, j: (j <= i) | (j < prefix[b, n])
    return BlockMask.from_mask_mod(mod, batch, heads[0], q_len, kv_len, block=(64, 64))


def _documents(batch, heads, q_len, kv_len, rng):
    """Shows to each query its document, by ids of queries and of keys that are looked up."""
    of_q, of_kv = (jnp.asarray(np.sort(rng.integers(0, 4, (batch, n)))) for n in (q_len, kv_len))
    same = lambda b, n, i, j: (of_q[b, i] == of_kv[b, j]) & (j <= i + 40)
    return BlockMask.from_mask_mod(same, batch, 1, q_len, kv_len)


def _dense(batch, heads, q_len, kv_len, rng):
    """Shows what an array does: empty, partial and whole blocks, queries that see nothing."""
    blocks = rng.integers(0, 3, (batch, 1, -(-q_len // 128), -(-kv_len // 128)))
    share = np.repeat(np.repeat(blocks / 2, 128, 2), 128, 3)[:, :, :q_len, :kv_len]
    return BlockMask.from_dense(jnp.asarray(rng.random(share.shape) < share))


def _listed(block: tuple[int, int], entries: bool, which: int | None) -> Callable:
    """Returns a recipe of lists: some empty, some whole, with repeated numbers and -1.

    Args:
        block: (queries, keys) of a block.
        entries: each batch entry has lists of its own.
        which: 0, lists for query heads; 1, for KV heads; None, for all alike.
    """

    def recipe(batch, heads, q_len, kv_len, rng):
        q_blocks, kv_blocks = -(-q_len // block[0]), -(-kv_len // block[1])
        leading = batch if entries else 1, 1 if which is None else heads[which]
        index = rng.integers(-1, kv_blocks, (*leading, q_blocks, kv_blocks + 1)).astype(np.int32)
        counts = rng.integers(0, kv_blocks + 2, (*leading, q_blocks)).astype(np.int32)
        counts[:, -1, 0] = 0
        index[:, 0, -1] = np.append(np.arange(kv_blocks), 0)
        counts[:, 0, -1] = kv_blocks + 1
        return BlockMask.from_indices(index, counts, q_len=q_len, kv_len=kv_len, block=block)

    return recipe


RECIPES = {
    "window and global": _window_and_global,
    "prefix": _prefix_of_heads,
    "documents": _documents,
    "dense": _dense,
    "listed": _listed((128, 128), False, None),
    "listed by heads": _listed((128, 128), True, 0),
    "listed by KV heads": _listed((128, 128), False, 1),
    "small blocks by heads": _listed((64, 64), True, 0),
    "small blocks": _listed((64, 64), False, None),
    "tall blocks of a mask_mod": _tall,
    "tall blocks": _listed((192, 64), True, None),
}


def make(name: str, batch: int, heads: tuple[int, int], q_len: int, kv_len: int, seed: int):
    """Returns the block mask of a recipe, for (query heads, KV heads)."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return RECIPES[name](batch, heads, q_len, kv_len, rng)
