"""Which query tiles a key-stationary CTA reads, in which order, and which of them it masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...core import integers as ints
from ...core.problem import Problem


@dataclasses.dataclass(frozen=True)
class QueryWalk:
    """The query tiles that one CTA of a key-stationary kernel reads, for every head of a group.

    Attributes:
        start, full_start, stop: query blocks; those before full_start need the mask.
        q_offset: position of query 0.
        group: query heads that read these keys, one after the other.
    """

    start: Any
    full_start: Any
    stop: int
    q_offset: Any
    group: int

    @classmethod
    def of(
        cls, problem: Problem, q_offset, batch, kv_start, kv_rows: int, block_q: int
    ) -> QueryWalk:
        """Of the CTA whose keys are [kv_start, kv_start + kv_rows). At least one tile per head."""
        offset = q_offset[batch] if problem.traced_offset else problem.spec.q_offset
        whole = ints.round_up(problem.q_len, block_q)  # rows past the end have P = 0: no mask
        found = problem.spec.mask.q_blocks(kv_start - offset, kv_rows, whole, block_q)
        stop = whole // block_q
        start = ints.minimum(found.start, stop - 1)
        full_start = ints.maximum(found.full_start, start)
        if problem.kv_len % kv_rows:  # the last keys lie past the end: mask every tile
            ragged = kv_start + kv_rows > problem.kv_len
            full_start = lax.select(ragged, jnp.int32(stop), jnp.int32(full_start))
        return cls(start, full_start, stop, offset, problem.group)

    @property
    def per_head(self):
        """Tiles of one head."""
        return self.stop - self.start

    @property
    def total(self):
        """Tiles of the group."""
        return jnp.int32(self.per_head * self.group)

    def __getitem__(self, n):
        """(head of the group, query block) of the n-th tile."""
        if self.group == 1:
            return 0, self.start + n
        return lax.div(n, jnp.int32(self.per_head)), self.start + lax.rem(
            n, jnp.int32(self.per_head)
        )

    def visit(self, step, mask_all: bool):
        """Call step(n, block) for every tile; block is None where the mask hides nothing.

        The masked tiles of each head are a loop of their own, and the loops count in n: a block
        index kept alive beside it costs the fused kernel 100 bytes of spills.
        """
        plain = lambda n: step(n, None)
        if ints.is_static(self.full_start) and self.full_start == 0:
            pl.loop(jnp.int32(0), self.total)(plain)
            return

        if mask_all:
            pl.loop(jnp.int32(0), self.total)(lambda n: step(n, self[n][1]))
            return

        def one_head(head):
            first = head * self.per_head
            unmasked = first + (self.full_start - self.start)
            pl.loop(first, unmasked)(lambda n: step(n, self.start + (n - first)))
            pl.loop(unmasked, first + self.per_head)(plain)

        if self.group == 1:
            one_head(jnp.int32(0))
        else:
            pl.loop(jnp.int32(0), jnp.int32(self.group))(one_head)
