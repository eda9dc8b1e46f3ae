"""Which head dims the Hopper kernels run as they are, which TMA fills up, and which are padded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.products import Products
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
        (80, 96, (), 96),  # pieces of 32 columns
        (64, 128, (), 64),
        (96, 128, (), 128),
    ],
)
def test_columns_in_device_memory(width, head_dim, summed_rows, columns):
    products = Products(jnp.dtype("bfloat16"))
    assert products.columns(width, head_dim, *summed_rows) == columns
    x = jnp.zeros((1, 8, 2, width), jnp.bfloat16)
    stored = products.operand(x, head_dim, *summed_rows)
    assert stored.shape == (1, 8, 2, columns)
    assert (stored is x) == (columns == width)


def test_parts_of_float32_are_padded():
    products = Products(jnp.dtype("float32"))
    stored = products.operand(jnp.zeros((1, 8, 2, 24), jnp.float32), 32)
    assert stored.shape == (1, 8, 2, 2 * 32)


@pytest.mark.parametrize("head_dim", [8, 16])
def test_narrow_heads_take_wide_tiles_of_queries(head_dim):
    x = jax.ShapeDtypeStruct((1, 64, 1, head_dim), jnp.bfloat16)
    problem = describe(Operands(x, x, x, None), AttentionSpec(scale=1.0))
    with pytest.raises(ValueError, match=r"'block_q'.*64: 128 for head dims up to 16"):
        HopperBackend().blocks(problem, {"fused": {"block_q": 64}})
