"""A program in the manner of docs/block-masks.md."""

from typing import assert_type

import jax
import numpy as np

from flash_pallas import BlockMask, flash_attention, flash_attention_with_lse


@jax.jit
def prefix_lm(q: jax.Array, prefix: jax.Array) -> tuple[jax.Array, BlockMask]:
    mask = BlockMask.from_mask_mod(lambda b, n, i, j: (j <= i) | (j < prefix[b]), 2, 1, 512, 512)
    return flash_attention(q, q, q, block_mask=mask), mask


def sparse(x: jax.Array, chosen: jax.Array, near: np.ndarray) -> jax.Array:
    mask = BlockMask.from_indices(chosen, q_len=1024, kv_len=1024, block=(64, 64))
    mask &= BlockMask.from_dense(near)
    assert_type(mask, BlockMask)
    assert_type(mask.sparsity, float)
    assert_type(mask.lists, jax.Array)
    print(mask.plot(head=1))
    o, lse = flash_attention_with_lse(x, x, x, causal=True, block_mask=mask)
    return o + lse.mean() + mask.to_dense().sum()


def wrong(x: jax.Array, mask: BlockMask) -> None:
    BlockMask.from_mask_mod(lambda i, j: j <= i, 1, 1, 512, 512)  # error
    BlockMask.from_indices(x, 1024, 1024)  # error
    BlockMask.from_dense([[True]])  # error
    flash_attention(x, x, x, block_mask=x)  # error
    flash_attention(x, x, x, block_mask=mask.plot())  # error
