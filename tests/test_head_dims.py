"""Head dims that the Hopper kernels run as they are, that TMA fills up, and that are padded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.launch import native_backward_problem
from flash_pallas.backends.hopper.backward.split.tiles import HEAD_DIMS, native_head_dim
from flash_pallas.backends.hopper.common.pipeline import Matmuls
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe


@pytest.mark.parametrize(
    ("width", "head_dim", "summed_rows", "columns"),
    [
        (16, 16, (), 16),
        (8, 16, (), 8),
        (24, 32, (), 24),
        (24, 32, (16,), 32),  # pieces of 16 columns
        (20, 32, (), 32),  # rows of 40 bytes
        (40, 64, (0, 128), 40),
        (40, 64, (0, 32), 64),
        (48, 64, (16,), 48),
        (72, 96, (), 96),
        (80, 96, (64,), 80),
        (64, 128, (), 64),
        (96, 128, (64, 0), 96),
        (104, 128, (), 128),
        (160, 192, (64,), 160),
        (224, 256, (), 224),
        (240, 256, (64,), 256),  # 32 bytes would do, but not for rows so long
    ],
)
def test_columns_in_device_memory(width, head_dim, summed_rows, columns):
    products = Matmuls(jnp.dtype("bfloat16"))
    assert products.columns(width, head_dim, *summed_rows) == columns
    x = jnp.zeros((1, 8, 2, width), jnp.bfloat16)
    stored = products.operand(x, head_dim, *summed_rows)
    assert stored.shape == (1, 8, 2, columns)
    assert (stored is x) == (columns == width)


@pytest.mark.parametrize(
    ("head_dim", "columns", "summed_rows", "swizzle"),
    [
        (16, (8,), 0, 32),  # one piece
        (64, (40,), 0, 128),
        (64, (48,), 32, 32),
        (128, (40,), 0, 128),
        (96, (96,), 0, 64),  # several
        (96, (80,), 0, 32),
        (128, (96,), 64, 64),
        (128, (112,), 0, 32),
        (192, (160,), 0, 64),
        (128, (128,), 0, 128),
        (96, (96, 80), 0, 32),  # what is staged in place of an operand has its swizzle
        (256, (256, 224), 0, 64),
        (64, (40, 48), 0, 128),
    ],
)
def test_the_widest_swizzle_that_suits_all_arrays(head_dim, columns, summed_rows, swizzle):
    arrays = [jax.ShapeDtypeStruct((1, 8, 2, width), jnp.bfloat16) for width in columns]
    products = Matmuls(jnp.dtype("bfloat16"))
    assert products.swizzle(head_dim, *arrays, summed_rows=summed_rows) == swizzle


@pytest.mark.parametrize("rows", [0, 16, 32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_arrays_that_run_as_the_same_head_dim_have_a_swizzle_in_common(head_dim, rows):
    products = Matmuls(jnp.dtype("bfloat16"))
    widths = [width for width in range(1, head_dim + 1) if native_head_dim(width) == head_dim]
    stored = {products.columns(width, head_dim, rows) for width in widths}
    arrays = [jax.ShapeDtypeStruct((1, 8, 2, columns), jnp.bfloat16) for columns in stored]
    assert products.swizzle(head_dim, *arrays, summed_rows=rows)


def test_parts_of_float32_are_padded():
    products = Matmuls(jnp.dtype("float32"))
    stored = products.operand(jnp.zeros((1, 8, 2, 24), jnp.float32), 32)
    assert stored.shape == (1, 8, 2, 2 * 32)
    assert products.swizzle(32, stored) == 64


@pytest.mark.parametrize("head_dim", [8, 16])
def test_narrow_heads_take_wide_tiles_of_queries(head_dim):
    x = jax.ShapeDtypeStruct((1, 64, 1, head_dim), jnp.bfloat16)
    problem = describe(Operands(x, x, x, None), AttentionSpec(scale=1.0))
    with pytest.raises(ValueError, match=r"'block_q': 64.*must be 128 for head dims up to 16"):
        HopperBackend().attention.plan(problem, {"fused": {"block_q": 64}})


def problem_of(head_dim, v_head_dim=None, **fields):
    x = jax.ShapeDtypeStruct((4, 4096, 16, head_dim), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((4, 4096, 16, v_head_dim or head_dim), jnp.bfloat16)
    return describe(Operands(x, x, v, None), AttentionSpec(scale=1.0, **fields))


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "native"),
    [(64, 64, 64), (72, 72, 96), (80, 40, 96), (40, 88, 96), (96, 96, 96), (104, 96, 128)],
)
def test_the_fused_backward_runs_the_next_head_dim_of_both(head_dim, v_head_dim, native):
    found = native_backward_problem(problem_of(head_dim, v_head_dim), "fused")
    assert (found.head_dim, found.v_head_dim) == (native, native)


def test_one_warpgroup_computes_dq_at_head_dim_96():
    """Checks where it does: without modifiers, with a producer; dQ is one float32 tile there."""
    chosen = lambda backend, *sizes, **fields: backend.attention.plan(problem_of(*sizes, **fields))
    trading, alone = (HopperBackend(num_sms=132, trades_registers=t) for t in (True, False))
    for fields in {}, {"mask": Mask(right=0)}, {"mask": Mask(left=100, right=0)}:
        blocks = chosen(trading, 96, **fields).backward
        assert blocks.whole_dq
        assert (blocks.dq_parts, blocks.dq_tile(96)) == ((1,), (64, 96))
        assert not chosen(trading, 128, **fields).backward.whole_dq
        assert not chosen(alone, 96, **fields).backward.whole_dq
    halves = chosen(trading, 96, softcap=30.0).backward
    assert (halves.dq_parts, halves.dq_tile(96)) == ((0, 1), (64, 48))
