"""Kernel launches, and what all GPU backends share around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import mesh_axes, scores
from ...core.integers import round_up
from ...core.problem import Operands, Problem
from ...devices import targeted
from . import ahead, auxiliary_arrays, jax_compat
from .ptx import elsewhere
from .score_tile import RegisterTile
from .stand_ins import UNSUPPORTED

# --- Kernel launches, and constants and helpers of kernels on any GPU -----------------------------

WARPGROUP_ROWS = 64  # rows of one wgmma, and of one warpgroup's tile everywhere in this package
BUFFER_ALIGNMENT = 1024  # bytes to a multiple of which Mosaic GPU rounds every buffer
OPERAND_ALIGNMENT = 256  # bytes, of an operand's address
BARRIER_BYTES = 8
MOST_BARRIERS = 32  # of one array, as their phases are the bits of one register

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,  # ex2.approx.ftz: 2 ulp, far below the rounding of P to 16 bits
    # Every hazard inside a warpgroup is ordered by waits, commit_smem or a barrier in the kernel;
    # Mosaic's own barriers around each shared-memory access cost 13 BAR.SYNC in the forward.
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)


def tile_transforms(swizzle: int, dtype) -> tuple:
    """Returns how a tile lies in shared memory: in pieces of 8 rows by `swizzle` bytes."""
    tiling: Any = plgpu.TilingTransform  # abstract to pyright, as is the next
    swizzled: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // jnp.dtype(dtype).itemsize)), swizzled(swizzle)


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
    else:
        if jax.default_backend() == "gpu":
            ahead.watch()
        kernel = jax_compat.repaired(kernel)
        if (device := targeted()) is not None:
            kernel = elsewhere.made_for(device, kernel)
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
    inside_shard_map = jax.sharding.get_abstract_mesh().manual_axes
    call = mesh_axes.untyped(call) if inside_shard_map else call
    # XLA lets a kernel write a result where a loop stacks it, and runs it a second time for all who
    # read the result as it is: each layer of a scanned model had two forwards. A barrier for each:
    # with one for all of them XLA of jax 0.12 copies the slices that the kernel reads.
    barrier = jax.lax.optimization_barrier
    return lambda *operands: jax.tree.map(barrier, call(*jax.tree.map(aligned, operands)))


def aligned(x):
    """Makes XLA copy an operand that may be a misaligned slice, which Mosaic GPU refuses.

    XLA hands a contiguous slice to a kernel as an address inside the larger array, without a copy,
    if the slice has a multiple of 256 bytes; it does not ask where it begins. Mosaic GPU refuses
    ("Input buffer 3 is not 256-byte aligned") what does not begin at such a multiple, such as 64
    lengths behind the first 16 of an array of integers. Slices along an axis whose elements have
    multiples of 256 bytes begin there: a layer of stacked caches is still read where it lies.
    """
    sizes = [*x.shape, 1]
    axis = next((i for i, size in enumerate(x.shape) if size > 1), x.ndim)
    stride = math.prod(sizes[axis + 1 :]) * x.dtype.itemsize
    return x if stride % OPERAND_ALIGNMENT == 0 else jax.lax.optimization_barrier(x)


def shared_memory(scratch) -> int:
    """Returns the bytes of shared memory that a launch with this scratch takes, mbarriers included.

    They are counted as Mosaic GPU does: `_estimate_resources` in
    jax/_src/pallas/mosaic_gpu/lowering.py.
    """
    total = 0
    for buffer in jax.tree.leaves(scratch):
        if isinstance(buffer, plgpu.Barrier | plgpu.ClusterBarrier):
            total += BARRIER_BYTES * buffer.get_ref_aval().size
        else:
            size = math.prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize
            total += round_up(size, BUFFER_ALIGNMENT)
    return total


def float32(shape):
    """Describes a float32 array of this shape, such as a result of a launch."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# --- Problems that no GPU backend accepts ---------------------------------------------------------

MAX_GRID = 65_535  # CUDA's limit on the second and third grid dimension


