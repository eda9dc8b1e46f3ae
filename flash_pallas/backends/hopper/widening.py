"""Tiles of eight bits in shared memory made tiles of 16, as the tensor cores want both alike.

Every int8 and every float8_e4m3fn is a bfloat16 and a float16, so nothing is rounded. Eight numbers
are read, converted and written at a time: 8 bytes a thread on one side and 16 on the other touch
each bank of shared memory once.
"""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .clearing import WARPGROUP
from .memory import tile_transforms
from .registers import at, i32_constant

AT_ONCE = 8  # numbers that a thread converts
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


def widen(raw, tile, swizzles: tuple[int, int], interpret: bool):
    """Write the numbers of a tile in another dtype; products see them after `commit_smem`.

    Args:
        raw: [rows, columns] in shared memory, of int8 or float8_e4m3fn.
        tile: [rows, columns] in shared memory, of bfloat16 or float16.
        swizzles: of both, in bytes.
        interpret: run by the interpreter.
    """
    if interpret:
        tile[...] = raw[...].astype(tile.dtype)
        return
    refs = zip((raw, tile), swizzles, strict=True)
    types = tuple(plgpu.RefType(tile_transforms(s, ref.dtype)) for ref, s in refs)
    code = _CODE[jnp.dtype(raw.dtype).name, jnp.dtype(tile.dtype).name]
    plgpu.inline_mgpu(arg_types=types)(functools.partial(_widen_body, code))(raw, tile)


def _widen_body(code: str, _, raw, tile):
    i32 = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((2,), i32)
    outer, across, inner, columns = raw.type.shape
    each = across * columns // AT_ONCE
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))
    places = []
    for start in range(0, outer * inner * each, WARPGROUP):
        number = arith.addi(thread, i32_constant(start))
        row = arith.divui(number, i32_constant(each))
        column = arith.muli(arith.remui(number, i32_constant(each)), i32_constant(AT_ONCE))
        places.append((row, column))
    # All loads come first: the compiler moves none before a store that might write to its place.
    found = [llvm.load(words, _pointer(raw, *place), alignment=8) for place in places]
    for place, pair in zip(places, found, strict=True):
        made = [
            llvm.inline_asm(i32, [at(pair, word)], code.format(**half), "=r,r")
            for word, half in itertools.product(range(2), _HALVES)
        ]
        wide = vector.from_elements(ir.VectorType.get((4,), i32), made)
        llvm.store(wide, _pointer(tile, *place), alignment=16)


def _pointer(tile, row, column):
    """To an element of a tile in shared memory, the first of 16 bytes or of 8."""
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
