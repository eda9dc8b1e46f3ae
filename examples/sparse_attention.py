"""Sparse attention by block masks: MoBA, native sparse attention, and video tiles.

    python examples/sparse_attention.py

Each function is attention as a model would call it, differentiable in q, k and v, with lists of
blocks that are chosen from the data under jit. Arrays are [batch, length, heads, head_dim], and
lengths are multiples of the blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import BlockMask, flash_attention, flash_attention_with_lse

BLOCK = 64


def block_means(x):
    """Computes the mean of every block, [B, N, blocks, H], of x [B, T, N, H]."""
    batch, length, heads, width = x.shape
    blocks = x.reshape(batch, length // BLOCK, BLOCK, heads, width)
    return blocks.mean(axis=2, dtype=jnp.float32).swapaxes(1, 2)


def best_blocks(q, k, count: int, always):
    """Chooses blocks of keys for every block of queries, the same for the query heads of a group.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        count: how many blocks each has, fewer where fewer lie in the past.
        always: bool [blocks, blocks], blocks that are chosen whatever their score.

    Returns:
        int32 [B, K, blocks, count], -1 for no block.
    """
    queries, keys = block_means(q), block_means(k)
    batch, heads, blocks, width = keys.shape
    queries = queries.reshape(batch, heads, -1, blocks, width).sum(axis=2)
    scores = jnp.einsum("bnqh,bnkh->bnqk", queries, keys)
    scores = jnp.where(jnp.tri(blocks, dtype=bool)[None, None], scores, -jnp.inf)
    scores = jnp.where(always[None, None], jnp.inf, scores)
    best, chosen = jax.lax.top_k(scores, min(count, blocks))
    return jnp.where(best > -jnp.inf, chosen, -1)


def moba(q, k, v, *, count: int = 4, choose=best_blocks):
    """Computes mixture of block attention (https://arxiv.org/abs/2502.13189).

    Each block of queries sees its own block, causally, and the blocks before it whose mean keys
    match its mean query best.
    """
    length = q.shape[1]
    own = jnp.eye(length // BLOCK, dtype=bool)
    chosen = choose(q, k, count, own)
    mask = BlockMask.from_indices(chosen, q_len=length, kv_len=length, block=(BLOCK, BLOCK))
    return flash_attention(q, k, v, causal=True, block_mask=mask)


def native_sparse(q, k, v, gates, *, count: int = 4, window: int = 128, choose=best_blocks):
    """Computes native sparse attention (https://arxiv.org/abs/2502.11089), for blocks of queries.

    Three branches see means of the blocks in the past, some blocks whole, and a window. They are
    joined by their log-sum-exp, as if one softmax went over all that they see.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        gates: added to the log-sum-exp of each branch, float32 [3, N].
        count: number of blocks that are seen whole.
        window: number of keys before a query that it sees.
        choose: function that chooses the blocks, as `best_blocks` does.
    """
    length, blocks = q.shape[1], q.shape[1] // BLOCK
    means = [block_means(x).swapaxes(1, 2).astype(q.dtype) for x in (k, v)]
    past = lambda b, n, i, j: (j + 1) * BLOCK <= i
    # The first and the own block are always among those that are seen whole.
    always = jnp.eye(blocks, dtype=bool).at[:, 0].set(True)
    chosen = choose(q, k, count, always)
    selected = BlockMask.from_indices(chosen, q_len=length, kv_len=length, block=(BLOCK, BLOCK))
    parts = (
        flash_attention_with_lse(q, *means, mask_mod=past),
        flash_attention_with_lse(q, k, v, causal=True, block_mask=selected),
        flash_attention_with_lse(q, k, v, causal=True, window=(window, 0)),
    )
    outputs, sums = (jnp.stack(x) for x in zip(*parts, strict=True))
    shares = jax.nn.softmax(sums + gates[:, None, :, None], axis=0)
    return jnp.einsum("pbnt,pbtnh->btnh", shares.astype(q.dtype), outputs)


def video_tiles(grid: tuple[int, int, int], reach: int = 1) -> np.ndarray:
    """Returns which tiles of (time, height, width) each tile sees, int32 [1, 1, tiles, most].

    A tile has BLOCK tokens that follow each other, and sees the tiles up to `reach` away.
    """
    place = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 3)
    near = np.abs(place[:, None] - place[None]).max(axis=-1) <= reach
    most = int(near.sum(axis=1).max())
    order = np.argsort(~near, axis=1, kind="stable")[:, :most]
    return np.where(np.take_along_axis(near, order, axis=1), order, -1).astype(np.int32)[None, None]


def video(q, k, v, grid: tuple[int, int, int], *, reach: int = 1):
    """Computes attention of video tokens to the tiles around theirs."""
    length = q.shape[1]
    tiles = video_tiles(grid, reach)
    mask = BlockMask.from_indices(tiles, q_len=length, kv_len=length, block=(BLOCK, BLOCK))
    return flash_attention(q, k, v, block_mask=mask)


def main():
    """Runs each once and prints what it sees."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(x, (1, 384, n, 32)) for x, n in zip(keys, (4, 2, 2), strict=True))
    print("MoBA:", jax.jit(moba)(q, k, v).shape)
    print("NSA:", jax.jit(native_sparse)(q, k, v, jnp.zeros((3, 4))).shape)
    print("video:", video(q, k, v, (3, 2, 1)).shape)


if __name__ == "__main__":
    main()
