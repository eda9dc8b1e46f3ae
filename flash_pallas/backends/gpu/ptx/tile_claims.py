"""Tiles that CTAs claim from a counter in device memory."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf

from .inline import WARPGROUP, i32_constant


def claim(num_ctas: int, counter, place, order=None):
    """Adds 1 to the counter and returns what it was, to all threads and in shared memory.

    With an order it returns the number of the tile that this is in it, `num_ctas` further on.

    Args:
        num_ctas: number of CTAs, each of which has its first tile without a claim.
        counter: int32[1] in device memory.
        place: int32[1] in shared memory.
        order: int32[tiles] in device memory.
    """
    refs = (counter, place) if order is None else (counter, place, order)
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(refs),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    return run(functools.partial(_claim_body, num_ctas))(*refs)


def _claim_body(num_ctas: int, _, counter, place, order=None):
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    zero = arith.constant(index, 0)
    thread = arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, thread, i32_constant(0)))
    with ir.InsertionPoint(branch.then_block):
        pointer = mgpu.utils.memref_ptr(counter)
        claimed = llvm.inline_asm(
            i32, [pointer], "atom.global.add.u32 $0, [$1], 1;", "=r,l", has_side_effects=True
        )
        if order is not None:
            place_in_order = arith.addi(
                arith.index_cast(index, claimed), arith.constant(index, num_ctas)
            )
            claimed = memref.load(order, [place_in_order])
        memref.store(claimed, place, [zero])
        scf.yield_([])
    mgpu.utils.warpgroup_barrier()
    number = memref.load(place, [zero])
    return mgpu.FragmentedArray.splat(number, (), is_signed=True)
