"""Clusters of CTAs that load together what all of them read.

The CTAs of a cluster go through the same number of steps. Each has a ring (pipeline.py) in its own
shared memory, and some of the tiles in a slot are the same for all. Every producer reads a part of
such a tile and multicasts it: TMA writes it into the same slot of every CTA and counts its bytes in
the full barrier of each. That changes two things about the ring, and nothing else:

    full    belongs to one CTA. Its producer announces all bytes of a tile, whoever sends them, so a
            consumer waits as ever. Bytes of a neighbour may come before they are announced: the
            phase cannot end, as the producer's own arrival is still missing.
    empty   is a promise to all producers, since all of them write here. A consumer that has read a
            slot arrives at the empty barrier of every CTA, and each counts the warpgroups of the
            cluster. A producer that has waited for its own may overwrite the slot everywhere.

At a barrier of the cluster, one thread of the warpgroup arrives for each CTA; at an ordinary one,
all 128 threads do. So the warps of a warpgroup meet before it: otherwise a warp that is ahead would
give away rows that another one still reads.

A CTA may not end while others write to it or arrive at its barriers. They no longer do once it has
seen the last release of each slot, which is what `Ring.drain` waits for.

The interpreter makes the arrivals and finds races of the ring, but it ignores `collective_axes`:
every CTA loads all parts. Multicast runs on a GPU alone (tests/hopper_cases.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu import inline
from .pipeline import Ring

AXIS = "neighbour"


def axes(size: int) -> dict[str, int]:
    """Returns the cluster axes of a launch with clusters of that many CTAs, with their sizes."""
    return {AXIS: size} if size > 1 else {}


def rank(size: int):
    """Returns the rank of this CTA in its cluster."""
    return lax.axis_index(AXIS) if size > 1 else jnp.int32(0)


def multicast(size: int) -> str | None:
    """Returns `collective_axes` of a copy that the CTAs of a cluster make together."""
    return AXIS if size > 1 else None


def empty_barrier(size: int, warpgroups: int, slots: int):
    """Makes the empty barriers of a ring that `warpgroups` warpgroups of each CTA read."""
    if size == 1:
        return plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots)
    return plgpu.ClusterBarrier(
        collective_axes=(AXIS,), num_arrivals=warpgroups, num_barriers=slots
    )


def arrive(barrier, interpret: bool):
    """Arrives once at a barrier of the cluster, when every warp of this warpgroup has come here."""
    inline.warpgroup_barrier(interpret)
    plgpu.barrier_arrive(barrier)


def release(size: int, ring: Ring, n, interpret: bool):
    """Releases the n-th fill of a ring for this warpgroup, a consumer that has read it."""
    if size > 1:
        inline.warpgroup_barrier(interpret)
    ring.release(n)
