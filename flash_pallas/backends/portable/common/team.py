"""The warpgroups of a CTA: who copies what, and where they wait for each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu import inline


class Team(NamedTuple):
    """All warpgroups of a CTA, as one of them sees them.

    Attributes:
        interpret: run by the interpreter.
        size: number of warpgroups.
        rank: index of this warpgroup.
        met: an mbarrier at which all of them arrive. The interpreter has no named barriers.
    """

    interpret: bool
    size: int = 1
    rank: Any = 0
    met: Any = None

    def meet(self, bit=None) -> Any:
        """Waits until all warps of all warpgroups have arrived here.

        Args:
            bit: i32, uniform over a warp; only with one warpgroup. If given, the result is 1 if
                some warp arrived with a nonzero bit.
        """
        if bit is not None:
            if self.size > 1:
                raise AssertionError("warps of one warpgroup agree on a bit, no others")
            return inline.barrier_any(inline.FIRST_NAMED_BARRIER, 128, bit, self.interpret)
        if self.size == 1:
            inline.warpgroup_barrier(self.interpret)
        elif self.interpret:
            plgpu.barrier_arrive(self.met)
            plgpu.barrier_wait(self.met)
        else:
            inline.named_barrier("sync", inline.FIRST_NAMED_BARRIER, 128 * self.size)
        return None

    def part(self, count: int):
        """Returns (start, size) of this warpgroup's share of `count` rows or columns."""
        size = count // self.size
        return self.rank * size, size

    def rows(self, tile):
        """Returns (first row, ref) of this warpgroup's share of a tile."""
        if self.size == 1:
            return 0, tile
        first, size = self.part(tile.shape[0])
        return first, tile.at[pl.ds(first, size)]
