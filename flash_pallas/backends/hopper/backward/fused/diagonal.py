"""dQ without zeros: under a causal mask a CTA stores dQ of the queries at its keys' positions.

The float32 buffer to which CTAs add dQ would otherwise be cleared by a launch of its own, 134 MB at
16k tokens of 2,048 columns, which takes 32 of 490 us at T=1024, head dim 128 (H200). A causal CTA
starts with the queries at its keys' positions. It stores their dQ, sets its bit in a word of its
pair of a batch entry and a KV head, and then adds to dQ of later queries, which other CTAs have
stored: those of later keys, for whose bits it waits once. They start before it, so that whoever
waits, waits for CTAs that run or are done: of a section the CTAs of the last keys come first.

Their loops are the shortest. The last section has the longest loops first, lest SMs be idle at the
end, so its dQ is cleared and all of its CTAs add (`clears_last`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....gpu import inline
from ...common.far_rows import Part
from ...common.pipeline import fits
from .tiles import FusedSmem, scratch

if TYPE_CHECKING:
    from .launches import FusedCta, Launch

MOST_BLOCKS = 32  # bits of a word

# --- The launch: whether CTAs store dQ, in which order they start, what is cleared before ---------


def applies(launch: Launch) -> bool:
    """Returns whether CTAs of a launch store dQ of the queries at their keys' positions.

    Their loops must begin there, which no array may decide.
    """
    problem, blocks = launch.problem, launch.blocks
    once = blocks.num_launches == blocks.kv_launches == blocks.split_q == blocks.bias_cluster == 1
    plain = once and blocks.producer and not (blocks.persistent or blocks.stagger)
    if not (plain and blocks.mask_all and launch.part in (Part.ALL, Part.NEAR)):
        return False
    mask = problem.spec.mask
    arrays = problem.is_dynamic or problem.is_listed or problem.traced_offset
    begins = mask.right == 0 and problem.spec.q_offset == 0 and problem.q_len == problem.kv_len
    return (
        begins
        and not arrays
        and problem.group == 1
        and 1 < launch.num_blocks <= MOST_BLOCKS
        and launch.sections > clears_last(launch)
        and fits(with_barriers(scratch(problem, blocks)))
    )


def clears_last(launch: Launch) -> bool:
    """Returns whether the last section has no CTAs that store dQ."""
    return launch.problem.head_dim > 64


def in_last(launch: Launch):
    """Returns whether this CTA belongs to the last section."""
    return lax.axis_index("section") == launch.sections - 1


def block_of(launch: Launch, index):
    """Returns the KV block of the `index`-th CTA of a pair."""
    last_first = launch.num_blocks - 1 - index
    return lax.select(in_last(launch), index, last_first) if clears_last(launch) else last_first


def cleared(launch: Launch, shapes: dict[str, Any]) -> dict[str, Any]:
    """Returns dQ, cleared where CTAs only add to it, and words without bits.

    `shapes`: of the results of this launch, by name.
    """
    dq = lax.empty(shapes["dq"].shape, jnp.float32)
    if clears_last(launch):
        entries, rows, heads, head_dim = dq.shape
        first = (launch.sections - 1) * launch.at_once // entries
        zeros = jnp.zeros((entries, rows, heads - first, head_dim), jnp.float32)
        dq = lax.dynamic_update_slice(dq, zeros, (0, 0, first, 0))
    return {"dq": dq, "stored": jnp.zeros(shapes["stored"].shape, jnp.int32)}


def words(launch: Launch) -> jax.ShapeDtypeStruct:
    """Returns the shape of the words, one for each pair of a batch entry and a KV head."""
    return jax.ShapeDtypeStruct((launch.pairs,), jnp.int32)


# --- The CTA: its storing warp, and two others of the producer warpgroup --------------------------
# Setting a bit and looking for others take as long as a step at head dim 64, so the storing warp
# does neither.


def with_barriers(smem: FusedSmem) -> FusedSmem:
    """Adds the mbarriers by which the storing warp and the other two tell each other."""
    return smem._replace(stored=plgpu.Barrier(), others_stored=plgpu.Barrier())


def own_tiles(cta: FusedCta):
    """Returns how many dQ tiles this CTA stores, its first ones; 0 where it only adds."""
    launch, own = cta.launch, jnp.int32(cta.blocks.block_kv // cta.blocks.block_q)
    own = lax.min(own, cta.q_tiles.total)
    return lax.select(in_last(launch), jnp.int32(0), own) if clears_last(launch) else own


def tell(cta: FusedCta):
    """Sets the bit of this KV block, as a warp, once what it stores lies in device memory."""

    @pl.when(own_tiles(cta) > 0)
    def _():
        plgpu.barrier_wait(cta.smem.stored)
        bit = lax.shift_left(jnp.int32(1), _block(cta))
        inline.set_bits(cta.results["stored"], _pair(cta), bit)


def look(cta: FusedCta):
    """Waits, as a warp, until the CTAs of all later keys have stored their queries' dQ."""
    every = inline.signed_constant(2**cta.launch.num_blocks - 1)

    @pl.when(adds_to_others(cta))
    def _():
        later = lax.shift_left(jnp.int32(-2), _block(cta)) & every
        inline.await_bits(cta.results["stored"], _pair(cta), later)
        plgpu.barrier_arrive(cta.smem.others_stored)


def adds_to_others(cta: FusedCta):
    """Returns whether this CTA adds to what others store."""
    own = own_tiles(cta)
    return (own > 0) & (own < cta.q_tiles.total)


def await_others(cta: FusedCta):
    """Waits, as the storing warp, until it may add to dQ of later keys' positions."""

    @pl.when(adds_to_others(cta))
    def _():
        plgpu.barrier_wait(cta.smem.others_stored)
        inline.fence_copies()


def has_stored(cta: FusedCta):
    """Says, as the storing warp, that all it has copied so far lies in device memory."""
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(cta.smem.stored)


# Made of numbers that the compiler does not know. What these warps share with others it computes
# before they part, and the others hold it over their loops: at head dim 64 32 bytes spill.


def _pair(cta: FusedCta):
    unknown = lambda x: inline.unknown(x, cta.interpret)
    return unknown(cta.kv_head) * cta.launch.entries + unknown(cta.batch)


def _block(cta: FusedCta):
    return lax.div(inline.unknown(cta.kv_start, cta.interpret), jnp.int32(cta.blocks.block_kv))
