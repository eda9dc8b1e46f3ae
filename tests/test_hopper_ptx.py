"""PTX of the Hopper kernels that reckons addresses itself, which the interpreter passes over."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.hopper.decode import dequantize

from .ptx import BFLOAT16, Machine

PIECE, LINE = 16, 128  # bytes that a swizzle moves together, and after which its pattern turns


def places(rows: int, columns: int, swizzle: int, size: int) -> np.ndarray:
    """Returns where each element of a tile lies: in pieces of 8 rows by `swizzle` bytes, swizzled.

    The swizzle is that of TMA and wgmma (PTX ISA 9.0, "Swizzling modes"): the number of a piece of
    16 bytes in its line, of the swizzle's width, by exclusive or with that of the line of 128.
    """
    row, column = np.indices((rows, columns))
    panel, byte = np.divmod(column * size, swizzle)
    inside = row % 8 * swizzle + byte
    turned = inside ^ (inside // LINE % (swizzle // PIECE) * PIECE)
    tile = (row // 8 * (columns * size // swizzle) + panel) * 8 * swizzle
    return (tile + turned) // size


SHAPES = [
    (rows, columns, raw, tile)
    for rows, columns in ((64, 64), (64, 128), (64, 576), (32, 320), (32, 512), (64, 96), (64, 32))
    for raw, tile in itertools.product((32, 64, 128), (32, 64, 128))
    if columns % raw == 0 and 2 * columns % tile == 0
]


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize(("rows", "columns", "raw", "wide"), SHAPES)
def test_every_number_of_eight_bits_is_widened(monkeypatch, rows, columns, raw, wide, dtype, most):
    machine = Machine()
    machine.install(monkeypatch, dequantize)
    numbers = np.random.default_rng(0).integers(-128, 128, (rows, columns)).astype(np.int8)
    shape = lambda swizzle, size: (rows // 8, columns * size // swizzle, 8, swizzle // size)
    source, found = np.zeros(shape(raw, 1), np.int8), np.full(shape(wide, 2), np.nan, dtype)
    source.reshape(-1)[places(rows, columns, raw, 1)] = numbers
    code = dequantize._CODE["int8", jnp.dtype(dtype).name]
    refs = (machine.array(x, shared=True) for x in (source, found))
    dequantize._widen_body(code, most, None, *refs)
    tile = found.reshape(-1)[places(rows, columns, wide, 2)]
    np.testing.assert_array_equal(tile.astype(np.float32), numbers.astype(np.float32))
