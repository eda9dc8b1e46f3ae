"""The PTX of the portable kernels, run thread by thread: what the interpreter passes over."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.gpu.ptx import (
    async_copies,
    dequantize_padded,
    device_sums,
    device_tiles,
    inline,
    mma_sync,
    rows_of_grids,
    split_sums,
    threads,
)
from flash_pallas.backends.gpu.ptx.mma_sync import WGMMA, Grid
from flash_pallas.backends.gpu.ptx.threads import UNIT_ELEMENTS
from flash_pallas.backends.portable.backward.fused.kernel import DqSums

from .ptx import BFLOAT16, Layout, Machine, Tile

DTYPES = (BFLOAT16, np.dtype(np.float16))


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    copies = async_copies, device_tiles, device_sums
    found.install(monkeypatch, threads, mma_sync, rows_of_grids, split_sums, *copies)
    monkeypatch.setattr(device_tiles, "WGMMA", types.SimpleNamespace(to_mgpu=Layout))
    return found


def draw(seed, *shape, dtype=BFLOAT16):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def tile(machine, rows, columns, values=None, dtype=BFLOAT16):
    """Returns (array of shared memory with its padding, ref)."""
    array = np.full((rows, columns + UNIT_ELEMENTS), np.nan, dtype)
    if values is not None:
        array[:, :columns] = values
    return array, machine.array(array, shared=True)


@pytest.mark.parametrize("rows", [16, 48, 64, 128])
@pytest.mark.parametrize(
    ("columns", "held"),
    [(16, 16), (64, 64), (80, 72), (96, 96), (128, 128), (256, 256), (288, 264), (320, 320),
     (512, 512)],
)  # fmt: skip
@pytest.mark.parametrize(("first", "limit"), [(0, 200), (32, 70), (160, 200), (192, 0)])
def test_copies_fill_a_tile(machine, rows, columns, held, first, limit):
    """Copies rows of one head of [T, N, H]; zeros follow the limit and fill its missing columns."""
    source = draw(0, 200, 3, held)
    found, ref = tile(machine, rows, columns)
    of_head = machine.array(source, lambda x: x[:, 1])
    async_copies._start_body(True, None, of_head, ref, np.int64(first), np.int64(limit))
    assert np.isnan(found[:, :columns].astype(np.float32)).all()
    async_copies._wait_body(0, None)
    expected = np.zeros((rows, columns), BFLOAT16)
    there = max(min(limit - first, rows, 200 - first), 0)
    expected[:there, :held] = source[first : first + there, 1]
    np.testing.assert_array_equal(found[:, :columns], expected)


@pytest.mark.parametrize("columns", [64, 80])
@pytest.mark.parametrize("start", [-5, 0, 32, 33, 60, 96, 2**30])
def test_copies_begin_at_a_start(machine, columns, start):
    """Copies the rows between start and limit of rows 32 to 96; the others are zeros."""
    source = draw(0, 200, 3, columns)
    found, ref = tile(machine, 64, columns)
    bounds = map(np.int64, (32, 70, start))
    async_copies._start_body(True, None, machine.array(source, lambda x: x[:, 1]), ref, *bounds)
    async_copies._wait_body(0, None)
    row = np.arange(32, 96)[:, None]
    expected = np.where((row >= start) & (row < 70), source[32:96, 1], 0).astype(BFLOAT16)
    np.testing.assert_array_equal(found[:, :columns], expected)


# Columns of a tile and of its array. All widths are tried: only some of those above 256 were wrong.
WIDTHS = [(columns, columns - 8 * (columns % 32 == 0)) for columns in range(16, 577, 16)]


@pytest.mark.parametrize(("columns", "held"), [*WIDTHS, (288, 288), (512, 512), (576, 576)])
@pytest.mark.parametrize("first", [0, 64])
def test_copies_of_rows_of_two_axes(machine, first, columns, held):
    """Copies tiles whose row r is [r // 4, r % 4]: the queries and heads of decoding."""
    source = draw(0, 30, 8, held)
    found, ref = tile(machine, 64, columns)
    group = machine.array(source, lambda x: x[:, 4:8])
    async_copies._start_body(False, None, group, ref, np.int64(first), np.int64(100))
    async_copies._wait_body(0, None)
    expected = np.zeros((64, columns), BFLOAT16)
    rows = source[:, 4:8].reshape(-1, held)[first : min(first + 64, 100)]
    expected[: len(rows), :held] = rows
    np.testing.assert_array_equal(found[:, :columns], expected)


@pytest.mark.parametrize(("columns", "held"), WIDTHS)
def test_copies_of_every_width(machine, columns, held):
    """Copies rows of one head: K and V of decoding, and all tiles of attention."""
    source = draw(0, 40, 2, held)
    found, ref = tile(machine, 32, columns)
    of_head = machine.array(source, lambda x: x[:, 1])
    async_copies._start_body(True, None, of_head, ref, np.int64(16), np.int64(37))
    async_copies._wait_body(0, None)
    expected = np.zeros((32, columns), BFLOAT16)
    expected[:21, :held] = source[16:37, 1]
    np.testing.assert_array_equal(found[:, :columns], expected)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("columns", "held"), [(16, 16), (80, 72), (128, 128), (320, 312)])
