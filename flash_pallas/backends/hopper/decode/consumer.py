"""The compute warpgroup of the decode kernel: all that does not depend on how its tiles lie."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import scores, softmax
from ....core.scores import TileInputs
from ...gpu import score_tile
from ...gpu.ptx.draft_bits import DraftBits
from ...gpu.score_tile import RegisterTile
from .plan import DecodeCta, DecodePlan, Keys


class QueryFragments(NamedTuple):
    """Values known before the first block: one per row of queries, one for all rows, or None."""

    position: Any  # int32 of their queries
    first: Any  # int32 the first key that they see, or None: key 0
    last: Any  # int32 the last one
    slope: Any  # f32, or None
    k_scale: Any  # f32 that scores are multiplied by, or None
    v_scale: Any  # f32 that outputs are multiplied by, or None
    drafts: DraftBits | None = None  # of masked blocks


class Folded(NamedTuple):
    """State that the warpgroup carries from block to block, besides the accumulator of O."""

    m: Any  # f32, one a row of queries: the largest logit so far, as core.scores.Logits.x
    l: Any  # f32, several a row: running sums, each of one thread's own weights
    unit: Any = None  # f32 that O is counted in, where pages have scales: V's largest so far


@dataclasses.dataclass(frozen=True)
class Consumer(abc.ABC):
    """Base class of the compute warpgroup, which folds the CTA's KV blocks into its query rows.

    Its methods are the phases.
    """

    plan: DecodePlan

    def __call__(self, cta: DecodeCta):
        """Runs all phases, from the load of Q to the store of O and the log-sum-exp."""
        self.load_q(cta)
        keys = self.plan.keys(cta)
        held = self.hold(cta, keys)
        self.settle(cta, keys)

        def fold(o_acc):
            folded = self.start(cta, keys)
            for low, high, masked in keys.zones(self.plan.problem.bounded_below):
                own = self.with_drafts(cta, keys, held) if masked else held
                step = functools.partial(self.step, cta, keys, own, o_acc, masked=masked)
                folded = lax.fori_loop(low, high, step, folded)
            o = self.output(cta, keys, o_acc)
            self.store(cta, held, o, folded)

        pl.run_scoped(fold, plgpu.ACC(self.output_shape, jnp.float32))

    def load_q(self, cta: DecodeCta):
        """Loads the Q tile into shared memory, with zeros where it has more rows than there are."""
        source = self.plan.of_entry(cta, cta.gmem.q)
        packed, swizzle = self.plan.packed(cta.tile), self.plan.q_swizzle(cta.gmem)

        def load():
            packed.load(source, cta.smem.q, swizzle)
            plgpu.commit_smem()

        self.by_first(cta, load)
        self.meet(cta)

    def by_first(self, cta: DecodeCta, run: Callable[[], None]):
        """Calls `run` in the first of the compute warpgroups."""
        if self.plan.parts == 1:
            run()
        else:
            pl.when(cta.part == 0)(run)

    def meet(self, cta: DecodeCta):
        """Waits until all compute warpgroups have come here."""
        if self.plan.parts > 1:
            plgpu.barrier_arrive(cta.bars.met.at[0])
            plgpu.barrier_wait(cta.bars.met.at[0])

    def hold(self, cta: DecodeCta, keys: Keys) -> QueryFragments:
        """Returns the positions, visible keys, slopes and scales of the rows."""
        rows, depths = self.plan.packed(cta.tile), cta.gmem.drafts.depths
        query = rows.query() if depths is None else rows.per_query(depths.at[cta.batch])
        position = query + keys.position
        slopes = cta.gmem.slopes
        slope = None if slopes is None else rows.per_head(slopes.at[cta.batch, cta.head])
        limits = keys.mask.keys_of(position, keys.length, keys.start)
        return QueryFragments(position, *limits, slope, *self.scales(cta))

    def with_drafts(self, cta: DecodeCta, keys: Keys, held: QueryFragments) -> QueryFragments:
        """Returns the values of the rows with the drafts that they see, for blocks that have any.

        They are loaded when only masked blocks are left, so that the others keep their registers.
        """
        words = cta.gmem.drafts.words
        if words is None:
            return held
        rows = self.plan.packed(cta.tile)
        row_words = (rows.per_query(words.at[cta.batch, i]) for i in range(words.shape[1]))
        return held._replace(drafts=DraftBits(tuple(row_words), keys.position))

    def scales(self, cta: DecodeCta) -> tuple:
        """Returns (scale of K, scale of V), or (None, None) where each page has its own."""
        if self.plan.page_scales:
            return None, None
        entry = lambda x: cta.batch if x.shape[0] > 1 else 0
        scales = cta.gmem.k_scale, cta.gmem.v_scale
        return tuple(None if x is None else x[entry(x), cta.head] for x in scales)

    def page_scales(self, cta: DecodeCta, kind: int, slot) -> list:
        """Returns the scales of the pages of a block of K (kind 0) or V (1), one a piece."""
        return [cta.smem.scales[kind, slot, i] for i in range(self.plan.pieces)]

    def sink(self, cta: DecodeCta):
        """Returns the logit of each row's sink, natural, or None."""
        sinks = cta.gmem.sinks
        if sinks is None:
            return None
        packed = self.plan.packed(cta.tile)
        return packed.per_head(sinks.at[cta.batch, cta.head])

    def finish(self, cta: DecodeCta, m, l):
        """Calls softmax.finish for rows with weights of exp2((x - m) * log2_scale)."""
        problem = self.plan.problem
        m, shift = softmax.parted(m, problem.unit, softmax.far(problem.dtype))
        return softmax.finish(m, l, shift, self.sink(cta), problem.unit)

    def seen_logits(self, held: QueryFragments, s, first, position, spread):
        """Returns core.scores.Logits of scaled matmuls, before any key is hidden.

        Args:
            held: values of the rows.
            s: the matmuls, f32.
            first: number of the first key.
            position: () -> int32 numbers of the keys, spread over the tile.
            spread: (x, shape) -> one value per query, spread over the tile.
        """
        falls = None
        if held.slope is not None:
            query = spread(held.position, s.shape)
            falls = score_tile.alibi(query, position(), spread(-held.slope, s.shape))
        tile = RegisterTile(0, first, s.shape, interpret=self.plan.interpret)
        return scores.logits(self.plan.problem.spec.attention, tile, s, TileInputs(falls=falls))

    def publish(self, cta: DecodeCta, swizzle: int):
        """Writes the staged O (`swizzle` in bytes), LSE and shift to device memory."""
        plgpu.commit_smem()
        packed, target = self.plan.packed(cta.tile), self.plan.results(cta)
        if self.plan.parts == 1:
            self.plan.where_row(cta, lambda: packed.store(cta.smem.o, target.o, swizzle))
        else:
            self.publish_part(cta, target.o, swizzle)

        def store_rows():
            packed.store_values(cta.smem.lse, target.lse)
            packed.store_values(cta.smem.shift, target.shift)

        self.by_first(cta, store_rows)

    def publish_part(self, cta: DecodeCta, target, swizzle: int):
        """Writes the warpgroup's part of the staged O to its columns of `target`."""
        packed, columns = self.plan.packed(cta.tile), self.plan.part_columns
        for part in range(self.plan.parts):
            first = part * columns
            own = target.at[..., pl.ds(first, min(columns, target.shape[-1] - first))]
            store = functools.partial(packed.store, cta.smem.o.at[part], own, swizzle)
            pl.when(cta.part == part)(store)

    @property
    @abc.abstractmethod
    def output_shape(self) -> tuple[int, int]:
        """Shape of the accumulator of O."""

    @abc.abstractmethod
    def settle(self, cta: DecodeCta, keys: Keys):
        """Waits for blocks that were guessed in vain, as results are staged where they arrive."""

    @abc.abstractmethod
    def start(self, cta: DecodeCta, keys: Keys) -> Folded:
        """Returns the state before any key has been seen."""

    @abc.abstractmethod
    def step(
        self,
        cta: DecodeCta,
        keys: Keys,
        held: QueryFragments,
        o_acc,
        use,
        folded: Folded,
        *,
        masked: bool,
    ):
        """Folds in the block of this use and returns the new state."""

    @abc.abstractmethod
    def output(self, cta: DecodeCta, keys: Keys, o_acc):
        """Returns O when all blocks are in it and nothing reads their slots any more."""

    @abc.abstractmethod
    def store(self, cta: DecodeCta, held: QueryFragments, o, folded: Folded):
        """Divides by the sums and writes O and the log-sum-exp of this share of the keys."""
