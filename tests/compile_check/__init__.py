"""Compiles every kernel to machine code on a machine without a GPU: for an H200, or another target.

    python -m tests.compile_check [--target NAME] [--backend NAME] [--only TEXT ...] [--json FILE]

Targets are those of `device.TARGETS`, from compute capability 8.0 to 12.0. All of them compile with
jax 0.11.2 and 0.12.0.1 and ptxas 13.5. One process compiles for one target. For an H200 it compiles
the Hopper kernels listed in `rows`; for every other target, and with `--backend portable`, it
compiles `portable_rows`.

Rows "without producer" are the kernels that jaxlib 0.12 runs. With 0.12 installed all rows are such
rows, and nvJitLink compiles them in place of ptxas: the package nvidia-nvjitlink must be installed.

Needs the `cuda13` extra (plugin, compiler wheels), no GPU and no driver, and takes a minute per
head dim and more. The column `regs` is the registers per thread at launch: warpgroups trade
registers afterwards. With an nvdisasm on PATH or in the CUDA wheels (package nvidia-cuda-nvdisasm)
it is the highest register that an instruction names (R237), and --json has counts of instructions.
Without nvdisasm, Mosaic GPU complains once per kernel that it could not run it, and nothing else is
lost.

LLVM ends the process where a target lacks an instruction that Mosaic GPU asked LLVM for, such as
fence.proxy.async (plgpu.commit_smem) before 9.0: the culprit is the row after the last one printed
by that process. An instruction in inline assembly is a fault of its row.

The exit status is 1 if a kernel fails to compile, is compiled for another architecture than the
target's, asks for more shared memory than the target has, spills more than ALLOWED_SPILLS of `rows`
or `portable_rows`, has its wgmma serialized or its setmaxnreg ignored, if ptxas reported no
kernel at all, or if a row compiles more kernels or PTX instructions than its budget (`budget`)
allows. --budget notes what the rows cost now.
"""
