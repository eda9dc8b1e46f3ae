"""Calls with several block lists: one call after another, for the entries and heads of each list.

A tile holds all entries and heads of a call, so these must read the same blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core import block_lists, mesh_axes
from ...core.problem import Cotangents, Operands, Outputs
from ...core.shards import PLACES


def forward(call: Callable[[Operands], Outputs], operands: Operands) -> Outputs:
    """Computes `call` of the operands, once for each list of blocks."""
    rows = ListRows.of(operands)
    if rows.count == 1:
        return call(operands)
    return rows.sum_over_rows(lambda row: call(rows.taken(operands, row)), _whole_outputs)


def backward(
    call: Callable[[Operands, Cotangents], Operands], operands: Operands, cotangents: Cotangents
) -> Operands:
    """Computes `call` of the operands and cotangents likewise; gradients of what is shared add."""
    rows = ListRows.of(operands)
    if rows.count == 1:
        return call(operands, cotangents)
    of_row = lambda row: call(rows.taken(operands, row), rows.taken(cotangents, row))
    return rows.sum_over_rows(of_row, _whole_grads)


def _whole_outputs(name: str, operands: Operands, part) -> tuple[int, ...]:
    """Returns the shape of a result, given that of one row's."""
    sizes = {"b": operands.q.shape[0], "n": operands.q.shape[2]}
    return tuple(sizes.get(letter, n) for letter, n in zip(PLACES[name], part.shape, strict=True))


def _whole_grads(name: str, operands: Operands, part) -> tuple[int, ...]:
    """Returns the shape of a gradient, that of its operand."""
    del part
    return jax.tree.leaves(getattr(operands, name))[0].shape


@dataclasses.dataclass(frozen=True, eq=False)
class ListRows:
    """The lists of a call, numbered by batch entry and, fastest, by head.

    Attributes:
        operands: those of the whole call.
        entries, heads: numbers of lists along the batch and along the heads.
    """

    operands: Operands
    entries: int
    heads: int

    @classmethod
    def of(cls, operands: Operands) -> ListRows:
        """Returns the lists of a call; one for all, if it has none."""
        lists = operands.block_lists
        if lists is None:
            return cls(operands, 1, 1)
        others = (x for x in (operands.bias, operands.mask) if x is not None)
        own = any(getattr(operands, name) is not None for name in block_lists.OF_ENTRIES)
        if own or any(len(x) % len(lists) and len(lists) % len(x) for x in others):
            lists = jnp.repeat(lists, operands.q.shape[0] // len(lists), axis=0)
            operands = operands._replace(block_lists=lists)
        return cls(operands, *lists.shape[:2])

    @property
    def count(self) -> int:
        """Number of lists."""
        return self.entries * self.heads

    def sum_over_rows(self, call: Callable[[Any], Any], whole_shape: Callable) -> Any:
        """Computes call(row) for every row and adds up the parts in whole arrays.

        Args:
            call: returns a record of one row's arrays.
            whole_shape: (name, operands, one row's array) -> shape of the whole one.
        """
        parts = jax.eval_shape(call, jnp.int32(0))

        def zeros(name: str, part):
            total = jnp.zeros(whole_shape(name, self.operands, part), part.dtype)
            return mesh_axes.spread(total, mesh_axes.varying(self.operands))

        def step(row, total):
            row = jnp.asarray(row, jnp.int32)  # with jax_enable_x64 it counts in int64
            added = lambda name, total, part: self.added(name, total, part, row)
            return _by_name(added, total, call(row))

        # The bounds are Python ints: a loop with traced bounds has no derivative in reverse mode.
        return lax.fori_loop(0, self.count, step, _by_name(zeros, parts))

    def taken(self, record, row):
        """Returns one row's part of a record of arrays."""
        source = self.operands if isinstance(record, Operands) else record
        take = lambda name, x: lax.dynamic_slice(x, *self._place(name, x.shape, row))
        return _by_name(take, source)

    def added(self, name: str, total, part, row):
        """Returns `total` with one row's part added to what is its own."""
        start, size = self._place(name, total.shape, row)
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, size) + part, start)

    def _place(self, name: str, shape, row):
        """Returns (start, size) of one row's part of an array."""
        entry, head = row // self.heads, row % self.heads
        batch, _, q_heads, _ = self.operands.q.shape
        group = q_heads // self.operands.k.shape[2]

        def axis(letter: str, size: int):
            if letter == "b":
                return entry * (batch // self.entries), batch // self.entries
            if letter == "n" or (letter == "N" and size > 1):
                return head * (q_heads // self.heads), q_heads // self.heads
            if letter == "k" and self.heads > 1:
                return head // group, 1
            if letter == "B" and size <= self.entries:
                return entry * size // self.entries, 1
            if letter == "B":
                return entry * (size // self.entries), size // self.entries
            return jnp.int32(0), size

        starts, sizes = zip(*map(axis, PLACES[name], shape), strict=True)
        return starts, sizes


def _by_name(function: Callable, *records) -> Any:
    """Returns the first record with function(name, *arrays) in the place of each array."""
    first = records[0]
    field = lambda name: jax.tree.map(
        lambda *x: function(name, *x), *(getattr(record, name) for record in records)
    )
    return first._replace(**{name: field(name) for name in first._fields})
