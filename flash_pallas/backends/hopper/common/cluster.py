"""PTX of clusters: addresses in shared memory, and mbarriers that count bytes.

Shared memory of another CTA, and bytes that it sends, are beyond Mosaic GPU's primitives.
"""

from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ...gpu.ptx.inline import WARPGROUP, i32_constant, splat


def thread():
    """Returns the number of the thread in its warpgroup, i32."""
    return arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))


def address(ref):
    """Returns an address in shared memory, 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def run(code: str, *operands):
    """Emits PTX without results on 32-bit operands."""
    letters = ",".join("r" for _ in operands)
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, list(operands), code, letters, has_side_effects=True)


def announce(barrier, size: int):
    """Arrives for the phase in which so many bytes are to come."""
    run(
        "{ .reg .pred first; setp.eq.s32 first, $1, 0;"
        f" @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size}; }}",
        address(barrier),
        thread(),
    )


def wait(barrier, parity):
    """Waits for the end of the phase with this parity, a splat i32."""
    run(
        "{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
        " @!done bra wait; }",
        address(barrier),
        splat(parity),
    )


def init_body(_, barrier):
    """Initializes an mbarrier of one arrival, which announces the bytes that other CTAs send."""
    run(
        "{ .reg .pred first; setp.eq.s32 first, $1, 0;"
        " @first mbarrier.init.shared::cta.b64 [$0], 1;"
        " @first fence.mbarrier_init.release.cluster; }",
        address(barrier),
        thread(),
    )