def refusal(problem: Problem) -> str | None:
    """Returns the reason why no GPU backend can run `problem`, or None."""
    if problem.batch > MAX_GRID:
        return f"takes batches up to {MAX_GRID}, not {problem.batch}: split the batch"
    for name in ("score_mod", "mask_mod"):
        mod = getattr(problem.spec, name)
        if mod is not None and (primitives := sorted(mod.primitives & UNSUPPORTED)):
            return f"cannot compile {', '.join(primitives)} of {name}"
    return None


# --- Gradients of the operands, in their shapes and dtypes, from sums of dS -----------------------
# A kernel of each backend adds up dS; `axes` says over what:
#
#     tile     batch entries and heads that share a bias: [parts * Bb, N1, T or more, S or more]
#     columns  queries, for every key: [B, N, S or more]
#     rows     keys, for every query: [B, N, T or more]


def score_grads(
    problem: Problem, operands: Operands, wanted: frozenset[str], launch: Callable[..., tuple]
) -> dict[str, Any]:
    """Computes the gradients by name: those of core.problem.EXTRA_GRADS that are in `wanted`.

    The names are "bias", "alibi_slopes" and "score_params".

    Args:
        problem: what is computed.
        operands: of the call.
        wanted: names.
        launch: (axes, names) -> one sum for each name: "bias", "alibi_slopes" or the index of a
            score_param. Only "rows" has more than one. What it holds of queries and keys that do
            not exist is not looked at; of keys beyond a length it is 0.
    """
    grads, by_row = {}, []
    if "bias" in wanted:
        kind = auxiliary_arrays.kind(problem.bias_shape, q_axis=0)
        if kind == "tile":
            grads["bias"] = _of_tiles(problem, launch("tile", ("bias",))[0])
        elif kind == "columns":
            key_sums = launch("columns", ("bias",))[0]
            grads["bias"] = _shared(problem, key_sums[:, :, None, : problem.kv_len])
        else:
            by_row.append("bias")
    if "alibi_slopes" in wanted:
        by_row.append("alibi_slopes")
    params = operands.score_params if "score_params" in wanted else ()
    floats = [i for i, x in enumerate(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    if by_row or floats:
        names = (*by_row, *floats)
        sums = dict(zip(names, launch("rows", names), strict=True))
        sums = {name: x[:, :, : problem.q_len] for name, x in sums.items()}
        if "bias" in sums:
            grads["bias"] = _shared(problem, sums["bias"][..., None])
        if "alibi_slopes" in sums:
            grads["alibi_slopes"] = sums["alibi_slopes"].sum(axis=2)
        head_sum = lambda i, x: sums[i].sum(axis=2).astype(x.dtype) if i in sums else None
        grads["score_params"] = tuple(head_sum(i, x) for i, x in enumerate(params))
    return grads


def term(name, tile: RegisterTile, dz, dparams):
    """Returns what each element of a tile adds to the gradient of `name` (per head, query, key).

    Args:
        name: as in `launch` of `score_grads`.
        tile: position of the tile.
        dz: the gradient of scale * q @ k^T.
        dparams: gradients of score_params as `pull` of core.scores.Logits returns them.
    """
    if name == "bias":
        return dz
    return scores.slope_pull(tile, dz) if name == "alibi_slopes" else dparams[name]


def _of_tiles(problem: Problem, sums):
    """Returns the bias's gradient from one array, or from several that are to be added up."""
    entries, _, q_len, kv_len = problem.bias_shape
    sums = sums[:, :, :q_len, :kv_len]
    if sums.shape[0] > entries:
        sums = sums.reshape(-1, *problem.bias_shape).sum(axis=0)
    return sums.astype(problem.bias_dtype)


def _shared(problem: Problem, sums):
    """Sums [B, N, T, 1] or [B, N, 1, S] over all that share one element of the bias."""
    entries, heads = problem.bias_shape[:2]
    sums = sums.reshape(entries, problem.batch // entries, heads, -1, *sums.shape[2:])
    sums = sums.sum(axis=(1, 3))
    axes = tuple(axis for axis in (2, 3) if problem.bias_shape[axis] == 1)
    return sums.sum(axis=axes, keepdims=True).astype(problem.bias_dtype)