def test_results_are_written(machine, rows, columns, held):
    """Stores registers through a tile to rows of one head; nothing else of the array changes."""
    values = draw(1, rows, columns)
    staged, ref = tile(machine, rows, columns)
    mma_sync.put_body(WGMMA, None, Tile.of(values), ref, np.int64(0))
    np.testing.assert_array_equal(staged[:, :columns], values)
    target = np.zeros((150, 2, held), BFLOAT16)
    of_head = machine.array(target, lambda x: x[:, 1])
    async_copies._store_body(False, None, of_head, ref, np.int64(100), np.int64(150))
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
    how = mma_sync.How(right_transposed=transposed)
    found = mma_sync._add_body(how, None, Tile.of(start), of_a, of_b, np.int64(0)).values()
    exact = start + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * summed)


@pytest.mark.parametrize("summed", [16, 48])
@pytest.mark.parametrize("first", [0, 16, 32])
def test_products_of_some_columns(machine, first, summed):
    """Checks products that sum over some columns of their tiles; the others may hold anything."""
    a, b = draw(2, 64, 80), draw(3, 32, 80)
    of_a, of_b = (tile(machine, *x.shape, x)[1] for x in (a, b))
    machine.shape = 64, 32
    how = mma_sync.How(right_transposed=True, summed=summed, moved=first > 0)
    start = Tile.of(np.zeros((64, 32), np.float32))
    found = mma_sync._add_body(how, None, start, of_a, of_b, np.int64(first)).values()
    some = slice(first, first + summed)
    exact = a[:, some].astype(np.float64) @ b[:, some].astype(np.float64).T
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * summed)


@pytest.mark.parametrize("columns", [16, 48])
def test_scores_of_two_warpgroups_are_summed(machine, columns):
    """Adds what the other warpgroup has written to each thread's own elements."""
    own, other = (draw(seed, 64, columns, dtype=np.float32) for seed in (2, 3))
    parts = np.full((2, 64, columns), np.nan, np.float32)
    ref = machine.array(parts, lambda x: x[1], shared=True)
    split_sums._put_body(None, Tile.of(other), ref)
    assert np.isnan(parts[0]).all() and not np.isnan(parts[1]).any()
    machine.shape = 64, columns
    found = split_sums._sum_body(None, Tile.of(own), ref).values()
    np.testing.assert_array_equal(found, own + other)


def labelled(values, grid: Grid) -> np.ndarray:
    """Returns a product's elements at the places where an accumulator of the grid has them."""
    rows, columns = grid.label(*values.shape)
    found = np.empty((rows, columns), values.dtype)
    for row, column in np.ndindex(rows, columns):
        block, within = divmod(row, 64)
        warp, own = divmod(within, 16)
        down, right = warp % grid.down, warp // grid.down
        down = grid.block_rows * block + grid.warp_rows * down + own
        found[row, column] = values[down, columns * right + column]
    return found


