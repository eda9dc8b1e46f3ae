"""The decode kernel's tiles with queries as rows: for many of them, 64 at a time.

At head dim 128 the matmuls of a block of 64 keys take a seventh of the time in which an SM's share
of the bandwidth brings the block, and softmax about a fifth, however many of the 64 rows are
padding.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.ptx import draft_bits, inline, modifiers
from ..common.pipeline import swizzles
from ..forward.softmax import per_row
from .consumer import Consumer, Folded, QueryFragments
from .plan import DecodeCta, Keys


class RowConsumer(Consumer):
    """Consumer that computes S = Q K^T and O = P V; per-row values lie in inline.ROWS."""

    @property
    def output_shape(self) -> tuple[int, int]:
        """Shape of the accumulator of O: [rows, columns of V]."""
        return WARPGROUP_ROWS, self.plan.part_columns

    def settle(self, cta: DecodeCta, keys: Keys):
        """Waits for blocks of K that were guessed in vain; see Consumer.

        After the loop over keys this would take 130 registers.
        """
        if self.plan.guesses and not self.plan.problem.quantised:
            lax.fori_loop(keys.stop, self.plan.guessed(cta), lambda n, _: cta.k.wait_full(n), None)

    def start(self, cta: DecodeCta, keys: Keys) -> Folded:
        """Returns the state before any key, with eight running sums per row."""
        sums = jnp.zeros((WARPGROUP_ROWS, inline.LANE_COLS), jnp.float32)
        return Folded(
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), inline.ROWS),
            plgpu.layout_cast(sums, inline.WGMMA),
        )

    def scaled(self, cta: DecodeCta, kind: int, use, x):
        """Multiplies a block's scores (kind 0) or weights (1) by the scales of its pages."""
        if not self.plan.page_scales:
            return x
        slot = (cta.k, cta.v)[kind].slot(use)
        return inline.scale_columns(x, self.page_scales(cta, kind, slot), self.plan.interpret)

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
        """Folds in the block of this use: QK^T, softmax and PV, one after the other.

        Overlapping PV with the next QK^T would take 138 registers at head dim 128. This takes 128,
        which leaves room for a second CTA, and that one computes while this one waits.
        """
        cta.k.wait_full(use)
        s = self.scaled(cta, 0, use, self.qk(cta, use))
        if not self.plan.shares:
            cta.k.release(use)
        first = keys.block(use) * self.plan.blocks.block_kv
        x, log2_scale = self.logits(held, s, first, masked)
        m = jnp.maximum(folded.m, x.max(axis=1))
        # A row that has seen no key yet gets weights of exp2(-inf), not NaN.
        finite = jnp.where(m == -jnp.inf, jnp.zeros_like(m), m) if masked else m
        alpha = jnp.exp2((folded.m - finite) * log2_scale)
        # Scaled after the difference: that is exact where it matters, however large logits are.
        p = jnp.exp2((x - per_row(finite, x.shape)) * log2_scale)
        sums = inline.lane_sums(p, self.plan.interpret)
        l = folded.l * per_row(alpha, folded.l.shape) + sums
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        o_acc[...] = o * per_row(alpha, o.shape)
        if not self.plan.shares:
            cta.v.wait_full(use)
        elif masked:
            self.clear_values(cta, keys, use)
        p = self.plan.matmuls.split(self.scaled(cta, 1, use, p))
        self.plan.matmuls.multiply(o_acc, p, self.values(cta, use))
        plgpu.wgmma_wait(0)
        cta.v.release(use)
        return Folded(m, l)

    def values(self, cta: DecodeCta, use):
        """Returns the warpgroup's columns of a block of V, in shared memory."""
        v, columns = cta.smem.v.at[self.plan.slot(cta.v, use)], self.plan.part_columns
        if self.plan.shares:
            part = jnp.int32(0) if self.plan.parts == 1 else lax.optimization_barrier(cta.part)
            return v.at[:, pl.ds(part * columns, columns)]
        return v if self.plan.parts == 1 else v.at[lax.optimization_barrier(cta.part)]

    def clear_values(self, cta: DecodeCta, keys: Keys, use):
        """Zeroes the padding of a block whose keys are its values, when no one reads its keys."""
        tile = cta.smem.k.at[cta.k.slot(use)]
        swizzle, first = self.plan.q_swizzle(cta.gmem), keys.block(use) * tile.shape[0]
        clear = functools.partial(self.plan.clear_padding, tile, keys, first, swizzle)

        def clear_together():
            self.meet(cta)
            self.by_first(cta, clear)
            plgpu.commit_smem()
            self.meet(cta)

        _, padded = self.plan.has_padding(keys, first)
        pl.when(padded)(clear_together)

    def queries(self, cta: DecodeCta):
        """Returns the Q tile in shared memory."""
        if self.plan.parts == 1:
            return cta.smem.q
        # At an address that ptxas cannot know: it would keep 36 descriptors through the loop.
        first = lax.optimization_barrier(jnp.int32(0)) * WARPGROUP_ROWS
        return cta.smem.q.at[pl.ds(first, WARPGROUP_ROWS)]

    def qk(self, cta: DecodeCta, use):
        """Returns S = Q K^T of a block, f32."""

        def matmul(s_acc):
            # The slot of wide heads is computed anew here, after the accumulator has been made.
            k = cta.smem.k.at[self.plan.slot(cta.k, use)]
            self.plan.matmuls.multiply(s_acc, self.queries(cta), k, transposed=True)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        shape = (WARPGROUP_ROWS, self.plan.blocks.block_kv)
        return pl.run_scoped(matmul, plgpu.ACC(shape, jnp.float32))

    def logits(self, held: QueryFragments, s, first, masked: bool):
        """Returns (x, log2_scale) of matmuls s, with keys from `first` on; -inf where hidden."""
        if held.k_scale is not None:
            s = s * held.k_scale
        position = lambda: modifiers.positions(s.shape, 1, first, self.plan.interpret)
        z = self.seen_logits(held, s, first, position, per_row)
        x = z.x
        if masked:
            low = None if held.first is None else held.first - first
            if held.drafts is not None:
                x = inline.hide_outside(x, low, None, self.plan.interpret)
                x = draft_bits.hide(x, held.drafts, first, 1, self.plan.interpret)
            else:
                x = inline.hide_outside(x, low, held.last - first, self.plan.interpret)
        return x, z.log2_scale

    def output(self, cta: DecodeCta, keys: Keys, o_acc):
        """Returns O; each step has waited for its own matmul, in every compute warpgroup."""
        self.meet(cta)
        return plgpu.wgmma_accumulator_load(o_acc, wait_n=0)

    def store(self, cta: DecodeCta, held: QueryFragments, o, folded: Folded):
        """Divides by the sums and writes O, the log-sum-exp and its shift; see Consumer."""
        inverse, lse, shift = self.finish(cta, folded.m, folded.l.sum(axis=1))
        if held.v_scale is not None:
            inverse = inverse * held.v_scale
        o = o * per_row(inverse, o.shape)
        staged = cta.smem.o if self.plan.parts == 1 else cta.smem.o.at[cta.part]
        staged[...] = o.astype(staged.dtype)

        def stage_rows():
            cta.smem.lse[...], cta.smem.shift[...] = lse, shift

        self.by_first(cta, stage_rows)
        self.publish(cta, swizzles(staged.shape[1], staged.dtype)[0])
