"""Key blocks that a query-stationary CTA of the backward reads, and which of them it masks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...core import integers as ints
from ...core.problem import Problem
from .arrays import BackwardArrays


class KeyWalk(NamedTuple):
    """Range of key blocks, start to stop, at least one; all are masked from `masked_from` on."""

    start: Any
    masked_from: Any
    stop: Any  # beyond start, or else one block is read nevertheless
    kv_len: Any  # how many keys there are, or None where that hides none
    everywhere: bool  # `mask_everywhere` of the problem

    @classmethod
    def of(cls, problem: Problem, arrays: BackwardArrays, at, rows: int, block_kv: int) -> KeyWalk:
        """Makes the walk of a CTA's queries.

        It is the same for all its warpgroups: they release blocks together.

        Args:
            problem: what is computed.
            arrays: operands in device memory.
            at: (batch entry, query block, position of its first query).
            rows: number of queries in a block.
            block_kv: number of keys in a block.
        """
        batch, block, position = at
        mask = problem.spec.mask
        found = mask.kv_blocks(position, rows, problem.kv_len, block_kv)
        start, full_stop, stop = found.start, found.full_stop, found.stop
        if arrays.bounds is not None:
            start, stop = arrays.bounds[batch, block, 0], arrays.bounds[batch, block, 1]
        elif mask.left is not None:
            start = ints.minimum(start, -(-problem.kv_len // block_kv) - 1)
        if not mask_everywhere(problem):
            stop = ints.maximum(stop, start + 1)
        if arrays.side.kv_lengths is not None:
            whole = ints.floor_div(arrays.side.kv_lengths[batch], block_kv)
            full_stop = ints.minimum(full_stop, whole)
        everywhere, kv_len = mask_everywhere(problem), arrays.kv_len(problem, batch, block_kv)
        if everywhere:
            full_stop = start
        elif arrays.bounds is not None:
            full_stop = ints.clip(full_stop, start, stop)
        return cls(start, full_stop, stop, kv_len, everywhere)

    @property
    def total(self):
        """Number of blocks."""
        # In these words LLVM sees that the loop over them runs. Where it might not, ptxas ends dQ
        # before every step, lest its registers be needed after the loop (C7517).
        if self.everywhere:
            return jnp.int32(ints.maximum(self.stop - self.start, 1))
        return jnp.int32(self.stop - self.start)

    def __getitem__(self, n):
        """Returns the n-th block."""
        return self.start + n

    def visit(self, step, *, masks: bool, far=None, far_step: Any = None):
        """Calls step(n, masked=) for every block; without `masks` none is masked.

        The masked ones are a loop of their own. `far` and `far_step` are as in QueryWalk.visit.
        """
        if far is None:
            self._visit(step, masks, lambda end, start: end)
            return
        self._visit(step, masks, lambda end, start: lax.select(far > 0, start, end))
        ends = jnp.int32(0), lax.select(far > 0, self.total, jnp.int32(0))
        pl.loop(*ends)(functools.partial(far_step, masked=masks))

    def _visit(self, step, masks: bool, until):
        """Runs the loops; each ends at until(end, start)."""
        masked = functools.partial(step, masked=True)
        if self.everywhere:
            pl.loop(jnp.int32(0), until(self.total, jnp.int32(0)))(masked)
            return
        unmasked = jnp.int32(self.masked_from - self.start)
        pl.loop(jnp.int32(0), until(unmasked, jnp.int32(0)))(functools.partial(step, masked=False))
        if masks:
            # With known bounds a single masked block is peeled off, and its registers beside those
            # of the loop make ptxas serialise every wgmma (C7512, head dim 128).
            total = until(lax.optimization_barrier(self.total), unmasked)
            pl.loop(unmasked, total)(masked)


def mask_everywhere(problem: Problem) -> bool:
    """Says whether any tile may need its mask: a window with a left edge, or segments."""
    return problem.spec.mask.left is not None or "kv_segments" in problem.features
