"""Block masks that are timed: functions of positions for JAX, PyTorch and NumPy, and lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from flash_pallas import BlockMask

ROWS_AT_ONCE = 512  # when pairs are counted

Mod = Callable[[Any, Any, Any, Any], Any]


def causal(b, n, i, j):
    """Returns what a causal mask shows, as a function of positions."""
    return i >= j


def window(b, n, i, j):
    """Returns what a causal window of 1,024 keys shows."""
    return (i >= j) & (i - j < 1024)


def window_and_global(b, n, i, j):
    """Returns what a causal window of 1,024 keys and 64 global keys show."""
    return (i >= j) & ((i - j < 1024) | (j < 64))


def prefix(b, n, i, j):
    """Returns what a prefix LM shows: 4,096 keys to all queries, and causal."""
    return (i >= j) | (j < 4096)


def documents(ids) -> Mod:
    """Returns the causal mask of packed documents, given an array of each token's document."""
    return lambda b, n, i, j: (ids[i] == ids[j]) & (i >= j)


def of_mod(mod: Mod, length: int, rows: int = 128) -> BlockMask:
    """Returns the block mask of a function of positions, in blocks of so many queries."""
    return BlockMask.from_mask_mod(mod, 1, 1, length, length, block=(rows, 128))


def share(mod: Mod, length: int) -> float:
    """Counts the share of visible pairs."""
    j, total = np.arange(length), 0
    for first in range(0, length, ROWS_AT_ONCE):
        i = np.arange(first, min(first + ROWS_AT_ONCE, length))
        total += int(mod(0, 0, i[:, None], j[None]).sum())
    return total / length**2


def chosen(heads: int, length: int, block: int, most: int, seed: int = 0) -> np.ndarray:
    """Draws different blocks of keys for every head and block of queries, int32 [1, N, Qb, most].

    There are fewer where there are not so many blocks.
    """
    blocks = -(-length // block)
    order = np.random.default_rng(seed).random((heads, blocks, blocks)).argpartition
    count = min(most, blocks)
    found = order(count - 1, axis=-1)[..., :count] if count < blocks else order(0, axis=-1)
    return found.astype(np.int32)[None]


def of_chosen(heads: int, length: int, block: int, most: int) -> BlockMask:
    """Returns the block mask of `chosen` blocks: a selection by top-k, as of video tiles."""
    index, of = chosen(heads, length, block, most), (block, block)
    return BlockMask.from_indices(index, q_len=length, kv_len=length, block=of)


@functools.cache
def random_blocks(length: int, density: float = 0.1, seed: int = 1) -> np.ndarray:
    """Draws which blocks of 128 are visible, bool [blocks, blocks], the diagonal among them."""
    blocks = -(-length // 128)
    found = np.random.default_rng(seed).random((blocks, blocks)) < density
    np.fill_diagonal(found, True)
    return found


def of_random_blocks(length: int) -> BlockMask:
    """Returns the block mask of `random_blocks`, one list for all heads."""
    found = random_blocks(length)
    index = np.where(found, np.arange(len(found)), -1).astype(np.int32)[None, None]
    return BlockMask.from_indices(index, q_len=length, kv_len=length)
