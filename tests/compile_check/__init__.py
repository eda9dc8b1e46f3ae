"""Compiles every Hopper kernel to machine code for sm_90a on a machine without a GPU.

    python -m tests.compile_check [--only TEXT] [--json FILE]

Rows "without producer" are what jaxlib 0.12 runs. With 0.12 installed all rows are, and nvJitLink
compiles them in place of ptxas: the package nvidia-nvjitlink must be there.

Needs the `cuda13` extra (plugin, compiler wheels), no GPU and no driver; a minute per head dim and
more. The column `regs` is what a thread has at launch: warpgroups trade registers afterwards. With
an nvdisasm on PATH or in the CUDA wheels (package nvidia-cuda-nvdisasm) it is the highest register
that an instruction names (R237), and --json has counts of instructions; without one Mosaic GPU
complains once per kernel that it could not run it, and nothing else is lost.

The exit status is 1 if a kernel fails to compile, spills more than `rows.ALLOWED_SPILLS`, has its
wgmma serialised or its setmaxnreg ignored, or if ptxas reported no kernel at all.
"""
