"""What is computed, on what, and what comes back: the records every backend reads."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .mask import Mask


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is computed, apart from the arrays.

    Attributes:
        scale: multiplies q @ k^T.
        mask: the static part of the mask, in positions.
        q_offset: position of query 0 relative to key 0, where it is known at trace time.
        deterministic: the gradients must be bit-identical from run to run.
    """

    scale: float
    mask: Mask = Mask()
    q_offset: int = 0
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """The one description of a shape: supported?, which blocks?, how many FLOPs?

    Sizes in jax.nn's letters: q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv].
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype
    spec: AttentionSpec
    traced_offset: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key head (1 for multi-head attention)."""
        return self.q_heads // self.kv_heads


class Operands(NamedTuple):
    """The arrays of one call, batch dimensions folded into one."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    q_offset: Any = None  # int32[B], or None where spec.q_offset says it


class Grads(NamedTuple):
    """Cotangents of q, k, v in their dtypes."""

    q: Any
    k: Any
    v: Any


def describe(operands: Operands, spec: AttentionSpec) -> Problem:
    """The Problem of these operands."""
    batch, q_len, q_heads, head_dim = operands.q.shape
    _, kv_len, kv_heads, v_head_dim = operands.v.shape
    return Problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=np.dtype(operands.q.dtype),
        spec=spec,
        traced_offset=operands.q_offset is not None,
    )
