"""From the products of a step of the forward kernel to its logits and weights."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import dropout, scores, softmax
from ...core.problem import AttentionSpec, Problem
from ...core.scores import TileInputs
from . import inline, register_tile
from .forward_plan import Cta, Plan, Work
from .memory import WARPGROUP_ROWS, warpgroup_rows
from .side_inputs import Held, Place


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

    def logits(self, cta: Cta, work: Work, inputs: TileInputs, s, kv_block, edges: str):
        """(x, a Python float): logits in base 2 are their product, -inf where hidden.

        Args:
            cta: where.
            work: the query tile.
            inputs: what the tile reads.
            s: the products.
            kv_block: the key block.
            edges: as for Plan.limits.
        """
        tile = self.plan.tile(cta, work, kv_block)
        limits = self.plan.limits(cta, work, kv_block, edges)
        x, log2_scale, _ = register_tile.logits(self.spec, tile, s, inputs, limits)
        return x, log2_scale

    def dropped(self, cta: Cta, work: Work, inputs: TileInputs, p, kv_block):
        """The weights that dropout keeps; `gain` is left to the end."""
        if not self.spec.dropout_rate:
            return p
        tile = self.plan.tile(cta, work, kv_block)
        keep = scores.kept(self.spec, tile, inputs)
        return jnp.where(keep, p, jnp.zeros_like(p))

    def finish(self, cta: Cta, work: Work, m, l):
        """(what O is multiplied by, lse_log2) of finished rows."""
        sink, sinks = None, cta.gmem.side.sinks
        if sinks is not None:
            sink = lax.broadcast_in_dim(sinks[work.at.batch, work.at.head], m.shape, ())
            sink = plgpu.layout_cast(sink, inline.ROWS)
        inverse, lse = softmax.finish(m, l, sink)
        if self.spec.dropout_rate:
            inverse = inverse * dropout.gain(self.spec.dropout_rate)
        return inverse, lse
