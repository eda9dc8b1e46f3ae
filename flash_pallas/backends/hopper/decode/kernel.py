"""The decode kernel: a few queries against a range of keys, as fast as memory delivers them.

A CTA holds one compute warpgroup and one producer warpgroup. It reads one share of the keys of one
KV head (split-KV) for all queries and heads of the group. Where these are few, they are the columns
of the matmuls, as many as needed (columns.py); otherwise they are the rows, always 64
(rows.py). If V has more than 256 columns, two compute warpgroups of rows have a half of them each.
Values that are columns of the keys lie in the tile of K, where a head dim is above 256.

    Q        compute warpgroup -> q, once
    K, V     producer -> rings, first to last; contiguous, or page by page, with the pages' scales
    S, O, m, l   registers of the compute warpgroup; P too, or in shared memory

O and the log-sum-exp of each share go to device memory; combine.py joins them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.decode import DecodeOperands, DecodeProblem, DraftArrays
from ....core.problem import Outputs
from ...gpu.launch import launch
from . import combine
from .columns import ColumnConsumer
from .dequantize_loads import DequantizingProducer
from .loads import DecodeProducer
from .plan import DecodeCta, DecodeGmem, DecodePlan, DecodeResults, Packed
from .rows import RowConsumer
from .tiles import (
    COMPUTE_REGISTERS,
    PRODUCER_REGISTERS,
    DecodeBlocks,
    row_tiles,
    trades_registers,
)


@dataclasses.dataclass(frozen=True)
class DecodeKernel:
    """One launch of the decode kernel; calling it is what each warpgroup of a CTA does."""

    plan: DecodePlan

    def __call__(self, gmem: DecodeGmem, *refs):
        if self.plan.skips:
            keys = gmem.kv_lengths[lax.axis_index("batch")]
            pl.when(keys > 0)(functools.partial(self.run, gmem, *refs))
        else:
            self.run(gmem, *refs)

    def run(self, gmem: DecodeGmem, *refs):
        """Reads the keys of this CTA; `refs` are the results and the shared memory."""
        *results, smem, bars = refs
        cta = DecodeCta(
            gmem=gmem,
            out=DecodeResults(*results),
            smem=smem,
            bars=bars,
            k=bars.k,
            v=bars.k if self.plan.shares else bars.v,
            batch=lax.axis_index("batch"),
            head=lax.axis_index("head"),
            tile=lax.axis_index("tile"),
            split=lax.axis_index("split") if self.plan.several else jnp.int32(0),
        )
        wg, parts = lax.axis_index("wg"), self.plan.parts
        if cta.out.counter is not None:
            first = (cta.batch + cta.head + cta.split + wg) == 0
            pl.when(first)(functools.partial(_set, cta.out.counter, jnp.int32(0)))
        consumer = ColumnConsumer if self.plan.blocks.upright else RowConsumer
        producer = DequantizingProducer if self.plan.in_memory else DecodeProducer
        if parts == 1:
            pl.when(wg == 0)(lambda: consumer(self.plan)(cta))
            pl.when(wg == 1)(lambda: producer(self.plan)(cta))
            return
        trades = trades_registers(self.plan.problem)

        @pl.when(wg < parts)
        def _():
            if trades:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            consumer(self.plan)(dataclasses.replace(cta, part=wg))

        @pl.when(wg == parts)
        def _():
            if trades:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            producer(self.plan)(cta)


def _set(counter, value):
    counter[0] = value


def decode(
    problem: DecodeProblem, blocks: DecodeBlocks, operands: DecodeOperands, interpret: bool
) -> Outputs:
    """Launches the decode kernel, and the combine kernel if there are several splits.

    Args:
        problem: a problem for which `tiles.unsupported` returns None.
        blocks: tile sizes and the number of splits.
        operands: arrays as in core.decode; page ids need not be in range.
        interpret: run by the interpreter.

    Returns:
        Outputs: o [B, T, N, Hv] in q's dtype, lse_log2 and shift f32[B, N, T].
    """
    out, _ = _launched(DecodePlan(problem, blocks, interpret), operands, None)
    o_shape = (problem.batch, problem.q_len, problem.q_heads, problem.v_head_dim)
    return out._replace(o=out.o.reshape(o_shape))


def decode_packed(
    problem: DecodeProblem,
    blocks: DecodeBlocks,
    operands: DecodeOperands,
    packed: Packed,
    interpret: bool,
) -> tuple[Outputs, Any]:
    """Launches what `decode` does for the entries of one query among rows of packed q and o.

    The arrays are not gathered and scattered, which takes a launch each, nor are lengths masked.

    Args:
        problem: as in `decode`, with one query and head dims of V up to 256.
        blocks: as in `decode`.
        operands: as in `decode`, with q [rows, N, H].
        packed: where the queries are.
        interpret: run by the interpreter.

    Returns:
        (Outputs with o [tokens, N, Hv], which may hold anything in other rows; int32[1], a 0 in
        device memory that a launch behind this one may count in).
    """
    out, counter = _launched(DecodePlan(problem, blocks, interpret), operands, packed)
    o_shape = (packed.tokens, problem.q_heads, problem.v_head_dim)
    return out._replace(o=out.o.reshape(o_shape)), counter


def _launched(plan: DecodePlan, operands: DecodeOperands, packed: Packed | None):
    """Returns (Outputs in any shape of o, the counter or None) of `decode` or `decode_packed`."""
    parts = launched(plan, operands, packed)
    if plan.several:
        return combine.combine(plan, parts, operands.sinks, packed), parts.counter
    heads = (plan.problem.batch, plan.problem.q_heads, plan.problem.q_len)
    rows = (x.reshape(heads) for x in (parts.lse, parts.shift))
    return Outputs(parts.o, *rows), parts.counter


def launched(
    plan: DecodePlan, operands: DecodeOperands, packed: Packed | None = None
) -> DecodeResults:
    """Launches the decode kernel alone; `packed` as in `decode_packed`."""
    problem, blocks = plan.problem, plan.blocks
    values = operands.v, operands.v_scale
    if operands.v is None:
        values = operands.k, operands.k_scale
    gmem = DecodeGmem(
        q=plan.by_key_head(operands.q, 2 if packed is None else 1),
        k=operands.k,
        v=values[0],
        kv_lengths=operands.kv_lengths,
        q_offset=operands.q_offset,
        page_table=operands.page_table,
        slopes=plan.by_key_head(operands.alibi_slopes, 1),
        sinks=None if plan.several else plan.by_key_head(operands.sinks, 1),
        k_scale=operands.k_scale,
        v_scale=values[1],
        kv_starts=operands.kv_starts,
        window_left=operands.window_left,
        drafts=DraftArrays.of(problem, operands),
        ends=None if packed is None else packed.ends,
    )
    out = plan.result_shapes(None if packed is None else packed.tokens)
    run = launch(
        DecodeKernel(plan),
        out=tuple(out),
        scratch=plan.scratch(gmem.k, gmem.v),
        # Heads before splits: what runs at one time reads all heads of a key, which are neighbours.
        grid={
            "batch": problem.batch,
            "split": blocks.num_splits,
            "head": problem.kv_heads,
            "tile": row_tiles(problem),
        },
        threads=plan.parts + 1,
        name="flash_pallas_decode",
        interpret=plan.interpret,
    )
    return DecodeResults(*run(gmem))
