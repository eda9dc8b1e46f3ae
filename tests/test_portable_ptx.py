"""The PTX of the portable kernels, run thread by thread: what the interpreter passes over."""

from __future__ import annotations

import types

import numpy as np
import pytest

from flash_pallas.backends.mosaic import inline
from flash_pallas.backends.portable import decode_rows, inputs, products, tiles
from flash_pallas.backends.portable.tiles import UNIT_ELEMENTS

from .ptx import BFLOAT16, Layout, Machine, Tile

DTYPES = (BFLOAT16, np.dtype(np.float16))


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    found.install(monkeypatch, tiles, products, inputs, decode_rows)
    layout = types.SimpleNamespace(to_mgpu=Layout)
    monkeypatch.setattr(inputs, "inline", types.SimpleNamespace(WGMMA=layout, ROWS=inline.ROWS))
    return found


def draw(seed, *shape, dtype=BFLOAT16):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def tile(machine, rows, columns, values=None, dtype=BFLOAT16):
    """(array of shared memory with its padding, ref)."""
    array = np.full((rows, columns + UNIT_ELEMENTS), np.nan, dtype)
    if values is not None:
        array[:, :columns] = values
    return array, machine.array(array, shared=True)


@pytest.mark.parametrize("rows", [16, 48, 64, 128])
@pytest.mark.parametrize(
    ("columns", "held"), [(16, 16), (64, 64), (80, 72), (96, 96), (128, 128), (256, 256)]
)
@pytest.mark.parametrize(("first", "limit"), [(0, 200), (32, 70), (160, 200), (192, 0)])
def test_copies_fill_a_tile(machine, rows, columns, held, first, limit):
    """With rows of one head of [T, N, H], and zeros from the limit on and beside its columns."""
    source = draw(0, 200, 3, held)
    found, ref = tile(machine, rows, columns)
    of_head = machine.array(source, lambda x: x[:, 1])
    tiles._start_body(None, of_head, ref, np.int64(first), np.int64(limit))
    assert np.isnan(found[:, :columns].astype(np.float32)).all()
    tiles._wait_body(0, None)
    expected = np.zeros((rows, columns), BFLOAT16)
    there = max(min(limit - first, rows, 200 - first), 0)
    expected[:there, :held] = source[first : first + there, 1]
    np.testing.assert_array_equal(found[:, :columns], expected)


@pytest.mark.parametrize("first", [0, 64])
def test_copies_of_rows_of_two_axes(machine, first):
    """Row r of a tile is [r // 4, r % 4]: the queries and heads of decoding."""
    source = draw(0, 30, 8, 64)
    found, ref = tile(machine, 64, 64)
    group = machine.array(source, lambda x: x[:, 4:8])
    tiles._start_body(None, group, ref, np.int64(first), np.int64(100))
    tiles._wait_body(0, None)
    expected = np.zeros((64, 64), BFLOAT16)
    rows = source[:, 4:8].reshape(-1, 64)[first : min(first + 64, 100)]
    expected[: len(rows)] = rows
    np.testing.assert_array_equal(found[:, :64], expected)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("columns", "held"), [(16, 16), (80, 72), (128, 128)])
def test_results_are_written(machine, rows, columns, held):
    """From registers through a tile to rows of one head; nothing else of the array changes."""
    values = draw(1, rows, columns)
    staged, ref = tile(machine, rows, columns)
    tiles._put_body(None, Tile.of(values), ref)
    np.testing.assert_array_equal(staged[:, :columns], values)
    target = np.zeros((150, 2, held), BFLOAT16)
    of_head = machine.array(target, lambda x: x[:, 1])
    tiles._store_body(None, of_head, ref, np.int64(100), np.int64(150))
    expected = np.zeros_like(target)
    expected[100:150, 1] = values[:50, :held]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("summed", "columns"), [(16, 32), (64, 16), (48, 80), (128, 64)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("in_registers", [False, True])
def test_products(machine, dtype, rows, summed, columns, transposed, in_registers):
    a, b = draw(2, rows, summed, dtype=dtype), draw(3, summed, columns, dtype=dtype)
    start = draw(4, rows, columns, dtype=np.float32)
    of_a = Tile.of(a) if in_registers else tile(machine, rows, summed, a, dtype)[1]
    stored = b.T if transposed else b
    of_b = tile(machine, *stored.shape, stored, dtype)[1]
    machine.shape = rows, columns
    found = products._add_body(transposed, None, Tile.of(start), of_a, of_b).values()
    exact = start + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * summed)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("q_axis", [0, 1])
@pytest.mark.parametrize("start", [(0, 0), (64, 32)])
def test_a_bias_in_registers(machine, dtype, q_axis, start):
    """Rows and columns of the tile that the array has; what lies beyond is read from inside it."""
    bias = draw(5, 2, 104, 128, dtype=dtype)
    machine.shape = shape = 64, 48
    ref = machine.array(bias, lambda x: x[1])
    found = inputs._load_body(shape, q_axis, None, ref, *map(np.int64, start)).values()
    whole = bias[1].T if q_axis else bias[1]
    part = whole[start[0] : start[0] + 64, start[1] : start[1] + 48].astype(np.float32)
    np.testing.assert_array_equal(found[: part.shape[0], : part.shape[1]], part)


@pytest.mark.parametrize("columns", [72, 128])
@pytest.mark.parametrize("first", [0, 64])
def test_partial_results_of_decoding(machine, columns, first):
    """float32 straight from registers; rows and columns that the array does not have are not."""
    values = draw(6, 64, 128, dtype=np.float32)
    target = np.zeros((2, 90, columns), np.float32)
    ref = machine.array(target, lambda x: x[1])
    decode_rows._store_body(None, Tile.of(values), ref, np.int64(first))
    expected = np.zeros_like(target)
    count = min(64, 90 - first)
    expected[1, first : first + count] = values[:count, :columns]
    np.testing.assert_array_equal(target, expected)


def test_layouts_agree():
    """A tile is in the registers where Mosaic has it: the simulator's lanes are WGMMA's."""
    values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    np.testing.assert_array_equal(Tile.of(values).values(), values)
    assert Tile.of(values).registers.shape == inline.WGMMA.to_mgpu().registers_shape((64, 32))
