"""PTX of the Hopper kernels that reckons addresses itself, which the interpreter passes over."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.gpu.ptx import eight_bit_tiles, infinities, inline, modifiers

from .ptx import BFLOAT16, Machine, Tile

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
    machine.install(monkeypatch, eight_bit_tiles)
    numbers = np.random.default_rng(0).integers(-128, 128, (rows, columns)).astype(np.int8)
    shape = lambda swizzle, size: (rows // 8, columns * size // swizzle, 8, swizzle // size)
    source, found = np.zeros(shape(raw, 1), np.int8), np.full(shape(wide, 2), np.nan, dtype)
    source.reshape(-1)[places(rows, columns, raw, 1)] = numbers
    code = eight_bit_tiles._CODE["int8", jnp.dtype(dtype).name]
    refs = (machine.array(x, shared=True) for x in (source, found))
    eight_bit_tiles._widen_body(code, most, None, *refs)
    tile = found.reshape(-1)[places(rows, columns, wide, 2)]
    np.testing.assert_array_equal(tile.astype(np.float32), numbers.astype(np.float32))


class Register(np.ndarray):
    """A register as a key of a dict, as values of MLIR are."""

    __hash__ = object.__hash__


@pytest.fixture(name="registers")
def _registers(monkeypatch) -> Machine:
    """Returns a machine that runs what is done to registers, one number per thread."""
    machine, modules = Machine(), (infinities, inline, modifiers)
    machine.install(monkeypatch, *modules)
    word = lambda x: np.ascontiguousarray(x).view(np.uint32).reshape(len(x))
    dtypes = {"i32": np.uint32, "f32": np.float32}
    machine.llvm.bitcast = lambda kind, x: word(x).view(dtypes[kind])
    constant = lambda value: lambda x: np.full(128, value(x))
    execute = lambda kind, code, *words: machine._run(kind, list(map(word, words)), code, "")
    made = {
        "i32_constant": constant(lambda x: np.uint32(x % 2**32)),
        "f32_constant": constant(np.float32),
        "assembly": lambda kind, *given: machine.llvm.bitcast(kind, execute(kind, *given)),
    }
    for module, name in itertools.product(modules, made):
        monkeypatch.setattr(module, name, made[name], raising=False)
    return machine


def test_quotients_are_those_of_numbers_that_are_not_tiny(registers):
    registers.shape = 64, 128
    x, y = np.random.default_rng(0).normal(size=(2, 64, 128)).astype(np.float32)
    y[0, :8] = 0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 2e-38, 1e-39
    x[0, 5:9] = 1e3, 0.5, 0.0, 1e-39
    found = modifiers._quotient_body(None, Tile.of(x), Tile.of(y)).values()
    with np.errstate(divide="ignore"):
        exact = (x.astype(np.float64) / y).astype(np.float32)
    exact[0, 7:9] = np.nan, 0.0  # 0 / 0, as what is below 2^-126 is 0, and 0 / y
    np.testing.assert_allclose(found, exact, rtol=2.5e-7)


def test_every_bias_of_sixteen_bits_is_marked_where_it_is_infinite(registers):
    every = np.arange(2**16, dtype=np.uint16)
    both = np.concatenate([every, np.roll(every, 1)])  # each in either half of a word
    bits = both.reshape(64, 2048)
    registers.shape = bits.shape
    bias = Tile.of(bits.view(BFLOAT16))
    for index in np.ndindex(*bias.registers.shape):
        bias.registers[index] = bias.registers[index].view(Register)
    scores = Tile.of(np.resize(np.float32([0.0, 1.0]), bits.shape))
    found = infinities._with_marked_body(0.5, None, scores, bias).values()
    numbers = bits.view(BFLOAT16).astype(np.float32)
    finite = np.isfinite(numbers)
    assert np.isnan(found[~finite]).all()
    kept = np.where(abs(numbers) < 2.0**-126, 0.0, numbers)[finite]
    half = np.resize([0.0, 0.5], bits.shape)[finite]
    exact = half + kept
    assert (abs(found[finite] - exact) <= 2.0**-22 * (abs(exact) + abs(kept))).all()
    nothing = (half == 0.0) & (kept == 0.0)
    assert nothing.any() and not found[finite][nothing].any()
