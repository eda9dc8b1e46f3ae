"""Kernels that are lowered for a GPU that is not here: what Mosaic GPU asks the device about.

Mosaic GPU takes the compute capability from the default device, and 9.0 where that is a CPU;
`jax_compat.infer_targets` replaces that. It also asks how much shared memory there is, only to
refuse what takes more, which no kernel of this package does: their tile sizes are chosen for the
GPU's own (devices.py). On a CPU it assumes 227 KB.

A program that was exported is compiled where it is loaded, and most kernels would compile for
another GPU, too: what was made for 163 KB of shared memory fails at its launch on a GPU of 99. So
kernels hold an instruction that does not exist, behind a question to the compiler that costs
nothing at run time: on the compute capability that it was made for, LLVM takes it out.
"""

from __future__ import annotations

import functools

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ....devices import Device, targeted
from .. import jax_compat

# LLVM's question about what it compiles for.
_ASKED, _ASK = "asked_by_flash_pallas", "__nvvm_reflect"


def made_for(device: Device, kernel):
    """Returns a kernel that is lowered for the GPU of the `target` around.

    It compiles for GPUs of the same compute capability only.
    """
    jax_compat.infer_targets(_capability)

    def bound(*refs):
        plgpu.inline_mgpu()(functools.partial(_bind, device))()
        kernel(*refs)

    return bound


def _capability() -> str | None:
    """Returns the compute capability of the `target` around, if there is one."""
    device = targeted()
    return None if device is None else device.capability


def _bind(device: Device, context) -> None:
    """Adds the instruction that ptxas refuses, where LLVM compiles for another capability."""
    pointer, i32 = ir.Type.parse("!llvm.ptr"), ir.IntegerType.get_signless(32)
    with ir.InsertionPoint(context.module.body):
        llvm.GlobalOp(
            ir.Type.parse("!llvm.array<12 x i8>"),
            _ASKED,
            ir.Attribute.parse("#llvm.linkage<internal>"),
            constant=True,
            value=ir.StringAttr.get("__CUDA_ARCH\0"),
        )
        type_ = ir.TypeAttr.get(ir.Type.parse("!llvm.func<i32 (ptr)>"))
        llvm.LLVMFuncOp(_ASK, type_, sym_visibility="private")
    asked = llvm.mlir_addressof(pointer, _ASKED)
    compiled_for = llvm.call(i32, [asked], [], [], callee=_ASK)
    number = device.capability.replace(".", "")
    wanted = arith.constant(i32, int(number) * 10)
    with utils.when(arith.cmpi(arith.CmpIPredicate.ne, compiled_for, wanted)):
        name = "".join(x if x.isalnum() else "_" for x in device.kind)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [],
            f"this_program_was_made_for_{name}_of_sm_{number};",
            "",
            has_side_effects=True,
        )
