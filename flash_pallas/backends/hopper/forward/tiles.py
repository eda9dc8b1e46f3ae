"""The forward kernel outside its loop: tile sizes, shared memory, and the plan of a CTA."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import bounds
from ....core import integers as ints
from ....core.mask import Limits, Mask
from ....core.problem import Problem
from ...gpu import auxiliary_arrays
from ...gpu.launch import WARPGROUP_ROWS, shared_memory
from ...gpu.online_softmax import far_of
from ...gpu.score_tile import RegisterTile
from ..common.auxiliary_inputs import AuxiliaryInputs, Streamed, many, modifiers, wants_narrow_tiles
from ..common.far_rows import Part
from ..common.pipeline import Padding, Ring, fits, row_buffer
from ..common.wgmma import Matmuls
from .scheduler import SLOTS, Assignment, QueryTile, TileQueue

# --- Tile sizes of the forward kernel: which can be chosen, which are chosen, and why -------------

NATIVE_HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)  # of q and k, and of v, independently


@dataclasses.dataclass(frozen=True)
class ForwardBlocks:
    """Tile sizes and options of the forward kernel.

    Attributes:
        warpgroups: number of compute warpgroups, 64 query rows each.
        block_kv: number of keys per step.
        stages: number of blocks of K, and of V, in flight.
        persistent: one CTA per SM walks many tiles (O is staged next to Q).
        lazy_rescale: O is rescaled only when a row max grew by more than this (base 2); 0: always.
        polynomials: share of the exponentials that the multiply-add units compute, in 16ths.
        speculates: weights are computed relative to the row maxima of earlier blocks, and again
            with new ones only where a partial sum of a row's weights exceeds 2 to this power; 0:
            never. See `speculation` for where that is possible.
        producer: a warpgroup of its own loads; otherwise the last compute warpgroup does.
        packed: the decode kernels run instead, with their own tiles; see decode/packed_forward.py
            for the calls that they take.
    """

    warpgroups: int = 2
    block_kv: int = 128
    stages: int = 2
    persistent: bool = True
    lazy_rescale: float = 0.0
    polynomials: float = 0.0
    speculates: float = 0.0
    producer: bool = True
    packed: bool = False

    @property
    def compute_registers(self) -> int:
        """Registers per thread of a compute warpgroup."""
        return 160 if self.warpgroups == 3 else 240

    @property
    def producer_registers(self) -> int:
        """Registers per thread of the producer; the pool is 65,536 for the CTA."""
        return 32 if self.warpgroups == 3 else 24

    @property
    def weighs_first(self) -> bool:
        """True if float32 weights of capped logits are computed before the wait for the last PV.

        This is 2 to 4 % faster at head dim 128 and 4 to 6 % at 256, but 1 to 7 % slower at 64, with
        160 registers.
        """
        return self.warpgroups < 3

    @property
    def tile_rows(self) -> int:
        """Number of query rows in a CTA's tile."""
        return self.warpgroups * WARPGROUP_ROWS

    def o_in_q(self, head_dim: int, v_head_dim: int) -> bool:
        """Returns whether O is staged in the shared memory of Q."""
        return not self.persistent and head_dim == v_head_dim

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for a problem with native head dims."""
        return shared_memory(scratch(problem, self))

    def speculation(self, problem: Problem) -> float:
        """Returns `speculates` where speculation is possible, else 0; float16 limits it to 14.

        It is not possible where the exact max is wanted; nor in float32, whose weights are split
        after the wait for PV; nor where exponentials are polynomials, which need bounds that a
        guess does not have.
        """
        if problem.spec.max_logit or self.polynomials or problem.dtype == np.float32:
            return 0.0
        return min(self.speculates, MOST_HALF) if problem.dtype == np.float16 else self.speculates


# A weight may be up to 2**20 times that of the largest logit of the blocks before. Any limit serves
# that data seldom reaches and whose square float32 holds.
SPECULATES = 20.0
MOST_HALF = 14.0  # float16 holds weights below 2**16

# By (head dim of q and k, of v). bf16, H200, as ratios to cuDNN over several seconds each; fp16
# runs the same instructions.
TUNED = {
    # Three warpgroups share each block of keys; with four the registers do not reach. Speculating
    # 1.14 to 1.27, causal 1.17 to 1.27; then 96 keys are 6 to 10 % slower, 64 9 to 10 %.
    (64, 64): ForwardBlocks(warpgroups=3, block_kv=128, speculates=SPECULATES),
    # Speculating 1.06 to 1.17 at T = 1k to 16k, causal 1.20 to 1.27 (1k) and 1.30 to 1.38 (4k).
    # block_kv 160 and 176: 3 to 8 % slower, 192 exceeds shared memory when persistent. With Q in
    # registers 40 to 76 bytes spill: 0.99 to 1.02 of this up to T = 2k, 1.05 at 4k causal.
    (128, 128): ForwardBlocks(speculates=SPECULATES),
    # 128 keys per step need more shared memory than there is next to Q and O.
    (192, 128): ForwardBlocks(warpgroups=2, block_kv=96, speculates=SPECULATES),
    # Q and O share shared memory (64 KB each, K and V 128 KB), so not persistent; skipping
    # the rescale of a 64x256 accumulator is worth 6 %, and speculating no more (causal 2 % less).
    (256, 256): ForwardBlocks(warpgroups=2, block_kv=64, persistent=False, lazy_rescale=8.0),
}

# Where `_is_long`. Only without the wait for maxima do three warpgroups pay (0.96 with it). Against
# the two above 1.22 to 1.17 at T = 4k and 16k, 1.29 to 1.20 at 8k with 8 heads of keys for 32; but
# 1.09 to 1.17 at 1k, where the last of a head's tiles of 192 rows is a third full. Causal 1.375 to
# 1.35 at 16k, 1.33 to 1.29 at 8k, 1.30 to 1.38 at 4k. Three stages: up to 5 % slower.
TUNED_LONG = {(128, 128): ForwardBlocks(warpgroups=3, block_kv=64, speculates=SPECULATES)}


def native_head_dims(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Returns the head dims, of q and k and of v, that the kernel runs for the given ones."""
    native = lambda width: next(d for d in NATIVE_HEAD_DIMS if d >= width)
    return native(head_dim), native(v_head_dim)


