"""The fused backward outside its kernel: launches, the order of KV tiles, what a CTA knows."""

from __future__ import annotations

import dataclasses
import enum
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
from ....gpu import score_tile
from ....gpu.launch import WARPGROUP_ROWS, float32
from ....gpu.ptx import inline
from ....gpu.ptx.online_softmax import far_of
from ...common import pipeline, tile_lists
from ...common.auxiliary_inputs import Place
from ...common.pipeline import Ring, fits
from .. import dq_sums
from ..dq_sums import OwnTiles
from ..operands import BackwardArrays, QTileList, QTileRange, unshared
from .tiles import (
    FusedBlocks,
    FusedSmem,
    for_far_rows,
    hides_keys,
    may_read,
    may_sum_bias,
    scratch,
    without_sums,
)

# --- Rows with large logits, in a launch of their own ---------------------------------------------
# Most kernels have code for such rows (core/softmax.py) next to the code for all others. Hardly any
# call ever runs it, but at head dim 64 it makes the other code slower, by 6.5 % (H200; benchmarks/
# NOTES.md, "Large logits"). There, the kernel that all calls run has none of it. It leaves groups
# of heads that have such rows to a second launch, which ends at once where there are none. Clusters
# of CTAs, which sum the gradient of a bias, leave all of a call or nothing. In the forward the code
# costs 2.3 % at most (H200, 4,4096,32,64 without a mask; options.json), so it stays in the kernel,
# as at other head dims.

# Pairs of a batch entry and a KV head: the second launch has a CTA for each. One that
# has nothing to do occupies its SM for about a microsecond.
MOST_PAIRS = 512
# Least number of tiles or KV blocks, eight for each SM: in shorter calls 2 us more would show.
ENOUGH = 1056


class Part(enum.Enum):
    """Rows that a launch computes."""

    ALL = "all"
    NEAR = "near"  # rows of heads without large logits
    FAR = "far"  # the rows that NEAR leaves
    ALL_IF_NEAR = "all if near"  # none, if some row of the call has large logits
    ALL_IF_FAR = "all if far"  # none, if no row has


# Operands that do not make small logits large, and do not decide which Q tiles a KV tile has,
# except by a length.
ALLOWED = {"sinks", "kv_lengths", "alibi_slopes", "dropout_keys", "score_params"}


def _leaves_pairs(problem: Problem) -> bool:
    """Returns whether two launches are possible in the fused backward and make it faster.

    It knows beforehand which rows are far, and computes none of them twice. Causal, H200, one
    launch over two: 1.065 and 1.035 of the time at head dim 64 (T=4096 and 1024), 0.991 and 0.987
    at 128 (options.json); 96 went from two to one in 0.96 and 0.99 (T=8192 and 4096;
    versions_options_features.json).

    Args:
        problem: problem with native head dims.
    """
    few = problem.batch * problem.kv_heads <= MOST_PAIRS
    near = problem.dtype.itemsize == 2 and bool(far_of(problem.spec, problem.dtype))
    return problem.head_dim == 64 and problem.features <= ALLOWED and few and near


def _leaves_calls(problem: Problem, tiles: int) -> bool:
    """Returns whether the fused backward that sums a bias's gradient has two launches, one idle.

    H200, B = 128, 4 heads of 64, T=1024 and 2048: 1.05 and 1.07 times as fast as one launch; at 32
    and 16 1.00 and 1.01 (T=1024).

    Args:
        problem: problem with native head dims.
        tiles: number of KV tiles of the call.
    """
    far = bool(far_of(problem.spec, problem.dtype))
    return problem.head_dim == 64 and tiles >= ENOUGH and far


# --- Launches, and the KV tiles of their CTAs -----------------------------------------------------
# The pairs of a batch entry and a head are divided into sections, and CTAs work on one section at a
# time. So CTAs that run together add to different tiles of dQ (KV tiles fastest: 0.94x if causal),
# the longest causal loops start first, and what CTAs read stays in L2. With lists, which say how
# long loops are, CTAs follow the order of the lists instead.
#
# A CTA has one KV tile. Only where there is a launch for rows with large logits, which hardly any
# call has, a CTA of that launch takes all KV tiles of its pair, or none.

