"""The decode kernel: a few queries against a range of keys, as fast as memory delivers them.

A CTA holds one compute warpgroup and one producer warpgroup. It reads one share of the keys of one
key head (split-KV) for all queries and heads of the group, 64 rows of one wgmma. Most rows may be
padding: the products of a block of 64 keys at head dim 128 then take a seventh of the time in which
a multiprocessor's share of the bandwidth brings the block, and the softmax about a fifth.

    Q     compute warpgroup -> q, once
    K, V  producer -> rings, first to last; contiguous, or page by page
    S, P, O, m, l   registers of the compute warpgroup

O and the log-sum-exp of each share go to device memory; decode_combine.py joins them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import scores, softmax
from ...core.decode import DecodeOperands, DecodeProblem
from ...core.problem import Outputs
from ...core.scores import TileInputs
from . import decode_combine, inline, inline_modifiers
from .decode_blocks import DecodeBlocks, row_tiles
from .decode_plan import Cta, Gmem, Keys, Plan, Results
from .decode_producer import Producer
from .decode_widening import WideningProducer
from .forward_scores import per_row
from .memory import WARPGROUP_ROWS, Ring, launch, swizzles
from .register_tile import RegisterTile


class Held(NamedTuple):
    """What the rows keep."""

    position: Any  # int32[64] of their queries
    first: Any  # int32[64] the first key that they see, or None: key 0
    last: Any  # int32[64] the last one
    slope: Any  # f32[64], or None
    scales: tuple  # f32 that scores and outputs are multiplied by, each or None


class Rows(NamedTuple):
    """What the warpgroup carries from block to block."""

    m: Any  # f32[64] running maximum, base 2
    l: Any  # f32[64, 8] running sums of each thread's own columns


@dataclasses.dataclass(frozen=True)
class Decode:
    """One launch; the methods are the phases of a CTA."""

    plan: Plan

    @property
    def problem(self) -> DecodeProblem:
        """What is computed."""
        return self.plan.problem

    def __call__(self, gmem: Gmem, *refs):
        *results, smem, bars = refs
        slots = self.plan.slots
        cta = Cta(
            gmem=gmem,
            out=Results(*results),
            smem=smem,
            bars=bars,
            k=Ring(bars.k_full, bars.k_empty, slots),
            v=Ring(bars.v_full, bars.v_empty, slots),
            batch=lax.axis_index("batch"),
            head=lax.axis_index("head"),
            tile=lax.axis_index("tile"),
            split=lax.axis_index("split") if self.plan.several else jnp.int32(0),
        )
        wg = lax.axis_index("wg")
        pl.when(wg == 0)(lambda: self.consume(cta))
        producer = WideningProducer if self.problem.quantised else Producer
        pl.when(wg == 1)(lambda: producer(self.plan)(cta))

    def consume(self, cta: Cta):
        """Fold the CTA's blocks into its rows, and store."""
        self.load_q(cta)
        keys = self.plan.keys(cta)
        held = self.hold(cta, keys)
        self.settle(cta, keys)
        rows = Rows(
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), inline.ROWS),
            plgpu.layout_cast(
                jnp.zeros((WARPGROUP_ROWS, inline.LANE_COLS), jnp.float32), inline.WGMMA
            ),
        )

        def fold(o_acc):
            step = functools.partial(self.step, cta, keys, held, o_acc)
            done = rows
            for low, high, masked in keys.zones(self.problem.spec.window_left is not None):
                done = lax.fori_loop(low, high, functools.partial(step, masked=masked), done)
            self.store(cta, held, plgpu.wgmma_accumulator_load(o_acc, wait_n=0), done)

        v_head_dim = self.plan.head_dims[1]
        pl.run_scoped(fold, plgpu.ACC((WARPGROUP_ROWS, v_head_dim), jnp.float32))

    def settle(self, cta: Cta, keys: Keys):
        """Wait for blocks of K that were guessed in vain: results are staged where they arrive.

        After the loop over keys it would take 130 registers.
        """
        if self.plan.guesses and not self.problem.quantised:
            lax.fori_loop(keys.stop, self.plan.guessed(cta), lambda n, _: cta.k.wait_full(n), None)

    def load_q(self, cta: Cta):
        """The rows of the tile, zeros where there are fewer than 64."""
        swizzle = self.plan.q_swizzle(cta.gmem)
        source = cta.gmem.q.at[cta.batch, :, cta.head]
        self.plan.packed(cta.tile).load(source, cta.smem.q, swizzle)
        plgpu.commit_smem()

    def hold(self, cta: Cta, keys: Keys) -> Held:
        """Positions and slopes of the rows."""
        rows = self.plan.packed(cta.tile)
        position = rows.query() + keys.position
        slopes = cta.gmem.slopes
        slope = None if slopes is None else rows.per_head(slopes.at[cta.batch, cta.head])
        limits = self.problem.spec.mask.keys_of(position, keys.length)
        return Held(position, *limits, slope, self.scales(cta))

    def scales(self, cta: Cta) -> tuple:
        """(of K, of V), where each has one for all of its pages."""
        if self.plan.page_scales:
            return None, None
        entry = lambda x: cta.batch if x.shape[0] > 1 else 0
        both = cta.gmem.k_scale, cta.gmem.v_scale
        return tuple(None if x is None else x[entry(x), cta.head] for x in both)

    def scaled(self, cta: Cta, kind: int, use, x):
        """The scores with a block's keys (kind 0), or their weights (1), by scales of its pages."""
        if not self.plan.page_scales:
            return x
        slot = (cta.k, cta.v)[kind].slot(use)
        scales = [cta.smem.scales[kind, slot, i] for i in range(self.plan.pieces)]
        return inline.scale_columns(x, scales, self.plan.interpret)

    def step(self, cta: Cta, keys: Keys, held: Held, o_acc, use, rows: Rows, *, masked: bool):
        """QK^T of a block, softmax and PV, one after the other.

        PV beside the next QK^T would take 138 registers at head dim 128. This takes 128, with which
        a second CTA finds room, and that one computes while this one waits.
        """
        cta.k.wait_full(use)
        s = self.scaled(cta, 0, use, self.products(cta, use))
        cta.k.release(use)
        first = keys.block(use) * self.plan.blocks.block_kv
        x, log2_scale = self.logits(held, s, first, masked)
        m = jnp.maximum(rows.m, x.max(axis=1) * log2_scale)
        # A row that has seen no key yet gets weights of exp2(-inf), not NaN.
        finite = jnp.where(m == -jnp.inf, jnp.zeros_like(m), m) if masked else m
        alpha = jnp.exp2(rows.m - finite)
        p = jnp.exp2(x * log2_scale - per_row(finite, x.shape))
        l = rows.l * per_row(alpha, rows.l.shape) + inline.lane_sums(p, self.plan.interpret)
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        o_acc[...] = o * per_row(alpha, o.shape)
        cta.v.wait_full(use)
        p = self.plan.products.split(self.scaled(cta, 1, use, p))
        self.plan.products.multiply(o_acc, p, cta.smem.v.at[cta.v.slot(use)])
        plgpu.wgmma_wait(0)
        cta.v.release(use)
        return Rows(m, l)

    def products(self, cta: Cta, use):
        """QK^T of a block."""

        def product(s_acc):
            k = cta.smem.k.at[cta.k.slot(use)]
            self.plan.products.multiply(s_acc, cta.smem.q, k, transposed=True)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        shape = (WARPGROUP_ROWS, self.plan.blocks.block_kv)
        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))

    def logits(self, held: Held, s, first, masked: bool):
        """(x, log2_scale) of the products s with the keys from `first` on; -inf where hidden."""
        tile = RegisterTile(0, first, s.shape, interpret=self.plan.interpret)
        bias = None
        if held.slope is not None:
            position = per_row(held.position, s.shape)
            column = inline_modifiers.positions(s.shape, 1, first, self.plan.interpret)
            distance = lax.convert_element_type(lax.abs(position - column), jnp.float32)
            bias = distance * per_row(-held.slope, s.shape)
        spec = self.problem.spec
        if held.scales[0] is not None:
            s = s * held.scales[0]
        found = scores.logits(spec.attention, tile, s, TileInputs(bias=bias))
        x = found.x
        if masked:
            low = None if held.first is None else held.first - first
            x = inline.hide_outside(x, low, held.last - first, self.plan.interpret)
        return x, found.log2_scale

    def store(self, cta: Cta, held: Held, o, rows: Rows):
        """Divide by the row sums and write O and the log-sum-exp of this share of the keys."""
        packed, smem, sinks = self.plan.packed(cta.tile), cta.smem, cta.gmem.sinks
        sink = None
        if sinks is not None:
            sink = packed.per_head(sinks.at[cta.batch, cta.head]) * softmax.LOG2E
        inverse, lse = softmax.finish(rows.m, rows.l.sum(axis=1), sink)
        if held.scales[1] is not None:
            inverse = inverse * held.scales[1]
        o = o * per_row(inverse, o.shape)
        smem.o[...] = o.astype(smem.o.dtype)
        smem.lse[...] = lse
        plgpu.commit_smem()
        target, lse_target = self.plan.results(cta)
        packed.store(smem.o, target, swizzles(smem.o.shape[1], smem.o.dtype)[0])
        packed.store_values(smem.lse, lse_target)


