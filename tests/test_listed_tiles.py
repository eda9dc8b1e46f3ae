"""Tiles that kernels choose divide the blocks of lists, whatever else a call has.

A kernel reads a list's entries as tiles of its own. One whose tiles do not divide the blocks reads
other keys than the list names, and nothing in it can notice.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backend import SplitBlocks
from flash_pallas.backends.hopper.backward.split.tiles import DkvBlocks
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe

BLOCKS = list(itertools.product((64, 128, 192, 256, 320, 384), (64, 128)))
HEAD_DIMS = (16, 40, 64, 80, 96, 128, 192, 256)
LENGTH = 1024
ROWS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
# Arrays, and what is static.
FEATURES = (
    ({}, {}),
    ({}, {"mask": Mask(right=0)}),
    ({}, {"mask": Mask(left=200, right=0)}),
    ({}, {"softcap": 30.0}),
    ({}, {"deterministic": True}),
    ({"dropout_keys": jax.ShapeDtypeStruct((2, 4), jnp.uint32)}, {"dropout_rate": 0.1}),
    ({"sinks": jax.ShapeDtypeStruct((2, 4), jnp.float32)}, {}),
    ({"q_segments": ROWS, "kv_segments": ROWS}, {}),
)


def problems(block):
    """Yields a problem of each head dim, dtype and set of features."""
    lists = jax.ShapeDtypeStruct((1, 1, -(-LENGTH // block[0]), 2 + LENGTH // block[1]), jnp.int32)
    dtypes = "bfloat16", "float16", "float32"
    for head_dim, dtype, (arrays, static) in itertools.product(HEAD_DIMS, dtypes, FEATURES):
        x = jax.ShapeDtypeStruct((2, LENGTH, 4, head_dim), dtype)
        operands = Operands(x, x, x, block_lists=lists, **arrays)
        yield describe(operands, AttentionSpec(scale=0.1, block_shape=block, **static))


def wrong(problem, blocks):
    """Yields the kernels whose tiles do not divide the blocks."""
    if not problem.takes_tiles(blocks.forward.tile_rows, blocks.forward.block_kv):
        yield blocks.forward
    backward = blocks.backward
    for kernel in vars(backward).values() if isinstance(backward, SplitBlocks) else [backward]:
        joins = isinstance(kernel, DkvBlocks)  # may take two blocks of queries a step
        takes = joins and kernel.suits(problem)
        if not (takes or problem.takes_tiles(kernel.block_q, kernel.block_kv)):
            yield kernel


@pytest.mark.thorough(always=["(192, 128)-132-True", "(64, 64)-2-True", "(320, 64)-2-False"])
@pytest.mark.parametrize("trades_registers", [True, False])
@pytest.mark.parametrize("num_sms", [2, 132])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_hopper(block, num_sms, trades_registers):
    backend = HopperBackend(interpret=True, num_sms=num_sms, trades_registers=trades_registers)
    taken = [problem for problem in problems(block) if not backend.attention.refusal(problem)]
    assert len(taken) > 100
    for problem in taken:
        assert not list(wrong(problem, backend.attention.plan(problem))), problem
