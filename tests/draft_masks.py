"""Draft masks of decoding for tests: trees of proposals, and masks that no tree has."""

from __future__ import annotations

import numpy as np

KINDS = ("trees", "any", "others", "chain")


def ancestors(parents) -> np.ndarray:
    """Returns bool[T, T]: draft u is t or an ancestor of t; parents are smaller, -1 has none."""
    mask = np.eye(len(parents), dtype=bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def drawn(rng: np.random.Generator, kind: str, batch: int, tokens: int) -> np.ndarray:
    """Draws bool[batch, tokens, tokens]; the first query of "any" sees no draft.

    Diagonals are True in "trees" and "chain", False in "others" and mixed in "any".
    """
    if kind == "chain":
        return np.tile(np.tri(tokens, dtype=bool), (batch, 1, 1))
    if kind == "any":
        mask = rng.random((batch, tokens, tokens)) < 0.4
        mask[:, 0] = False
        return mask
    # Roots are rare, and parents near, so that some branches are deep.
    parents = [[max(-1, t - int(rng.geometric(0.4))) for t in range(tokens)] for _ in range(batch)]
    trees = np.stack([ancestors(each) for each in parents])
    return trees & ~np.eye(tokens, dtype=bool) if kind == "others" else trees


def seen(mask: np.ndarray, lengths, keys: int, window=None):
    """Returns what a dense mask and positions would be, from their definitions, one by one.

    Args:
        mask: bool[B, T, T].
        lengths: number of keys of each sequence, drafts included, those without room too.
        keys: number of keys that there is room for.
        window: positions before its own that a query sees, one number or one for each sequence.

    Returns:
        (bool[B, 1, T, keys], int32[B, T] positions of queries, int32[B, keys] those of keys).
    """
    batch, tokens, _ = mask.shape
    windows = np.broadcast_to(keys if window is None else window, (batch,))
    shown = np.zeros((batch, 1, tokens, keys), bool)
    of_queries = np.zeros((batch, tokens), np.int32)
    of_keys = np.tile(np.arange(keys, dtype=np.int32), (batch, 1))
    for b, length in enumerate(lengths):
        first = int(length) - tokens
        for t in range(tokens):
            of_queries[b, t] = first + sum(bool(mask[b, t, u]) for u in range(tokens) if u != t)
            if 0 <= first + t < keys:
                of_keys[b, first + t] = of_queries[b, t]
        for t in range(tokens):
            for key in range(min(int(length), keys)):
                allowed = key < first or mask[b, t, key - first]
                shown[b, 0, t, key] = allowed and (of_queries[b, t] - of_keys[b, key] <= windows[b])
    return shown, of_queries, of_keys
