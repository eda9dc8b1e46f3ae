"""The decode kernel: a few queries against a range of keys, as fast as memory delivers them.

A CTA holds one compute warpgroup and one producer warpgroup. It reads one share of the keys of one
KV head (split-KV) for all queries and heads of the group. Where these are few, they are the columns
of the products, as many as needed (decode_columns.py); otherwise they are the rows, always 64
(decode_rows.py).

    Q        compute warpgroup -> q, once
    K, V     producer -> rings, first to last; contiguous, or page by page
    S, O, m, l   registers of the compute warpgroup; P too, or in shared memory

O and the log-sum-exp of each share go to device memory; decode_combine.py joins them.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...core.decode import DecodeOperands, DecodeProblem
from ...core.problem import Outputs
from ..mosaic.launch import launch
from . import decode_combine
from .decode_blocks import DecodeBlocks, row_tiles
from .decode_columns import ColumnConsumer
from .decode_plan import Cta, Gmem, Plan, Results
from .decode_producer import Producer
from .decode_rows import RowConsumer
from .decode_widening import WideningProducer
from .memory import Ring


@dataclasses.dataclass(frozen=True)
class Decode:
    """One launch of the decode kernel; calling it is what each warpgroup of a CTA does."""

    plan: Plan

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
        consumer = ColumnConsumer if self.plan.blocks.upright else RowConsumer
        producer = WideningProducer if self.plan.in_memory else Producer
        pl.when(wg == 0)(lambda: consumer(self.plan)(cta))
        pl.when(wg == 1)(lambda: producer(self.plan)(cta))


def decode(
    problem: DecodeProblem, blocks: DecodeBlocks, operands: DecodeOperands, interpret: bool
) -> Outputs:
    """Launches the decode kernel, and the combine kernel if there are several splits.

    Args:
        problem: a problem for which decode_blocks.unsupported returns None.
        blocks: tile sizes and the number of splits.
        operands: arrays as in core.decode; page ids need not be in range.
        interpret: run by the interpreter.

    Returns:
        Outputs: o [B, T, N, Hv] in q's dtype, lse_log2 and shift f32[B, N, T].
    """
    plan = Plan(problem, blocks, interpret)
    several = plan.several
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
        scratch=plan.scratch(gmem.k, gmem.v),
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
    return Outputs(parts.o.reshape(o_shape), parts.lse.reshape(heads), parts.shift.reshape(heads))
