"""How the weights of a block of keys reach the warps that add them, times V, to O.

Shared memory is what a step of a wide head reads most of: every warp loads its own operands. A warp
that has 16 rows of weights in registers and adds all columns of O to them reads all of V. Through
shared memory any warp can have any rows: with 64 rows and 256 columns one has all rows and a
quarter of the columns, and reads 16 KB for a product of 64 keys where it were 32 (grid.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import shared_rows
from .grid import Grid
from .kernel import Kernel
from .key_stream import KeyStream
from .online import Online, Rows, Weighed, per_row
from .tiles import buffer


@dataclasses.dataclass(frozen=True)
class OwnRows(Kernel):
    """Weights stay in registers: the warp of a row's scores has all of its columns of O."""

    interpret: bool

    def zeros(self, rows: int, columns: int):
        """O before the first block."""
        return self.products.zeros(rows, columns)

    def fold(self, stream: KeyStream, n, rows: Rows, weigh: Callable[[Rows], Weighed]) -> Rows:
        """Add a block of keys, whose scores are known.

        Args:
            stream: of the tiles of V.
            n: number of the step.
            rows: so far.
            weigh: what makes weights of the scores.
        """
        stream.second(n)
        found = weigh(rows)
        rows = Online.rescaled(rows, found)
        return rows._replace(o=self.products.add(rows.o, found.p, stream.slot("v", n)))

    def put(self, o, inverse, tile):
        """Write O times one number of each row to shared memory, in 16 bits."""
        self.copies.put(o * per_row(inverse, o.shape), tile)


class Exchange(NamedTuple):
    """Shared memory that weights pass through."""

    weights: Any  # [rows, columns]
    factors: Any  # f32[rows], of O

    @classmethod
    def scratch(cls, rows: int, columns: int, dtype) -> Exchange:
        """What is asked for."""
        return cls(buffer((rows, columns), dtype), plgpu.SMEM((rows,), jnp.float32))


@dataclasses.dataclass(frozen=True)
class SharedWeights(Kernel):
    """Weights go through shared memory, and parts of O are as square as they can be.

    Attributes:
        exchange: where.
        grid: of the warps that have O.
        interpret: run by the interpreter.
    """

    exchange: Exchange
    grid: Grid
    interpret: bool

    def zeros(self, rows: int, columns: int):
        """See OwnRows."""
        return self.products.zeros(rows, columns, self.grid)

    def fold(self, stream: KeyStream, n, rows: Rows, weigh: Callable[[Rows], Weighed]) -> Rows:
        """See OwnRows.

        All warps meet when V has arrived, and with the same barrier tell each other whether a
        maximum grew; the weights are there by then. They are overwritten after the next meeting.
        """
        found, exchange = weigh(rows), self.exchange
        alpha = found.alpha()
        self.copies.put(found.p, exchange.weights)
        shared_rows.put(alpha, exchange.factors, self.interpret)
        grew = stream.second(n, found.grew)

        def rescaled():
            return self._scaled(rows.o)

        o = lax.cond(grew > 0, rescaled, lambda: rows.o)
        v = stream.slot("v", n)
        o = self.products.add_part(o, exchange.weights, v, 0, self.grid)
        return Rows(o, found.maxima, rows.l * alpha + found.sums)

    def put(self, o, inverse, tile):
        """See OwnRows."""
        shared_rows.put(inverse, self.exchange.factors, self.interpret)
        self.copies.meet()
        self.copies.put(self._scaled(o), tile, 0, self.grid)

    def _scaled(self, o):
        """O times the factors."""
        get = shared_rows.get(self.exchange.factors, o.shape[0], self.grid, self.interpret)
        return o * per_row(get, o.shape)
