"""The fused backward outside its kernel: launches, the order of KV tiles, what a CTA knows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core import bounds
from .....core import integers as ints
from .....core.problem import Problem
from ...common import pipeline
from ...common.auxiliary_inputs import Place
from ...common.far_rows import Part
from ...common.pipeline import Ring, fits
from ..operands import BackwardArrays, QTileRange
from .tiles import (
    FusedBarriers,
    FusedBlocks,
    FusedSmem,
    may_sum_bias,
    pairs_at_once,
    scratch,
    without_sums,
)

# --- Launches: of all pairs of a KV head and a batch entry, or of portions ------------------------
# By default one launch takes all of them. Several, one after the other, each for an equal portion
# of the pairs, need float32 sums of dQ, and of a bias's gradient, for one portion at a time. A
# launch that ends leaves SMs idle for as long as a CTA takes, and more. Portions of the keys,
# within one of the pairs, share its sums of dQ and have their own of a bias's gradient.
#
# Where the first key block of every pair has a launch of its own, that one writes dQ's sums and the
# next adds to them, so that nothing has to clear them.


@dataclasses.dataclass(frozen=True)
class Launch:
    """The part of the work that is common to the CTAs of one launch.

    Attributes:
        entries, heads: number of batch entries and of key heads; the launch has all their pairs.
        first_block: first key block of this launch.
        key_blocks: number of its key blocks.
        adds: it adds to dQ's sums; False: it writes them.
        part: the rows that it computes: of a group of query heads with far rows, all or none.
    """

    entries: int
    heads: int
    first_block: int
    key_blocks: int
    adds: bool = True
    part: Part = Part.ALL

    @property
    def pairs(self) -> int:
        """Number of pairs of a key head and a batch entry."""
        return self.entries * self.heads


def launches_of(problem: Problem, blocks: FusedBlocks) -> tuple[Launch, ...]:
    """Returns the launches of a portion of the pairs, in order; all portions have the same."""
    pairs = problem.batch * problem.kv_heads // blocks.launches
    entries = min(pairs, problem.batch)
    sizes = entries, pairs // entries
    key_blocks = -(-problem.kv_len // blocks.block_kv)
    if not blocks.first_alone:
        each = key_blocks // blocks.key_launches
        return tuple(Launch(*sizes, first, each) for first in range(0, key_blocks, each))
    return Launch(*sizes, 0, 1, adds=False), Launch(*sizes, 1, key_blocks - 1)


def origins(problem: Problem, blocks: FusedBlocks) -> list[tuple[int, int]]:
    """Returns (batch entry, key head) of the first pair of each portion."""
    pairs = problem.batch * problem.kv_heads // blocks.launches
    firsts = (n * pairs for n in range(blocks.launches))
    return [(first % problem.batch, first // problem.batch) for first in firsts]


def may_launch(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether portions are whole key heads, or some entries of one, and whole clusters.

    Several launches also exclude `parts`, and portions of the keys must be possible.
    """
    pairs, rest = divmod(problem.batch * problem.kv_heads, blocks.launches)
    if rest or not pairs or pairs % blocks.bias_cluster:
        return False
    whole = pairs % problem.batch == 0 or problem.batch % pairs == 0
    several = blocks.launches > 1 or blocks.first_alone
    return whole and not (several and blocks.parts > 1) and may_launch_keys(problem, blocks)