def native_problem(problem: Problem) -> Problem:
    """Returns the problem with the head dims that the kernel runs, filled up with zero padding."""
    head_dim, v_head_dim = native_head_dims(problem.head_dim, problem.v_head_dim)
    return dataclasses.replace(problem, head_dim=head_dim, v_head_dim=v_head_dim)


def choose_forward(problem: Problem, num_sms: int) -> ForwardBlocks:
    """Chooses the tuned tiles where they fit next to the side inputs, else the largest that do."""
    native = native_problem(problem)
    blocks = _for_lengths(_for_head_dims(native), native, num_sms)
    asked = modifiers(native)
    if "softcap" in asked and native.dtype != np.float32:
        blocks = dataclasses.replace(blocks, polynomials=0.5)
    # A third warpgroup leaves 160 registers to each: spills of 400 to 700 bytes, in the loops too.
    # With dropout, as it speculates, 280; two are 1.12 times as fast.
    if many(asked) or native.spec.dropout_rate:
        blocks = dataclasses.replace(blocks, warpgroups=2)
    if native.dtype == np.float32 and many(asked):
        blocks = dataclasses.replace(blocks, block_kv=32 if wants_narrow_tiles(native) else 64)
    if native.spec.max_logit:
        blocks = dataclasses.replace(blocks, lazy_rescale=0.0)
    blocks = dataclasses.replace(blocks, speculates=blocks.speculation(native))
    for smaller in _SMALLER:
        smaller = dataclasses.replace(blocks, **smaller)
        if fits(scratch(native, smaller)):
            return smaller
    raise AssertionError(f"no tiles of the forward kernel fit {problem}")


