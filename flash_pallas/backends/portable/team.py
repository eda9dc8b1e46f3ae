"""The warpgroups of a block: who copies what, and where they wait for each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import inline


class Team(NamedTuple):
    """All warpgroups of a block, as one of them sees them.

    Attributes:
        interpret: run by the interpreter.
        size: how many there are.
        rank: which of them this is.
        met: an mbarrier that all of them arrive at. The interpreter has no named barriers.
    """

    interpret: bool
    size: int = 1
    rank: Any = 0
    met: Any = None

    def meet(self, bit=None) -> Any:
        """All warps of all of them have come here.

        Args:
            bit: i32, uniform over a warp; where given, 1 if some warp came with one that is not 0.
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
        """(start, size) of this one's share of so many rows or columns."""
        size = count // self.size
        return self.rank * size, size

    def rows(self, tile):
        """(first row, rows) of this one's share of a tile, and that as a ref."""
        if self.size == 1:
            return 0, tile
        first, size = self.part(tile.shape[0])
        return first, tile.at[pl.ds(first, size)]
