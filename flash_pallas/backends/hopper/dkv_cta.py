"""The record of one CTA of the dK/dV kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from ..mosaic.launch import WARPGROUP_ROWS
from .arrays import BackwardArrays
from .dkv_layout import Barriers, Smem
from .memory import Ring
from .query_walk import QueryWalk


@dataclasses.dataclass(frozen=True)
class Cta:
    """Refs, rings and place of one CTA of the dK/dV kernel."""

    gmem: BackwardArrays
    dk: Any  # [B, S8, K, D]
    dv: Any  # [B, S8, K, Dv]
    smem: Smem
    bars: Barriers
    q: Ring
    do: Ring
    p: Ring
    batch: Any
    kv_head: Any
    kv_start: Any
    walk: QueryWalk

    @property
    def keys(self):
        """Index of this CTA's keys in k, v, dk and dv."""
        return self.batch, pl.ds(self.kv_start, WARPGROUP_ROWS), self.kv_head
