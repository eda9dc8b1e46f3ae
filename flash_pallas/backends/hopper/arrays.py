"""The operands of every backward kernel, padded for TMA."""

from __future__ import annotations

from typing import Any, NamedTuple


class BackwardArrays(NamedTuple):
    """Operands in device memory.

    T8 and S8 are the lengths rounded up to 8, D is 64, 128 or 256; what padding adds is 0 except in
    lse_log2, where it is core.softmax.EMPTY_ROW, so that padded queries get P = 0.
    """

    q: Any  # [B, T8, N, D]
    k: Any  # [B, S8, K, D]
    v: Any  # [B, S8, K, D]
    do: Any  # [B, T8, N, D]
    lse_log2: Any  # f32[B, N, T up to a multiple of 128]
    delta: Any  # f32[B, N, T up to a multiple of 128]
    q_offset: Any  # int32[B]; read only where problem.traced_offset
