"""Launches, and the small vocabulary of kernels on any GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import manual_axes

WARPGROUP_ROWS = 64  # rows of one wgmma, and of one warpgroup's tile everywhere in this package

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,  # ex2.approx.ftz: 2 ulp, far below the rounding of P to 16 bits
    # Every hazard inside a warpgroup is ordered by waits, commit_smem or a barrier in the kernel;
    # Mosaic's own barriers around each shared-memory access cost 13 BAR.SYNC in the forward.
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)


def launch(
    kernel, *, out, scratch, grid: dict[str, int], cluster=None, threads: int, name: str, interpret
):
    """plgpu.kernel with this package's settings; `threads` warpgroups named "wg".

    `kernel` is called with the operands, the outputs and the scratch records, in that order. `grid`
    and `cluster` give the size of each axis by its name. The last axis of the grid is the fastest.
    With a cluster, the grid is one of clusters.
    """
    options: dict[str, Any] = {}
    if cluster:
        options |= {"cluster": tuple(cluster.values()), "cluster_names": tuple(cluster)}
    if interpret:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
    call = plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=threads,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
        **options,
    )
    return manual_axes.untyped(call)


def float32(shape):
    """ShapeDtypeStruct of float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
