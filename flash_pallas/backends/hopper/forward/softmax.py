"""The softmax of the forward kernel: from S of a KV block to P, row sums, and O in the new scale.

A step takes one of three: `speculative_softmax`, `exact_softmax` (the online softmax, with or
without a lazy rescale) or `bounded_softmax`. Each also waits for PV of the block before, at the
place where that costs least. `first_softmax` begins a Q tile, `finish` ends one.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import dropout, scores, softmax
from ....core.problem import Outputs
from ....core.scores import Logits
from ...gpu import score_tile
from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.ptx import inline, online_softmax, softcap
from ...gpu.ptx.online_softmax import Drop, Maxima
from ...gpu.ptx.softcap import Cap
from ..common.pipeline import warpgroup_rows
from .cta import ForwardCta, ForwardPlan, ForwardRows, QTile
from .tiles import is_bounded

# --- The softmax of a step ------------------------------------------------------------------------


def first_softmax(cta: ForwardCta, tile: QTile, s, use, exists=None) -> ForwardRows:
    """Computes the softmax of a tile's first (rightmost, always masked) block; p is float32.

    `exists` is False where there is no such tile and K's slot is not to be released.
    """
    plan = cta.plan
    tile, z = logits(cta, tile, s, jnp.int32(0), "last", use, exists)
    m = maxima = None
    if not is_bounded(plan.problem):
        compared = online_softmax.compared(
            unseen(cta, z.x), z.x, z.log2_scale, plan.far, None, plan.interpret, cta.running_shift
        )
        z, m, maxima = z._replace(x=compared.x), compared.m, compared.maxima
    p, sums = exponentials(plan, z, finite(plan, m, "last"))
    return ForwardRows(dropped(cta, tile, p), maxima, sums)


def speculative_softmax(cta: ForwardCta, tile: QTile, z: Logits, rows: ForwardRows, use, o_acc):
    """Computes weights relative to the old maxima, and again where that was a bad guess.

    A warp redoes all of its 16 rows or none. In a shifted row m is NaN, and so is every sum.
    """
    plan = cta.plan
    o = cta.wait_pv(o_acc, use)
    p, sums = weights(cta, tile, z, rows.maxima.m, plan.problem.dtype)

    def again():
        before, m, shift, maxima = online_softmax.raised(
            rows.maxima, z.x.max(axis=1), z.log2_scale, plan.far, cta.running_shift
        )
        x = z.x if shift is None else z.x - per_row(shift, z.x.shape)
        alpha = jnp.exp2(before - m)
        p, sums = weights(cta, tile, z._replace(x=x), m, plan.problem.dtype)
        l = rows.l * per_row(alpha, sums.shape) + sums
        return o * per_row(alpha, o.shape), ForwardRows(p, maxima, l)

    exceeds = inline.exceeds(sums, 2.0**plan.blocks.speculates, plan.interpret)
    guessed = lambda: (o, ForwardRows(p, rows.maxima, rows.l + sums))
    o_acc[...], rows = lax.cond(exceeds > 0, again, guessed)
    return rows._replace(p=plan.matmuls.split(rows.p))


def exact_softmax(cta: ForwardCta, tile: QTile, z: Logits, rows: ForwardRows, use, o_acc):
    """Computes weights relative to the maxima that include this block, and rescales O and l."""
    plan = cta.plan
    slack = plan.blocks.lazy_rescale or None
    compared = online_softmax.compared(
        rows.maxima, z.x, z.log2_scale, plan.far, slack, plan.interpret, cta.running_shift
    )
    z, grew = z._replace(x=compared.x), compared.grew
    m = finite(plan, compared.m, tile.edges)
    alpha = jnp.exp2(compared.before - m)
    if in_one_pass(plan):
        o = cta.wait_pv(o_acc, use)
        p, sums = weights(cta, tile, z, m, plan.problem.dtype)
    else:
        p, sums = exponentials(plan, z, m)
        p = dropped(cta, tile, p)
        # Keeps the whole softmax above the wait; ptxas then moves the wait up into the row
        # maximum by itself. Anything that pins it lower measured 1 to 11 % slower on H200.
        p, sums, alpha = lax.optimization_barrier((p, sums, alpha))
        o = cta.wait_pv(o_acc, use)
    p = plan.matmuls.split(p)
    l = rows.l * per_row(alpha, rows.l.shape) + sums
    if grew is None:
        o_acc[...] = o * per_row(alpha, o.shape)
    else:
        # Converted before the branch, p fills issue slots between the exponentials (2 %).
        p = lax.optimization_barrier(p)
        rescale = lambda: o * per_row(alpha, o.shape)
        o_acc[...] = lax.cond(grew > 0, rescale, lambda: o)
    return ForwardRows(p, compared.maxima, l)


def bounded_softmax(cta: ForwardCta, tile: QTile, z: Logits, rows: ForwardRows, use, _):
    """Computes weights without row maxima, so that O and l stay as they are; see `is_bounded`."""
    plan = cta.plan
    early = None
    if plan.blocks.weighs_first and cap(plan, tile.edges) is not None:
        # In float32 weights take the registers of the logits; in 16 bits they would need others, as
        # PV still reads those of the last weights.
        early = lax.optimization_barrier(bounded_weights(cta, tile, z, jnp.float32))
    plgpu.wgmma_wait(0)
    cta.v.release(use - 1)
    p, sums = bounded_weights(cta, tile, z, plan.problem.dtype) if early is None else early
    p = plan.matmuls.split(p)
    return ForwardRows(p, None, rows.l + sums, joined(plan, rows.only, p, tile.edges))


def in_one_pass(plan: ForwardPlan) -> bool:
    """Returns whether `weights` interleaves exponentials, dropout and conversion.

    This is for 16 bits only.
    """
    interleaved = plan.problem.spec.dropout_rate or plan.blocks.polynomials
    return bool(interleaved) and plan.problem.dtype != jnp.float32


# --- Logits ---------------------------------------------------------------------------------------


def logits(
    cta: ForwardCta, tile: QTile, s, j, edges: str, use, exists=None
) -> tuple[QTile, Logits]:
    """Computes the logits of the j-th KV block, given its S, and releases K's slot.

    The slot is released once its auxiliary inputs have been read, which travel with K.

    Args:
        cta: the CTA.
        tile: the Q tile.
        s: f32[64, block_kv].
        j: number of the block, from the right.
        edges: what may hide keys, as for ForwardCta.limits; segment ids only if it is not "none".
        use: ring position of the block.
        exists: whether the slot is to be released; None: it is.

    Returns:
        (the tile with what is of this step, the logits: -inf where hidden, and not capped yet where
        `cap` says so).
    """
    plan = cta.plan
    release = functools.partial(cta.k.release, use)
    if exists is not None:
        release = functools.partial(pl.when(exists), release)
    if not plan.aux.streams:
        release()
    slot, rows, ids = cta.k.slot(use), warpgroup_rows(cta.wg), edges != "none"
    inputs = plan.aux.inputs(tile.fragments, cta.smem.aux, slot, s.shape, rows, ids=ids)
    kv_block = tile.kv_block(j)
    place, limits = cta.score_tile(tile, kv_block), cta.limits(tile, kv_block, edges)
    spec = plan.problem.spec
    if edges == "none" and tile.listed is not None:
        spec, inputs = plan.problem.of_whole_tiles.spec, inputs._replace(mask=None)
    if cap(plan, edges) is not None:
        spec = dataclasses.replace(spec, softcap=None)
    shares = 1 in (plan.problem.bias_shape or ())[2:]
    z = score_tile.logits(spec, place, s, inputs, limits, relative=shares)
    if plan.aux.streams:
        release()
    return tile._replace(step_block=kv_block, inputs=inputs, edges=edges), z


def cap(plan: ForwardPlan, edges: str) -> Cap | None:
    """Returns the cap that `bounded_weights` applies, in steps with these edges, or None.

    Without it logits come capped, if at all. They are left uncapped only where nothing hides a key.
    A bias or slopes make most logits large, and dropout has work of its own to overlap with the
    exponentials: neither was tried.
    """
    spec, added = plan.problem.spec, {"bias", "alibi_slopes"} & plan.problem.features
    if spec.softcap is None or not is_bounded(plan.problem) or added or spec.dropout_rate:
        return None
    if edges != "none" or may_be_empty(plan):
        return None
    cap = Cap(spec.softcap * softmax.LOG2E, spec.scale / spec.softcap)
    return cap if cap.representable else None


def may_be_empty(plan: ForwardPlan) -> bool:
    """Returns whether a row may have no finite logit in a block that positions and ids leave whole.

    Masks of the user hide keys of any block, but of those that a list calls whole; a bias and the
    user's function may be infinite.
    """
    spec, features = plan.problem.of_whole_tiles.spec, plan.problem.of_whole_tiles.features
    hidden = spec.mask_mod is not None or "mask" in features
    return hidden or "bias" in features or bool(spec.score_modifiers - {"softcap"})


def finite(plan: ForwardPlan, m, edges: str):
    """Returns m, with 0 for rows that have seen no key yet.

    Their weights are then exp2(-inf), not NaN.
    """
    mask, may_hide = plan.problem.spec.mask, edges != "none"
    if edges == "last":
        may_hide = not mask.is_trivial or plan.problem.is_dynamic
    if m is None or plan.blocks.speculates or not (may_be_empty(plan) or may_hide):
        return m  # that of the first tile is finite where a step speculates
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def unseen(cta: ForwardCta, x) -> Maxima:
    """Returns the row maxima before the first KV block of a Q tile.

    Where a step speculates, rows that have seen no key are taken to see no logit below -2**127.
    Only a bias, such as the lowest float32, and the user's function produce such logits: with one
    of them, a speculating step looks twice at these rows.
    """
    zero = jnp.zeros_like(x.max(axis=1))
    plan, spec = cta.plan, cta.plan.problem.spec
    added = "bias" in plan.problem.features or spec.score_modifiers - {"softcap"}
    if plan.blocks.speculates and plan.far and added:
        return Maxima(jnp.full_like(zero, math.nan), jnp.full_like(zero, -math.inf))
    lowest = online_softmax.LOWEST if plan.blocks.speculates else -math.inf
    in_registers = plan.far and cta.smem.running_shift is None
    return Maxima(jnp.full_like(zero, lowest), zero if in_registers else None)


# --- Weights --------------------------------------------------------------------------------------


def exponentials(plan: ForwardPlan, z: Logits, m):
    """Returns (p in f32 before dropout, its row sums per thread), relative to row maxima m."""
    x = z.x * z.log2_scale
    p = jnp.exp2(x if m is None else x - per_row(m, x.shape))
    return p, inline.lane_sums(p, plan.interpret)


def bounded_weights(cta: ForwardCta, tile: QTile, z: Logits, dtype):
    """Returns `weights` that are relative to no row maxima, capped where `cap` says so."""
    plan, own_cap = cta.plan, cap(cta.plan, tile.edges)
    bounded = tile.edges == "none" and not may_be_empty(plan)
    weigh = functools.partial(weights, cta, tile, z, None, dtype)
    if own_cap is None:
        return weigh(bounded=bounded)
    # Without tangents exponentials have their unit to themselves: an eighth of them as
    # polynomials is 7 to 12 % slower (max_w8 of trial_softcap_fast.txt at 20374d8).
    small = own_cap._replace(small=True)
    is_large = softcap.is_large(z.x, own_cap, plan.interpret)
    return lax.cond(
        is_large > 0,
        lambda: weigh(bounded=bounded, cap=own_cap),
        lambda: weigh(bounded=True, cap=small),
    )


def weights(
    cta: ForwardCta,
    tile: QTile,
    z: Logits,
    m,
    dtype,
    *,
    bounded: bool = False,
    cap: Cap | None = None,
):
    """Returns (p in dtype after dropout, row sums before it), relative to the row maxima m.

    `bounded` and `cap` are as of online_softmax.weights.
    """
    plan, x = cta.plan, z.x
    log2_scale = z.log2_scale if cap is None else cap.log2_scale
    polynomials = 0.0 if cap is not None and cap.small else plan.blocks.polynomials
    m = jnp.zeros(WARPGROUP_ROWS, jnp.float32) if m is None else m
    m = per_row(m, x.shape)
    if plan.interpret:
        x = x if cap is None else cap.plain(x)
        p = online_softmax.plain(x * log2_scale - m, polynomials)
        sums = inline.lane_sums(p, interpret=True)
        return dropped(cta, tile, p).astype(dtype), sums
    drop, rate = None, plan.problem.spec.dropout_rate
    if rate:
        place = cta.score_tile(tile, tile.step_block)
        q_keys, kv_keys = place.per_q(tile.inputs.q_keys), place.per_kv(tile.inputs.kv_keys)
        drop = Drop(q_keys, kv_keys, dropout.threshold(rate))
    return online_softmax.weights(
        x, m, log2_scale, drop, dtype, polynomials=polynomials, bounded=bounded, cap=cap
    )


def dropped(cta: ForwardCta, tile: QTile, p):
    """Returns the weights with 0 for those that are dropped; the `gain` is left to the end."""
    spec = cta.plan.problem.spec
    if not spec.dropout_rate:
        return p
    keep = scores.kept(spec, cta.score_tile(tile, tile.step_block), tile.inputs)
    return jnp.where(keep, p, jnp.zeros_like(p))


# --- Rows -----------------------------------------------------------------------------------------


def joined(plan: ForwardPlan, only, p, edges: str):
    """Returns ForwardRows.only after a step whose operand is p.

    `only` is its value before the step, and None in a tile's first step. Where neither
    positions nor anything else hides keys, every row sees several.
    """
    if not is_bounded(plan.problem):
        return None
    rows = jnp.zeros(WARPGROUP_ROWS, jnp.float32) if only is None else only
    if edges == "none" and not may_be_empty(plan):
        return online_softmax.several(rows)
    return online_softmax.joined(plgpu.layout_cast(rows, inline.ROWS), p[0], plan.interpret)


def finish(cta: ForwardCta, tile: QTile, rows: ForwardRows):
    """Finishes rows that have seen all their keys.

    Returns:
        (f32[64] that O is multiplied by, Outputs of the rows, f32[64] each, without o). The
        log-sum-exp is in base 2 and relative to the shift.
    """
    l, spec = rows.l.sum(axis=1), cta.plan.problem.spec
    sink, sinks, unit = None, cta.gmem.aux.sinks, cta.plan.problem.unit
    if sinks is not None:
        sink = lax.broadcast_in_dim(sinks[tile.batch, tile.head], l.shape, ())
        sink = plgpu.layout_cast(sink, inline.ROWS)
    m = shift = jnp.zeros_like(l)  # where bounded
    if rows.maxima is not None:
        m, shift = online_softmax.settled(rows.maxima, cta.running_shift)
    inverse, lse, shift_ = softmax.finish(m, l, shift, sink, unit)
    if rows.only is not None:
        less = l - online_softmax.divisor(rows.only, l)
        inverse = inverse / (1.0 - less * inverse)
    if spec.dropout_rate:
        inverse = inverse * dropout.gain(spec.dropout_rate)
    max_logit = shift * unit + m * softmax.LN2 if spec.max_logit else None
    return inverse, Outputs(None, lse, shift_, max_logit)


def per_row(x, shape):
    """Broadcasts one value per row over a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))
