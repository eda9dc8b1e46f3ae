"""Arrays in device memory that the backward kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ....core.padding import pad_axis
from ....core.problem import Cotangents, Operands, Problem
from ....core.softmax import EMPTY_ROW
from ...gpu import auxiliary_arrays
from ...gpu.auxiliary_arrays import AuxiliaryGmem, within_reach
from ..common.auxiliary_inputs import AuxiliaryInputs

LSE, DELTA = range(2)  # of BackwardArrays.rows


class BackwardArrays(NamedTuple):
    """Arrays in device memory that a backward kernel reads.

    R is T padded so that no tile reaches past it. The LSE of padded rows is EMPTY_ROW, so that
    their P is 0.
    """

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    do: Any  # [B, T, N, Hv]
    lse: Any  # f32[B, N, R], base 2
    delta: Any  # f32[B, N, R]: sum of O dO
    q_offset: Any = None  # int32[B], where problem.traced_offset
    q_lengths: Any = None  # int32[B]
    bounds: Any = None  # int32[B, own blocks, 2], where arrays decide what a block reads
    side: AuxiliaryGmem = AuxiliaryGmem()
    shift: Any = None  # f32[B, N, R], of the log-sum-exp; None where it is 0
    rows: Any = None  # f32[B, N, 2, R]: LSE and DELTA, in the fused kernel in place of both

    @classmethod
    def of(cls, operands: Operands, cotangents: Cotangents) -> BackwardArrays:
        """Returns the arrays without `bounds` and `side`, of which each kernel has its own."""
        rows = within_reach(operands.q.shape[1])
        return cls(
            q=operands.q,
            k=operands.k,
            v=operands.v,
            do=cotangents.do,
            lse=pad_axis(cotangents.lse_log2, 2, rows, EMPTY_ROW),
            delta=pad_axis(cotangents.delta, 2, rows),
            q_offset=operands.q_offset,
            q_lengths=operands.q_lengths,
            shift=None if cotangents.shift is None else pad_axis(cotangents.shift, 2, rows),
        )

    def with_side(self, inputs: AuxiliaryInputs, operands: Operands) -> BackwardArrays:
        """Returns the arrays with `side`: what a kernel reads besides them, and `shift`."""
        kv_heads = inputs.problem.kv_heads
        side = auxiliary_arrays.with_shift(inputs.arrays(operands), self.shift, kv_heads)
        return self._replace(side=side, shift=None)

    def stacked(self) -> BackwardArrays:
        """Returns the arrays with LSE and delta stacked in `rows`; each warpgroup copies one."""
        rows = jnp.stack([self.lse, self.delta], axis=2)
        return self._replace(lse=None, delta=None, rows=rows)

    def offset(self, problem: Problem, batch):
        """Returns the position of query 0 of a batch entry."""
        return problem.spec.q_offset if self.q_offset is None else self.q_offset[batch]

    def q_length(self, problem: Problem, batch):
        """Returns the number of queries of a batch entry."""
        return problem.q_len if self.q_lengths is None else self.q_lengths[batch]

    def kv_length(self, problem: Problem, batch):
        """Returns the number of keys of a batch entry."""
        return problem.kv_len if self.side.kv_lengths is None else self.side.kv_lengths[batch]
