"""Clusters of CTAs that load together what all of them read.

The CTAs of a cluster go through the same number of steps. Each has a ring (memory.py) in its own
shared memory, and some of the tiles in a slot are the same for all. Of such a tile every producer
reads a part and multicasts it: TMA writes it into the same slot of every CTA and counts its bytes
in the full barrier of each. That changes two things about the ring, and nothing else:

    full    belongs to one CTA. Its producer announces all bytes of a tile, whoever sends them, so a
            consumer waits as ever. Bytes of a neighbour may come before they are announced: the
            phase cannot end, as the producer's own arrival is still missing.
    empty   is a promise to all producers, since all of them write here. A consumer that has read a
            slot arrives at the empty barrier of every CTA, and each counts the warpgroups of the
            cluster. A producer that has waited for its own may overwrite the slot everywhere.

An arrival at a barrier of the cluster is made by one thread of the warpgroup for each CTA, where at
an ordinary barrier all 128 threads arrive. So the warps of a warpgroup meet before it: otherwise a
warp that is ahead would give away rows that another one still reads.

A CTA may not end while others write to it or arrive at its barriers. They do not, once it has seen
the last release of each slot, which is what `Ring.drain` waits for.

The interpreter makes the arrivals and finds races of the ring, but it ignores `collective_axes`:
every CTA loads all parts. Multicast runs on a GPU alone (tests/hopper_cases.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import inline
from .memory import Ring

AXIS = "neighbour"


def axes(size: int) -> dict[str, int]:
    """Of a launch with clusters of that many CTAs."""
    return {AXIS: size} if size > 1 else {}


def rank(size: int):
    """Which CTA of its cluster this is."""
    return lax.axis_index(AXIS) if size > 1 else jnp.int32(0)


def multicast(size: int) -> str | None:
    """`collective_axes` of a copy that the CTAs of a cluster make together."""
    return AXIS if size > 1 else None


def empty_barrier(size: int, warpgroups: int, slots: int):
    """Of a ring that `warpgroups` of each CTA read."""
    if size == 1:
        return plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots)
    return plgpu.ClusterBarrier(
        collective_axes=(AXIS,), num_arrivals=warpgroups, num_barriers=slots
    )


def arrive(barrier, interpret: bool):
    """Every warp of this warpgroup has come here; for one arrival at a barrier of the cluster."""
    inline.warpgroup_barrier(interpret)
    plgpu.barrier_arrive(barrier)


def release(size: int, ring: Ring, n, interpret: bool):
    """Consumer: this warpgroup has read the n-th fill."""
    if size > 1:
        inline.warpgroup_barrier(interpret)
    ring.release(n)
