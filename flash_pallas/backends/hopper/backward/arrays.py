"""The operands of every backward kernel, padded for TMA."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ....core import bounds, padding
from ....core.integers import round_up
from ....core.padding import pad_axis
from ....core.problem import Cotangents, Operands, Problem
from ....core.softmax import EMPTY_ROW
from ...gpu.auxiliary_arrays import AuxiliaryGmem, with_shift
from ..common.auxiliary_inputs import AuxiliaryInputs
from ..common.wgmma import Matmuls
from ..common.zero_padding import Padding

ROW_MULTIPLE = 128  # of lse and delta: the widest query tile


class BackwardArrays(NamedTuple):
    """Operands of a backward kernel in device memory.

    T8 and S8 are the sequence lengths rounded up to a multiple of 8. D and Dv are the head dims
    that a kernel runs or, where TMA fills its tiles up with zeros, those of the call. Padding is 0
    except in lse_log2, where it is core.softmax.EMPTY_ROW, so that padded queries get P = 0. q, k,
    v and do have the operand form of common/wgmma.py, and so have the gradients of q, k and v.
    """

    q: Any  # [B, T8, N, D]
    k: Any  # [B, S8, K, D]
    v: Any  # [B, S8, K, Dv]
    do: Any  # [B, T8, N, Dv]
    lse_log2: Any  # f32[B, N, T up to a multiple of 128]
    delta: Any  # f32[B, N, T up to a multiple of 128]
    q_offset: Any = None  # int32[B], where problem.traced_offset
    bounds: Any = None  # int32[B, own blocks, 2], where arrays decide which blocks a CTA reads
    whole: Any = None  # int32[B, own blocks, 2], bounds.q_whole; None without segment ids
    side: AuxiliaryGmem = AuxiliaryGmem()  # what modifiers read
    q_padding: Padding | None = None  # that is to be cleared; for kernels that can
    kv_padding: Padding | None = None
    shift: Any = None  # f32[B, N, as delta], of lse_log2; None where it is 0
    # int32[3]: first batch entry and key head of a launch, fused_call.NO_PROGRESSION; None: 0, 0.
    origin: Any = None

    @classmethod
    def of(
        cls, problem: Problem, operands: Operands, cotangents: Cotangents, summed_rows: Any
    ) -> BackwardArrays:
        """Makes the arrays for the head dims of `problem`; copies only what is padded or split.

        `summed_rows`: of all tiles of Q and K, and of V and dO, as Products.operand takes them.
        """
        tile = Matmuls(problem.dtype).operand
        of_qk, of_v = summed_rows
        rows = round_up(problem.q_len, ROW_MULTIPLE)
        return cls(
            q=tile(operands.q, problem.head_dim, *of_qk),
            k=tile(operands.k, problem.head_dim, *of_qk),
            v=tile(operands.v, problem.v_head_dim, *of_v),
            do=tile(cotangents.do, problem.v_head_dim, *of_v),
            lse_log2=pad_axis(cotangents.lse_log2, 2, rows, EMPTY_ROW),
            delta=pad_axis(cotangents.delta, 2, rows),
            q_offset=operands.q_offset,
            shift=None if cotangents.shift is None else pad_axis(cotangents.shift, 2, rows),
        )

    def side_of(self, problem: Problem, operands: Operands, q_axis: int) -> AuxiliaryGmem:
        """Returns what modifiers read, with the shift of each row and the groups that have one."""
        side = AuxiliaryInputs(problem, q_axis).arrays(operands)
        return with_shift(side, self.shift, problem.kv_heads)

    def for_rows(self, problem: Problem, operands: Operands, q_axis: int, tile) -> BackwardArrays:
        """Adds what a kernel reads whose rows are queries (q_axis 0) or keys (1).

        Args:
            problem: what is computed.
            operands: operands as the backend got them.
            q_axis: axis of the kernel's tiles that runs over queries.
            tile: (queries, keys) of one step of a CTA.
        """
        find = bounds.q_bounds if q_axis else bounds.kv_bounds
        has_segments = q_axis == 1 and "kv_segments" in problem.features
        return self._replace(
            whole=bounds.q_whole(operands, *tile) if has_segments else None,
            bounds=find(problem, operands, *tile) if bounds.is_dynamic(problem) else None,
            side=self.side_of(problem, operands, q_axis),
        )

    def with_padding(self, operands: Operands, block_q: int, block_kv: int) -> BackwardArrays:
        """Adds the padding of Q and KV tiles of these sizes, for a kernel that clears it itself."""
        return self._replace(
            q_padding=Padding.of(padding.valid_queries(operands), block_q),
            kv_padding=Padding.of(padding.valid_keys(operands), block_kv),
        )

    def scaled(self, factor: float) -> BackwardArrays:
        """Rescales the LSE so that kernels make factor * P of it, and delta to go with such a P."""
        lse_log2 = self.lse_log2 - math.log2(factor)
        return self._replace(lse_log2=lse_log2, delta=self.delta / factor)

    def offset(self, problem: Problem, batch):
        """Returns the position of query 0 of a batch entry."""
        return self.q_offset[batch] if problem.traced_offset else problem.spec.q_offset

    def kv_len(self, problem: Problem, batch, block_kv: int):
        """Returns the number of keys of a batch entry; None where all key blocks are whole."""
        if self.side.kv_lengths is not None:
            return self.side.kv_lengths[batch]
        return problem.kv_len if problem.kv_len % block_kv else None
