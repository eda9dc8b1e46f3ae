"""Rows of the decode kernel: row r of a KV head is head r % group of query r // group."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ..mosaic import inline
from ..mosaic.registers import at, coordinates, i32_constant, opaque, origin, splat
from .threads import where


def queries(first, rows: int, group: int, total: int, interpret: bool):
    """Returns int32[rows]: the query of each row from `first` on, or the last one past the end."""
    row = lax.broadcasted_iota(jnp.int32, (rows,), 0)
    if not interpret:
        row = plgpu.layout_cast(row, inline.ROWS)
    row = lax.min(row + first, jnp.full_like(row, total - 1))
    return row if group == 1 else lax.div(row, jnp.full_like(row, group))


def store(values, target, first, interpret: bool):
    """Writes an f32 tile from registers to rows `first` on of [rows, columns] in device memory.

    Stores go straight from registers: four neighbouring lanes write a sector of 32 bytes. Rows and
    columns that the array does not have are not written. Under the interpreter it has all rows.

    Args:
        values: f32[rows, columns] in the layout of accumulators, with at least the array's columns.
        target: f32 array whose number of columns is a multiple of 8.
        first: int32, the row of the array where the tile's first row goes.
        interpret: run under the interpreter.
    """
    if interpret:
        target[pl.ds(first, values.shape[0])] = values[:, : target.shape[1]]
        return
    types: Any = (inline.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT)
    plgpu.inline_mgpu(arg_types=types)(_store_body)(values, target, jnp.int32(first))


def _store_body(_, values, target, first):
    i64 = ir.IntegerType.get_signless(64)
    length, width = target.type.shape
    (stride, _), _ = target.type.get_strides_and_offset()
    row, column = origin(values.shape, values.layout)
    row = opaque(arith.addi(splat(first), row))
    held = {}  # by the row of thread 0
    for index, down, right in coordinates(values.shape, values.layout):
        if right < width:
            held.setdefault(down, []).append((right, values.registers[index]))
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(target))
    size = lambda x, bytes: arith.muli(arith.extsi(i64, x), arith.constant(i64, bytes))
    base = arith.addi(base, arith.addi(size(row, 4 * stride), size(column, 4)))
    for down, pairs in held.items():
        exists = arith.cmpi(arith.CmpIPredicate.slt, row, i32_constant(length - down))
        where(exists, functools.partial(_store_pairs, base, 4 * stride * down, pairs))


def _store_pairs(base, offset: int, pairs):
    void = ir.Type.parse("!llvm.void")
    for right, register in pairs:
        code = f"st.global.v2.f32 [$0+{offset + 4 * right}], {{$1, $2}};"
        both = at(register, 0), at(register, 1)
        llvm.inline_asm(void, [base, *both], code, "l,f,f", has_side_effects=True)
