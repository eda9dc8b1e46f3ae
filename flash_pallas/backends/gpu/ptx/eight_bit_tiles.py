"""Converts tiles of eight bits in shared memory to 16, as wgmma wants both operands alike.

Every int8 and every float8_e4m3fn is a bfloat16 and a float16, so nothing is rounded. Eight numbers
are read, converted and written at a time: where the lanes of a row have a whole panel of the
swizzle, 8 bytes a thread on one side and 16 on the other touch each bank of shared memory once.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ..launch import tile_transforms
from .inline import WARP, WARPGROUP, assembly, at, coordinates, fragmented, i32_constant

AT_ONCE = 8  # numbers that a thread of the producer converts
VALUE_THREADS = WARPGROUP // 4  # that share the columns of a key: the other lanes have other keys
# An integer b makes the mantissa of a power of two of which it is a multiple of the last digit. In
# bfloat16 that is 128 for seven bits: 128 + (b & 127), minus 128, or 256 where b is negative. In
# float16 it is 1024 for all eight, of which the first is flipped: 1024 + b + 128, minus 1152.
_CODE = {
    ("int8", "bfloat16"): """{{ .reg .b32 t, a, c;
        prmt.b32 t, $1, 0x43434343, {bytes}; and.b32 a, t, 0xff7fff7f; and.b32 c, t, 0xff80ff80;
        sub.bf16x2 $0, a, c; }}""",
    ("int8", "float16"): """{{ .reg .b32 t, c;
        xor.b32 t, $1, 0x80808080; prmt.b32 t, t, 0x64646464, {bytes}; mov.b32 c, 0x64806480;
        sub.f16x2 $0, t, c; }}""",
    ("float8_e4m3fn", "bfloat16"): """{{ .reg .b16 h<2>, x<2>; .reg .b32 t; .reg .f32 a, c;
        mov.b32 {{h0, h1}}, $1; cvt.rn.f16x2.e4m3x2 t, {half}; mov.b32 {{x0, x1}}, t;
        cvt.f32.f16 a, x0; cvt.f32.f16 c, x1; cvt.rn.bf16x2.f32 $0, c, a; }}""",
    ("float8_e4m3fn", "float16"): """{{ .reg .b16 h<2>;
        mov.b32 {{h0, h1}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}""",
}
_HALVES = ({"bytes": "0x4140", "half": "h0"}, {"bytes": "0x4342", "half": "h1"})


def widen(raw, tile, swizzles: tuple[int, int], interpret: bool, most: int | None = None):
    """Writes the numbers of a tile in another dtype; matmuls see them after `commit_smem`.

    Args:
        raw: [rows, columns] in shared memory, of int8 or float8_e4m3fn.
        tile: [rows, columns] in shared memory, of bfloat16 or float16.
        swizzles: swizzles of raw and of tile, in bytes.
        interpret: run by the interpreter.
        most: number of eights that a thread loads before it stores any; None: all of them.
    """
    if interpret:
        tile[...] = raw[...].astype(tile.dtype)
        return
    refs = zip((raw, tile), swizzles, strict=True)
    types = tuple(plgpu.RefType(tile_transforms(s, ref.dtype)) for ref, s in refs)
    code = _CODE[jnp.dtype(raw.dtype).name, jnp.dtype(tile.dtype).name]
    plgpu.inline_mgpu(arg_types=types)(functools.partial(_widen_body, code, most))(raw, tile)


def key_rows(raw, swizzle: int, interpret: bool):
    """Loads a block of K in eight bits into registers, as a matmul's left operand.

    Each thread reads one quarter of the columns, 16 bytes at a time. For all o, quarter t becomes
    columns 8 o + 2 t and 8 o + 2 t + 1: those that a thread holds of an operand.

    Args:
        raw: [rows, columns] in shared memory, of int8 or float8_e4m3fn; 64, 128 or 256 columns.
        swizzle: swizzle of raw, in bytes.
        interpret: run by the interpreter, which leaves columns where they are.

    Returns:
        float16[rows, columns] in WGMMA.
    """
    if interpret:
        return raw[...].astype(jnp.float16)
    return _into_registers(_key_rows_body, raw, raw.shape, swizzle)


def value_rows(raw, swizzle: int, interpret: bool):
    """Loads a block of V in eight bits into registers, transposed, as a matmul's left operand.

    Row r is column `value_of(r)` of the block: a thread reads neighbouring columns at a time.

    Args:
        raw: [rows, columns] in shared memory, of int8 or float8_e4m3fn; 64, 128 or 256 columns.
        swizzle: swizzle of raw, in bytes.
        interpret: run by the interpreter, which leaves rows where they are.

    Returns:
        float16[columns, rows] in WGMMA.
    """
    if interpret:
        return raw[...].astype(jnp.float16).T
    return _into_registers(_value_rows_body, raw, raw.shape[::-1], swizzle)


def value_of(row, width: int):
    """Returns which column of V, i32, this row (i32) of `value_rows` is."""
    own, constant = width // VALUE_THREADS, i32_constant
    warp = arith.divui(arith.remui(row, constant(64)), constant(16))
    in_warp = arith.remui(row, constant(8))
    which = arith.addi(
        arith.muli(arith.divui(row, constant(64)), constant(2)),
        arith.divui(arith.remui(row, constant(16)), constant(8)),
    )
    place = arith.addi(arith.muli(warp, constant(8)), in_warp)
    return arith.addi(arith.muli(place, constant(own)), which)


def _into_registers(body, raw, shape, swizzle: int):
    code = _CODE[jnp.dtype(raw.dtype).name, "float16"]
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tile_transforms(swizzle, raw.dtype)),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float16, plgpu.Layout.WGMMA),
    )(functools.partial(body, code, shape))
    return run(raw)


def _thread_place():
    """Returns (warp, lane // 4, lane % 4) of the thread in its warpgroup, i32."""
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))
    lane = arith.remui(thread, i32_constant(WARP))
    four = i32_constant(4)
    return arith.divui(thread, i32_constant(WARP)), arith.divui(lane, four), arith.remui(lane, four)


def _convert(code: str, word, half: int):
    """Converts the first (half 0) or last two (1) of a word's four numbers to a float16 vector."""
    i32 = ir.IntegerType.get_signless(32)
    made = llvm.inline_asm(i32, [word], code.format(**_HALVES[half]), "=r,r")
    return llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), made)


