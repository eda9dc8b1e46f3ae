"""Stores of register tiles to device memory as they lie, without a detour through shared memory."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ..mosaic import inline
from ..mosaic.registers import at, coordinates, i32_constant, opaque, origin, splat
from .tiles import where


def store(values, target, starts, interpret: bool):
    """Writes an f32 tile to [rows, columns] in device memory, in the dtype of the target.

    Rows and columns that the array does not have are not written. Under the interpreter it has all.

    Args:
        values: f32 tile in the accumulator layout.
        target: float32 or of 16 bits, columns a multiple of 2.
        starts: (row, column) where the first element goes, the column a multiple of 2.
        interpret: run by the interpreter.
    """
    values = values.astype(target.dtype)
    if interpret:
        index = (pl.ds(start, size) for start, size in zip(starts, values.shape, strict=True))
        target[tuple(index)] = values
        return
    types: Any = (inline.WGMMA, plgpu.RefType(), *(plgpu.Layout.WG_SPLAT,) * 2)
    body = functools.partial(_store_body, values.dtype.itemsize)
    plgpu.inline_mgpu(arg_types=types)(body)(values, target, *map(jnp.int32, starts))


def _store_body(size: int, _, values, target, first_row, first_column):
    i64 = ir.IntegerType.get_signless(64)
    length, width = target.type.shape
    (stride, _), _ = target.type.get_strides_and_offset()
    row, column = origin(values.shape, values.layout)
    row = opaque(arith.addi(splat(first_row), row))
    column = arith.addi(splat(first_column), column)
    held = {}  # by the row of thread 0
    for index, down, right in coordinates(values.shape, values.layout):
        held.setdefault(down, []).append((right, values.registers[index]))
    wide = lambda x, bytes: arith.muli(arith.extsi(i64, x), arith.constant(i64, bytes))
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(target))
    base = arith.addi(base, arith.addi(wide(row, size * stride), wide(column, size)))
    for down, pairs in held.items():
        exists = arith.cmpi(arith.CmpIPredicate.slt, row, i32_constant(length - down))
        write = functools.partial(_store_pairs, base, size, stride * down, pairs, (column, width))
        where(exists, write)


def _store_pairs(base, size: int, offset: int, pairs, ends):
    column, width = ends
    for right, register in pairs:
        exists = arith.cmpi(arith.CmpIPredicate.slt, column, i32_constant(width - right))
        write = functools.partial(_store_pair, base, size, size * (offset + right), register)
        where(exists, write)


def _store_pair(base, size: int, offset: int, register):
    if size == 4:
        code, values = "st.global.v2.b32 [$0+{}], {{$1, $2}};", [at(register, e) for e in (0, 1)]
    else:
        i32 = ir.IntegerType.get_signless(32)
        code, values = "st.global.b32 [$0+{}], $1;", [llvm.bitcast(i32, register)]
    constraints = "l" + (",f,f" if size == 4 else ",r")
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [base, *values], code.format(offset), constraints, has_side_effects=True)
