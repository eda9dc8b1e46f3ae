"""The number of parts into which the fused backward cuts the walk of a key block, if CTAs are few.

A CTA per 128 keys of a key head makes 32 of them at T = 512 with 32 query heads and 8 key heads.
Each walks up to 32 tiles of queries while 100 SMs idle. If walks are cut in four, a CTA walks 8.
Each part writes what it adds to dK and dV in float32, and XLA adds the parts up in their order, so
that dK and dV are the same bits in every run, as without parts.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from ...core.problem import Problem
from .fused_blocks import FusedBlocks

MOST_PARTS = 4  # H200, 32 CTAs: two 1.53 times as fast as one, four 2.03, eight 1.61
# Queries of a walk, over the heads of a group. Adding parts up costs 10 us, as much as a walk of a
# few hundred. H200: 1024 queries in four parts 1.76; 512 in two, without groups, 0.88 to 0.97.
LEAST_QUERIES = 1024


def choose_parts(problem: Problem, blocks: FusedBlocks, num_sms: int) -> int:
    """Returns as many parts as SMs have room for; 1 where key blocks are many or walks short.

    Walks of a causal mask are on average half as long as the longest, which start first: two CTAs
    for each SM fill what the short ones leave, while parts are long. H200, 32 query heads and 8 key
    heads, (batch, T): (1, 2k) two parts are 1.46 times as fast as one, (1, 1k) three 1.88 and two
    1.55, (2, 1k) two 1.19; (4, 512), of 1024 queries a part, 0.95. Without groups no walk gained,
    of 512 to 2k queries: two parts 0.71 to 0.97.

    Args:
        problem: a problem of the head dims that the kernel runs.
        blocks: the blocks of the kernel.
        num_sms: number of SMs, each of which holds one CTA.
    """
    mask = problem.spec.mask
    rows = problem.q_len
    if mask.left is not None and mask.right is not None:
        rows = min(rows, blocks.block_kv + mask.left + mask.right)
    walk = problem.group * rows
    if problem.group == 1 or walk < LEAST_QUERIES:
        return 1
    ctas = problem.batch * problem.kv_heads * -(-problem.kv_len // blocks.block_kv)
    parts = num_sms // ctas
    if mask.right is not None and mask.left is None:
        parts = max(parts, min(2 * num_sms // ctas, (walk - 1) // LEAST_QUERIES))
    return max(1, min(MOST_PARTS, parts))


def summed(parts, like):
    """Returns the sum of the parts of a gradient in their order, in dtype and shape of `like`."""
    keys, columns = like.shape[1], like.shape[3]
    return functools.reduce(jnp.add, parts)[:, :keys, :, :columns].astype(like.dtype)
