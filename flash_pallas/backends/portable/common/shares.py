"""Head dims above 256: two warpgroups have half of the columns of Q, K, V, O and gradients each.

64 rows of O of 512 columns are 256 registers of 128 threads, and 128 of 256 threads. So a warpgroup
multiplies and accumulates its own columns, and nothing of the other half. Scores are sums over all
head dims: each warpgroup computes the part of its own, shared memory takes the parts to the other
one, and both go on with the same sum, bit for bit. Softmax, masks and modifiers are computed twice,
which is little next to matmuls of so many columns, and P and dS are in registers where they are
wanted. A tile of scores of 64 x 32 takes 16 KB each way; K and V of 512 columns take 64 KB.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.ptx import split_sums
from .mma import Matmuls
from .smem_tiles import Warpgroups


class ScoreParts(NamedTuple):
    """Shared memory that scores are summed through."""

    parts: Any  # f32[2, rows, columns]: of each warpgroup, in an order of its threads
    barrier: Any = None  # see Warpgroups


def score_parts(rows: int, columns: int, interpret: bool) -> ScoreParts:
    """Returns the shared memory to allocate for scores of two warpgroups."""
    barrier = plgpu.Barrier(num_arrivals=2) if interpret else None
    return ScoreParts(plgpu.SMEM((2, rows, columns), jnp.float32), barrier)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Columns of tiles that a warpgroup of a CTA has: all, or half if there are two.

    Attributes:
        interpret: run by the interpreter.
        warpgroups: those of the CTA.
        scores: shared memory of two warpgroups; None for one.
    """

    interpret: bool
    warpgroups: Warpgroups
    scores: ScoreParts | None

    def columns(self, width: int) -> tuple[Any, int]:
        """Returns (first column, number of columns) of this warpgroup's share of a width."""
        return self.warpgroups.part(width)

    def once(self, run):
        """Calls run(), which writes what both warpgroups have, in one of them."""
        if self.scores is None:
            run()
        else:
            pl.when(self.warpgroups.rank == 0)(run)

    def read(self):
        """Waits until all warps have read the tiles of the last product."""
        if self.scores is None:  # else `product` has waited
            self.warpgroups.sync()

    def product(self, zeros, a, b, width: int):
        """Computes a @ b^T over all of `width` columns, f32; see Matmuls.add.

        Of two warpgroups each computes its part, and a barrier of both comes before the sum.
        Another barrier must come before the next product, which writes where this one is read.

        Args:
            zeros: f32[rows, columns], a zero accumulator.
            a: [rows, width and more] in shared memory.
            b: [columns, width and more] in shared memory.
            width: number of columns that are summed over.
        """
        first, count = self.columns(width)
        add = functools.partial(Matmuls(self.interpret).add, zeros, a, b, transposed=True)
        if self.scores is None:
            return add(summed=width)
        part, parts, rank = add(summed=count, column=first), self.scores.parts, self.warpgroups.rank
        if self.interpret:
            parts[rank] = part
            self.warpgroups.sync()
            return part + parts[1 - rank]
        split_sums.put(part, parts.at[rank])
        self.warpgroups.sync()
        return split_sums.added(part, parts.at[1 - rank])
