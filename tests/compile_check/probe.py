"""The smallest kernel of those instructions that every GPU from compute capability 8.0 on has.

It says whether a target can be compiled for at all, and is compiled where no backend has kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .rows import Row

M, N, K = 64, 64, 16  # one warpgroup's four warps have 16 rows each; N is 8 products wide
CHUNK = 16  # bytes that a thread copies, and of a row of 8 elements that ldmatrix reads
WARP = 32

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _i32(value: int):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _assembly(results: list, operands: list, instruction: str) -> list:
    """Runs one instruction, whose operands $0, $1, ... are the results and then the operands."""
    letter = lambda kind: "f" if str(kind) == "f32" else "l" if str(kind) == "i64" else "r"
    constraints = [f"={letter(kind)}" for kind in results] + [letter(x.type) for x in operands]
    kind = llvm.StructType.get_literal(results) if results else ir.Type.parse("!llvm.void")
    found = llvm.inline_asm(
        kind, operands, instruction, ",".join(constraints), has_side_effects=True
    )
    return [llvm.extractvalue(each, found, [i]) for i, each in enumerate(results)]


def _copy(source, destination):
    """Every thread copies 16 bytes, which is all of both operands."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    offset = arith.muli(utils.thread_idx(), _i32(CHUNK))
    there = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(destination)), offset)
    here = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(source)), arith.extui(i64, offset))
    _assembly([], [there, here], "cp.async.cg.shared.global [$0], [$1], 16;")


def _product(_, a, b, a_smem, b_smem):
    """a @ b, f32[M, N] in the layout WGMMA: that of 8 results of mma, one beside the other."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    _copy(a, a_smem)
    _copy(b, b_smem)
    _assembly([], [], "cp.async.commit_group;")
    _assembly([], [], "cp.async.wait_group 0;")
    utils.warpgroup_barrier()
    lane, warp = (op(utils.thread_idx(), _i32(WARP)) for op in (arith.remui, arith.divui))
    row, half = (op(lane, _i32(16)) for op in (arith.remui, arith.divui))
    at = lambda ref, row, row_bytes: arith.addi(
        llvm.ptrtoint(i32, utils.memref_ptr(ref)), arith.muli(row, _i32(row_bytes))
    )
    a_row = at(a_smem, arith.addi(arith.muli(warp, _i32(16)), row), 2 * K)
    a_at = arith.addi(a_row, arith.muli(half, _i32(CHUNK)))
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    a_registers = _assembly([i32] * 4, [a_at], load)
    b_row = at(b_smem, row, 2 * N)
    layout = mgpu.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((M, N)), dtype=object)
    flat = registers.reshape(-1)
    for column in range(N // 8):
        load = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0, $1}, [$2];"
        b_registers = _assembly([i32] * 2, [arith.addi(b_row, _i32(CHUNK * column))], load)
        zeros = [arith.constant(f32, 0.0)] * 4
        places = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        found = _assembly([f32] * 4, [*a_registers, *b_registers, *zeros], f"{_MMA} {places}")
        for pair in range(2):
            vector = llvm.mlir_undef(ir.VectorType.get((2,), f32))
            for i in range(2):
                vector = llvm.insertelement(vector, found[2 * pair + i], position=_i32(i))
            flat[2 * column + pair] = vector
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def probe(a, b, unused: int = 0):
    """a @ b by cp.async, ldmatrix and mma, of bfloat16[M, K] and bfloat16[K, N].

    Args:
        a, b: the operands.
        unused: bytes of shared memory beyond what it needs.
    """

    def kernel(a, b, out, a_smem, b_smem, _):
        layout = plgpu.Layout.WGMMA
        run: Any = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),) * 4,
            return_type=plgpu.ShapeDtypeStruct(out.shape, out.dtype, layout),
        )(_product)
        out[...] = run(a, b, a_smem, b_smem)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        scratch_types=[
            plgpu.SMEM(a.shape, a.dtype),
            plgpu.SMEM(b.shape, b.dtype),
            plgpu.SMEM((unused,), jnp.int8),
        ],
        num_threads=1,
        thread_name="wg",
        kernel_name="probe",
    )(a, b)


def probe_rows() -> Iterator[Row]:
    """One row."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    yield Row("probe", K, "bfloat16", "mma", probe, (shape(M, K), shape(K, N)))
