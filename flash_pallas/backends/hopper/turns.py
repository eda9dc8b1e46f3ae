"""Ping-pong of the forward: its warpgroups take turns at the tensor cores."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..mosaic import inline


# bar.sync waits until the previous warpgroup in the round has arrived (256 threads of the two).
# Worth 5 to 11 % on H200 (head dim 128: 1.086 against 1.014 of cuDNN), 12 to 18 % where steps
# speculate.
@dataclasses.dataclass(frozen=True)
class Turns:
    """A round of warpgroups; it does nothing with one of them, or under the interpreter.

    Attributes:
        warpgroups: number of warpgroups.
        interpret: run by the interpreter, which has no named barriers.
    """

    warpgroups: int
    interpret: bool

    def start(self, wg: Any):
        """Starts the round: the last warpgroup lets the first one go."""
        pl.when(wg == self.warpgroups - 1)(lambda: self.give(wg))

    def wait(self, wg: Any):
        """Waits until the warpgroup before this one has issued its products."""
        if self.warpgroups > 1 and not self.interpret:
            inline.named_barrier("sync", wg + inline.FIRST_NAMED_BARRIER, 256)

    def give(self, wg: Any):
        """Lets the next warpgroup issue its products."""
        if self.warpgroups > 1 and not self.interpret:
            following = lax.rem(wg + 1, jnp.int32(self.warpgroups))
            inline.named_barrier("arrive", following + inline.FIRST_NAMED_BARRIER, 256)
