"""The random bits of dropout: the right share is kept, and there is no pattern anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core import dropout

LENGTH = 512


def kept(rate=0.5, seed=0, batch=1, heads=1, length=LENGTH):
    """Computes the dropout mask, bool[batch, heads, length, length]; True means kept."""
    keys = dropout.call_keys(dropout.seed_words(seed), batch, heads)[..., None, None]
    i = jnp.arange(length, dtype=jnp.int32)
    return np.asarray(dropout.keep(keys, i[None, None, :, None], i[None, None, None], rate))


def deviations(found, share):
    """Returns by how many standard deviations a count of independent bits is off its mean."""
    return abs(found.sum() - found.size * share) / np.sqrt(found.size * share * (1 - share))


@pytest.mark.thorough(always=["0.1"])
@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9])
def test_the_rate(rate):
    share = 1.0 - dropout.threshold(rate) / dropout.LEVELS
    assert abs(share - (1.0 - rate)) <= 0.5 / dropout.LEVELS
    found = kept(rate, heads=4)
    assert deviations(found, share) < 4
    # Each row and each column too: 2048 sums of 512 bits, normal tails.
    for axis in (2, 3):
        sums = found.sum(axis)
        spread = np.sqrt(LENGTH * share * (1 - share))
        z = (sums - LENGTH * share) / spread
        assert abs(z).max() < (5.5 if 0.01 < rate < 0.99 else 8)
        assert abs(z.std() - 1) < 0.1


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0 / 3.0, 0.999999])
def test_the_gain_makes_up_for_the_rate(rate):
    share = 1.0 - dropout.threshold(rate) / dropout.LEVELS
    assert share > 0 and dropout.gain(rate) * share == pytest.approx(1.0, abs=1e-12)


def test_a_rate_of_zero_keeps_everything():
    assert kept(rate=0.0).all()


def pairs():
    """Yields (name, mask, mask) for masks that must be independent of each other."""
    many = kept(batch=2, heads=3)
    one = many[0, 0]
    yield "heads", many[:, :-1], many[:, 1:]
    yield "entries of the batch", many[0], many[1]
    yield "a head and an entry", many[0, 1], many[1, 0]
    yield "seeds", one, kept(seed=1)[0, 0]
    yield "high words of seeds", one, kept(seed=1 << 32)[0, 0]
    yield "neighbouring rows", one[1:], one[:-1]
    yield "transposed", one[np.tril_indices(LENGTH, -1)], one.T[np.tril_indices(LENGTH, -1)]
    for distance in (1, 2, 4, 8, 16, 64, 128):
        yield f"columns {distance} apart", one[:, distance:], one[:, :-distance]
        yield f"rows {distance} apart", one[distance:], one[:-distance]
        yield f"diagonals {distance}", one[distance:, distance:], one[:-distance, :-distance]


@pytest.mark.parametrize(("a", "b"), [pytest.param(a, b, id=name) for name, a, b in pairs()])
def test_independence(a, b):
    assert deviations(a == b, 0.5) < 4


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_keys_that_share_a_hash_are_independent(rate):
    dropped = ~kept(rate=rate, heads=8)
    share = dropout.threshold(rate) / dropout.LEVELS
    assert deviations(dropped[..., ::2] & dropped[..., 1::2], share * share) < 4


def normal(rate, **sizes):
    """Returns a mask as numbers of mean 0 and variance 1."""
    share = 1.0 - dropout.threshold(rate) / dropout.LEVELS
    return (kept(rate=rate, **sizes) - np.float32(share)) / np.float32(np.sqrt(share * (1 - share)))


@pytest.mark.thorough(always=["0.1-1"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_no_two_rows_and_no_two_columns_go_together(rate, seed):
    """Checks all 523,776 pairs of rows, and of columns: they correlate like independent bits."""
    z = normal(rate, seed=seed, length=1024)[0, 0]
    for x in (z, z.T):
        pairs = (x @ x.T)[np.triu_indices(1024, 1)] / np.sqrt(1024)
        assert abs(pairs).max() < 7.5
        assert abs(pairs.std() - 1) < 0.01
        assert abs((pairs**4).mean() - 3) < 0.15


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_no_pattern_of_low_rank(rate):
    """Compares the largest singular value with 2 sqrt(n), that of independent bits, within 5 %."""
    z = normal(rate)[0, 0]
    assert np.linalg.norm(z, 2) < 2 * np.sqrt(LENGTH) * 1.05


@pytest.mark.parametrize("down", [1, 8, 64])
@pytest.mark.parametrize("right", [1, 8, 16])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_squares_of_four_show_all_patterns(rate, down, right):
    """Computes chi-square of the 16 patterns at the corners of disjoint rectangles."""
    z = kept(rate=rate, length=1024)[0, 0].astype(int)
    blocks = z.reshape(1024 // down // 2, 2, down, 1024 // right // 2, 2, right)
    pattern = sum(blocks[:, a, :, :, b, :] << (2 * a + b) for a in (0, 1) for b in (0, 1))
    counts = np.bincount(pattern.ravel(), minlength=16)
    share = 1.0 - dropout.threshold(rate) / dropout.LEVELS
    ones = np.array([bin(i).count("1") for i in range(16)])
    expected = pattern.size * share**ones * (1 - share) ** (4 - ones)
    assert ((counts - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom: 1 in 10,000


def test_the_rank_of_the_matrix_of_bits_is_full():
    """Checks that the rank is almost full: a sum or xor of row and column keys has a low one."""
    bits = kept(length=256)[0, 0].astype(np.uint8)
    rank = 0
    for column in range(256):
        rows = np.flatnonzero(bits[rank:, column]) + rank
        if len(rows):
            bits[[rank, rows[0]]] = bits[[rows[0], rank]]
            others = rows[rows != rank] if bits[rank, column] else rows
            for row in others:
                if row != rank and bits[row, column]:
                    bits[row] ^= bits[rank]
            rank += 1
    assert rank >= 250  # 254.4 on average for independent bits


def test_every_tile_and_orientation_sees_the_same_bits():
    whole = kept(rate=0.3, length=64)[0, 0]
    key = dropout.call_keys(dropout.seed_words(0), 1, 1)[0, 0]
    i = jnp.arange(16, 48, dtype=jnp.int32)
    part = dropout.keep(key, i[:, None], i[None], 0.3)
    np.testing.assert_array_equal(part, whole[16:48, 16:48])
    np.testing.assert_array_equal(dropout.keep(key, i[None], i[:, None], 0.3), part.T)


def test_all_keys_are_odd():
    """Checks that keys are odd: multiplying by an even number would lose bits, by 0 all of them."""
    i = jnp.arange(1000, dtype=jnp.int32)
    for keys in (dropout.column_keys(i), dropout.row_keys(jnp.uint32(7), i)):
        assert (np.asarray(keys) & 1 == 1).all() and len(np.unique(keys)) == 1000


def test_the_second_of_two_keys_is_the_first_times_a_constant():
    keys = np.asarray(dropout.column_keys(jnp.arange(64, dtype=jnp.int32)))
    np.testing.assert_array_equal(keys[1::2], keys[::2] * np.uint32(dropout.TWIN))


def test_fifteen_bits_of_the_product_decide():
    products = jnp.asarray([0x0000FFFF, 0x80000000, 0x3FFFFFFF, 0x40000000, 0xC0000000], jnp.uint32)
    np.testing.assert_array_equal(
        dropout.kept(products, 0.5), np.array([False, False, False, True, True])
    )


def test_mix_is_a_bijection_where_it_was_looked_at_and_flips_half_of_the_bits():
    x = jnp.arange(1 << 16, dtype=jnp.uint32)
    mixed = np.asarray(dropout.mix(x))
    assert len(np.unique(mixed)) == len(mixed)
    for bit in range(32):
        flipped = np.asarray(dropout.mix(x ^ jnp.uint32(1 << bit))) ^ mixed
        share = np.unpackbits(flipped.view(np.uint8)).mean()
        assert abs(share - 0.5) < 0.01


def test_seeds_of_every_kind():
    key = jax.random.key(7)
    raw = jax.random.key_data(key)
    np.testing.assert_array_equal(dropout.seed_words(key), dropout.seed_words(raw))
    np.testing.assert_array_equal(dropout.seed_words(5), [5, 0])
    np.testing.assert_array_equal(dropout.seed_words(-1), [0xFFFFFFFF, 0xFFFFFFFF])
    np.testing.assert_array_equal(dropout.seed_words(3 + (2 << 32)), [3, 2])
    with jax.enable_x64(True):
        ids = jnp.asarray([1, 1 + (2 << 32), 1 - (2 << 32)], jnp.int64)
        assert len(np.unique(dropout.seed_words(ids))) == 3, "high halves count"
    many = jax.vmap(dropout.seed_words)(jax.random.split(key, 3))
    assert len(np.unique(np.asarray(many), axis=0)) == 3


SCALARS = (int, np.int8, np.int32, np.int64, np.array, jnp.int8, jnp.int32)
UNSIGNED = (np.uint8, np.uint32, np.uint64, jnp.uint8, jnp.uint16, jnp.uint32)


@pytest.mark.thorough(always=["3-", "-2**40-x64"])
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize(
    ("number", "types"),
    [
        (3, SCALARS + UNSIGNED),
        (-3, SCALARS),
        (2**32 - 1, (int, np.int64, np.uint32, np.uint64, np.array, jnp.uint32)),
        (2**40 + 7, (int, np.int64, np.uint64, np.array)),
        (-(2**40), (int, np.int64, np.array)),
    ],
    ids=["3", "-3", "2**32 - 1", "2**40 + 7", "-2**40"],
)
def test_one_number_makes_the_same_words_in_every_type(number, types, x64):
    with jax.enable_x64(x64):
        types = (*types, jnp.int64) if x64 and number != 2**32 - 1 else types
        words = {make: np.asarray(dropout.seed_words(make(number))) for make in types}
        for make, found in words.items():
            assert found.dtype == np.uint32
            np.testing.assert_array_equal(found, words[int], err_msg=str(make))
            if make is not int and make(number).dtype.itemsize <= (8 if x64 else 4):
                traced = jax.jit(dropout.seed_words)(make(number))
                np.testing.assert_array_equal(traced, words[int], err_msg=f"jit {make}")


@pytest.mark.parametrize("numbers", [(3, 4), (-1, 2), (0, 2**31 - 1)], ids=str)
def test_arrays_of_one_value_make_the_same_words_in_every_dtype(numbers):
    with jax.enable_x64(True):
        for dtype in (np.int32, np.int64):
            for array in (np.array(numbers, dtype), jnp.array(numbers, dtype)):
                words = dropout.seed_words(array)
                np.testing.assert_array_equal(words, np.array(numbers).astype(np.uint32))
                np.testing.assert_array_equal(jax.jit(dropout.seed_words)(array), words)
