"""The owner CTA of each tile of a bias gradient, and which CTAs work in pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.gpu.bias_tiles import SECTION_TILES, BiasTiles
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.dbias.tiles import Sums
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (4, 16), (2, 17), (3, 40)])
def test_every_tile_of_every_sum_has_one_owner(rows, columns):
    sums = 3
    tiles = BiasTiles(rows, columns)
    own = tiles.at(jnp.arange(sums * tiles.clusters, dtype=jnp.int32))
    at = np.stack([own.part, own.q_block, own.kv_block])
    found = np.unique(at, axis=1)
    np.testing.assert_array_equal(found, np.indices((sums, rows, columns)).reshape(3, -1))


def test_ctas_that_run_together_share_rows_and_columns():
    """Checks 132 of 64 x 64 tiles: row by row, they would read 64 KV tiles and 3 Q tiles."""
    own = BiasTiles(64, 64).at(jnp.arange(132, dtype=jnp.int32))
    assert len(np.unique(own.kv_block)) == SECTION_TILES
    assert len(np.unique(own.q_block)) == 9


def _blocks(kv_len: int, dtype=jnp.bfloat16, bias_dtype=jnp.bfloat16, head_dim=64, **operands):
    q = jnp.zeros((2, 1, 1, head_dim), dtype)
    k = jnp.zeros((2, kv_len, 1, head_dim), dtype)
    bias = jnp.zeros((1, 1, 1, kv_len), bias_dtype)
    problem = describe(
        Operands(q, k, k, None)._replace(bias=bias, **operands),
        AttentionSpec(scale=1.0, mask=Mask()),
    )
    return Sums(problem, "tile", ("bias",)).blocks()


@pytest.mark.parametrize(
    ("tiles", "cluster"), [(1, 1), (2, 2), (3, 1), (7, 1), (8, 2), (9, 2), (11, 2)]
)
def test_pairs_where_few_ctas_would_be_idle(tiles, cluster):
    assert _blocks(128 * tiles).cluster == _blocks(128 * tiles - 127).cluster == cluster


def test_only_a_plain_16_bit_bias_is_kept():
    lengths = jnp.zeros((2,), jnp.int32)
    assert _blocks(256, jnp.float16, jnp.float16).keep_bias
    for other in (
        _blocks(256, jnp.float32),
        _blocks(256, bias_dtype=jnp.float32),
        _blocks(256, kv_lengths=lengths),
        _blocks(256, head_dim=128),
    ):
        assert not other.keep_bias
        assert other.cluster == 1


def _fused(batch: int, head_dim: int, shape=(1, 1, 256, 256), override=None, **given):
    x = jax.ShapeDtypeStruct((batch, 256, 1, head_dim), jnp.bfloat16)
    given = {"bias": jax.ShapeDtypeStruct(shape, jnp.bfloat16)} | given
    spec = AttentionSpec(scale=1.0, mask=given.pop("mask", Mask()), deterministic=False)
    problem = describe(Operands(x, x, x, None)._replace(**given), spec)
    backend = HopperBackend(trades_registers=True)
    return backend.attention.plan(problem, override and {"fused": override}).backward


@pytest.mark.parametrize(
    ("batch", "head_dim", "cluster"),
    [
        (128, 16, 2),
        (6, 16, 2),
        (7, 16, 1),
        (128, 32, 2),
        (128, 64, 2),
        (3, 64, 1),
        (1, 32, 1),
        (8, 128, 1),
    ],
)
def test_clusters_of_entries_that_share_a_bias(batch, head_dim, cluster):
    assert _fused(batch, head_dim).bias_cluster == cluster


def test_entries_that_differ_share_no_bias():
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    for given in (
        {"bias": jax.ShapeDtypeStruct((4, 1, 256, 256), jnp.bfloat16)},
        {"bias": jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.float32)},
        {"bias": jax.ShapeDtypeStruct((1, 1, 1, 256), jnp.bfloat16)},
        {"kv_lengths": lengths},
        {"q_offset": lengths},
        {"mask": Mask(right=0)},
    ):
        assert _fused(4, 64, **given).bias_cluster == 1
        with pytest.raises(ValueError, match=r"bias_cluster.*pass 'bias_cluster': 1"):
            _fused(4, 64, override={"bias_cluster": 2}, **given)


@pytest.mark.parametrize("size", [3, 8, 16])
def test_a_cluster_divides_the_batch(size):
    with pytest.raises(ValueError, match="2, 4 or 8"):
        _fused(4, 64, override={"bias_cluster": size})
    assert _fused(8, 64, override={"bias_cluster": 8}).bias_cluster == 8
