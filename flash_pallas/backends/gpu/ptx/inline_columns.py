"""Operations of a warpgroup on columns of its tile, each of which is spread over all warps."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from ..launch import WARPGROUP_ROWS, tile_transforms
from .eight_bit_tiles import pointer
from .inline import (
    COLS,
    WARP,
    WARPGROUP,
    WGMMA,
    at,
    coordinates,
    elements,
    fragmented,
    i32_constant,
    pair,
    splat,
)

WARPS = WARPGROUP // WARP
_COMBINE = {"max": (arith.maximumf, jnp.max), "add": (arith.addf, jnp.sum)}


def reduce_rows(kind: str, tile, scratch, interpret: bool):
    """Reduces each column to its maximum ("max") or sum ("add").

    All warps meet in it once. Before the next call they have to meet again.

    Args:
        kind: which of the two.
        tile: f32[rows, columns] in WGMMA.
        scratch: f32[WARPS, columns] in shared memory, for what warps exchange.
        interpret: run under the interpreter.

    Returns:
        f32[columns] in COLS.
    """
    if interpret:
        return _COMBINE[kind][1](tile, axis=0)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((tile.shape[1],), jnp.float32, COLS),
    )(functools.partial(_reduce_body, kind))
    return run(tile, scratch)


def _reduce_body(kind, _, tile, scratch):
    index, combine = ir.IndexType.get(), _COMBINE[kind][0]
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))
    lane, warp = (f(thread, i32_constant(WARP)) for f in (arith.remui, arith.divui))
    own = {}
    places = tile.layout.thread_idxs(tile.shape)
    for (at_register, _, number), (_, column) in zip(
        coordinates(tile.shape, tile.layout), places, strict=True
    ):
        own.setdefault(number, ([], column))[0].append(tile.registers[at_register])
    columns = []
    for registers, column in own.values():
        reduced = functools.reduce(combine, registers)
        values = [at(reduced, e) for e in range(elements(reduced))]
        for distance in (4, 8, 16):  # lanes of one column
            values = [combine(x, mgpu.utils.shfl_bfly(x, distance)) for x in values]
        columns.append((values, column))
    first = arith.cmpi(arith.CmpIPredicate.ult, lane, i32_constant(4))
    with ir.InsertionPoint(scf.IfOp(first).then_block):
        for values, column in columns:
            vector.store(pair(*values), scratch, [arith.index_cast(index, warp), column])
        scf.yield_([])
    mgpu.utils.warpgroup_barrier()
    return _combined(combine, scratch, (tile.shape[1],))


def _combined(combine, scratch, shape):
    """Combines what the warps wrote; returns f32[columns] in COLS."""
    layout, index = COLS.to_mgpu(), ir.IndexType.get()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    rows = [arith.constant(index, w) for w in range(WARPS)]
    two = ir.VectorType.get((2,), ir.F32Type.get())
    for at_register, (column,) in zip(
        np.ndindex(*registers.shape), layout.thread_idxs(shape), strict=True
    ):
        parts = [vector.load(two, scratch, [row, column]) for row in rows]
        registers[at_register] = functools.reduce(combine, parts)
    return fragmented(registers, layout)


def store_transposed(tile, target, swizzle: int, interpret: bool, order=None):
    """Writes a tile transposed.

    Args:
        tile: [rows, columns] in WGMMA.
        target: [columns, rows] in shared memory.
        swizzle: swizzle of target, in bytes.
        interpret: run under the interpreter, which ignores `order`.
        order: maps (row, number of rows) to the row's place in target, i32; None leaves rows where
            they are.
    """
    if interpret:
        target[...] = tile.T
        return
    refs = WGMMA, plgpu.RefType(tile_transforms(swizzle, target.dtype))
    plgpu.inline_mgpu(arg_types=refs)(functools.partial(_store_body, order))(tile, target)


def _store_body(order, _, tile, target):
    i32 = ir.IntegerType.get_signless(32)
    places = tile.layout.thread_idxs(tile.shape)
    for register, place in zip(tile.registers.flat, places, strict=True):
        row, column = (arith.index_cast(i32, x) for x in place)
        row = row if order is None else order(row, tile.shape[0])
        for e in range(elements(register)):
            address = pointer(target, arith.addi(column, i32_constant(e)), row)
            llvm.store(at(register, e), address)


def scale_rows(tile, scales, interpret: bool):
    """Multiplies each of len(scales) equal parts of a tile's rows by its scalar.

    A part has 16 rows or more.
    """
    if interpret:
        return tile * jnp.repeat(jnp.stack(scales), tile.shape[0] // len(scales))[:, None]
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, *(plgpu.Layout.WG_SPLAT,) * len(scales)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA),
    )(_scale_rows_body)
    return run(tile, *scales)


def _scale_rows_body(_, tile, *scales):
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))
    warp, rows = arith.divui(thread, i32_constant(WARP)), tile.shape[0] // len(scales)
    own = {}
    for first in range(0, tile.shape[0], WARPGROUP_ROWS):
        parts = [(first + 16 * w) // rows for w in range(WARPS)]
        own[first] = splat(scales[parts[0]])
        for w in range(1, WARPS):
            if parts[w] != parts[w - 1]:
                later = arith.cmpi(arith.CmpIPredicate.uge, warp, i32_constant(w))
                own[first] = arith.select(later, splat(scales[parts[w]]), own[first])
    registers = tile.registers.copy()
    for index, row, _ in coordinates(tile.shape, tile.layout):
        scale = own[row // WARPGROUP_ROWS * WARPGROUP_ROWS]
        register = registers[index]
        registers[index] = arith.mulf(register, vector.broadcast(register.type, scale))
    return fragmented(registers, tile.layout)