def without_producer(blocks: ForwardBlocks, problem: Problem) -> ForwardBlocks:
    """Returns `blocks` without a producer, for when warpgroups cannot trade registers.

    Two warpgroups then have 255 registers a thread. Three have 168 and spill 150 to 250 bytes in
    the loops over masked keys and with a bias, so that only plain problems get them.
    """
    plain = _is_plain(native_problem(problem))
    most = blocks.warpgroups if plain else 2
    return dataclasses.replace(blocks, producer=False, warpgroups=min(blocks.warpgroups, most))


# What to give up, in this order, until shared memory suffices.
_SMALLER = (
    {},
    {"persistent": False},
    {"block_kv": 64},
    {"block_kv": 64, "persistent": False},
    {"block_kv": 64, "persistent": False, "warpgroups": 2},
    {"block_kv": 64, "persistent": False, "warpgroups": 2, "stages": 1},
)


def _is_plain(problem: Problem) -> bool:
    """Returns whether nothing but a causal mask affects the loops over keys."""
    beside = problem.features - {"sinks", "q_lengths"}
    return not beside and not modifiers(problem) and problem.spec.mask.left is None


def _is_long(problem: Problem) -> bool:
    """Returns whether a problem is plain and its tiles have many steps.

    Nothing else was measured with the tiles of TUNED_LONG.
    """
    if not _is_plain(problem) or problem.spec.max_logit:
        return False
    least = 4096 if problem.spec.mask.is_trivial else 8192
    return min(problem.q_len, problem.kv_len) >= least


def _for_head_dims(problem: Problem) -> ForwardBlocks:
    head_dim, v_head_dim = problem.head_dim, problem.v_head_dim
    if problem.dtype == np.float32:
        # P takes twice the registers, K and V twice the shared memory. 128 keys at head dim 64
        # spill 32 bytes.
        return ForwardBlocks(block_kv=96 if max(head_dim, v_head_dim) <= 64 else 64)
    tuned = TUNED | (TUNED_LONG if _is_long(problem) else {})
    if found := tuned.get((head_dim, v_head_dim)):
        return found
    if max(head_dim, v_head_dim) <= 64:
        return ForwardBlocks(warpgroups=3, speculates=SPECULATES)
    # The accumulators of O (64 x v_head_dim) and of S (64 x block_kv) share 240 registers.
    if v_head_dim > 128:
        return ForwardBlocks(block_kv=64, lazy_rescale=8.0)
    return ForwardBlocks(speculates=SPECULATES)


def _for_lengths(blocks: ForwardBlocks, problem: Problem, num_sms: int) -> ForwardBlocks:
    """Returns `blocks` with fewer warpgroups where 64-row tiles are few or 192-row ones too large.

    H200, speedup of tiles of one warpgroup over the usual ones: T=512, 16 heads: 1.32 at head dim
    128, 1.88 at 64; two batch entries of 256 queries: 1.28; 16 queries to 8k keys, 32 heads: 1.31.
    At head dim 64, 32 heads, T=512, 256 tiles of 64 rows, one warpgroup is still faster than two:
    1.54 and 1.39 over the usual.
    """
    measured = blocks in (TUNED[64, 64], TUNED[128, 128])
    if not measured or not _is_plain(problem) or problem.spec.max_logit:
        return blocks
    fewer = lambda n: dataclasses.replace(blocks, warpgroups=n)
    tiles = problem.batch * problem.q_heads * -(-problem.q_len // WARPGROUP_ROWS)
    if problem.q_len <= WARPGROUP_ROWS or tiles <= num_sms:
        return fewer(1)
    if blocks.warpgroups == 3 and _pairs(problem, blocks) > THIRD_GAINS * _pairs(problem, fewer(2)):
        return fewer(2)
    return blocks


# Two warpgroups take so many times as long for a pair of a query and a key as three. H200, head dim
# 64: 1.5 times the pairs (T=256) 1.51 times as fast, 1.35 (512, causal) 1.13, 1.33 (1k, causal)
# 1.13; by wall clock 1.125 (512 and 1k) 0.94 and 0.90, 1.11 (2k, causal) 0.96.
THIRD_GAINS = 1.25


def _pairs(problem: Problem, blocks: ForwardBlocks) -> int:
    """Returns the number of (query, key) pairs in the tiles that one head goes through."""
    mask, rows, offset = problem.spec.mask, blocks.tile_rows, problem.spec.q_offset
    starts = range(0, problem.q_len, rows)
    found = (mask.kv_blocks(s + offset, rows, problem.kv_len, blocks.block_kv) for s in starts)
    return sum((x.stop - x.start) * rows * blocks.block_kv for x in found)


class ForwardSmem(NamedTuple):
    """Shared memory of one CTA."""

    q: Any  # [warpgroups, 64, H]
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]
    o: Any  # [warpgroups, 64, Hv], or None: O is staged in q
    lse: Any  # f32[warpgroups, 64]
    shift: Any  # f32[warpgroups, 64], or None
    most: Any  # f32[warpgroups, 64], or None
    kept: Any  # f32[warpgroups, 64], or None
    side: Streamed  # one slot for each of k's
    tiles: Any = None  # int32[slots, 1], numbers of claimed tiles


