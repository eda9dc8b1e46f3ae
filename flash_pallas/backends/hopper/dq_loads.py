"""The record of one CTA of the dQ kernel, and its copies from device into shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.problem import Problem
from ..mosaic.launch import WARPGROUP_ROWS
from .arrays import BackwardArrays
from .dq_layout import Barriers, Smem
from .key_walk import KeyWalk
from .memory import Ring, rows_of
from .side_inputs import Place, SideInputs
from .split_blocks import DqBlocks


@dataclasses.dataclass(frozen=True)
class Cta:
    """Refs, rings and place of one CTA, as one of its warpgroups sees them."""

    gmem: BackwardArrays
    dq: Any  # [B, T8, N, D]
    smem: Smem
    bars: Barriers
    k: Ring
    v: Ring
    batch: Any
    head: Any
    q_start: Any  # index of the first query
    position: Any  # its position: q_start + q_offset
    block: Any  # of queries
    wg: Any

    def place(self, column_start, columns: int, *, own: bool, rows: int) -> Place:
        """Returns the place of a tile of this CTA or, if `own`, of this warpgroup."""
        row_start = self.q_start + self.wg * WARPGROUP_ROWS if own else self.q_start
        return Place(self.batch, self.head, row_start, column_start, rows, columns)


@dataclasses.dataclass(frozen=True)
class Loads:
    """Loads of one CTA: Q, dO, lse and delta once, K and V through two rings."""

    problem: Problem
    blocks: DqBlocks

    @property
    def side(self) -> SideInputs:
        """Side inputs, which modifiers read."""
        return SideInputs(self.problem, q_axis=0)

    def walk(self, cta: Cta) -> KeyWalk:
        """Returns the walk over the key blocks of this CTA."""
        at, size = (cta.batch, cta.block, cta.position), (self.blocks.block_q, self.blocks.block_kv)
        return KeyWalk.of(self.problem, cta.gmem, at, *size)

    def __call__(self, cta: Cta):
        """Runs the producer: loads Q, dO, lse and delta once, then every block of K and V."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")
        self.load_queries(cta)
        walk = self.walk(cta)

        @pl.loop(jnp.int32(0), walk.total)
        def _(n):
            self.load_k(cta, walk, n)
            self.load_v(cta, walk, n)

        self.drain(cta)

    def feed(self, cta: Cta) -> Cta:
        """Loads what the walk starts with, in the last warpgroup, where there is no producer.

        Returns the CTA with rings that this warpgroup fills again where it releases them.
        """
        walk, loads = self.walk(cta), self.is_loader(cta)
        rings = (cta.k, self.load_k), (cta.v, self.load_v)
        fill = lambda load, n: pl.when(n < walk.total)(lambda: load(cta, walk, n))

        @pl.when(loads)
        def _():
            self.load_queries(cta)
            for n in range(max(ring.slots for ring, _ in rings)):
                for ring, load in rings:
                    if n < ring.slots:
                        fill(load, jnp.int32(n))

        def refilled(ring: Ring, load):
            return ring._replace(refill=lambda n: pl.when(loads)(lambda: fill(load, n)))

        k, v = (refilled(*ring) for ring in rings)
        return dataclasses.replace(cta, k=k, v=v)

    def load_queries(self, cta: Cta):
        """Loads Q, dO, lse and delta."""
        queries = pl.ds(cta.q_start, self.blocks.block_q)
        tile, row = (cta.batch, queries, cta.head), (cta.batch, cta.head, queries)
        arrived = cta.bars.queries
        gmem, smem = cta.gmem, cta.smem
        plgpu.copy_gmem_to_smem(rows_of(gmem.q, tile, smem.q), smem.q, arrived)
        plgpu.copy_gmem_to_smem(rows_of(gmem.do, tile, smem.do), smem.do, arrived)
        plgpu.copy_gmem_to_smem(gmem.lse_log2.at[row], smem.lse, arrived)
        plgpu.copy_gmem_to_smem(gmem.delta.at[row], smem.delta, arrived)

    def keys(self, cta: Cta, walk: KeyWalk, n):
        """Returns the index of the n-th block in k and v."""
        block_kv = self.blocks.block_kv
        kv_head = lax.div(cta.head, jnp.int32(self.problem.group))
        return cta.batch, pl.ds(walk[n] * block_kv, block_kv), kv_head

    def load_k(self, cta: Cta, walk: KeyWalk, n):
        """Loads K of the n-th block and its streamed side inputs."""
        gmem, smem, keys = cta.gmem, cta.smem, self.keys(cta, walk, n)
        self.load(cta.k, n, rows_of(gmem.k, keys, smem.k), smem.k)
        if self.side.copies:
            slot, rows = cta.k.slot(n), self.blocks.block_q
            place = cta.place(keys[1].start, self.blocks.block_kv, own=False, rows=rows)
            self.side.load(gmem.side, smem.side, slot, cta.k.full.at[slot], place)

    def load_v(self, cta: Cta, walk: KeyWalk, n):
        """Loads V of the n-th block."""
        source = rows_of(cta.gmem.v, self.keys(cta, walk, n), cta.smem.v)
        self.load(cta.v, n, source, cta.smem.v)

    def load(self, ring: Ring, n, source, buffer):
        """Issues the copy of the n-th fill of a ring, once its slot is empty."""
        slot = ring.slot(n)
        ring.wait_empty(n)
        plgpu.copy_gmem_to_smem(source, buffer.at[slot], ring.full.at[slot])

    def is_loader(self, cta: Cta):
        """Says whether this is the warpgroup that loads where there is no producer."""
        return cta.wg == self.blocks.warpgroups - 1

    def drain(self, cta: Cta):
        """Observes the releases that no later fill waited for."""
        total = self.walk(cta).total
        cta.k.drain(total)
        cta.v.drain(total)
