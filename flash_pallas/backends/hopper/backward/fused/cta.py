"""The refs of a CTA of the fused backward, its KV blocks and its walk over Q tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core import integers as ints
from ...common.auxiliary_inputs import Place
from ...common.pipeline import Ring
from ..arrays import BackwardArrays
from ..tile_range import QTileRange
from .tiles import FusedBarriers, FusedBlocks, FusedSmem


class FusedResults(NamedTuple):
    """The arrays that launches write; None: not yet, or never."""

    dq: Any = None  # f32[B, T8, N, D] of some batch entries and heads: sums
    dbias: Any = None  # f32[Bb, Nb, S, T], up to whole tiles, sums; never without bias_cluster
    dk: Any = None  # [B, S8, K, D]; or, where parts of a walk are added up later,
    dv: Any = None  # f32[parts, B, S up to whole tiles, K, D]


class KvTile(NamedTuple):
    """The KV block that a CTA works on."""

    batch: Any
    kv_head: Any
    start: Any  # its first key
    shift: Any  # the walk's: which tile of queries comes first


class PersistentTiles(NamedTuple):
    """The KV blocks that a CTA takes one after the other, each with the same number of Q tiles."""

    count: Any
    place: Callable[[Any], KvTile]  # of a number


@dataclasses.dataclass(frozen=True)
class FusedCta:
    """The refs and the place of one CTA, as one of its warpgroups sees them."""

    gmem: BackwardArrays
    results: FusedResults
    adds: bool  # to dq; False: writes it
    smem: FusedSmem
    bars: FusedBarriers
    q: Ring
    do: Ring
    kv: Ring
    keys: KvTile
    walk: QTileRange
    wg: Any
    turns: PersistentTiles | None = None  # where it takes several key blocks
    turn: Any = 0

    def visit(self, key_block: Callable[[FusedCta], None]):
        """Calls `key_block` for every KV block of this CTA, with this record as it is there."""
        if (turns := self.turns) is None:
            key_block(self)
        else:
            pl.loop(jnp.int32(0), turns.count)(lambda turn: key_block(self.at(turns, turn)))

    def at(self, turns: PersistentTiles, turn) -> FusedCta:
        """Returns this record in one of its turns: rings go on, Q tiles are counted anew."""
        keys = turns.place(turn)
        walk = dataclasses.replace(self.walk, shift=keys.shift)
        here = dataclasses.replace(self, turn=turn, keys=keys, walk=walk)
        rings = {name: getattr(self, name)._replace(before=here.before) for name in ("q", "do")}
        return dataclasses.replace(here, **rings)

    @property
    def before(self):
        """Number of Q tiles of the KV blocks before this one."""
        return 0 if self.turns is None else self.turn * self.walk.total

    @property
    def tiles(self):
        """Number of Q tiles of all KV blocks of this CTA."""
        return self.walk.total if self.turns is None else self.turns.count * self.walk.total

    def count(self, n):
        """Returns the number of this KV block's n-th Q tile among all tiles of the CTA."""
        return n if self.turns is None else n + self.before

    @property
    def kv_slot(self):
        """The slot in which K and V lie."""
        return self.kv.slot(self.turn)

    @property
    def sums(self) -> Ring:
        """The slots of dS, as a ring for the warpgroup that sums dS of a cluster."""
        bars, slots = self.bars, self.smem.ds.shape[0]
        return Ring(bars.summed_full, bars.summed_empty, slots, before=self.before)

    def anew(self) -> FusedCta:
        """Returns this record with a warpgroup index from which nothing is hoisted.

        ptxas holds addresses and descriptors made from `wg` over the loop, and at head dim 64 they
        spill (36 bytes; 60 to 190 for those of K and V).
        """
        return dataclasses.replace(self, wg=lax.optimization_barrier(self.wg))

    def apart(self) -> FusedCta:
        """Returns this record with numbers from which nothing is shared with another loop.

        Addresses that two loops have in common are held over both: 28 bytes of spills at head dim
        64, which the first of them, the one that matters, loads again in every step.
        """
        opaque = lambda x: x if ints.is_static(x) else lax.optimization_barrier(x)
        keys = KvTile(*map(opaque, self.keys))
        names = ("start", "full_start", "full_stop", "stop", "q_offset")
        walk = dataclasses.replace(self.walk, **{n: opaque(getattr(self.walk, n)) for n in names})
        return dataclasses.replace(self.anew(), keys=keys, turn=opaque(self.turn), walk=walk)

    def query_tile(self, n, block_q: int):
        """Returns (query head, rows) of the n-th tile of the walk."""
        head, block = self.walk[n]
        return self.keys.kv_head * self.walk.group + head, pl.ds(block * block_q, block_q)

    def place(self, n, kv_start, rows: int, block_q: int) -> Place:
        """Returns the Place of the n-th tile of the walk against the keys from `kv_start` on."""
        head, queries = self.query_tile(n, block_q)
        return Place(self.keys.batch, head, kv_start, queries.start, rows, block_q)

    def dq_part(self, tile, blocks: FusedBlocks, head_dim: int, wg):
        """Returns where in the dQ buffer a warpgroup's part of a dQ tile, a `query_tile`, lies."""
        (head, rows), part, batch = tile, blocks.dq_tile(head_dim), self.keys.batch
        if (first := self.gmem.origin) is not None:
            batch, head = batch - first[0], head - first[1] * self.walk.group
        if blocks.dq_by_rows:
            return batch, pl.ds(rows.start + wg * part[0], part[0]), head, slice(None)
        return batch, rows, head, pl.ds(wg * part[1], part[1])

    @property
    def reduction(self) -> Literal["add"] | None:
        """The reduction of TMA copies to dq: None if they overwrite what is there."""
        return "add" if self.adds else None

    def meet(self):
        """Waits for the other warpgroup."""
        plgpu.barrier_arrive(self.bars.met)
        plgpu.barrier_wait(self.bars.met)