GRIDS = {(64, 16): 4, (128, 16): 4, (64, 64): 2, (128, 64): 4, (128, 128): 2, (64, 256): 1}


def test_parts_of_warps_are_square():
    for shape, down in GRIDS.items():
        assert Grid.of(*shape).down == down
        rows, columns = Grid.of(*shape).label(*shape)
        assert rows % 64 == columns % 16 == 0


@pytest.mark.thorough(always=["True-48-128-(64, 256)-bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*GRIDS, (128, 32)], ids=str)
@pytest.mark.parametrize("summed", [64, 128])
@pytest.mark.parametrize("column", [0, 48])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_a_grid(machine, dtype, shape, summed, column, transposed):
    """Multiplies with some columns of the right operand; the left one may lie transposed."""
    (rows, columns), own = shape, Grid.of(*shape)
    a = draw(2, rows, summed, dtype=dtype)
    b = draw(3, summed, columns + 48, dtype=dtype)
    start = draw(4, rows, columns, dtype=np.float32)
    stored = a.T if transposed else a
    of_a = tile(machine, *stored.shape, stored, dtype)[1]
    of_b = tile(machine, *b.shape, b, dtype)[1]
    machine.shape = own.label(rows, columns)
    how = mma_sync.How(left_transposed=transposed, grid=own)
    of_start = Tile.of(labelled(start, own))
    found = mma_sync._add_body(how, None, of_start, of_a, of_b, np.int64(column)).values()
    exact = start + a.astype(np.float64) @ b[:, column : column + columns].astype(np.float64)
    np.testing.assert_allclose(found, labelled(exact, own), rtol=0, atol=1e-5 * summed)


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_accumulators_of_a_grid_are_written(machine, shape):
    """Checks that every element goes to its own place, and to no other."""
    values, own = draw(1, *shape), Grid.of(*shape)
    staged, ref = tile(machine, shape[0], shape[1] + 32)
    mma_sync.put_body(own, None, Tile.of(labelled(values, own)), ref, np.int64(16))
    np.testing.assert_array_equal(staged[:, 16 : 16 + shape[1]], values)
    staged[:, 16 : 16 + shape[1]] = np.nan
    assert np.isnan(staged.astype(np.float32)).all()


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_numbers_of_rows_reach_accumulators_of_a_grid(machine, shape):
    """Writes numbers of rows from every lane of a row; each accumulator row reads its product's."""
    own, layout = Grid.of(*shape), inline.ROWS.to_mgpu()
    rows = own.label(*shape)[0]
    numbers = draw(9, shape[0], dtype=np.float32)
    found = np.full_like(numbers, np.nan)
    ref = machine.array(found, shared=True)
    lane = next(Layout.thread_idxs(shape))[0]
    registers = np.empty(layout.registers_shape(shape[:1]), dtype=object)
    strides = layout.tiling.tile_strides((1,))
    at = lambda index: sum(i * stride for i, stride in zip(index, strides, strict=True))
    for index in np.ndindex(*registers.shape):
        registers[index] = numbers[lane + at(index)][:, None]
    values = types.SimpleNamespace(registers=registers, shape=shape[:1], layout=layout)
    rows_of_grids._put_body(None, values, ref)
    np.testing.assert_array_equal(found, numbers)
    machine.shape = (rows,)
    read = rows_of_grids._get_body(own, rows, layout, None, ref).registers
    expected = labelled(np.repeat(numbers[:, None], shape[1], axis=1), own)[:, 0]
    for index in np.ndindex(*read.shape):
        np.testing.assert_array_equal(read[index][:, 0], expected[lane + at(index)])


@pytest.mark.parametrize("count", [64, 128])
@pytest.mark.parametrize("exists", [False, True])
def test_vectors_are_copied(machine, count, exists):
    """Copies the requested elements; none where there is no such step."""
    source, found = draw(8, 2, 512, dtype=np.float32), np.full((2, count), np.nan, np.float32)
    of, to = (
        machine.array(source, lambda x: x[1]),
        machine.array(found, lambda x: x[1], shared=True),
    )
    async_copies._start_vector_body(None, of, to, np.int64(256), np.int64(count if exists else 0))
    async_copies._wait_body(0, None)
    expected = np.full_like(found, np.nan)
    if exists:
        expected[1] = source[1, 256 : 256 + count]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("column", [0, 64])
def test_what_was_written_is_read_back(machine, dtype, column):
    """Reads part of a tile back, in the threads that wrote it."""
    values = draw(1, 128, 64, dtype=dtype)
    _, ref = tile(machine, 128, 128, dtype=dtype)
    mma_sync.put_body(WGMMA, None, Tile.of(values), ref, np.int64(column))
    machine.shape = values.shape
    found = mma_sync.get_body(values.shape, Layout(), None, ref, np.int64(column)).values(dtype)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("column", [0, 32])
def test_part_of_a_tile_is_written(machine, column):
    """Writes half of the columns, as one of two warpgroups does; the other half stays as it is."""
    values = draw(1, 128, 32)
    staged, ref = tile(machine, 128, 64)
    mma_sync.put_body(WGMMA, None, Tile.of(values), ref, np.int64(column))
    np.testing.assert_array_equal(staged[:, column : column + 32], values)
    assert np.isnan(staged[:, 32 - column : 64 - column].astype(np.float32)).all()


@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize(("rows", "width"), [(64, 128), (128, 64), (64, 96)])
def test_sums_of_dq(machine, vector, rows, width):
    """Adds dQ twice from two warpgroups: each add reaches every float once; loads see the sums."""
    sums = DqSums(rows, width, vector, interpret=False)
    values = draw(7, 2, rows, width, dtype=np.float32)
    buffer = np.ones((3, *sums.tile), np.float32)
    half = width // 2
    for once in values:
        for part in range(2):
            target = machine.array(buffer, lambda x, part=part: x[1, part])
            own = Tile.of(labelled(once[:, part * half : (part + 1) * half], sums.grid))
            device_sums._add_body(vector, None, own, target)
    machine.shape = shape = sums.grid.label(rows, half)
    for part in range(2):
        source = machine.array(buffer, lambda x, part=part: x[1, part])
        found = device_sums._load_body(shape, vector, None, source).values()
        expected = (np.float32(1) + values[0] + values[1])[:, part * half : (part + 1) * half]
        np.testing.assert_array_equal(found, labelled(expected, sums.grid))
    np.testing.assert_array_equal(buffer[[0, 2]], np.ones_like(buffer[[0, 2]]))


def test_a_warp_adds_to_consecutive_bytes(machine):
    """Checks that thread t's element of an instruction follows that of thread t - 1."""
    for vector in (1, 4):
        sums = DqSums(64, 64, vector, interpret=False)
        buffer = np.zeros(sums.tile, np.float32)
        me = np.arange(128, dtype=np.float32)
        own = Tile.of(np.zeros((64, 32), np.float32))
        for index in np.ndindex(own.registers.shape):
            own.registers[index] = np.stack([me, me], axis=1)
        device_sums._add_body(vector, None, own, machine.array(buffer, lambda x: x[0]))
        expected = np.broadcast_to(np.repeat(me, vector), (16 // vector, 128 * vector))
        np.testing.assert_array_equal(buffer[0].reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("q_axis", [0, 1])
@pytest.mark.parametrize("start", [(0, 0), (64, 32)])
def test_a_bias_in_registers(machine, dtype, q_axis, start):
    """Loads the tile's rows and columns that the array has; others are read from inside it."""
    bias = draw(5, 2, 104, 128, dtype=dtype)
    machine.shape = shape = 64, 48
    ref = machine.array(bias, lambda x: x[1])
    found = device_tiles._load_body(shape, q_axis, None, ref, *map(np.int64, start)).values()
    whole = bias[1].T if q_axis else bias[1]
    part = whole[start[0] : start[0] + 64, start[1] : start[1] + 48].astype(np.float32)
    np.testing.assert_array_equal(found[: part.shape[0], : part.shape[1]], part)


@pytest.mark.parametrize("columns", [72, 128])
@pytest.mark.parametrize("first", [0, 64])
def test_partial_results_of_decoding(machine, columns, first):
    """Stores float32 straight from registers, but no rows or columns that the array lacks."""
    values = draw(6, 64, 128, dtype=np.float32)
    target = np.zeros((2, 90, columns), np.float32)
    ref = machine.array(target, lambda x: x[1])
    mma_sync._store_body(4, True, None, Tile.of(values), ref, np.int64(first), np.int64(0))
    expected = np.zeros_like(target)
    count = min(64, 90 - first)
    expected[1, first : first + count] = values[:count, :columns]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize(("starts", "columns"), [((0, 0), 64), ((64, 32), 72), ((0, 96), 104)])
def test_a_sum_is_written(machine, dtype, starts, columns):
    """Writes the rows and columns that the array has; nothing else of it changes."""
    values = draw(8, 64, 48, dtype=dtype)
    target = np.zeros((2, 90, columns), dtype)
    ref = machine.array(target, lambda x: x[1])
    starts = tuple(map(np.int64, starts))
    mma_sync._store_body(dtype.itemsize, False, None, Tile.of(values), ref, *starts)
    expected = np.zeros_like(target)
    part = expected[1, starts[0] : starts[0] + 64, starts[1] : starts[1] + 48]
    part[...] = values[: part.shape[0], : part.shape[1]]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("raw", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (32, 80)])
def test_every_number_of_eight_bits_is_widened(machine, monkeypatch, dtype, raw, rows, columns):
    machine.install(monkeypatch, dequantize_padded)
    numbers = np.arange(256, dtype=np.uint8)
    numbers = np.resize(numbers, (rows, columns)).view(jnp.dtype(raw))
    source = np.zeros((rows, columns + 16), numbers.dtype)
    source[:, :columns] = numbers
    found, ref = tile(machine, rows, columns, dtype=dtype)
    code = dequantize_padded.CODE[raw, jnp.dtype(dtype).name]
    dequantize_padded._widen_body(code, None, machine.array(source, shared=True), ref)
    expected = numbers.astype(np.float32)
    np.testing.assert_array_equal(found[:, :columns].astype(np.float32), expected)
    np.testing.assert_array_equal(np.signbit(found[:, :columns]), np.signbit(expected))


@pytest.mark.parametrize("columns", range(32, 577, 32))
@pytest.mark.parametrize(("first", "limit", "start"), [(32, 70, 40), (160, 200, 0), (192, 0, 0)])
def test_copies_of_eight_bits(machine, columns, first, limit, start):
    source = np.random.default_rng(0).integers(-128, 128, (200, 3, columns - 16)).astype(np.int8)
    found = np.full((16, columns + 16), 99, np.int8)
    ref, of_head = machine.array(found, shared=True), machine.array(source, lambda x: x[:, 1])
    async_copies._start_body(True, None, of_head, ref, *map(np.int64, (first, limit, start)))
    async_copies._wait_body(0, None)
    expected = np.zeros((16, columns), np.int8)
    for row in range(max(first, start), min(limit, first + 16)):
        expected[row - first, : columns - 16] = source[row, 1]
    np.testing.assert_array_equal(found[:, :columns], expected)


def test_layouts_agree():
    """Checks that the simulator's lanes hold a tile where Mosaic's WGMMA layout has it."""
    values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    np.testing.assert_array_equal(Tile.of(values).values(), values)
    assert Tile.of(values).registers.shape == inline.WGMMA.to_mgpu().registers_shape((64, 32))
