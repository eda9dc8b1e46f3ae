"""Tile.limits in both orientations against Mask.visible."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core.mask import Mask, Tile

from .test_mask import MASKS, visible

BLOCK_Q, BLOCK_KV = 6, 4


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_start", [-5, 0, 3, 8, 40])
@pytest.mark.parametrize("kv_start", [0, 4, 8])
@pytest.mark.parametrize("kv_len", [None, 10, 12])
def test_limits(mask, q_start, kv_start, kv_len):
    expected = visible(mask, BLOCK_Q, BLOCK_KV, q_start - kv_start)
    if kv_len is not None:
        expected &= kv_start + np.arange(BLOCK_KV) < kv_len
    upright = Tile(q_start, kv_start, (BLOCK_Q, BLOCK_KV))
    kept = upright.limits(mask, kv_len).keep(upright.shape)
    np.testing.assert_array_equal(kept, expected)
    lying = Tile(jnp.int32(q_start), jnp.int32(kv_start), (BLOCK_KV, BLOCK_Q), q_axis=1)
    np.testing.assert_array_equal(lying.limits(mask, kv_len).keep(lying.shape), expected.T)
    for tile in (upright, lying):
        assert bool(tile.limits(mask, kv_len).cuts(tile.shape)) == (not expected.all())


def test_a_trivial_mask_has_no_limits():
    assert Tile(0, 0, (4, 4)).limits(Mask()).is_trivial
    assert not Tile(0, 0, (4, 4)).limits(Mask(), kv_len=3).is_trivial


def test_spreading_over_the_tile():
    per_query, per_key = jnp.arange(6.0), jnp.arange(4.0)
    tile = Tile(0, 0, (6, 4))
    np.testing.assert_array_equal(tile.per_q(per_query)[:, 2], per_query)
    np.testing.assert_array_equal(tile.per_kv(per_key)[3], per_key)
    lying = Tile(0, 0, (4, 6), q_axis=1)
    np.testing.assert_array_equal(lying.per_q(per_query)[2], per_query)
    np.testing.assert_array_equal(lying.per_kv(per_key)[:, 3], per_key)