# (batch entry, KV head, first key, shift): the shift is that of QTileRange
KvTile = tuple[Any, Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of the kernel: which CTA takes which KV tiles.

    Attributes:
        problem: a problem with the head dims that the kernel runs.
        blocks: tile sizes.
        interpret: run by the interpreter.
        part: the rows that it computes: of a group of query heads with far rows, all or none.
    """

    problem: Problem
    blocks: FusedBlocks
    interpret: bool
    part: Part = Part.ALL

    @property
    def pairs(self) -> int:
        """Number of pairs of a KV head and a batch entry."""
        return self.problem.batch * self.problem.kv_heads

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks of a pair."""
        return -(-self.problem.kv_len // self.blocks.block_kv)

    @property
    def all_kv_tiles(self) -> bool:
        """True if a CTA takes all KV tiles of a pair, one after the other."""
        return self.part in (Part.FAR, Part.ALL_IF_FAR)

    @property
    def staggers(self) -> bool:
        """True if the CTAs of a head start at different Q tiles, in one loop without masks.

        H200, without, full: at head dim 64 1.05 of the time with groups of eight heads (T=8192),
        1.00 to 1.02 without groups, at 16 1.02 (T=1024); where the gradient of a bias is summed
        1.09 at 16 and 1.02 at 32 (options.json). At 128 1.001 to 1.005, with groups of four 0.99.
        """
        if self.problem.head_dim > 64:
            return False
        blocks = self.blocks
        return blocks.sums_bias if blocks.mask_all else not hides_keys(self.problem)

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
        return (
            blocks.split_q == blocks.bias_cluster == 1
            and blocks.producer
            and blocks.mask_all
            and self.part in (Part.ALL, Part.NEAR)
            and dq_sums.allowed(problem, self.num_blocks, self.sections)
            and fits(dq_sums.with_barriers(scratch(problem, blocks)))
        )

    @property
    def grid(self) -> dict[str, int]:
        """The grid of the launch, in clusters."""
        blocks = self.blocks
        if self.all_kv_tiles:
            return {"first": self.pairs // blocks.bias_cluster}
        if self.in_order:
            return {"first": self.pairs * self.num_blocks}
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
        return self.problem.is_listed and not self.all_kv_tiles

    def place(self, gmem: BackwardArrays) -> tuple[Any, Any]:
        """Returns (pair, KV block) of this CTA; the last section may have some pairs too many."""
        if self.in_order:
            batch, kv_head, block = tile_lists.place(
                gmem.lists, lax.axis_index("first"), self.problem.kv_heads
            )
            return self.pair_of(batch, kv_head), block
        within = self.rank("pair")
        pair, block = lax.axis_index("section") * self.at_once + within, lax.axis_index("kv")
        if self.stores_dq:
            block = dq_sums.block_of(self, block)
        return pair, block

    def rank(self, axis: str):
        """Returns the number of this CTA along an axis of the grid, which counts clusters."""
        size = self.blocks.bias_cluster
        return lax.axis_index(axis) * size + pipeline.cluster_rank(size)

    def pair_of(self, batch, kv_head):
        """Returns the number of a pair of this launch."""
        return kv_head * self.problem.batch + batch

    def kv_tiles_of_pair(self, gmem: BackwardArrays) -> tuple[Any, Callable[[Any], KvTile]]:
        """Returns the number of KV tiles of a CTA that takes all of a pair, and which is the n-th.

        The number is 0 where no row of the pair, or of the call, has large logits.
        """
        place = functools.partial(self.kv_tile, self.rank("first"))
        blocks = jnp.int32(self.num_blocks)
        if self.part is Part.ALL_IF_FAR:  # which ends at once where there are none
            return blocks, place
        batch, kv_head, *_ = place(jnp.int32(0))
        far = gmem.auxiliary.far[batch, kv_head]
        return lax.select(far > 0, blocks, jnp.int32(0)), place

    def kv_tile(self, pair, block) -> KvTile:
        """Returns the KV tile of a pair and a block, counted from the first key."""
        entries = jnp.int32(self.problem.batch)
        kv_head = lax.div(pair, entries)
        # With `rem`, 6 entries of 25 heads of 64 columns spill 32 bytes. Without a producer, where
        # ptxas has other registers, the quotient spills 16 bytes at head dim 128.
        batch = pair - kv_head * entries if self.blocks.producer else lax.rem(pair, entries)
        return batch, kv_head, block * self.blocks.block_kv, self.shift(batch, block)

    def shift(self, batch, block):
        """Returns the shift of a CTA's range of Q tiles: the tile that it starts with.

        CTAs that add to the same tiles, of dQ or of a bias's gradient, start at different ones.
        Those of a cluster start at the same one: they load a bias together.
        """
        if not self.staggers:
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

            dq      f32[B, T8, N, D]: sums
            dk, dv  [B, S8, K, D]; with split-Q f32[parts, B, S up to whole tiles, K, D]
            dbias   f32[Bb, Nb, S, T], up to whole tiles: sums; only with bias_cluster
            stored  i32[pairs]: flags of dq_sums.py; only with stores_dq

        `arrays`: operands, whose q, k and v have the shapes of gradients.
        """
        problem, blocks = self.problem, self.blocks
        # dQ is [B, T, N, D] like q: no transpose afterwards, and the adds are as fast as head-major
        # (1.00x).
        sums = (problem.batch, arrays.q.shape[1], problem.q_heads, problem.head_dim)
        dk = jax.ShapeDtypeStruct(arrays.k.shape, problem.dtype)
        dv = jax.ShapeDtypeStruct(arrays.v.shape, problem.dtype)
        if blocks.split_q > 1:  # whole tiles, as what writes them knows no ends
            rows = self.num_blocks * blocks.block_kv
            keys = (problem.batch, rows, problem.kv_heads, problem.head_dim)
            dk = dv = float32((blocks.split_q, *keys))
        shapes = {"dq": float32(sums), "dk": dk, "dv": dv}
        if self.stores_dq:
            shapes["stored"] = jax.ShapeDtypeStruct((self.pairs,), jnp.int32)
        if blocks.sums_bias:
            keys = self.num_blocks * blocks.block_kv
            queries = ints.round_up(problem.q_len, blocks.block_q)
            shapes["dbias"] = float32((*problem.bias_shape[:2], keys, queries))
        return shapes


def launches_of(
    problem: Problem,
    blocks: FusedBlocks,
    arrays: BackwardArrays | None = None,
    interpret: bool = False,
) -> list[Launch]:
    """Returns the launches of a call, in order.

    Args:
        problem: problem with native head dims.
        blocks: tile sizes.
        arrays: operands; None: those of a call with these head dims.
        interpret: run by the interpreter.
    """
    launch, far = Launch(problem, blocks, interpret), for_far_rows(blocks)
    tiles = launch.pairs * launch.num_blocks
    reads = arrays is None or may_read(problem, far, arrays)
    if blocks.sums_bias and reads and _leaves_calls(problem, tiles):
        chosen: tuple[Part, ...] = (Part.ALL_IF_NEAR, Part.ALL_IF_FAR)
    else:
        # Nothing else was tried.
        may_leave = reads and blocks.producer and blocks.split_q == blocks.bias_cluster == 1
        leaves = may_leave and tiles >= ENOUGH and _leaves_pairs(problem)
        chosen = (Part.NEAR, Part.FAR) if leaves else (Part.ALL,)
    launches = [dataclasses.replace(launch, part=x) for x in chosen]
    return [dataclasses.replace(x, blocks=far) if x.all_kv_tiles else x for x in launches]


def fitting(problem: Problem, blocks: FusedBlocks) -> FusedBlocks:
    """Returns `blocks` as `problem` can run them.

    It may be a shard of the call that they were chosen for, and have fewer batch entries that share
    a bias than a cluster has CTAs. Modifiers may rule out `signs` and `defer`, which callers can
    ask for.
    """
    signs = blocks.signs and score_tile.may_sign(problem)
    defer = blocks.defer and score_tile.may_defer(problem)
    blocks = dataclasses.replace(blocks, signs=signs, defer=defer)
    return blocks if may_sum_bias(problem, blocks.bias_cluster) else without_sums(blocks)


MOST_PARTS = 64  # that can be asked for; each has float32 dK and dV
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
        launch: what is the same for all CTAs: the order of KV tiles.
        problem, blocks, interpret: of the launch.
        gmem: operands in device memory.
        results: dq, dk, dv and dbias in device memory: see `Launch.result_shapes`.
        smem: shared memory, with the mbarriers.
        swizzles: of K and Q, and of V and dO, in shared memory, in bytes.
        q, do: rings of Q and of dO.
        batch, kv_head, kv_start, shift: the KV tile; see `KvTile`.
        q_tiles: its Q tiles.
        wg: number of the warpgroup; an int with `FusedBlocks.whole_dq`.
        held_v: V of this warpgroup's keys in registers, with `FusedBlocks.whole_dq`.
    """

    launch: Launch
    problem: Problem
    blocks: FusedBlocks
    interpret: bool
    gmem: BackwardArrays
    results: dict[str, Any]
    smem: FusedSmem
    swizzles: tuple[int, int]
    q: Ring
    do: Ring
    batch: Any
    kv_head: Any
    kv_start: Any
    shift: Any
    q_tiles: QTileRange | QTileList
    wg: Any
    held_v: Any = None

    kv_index = 0  # number of the KV tile among those of this CTA
    before = 0  # number of Q tiles of the KV tiles before this one

    # --- one KV tile; a PairCta has several ------------------------------------------------------

    @property
    def total(self):
        """Number of Q tiles of all KV tiles of this CTA."""
        return self.q_tiles.total

    def count(self, n):
        """Returns the number of this KV tile's n-th Q tile among all Q tiles of the CTA."""
        return n

    @property
    def sums(self) -> Ring:
        """The slots of dS, as a ring for the warpgroup that sums dS of a cluster."""
        return dataclasses.replace(self.smem.sums_ring, before=self.before)

    # --- what the compiler may share -------------------------------------------------------------

    def anew(self) -> FusedCta:
        """Returns this record with a warpgroup index from which nothing is hoisted.

        ptxas holds addresses and descriptors made from `wg` over the loop, and at head dim 64 they
        spill (36 bytes; 60 to 190 for those of K and V).
        """
        return dataclasses.replace(self, wg=unshared(self.wg))

    def apart(self) -> FusedCta:
        """Returns this record with numbers from which nothing is shared with another loop.

        Addresses that two loops have in common are held over both: 28 bytes of spills at head dim
        64, which the first of them, the one that matters, loads again in every step.
        """
        names = ("batch", "kv_head", "kv_start", "shift")
        tile = {name: unshared(getattr(self, name)) for name in names}
        q_tiles = self.q_tiles.apart()
        return dataclasses.replace(self.anew(), **tile, q_tiles=q_tiles)

    # --- places ----------------------------------------------------------------------------------

    def query_tile(self, n):
        """Returns (query head, rows, Q block) of the n-th Q tile."""
        (head, block), block_q = self.q_tiles[n], self.blocks.block_q
        return self.kv_head * self.problem.group + head, pl.ds(block * block_q, block_q), block

    def place(self, n) -> Place:
        """Returns the Place of the n-th Q tile against all keys of the KV tile."""
        head, queries, _ = self.query_tile(n)
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

    def put_dq(self, n, wg, reduction_op: Literal["add"] | None = "add"):
        """Starts to add a warpgroup's part of the n-th dQ tile to device memory.

        `reduction_op`: None to store it.
        """
        (head, rows, _), batch = self.query_tile(n), self.batch
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


@dataclasses.dataclass(frozen=True)
class PairCta(FusedCta):
    """A CTA that takes all KV tiles of a pair, one after the other: `Launch.all_kv_tiles`.

    Attributes:
        kv_tiles: see `Launch.kv_tiles_of_pair`. Each KV tile has equally many Q tiles.
        kv_index: number of the KV tile among those of this CTA.
    """

    kv_tiles: tuple[Any, Callable[[Any], KvTile]] = dataclasses.field(kw_only=True)
    kv_index: Any = 0

    def visit(self, body: Callable[[PairCta], None]):
        """Calls body(cta) for every KV tile, in a loop."""
        pl.loop(jnp.int32(0), self.kv_tiles[0])(lambda n: body(self.at_kv_tile(n)))

    def at_kv_tile(self, n) -> PairCta:
        """Returns this record at its n-th KV tile: rings go on, Q tiles are counted anew."""
        batch, kv_head, kv_start, shift = self.kv_tiles[1](n)
        q_tiles = dataclasses.replace(self.q_tiles, shift=shift)
        before = n * q_tiles.total
        return dataclasses.replace(
            self,
            kv_index=n,
            batch=batch,
            kv_head=kv_head,
            kv_start=kv_start,
            shift=shift,
            q_tiles=q_tiles,
            q=dataclasses.replace(self.q, before=before),
            do=dataclasses.replace(self.do, before=before),
        )

    def again(self) -> PairCta:
        """Returns this record with its place computed anew, where loops would hold it."""
        return self.anew().at_kv_tile(lax.optimization_barrier(self.kv_index))

    def apart(self) -> FusedCta:
        """Returns this record with numbers from which nothing is shared with another loop."""
        return dataclasses.replace(super().apart(), kv_index=unshared(self.kv_index))

    @property
    def before(self):
        """Number of Q tiles of the KV tiles before this one."""
        return self.kv_index * self.q_tiles.total

    @property
    def total(self):
        """Number of Q tiles of all KV tiles of this CTA."""
        return self.kv_tiles[0] * self.q_tiles.total

    def count(self, n):
        """Returns the number of this KV tile's n-th Q tile among all Q tiles of the CTA."""
        return n + self.before
