"""Code of single threads: their index, addresses, branches and instructions."""

from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from . import inline
from .inline import i32_constant, opaque

THREADS = inline.WARPGROUP  # among which a tile is divided
UNIT = inline.PIECE_BYTES  # bytes that a thread copies at once, and padding of a tile's row
UNIT_ELEMENTS = UNIT // 2  # all operands of matmuls have 16 bits


def thread():
    """Returns the i32 index of this thread in its warpgroup, hidden from the compiler.

    Addresses computed from it are therefore computed again in every step: those of all copies and
    matmuls of a step would take 20 to 40 registers.
    """
    return opaque(arith.remui(mgpu.utils.thread_idx(), i32_constant(THREADS)))


def shared_address(ref):
    """Returns the i32 address at which a ref of shared memory starts."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def device_address(ref, index, size: int):
    """Returns the i64 address of element `index` (i32) of a ref of device memory.

    Args:
        ref: of device memory.
        index: i32.
        size: bytes of an element.
    """
    i64 = ir.IntegerType.get_signless(64)
    return linear(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), (index, size))


def linear(base, *terms):
    """Computes base + x * factor summed over all terms, in the type of the base; x is i32."""
    for x, factor in terms:
        if x.type != base.type:
            x = arith.extsi(base.type, x)
        factor = arith.constant(base.type, factor)
        base = arith.addi(base, arith.muli(x, factor))
    return base


def less(x, y):
    """Returns the i1 x < y, signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def where(condition, run):
    """Emits run() for threads for which the i1 holds; None: for all threads."""
    if condition is None:
        run()
        return
    with ir.InsertionPoint(scf.IfOp(condition).then_block):
        run()
        scf.yield_([])


def assembly(code: str, constraints: str, *operands):
    """Emits PTX that has no result."""
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(operands), code, constraints, has_side_effects=True)
