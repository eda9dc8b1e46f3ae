"""A row that a warpgroup has in registers, written to an array that has fewer columns."""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from .inline import WARPGROUP, at, elements, i32_constant


def store_columns(row, target, interpret: bool):
    """Writes the first columns of a row, as many as `target` has.

    Args:
        row: [columns], as many for each thread of a warpgroup.
        target: [columns, or fewer] in device memory.
        interpret: run by the interpreter.
    """
    columns = target.shape[0]
    if columns == row.shape[0]:
        target[...] = row
    elif interpret:
        target[...] = row[:columns]
    else:
        layout = plgpu.Layout.WG_STRIDED(row.shape, vec_size=row.shape[0] // WARPGROUP)
        plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))(_store_body)(row, target)


def _store_body(_, row, target):
    columns, (places,) = i32_constant(target.type.shape[0]), row.layout.thread_idxs(row.shape)
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    register = row.registers.flat[0]
    first = arith.index_cast(i32, places[0])
    for e in range(elements(register)):
        column = arith.addi(first, i32_constant(e))
        inside = arith.cmpi(arith.CmpIPredicate.ult, column, columns)
        branch = scf.IfOp(inside)
        with ir.InsertionPoint(branch.then_block):
            memref.store(at(register, e), target, [arith.index_cast(index, column)])
            scf.yield_([])
