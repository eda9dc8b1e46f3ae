"""Tiles of P^T and dS^T: between the warpgroups of a CTA, and between the CTAs of a pair.

Warpgroup 0 writes P^T of a tile into a slot of shared memory. Warpgroup 1 reads it and writes dS^T
in its place; a bulk copy takes that to the same place in the other CTA, bytes as they lie. There
are two slots, each with room for the tiles of both CTAs.

    handed over  P^T is there
    full         dS^T of this CTA is there
    arrived      an mbarrier that counts the bytes of the other's, announced in time
    empty        all warpgroups of the pair have read both tiles of dS^T, in both CTAs

No CTA may end before the other has read the last tiles: `drain`.

The interpreter cannot reach the shared memory of a neighbour. Under it the tiles pass through
device memory: warpgroup 1 copies the other's when both have written, and only then says `full`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....gpu.ptx import cluster, inline, tile_copies
from ...common import pipeline
from .tiles import SLOTS


def stand_in(*places: int, dtype) -> jax.ShapeDtypeStruct:
    """Returns the array in device memory through which tiles pass under the interpreter."""
    return jax.ShapeDtypeStruct((*places, *tile_copies.TILE), dtype)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange, as one warpgroup sees it; tiles are counted in n, from 0.

    Attributes:
        ds: [2, 2, 64, 64] in shared memory, by slot and rank.
        arrived, handed_over, full, empty: see above, by slot.
        written: barriers of the cluster: both have written; interpreted.
        stand_in: [2, 2, 64, 64] of this pair in device memory, as `ds`; interpreted.
        rank: of this CTA.
        swizzle: of `ds`, in bytes.
        interpret: run by the interpreter.
    """

    ds: Any
    arrived: Any
    handed_over: Any
    full: Any
    empty: Any
    written: Any
    stand_in: Any
    rank: Any
    swizzle: int
    interpret: bool

    def slot(self, n):
        """Returns the slot of the n-th tile; n may be -1 or -2."""
        return lax.rem(jnp.int32(n + SLOTS), jnp.int32(SLOTS))

    # --- warpgroup 0 -----------------------------------------------------------------------------

    def hand_over(self, n, p):
        """Writes P^T, in 16 bits in the layout WGMMA, once all have read what was in the slot.

        All have come to `enter` before the first tile, and have read what was in the slot of the
        second in the first step.
        """
        slot = self.slot(n)
        plgpu.barrier_wait(self.empty.at[slot])
        self.ds[slot, self.rank] = p
        plgpu.barrier_arrive(self.handed_over.at[slot])

    def drain(self, total):
        """Waits until all have read the last tiles."""
        for n in (total - 2, total - 1):
            plgpu.barrier_wait(self.empty.at[self.slot(n)])

    # --- warpgroup 1 -----------------------------------------------------------------------------

    def open(self):
        """Initializes the mbarriers, and announces the first tiles of the other CTA; enters."""
        if not self.interpret:
            for slot in range(SLOTS):
                cluster.init_barrier(self.arrived.at[slot])
        for n in range(SLOTS):
            self._announce(n)
        self.enter()

    def probabilities(self, n):
        """Waits for P^T of the n-th tile, and loads it in the layout WGMMA."""
        slot = self.slot(n)
        plgpu.barrier_wait(self.handed_over.at[slot])
        return plgpu.load(self.ds.at[slot, self.rank], layout=inline.WGMMA)

    def send(self, n, ds):
        """Writes dS^T, in 16 bits in the layout WGMMA, in place of P^T, and sends it."""
        slot = self.slot(n)
        own = self.ds.at[slot, self.rank]
        inline.warpgroup_barrier(self.interpret)  # every warp has read P^T
        own[...] = ds
        plgpu.commit_smem()
        if self.interpret:
            self.stand_in[slot, self.rank] = ds
            pipeline.cluster_arrive(self.written.at[slot], self.interpret)
            return
        plgpu.barrier_arrive(self.full.at[slot])
        tile_copies.send(own, self.arrived.at[slot], 1 - self.rank, self.swizzle)

    def receive(self, n):
        """Waits for both n-th tiles, and announces the next one that comes into the slot."""
        slot = self.slot(n)
        if self.interpret:
            plgpu.barrier_wait(self.written.at[slot])
            other = 1 - self.rank
            self.ds[slot, other] = self.stand_in[slot, other]
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.full.at[slot])
        self.wait(n)
        self._announce(n)

    def _announce(self, n):
        if not self.interpret:
            cluster.announce(self.arrived.at[self.slot(n)], tile_copies.TILE_BYTES)

    # --- both ------------------------------------------------------------------------------------

    def enter(self):
        """Signals that this warpgroup runs: nothing is sent to a CTA before its mbarriers exist."""
        self.release(-SLOTS)

    def wait(self, n):
        """Waits for both n-th tiles."""
        slot = self.slot(n)
        plgpu.barrier_wait(self.full.at[slot])
        if not self.interpret:
            parity = lax.rem(lax.div(jnp.int32(n), jnp.int32(SLOTS)), jnp.int32(2))
            cluster.await_bytes(self.arrived.at[slot], parity)

    def release(self, n):
        """Signals that this warpgroup has read both n-th tiles."""
        pipeline.cluster_arrive(self.empty.at[self.slot(n)], self.interpret)
