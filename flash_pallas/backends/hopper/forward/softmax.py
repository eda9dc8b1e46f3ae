"""Logits and softmax weights of the forward kernel, computed from the products of a step."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import dropout, scores, softmax
from ....core.problem import AttentionSpec, Problem
from ....core.scores import TileInputs
from ...gpu import inline, online_softmax, score_tile, softcap
from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.online_softmax import Compared, Drop, Kept, Maxima, Powers
from ...gpu.softcap import Cap
from ..common.auxiliary_inputs import Place, RowFragments
from ..common.far_rows import Part
from ..common.pipeline import warpgroup_rows
from .tiles import ForwardCta, ForwardPlan, ForwardRows, Work

# Of logits in base 2, so that 2**logit needs no maximum to be relative to.
MOST_BOUNDED = 80.0


class Logits(NamedTuple):
    """A tile of logits, and what was needed to compute them."""

    x: Any  # f32[64, block_kv], -inf where hidden; not capped yet where Scores.cap says so
    log2_scale: float  # x * log2_scale are in base 2
    inputs: TileInputs
    kv_block: Any
    edges: str  # as for Plan.limits

    @property
    def top(self):
        """The largest x of each row, f32[64]."""
        return self.x.max(axis=1)


class Finished(NamedTuple):
    """Final values of rows that have seen all their keys."""

    inverse: Any  # what O is multiplied by
    lse: Any  # base 2, relative to the shift
    shift: Any
    most: Any  # the largest logit, natural; None unless asked for


@dataclasses.dataclass(frozen=True)
class ForwardScores:
    """Everything between QK^T and the softmax, and dropout after it; nothing where a call has none.

    Attributes:
        plan: the plan of the kernel.
    """

    plan: ForwardPlan

    @property
    def problem(self) -> Problem:
        """The attention problem that is computed."""
        return self.plan.problem

    @property
    def spec(self) -> AttentionSpec:
        """The part of the problem that is independent of the arrays."""
        return self.problem.spec

    @property
    def hidden(self) -> bool:
        """True if something besides positions and segment ids hides keys, in any block."""
        return self.spec.mask_mod is not None or "mask" in self.problem.features

    @property
    def may_be_empty(self) -> bool:
        """True if a row may have no finite logit in a block that positions and ids leave whole."""
        infinite = "bias" in self.problem.features or self.spec.score_mod is not None
        return self.hidden or infinite

    @property
    def bounded(self) -> bool:
        """True if logits are capped so low that weights are not taken relative to a row max.

        bfloat16 and float32 have as many digits at 2**80 as at 1, and a sum of a million weights
        times values of 2**26 still fits. This saves the max, the rescaling of O, and the wait of
        every exponential for the whole row. But the largest weight of a row is then not 1, and
        rounding it shows: see gpu/online_softmax.py.
        """
        spec = self.spec
        return (
            spec.softcap is not None
            and spec.softcap * softmax.LOG2E <= MOST_BOUNDED
            and spec.score_mod is None
            and not spec.max_logit
            and self.problem.dtype == jnp.bfloat16
        )

    @property
    def in_one_pass(self) -> bool:
        """True if exponentials, dropout and conversion are interleaved (inline_weights).

        This is for 16 bits only.
        """
        in_turns = self.spec.dropout_rate or self.plan.blocks.polynomials
        return bool(in_turns) and self.problem.dtype != jnp.float32

    def hold(self, cta: ForwardCta, work: Work) -> RowFragments:
        """Loads the side inputs that this warpgroup's rows of a Q tile keep in registers."""
        row = work.at.block * self.plan.tile_rows + cta.wg * WARPGROUP_ROWS
        rows, columns = WARPGROUP_ROWS, self.plan.blocks.block_kv
        place = Place(work.at.batch, work.at.head, row, 0, rows, columns)
        return self.plan.side.hold(cta.gmem.side, place)

    def inputs(self, cta: ForwardCta, work: Work, slot, edges: str) -> TileInputs:
        """Returns the side inputs of this warpgroup's tile of scores, which travel with K.

        They are those of a `slot` of K's ring; segment ids are left out where `edges` is "none".
        """
        shape = (WARPGROUP_ROWS, self.plan.blocks.block_kv)
        rows = warpgroup_rows(cta.wg)
        side = self.plan.side
        return side.inputs(work.held, cta.smem.side, slot, shape, rows, ids=edges != "none")

    def logits(
        self, cta: ForwardCta, work: Work, inputs: TileInputs, s, kv_block, edges: str
    ) -> Logits:
        """Returns the logits of a KV block, given its products s; `edges` as for Plan.limits."""
        tile = self.plan.tile(cta, work, kv_block)
        limits = self.plan.limits(cta, work, kv_block, edges)
        spec = self.spec
        if self.cap(edges) is not None:
            spec = dataclasses.replace(spec, softcap=None)
        x, log2_scale, _ = score_tile.logits(spec, tile, s, inputs, limits)
        return Logits(x, log2_scale, inputs, kv_block, edges)

    def cap(self, edges: str) -> Cap | None:
        """Returns the cap that `weights` applies to the logits of steps with these edges, or None.

        Without it logits come capped, if at all. `weights` caps only where nothing hides a key. A
        bias or slopes make most logits large, and dropout has work of its own to overlap with the
        exponentials: neither was tried.
        """
        spec, added = self.spec, {"bias", "alibi_slopes"} & self.problem.features
        if spec.softcap is None or not self.bounded or added or spec.dropout_rate:
            return None
        if edges != "none" or self.may_be_empty:
            return None
        cap = Cap(spec.softcap * softmax.LOG2E, spec.scale / spec.softcap)
        return cap if cap.representable else None

    def finite(self, m, edges: str):
        """Returns m, with 0 for rows that have seen no key yet.

        Their weights are then exp2(-inf), not NaN.
        """
        if m is None or self.plan.speculates or not (self.may_be_empty or self.may_hide(edges)):
            return m  # that of the first tile is finite where a step speculates
        return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)

    def may_hide(self, edges: str) -> bool:
        """Returns whether positions or segment ids may hide keys of a block with these edges."""
        if edges == "last":
            return not self.spec.mask.is_trivial or self.plan.dynamic
        return edges != "none"

    def unseen(self, tile: Logits) -> Maxima:
        """Returns the row maxima before the first KV block of a Q tile."""
        zero = jnp.zeros_like(tile.top)
        if self.unseen_is_checked:
            return Maxima(jnp.full_like(zero, math.nan), jnp.full_like(zero, -math.inf))
        lowest = online_softmax.LOWEST if self.plan.speculates else -math.inf
        in_registers = self.plan.far and not self.plan.keeps_shift
        return Maxima(jnp.full_like(zero, lowest), zero if in_registers else None)

    @property
    def unseen_is_checked(self) -> bool:
        """True if a speculating step looks twice at rows that have seen no key.

        Otherwise they are taken to see no logit below -2**127. Only a bias, such as the lowest
        float32, and the user's function produce such logits.
        """
        added = "bias" in self.problem.features or self.spec.score_mod is not None
        return bool(self.plan.speculates and self.plan.far and added)

    def compared(self, cta: ForwardCta, tile: Logits, old: Maxima, slack: float | None) -> Compared:
        """Compares a tile with the row maxima so far; `slack` as in `compared`."""
        plan, given = self.plan, (tile.x, tile.log2_scale)
        return online_softmax.compared(old, *given, plan.far, slack, plan.interpret, self.kept(cta))

    def kept(self, cta: ForwardCta) -> Kept | None:
        """Returns where this warpgroup's shift is; None: in registers, or there is none."""
        if not self.plan.keeps_shift:
            return None
        return Kept(cta.smem.kept.at[cta.wg], self.plan.interpret)

    def speculate(self, cta: ForwardCta, work: Work, tile: Logits, rows: ForwardRows, o):
        """Returns (o, rows) after a block, relative to the old maxima unless that was a bad guess.

        rows.p are the weights of the block in 16 bits. After a bad guess they are computed again
        with new maxima; a warp redoes all of its 16 rows or none. In a shifted row m is NaN, and so
        is every sum.
        """
        weights = functools.partial(self.weights, cta, work, dtype=self.problem.dtype)
        p, sums = weights(tile, m=rows.maxima.m)

        def again():
            given = tile.top, tile.log2_scale, self.plan.far, self.kept(cta)
            new = online_softmax.raised(rows.maxima, *given)
            x = tile.x if new.shift is None else tile.x - per_row(new.shift, tile.x.shape)
            alpha = jnp.exp2(new.before - new.m)
            if self.plan.part is Part.NEAR:
                alpha = online_softmax.spoiled(alpha, new.before, self.plan.limit)
            p, sums = weights(tile._replace(x=x), m=new.m)
            l = rows.l * per_row(alpha, sums.shape) + sums
            return o * per_row(alpha, o.shape), ForwardRows(p, new.maxima, l)

        exceeds = inline.exceeds(sums, 2.0**self.plan.speculates, self.plan.interpret)
        return lax.cond(exceeds > 0, again, lambda: (o, ForwardRows(p, rows.maxima, rows.l + sums)))

    def joined(self, only, p, edges: str):
        """Returns Rows.only after a step whose operand is p.

        `only` is its value before the step, and None in a tile's first step. Where neither
        positions nor anything else hides keys, every row sees several.
        """
        if not self.bounded:
            return None
        rows = jnp.zeros(WARPGROUP_ROWS, jnp.float32) if only is None else only
        if edges == "none" and not self.may_be_empty:
            return online_softmax.several(rows)
        return online_softmax.joined(
            plgpu.layout_cast(rows, inline.ROWS), p[0], self.plan.interpret
        )

    def plain_weights(self, tile: Logits, m):
        """Returns (p in f32 before dropout, its row sums per thread), relative to row maxima m."""
        x = tile.x * tile.log2_scale
        p = jnp.exp2(x if m is None else x - per_row(m, x.shape))
        return p, inline.lane_sums(p, self.plan.interpret)

    def weights(self, cta: ForwardCta, work: Work, tile: Logits, m, dtype):
        """Returns (p in dtype after dropout, row sums before it), relative to the row maxima m."""
        share, whole = self.plan.blocks.polynomials, tile.edges == "none" and not self.may_be_empty
        powers, cap = Powers(share, bounded=m is None and whole), self.cap(tile.edges)
        weights = functools.partial(self._weights, cta, work, tile, m, dtype)
        if cap is None:
            return weights(powers)
        large = powers._replace(cap=cap)
        # Without tangents exponentials have their unit to themselves: an eighth of them as
        # polynomials is 7 to 12 % slower (max_w8 of trial_softcap_fast.txt at 20374d8).
        small = Powers(0.0, bounded=True, cap=cap._replace(small=True))
        is_large = softcap.is_large(tile.x, cap, self.plan.interpret)
        return lax.cond(is_large > 0, lambda: weights(large), lambda: weights(small))

    def _weights(self, cta: ForwardCta, work: Work, tile: Logits, m, dtype, powers: Powers):
        x = tile.x
        log2_scale = tile.log2_scale if powers.cap is None else powers.cap.log2_scale
        m = jnp.zeros(WARPGROUP_ROWS, jnp.float32) if m is None else m
        m = per_row(m, x.shape)
        if self.plan.interpret:
            x = x if powers.cap is None else powers.cap.plain(x)
            p = online_softmax.plain(x * log2_scale - m, powers)
            sums = inline.lane_sums(p, interpret=True)
            return self.dropped(cta, work, tile, p).astype(dtype), sums
        drop = None
        if self.spec.dropout_rate:
            where = self.plan.tile(cta, work, tile.kv_block)
            keys = where.per_q(tile.inputs.q_keys), where.per_kv(tile.inputs.kv_keys)
            drop = Drop(*keys, dropout.threshold(self.spec.dropout_rate))
        return online_softmax.weights(x, m, log2_scale, powers, drop, dtype)

    def dropped(self, cta: ForwardCta, work: Work, tile: Logits, p):
        """Returns the weights with 0 for those that are dropped; the `gain` is left to the end."""
        if not self.spec.dropout_rate:
            return p
        keep = scores.kept(self.spec, self.plan.tile(cta, work, tile.kv_block), tile.inputs)
        return jnp.where(keep, p, jnp.zeros_like(p))

    def finish(self, cta: ForwardCta, work: Work, rows: ForwardRows) -> Finished:
        """Finishes rows that have seen all their keys."""
        l = rows.l.sum(axis=1)
        sink, sinks, unit = None, cta.gmem.side.sinks, self.problem.unit
        if sinks is not None:
            sink = lax.broadcast_in_dim(sinks[work.at.batch, work.at.head], l.shape, ())
            sink = plgpu.layout_cast(sink, inline.ROWS)
        m = shift = jnp.zeros_like(l)  # where `bounded`
        if rows.maxima is not None:
            m, shift = online_softmax.settled(rows.maxima, self.kept(cta))
        inverse, lse, shift_ = softmax.finish(m, l, shift, sink, unit)
        if rows.only is not None:
            less = l - online_softmax.divisor(rows.only, l)
            inverse = inverse / (1.0 - less * inverse)
        if self.spec.dropout_rate:
            inverse = inverse * dropout.gain(self.spec.dropout_rate)
        most = shift * unit + m * softmax.LN2 if self.spec.max_logit else None
        return Finished(inverse, lse, shift_, most)


def per_row(x, shape):
    """Broadcasts one value per row over a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))
