"""Kernel launches, and constants and helpers of kernels on any GPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import manual_axes
from ...core.integers import round_up

WARPGROUP_ROWS = 64  # rows of one wgmma, and of one warpgroup's tile everywhere in this package
BUFFER_ALIGNMENT = 1024  # bytes to a multiple of which Mosaic GPU rounds every buffer
BARRIER_BYTES = 8
MOST_BARRIERS = 32  # of one array, as their phases are the bits of one register

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
    """Calls plgpu.kernel with this package's settings; `threads` warpgroups named "wg".

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


def shared_memory(scratch) -> int:
    """Returns the bytes of shared memory that a launch with this scratch takes, mbarriers included.

    They are counted as Mosaic GPU does: `_estimate_resources` in
    jax/_src/pallas/mosaic_gpu/lowering.py.
    """
    total = 0
    for each in jax.tree.leaves(scratch):
        if isinstance(each, plgpu.Barrier | plgpu.ClusterBarrier):
            total += BARRIER_BYTES * each.get_ref_aval().size
        else:
            size = math.prod(each.shape) * jnp.dtype(each.dtype).itemsize
            total += round_up(size, BUFFER_ALIGNMENT)
    return total


def float32(shape):
    """Returns a ShapeDtypeStruct of float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
