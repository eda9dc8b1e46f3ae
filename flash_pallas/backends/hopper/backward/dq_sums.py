"""dQ in device memory: float32 sums to which CTAs add, or which they store.

Some pairs of a KV head and a batch entry are worked on at one time, so that their sums stay in L2
(`pairs_at_once`). Either a launch clears the sums first (`zeros`), which takes 32 of 490 us at
T=1024, head dim 128 (134 MB: 16k tokens of 2,048 columns, H200). Or, under a causal mask, CTAs
store what no CTA has added to before: a CTA starts with the queries at its keys' positions. It
stores their dQ and sets its flag, a bit in a word of its pair of a batch entry and a KV head. Then
it adds to dQ of later queries, which other CTAs have stored: those of later keys, for whose flags
it waits once. In a section the CTAs of the last keys start first, so a CTA waits only for CTAs that
have already started. GPUs start CTAs in the order of the grid; CUDA does not promise it.

The loops of the last keys are the shortest. The last section has the longest loops first, so that
no SM is idle at the end; its dQ is cleared, and all of its CTAs add (`clears_last`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import integers as ints
from ....core.problem import Problem
from ...gpu.launch import float32, launch
from ...gpu.ptx import inline

# --- Sections: pairs of a KV head and a batch entry that are worked on at one time ----------------

# bf16, H200, B = 128, T = 2048, 4 heads: 1.40x (head dim 64) and 1.17x (32) with 4 to 32 MB instead
# of all entries' 128 and 64 MB, which L2 does not keep from one KV tile to the next.
AT_ONCE_BYTES = 16 << 20


def pairs_at_once(problem: Problem, pairs: int, cluster: int = 1) -> int:
    """Returns how many of a launch's pairs are worked on at one time: whole clusters of CTAs.

    Q, dO and the float32 dQ of one query head of each pair stay in L2. All sections of the pairs
    are equally large, except for the last.
    """
    most = max(1, AT_ONCE_BYTES // (8 * problem.q_len * problem.head_dim))
    sections = -(-pairs // most)
    return ints.round_up(-(-pairs // sections), cluster)


# --- Zeros to add to: 134 MB in 32 us on an H200, where XLA takes 40 ------------------------------

ZEROS_CTAS = 2 * 132  # as many SMs as an H200 has; half and twice as many take as long
ZEROS_TILE = (128, 64)  # 32 KB, to be copied by TMA; twice as many bytes: 33 us


def zeros(shapes: list[tuple[int, ...]], interpret: bool) -> list:
    """Returns f32[shape] of zeros, for each shape, cleared in one launch.

    Args:
        shapes: shapes of a multiple of 64 elements each.
        interpret: run under the interpreter.
    """
    lines = [math.prod(shape) // ZEROS_TILE[1] for shape in shapes]
    ctas = min(sum(pl.cdiv(rows, ZEROS_TILE[0]) for rows in lines), ZEROS_CTAS)
    run = launch(
        functools.partial(_clear, ctas),
        out=[float32((rows, ZEROS_TILE[1])) for rows in lines],
        scratch=[plgpu.SMEM(ZEROS_TILE, jnp.float32)],
        grid={"cta": ctas},
        threads=1,
        name="flash_pallas_zeros",
        interpret=interpret,
    )
    return [x.reshape(shape) for x, shape in zip(run(), shapes, strict=True)]


def _clear(ctas: int, *refs):
    """Clears every `ctas`-th tile of each array; TMA writes nothing past the end of the last."""
    *arrays, tile = refs
    layout = plgpu.Layout.WG_STRIDED(tile.shape, vec_size=4)
    tile[...] = plgpu.layout_cast(jnp.zeros(ZEROS_TILE, jnp.float32), layout)
    plgpu.commit_smem()
    cta, rows = lax.axis_index("cta"), ZEROS_TILE[0]
    for out in arrays:

        @pl.loop(cta, jnp.int32(pl.cdiv(out.shape[0], rows)), step=jnp.int32(ctas))
        def _(n, out=out):
            plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(n * rows, rows)])

    plgpu.wait_smem_to_gmem(0)


def scaled_dq(problem: Problem, sums):
    """Returns dQ in the problem's dtype, from its float32 sums without the scale."""
    return (sums * problem.spec.scale).astype(problem.dtype)


# --- The launch: whether CTAs store dQ, in which order they start ---------------------------------
# Their argument `launch` is a Launch of fused/launches.py, or a PairedKernel, which has the same
# attributes.

# KV blocks of a pair, whose flags are bits of a word. Time without these stores over time with
# them, bf16, H200, causal (options.json): 128 1.058 (T=1024), 1.025 (2048) and 0.995 (4096); 64
# 1.066 and 1.029. At 4096 also 1.033 at 96 (diagonal.json), 1.025 at 192 and 1.013 at 256
# (paired_diagonal.json), and 1.000 at 64, with ALiBi 0.97.
MOST_BLOCKS, MOST_BLOCKS_64 = 32, 16