def may_launch_keys(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether the keys may be cut into portions.

    They may for sums of the gradient of a bias, if a launch owns the bias heads that it sums.
    """
    if blocks.key_launches == 1:
        return True
    if not blocks.sums_bias or blocks.first_alone:
        return False
    owned = blocks.launches == 1 or by_heads(problem, blocks)
    return owned and -(-problem.kv_len // blocks.block_kv) % blocks.key_launches == 0


def by_heads(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether the bias's gradient is summed for one portion's heads at a time.

    That is so where each head has a bias of its own, and a large one. At T=1024 with head dim 64
    the sums of all heads are 3 % of what a backward keeps; for that, two more launches a portion do
    not pay.
    """
    if blocks.launches == 1 or not blocks.sums_bias:
        return False
    whole = problem.batch * problem.kv_heads // blocks.launches >= problem.batch
    entries, heads = problem.bias_shape[:2]
    large = 3 * entries * problem.kv_len > problem.batch * problem.head_dim
    return whole and heads > 1 and (large or blocks.key_launches > 1)


def may_take_turns(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether every key block has the same walk, which no array decides, in one loop.

    Without turns it returns whether there is one slot for K and V.
    """
    if not blocks.takes_turns:
        return blocks.kv_stages == 1
    alike = problem.spec.mask.is_trivial and not problem.traced_offset
    plain = blocks.producer and blocks.parts == 1 and blocks.mask_all
    return alike and plain and not bounds.is_dynamic(problem)


def may_write(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether there are several key blocks, the first of which walks over every query.

    That must hold whatever arrays say.
    """
    if bounds.is_dynamic(problem) or problem.traced_offset or problem.kv_len <= blocks.block_kv:
        return False
    whole = -(-problem.q_len // blocks.block_q) * blocks.block_q
    found = problem.spec.mask.q_blocks(
        -problem.spec.q_offset, blocks.block_kv, whole, blocks.block_q
    )
    return found.start <= 0 and found.stop >= whole // blocks.block_q


def fitting(problem: Problem, blocks: FusedBlocks) -> FusedBlocks:
    """Returns `blocks` as `problem` can run them.

    It may be a shard of the call that they were chosen for. A shard has fewer batch entries and
    heads. Fewer entries than a cluster has CTAs may share a bias, and portions may not be whole
    heads.
    """
    if not may_sum_bias(problem, blocks.bias_cluster):
        blocks = without_sums(blocks)
    if not may_launch(problem, blocks):
        return dataclasses.replace(blocks, launches=1, first_alone=False, key_launches=1)
    return blocks


# What of a call that sums the gradient of a bias is launched by itself: portions of the heads, and
# of the keys within each, so many that sums of the bias take at most a share of Q's bytes. From so
# many keys on, where each of four launches has so many rounds of CTAs. H200, B = 128, 4 heads:
# gradients in one program keep 1.94 to 2.00 times what the forward does; with one launch 2.29 to
# 2.58. Speed relative to one launch, T=1024, 2048 and 4096: 1.02, 0.99 and 1.00 at head dim 64,
# 0.97, 0.93 and 0.94 at 32; at 16 1.06, 0.98 (4096: not timed), and 0.89 at T=512. Two launches of
# as many rounds 0.96, 0.93 and 1.01 (B = 16, 16 heads, T=1024): not taken.
MOST_PORTIONS, LEAST_KEYS, LEAST_ROUNDS = 4, 1024, 7
SHARE_OF_Q = 4

# Up to so many keys by head dim, pairs of CTAs that sum the gradient of a bias take key blocks in
# turns, with so many slots for K and V, where each has so many of them. H200, B = 128, 4 heads,
# against one key block a CTA, T=512, 1024, 2048 and 4096: head dim 16 1.08, 1.06, 1.06 and 1.06
# (with a second slot 0.90 to 1.00 of that); 64 1.06, 1.06, 1.03 and 0.97 (with one slot 0.96 at
# 1024); 32 0.97 to 0.99 (1024), 0.93 and 0.90.
TURNS = {16: (4096, 1), 64: (2048, 2)}
LEAST_TURNS = 7

# Keys for which the first blocks are launched alone without a mask: at head dim 128, and with the
# sums of a bias at 64. H200: 16 heads, B=16, T=1024 1.02 and 1.04, B=8, T=2048 1.025, 32 heads for
# 8 of keys 1.05 (causal 1.00 to 1.02: not taken); bias T=512 1.02, 1024 and 1536 1.015, 2048 0.98.
# At 128 T=512 1.00; at 64 (spills) 0.97 and 1.00, at 32 and 16 0.98 to 1.00.
ALONE = {128: (1024, 2048), 64: (512, 1536)}


def choose_launches(problem: Problem, blocks: FusedBlocks, num_sms: int) -> FusedBlocks:
    """Returns `blocks` with the launches that pay off.

    Args:
        problem: a problem of the head dims that the kernel runs.
        blocks: the blocks of the kernel.
        num_sms: number of SMs, each of which holds one CTA.
    """
    ctas = problem.batch * problem.kv_heads * -(-problem.kv_len // blocks.block_kv)
    if blocks.sums_bias:
        several = _portions(problem, blocks, ctas // (LEAST_ROUNDS * num_sms))
        several = _turns(problem, several, ctas, num_sms)
        if several != blocks:
            return several
    alone = dataclasses.replace(blocks, first_alone=True)
    return alone if _alone_pays(problem, alone, ctas, num_sms) else blocks


def _portions(problem: Problem, blocks: FusedBlocks, most: int) -> FusedBlocks:
    """Returns `blocks` with at most `most` launches, for portions of heads and of their keys."""
    if problem.kv_len < LEAST_KEYS or most < MOST_PORTIONS:
        return blocks
    for heads in range(MOST_PORTIONS, 1, -1):
        several = dataclasses.replace(blocks, launches=heads)
        if problem.kv_heads % heads == 0 and may_launch(problem, several):
            return _portions_of_keys(problem, several, most // heads)
    return blocks


def _portions_of_keys(problem: Problem, blocks: FusedBlocks, most: int) -> FusedBlocks:
    """Returns `blocks` with as few portions of the keys as keep sums of a bias small.

    If none do, there are as many as there may be.
    """
    of_q = problem.batch * problem.q_heads * problem.head_dim  # elements for each query
    sums = (
        problem.bias_shape[0] * problem.q_heads // blocks.launches * problem.kv_len
    )  # twice as wide
    best = blocks
    for portions in range(1, most + 1):
        several = dataclasses.replace(blocks, key_launches=portions)
        if may_launch(problem, several):
            best = several
            if 2 * SHARE_OF_Q * sums <= portions * of_q:
                break
    return best


def _turns(problem: Problem, blocks: FusedBlocks, ctas: int, num_sms: int) -> FusedBlocks:
    most_keys, slots = TURNS.get(problem.head_dim, (0, 1))
    if problem.kv_len > most_keys or blocks.bias_cluster != 2:
        return blocks
    # SMs come in pairs. Of clusters of four, 30 fit on 132.
    resident = num_sms // blocks.bias_cluster
    each = ctas // (blocks.bias_cluster * blocks.launches * blocks.key_launches)
    if resident == 1 or each < LEAST_TURNS * resident:
        return blocks
    several = dataclasses.replace(blocks, resident=resident, kv_stages=slots)
    room = fits(scratch(problem, several))
    return several if room and may_take_turns(problem, several) else blocks


def _alone_pays(problem: Problem, blocks: FusedBlocks, ctas: int, num_sms: int) -> bool:
    least, most = ALONE.get(problem.head_dim, (1, 0))
    if not least <= problem.kv_len <= most or not problem.spec.mask.is_trivial:
        return False
    if (problem.head_dim == 64) != blocks.sums_bias or not blocks.producer:
        return False
    rounds = lambda n: -(-n // num_sms)
    first = problem.batch * problem.kv_heads
    as_many = rounds(first) + rounds(ctas - first) <= rounds(ctas)
    return as_many and may_launch(problem, blocks) and may_write(problem, blocks)


MOST_PARTS = 4  # H200, 32 CTAs: two 1.53 times as fast as one, four 2.03, eight 1.61
# Queries of a walk, over the heads of a group. Adding parts up costs 10 us, as much as a walk of a
# few hundred. H200: 1024 queries in four parts 1.76; 512 in two, without groups, 0.88 to 0.97.
LEAST_QUERIES = 1024


def choose_parts(problem: Problem, blocks: FusedBlocks, num_sms: int) -> int:
    """Returns as many parts as SMs have room for; 1 where key blocks are many or walks short.

    Walks of a causal mask are on average half as long as the longest, which start first: two CTAs
    for each SM fill what the short ones leave, while parts are long. H200, 32 query heads and 8 key
    heads, (batch, T): (1, 2k) two parts are 1.46 times as fast as one, (1, 1k) three 1.88 and two
    1.55, (2, 1k) two 1.19; (4, 512), of 1024 queries a part, 0.95. Without groups no walk gained,
    of 512 to 2k queries: two parts 0.71 to 0.97.

    Args:
        problem: a problem of the head dims that the kernel runs.
        blocks: the blocks of the kernel.
        num_sms: number of SMs, each of which holds one CTA.
    """
    mask = problem.spec.mask
    rows = problem.q_len
    if mask.left is not None and mask.right is not None:
        rows = min(rows, blocks.block_kv + mask.left + mask.right)
    walk = problem.group * rows
    if problem.group == 1 or walk < LEAST_QUERIES:
        return 1
    ctas = problem.batch * problem.kv_heads * -(-problem.kv_len // blocks.block_kv)
    parts = num_sms // ctas
    if mask.right is not None and mask.left is None:
        parts = max(parts, min(2 * num_sms // ctas, (walk - 1) // LEAST_QUERIES))
    return max(1, min(MOST_PARTS, parts))


def summed(parts, like):
    """Returns the sum of the parts of a gradient in their order, in dtype and shape of `like`."""
    keys, columns = like.shape[1], like.shape[3]
    return functools.reduce(jnp.add, parts)[:, :keys, :, :columns].astype(like.dtype)


# --- The order in which CTAs take the KV tiles of their pairs -------------------------------------
# Some pairs of a batch entry and a head are worked on at one time, a section of them. CTAs that run
# together then add to different tiles of dQ (key blocks fastest: 0.94x if causal), the longest
# causal walks start first, and no more is in use than L2 keeps.
#
# A CTA with one key block waits for K and V before its first tile, and after its last one for
# copies and neighbours: 16 % of its time at head dim 16, T=1024, in clusters of four. With
# `FusedBlocks.resident` it takes several: there are no more CTAs than run at one time, and of n
# clusters the i-th takes entries i, i + n, i + 2 n, ... of this order. In a launch for what another
# has left, a CTA takes all key blocks of its pair, or none.


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
        pair = (start + lax.rem(within, wide)) * size + pipeline.cluster_rank(size)
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


# --- What a CTA knows: its refs, its KV tiles and their range of Q tiles --------------------------


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