def _key_rows_body(code, shape, _, raw):
    rows, width = shape
    warp, in_warp, quarter = _thread_place()
    own = width // 4  # numbers of a row that a thread has
    words = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
    by_place = {}
    for row in range(0, rows, 8):
        if row % 64 >= 16:  # another warp's
            continue
        place = arith.addi(arith.muli(warp, i32_constant(16)), in_warp)
        place = arith.addi(place, i32_constant(row))
        for start in range(0, own, 16):
            column = arith.addi(arith.muli(quarter, i32_constant(own)), i32_constant(start))
            loaded = llvm.load(words, pointer(raw, place, column), alignment=16)
            for word, half in itertools.product(range(4), range(2)):
                pair = start // 2 + word * 2 + half  # of the thread's in the row
                by_place[row, 8 * pair] = _convert(code, at(loaded, word), half)
    return _tile(shape, by_place)


def _value_rows_body(code, shape, _, raw):
    """Pairs the numbers of two keys that follow each other, for every column of the thread."""
    width, keys = shape
    warp, in_warp, quarter = _thread_place()
    own = width // VALUE_THREADS  # numbers of a key that a thread has: 2, 4 or 8
    column = arith.addi(arith.muli(warp, i32_constant(8)), in_warp)
    column = arith.muli(column, i32_constant(own))
    by_place = {}
    for key in range(0, keys, 8):
        row = arith.addi(arith.muli(quarter, i32_constant(2)), i32_constant(key))
        key_words = [
            _words(pointer(raw, arith.addi(row, i32_constant(e)), column), own) for e in range(2)
        ]
        for which in range(0, own, 2):
            # Of both keys, the numbers of two columns: bytes 0 and 1 of a word, or 2 and 3.
            selector = i32_constant(0x7362 if which % 4 else 0x5140)
            paired = assembly(
                selector.type,
                "prmt.b32 $0, $1, $2, $3;",
                *(x[which // 4] for x in key_words),
                selector,
            )
            for half in range(2):
                by_place[64 * (which // 2) + 8 * half, key] = _convert(code, paired, half)
    return _tile(shape, by_place)


def _words(place, size: int) -> list:
    """Loads `size` bytes from here on as i32 words; 2 bytes become the lower half of one."""
    i32 = ir.IntegerType.get_signless(32)
    if size == 2:
        short = llvm.load(ir.IntegerType.get_signless(16), place, alignment=2)
        return [arith.extui(i32, short)]
    words = llvm.load(ir.VectorType.get((size // 4,), i32), place, alignment=size)
    return [at(words, n) for n in range(size // 4)]


def _tile(shape, by_place):
    layout = plgpu.Layout.WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for index, row, column in coordinates(shape, layout):
        registers[index] = by_place[row, column]
    return fragmented(registers, layout)


def _widen_body(code: str, most: int | None, _, raw, tile):
    """Widens eight numbers of a thread in every panel of `raw`, as wide as its swizzle.

    Lanes share a row of a panel, and a thread's rows are multiples of eight apart, so its addresses
    differ by constants. Reckoned one by one they took half of the instructions.
    """
    i32 = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((2,), i32)
    outer, panels, inner, columns = raw.type.shape
    lanes = columns // AT_ONCE
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))
    row = arith.divui(thread, i32_constant(lanes))
    column = arith.muli(arith.remui(thread, i32_constant(lanes)), i32_constant(AT_ONCE))
    source, target = (_Panels.of(ref, columns, row, column) for ref in (raw, tile))
    rows, apart = outer * inner, WARPGROUP // lanes
    assert rows % apart == 0, (rows, columns)
    places = list(itertools.product(range(panels), range(0, rows, apart)))
    for some in itertools.batched(places, most or len(places)):
        # All loads come first: the compiler moves none before a store that might write there.
        loaded = [llvm.load(words, source.pointer(*place), alignment=8) for place in some]
        for place, pair in zip(some, loaded, strict=True):
            made = [
                llvm.inline_asm(i32, [at(pair, word)], code.format(**half), "=r,r")
                for word, half in itertools.product(range(2), _HALVES)
            ]
            wide = vector.from_elements(ir.VectorType.get((4,), i32), made)
            llvm.store(wide, target.pointer(*place), alignment=16)


class _Panels(NamedTuple):
    """The places of a thread in a tile that is seen as panels of `columns` columns.

    The tile's own panels, as wide as its swizzle, may be wider or narrower by a power of two.
    """

    tile: Any
    columns: int
    first: list  # pointers to the thread's place in the panels of one of the tile's own, or in one

    @classmethod
    def of(cls, tile, columns: int, row, column) -> _Panels:
        """Makes the places of a thread with this row and column of each panel."""
        per_panel = max(tile.type.shape[3] // columns, 1)
        start = lambda n: arith.addi(column, i32_constant(n * columns))
        return cls(tile, columns, [pointer(tile, row, start(n)) for n in range(per_panel)])

    def pointer(self, panel: int, row: int):
        """Returns a pointer to the place in a panel, `row` rows further, a multiple of eight."""
        strides, _ = self.tile.type.get_strides_and_offset()
        _, _, inner, own = self.tile.type.shape
        which = panel % len(self.first)
        skipped = (panel - which) * self.columns // own
        offset = row // inner * strides[0] + skipped * strides[1]
        size = mgpu.utils.bitwidth(self.tile.type.element_type) // 8
        byte = ir.IntegerType.get_signless(8)
        return mgpu.utils.getelementptr(self.first[which], [i32_constant(offset * size)], byte)


def pointer(tile, row, column):
    """Returns a pointer to an element of a tile in shared memory, the first of 16 bytes or of 8."""
    constant, element = i32_constant, tile.type.element_type
    strides, _ = tile.type.get_strides_and_offset()
    _, _, inner, columns = tile.type.shape
    size = mgpu.utils.bitwidth(element) // 8
    piece = 16 // size  # elements that a swizzle moves together
    pieces = columns // piece
    low, high = arith.remui(row, constant(inner)), arith.divui(row, constant(inner))
    number = arith.divui(arith.remui(column, constant(columns)), constant(piece))
    turned = arith.xori(number, arith.divui(low, constant(8 // pieces)))
    in_piece = arith.remui(column, constant(piece))
    terms = (
        (high, strides[0]),
        (arith.divui(column, constant(columns)), strides[1]),
        (low, strides[2]),
        (turned, piece),
        (in_piece, 1),
    )
    offset = functools.reduce(arith.addi, [arith.muli(x, constant(stride)) for x, stride in terms])
    offset = arith.muli(offset, constant(size))
    byte = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tile), [offset], byte)