def allowed(problem: Problem, num_blocks: int, sections: int) -> bool:
    """Returns whether CTAs may store dQ, if one loop masks all of their Q tiles.

    It must begin at the positions of the keys, which no array may decide.

    Args:
        problem: a problem with the head dims that the kernel runs.
        num_blocks: number of KV blocks of a pair of a batch entry and a KV head.
        sections: number of sections of these pairs.
    """
    mask, most = problem.spec.mask, MOST_BLOCKS if problem.head_dim > 64 else MOST_BLOCKS_64
    arrays = problem.is_dynamic or problem.is_listed or problem.traced_offset
    begins = mask.right == 0 and problem.spec.q_offset == 0 and problem.q_len == problem.kv_len
    return (
        begins
        and not arrays
        and problem.group == 1
        and 1 < num_blocks <= most
        and (sections > 1 or not clears_last(problem))
    )


def clears_last(problem: Problem) -> bool:
    """Returns whether the last section has no CTAs that store dQ.

    At head dim 64 ptxas spills 32 bytes in the loop that tells it apart, 4 % at T=1024; below, it
    makes no difference. At 96 and 128 it is 1.02 to 1.05 of sections that are all alike.
    """
    return problem.head_dim > 64


def in_last(launch: Any):
    """Returns whether this CTA belongs to the last section."""
    return lax.axis_index("section") == launch.sections - 1


def block_of(launch: Any, index):
    """Returns the KV block of the `index`-th CTA of a pair."""
    last_first = launch.num_blocks - 1 - index
    clears = clears_last(launch.problem)
    return lax.select(in_last(launch), index, last_first) if clears else last_first


def cleared(launch: Any, shapes: dict[str, Any]) -> dict[str, Any]:
    """Returns dQ, cleared where CTAs only add to it, and flags of which none is set.

    `shapes`: of the results of this launch, by name.
    """
    dq = lax.empty(shapes["dq"].shape, jnp.float32)
    if clears_last(launch.problem):
        entries, rows, heads, head_dim = dq.shape
        first = (launch.sections - 1) * launch.at_once // entries
        zeros = jnp.zeros((entries, rows, heads - first, head_dim), jnp.float32)
        dq = lax.dynamic_update_slice(dq, zeros, (0, 0, first, 0))
    return {"dq": dq, "stored": jnp.zeros(shapes["stored"].shape, jnp.int32)}


def with_barriers(buffers: Any) -> Any:
    """Adds the mbarriers between the storing warp and the other two."""
    return buffers._replace(stored=plgpu.Barrier(), others_stored=plgpu.Barrier())


def num_stored(launch: Any, total):
    """Returns how many of the `total` Q tiles of a CTA it stores dQ of: its first ones."""
    count = lax.min(jnp.int32(launch.blocks.block_kv // launch.blocks.block_q), total)
    clears = clears_last(launch.problem)
    return lax.select(in_last(launch), jnp.int32(0), count) if clears else count


# --- The CTA: its storing warp, and two others of the producer warpgroup --------------------------
# The storing warp neither sets flags nor waits for them: at head dim 64, T=1024, that takes 0.05 of
# the backward.


class OwnTiles(NamedTuple):
    """The dQ tiles that a CTA stores, its first ones, and the flags that say so.

    Attributes:
        count: number of them; 0 where the CTA only adds.
        total: number of all tiles of the CTA.
        flags: i32 in device memory, a word for all CTAs that add to the same part of dQ.
        place: function that returns (this CTA's KV block, which is its bit, index of its word).
        num_blocks: number of flags of the pair.
        stored: an mbarrier: what this CTA stores lies in device memory.
        others_stored: an mbarrier: what other CTAs store lies in device memory.
    """

    count: Any
    total: Any
    flags: Any
    place: Callable[[], tuple[Any, Any]]
    num_blocks: int
    stored: Any
    others_stored: Any

    @property
    def follows_others(self):
        """True if this CTA adds to what others store."""
        return (self.count > 0) & (self.count < self.total)

    def signal(self):
        """Sets the flag of this KV block, as a warp, once what it stores lies in device memory."""

        @pl.when(self.count > 0)
        def _():
            plgpu.barrier_wait(self.stored)
            block, word = self.place()
            inline.set_bits(self.flags, word, lax.shift_left(jnp.int32(1), block))

    def await_flags(self):
        """Waits, as a warp, until the CTAs of all later keys have stored their queries' dQ."""

        @pl.when(self.follows_others)
        def _():
            every, (block, word) = inline.signed_constant(2**self.num_blocks - 1), self.place()
            inline.await_bits(self.flags, word, lax.shift_left(jnp.int32(-2), block) & every)
            plgpu.barrier_arrive(self.others_stored)

    def await_others(self):
        """Waits, as the storing warp, until it may add to dQ of later keys' positions."""

        @pl.when(self.follows_others)
        def _():
            plgpu.barrier_wait(self.others_stored)
            inline.fence_copies()

    def are_stored(self):
        """Signals, as the storing warp, that all it has copied so far lies in device memory."""
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(self.stored)
