"""Which query tiles a key-stationary CTA reads, in which order, and which of them it masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...core import integers as ints
from ...core.problem import Problem
from .arrays import BackwardArrays
from .key_walk import mask_everywhere


@dataclasses.dataclass(frozen=True)
class QueryWalk:
    """The query tiles that one CTA of a key-stationary kernel reads, for every head of a group.

    Attributes:
        start, full_start, stop: query blocks; those before full_start need the mask.
        q_offset: position of query 0.
        kv_len: how many keys there are, or None where that hides none.
        group: query heads that read these keys, one after the other.
        shift: which tile of a head comes first, counted from its first one.
    """

    start: Any
    full_start: Any
    stop: Any
    q_offset: Any
    kv_len: Any
    group: int
    shift: Any = 0

    @classmethod
    def of(
        cls, problem: Problem, arrays: BackwardArrays, at, kv_rows: int, block_q: int, stagger=False
    ) -> QueryWalk:
        """Of a CTA. At least one tile per head, which is then wholly masked.

        Args:
            problem: what is computed.
            arrays: in device memory.
            at: (batch entry, key block).
            kv_rows: keys of a block.
            block_q: queries of a tile.
            stagger: start at another tile for every key block.
        """
        batch, block = at
        kv_start, offset = block * kv_rows, arrays.offset(problem, batch)
        whole = ints.round_up(problem.q_len, block_q)  # rows past the end have P = 0: no mask
        found = problem.spec.mask.q_blocks(kv_start - offset, kv_rows, whole, block_q)
        if arrays.bounds is None:
            start = ints.minimum(found.start, whole // block_q - 1)
            stop = ints.maximum(found.stop, start + 1)
        else:
            start = arrays.bounds[batch, block, 0]
            stop = ints.maximum(arrays.bounds[batch, block, 1], start + 1)
        full_start = ints.maximum(found.full_start, start)
        kv_len = arrays.kv_len(problem, batch, kv_rows)
        if mask_everywhere(problem):
            full_start = stop
        elif kv_len is not None:  # the last keys lie past the end: mask every tile
            ragged = kv_start + kv_rows > kv_len
            full_start = lax.select(ragged, jnp.int32(stop), jnp.int32(full_start))
        if arrays.bounds is not None:
            full_start = ints.minimum(full_start, stop)
        return cls(start, full_start, stop, offset, kv_len, problem.group, block if stagger else 0)

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
        if self.group == 1 and not self.shifted:
            return 0, self.start + n
        per_head = jnp.int32(self.per_head)
        head = 0 if self.group == 1 else lax.div(n, per_head)
        return head, self.start + lax.rem(n + self.shift, per_head)

    @property
    def shifted(self) -> bool:
        """Whether the first tile may be another than `start`."""
        return not (ints.is_static(self.shift) and self.shift == 0)

    def visit(self, step, mask_all: bool):
        """Call step(n, query block, masked=) for every tile.

        The masked tiles of each head are a loop of their own, unless `mask_all` says that one loop
        masks all tiles. The loops count in n: a block index kept alive beside it costs the fused
        kernel 100 bytes of spills.
        """
        plain = lambda n: step(n, self[n][1], masked=False)
        if ints.is_static(self.full_start) and self.full_start == 0:
            pl.loop(jnp.int32(0), self.total)(plain)
            return
        if mask_all:
            pl.loop(jnp.int32(0), self.total)(lambda n: step(n, self[n][1], masked=True))
            return

        if self.shifted:
            raise ValueError("stagger of the fused backward with this mask: only with mask_all")

        def one_head(head):
            first = head * self.per_head
            unmasked = first + (self.full_start - self.start)
            pl.loop(first, unmasked)(lambda n: step(n, self.start + (n - first), masked=True))
            pl.loop(unmasked, first + self.per_head)(plain)

        if self.group == 1:
            one_head(jnp.int32(0))
        else:
            pl.loop(jnp.int32(0), jnp.int32(self.group))(one_head)
