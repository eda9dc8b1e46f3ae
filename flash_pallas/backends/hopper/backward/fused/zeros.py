"""Zeros of the float32 buffer to which the fused backward adds dQ.

134 MB at 16k tokens of 2,048 columns. A launch of its own takes 32 us on an H200 (XLA 40), of 360
to 460 us that the kernel takes at T=1024: `zeros`. The kernel hardly uses the memory's bandwidth.
So where it may, it has no zeros to wait for: CTAs clear dQ of the section behind theirs (`Ahead`),
and its first section has CTAs that do nothing else.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....gpu import inline
from ....gpu.launch import float32
from ....gpu.launch import launch as launch_kernel
from .launches import FusedCta, Launch

# --- A launch that clears: 134 MB in 32 us on an H200, where XLA takes 40 -------------------------

ZEROS_CTAS = 2 * 132  # as many SMs as an H200 has; half and twice as many take as long
ZEROS_TILE = (128, 64)  # 32 KB, to be copied by TMA; twice as many bytes: 33 us


def zeros(shapes: list[tuple[int, ...]], interpret: bool, after=None) -> list:
    """Returns f32[shape] of zeros, for each shape, cleared in one launch.

    Args:
        shapes: shapes of a multiple of 64 elements each.
        interpret: run under the interpreter.
        after: an array that must exist before. XLA would otherwise clear early what is needed late.
    """
    lines = [math.prod(shape) // ZEROS_TILE[1] for shape in shapes]
    ctas = min(sum(pl.cdiv(rows, ZEROS_TILE[0]) for rows in lines), ZEROS_CTAS)
    run = launch_kernel(
        functools.partial(_clear, ctas),
        out=[float32((rows, ZEROS_TILE[1])) for rows in lines],
        scratch=[plgpu.SMEM(ZEROS_TILE, jnp.float32)],
        grid={"cta": ctas},
        threads=1,
        name="flash_pallas_zeros",
        interpret=interpret,
    )
    return [x.reshape(shape) for x, shape in zip(run(after), shapes, strict=True)]


def _clear(ctas: int, _, *refs):
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


# --- A section ahead, inside the kernel -----------------------------------------------------------


def first_cleared(launch: Launch, shapes: dict[str, Any]) -> dict[str, Any]:
    """Returns dQ of which the first section is cleared, and counters of the CTAs that clear more.

    `shapes`: of the results of this launch, by name.
    """
    entries, q_len, _, head_dim = shapes["dq"].shape
    heads = pl.cdiv(launch.at_once, entries) * launch.problem.group
    section = jnp.zeros((min(launch.at_once, entries), q_len, heads, head_dim), jnp.float32)
    everything = lax.empty(shapes["dq"].shape, jnp.float32)
    return {
        "dq": lax.dynamic_update_slice(everything, section, (0, 0, 0, 0)),
        "cleared": jnp.zeros(shapes["cleared"].shape, jnp.int32),
    }


class Ahead(NamedTuple):
    """What a CTA clears of dQ, of a pair in the section behind its own, before its own work.

    CTAs start in the order of the grid, and what they clear waits for nothing, so that whoever
    waits for a section waits for CTAs that are running or done.

    Attributes:
        cleared: i32[sections + 1] in device memory: of each section how many CTAs have cleared
            their share of it; one more than there are, to which the last section counts.
        section: this CTA's; -1 is of those that only clear.
        pair: pair of the next section; there may be none of this number.
        block: this CTA's KV block, which decides its share of that pair's dQ.
        runs: whether this CTA has work of its own.
    """

    cleared: Any
    section: Any
    pair: Any
    block: Any
    runs: Any

    @classmethod
    def of(cls, launch: Launch, cleared, pair, block) -> Ahead:
        """Makes the record of the CTA of a pair, which is negative in front of the first one."""
        section = lax.axis_index("section")
        return cls(cleared, section, pair + launch.at_once, block, None)

    def if_near(self, condition):
        """Returns whether the condition holds and this CTA has work of its own."""
        return condition if self.runs is None else condition & self.runs

    def when_near(self, run):
        """Calls run() if this CTA has work of its own."""
        run() if self.runs is None else pl.when(self.runs)(run)

    def fill(self, cta: FusedCta):
        """Writes zeros where this warpgroup's part of dQ will lie, and hands them over."""
        if cta.computes_dq:
            zero = jnp.zeros(cta.dq_shape, jnp.float32)
            cta = cta.anew()
            cta.dq_buffer(cta.wg)[...] = plgpu.layout_cast(zero, inline.WGMMA)
            plgpu.commit_smem()
            plgpu.barrier_arrive(cta.smem.dq_full.at[cta.wg])

    def await_read(self, cta: FusedCta):
        """Waits until the zeros of `fill` have been read. K and V take as long to arrive."""
        if cta.computes_dq:
            plgpu.barrier_wait(cta.smem.dq_empty.at[cta.anew().wg])

    def store(self, cta: FusedCta):
        """Clears this CTA's share, as the storing warp; waits until its own section is clear."""
        parts, launch, smem = cta.blocks.dq_parts, cta.launch, cta.smem
        for wg in parts:
            plgpu.barrier_wait(smem.dq_full.at[wg])
        pl.when(self.pair < launch.pairs)(functools.partial(self._clear, cta))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for wg in parts:
            plgpu.barrier_arrive(smem.dq_empty.at[wg])
        plgpu.wait_smem_to_gmem(0)
        inline.count_up(self.cleared, self.section + 1)

        @pl.when(self.if_near(self.section > 0))
        def _():
            inline.await_count(self.cleared, self.section, launch.at_once * launch.num_blocks)

    def _clear(self, cta: FusedCta):
        """Copies zeros to every num_blocks-th Q tile of the pair, from the block's on."""
        launch, block_q = cta.launch, cta.blocks.block_q
        batch, kv_head, *_ = launch.kv_tile(cta.gmem, self.pair, self.block)
        group, per_head = cta.problem.group, pl.cdiv(cta.problem.q_len, block_q)

        @pl.loop(self.block, jnp.int32(group * per_head), step=jnp.int32(launch.num_blocks))
        def _(n):
            head = kv_head * group + lax.div(n, jnp.int32(per_head))
            rows = pl.ds(lax.rem(n, jnp.int32(per_head)) * block_q, block_q)
            for wg in cta.blocks.dq_parts:
                target = cta.dq_at(batch, (head, rows), wg)
                plgpu.copy_smem_to_gmem(cta.dq_buffer(wg), target)