def decode(
    problem: DecodeProblem, blocks: DecodeBlocks, operands: DecodeOperands, interpret: bool
) -> Outputs:
    """Launch, and join the shares where there are several.

    Args:
        problem: one that decode_blocks.unsupported has nothing against.
        blocks: tile sizes and the number of splits.
        operands: as core.decode has them; page ids need not be in range.
        interpret: run by the interpreter.

    Returns:
        Outputs: o [B, T, N, Hv] in q's dtype and lse_log2 f32[B, N, T].
    """
    plan = Plan(problem, blocks, interpret)
    several = blocks.num_splits > 1
    gmem = Gmem(
        q=plan.by_key_head(operands.q, 2),
        k=operands.k,
        v=operands.v,
        kv_lengths=operands.kv_lengths,
        q_offset=operands.q_offset,
        page_table=operands.page_table,
        slopes=plan.by_key_head(operands.alibi_slopes, 1),
        sinks=None if several else plan.by_key_head(operands.sinks, 1),
        k_scale=operands.k_scale,
        v_scale=operands.v_scale,
    )
    out = plan.result_shapes()
    run = launch(
        Decode(plan),
        out=tuple(out),
        scratch=plan.scratch(gmem, out),
        # Heads before splits: what runs at one time reads all heads of a key, which are neighbours.
        grid={
            "batch": problem.batch,
            "split": blocks.num_splits,
            "head": problem.kv_heads,
            "tile": row_tiles(problem),
        },
        threads=2,
        name="flash_pallas_decode",
        interpret=interpret,
    )
    parts = Results(*run(gmem))
    if several:
        return decode_combine.combine(plan, parts, operands.sinks)
    heads = (problem.batch, problem.q_heads, problem.q_len)
    o_shape = (problem.batch, problem.q_len, problem.q_heads, problem.v_head_dim)
    return Outputs(parts.o.reshape(o_shape), parts.lse.reshape(heads))
