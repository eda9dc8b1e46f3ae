"""Converts padded tiles of eight bits in shared memory to the 16 bits of matmuls.

Every int8 and every float8_e4m3fn is a bfloat16 and a float16, so nothing is rounded. GPUs before
8.9 have no instruction for float8: its bits are moved to where those of the wider number are, which
gives the number times a power of two, and one multiplication takes that back. NaN stays NaN.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .inline import i32_constant
from .threads import THREADS, assembly, less, linear, shared_address, thread, where

AT_ONCE = 8  # numbers that a thread converts: 8 bytes become 16
# PTX from a word of four numbers, $1, to two of 16 bits, $0: the first two or the last two.
#
# An integer b makes the mantissa of a power of two of which it is a multiple of the last digit. In
# bfloat16 that is 128 for seven bits: 128 + (b & 127), minus 128, or 256 where b is negative. In
# float16 it is 1024 for all eight, of which the first is flipped: 1024 + b + 128, minus 1152.
#
# Exponent and mantissa of float8_e4m3fn, seven bits, become the lower bits of the wider exponent
# and the upper ones of its mantissa: the number times 2**-8 in float16, times 2**-120 in bfloat16,
# subnormal numbers too. Where all seven are set, a sum carries into the rest of the exponent.
CODE = {
    ("int8", "bfloat16"): """
        prmt.b32 t, $1, 0x43434343, {low};
        and.b32 a, t, 0xff7fff7f;
        and.b32 c, t, 0xff80ff80;
        xor.b32 c, c, 0x80008000;
        fma.rn.bf16x2 $0, a, 0x3f803f80, c;""",
    ("int8", "float16"): """
        xor.b32 t, $1, 0x80808080;
        prmt.b32 t, t, 0x64646464, {low};
        fma.rn.f16x2 $0, t, 0x3c003c00, 0xe480e480;""",
    ("float8_e4m3fn", "bfloat16"): """
        prmt.b32 t, $1, 0, {high};
        and.b32 a, t, 0x80008000;
        and.b32 t, t, 0x7f007f00;
        shr.u32 t, t, 4;
        add.u32 c, t, 0x00100010;
        and.b32 c, c, 0x08000800;
        mul.lo.u32 c, c, 15;
        or.b32 t, t, c;
        or.b32 t, t, a;
        fma.rn.bf16x2 $0, t, 0x7b807b80, 0x80008000;""",
    ("float8_e4m3fn", "float16"): """
        prmt.b32 t, $1, 0, {high};
        and.b32 a, t, 0x80008000;
        and.b32 t, t, 0x7f007f00;
        shr.u32 t, t, 1;
        add.u32 c, t, 0x00800080;
        and.b32 c, c, 0x40004000;
        or.b32 t, t, c;
        or.b32 t, t, a;
        fma.rn.f16x2 $0, t, 0x5c005c00, 0x80008000;""",
}
# Selectors of prmt: a byte as the lower half of 16 bits, or as the upper half of them.
HALVES = ({"low": "0x4140", "high": "0x1404"}, {"low": "0x4342", "high": "0x3424"})


def widen(raw, tile, interpret: bool):
    """Writes the numbers of a tile in another dtype, for other threads after the next barrier.

    Args:
        raw: [rows, columns] in shared memory, of int8 or float8_e4m3fn; 16 columns are padding.
        tile: [rows, columns] in shared memory, of bfloat16 or float16.
        interpret: run by the interpreter.
    """
    if interpret:
        columns = pl.ds(0, raw.shape[1] - 16)
        tile[:, columns] = raw[:, columns].astype(tile.dtype)
        return
    code = CODE[jnp.dtype(raw.dtype).name, jnp.dtype(tile.dtype).name]
    refs = plgpu.RefType(), plgpu.RefType()
    plgpu.inline_mgpu(arg_types=refs)(functools.partial(_widen_body, code))(raw, tile)


def _widen_body(code: str, _, raw, tile):
    rows, pitch = raw.type.shape
    row_pieces = (pitch - 16) // AT_ONCE
    total, me = rows * row_pieces, thread()
    for start in range(0, total, THREADS):
        number = arith.addi(me, i32_constant(start))
        row, piece = (f(number, i32_constant(row_pieces)) for f in (arith.divui, arith.remui))
        source = linear(shared_address(raw), (row, pitch), (piece, AT_ONCE))
        target = linear(shared_address(tile), (row, 2 * tile.type.shape[1]), (piece, 2 * AT_ONCE))
        exists = less(number, i32_constant(total)) if start + THREADS > total else None
        where(exists, functools.partial(_widen_piece, code, source, target))


def _widen_piece(code: str, source, target):
    i32 = ir.IntegerType.get_signless(32)
    two = ir.Type.parse("!llvm.struct<(i32, i32)>")
    load = "ld.shared.v2.b32 {$0, $1}, [$2];"
    loaded = llvm.inline_asm(two, [source], load, "=r,=r,r", has_side_effects=True)
    words = [llvm.extractvalue(i32, loaded, [i]) for i in range(2)]
    converted = [_converted(code, word, half) for word in words for half in HALVES]
    assembly("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", target, *converted)


def _converted(code: str, word, half: dict[str, str]):
    """Converts two numbers of a word; i32 of two 16-bit numbers."""
    i32 = ir.IntegerType.get_signless(32)
    # Constants of a fused multiply-add of halves have to be registers.
    *before, last = code.format(**half).strip().split("\n")
    place, *operands = last.strip().removesuffix(";").split(", ")
    named = [(f"k{i}", x) for i, x in enumerate(operands) if x.startswith("0x")]
    for name, value in named:
        before.append(f"mov.b32 {name}, {value};")
        operands = [name if x == value else x for x in operands]
    body = " ".join(line.strip() for line in (*before, f"{', '.join([place, *operands])};"))
    text = f"{{ .reg .b32 t, a, c, k0, k1, k2; {body} }}"
    return llvm.inline_asm(i32, [word], text, "=r,r", has_side_effects=False)
