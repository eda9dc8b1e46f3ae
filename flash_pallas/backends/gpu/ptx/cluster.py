"""PTX of clusters: addresses in shared memory, and mbarriers that count bytes.

Shared memory of another CTA, and bytes that it sends, are beyond Mosaic GPU's primitives. The
interpreter has neither: what calls these functions does something else under it.
"""

from __future__ import annotations

import functools

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .inline import WARPGROUP, i32_constant, splat


def init_barrier(barrier):
    """Initializes an mbarrier, in 8 bytes of shared memory, for bytes that other CTAs send.

    It has one arrival, which announces them.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_init_body)(barrier)


def announce(barrier, size: int):
    """Arrives at an mbarrier for the phase in which `size` bytes are to come."""
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    run(functools.partial(_announce_body, size))(barrier)


def await_bytes(barrier, parity):
    """Waits for the end of an mbarrier's phase with this parity, an i32."""
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    run(_wait_body)(barrier, parity)


def _init_body(_, barrier):
    emit(
        "{ .reg .pred first; setp.eq.s32 first, $1, 0;"
        " @first mbarrier.init.shared::cta.b64 [$0], 1;"
        " @first fence.mbarrier_init.release.cluster; }",
        address(barrier),
        thread(),
    )


def _announce_body(size, _, barrier):
    emit(
        "{ .reg .pred first; setp.eq.s32 first, $1, 0;"
        f" @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size}; }}",
        address(barrier),
        thread(),
    )


def _wait_body(_, barrier, parity):
    emit_wait(barrier, parity)


# --- For code that is written into the kernel as MLIR ---------------------------------------------


def thread():
    """Returns the number of the thread in its warpgroup, i32."""
    return arith.remui(mgpu.utils.thread_idx(), i32_constant(WARPGROUP))


def address(ref):
    """Returns an address in shared memory, 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def emit(code: str, *operands):
    """Emits PTX without results on 32-bit operands."""
    letters = ",".join("r" for _ in operands)
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, list(operands), code, letters, has_side_effects=True)


def emit_wait(barrier, parity):
    """Emits the PTX of `await_bytes`; the parity is a splat i32."""
    emit(
        "{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
        " @!done bra wait; }",
        address(barrier),
        splat(parity),
    )
