"""The fused backward outside its kernel: launches, the order of KV tiles, what a CTA knows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core import integers as ints
from .....core.problem import Problem
from ....gpu.launch import WARPGROUP_ROWS, float32
from ....gpu.ptx import inline
from ...common import pipeline, tile_lists
from ...common.auxiliary_inputs import Place
from ...common.far_rows import Part, leaves_calls, leaves_in_backward, parts
from ...common.pipeline import Ring, fits
from .. import dq_sums
from ..dq_sums import OwnTiles
from ..operands import BackwardArrays, QTileList, QTileRange
from .tiles import (
    FusedBlocks,
    FusedSmem,
    for_far_rows,
    may_sum_bias,
    scratch,
    without_sums,
)

# --- Launches: of all pairs of a KV head and a batch entry, or of portions ------------------------
# By default one launch takes all of them. Several, one after the other, each for an equal portion
# of the pairs, need float32 sums of dQ, and of a bias's gradient, for one portion at a time. A
# launch that ends leaves SMs idle for as long as a CTA takes, and more. Portions of the keys,
# within one of the pairs, share its sums of dQ and have their own of a bias's gradient.
#
# The pairs of a batch entry and a head are divided into sections, and CTAs work on one section at a
# time. So CTAs that run together add to different tiles of dQ (KV tiles fastest: 0.94x if causal),
# the longest causal loops start first, and what CTAs read stays in L2. With lists, which say how
# long loops are, CTAs follow the order of the lists instead.
#
# A CTA with one KV tile waits for K and V before its first Q tile, and after its last one for
# copies and neighbours: 16 % of its time at head dim 16, T=1024, in clusters of four. A CTA of a
# persistent grid (`FusedBlocks.persistent_clusters`) takes several: there are no more CTAs than run
# at one time, and of n clusters the i-th takes entries i, i + n, i + 2 n, ... of this order. In a
# launch of Part.FAR, a CTA takes all KV tiles of its pair, or none.

# (batch entry, KV head, first key, shift): the shift is that of QTileRange
KvTile = tuple[Any, Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of the kernel: the pairs and KV blocks that it has, and which CTA takes which.

    The order is one of clusters; a CTA without a cluster counts as one.

    Attributes:
        problem: a problem with the head dims that the kernel runs.
        blocks: tile sizes.
        interpret: run by the interpreter.
        entries, heads: number of batch entries and of KV heads; the launch has all their pairs.
        first_block: first KV block of this launch.
        num_blocks: number of its KV blocks.
        part: the rows that it computes: of a group of query heads with far rows, all or none.
    """

    problem: Problem
    blocks: FusedBlocks
    interpret: bool
    entries: int
    heads: int
    first_block: int
    num_blocks: int
    part: Part = Part.ALL

    @property
    def pairs(self) -> int:
        """Number of pairs of a KV head and a batch entry."""
        return self.entries * self.heads

    @property
    def at_once(self) -> int:
        """Number of pairs in a section."""
        return dq_sums.pairs_at_once(self.problem, self.pairs, self.blocks.bias_cluster)

    @property
    def sections(self) -> int:
        """Number of sections of the pairs."""
        return -(-self.pairs // self.at_once)

    @property
    def stores_dq(self) -> bool:
        """True if CTAs store dQ of the queries at their keys' positions: see dq_sums.py."""
        problem, blocks = self.problem, self.blocks
        once = blocks.num_launches == blocks.kv_launches == blocks.split_q == 1
        return (
            once
            and blocks.bias_cluster == 1
            and blocks.producer
            and blocks.mask_all
            and not (blocks.persistent or blocks.stagger)
            and self.part in (Part.ALL, Part.NEAR)
            and dq_sums.allowed(problem, self.num_blocks, self.sections)
            and fits(dq_sums.with_barriers(scratch(problem, blocks)))
        )

    @property
    def total(self) -> int:
        """Number of entries of this order: one KV block for each CTA of a cluster."""
        return self.pairs // self.blocks.bias_cluster * self.num_blocks

    @property
    def clusters(self) -> int:
        """Size of the persistent grid: no cluster has two entries more than another."""
        most = -(-self.total // self.blocks.persistent_clusters)
        return -(-self.total // most)

    @property
    def grid(self) -> dict[str, int]:
        """The grid of the launch, in clusters."""
        if self.part is Part.FAR:
            return {"first": self.pairs}
        if self.in_order:
            return {"first": self.total}
        blocks = self.blocks
        if blocks.persistent:
            return {"first": self.clusters}
        # Of four axes the first two become one, of 65,535 at most.
        return {
            "section": self.sections,
            "kv": self.num_blocks,
            **({"part": blocks.split_q} if blocks.split_q > 1 else {}),
            "pair": self.at_once // blocks.bias_cluster,
        }

    @property
    def in_order(self) -> bool:
        """True if CTAs follow the order of the lists, instead of sections."""
        blocks = self.blocks
        alone = blocks.num_launches == blocks.kv_launches == blocks.bias_cluster == 1
        return self.problem.is_listed and alone and not blocks.persistent

    def place(self, gmem: BackwardArrays) -> tuple[Any, Any]:
        """Returns (pair, KV block) of this CTA; the last section may have some pairs too many."""
        if self.in_order:
            batch, kv_head, block = tile_lists.place(
                gmem.lists, lax.axis_index("first"), self.heads
            )
            return self.pair_of(batch, kv_head), block
        size = self.blocks.bias_cluster
        within = lax.axis_index("pair") * size + pipeline.cluster_rank(size)
        pair, block = lax.axis_index("section") * self.at_once + within, lax.axis_index("kv")
        if self.stores_dq:
            block = dq_sums.block_of(self, block)
        return pair, block + self.first_block

    def pair_of(self, batch, kv_head):
        """Returns the number of a pair of this launch."""
        return kv_head * self.entries + batch

    def persistent_tiles(self, gmem: BackwardArrays) -> tuple[Any, Callable[[Any], KvTile]]:
        """Returns how many KV tiles this CTA of a persistent grid takes, and which is the n-th."""
        if self.part is Part.FAR:
            place = functools.partial(self.kv_tile, gmem, lax.axis_index("first"))
            batch, kv_head, *_ = place(jnp.int32(0))
            far = gmem.auxiliary.far[batch, kv_head]
            blocks = jnp.int32(self.num_blocks)
            return lax.select(far > 0, blocks, jnp.int32(0)), place
        first, step = lax.axis_index("first"), jnp.int32(self.clusters)
        count = lax.div(jnp.int32(self.total - 1) - first, step) + 1
        return count, lambda n: self.ordered_tile(gmem, first + n * step)

    def ordered_tile(self, gmem: BackwardArrays, n) -> KvTile:
        """Returns this CTA's KV tile in the n-th entry of this order."""
        size, pair_clusters = self.blocks.bias_cluster, self.pairs // self.blocks.bias_cluster
        at_once, num_blocks = jnp.int32(self.at_once // size), jnp.int32(self.num_blocks)
        start = lax.div(n, at_once * num_blocks) * at_once  # of its section, in clusters
        within = n - start * num_blocks
        section_size = lax.min(at_once, jnp.int32(pair_clusters) - start)
        pair = (start + lax.rem(within, section_size)) * size + pipeline.cluster_rank(size)
        block = lax.div(within, section_size) + self.first_block
        return self.kv_tile(gmem, pair, block)

    def kv_tile(self, gmem: BackwardArrays, pair, block) -> KvTile:
        """Returns the KV tile of a pair of this launch and a block, counted from the first key."""
        entries = jnp.int32(self.entries)
        kv_head = lax.div(pair, entries)
        # With `rem`, 6 entries of 25 heads of 64 columns spill 32 bytes. Without a producer, where
        # ptxas has other registers, the quotient spills 16 bytes at head dim 128.
        batch = pair - kv_head * entries if self.blocks.producer else lax.rem(pair, entries)
        if gmem.origin is not None:
            batch, kv_head = batch + gmem.origin[0], kv_head + gmem.origin[1]
        return batch, kv_head, block * self.blocks.block_kv, self.shift(batch, block)

    def shift(self, batch, block):
        """Returns the shift of a CTA's range of Q tiles: the tile that it starts with.

        CTAs that add to the same tiles, of dQ or of a bias's gradient, start at different ones.
        Those of a cluster start at the same one: they load a bias together.
        """
        if not self.blocks.stagger:
            return 0
        if self.blocks.sums_bias:
            return block + lax.div(batch, jnp.int32(self.blocks.bias_cluster))
        return block

    def q_tiles(self, gmem: BackwardArrays, tile: KvTile, block) -> QTileRange | QTileList:
        """Returns the Q tiles of a KV tile, which is the `block`-th of its head."""
        batch, kv_head, _, shift = tile
        size = self.blocks.block_kv, self.blocks.block_q
        if self.problem.is_listed:
            own_tile = batch, kv_head, block
            return QTileList.of(self.problem, gmem, own_tile, *size, mask_all=self.blocks.mask_all)
        own_tile, mask_all = (batch, block), self.blocks.mask_all
        return QTileRange.of(self.problem, gmem, own_tile, *size, mask_all=mask_all, shift=shift)

    def result_shapes(self, arrays: BackwardArrays) -> dict[str, Any]:
        """Returns the shapes of what launches write, by name.

            dq      f32[entries, T8, N, D] of the batch entries and heads of this launch: sums
            dk, dv  [B, S8, K, D]; with split-Q f32[parts, B, S up to whole tiles, K, D]
            dbias   f32[Bb, Nb, S, T], up to whole tiles: sums; only with bias_cluster
            stored  i32[pairs]: flags of dq_sums.py; only with stores_dq

        `arrays`: operands, whose q, k and v have the shapes of gradients.
        """
        problem, blocks = self.problem, self.blocks
        # dQ is [B, T, N, D] like q: no transpose afterwards, and the adds are as fast as head-major
        # (1.00x).
        sums = (self.entries, arrays.q.shape[1], self.heads * problem.group, problem.head_dim)
        dk, dv = (jax.ShapeDtypeStruct(x.shape, problem.dtype) for x in (arrays.k, arrays.v))
        if blocks.split_q > 1:  # whole tiles, as what writes them knows no ends
            rows = self.num_blocks * blocks.block_kv
            keys = (problem.batch, rows, problem.kv_heads, problem.head_dim)
            dk = dv = float32((blocks.split_q, *keys))
        shapes = {"dq": float32(sums), "dk": dk, "dv": dv}
        if self.stores_dq:
            shapes["stored"] = dq_sums.flags(self.pairs)
        if blocks.sums_bias:
            entries, heads = problem.bias_shape[:2]
            if by_heads(problem, blocks):
                heads = sums[2]
            keys = -(-problem.kv_len // blocks.block_kv) // blocks.kv_launches * blocks.block_kv
            queries = ints.round_up(problem.q_len, blocks.block_q)
            shapes["dbias"] = float32((entries, heads, keys, queries))
        return shapes


def launches_of(
    problem: Problem, blocks: FusedBlocks, interpret: bool = False
) -> tuple[Launch, ...]:
    """Returns the launches of a portion of the pairs, in order; all portions have the same."""
    pairs = problem.batch * problem.kv_heads // blocks.num_launches
    entries = min(pairs, problem.batch)
    all_pairs = Launch(problem, blocks, interpret, entries, pairs // entries, 0, 0)
    num_blocks = -(-problem.kv_len // blocks.block_kv)
    launch_blocks = num_blocks // blocks.kv_launches
    all_tiles = problem.batch * problem.kv_heads * num_blocks
    if blocks.sums_bias and leaves_calls(problem, all_tiles):
        chosen = [(Part.ALL_IF_NEAR, blocks), (Part.ALL_IF_FAR, blocks)]
    else:
        near, *far = parts(pairs * launch_blocks, may_leave(blocks) and leaves_in_backward(problem))
        chosen = [(near, blocks), *((part, for_far_rows(pairs, blocks)) for part in far)]
    return tuple(
        dataclasses.replace(
            all_pairs, blocks=tiles, first_block=first, num_blocks=launch_blocks, part=part
        )
        for first in range(0, num_blocks, launch_blocks)
        for part, tiles in chosen
    )


def may_leave(blocks: FusedBlocks) -> bool:
    """Returns whether groups of heads may be left to another launch; nothing else was tried."""
    alone = blocks.num_launches == blocks.kv_launches == blocks.split_q == 1
    return blocks.producer and alone and not blocks.persistent


def origins(problem: Problem, blocks: FusedBlocks) -> list[tuple[int, int]]:
    """Returns (batch entry, KV head) of the first pair of each portion."""
    pairs = problem.batch * problem.kv_heads // blocks.num_launches
    firsts = (n * pairs for n in range(blocks.num_launches))
    return [(first % problem.batch, first // problem.batch) for first in firsts]


def may_launch(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether the launches that the blocks ask for are possible.

    Several launches also exclude split-Q.
    """
    apart = blocks.num_launches == 1 or blocks.split_q == 1
    return apart and may_launch_pairs(problem, blocks) and may_launch_keys(problem, blocks)


def may_launch_pairs(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether portions are whole KV heads, or some entries of one, and whole clusters."""
    pairs, rest = divmod(problem.batch * problem.kv_heads, blocks.num_launches)
    if rest or not pairs or pairs % blocks.bias_cluster:
        return False
    return pairs % problem.batch == 0 or problem.batch % pairs == 0


def may_launch_keys(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether the keys may be cut into portions.

    They may for sums of the gradient of a bias, if a launch owns the bias heads that it sums.
    """
    if blocks.kv_launches == 1:
        return True
    if not blocks.sums_bias:
        return False
    owned = blocks.num_launches == 1 or by_heads(problem, blocks)
    return owned and -(-problem.kv_len // blocks.block_kv) % blocks.kv_launches == 0


def by_heads(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether the bias's gradient is summed for one portion's heads at a time.

    That is so where each head has a bias of its own, and a large one. At T=1024 with head dim 64
    the sums of all heads are 3 % of what a backward keeps; for that, two more launches a portion do
    not pay.
    """
    if blocks.num_launches == 1 or not blocks.sums_bias:
        return False
    whole_heads = problem.batch * problem.kv_heads // blocks.num_launches >= problem.batch
    entries, heads = problem.bias_shape[:2]
    large = 3 * entries * problem.kv_len > problem.batch * problem.head_dim
    return whole_heads and heads > 1 and (large or blocks.kv_launches > 1)


def may_be_persistent(problem: Problem, blocks: FusedBlocks) -> bool:
    """Returns whether every KV tile has the same Q tiles, which no array decides, in one loop.

    Without a persistent grid it returns whether there is one slot for K and V.
    """
    if not blocks.persistent:
        return blocks.kv_stages == 1
    alike = problem.spec.mask.is_trivial and not problem.traced_offset
    plain = blocks.producer and blocks.split_q == 1 and blocks.mask_all
    return alike and plain and not problem.is_dynamic


def fitting(problem: Problem, blocks: FusedBlocks) -> FusedBlocks:
    """Returns `blocks` as `problem` can run them.

    It may be a shard of the call that they were chosen for. A shard has fewer batch entries and
    heads. Fewer entries than a cluster has CTAs may share a bias, and portions may not be whole
    heads.
    """
    if not may_sum_bias(problem, blocks.bias_cluster):
        blocks = without_sums(blocks)
    if not may_launch(problem, blocks):
        return dataclasses.replace(blocks, num_launches=1, kv_launches=1)
    return blocks


# With a bias gradient, heads and keys are split into several launches, so that the float32 sums of
# it take at most 1 / SHARE_OF_Q of the bytes of Q. Used from LEAST_KEYS keys, where each of
# MOST_PORTIONS launches has LEAST_ROUNDS rounds of CTAs. H200, B = 128, 4 heads: gradients in one
# program keep 1.94 to 2.00 times what the forward does; with one launch 2.29 to 2.58. Speed
# relative to one launch, T=1024, 2048 and 4096: 1.02, 0.99 and 1.00 at head dim 64, 0.97, 0.93 and
# 0.94 at 32; at 16 1.06, 0.98 (4096: not timed), and 0.89 at T=512. Two launches of as many rounds
# 0.96, 0.93 and 1.01 (B = 16, 16 heads, T=1024): not taken.
MOST_PORTIONS, LEAST_KEYS, LEAST_ROUNDS = 4, 1024, 7
SHARE_OF_Q = 4

# By head dim: the most keys with which pairs of CTAs that sum the gradient of a bias have a
# persistent grid, and its slots for K and V. LEAST_TILES: KV tiles that each CTA must have. H200,
# B=128, 4 heads, against one KV tile a CTA, T=512, 1024, 2048 and 4096: head dim 16 1.08, 1.06,
# 1.06 and 1.06 (with a second slot 0.90 to 1.00 of that); 64 1.06, 1.06, 1.03 and 0.97 (with one
# slot 0.96 at 1024); 32 0.97 to 0.99 (1024), 0.93 and 0.90.
PERSISTENT = {16: (4096, 1), 64: (2048, 2)}
LEAST_TILES = 7


def choose_launches(problem: Problem, blocks: FusedBlocks, num_sms: int) -> FusedBlocks:
    """Returns `blocks` with the launches that pay off.

    Args:
        problem: a problem of the head dims that the kernel runs.
        blocks: the blocks of the kernel.
        num_sms: number of SMs, each of which holds one CTA.
    """
    ctas = problem.batch * problem.kv_heads * -(-problem.kv_len // blocks.block_kv)
    if blocks.sums_bias:
        portions = _portions(problem, blocks, ctas // (LEAST_ROUNDS * num_sms))
        return _persistent(problem, portions, ctas, num_sms)
    return blocks


def _portions(problem: Problem, blocks: FusedBlocks, most: int) -> FusedBlocks:
    """Returns `blocks` with at most `most` launches, for portions of heads and of their keys."""
    if problem.kv_len < LEAST_KEYS or most < MOST_PORTIONS:
        return blocks
    for heads in range(MOST_PORTIONS, 1, -1):
        portions = dataclasses.replace(blocks, num_launches=heads)
        if problem.kv_heads % heads == 0 and may_launch(problem, portions):
            return _portions_of_keys(problem, portions, most // heads)
    return blocks


def _portions_of_keys(problem: Problem, blocks: FusedBlocks, most: int) -> FusedBlocks:
    """Returns `blocks` with as few portions of the keys as keep sums of a bias small.

    If none do, there are as many as there may be.
    """
    q_elements = problem.batch * problem.q_heads * problem.head_dim  # elements for each query
    sums = (
        problem.bias_shape[0] * problem.q_heads // blocks.num_launches * problem.kv_len
    )  # twice as wide
    best = blocks
    for portions in range(1, most + 1):
        candidate = dataclasses.replace(blocks, kv_launches=portions)
        if may_launch(problem, candidate):
            best = candidate
            if 2 * SHARE_OF_Q * sums <= portions * q_elements:
                break
    return best


def _persistent(problem: Problem, blocks: FusedBlocks, ctas: int, num_sms: int) -> FusedBlocks:
    most_keys, slots = PERSISTENT.get(problem.head_dim, (0, 1))
    if problem.kv_len > most_keys or blocks.bias_cluster != 2:
        return blocks
    # SMs come in pairs. Of clusters of four, 30 fit on 132.
    clusters = num_sms // blocks.bias_cluster
    cluster_tiles = ctas // (blocks.bias_cluster * blocks.num_launches * blocks.kv_launches)
    if clusters == 1 or cluster_tiles < LEAST_TILES * clusters:
        return blocks
    persistent = dataclasses.replace(blocks, persistent_clusters=clusters, kv_stages=slots)
    room = fits(scratch(problem, persistent))
    return persistent if room and may_be_persistent(problem, persistent) else blocks


MOST_SPLITS = 4  # H200, 32 CTAs: two 1.53 times as fast as one, four 2.03, eight 1.61
# Queries of a KV tile, over the heads of a group. Adding parts up costs 10 us, as much as a loop
# over a few hundred. H200: 1024 queries in four parts 1.76; 512 in two, without groups, 0.88 to
# 0.97.
LEAST_QUERIES = 1024


def choose_split_q(problem: Problem, blocks: FusedBlocks, num_sms: int) -> int:
    """Returns as many parts as SMs have room for; 1 where KV tiles are many or loops short.

    Loops of a causal mask are on average half as long as the longest, which start first: two CTAs
    for each SM fill what the short ones leave, while parts are long. H200, 32 query heads and 8 key
    heads, (batch, T): (1, 2k) two parts are 1.46 times as fast as one, (1, 1k) three 1.88 and two
    1.55, (2, 1k) two 1.19; (4, 512), of 1024 queries a part, 0.95. Without groups no loop gained,
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
    queries = problem.group * rows
    if problem.group == 1 or queries < LEAST_QUERIES:
        return 1
    ctas = problem.batch * problem.kv_heads * -(-problem.kv_len // blocks.block_kv)
    parts = num_sms // ctas
    if mask.right is not None and mask.left is None:
        parts = max(parts, min(2 * num_sms // ctas, (queries - 1) // LEAST_QUERIES))
    return max(1, min(MOST_SPLITS, parts))


def summed(parts, operand):
    """Sums the parts of a gradient in their order; returns it in dtype and shape of `operand`."""
    keys, columns = operand.shape[1], operand.shape[3]
    return functools.reduce(jnp.add, parts)[:, :keys, :, :columns].astype(operand.dtype)


# --- What a CTA knows: its refs, its KV tiles and their range of Q tiles --------------------------


@dataclasses.dataclass(frozen=True)
class FusedCta:
    """The refs and the place of one CTA, as one of its warpgroups sees them.

    Attributes:
        launch: what is the same for all CTAs: the problem, tile sizes and the order of KV tiles.
        gmem: operands in device memory.
        results: dq, dk, dv and dbias in device memory: see `Launch.result_shapes`.
        smem: shared memory, with the mbarriers.
        swizzles: of K and Q, and of V and dO, in shared memory, in bytes.
        q, do, kv: rings of Q, of dO, and of K with V.
        tile: the KV tile.
        q_tiles: its Q tiles.
        wg: number of the warpgroup; an int with `FusedBlocks.whole_dq`.
        kv_tiles: of a persistent CTA: see `Launch.persistent_tiles`. Each KV tile has equally many
            Q tiles. None: there is one KV tile.
        kv_index: number of the KV tile among those of this CTA.
        held_v: V of this warpgroup's keys in registers, with `FusedBlocks.holds_v`.
    """

    launch: Launch
    gmem: BackwardArrays
    results: dict[str, Any]
    smem: FusedSmem
    swizzles: tuple[int, int]
    q: Ring
    do: Ring
    kv: Ring
    tile: KvTile
    q_tiles: QTileRange | QTileList
    wg: Any
    kv_tiles: tuple[Any, Callable[[Any], KvTile]] | None = None
    kv_index: Any = 0
    held_v: Any = None

    @property
    def problem(self) -> Problem:
        """Problem with the head dims that the kernel runs."""
        return self.launch.problem

    @property
    def blocks(self) -> FusedBlocks:
        """Tile sizes of the launch."""
        return self.launch.blocks

    @property
    def interpret(self) -> bool:
        """True under the interpreter."""
        return self.launch.interpret

    @property
    def batch(self):
        """Batch entry of the KV tile."""
        return self.tile[0]

    @property
    def kv_head(self):
        """Head of the KV tile."""
        return self.tile[1]

    @property
    def kv_start(self):
        """First key of the KV tile."""
        return self.tile[2]

    # --- several KV tiles, one after the other ---------------------------------------------------

    def visit(self, body: Callable[[FusedCta, Any], None]):
        """Calls body(self, n) for every KV tile of this CTA; see `at_kv_tile`."""
        if self.kv_tiles is None:
            body(self, 0)
        else:
            pl.loop(jnp.int32(0), self.kv_tiles[0])(functools.partial(body, self))

    def at_kv_tile(self, n) -> FusedCta:
        """Returns this record at its n-th KV tile: rings go on, Q tiles are counted anew."""
        if self.kv_tiles is None:
            return self
        tile = self.kv_tiles[1](n)
        q_tiles = dataclasses.replace(self.q_tiles, shift=tile[3])
        cta = dataclasses.replace(self, kv_index=n, tile=tile, q_tiles=q_tiles)
        before = cta.before
        return dataclasses.replace(
            cta,
            q=dataclasses.replace(self.q, before=before),
            do=dataclasses.replace(self.do, before=before),
        )

    @property
    def before(self):
        """Number of Q tiles of the KV tiles before this one."""
        return 0 if self.kv_tiles is None else self.kv_index * self.q_tiles.total

    @property
    def total(self):
        """Number of Q tiles of all KV tiles of this CTA."""
        total = self.q_tiles.total
        return total if self.kv_tiles is None else self.kv_tiles[0] * total

    def count(self, n):
        """Returns the number of this KV tile's n-th Q tile among all Q tiles of the CTA."""
        return n if self.kv_tiles is None else n + self.before

    @property
    def kv_slot(self):
        """The slot in which K and V lie."""
        return self.kv.slot(self.kv_index)

    @property
    def sums(self) -> Ring:
        """The slots of dS, as a ring for the warpgroup that sums dS of a cluster."""
        return dataclasses.replace(self.smem.sums_ring, before=self.before)

    @property
    def of_whole_tiles(self) -> FusedCta:
        """This record for tiles that lists call whole, where mask and mask_mod hide nothing."""
        launch = dataclasses.replace(self.launch, problem=self.problem.of_whole_tiles)
        return dataclasses.replace(self, launch=launch)

    # --- what the compiler may share -------------------------------------------------------------

    def anew(self) -> FusedCta:
        """Returns this record with a warpgroup index from which nothing is hoisted.

        ptxas holds addresses and descriptors made from `wg` over the loop, and at head dim 64 they
        spill (36 bytes; 60 to 190 for those of K and V).
        """
        if ints.is_static(self.wg):
            return self
        return dataclasses.replace(self, wg=lax.optimization_barrier(self.wg))

    def apart(self) -> FusedCta:
        """Returns this record with numbers from which nothing is shared with another loop.

        Addresses that two loops have in common are held over both: 28 bytes of spills at head dim
        64, which the first of them, the one that matters, loads again in every step.
        """
        opaque = lambda x: x if ints.is_static(x) else lax.optimization_barrier(x)
        tile, q_tiles = tuple(map(opaque, self.tile)), self.q_tiles.apart(opaque)
        cta, kv_index = self.anew(), opaque(self.kv_index)
        return dataclasses.replace(cta, tile=tile, kv_index=kv_index, q_tiles=q_tiles)

    # --- places ----------------------------------------------------------------------------------

    def query_tile(self, n):
        """Returns (query head, rows) of the n-th Q tile."""
        (head, block), block_q = self.q_tiles[n], self.blocks.block_q
        return self.kv_head * self.problem.group + head, pl.ds(block * block_q, block_q)

    def place(self, n) -> Place:
        """Returns the Place of the n-th Q tile against all keys of the KV tile."""
        head, queries = self.query_tile(n)
        rows, columns = self.blocks.block_kv, self.blocks.block_q
        return Place(self.batch, head, self.kv_start, queries.start, rows, columns)

    def own_place(self, n) -> Place:
        """Returns the Place of the n-th Q tile against the keys of this warpgroup."""
        first = self.kv_start + self.wg * WARPGROUP_ROWS
        return self.place(n)._replace(row_start=first, rows=WARPGROUP_ROWS)

    @property
    def own_keys(self):
        """(batch entry, keys of this warpgroup, KV head), an index into dK and dV."""
        rows = pl.ds(self.kv_start + self.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        return self.batch, rows, self.kv_head

    @property
    def own_tiles(self) -> OwnTiles:
        """The dQ tiles that this CTA stores: see dq_sums.py."""
        launch, smem, total = self.launch, self.smem, self.q_tiles.total
        count, flags = dq_sums.num_stored(launch, total), self.results["stored"]

        def place():
            # The compiler would compute what these warps share with others before the branch, and
            # the others would hold it over their loops: 32 bytes spill at head dim 64. So these
            # numbers are hidden from it.
            unknown = functools.partial(inline.unknown, interpret=self.interpret)
            block = lax.div(unknown(self.kv_start), jnp.int32(self.blocks.block_kv))
            return block, launch.pair_of(unknown(self.batch), unknown(self.kv_head))

        return OwnTiles(
            count=count,
            total=total,
            flags=flags,
            place=place,
            num_blocks=launch.num_blocks,
            stored=smem.stored,
            others_stored=smem.others_stored,
        )

    def put_dq(self, tile, wg, reduction_op: Literal["add"] | None = "add"):
        """Starts to add a warpgroup's part of a dQ tile, a `query_tile`, to device memory.

        `reduction_op`: None to store it.
        """
        (head, rows), batch = tile, self.batch
        if (origin := self.gmem.origin) is not None:
            batch, head = batch - origin[0], head - origin[1] * self.problem.group
        if self.blocks.dq_by_rows:
            size = self.dq_shape[0]
            index = batch, pl.ds(rows.start + wg * size, size), head, slice(None)
        else:
            index = batch, rows, head, self.dq_columns(wg)
        target = self.results["dq"].at[index]
        plgpu.copy_smem_to_gmem(self.dq_buffer(wg), target, reduction_op=reduction_op)

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Shape (rows, columns) of the part of dQ that one warpgroup computes."""
        return self.blocks.dq_tile(self.problem.head_dim)

    @property
    def computes_dq(self) -> bool:
        """True if this warpgroup computes dQ or a part of it."""
        return not self.blocks.whole_dq or self.wg in self.blocks.dq_parts

    def dq_columns(self, wg):
        """Returns the columns of dQ that a warpgroup computes."""
        width = self.dq_shape[1]
        return slice(None) if self.blocks.whole_dq else pl.ds(wg * width, width)

    def dq_buffer(self, wg):
        """Returns a warpgroup's part of dQ in shared memory."""
        return self.smem.dq.at[0 if self.blocks.whole_dq else wg]

    def meet(self):
        """Waits until both compute warpgroups have come here."""
        plgpu.barrier_arrive(self.smem.met)
        plgpu.barrier_wait(self.smem.met)
