"""The mask's block ranges against brute force, and `visible` against literal tables."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core.mask import Mask

MASKS = [Mask(), Mask.causal(), Mask(left=0), Mask(3, 0), Mask(2, 4), Mask(0, 0), Mask(None, 5)]


def visible(mask, q_len, kv_len, q_offset=0):
    """Computes bool[T, S] element by element, from the words of the docstring."""
    table = np.zeros((q_len, kv_len), bool)
    for i, j in itertools.product(range(q_len), range(kv_len)):
        distance = j - (i + q_offset)
        after_left = mask.left is None or distance >= -mask.left
        table[i, j] = after_left and (mask.right is None or distance <= mask.right)
    return table


def test_causal_is_the_lower_triangle():
    i, j = np.arange(5)[:, None], np.arange(7)[None]
    np.testing.assert_array_equal(Mask.causal().visible(i, j), np.tril(np.ones((5, 7), bool)))
    last = np.tril(np.ones((5, 7), bool), k=2)
    np.testing.assert_array_equal(Mask.causal().visible(i + 2, j), last)


def test_a_window_is_a_band():
    i, j = np.arange(4)[:, None], np.arange(4)[None]
    expected = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]]
    np.testing.assert_array_equal(Mask(2, 1).visible(i, j), np.array(expected, bool))


def test_a_trivial_mask_hides_nothing():
    assert Mask().visible(0, 5) is None
    assert Mask().is_trivial and not Mask.causal().is_trivial


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_against_brute_force(mask):
    found = mask.visible(np.arange(9)[:, None] - 3, np.arange(11)[None])
    expected = visible(mask, 9, 11, -3)
    np.testing.assert_array_equal(
        np.broadcast_to(True if found is None else found, (9, 11)), expected
    )
    np.testing.assert_array_equal(visible(mask.transposed, 11, 9, 3), expected.T)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_keys_of_a_query(mask):
    q_len, kv_len, offset = 9, 7, -3
    first, last = mask.keys_of(np.arange(q_len) + offset, kv_len)
    one_by_one = [mask.keys_of(i + offset, kv_len)[1] for i in range(q_len)]
    assert one_by_one == np.broadcast_to(last, q_len).tolist()
    j = np.arange(kv_len)[None]
    found = j <= np.broadcast_to(last, q_len)[:, None]
    if first is not None:
        found &= j >= first[:, None]
    np.testing.assert_array_equal(found, visible(mask, q_len, kv_len, offset))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_offset", [-9, -1, 0, 4, 30])
@pytest.mark.parametrize("traced", [False, True])
def test_kv_blocks(mask, q_offset, traced):
    q_len, kv_len, block_q, block_kv = 10, 13, 4, 3
    table = visible(mask, q_len, kv_len, q_offset)
    for row in range(0, q_len, block_q):
        q_start = row + q_offset
        given = [jnp.int32(x) if traced else x for x in (q_start, block_q, kv_len)]
        found = mask.kv_blocks(*given, block_kv)
        # As far as the mask knows the last block of queries is whole, and so is that of keys.
        rows = visible(mask, block_q, 15, q_start)
        _check_range(found, rows, kv_len, block_kv)
        assert table[row : row + block_q].tolist() == rows[: q_len - row, :kv_len].tolist()


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kv_start", [0, 2, 3, 7, 12, 40])
@pytest.mark.parametrize("traced", [False, True])
def test_keys_before_a_start_are_hidden(mask, kv_start, traced):
    q_start, block_q, kv_len, block_kv = 4, 4, 13, 3
    rows = visible(mask, block_q, 15, q_start) & (np.arange(15)[None] >= kv_start)
    given = [jnp.int32(x) if traced else x for x in (q_start, block_q, kv_len)]
    found = mask.kv_blocks(*given, block_kv, jnp.int32(kv_start) if traced else kv_start)
    start, full_start, full_stop, stop = map(int, found)
    outside = np.r_[0 : start * block_kv, stop * block_kv : 15]
    assert start <= full_start <= full_stop <= stop <= 5 and not rows[:, outside].any()
    assert rows[:, full_start * block_kv : full_stop * block_kv].all()
    # Nothing is read in vain, but for a window that ends before the start.
    if mask.right in (None, 0):
        assert start == min(stop, max(start, kv_start // block_kv))
    first, last = mask.keys_of(q_start + np.arange(block_q), kv_len, kv_start)
    j = np.arange(15)[None]
    seen = (j >= np.broadcast_to(first, block_q)[:, None]) & (
        j <= np.broadcast_to(last, block_q)[:, None]
    )
    np.testing.assert_array_equal(seen, rows & (j < kv_len))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_offset", [-9, -1, 0, 4, 30])
def test_q_blocks(mask, q_offset):
    q_len, kv_len, block_q, block_kv = 10, 13, 4, 3
    for kv_start in range(0, kv_len, block_kv):
        found = mask.q_blocks(kv_start - q_offset, block_kv, q_len, block_q)
        columns = visible(mask, 12, block_kv, q_offset - kv_start)
        _check_range(found, columns.T, q_len, block_q)


def _check_range(found, rows, length, block):
    """Checks a block range; rows: bool[rows of the tile, the other length rounded up to blocks]."""
    start, full_start, full_stop, stop = (int(x) for x in found)
    some, full = [], []
    for first in range(0, length, block):
        tile = rows[:, first : first + block]
        assert tile.shape[1] == block
        some.append(bool(tile.any()))
        full.append(bool(tile.all()) and first + block <= length)
    assert 0 <= start <= full_start <= full_stop <= stop <= len(some)
    seen = [b for b in range(len(some)) if some[b]]
    if seen:
        assert (start, stop) == (seen[0], seen[-1] + 1)
    else:
        assert start == stop
    whole = [b for b in range(len(full)) if full[b]]
    assert list(range(full_start, full_stop)) == whole


def test_zones_cover_the_range_once_and_drop_what_is_empty():
    found = Mask.causal().kv_blocks(12, 4, 100, 4)
    assert found.zones() == [(0, 3, False), (3, 4, True)]
    assert Mask().kv_blocks(0, 4, 8, 4).zones() == [(0, 2, False)]
    traced = jax.eval_shape(lambda x: Mask.causal().kv_blocks(x, 4, 8, 4).stop, jnp.int32(0))
    assert traced.dtype == jnp.int32
