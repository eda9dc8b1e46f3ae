"""The order in which the CTAs of the fused backward take the key blocks of their pairs.

Some pairs of a batch entry and a head are worked on at one time, a section of them. CTAs that run
together then add to different tiles of dQ (key blocks fastest: 0.94x if causal), the longest causal
walks start first, and no more is in use than L2 keeps.

A CTA with one key block waits for K and V before its first tile, and after its last one for copies
and neighbours: 16 % of its time at head dim 16, T=1024, in clusters of four. With
`FusedBlocks.resident` it takes several: there are no more CTAs than run at one time, and of n
clusters the i-th takes entries i, i + n, i + 2 n, ... of this order. In a launch for what another
has left, a CTA takes all key blocks of its pair, or none.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax

from .....core.problem import Problem
from ...common import cluster
from ...common.far_rows import Part
from ..arrays import BackwardArrays
from .cta import KvTile, PersistentTiles
from .launches import Launch
from .tiles import FusedBlocks, pairs_at_once


@dataclasses.dataclass(frozen=True)
class FusedScheduler:
    """The order of the clusters of one launch; a CTA without a cluster counts as one."""

    problem: Problem
    blocks: FusedBlocks
    launch: Launch

    @property
    def at_once(self) -> int:
        """Number of pairs in a section."""
        return pairs_at_once(self.problem, self.launch.pairs, self.blocks.bias_cluster)

    @property
    def clusters(self) -> int:
        """Number of clusters that take turns: none has two turns more than another."""
        turns = -(-self.total // self.blocks.resident)
        return -(-self.total // turns)

    @property
    def total(self) -> int:
        """Number of entries of this order: one key block for each CTA of a cluster."""
        return self.launch.pairs // self.blocks.bias_cluster * self.launch.key_blocks

    @property
    def grid(self) -> dict[str, int]:
        """The grid of the launch, in clusters."""
        if self.launch.part is Part.FAR:
            return {"first": self.launch.pairs}
        blocks, sections = self.blocks, -(-self.launch.pairs // self.at_once)
        if blocks.takes_turns:
            return {"first": self.clusters}
        # Of four axes the first two become one, of 65,535 at most.
        return {
            "section": sections,
            "kv": self.launch.key_blocks,
            **({"part": blocks.parts} if blocks.parts > 1 else {}),
            "pair": self.at_once // blocks.bias_cluster,
        }

    def turns(self, gmem: BackwardArrays) -> PersistentTiles:
        """Returns the key blocks that this CTA takes."""
        if self.launch.part is Part.FAR:
            place = functools.partial(self.key_block, gmem, lax.axis_index("first"))
            own = place(jnp.int32(0))
            far = gmem.side.far[own.batch, own.kv_head]
            blocks = jnp.int32(self.launch.key_blocks)
            return PersistentTiles(lax.select(far > 0, blocks, jnp.int32(0)), place)
        first, step = lax.axis_index("first"), jnp.int32(self.clusters)
        count = lax.div(jnp.int32(self.total - 1) - first, step) + 1
        return PersistentTiles(count, lambda turn: self.place(gmem, first + turn * step))

    def place(self, gmem: BackwardArrays, n) -> KvTile:
        """Returns this CTA's key block in the n-th entry of this order."""
        size, whole = self.blocks.bias_cluster, self.launch.pairs // self.blocks.bias_cluster
        at_once, key_blocks = jnp.int32(self.at_once // size), jnp.int32(self.launch.key_blocks)
        start = lax.div(n, at_once * key_blocks) * at_once  # of its section, in clusters
        within = n - start * key_blocks
        wide = lax.min(at_once, jnp.int32(whole) - start)
        pair = (start + lax.rem(within, wide)) * size + cluster.rank(size)
        block = lax.div(within, wide) + self.launch.first_block
        return self.key_block(gmem, pair, block)

    def key_block(self, gmem: BackwardArrays, pair, block) -> KvTile:
        """Returns the KeyBlock of a pair of this launch and a block, counted from the first key."""
        entries = jnp.int32(self.launch.entries)
        batch, kv_head = lax.rem(pair, entries), lax.div(pair, entries)
        if gmem.origin is not None:
            batch, kv_head = batch + gmem.origin[0], kv_head + gmem.origin[1]
        return KvTile(batch, kv_head, block * self.blocks.block_kv, self.shift(batch, block))

    def shift(self, batch, block):
        """Returns the shift of a CTA's walk: the tile that it starts with.

        CTAs that add to the same tiles, of dQ or of a bias's gradient, start at different ones.
        Those of a cluster start at the same one: they load a bias together.
        """
        if not self.blocks.stagger:
            return 0
        if self.blocks.sums_bias:
            return block + lax.div(batch, jnp.int32(self.blocks.bias_cluster))
        return block
