"""From the products of a step of the forward kernel to its logits and weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import dropout, scores, softmax
from ...core.problem import AttentionSpec, Problem
from ...core.scores import TileInputs
from ..mosaic import (
    inline,
    inline_cap,
    inline_weights,
    lone_weight,
    register_tile,
    row_maxima,
)
from ..mosaic.inline_cap import Cap
from ..mosaic.inline_weights import Drop, Powers
from ..mosaic.launch import WARPGROUP_ROWS
from ..mosaic.row_maxima import Compared, Kept, Maxima
from .far_rows import Part
from .forward_plan import Cta, Plan, Rows, Work
from .memory import warpgroup_rows
from .side_inputs import Held, Place

# Of logits in base 2, so that 2**logit needs no maximum to be relative to.
MOST_BOUNDED = 80.0


class Logits(NamedTuple):
    """A tile of logits, and what was needed to make them."""

    x: Any  # f32[64, block_kv], -inf where hidden; not capped yet where Scores.cap says so
    log2_scale: float  # x * log2_scale are in base 2
    inputs: TileInputs
    kv_block: Any
    edges: str  # as for Plan.limits

    @property
    def top(self):
        """f32[64], the largest x of each row."""
        return self.x.max(axis=1)


class Finished(NamedTuple):
    """Rows that have seen all their keys."""

    inverse: Any  # what O is multiplied by
    lse: Any  # base 2, relative to the shift
    shift: Any
    most: Any  # the largest logit, natural; None unless asked for


@dataclasses.dataclass(frozen=True)
class Scores:
    """Everything between QK^T and the softmax, and dropout after it; nothing where a call has none.

    Attributes:
        plan: of the kernel.
    """

    plan: Plan

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return self.plan.problem

    @property
    def spec(self) -> AttentionSpec:
        """What is computed, apart from the arrays."""
        return self.problem.spec

    @property
    def hidden(self) -> bool:
        """Something beyond positions and segment ids hides keys, in any block."""
        return self.spec.mask_mod is not None or "mask" in self.problem.features

    @property
    def may_be_empty(self) -> bool:
        """A row may have only logits of -inf in a block that positions and ids leave whole."""
        infinite = "bias" in self.problem.features or self.spec.score_mod is not None
        return self.hidden or infinite

    @property
    def bounded(self) -> bool:
        """Logits are capped so low that weights are not taken relative to a maximum.

        bfloat16 and float32 have as many digits at 2**80 as at 1, and a sum of a million weights
        times values of 2**26 still fits. This saves the maximum, the rescaling of O and the wait of
        every exponential for the whole row. But the largest weight of a row is not 1, and rounding
        it shows: lone_weight.py.
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
        """Exponentials, dropout and conversion take turns: inline_weights. For 16 bits alone."""
        in_turns = self.spec.dropout_rate or self.plan.blocks.polynomials
        return bool(in_turns) and self.problem.dtype != jnp.float32

    def hold(self, cta: Cta, work: Work) -> Held:
        """What this warpgroup's rows of a query tile read beside Q, K and V."""
        row = work.at.block * self.plan.tile_rows + cta.wg * WARPGROUP_ROWS
        rows, columns = WARPGROUP_ROWS, self.plan.blocks.block_kv
        place = Place(work.at.batch, work.at.head, row, 0, rows, columns)
        return self.plan.side.hold(cta.gmem.side, place)

    def inputs(self, cta: Cta, work: Work, slot, edges: str) -> TileInputs:
        """What this warpgroup's tile of scores reads, from the slot of K that it travels with."""
        shape = (WARPGROUP_ROWS, self.plan.blocks.block_kv)
        rows = warpgroup_rows(cta.wg)
        side = self.plan.side
        return side.inputs(work.held, cta.smem.side, slot, shape, rows, ids=edges != "none")

    def logits(self, cta: Cta, work: Work, inputs: TileInputs, s, kv_block, edges: str) -> Logits:
        """Logits of the products s of a key block; `edges` as for Plan.limits."""
        tile = self.plan.tile(cta, work, kv_block)
        limits = self.plan.limits(cta, work, kv_block, edges)
        spec = self.spec
        if self.cap(edges) is not None:
            spec = dataclasses.replace(spec, softcap=None)
        x, log2_scale, _ = register_tile.logits(spec, tile, s, inputs, limits)
        return Logits(x, log2_scale, inputs, kv_block, edges)

    def cap(self, edges: str) -> Cap | None:
        """With which `weights` caps the logits of steps with these edges; None: they come capped.

        Only where nothing hides a key. A bias or slopes make most logits large, and dropout has
        work of its own to put beside the exponentials: neither was tried.
        """
        spec, added = self.spec, {"bias", "alibi_slopes"} & self.problem.features
        if spec.softcap is None or not self.bounded or added or spec.dropout_rate:
            return None
        if edges != "none" or self.may_be_empty:
            return None
        cap = Cap(spec.softcap * softmax.LOG2E, spec.scale / spec.softcap)
        return cap if cap.representable else None

    def finite(self, m, edges: str):
        """m, with 0 for rows that have seen no key yet: their weights are exp2(-inf), not NaN."""
        if m is None or self.plan.speculates or not (self.may_be_empty or self.may_hide(edges)):
            return m  # that of the first tile is finite where a step speculates
        return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)

    def may_hide(self, edges: str) -> bool:
        """Positions may hide keys of a block with these edges."""
        if edges == "last":
            return not self.spec.mask.is_trivial or self.plan.dynamic
        return edges != "none"

    def unseen(self, tile: Logits) -> Maxima:
        """Maxima before the first key block of a query tile."""
        zero = jnp.zeros_like(tile.top)
        if self.unseen_is_checked:
            return Maxima(jnp.full_like(zero, math.nan), jnp.full_like(zero, -math.inf))
        lowest = row_maxima.LOWEST if self.plan.speculates else -math.inf
        in_registers = self.plan.far and not self.plan.keeps_shift
        return Maxima(jnp.full_like(zero, lowest), zero if in_registers else None)

    @property
    def unseen_is_checked(self) -> bool:
        """A speculating step looks twice at rows that have seen no key.

        Else they are taken to see no logit below -2**127, which only a bias, such as the lowest
        float32, and the user's function make.
        """
        added = "bias" in self.problem.features or self.spec.score_mod is not None
        return bool(self.plan.speculates and self.plan.far and added)

    def compared(self, cta: Cta, tile: Logits, old: Maxima, slack: float | None) -> Compared:
        """A tile beside the maxima so far; `slack` as row_maxima.compared takes it."""
        plan, given = self.plan, (tile.x, tile.log2_scale)
        return row_maxima.compared(old, *given, plan.far, slack, plan.interpret, self.kept(cta))

    def kept(self, cta: Cta) -> Kept | None:
        """Where the shift of this warpgroup's rows is; None: in registers, or there is none."""
        if not self.plan.keeps_shift:
            return None
        return Kept(cta.smem.kept.at[cta.wg], self.plan.interpret)

    def speculate(self, cta: Cta, work: Work, tile: Logits, rows: Rows, o):
        """(o, rows) after a block: relative to the old maxima, once more if that was a bad guess.

        rows.p is the block's in 16 bits. A warp redoes all of its 16 rows or none. In a row that is
        shifted, m is NaN and so is every sum.
        """
        weights = functools.partial(self.weights, cta, work, dtype=self.problem.dtype)
        p, sums = weights(tile, m=rows.maxima.m)

        def again():
            given = tile.top, tile.log2_scale, self.plan.far, self.kept(cta)
            new = row_maxima.raised(rows.maxima, *given)
            x = tile.x if new.shift is None else tile.x - per_row(new.shift, tile.x.shape)
            alpha = jnp.exp2(new.before - new.m)
            if self.plan.part is Part.NEAR:
                alpha = row_maxima.spoiled(alpha, new.before, self.plan.limit)
            p, sums = weights(tile._replace(x=x), m=new.m)
            l = rows.l * per_row(alpha, sums.shape) + sums
            return o * per_row(alpha, o.shape), Rows(p, new.maxima, l)

        exceeds = inline.exceeds(sums, 2.0**self.plan.speculates, self.plan.interpret)
        return lax.cond(exceeds > 0, again, lambda: (o, Rows(p, rows.maxima, rows.l + sums)))

    def joined(self, only, p, edges: str):
        """Rows.only after a step whose operand is p; `only`: before it, None in a tile's first.

        Where neither positions nor anything else hides keys every row sees several.
        """
        if not self.bounded:
            return None
        rows = jnp.zeros(WARPGROUP_ROWS, jnp.float32) if only is None else only
        if edges == "none" and not self.may_be_empty:
            return lone_weight.several(rows)
        return lone_weight.joined(plgpu.layout_cast(rows, inline.ROWS), *p, self.plan.interpret)

    def plain_weights(self, tile: Logits, m):
        """(p in f32, before dropout; its row sums per thread) relative to the row maxima m."""
        x = tile.x * tile.log2_scale
        p = jnp.exp2(x if m is None else x - per_row(m, x.shape))
        return p, inline.lane_sums(p, self.plan.interpret)

    def weights(self, cta: Cta, work: Work, tile: Logits, m, dtype):
        """(p in dtype, after dropout; row sums of all of it) relative to the row maxima m."""
        share, whole = self.plan.blocks.polynomials, tile.edges == "none" and not self.may_be_empty
        powers, cap = Powers(share, bounded=m is None and whole), self.cap(tile.edges)
        weights = functools.partial(self._weights, cta, work, tile, m, dtype)
        if cap is None:
            return weights(powers)
        large = powers._replace(cap=cap)
        # Without tangents exponentials have their unit to themselves: an eighth of them as
        # polynomials is 7 to 12 % slower (max_w8 of benchmarks/results/trial_softcap_fast.txt).
        small = Powers(0.0, bounded=True, cap=cap._replace(small=True))
        is_large = inline_cap.is_large(tile.x, cap, self.plan.interpret)
        return lax.cond(is_large > 0, lambda: weights(large), lambda: weights(small))

    def _weights(self, cta: Cta, work: Work, tile: Logits, m, dtype, powers: Powers):
        x = tile.x
        log2_scale = tile.log2_scale if powers.cap is None else powers.cap.log2_scale
        m = jnp.zeros(WARPGROUP_ROWS, jnp.float32) if m is None else m
        m = per_row(m, x.shape)
        if self.plan.interpret:
            x = x if powers.cap is None else powers.cap.plain(x)
            p = inline_weights.plain(x * log2_scale - m, powers)
            sums = inline.lane_sums(p, interpret=True)
            return self.dropped(cta, work, tile, p).astype(dtype), sums
        drop = None
        if self.spec.dropout_rate:
            where = self.plan.tile(cta, work, tile.kv_block)
            keys = where.per_q(tile.inputs.q_keys), where.per_kv(tile.inputs.kv_keys)
            drop = Drop(*keys, dropout.threshold(self.spec.dropout_rate))
        return inline_weights.weights(x, m, log2_scale, powers, drop, dtype)

    def dropped(self, cta: Cta, work: Work, tile: Logits, p):
        """The weights that dropout keeps; `gain` is left to the end."""
        if not self.spec.dropout_rate:
            return p
        keep = scores.kept(self.spec, self.plan.tile(cta, work, tile.kv_block), tile.inputs)
        return jnp.where(keep, p, jnp.zeros_like(p))

    def finish(self, cta: Cta, work: Work, rows: Rows) -> Finished:
        """Ends rows that have seen all their keys."""
        l = rows.l.sum(axis=1)
        sink, sinks, unit = None, cta.gmem.side.sinks, self.problem.unit
        if sinks is not None:
            sink = lax.broadcast_in_dim(sinks[work.at.batch, work.at.head], l.shape, ())
            sink = plgpu.layout_cast(sink, inline.ROWS)
        m = shift = jnp.zeros_like(l)  # where `bounded`
        if rows.maxima is not None:
            m, shift = row_maxima.settled(rows.maxima, self.kept(cta))
        inverse, lse, shift_ = softmax.finish(m, l, shift, sink, unit)
        if rows.only is not None:
            less = l - lone_weight.divisor(rows.only, l)
            inverse = inverse / (1.0 - less * inverse)
        if self.spec.dropout_rate:
            inverse = inverse * dropout.gain(self.spec.dropout_rate)
        most = shift * unit + m * softmax.LN2 if self.spec.max_logit else None
        return Finished(inverse, lse, shift_, most)


def per_row(x, shape):
    """One value per row spread over a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))
