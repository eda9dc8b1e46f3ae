"""Tiles of scores whose positions cost one register, not one per element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from ...core import dropout, scores
from ...core.problem import AttentionSpec
from ...core.scores import Logits, TileInputs
from ...core.softmax import LOG2E
from ...core.tile import Limits, Tile
from . import inline, modifiers, stand_ins


@dataclasses.dataclass(frozen=True)
class RegisterTile(Tile):
    """A Tile in the WGMMA register layout.

    Attributes:
        interpret: positions in plain jnp.
        precise: the GPU's tanh, accurate to 1.1e-5, does not suffice.
    """

    interpret: bool = False
    precise: bool = False

    @property
    def q_pos(self):
        """int32[shape], the position of each element's query."""
        return modifiers.positions(self.shape, self.q_axis, self.q_start, self.interpret)

    @property
    def kv_pos(self):
        """int32[shape], the position of each element's key."""
        return modifiers.positions(self.shape, 1 - self.q_axis, self.kv_start, self.interpret)

    def call(self, function: Callable, *args):
        """Calls function(*args), in primitives that can be lowered."""
        return stand_ins.call(function, self.shape, *args)

    def tanh(self, x):
        """Computes tanh; if `precise` accurate to 1.7e-7 (benchmarks/results/trial_tanh.txt)."""
        if not self.precise:
            return jnp.tanh(x)
        return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2.0 * LOG2E)))

    def distance(self, dtype):
        """Computes |query position - key position| of each element, exact below 2**24."""
        starts = (self.q_start, self.kv_start)[:: -1 if self.q_axis else 1]
        shift = starts[0] - starts[1]
        return modifiers.distance(self.shape, shift, self.interpret).astype(dtype)

    def kept(self, q_keys, kv_keys, rate: float):
        """Returns the dropout mask, bool of the tile's shape: True where a weight is kept."""
        if self.interpret:
            return super().kept(q_keys, kv_keys, rate)
        rows, columns = self.by_axis(q_keys, kv_keys)
        return modifiers.kept(rows, columns, dropout.threshold(rate))

    def by_axis(self, of_queries, of_keys):
        """Returns (what belongs to rows, what belongs to columns), spread over the tile."""
        of_queries, of_keys = self.per_q(of_queries), self.per_kv(of_keys)
        return (of_keys, of_queries) if self.q_axis else (of_queries, of_keys)


def alibi(position, key, falls):
    """Computes what ALiBi adds to scores whose rows have their own positions and slopes, f32.

    Args:
        position: int32, of each element's query.
        key: int32, of each element's key.
        falls: f32, minus the slope of each element's head.
    """
    distance = lax.abs(position - key)
    return lax.convert_element_type(distance, jnp.float32) * falls


def logits(
    spec: AttentionSpec,
    tile: RegisterTile,
    s,
    inputs: TileInputs,
    limits: Limits,
    hidden: float = -math.inf,
) -> Logits:
    """Computes core.scores.logits of the products s, `hidden` where hidden, for all kernels."""
    found = scores.logits(spec, tile, s, inputs)
    x = inline.hide(found.x, limits, tile.interpret, hidden)
    visible = scores.visible(spec, tile, inputs)
    if visible is not None:
        x = jnp.where(visible, x, hidden)
    return found._replace(x=x)