class ForwardBarriers(NamedTuple):
    """The mbarriers of a CTA: those of q one per warpgroup, those of k and v one per stage."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    v_arrived: Any = None  # a block of V that has padding to be cleared
    tile_full: Any = None  # the number of a claimed tile


def claims(problem: Problem, blocks: ForwardBlocks) -> bool:
    """Returns whether CTAs claim tiles, because their cost is not known at trace time."""
    return bounds.is_dynamic(problem) and blocks.persistent


def keeps_shift(problem: Problem, blocks: ForwardBlocks) -> bool:
    """Returns whether the shift of rows lies in shared memory, accessed only where there is one.

    A kernel that speculates seldom looks at the row maxima. In registers the shift costs 2 to 4 %
    at head dim 64.
    """
    return bool(far_of(problem.spec, problem.dtype) and blocks.speculation(problem))


def scratch(
    problem: Problem, blocks: ForwardBlocks, q: Any = None, v: Any = None, o: Any = None
) -> tuple[ForwardSmem, ForwardBarriers]:
    """Returns the (shared memory, barriers) that a CTA allocates.

    Args:
        problem: a problem with native head dims.
        blocks: tile sizes.
        q: an operand in device memory; its number of columns decides the layout of tiles, as do
            those of v and o. None where only sizes are wanted.
        v: an operand in device memory, or None.
        o: the result in device memory, or None.
    """
    wgs, stages, block_kv = blocks.warpgroups, blocks.stages, blocks.block_kv
    side, bar = AuxiliaryInputs(problem, q_axis=0), plgpu.Barrier
    tiles, v_shape = Matmuls(problem.dtype).buffer, (stages, block_kv, problem.v_head_dim)
    apart = not blocks.o_in_q(problem.head_dim, problem.v_head_dim)
    given = lambda *arrays: tuple(x for x in arrays if x is not None)
    in_q, of_v, of_o = given(q) if apart else given(q, o), given(v), given(o)
    rows, claimed = (wgs, WARPGROUP_ROWS), claims(problem, blocks)
    smem = ForwardSmem(
        q=tiles((*rows, problem.head_dim), *in_q),
        k=tiles((stages, block_kv, problem.head_dim), *in_q),  # must have the swizzle of Q
        v=tiles(v_shape, *of_v, summed_rows=block_kv),
        o=tiles((*rows, problem.v_head_dim), *of_o) if apart else None,
        lse=row_buffer(rows),
        shift=row_buffer(rows) if far_of(problem.spec, problem.dtype) else None,
        most=row_buffer(rows) if problem.spec.max_logit else None,
        kept=row_buffer(rows) if keeps_shift(problem, blocks) else None,
        side=side.buffers(stages, blocks.tile_rows, block_kv),
        tiles=plgpu.SMEM((SLOTS, 1), jnp.int32) if claimed else None,
    )
    bars = ForwardBarriers(
        q_full=bar(num_barriers=wgs),
        q_empty=bar(num_barriers=wgs) if blocks.persistent else None,
        k_full=bar(num_arrivals=1 + side.copies, num_barriers=stages),
        k_empty=bar(num_arrivals=wgs, num_barriers=stages),
        v_full=bar(num_barriers=stages),
        v_empty=bar(num_arrivals=wgs, num_barriers=stages),
        v_arrived=bar() if bounds.is_dynamic(problem) else None,
        tile_full=bar(num_barriers=SLOTS) if claimed else None,
    )
    return smem, bars


# --- The plan of the forward kernel: the refs of a CTA, its Q tiles and the KV blocks they read ---


class ForwardGmem(NamedTuple):
    """Operands in device memory."""

    q: Any  # [B, T, N, H], an operand of common/wgmma.py, as are k and v
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    table: Any  # int32, see scheduler.py
    q_offset: Any = None  # int32[B]; None unless it is traced
    kv_bounds: Any = (
        None  # int32[B, query tiles, 2], see core/bounds.py; None where arithmetic says
    )
    whole: Any = None  # int32[B, query tiles, 2], bounds.kv_whole; None without segment ids
    padding: Padding | None = None  # of the keys
    side: auxiliary_arrays.AuxiliaryGmem = auxiliary_arrays.AuxiliaryGmem()


class ForwardResults(NamedTuple):
    """Results in device memory; `rows` are those of whole tiles."""

    o: Any  # [B, T, N, Hv], a result of common/wgmma.py
    lse: Any  # f32[B, N, rows], base 2
    shift: Any = None  # f32[B, N, rows], see core/softmax.py; None where no logit can be far
    most: Any = None  # f32[B, N, rows], the largest logit, natural; None unless asked for
    # int32[CTAs, warpgroups, 1]: not 0 where that has left rows to Part.FAR; None unless Part.NEAR
    left: Any = None


class Work(NamedTuple):
    """A Q tile and the KV blocks that it reads."""

    at: QueryTile
    position: Any  # of the tile's first query
    start: Any  # first of its key blocks; the int 0 where all tiles start there
    kv_blocks: Any  # how many; at least one, so that every tile writes its output
    used: Any = 0  # uses of the K and V rings before its first block
    held: Any = None  # side_inputs.Held of a warpgroup's rows

    @property
    def stop(self):
        """One past the last KV block of the tile."""
        return self.kv_blocks if ints.is_static(self.start) else self.start + self.kv_blocks

    def block(self, j):
        """Returns the index of the j-th KV block from the right."""
        return self.stop - 1 - j


class ForwardRows(NamedTuple):
    """State of its rows that a warpgroup carries from step to step."""

    p: Any  # Products.split of the weights of the block whose PV is still to be issued
    maxima: Any  # Maxima of 64 rows; None where ForwardScores.bounded
    l: Any  # f32[64, 8] running sums of each thread's own columns
    only: Any = None  # f32[64], bits of gpu/online_softmax.py; None unless ForwardScores.bounded


@dataclasses.dataclass(frozen=True)
class ForwardCta:
    """The refs of one CTA, as one of its warpgroups sees them."""

    gmem: ForwardGmem
    out: ForwardResults
    smem: ForwardSmem
    k: Ring
    v: Ring
    bars: ForwardBarriers
    index: Any
    wg: Any
    counter: Any = None  # int32[1] in device memory, of tiles claimed beyond the first of each CTA


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """The KV blocks that each Q tile reads, and those of them that it must mask.

    Attributes:
        problem: the attention problem that is computed.
        blocks: tile sizes.
        assignment: the Q tiles of each CTA.
        interpret: run by the interpreter.
        part: the rows that are computed.
    """

    problem: Problem
    blocks: ForwardBlocks
    assignment: Assignment
    interpret: bool
    part: Part = Part.ALL

    @property
    def tile_rows(self) -> int:
        """Number of query rows in a CTA's tile."""
        return self.blocks.warpgroups * WARPGROUP_ROWS

    @property
    def side(self) -> AuxiliaryInputs:
        """The side inputs: what modifiers read besides Q, K and V."""
        return AuxiliaryInputs(self.problem, q_axis=0)

    @property
    def products(self) -> Matmuls:
        """The way in which operands are multiplied."""
        return Matmuls(self.problem.dtype, self.interpret)

    @property
    def dynamic(self) -> bool:
        """True if arrays decide which KV blocks a tile reads."""
        return bounds.is_dynamic(self.problem)

    @property
    def mask(self) -> Mask:
        """The static part of the mask."""
        return self.problem.spec.mask

    @property
    def lazy_rescale(self) -> float:
        """ForwardBlocks.lazy_rescale, but 0 where the exact max is wanted."""
        return 0.0 if self.problem.spec.max_logit else self.blocks.lazy_rescale

    @property
    def speculates(self) -> float:
        """ForwardBlocks.speculates where speculation is possible, else 0."""
        return self.blocks.speculation(self.problem)

    @property
    def far(self) -> float:
        """Magnitude of logits (base 2) beyond which this launch shifts rows; 0: it shifts none."""
        return 0.0 if self.part is Part.NEAR else self.limit

    @property
    def limit(self) -> float:
        """Magnitude of logits (base 2) beyond which rows need a shift; 0: none can be so large."""
        return far_of(self.problem.spec, self.problem.dtype)

    @property
    def keeps_shift(self) -> bool:
        """True if the shift of rows lies in shared memory."""
        return bool(self.far) and keeps_shift(self.problem, self.blocks)

    @property
    def result_names(self) -> tuple[str, ...]:
        """The fields of Results that the launch writes, in their order."""
        wanted = {
            "shift": bool(self.limit),
            "most": self.problem.spec.max_logit,
            "left": self.part is not Part.ALL,
        }
        return tuple(name for name in ForwardResults._fields if wanted.get(name, True))

    @property
    def has_segments(self) -> bool:
        """True if segment ids hide keys."""
        return "kv_segments" in self.problem.features

    def masked_blocks(self) -> tuple[bool, bool]:
        """Returns whether some warpgroup masks KV blocks (left, right) of those that it sees whole.

        The tile's last block does not count, because it is always masked.
        """
        spec = self.problem.spec
        if self.problem.traced_offset:
            return self.mask.left is not None, self.mask.right is not None
        left = right = False
        for row in range(0, self.problem.q_len, WARPGROUP_ROWS):
            tile = row // self.tile_rows * self.tile_rows
            start, count = self.visited(tile + spec.q_offset)
            full_start, full_stop = self.whole(row + spec.q_offset)
            last = start + count - 1
            left |= min(full_start, last) > start
            right |= full_stop < last
        return left, right

    def visited(self, position):
        """Returns (first, count) of the KV blocks of a tile whose first query is at `position`."""
        kv_len, block_kv = self.problem.kv_len, self.blocks.block_kv
        found = self.mask.kv_blocks(position, self.tile_rows, kv_len, block_kv)
        if self.mask.left is None:
            return 0, ints.maximum(found.stop, 1)
        start = ints.minimum(found.start, -(-kv_len // block_kv) - 1)
        return start, ints.maximum(found.stop - start, 1)

    def whole(self, position):
        """Returns (first, one past the last) of the KV blocks that a warpgroup sees whole.

        The first query of the warpgroup is at `position`. The end of the keys does not count as an
        edge: where the keys end, the block is the tile's last, which is masked anyway.
        """
        kv_len = ints.round_up(self.problem.kv_len, self.blocks.block_kv)
        found = self.mask.kv_blocks(position, WARPGROUP_ROWS, kv_len, self.blocks.block_kv)
        return found.full_start, found.full_stop

    @property
    def queue(self) -> TileQueue:
        """The queue of a CTA's tiles."""
        return TileQueue(self.assignment, self.claims, self.interpret)

    @property
    def claims(self) -> bool:
        """True if CTAs claim tiles, because their cost is not known at trace time."""
        return claims(self.problem, self.blocks)

    def work(self, cta: ForwardCta, tile) -> Work:
        """Returns the piece of work with this number; for a number past the last one, any."""
        if self.claims:
            tile = lax.min(tile, jnp.int32(self.assignment.order.total - 1))
        at = self.assignment.order[tile]
        at = jax.tree.map(jnp.int32, at)  # a static start past the array's end would be refused
        offset = self.problem.spec.q_offset
        if self.problem.traced_offset:
            offset = cta.gmem.q_offset[at.batch]
        position = at.block * self.tile_rows + offset
        if self.dynamic:
            start, stop = (cta.gmem.kv_bounds[at.batch, at.block, end] for end in (0, 1))
            count = lax.max(stop - start, jnp.int32(1))
        else:
            start, count = self.visited(position)
        return Work(at, jnp.int32(position), start, jnp.int32(count))

    def zones(self, cta: ForwardCta, work: Work):
        """Returns the loops over blocks, from the right: [(edges, first, one past the last)]."""
        first, last = jnp.int32(1), work.kv_blocks
        if self.has_segments:
            return self.segment_zones(cta, work)
        left, right = self.masked_blocks()
        if not left and not right:
            return [("none", first, last)]
        position = work.position + cta.wg * WARPGROUP_ROWS
        full_start, full_stop = map(jnp.int32, self.whole(position))
        zones, plain = [], first
        if right:
            plain = lax.clamp(first, work.stop - full_stop, last)
            zones.append(("right", first, plain))
        if not left:
            return [*zones, ("none", plain, last)]
        masked = lax.clamp(plain, work.stop - full_start, last)
        return [*zones, ("none", plain, masked), ("left", masked, last)]

    def segment_zones(self, cta: ForwardCta, work: Work):
        """Returns `zones` with segment ids: only blocks inside a document are not masked."""
        first, last = jnp.int32(1), work.kv_blocks
        start, stop = (cta.gmem.whole[work.at.batch, work.at.block, end] for end in (0, 1))
        if not self.mask.is_trivial:
            position = work.position + cta.wg * WARPGROUP_ROWS
            full_start, full_stop = map(jnp.int32, self.whole(position))
            start, stop = lax.max(start, full_start), lax.min(stop, full_stop)
        plain = lax.clamp(first, work.stop - stop, last)
        masked = lax.clamp(plain, work.stop - start, last)
        return [("all", first, plain), ("none", plain, masked), ("all", masked, last)]

    def tile(self, cta: ForwardCta, work: Work, kv_block) -> RegisterTile:
        """Returns the RegisterTile of this warpgroup's scores [64, block_kv] of a KV block."""
        q_start = work.position + cta.wg * WARPGROUP_ROWS
        shape = (WARPGROUP_ROWS, self.blocks.block_kv)
        kv_start = kv_block * self.blocks.block_kv
        precise = self.problem.dtype == jnp.float32
        return RegisterTile(q_start, kv_start, shape, interpret=self.interpret, precise=precise)

    def limits(self, cta: ForwardCta, work: Work, kv_block, edges: str) -> Limits:
        """Returns the limits of what this warpgroup's rows see of a KV block.

        Args:
            cta: the CTA, as the warpgroup sees it.
            work: the Q tile.
            kv_block: index of the KV block.
            edges: what may hide keys of the block: "last" (it may reach past the last key), "left",
                "right", "all" (segment ids and both edges) or "none".
        """
        tile = self.tile(cta, work, kv_block)
        if edges == "none":
            return Limits()
        if edges == "last":
            return tile.limits(self.mask, self.kv_len(cta, work))
        if edges == "all":
            return tile.limits(self.mask)
        left, right = self.mask.left, self.mask.right
        # A band wider than a tile's diagonals never hides keys of one tile on both its sides.
        if left is not None and right is not None and left + right >= sum(tile.shape):
            return tile.limits(Mask(left=left) if edges == "left" else Mask(right=right))
        return tile.limits(self.mask)

    def kv_len(self, cta: ForwardCta, work: Work):
        """Returns where the keys end; None if that is at the end of a block."""
        kv_len = self.problem.kv_len
        if "kv_lengths" in self.problem.features:
            return lax.min(cta.gmem.side.kv_lengths[work.at.batch], jnp.int32(kv_len))
        return kv_len if kv_len % self.blocks.block_kv else None
