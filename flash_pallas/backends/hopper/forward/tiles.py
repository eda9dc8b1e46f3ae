"""Tile sizes of the forward kernel, how they are chosen, and its shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import softmax
from ....core.problem import Problem
from ...gpu.launch import WARPGROUP_ROWS, shared_memory
from ...gpu.ptx.online_softmax import far_of
from ..common.auxiliary_inputs import (
    AuxiliaryInputs,
    Streamed,
    many,
    modifiers,
    wants_narrow_tiles,
)
from ..common.pipeline import Matmuls, Ring, fits, row_buffer
from ..common.tile_lists import largest

# --- Tile sizes of the forward kernel: which can be chosen, which are chosen, and why -------------

NATIVE_HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)  # of q and k, and of v, independently


# Slots for the numbers of claimed tiles. One is written again two tiles later: by then its readers
# have released the Q of its tile.
SLOTS = 2


@dataclasses.dataclass(frozen=True)
class ForwardBlocks:
    """Tile sizes and options of the forward kernel.

    Attributes:
        warpgroups: number of compute warpgroups, 64 query rows each.
        block_kv: number of keys per step.
        stages: number of blocks of K, and of V, in flight.
        persistent: one CTA per SM goes through many tiles (O is staged next to Q).
        lazy_rescale: O is rescaled only when a row max grew by more than this (base 2); 0: always.
        polynomials: share of the exponentials that the multiply-add units compute, in 16ths.
        speculates: weights are computed relative to the row maxima of earlier blocks, and again
            with new ones only where a partial sum of a row's weights exceeds 2 to this power; 0:
            never. See `speculation` for where that is possible.
        producer: a warpgroup of its own loads; otherwise the last compute warpgroup does.
        teams: number of teams of a persistent CTA: compute warpgroups with a producer and with
            shared memory of their own, which go through tiles of their own.
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
    teams: int = 1
    packed: bool = False

    def __post_init__(self):
        if self.teams > 1 and (self.warpgroups > 1 or not (self.persistent and self.producer)):
            raise ValueError(
                f"teams of the forward kernel is {self.teams}: 1, or 2 of one warpgroup each in a "
                "persistent kernel with producers"
            )

    @property
    def compute_registers(self) -> int:
        """Registers per thread of a compute warpgroup."""
        if self.teams > 1:
            return 224
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

    def smem_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a CTA, for a problem with native head dims."""
        return shared_memory(team_scratch(problem, self))

    def speculation(self, problem: Problem) -> float:
        """Returns `speculates` where speculation is possible, else 0; float16 limits it to 14.

        It is not possible where the exact max is wanted; nor in float32, whose weights are split
        after the wait for PV; nor where exponentials are polynomials, which need bounds that a
        guess does not have. A bounded softmax has no max to guess.
        """
        exact = problem.spec.max_logit or problem.dtype == np.float32
        if exact or self.polynomials or is_bounded(problem):
            return 0.0
        return min(self.speculates, MOST_HALF) if problem.dtype == np.float16 else self.speculates

    def possible(self, problem: Problem) -> ForwardBlocks:
        """Returns the blocks with only those options that this problem can have.

        Where the exact max is wanted, O is always rescaled. Who speculates is not lazy as well.
        """
        speculates = self.speculation(problem)
        lazy_rescale = 0.0 if problem.spec.max_logit or speculates else self.lazy_rescale
        return dataclasses.replace(self, lazy_rescale=lazy_rescale, speculates=speculates)

    def listed(self, problem: Problem, num_sms: int) -> ForwardBlocks:
        """Returns the blocks with tiles that divide those of a problem's lists, if it has any.

        A tile of one warpgroup has a team to itself if there are more tiles than SMs.
        """
        if not problem.is_listed:
            return self
        rows, columns = problem.list_block
        blocks = self
        if rows % LONG_ROWS == 0 and _hides_only(problem):
            blocks = TUNED_LONG.get((problem.head_dim, problem.v_head_dim), self)
        warpgroups = _dividing(blocks.warpgroups, problem)
        block_kv = largest(columns, blocks.block_kv, 64, 32)
        blocks = dataclasses.replace(blocks, warpgroups=warpgroups, block_kv=block_kv, teams=1)
        few = _tiles(problem) <= num_sms
        if few or warpgroups > 1 or not (blocks.persistent and blocks.producer):
            return blocks
        teamed = dataclasses.replace(blocks, teams=TEAMS)
        return teamed if fits(team_scratch(problem, teamed)) else blocks


# One warpgroup alone leaves the tensor cores idle during its softmax.
TEAMS = 2

# Largest cap, in base 2, at which weights need not be relative to a row maximum.
MOST_BOUNDED = 80.0

# A weight may be up to 2**20 times that of the largest logit of the blocks before. Any limit serves
# that data seldom reaches and whose square fits float32.
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
    # H100: 1.02 to 1.08 of a lazy rescale (forward_tiles.json); 80, 96 and 112 keys are up to 1.08
    # at 16k, and 0.76 to 1.03 at 1k. Where it cannot speculate it is as lazy as at 256.
    (192, 192): ForwardBlocks(block_kv=64, lazy_rescale=8.0, speculates=SPECULATES),
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
TUNED_LONG = {
    # H100, 8k and 16k: 1.14 and 1.12 of two with 128 keys, causal 1.08 and 1.09; with 96 keys 1.04
    # to 1.09, 80 1.03 to 1.07, 64 1.03 to 1.05 (forward_tiles.json).
    (96, 96): ForwardBlocks(warpgroups=3, block_kv=112, speculates=SPECULATES),
    (128, 128): ForwardBlocks(warpgroups=3, block_kv=64, speculates=SPECULATES),
}
# Lists of blocks of so many queries have these tiles too: H200, 32k tokens, causal and a prefix of
# 4,096 keys 1.03 to 1.08 of blocks of 128.
LONG_ROWS = 3 * WARPGROUP_ROWS


def native_head_dims(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Returns the head dims, of q and k and of v, that the kernel runs for the given ones."""
    native = lambda width: next(dim for dim in NATIVE_HEAD_DIMS if dim >= width)
    return native(head_dim), native(v_head_dim)


def native_problem(problem: Problem) -> Problem:
    """Returns the problem with the head dims that the kernel runs, filled up with zero padding."""
    head_dim, v_head_dim = native_head_dims(problem.head_dim, problem.v_head_dim)
    return dataclasses.replace(problem, head_dim=head_dim, v_head_dim=v_head_dim)


def choose_forward(problem: Problem, num_sms: int) -> ForwardBlocks:
    """Chooses the tuned tiles if they fit with the auxiliary inputs, else the largest that do."""
    native = native_problem(problem)
    tuned = TUNED | (TUNED_LONG if _is_long(native) else {})
    blocks = _for_lengths(_for_head_dims(native, tuned), native, num_sms)
    asked = modifiers(native)
    if is_bounded(native):
        blocks = dataclasses.replace(blocks, polynomials=_polynomials(native))
    # A third warpgroup leaves 160 registers to each: spills of 400 to 700 bytes, in the loops too.
    # With dropout, as it speculates, 280; two are 1.12 times as fast.
    if many(asked) or native.spec.dropout_rate:
        blocks = dataclasses.replace(blocks, warpgroups=2)
    if native.dtype == np.float32 and many(asked):
        blocks = dataclasses.replace(blocks, block_kv=32 if wants_narrow_tiles(native) else 64)
    blocks = blocks.possible(native).listed(native, num_sms)
    for smaller in _SMALLER:
        smaller = dataclasses.replace(blocks, **smaller).listed(native, num_sms)
        if fits(team_scratch(native, smaller)):
            return smaller
    raise AssertionError(f"no tiles of the forward kernel fit {problem}")


def _polynomials(problem: Problem) -> float:
    """Returns the share of the exponentials of a bounded softmax that are polynomials.

    They pay where logits are large, so that tangents occupy the special function units. Causal,
    scale 1, softcap 50, H200, without them: 1.12 of the time at head dim 64, 1.03 at 128, 0.93 at
    256; 192 was not timed. A bias takes time of the multiply-add units: of the time at 7b104c5, a
    tile of it at 128 takes 0.994 with a quarter, 1.009 with 0.3125 and 1.033 without; without any,
    a tile at 64 takes 0.949 and a bias of keys at 128 0.904 (versions_options_steps.json).
    """
    if problem.head_dim > 192:
        return 0.0
    if problem.bias_shape is None:
        return 0.5
    tile = AuxiliaryInputs(problem, q_axis=0).kind(problem.bias_shape) == "tile"
    return 0.25 if tile and problem.head_dim > 64 else 0.0


def without_producer(blocks: ForwardBlocks, problem: Problem) -> ForwardBlocks:
    """Returns `blocks` without a producer, for when warpgroups cannot trade registers.

    Two warpgroups then have 255 registers a thread. Three have 168 and spill 150 to 250 bytes in
    the loops over masked keys and with a bias, so that only plain problems get them.
    """
    native = native_problem(problem)
    most = blocks.warpgroups if is_plain(native) else 2
    dims = native.head_dim, native.v_head_dim
    fits_without = most == blocks.warpgroups and dims != (96, 96)  # 112 keys spill 76 bytes
    long = blocks == TUNED_LONG.get(dims) and not native.is_listed  # lists keep their tiles
    if long and not fits_without:
        blocks = _for_head_dims(native, TUNED)
    warpgroups = _dividing(min(blocks.warpgroups, most), native)
    return dataclasses.replace(blocks, producer=False, warpgroups=warpgroups, teams=1)


# Changes that are tried in this order until shared memory suffices.
_SMALLER = (
    {},
    {"persistent": False},
    {"block_kv": 64},
    {"block_kv": 64, "persistent": False},
    {"block_kv": 64, "persistent": False, "warpgroups": 2},
    {"block_kv": 64, "persistent": False, "warpgroups": 2, "stages": 1},
)


def _dividing(most: int, problem: Problem) -> int:
    """Returns the largest number of warpgroups whose rows divide the blocks of a call's lists."""
    numbers = range(most, 0, -1)
    return next(n for n in numbers if problem.takes_tiles(n * WARPGROUP_ROWS, 1))


def is_plain(problem: Problem) -> bool:
    """Returns whether nothing but a causal mask affects the loops over keys."""
    others = problem.features - {"sinks", "q_lengths"}
    return not others and not modifiers(problem) and problem.spec.mask.left is None


def is_bounded(problem: Problem) -> bool:
    """Returns whether logits are capped so low that weights are not taken relative to a row max.

    bfloat16 and float32 have as many digits at 2**80 as at 1, and a sum of a million weights
    times values of 2**26 still fits. This saves the max, the rescaling of O, and the wait of
    every exponential for the whole row. But the largest weight of a row is then not 1, and
    rounding it shows: see gpu/ptx/online_softmax.py.
    """
    spec = problem.spec
    return (
        spec.softcap is not None
        and spec.softcap * softmax.LOG2E <= MOST_BOUNDED
        and spec.only_caps
        and not spec.max_logit
        and problem.dtype == jnp.bfloat16
    )


def _hides_only(problem: Problem) -> bool:
    """Returns whether a listed problem has lists, mask_mod and sinks but no other modifier."""
    others = problem.features - {"block_lists", "mask_params", "sinks", "q_lengths"}
    modified = problem.spec.modifiers - {"mask_mod"} or problem.spec.max_logit
    return not others and not modified and problem.dtype != np.float32


def _is_long(problem: Problem) -> bool:
    """Returns whether a problem is plain, or packed, and its tiles have many steps.

    Nothing else was measured with the tiles of TUNED_LONG.
    """
    packed = problem.is_packed and not problem.spec.modifiers
    packed &= problem.head_dim > 96  # whose 112 keys spill 60 bytes there
    if not (packed or is_plain(problem)) or problem.spec.max_logit:
        return False
    least = 4096 if problem.spec.mask.is_trivial and not packed else 8192
    return min(problem.q_len, problem.kv_len) >= least


def _for_head_dims(problem: Problem, tuned: dict[tuple[int, int], ForwardBlocks]) -> ForwardBlocks:
    head_dim, v_head_dim = problem.head_dim, problem.v_head_dim
    if problem.dtype == np.float32:
        # P takes twice the registers, K and V twice the shared memory. 128 keys at head dim 64
        # spill 32 bytes.
        return ForwardBlocks(block_kv=96 if max(head_dim, v_head_dim) <= 64 else 64)
    if blocks := tuned.get((head_dim, v_head_dim)):
        return blocks
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
    if not measured or not is_plain(problem) or problem.spec.max_logit:
        return blocks
    fewer = lambda n: dataclasses.replace(blocks, warpgroups=n)
    if problem.q_len <= WARPGROUP_ROWS or _tiles(problem) <= num_sms:
        return fewer(1)
    if blocks.warpgroups == 3 and _pairs(problem, blocks) > THIRD_GAINS * _pairs(problem, fewer(2)):
        return fewer(2)
    return blocks


def _tiles(problem: Problem) -> int:
    """Returns the number of tiles of one warpgroup's rows."""
    return problem.batch * problem.q_heads * -(-problem.q_len // WARPGROUP_ROWS)


# The decode kernels were faster from so many keys on, and so many for each query.
LEAST_KEYS, KEYS_PER_QUERY = 1024, 16


def may_pack(problem: Problem) -> bool:
    """Returns whether the decode kernels may be faster; decode/packed_forward.py says if they are.

    They may with few queries, many keys and no window.
    """
    least = max(LEAST_KEYS, KEYS_PER_QUERY * problem.q_len)
    return problem.spec.mask.left is None and problem.kv_len >= least


# For a pair of a query and a key two warpgroups take so many times as long as three. H200, head dim
# 64: 1.5 times the pairs (T=256) 1.51 times as fast, 1.35 (512, causal) 1.13, 1.33 (1k, causal)
# 1.13; by wall clock 1.125 (512 and 1k) 0.94 and 0.90, 1.11 (2k, causal) 0.96.
THIRD_GAINS = 1.25


def _pairs(problem: Problem, blocks: ForwardBlocks) -> int:
    """Returns the number of (query, key) pairs in the tiles that one head goes through."""
    mask, rows, offset = problem.spec.mask, blocks.tile_rows, problem.spec.q_offset
    starts = range(0, problem.q_len, rows)
    ranges = (mask.kv_blocks(s + offset, rows, problem.kv_len, blocks.block_kv) for s in starts)
    return sum((x.stop - x.start) * rows * blocks.block_kv for x in ranges)


class ForwardSmem(NamedTuple):
    """Shared memory of one team and its mbarriers: of q one per warpgroup, of k and v per stage."""

    q: Any  # [warpgroups, 64, H]
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]
    o: Any  # [warpgroups, 64, Hv], or None: O is staged in q
    lse_log2: Any  # f32[warpgroups, 64]
    shift: Any  # f32[warpgroups, 64], or None
    max_logit: Any  # f32[warpgroups, 64], or None
    # f32[warpgroups, 64], see online_softmax.Maxima; None unless the kernel speculates, and so
    # seldom looks at the row maxima. In registers the shift costs 2 to 4 % at head dim 64.
    running_shift: Any
    aux: Streamed | None  # auxiliary inputs, one slot for each of k's
    tile_numbers: Any  # int32[SLOTS, 1] of claimed tiles, or None
    tangents: Any  # TangentTiles of q, k, v and auxiliary inputs, in slots alike; or None

    q_full: Any
    q_empty: Any
    k_ring: Ring  # with the auxiliary inputs
    v_ring: Ring
    v_arrived: Any  # a block of V whose padding is to be zeroed; or None
    tile_full: Any  # the number of a claimed tile; or None


def claims_tiles(problem: Problem, blocks: ForwardBlocks) -> bool:
    """Returns whether CTAs claim tiles, because their cost is not known at trace time."""
    return problem.is_dynamic and blocks.persistent


def scratch(
    problem: Problem, blocks: ForwardBlocks, q: Any = None, v: Any = None, o: Any = None
) -> ForwardSmem:
    """Returns the shared memory and the barriers of one team of a CTA.

    Args:
        problem: a problem with native head dims.
        blocks: tile sizes.
        q: an operand in device memory; its number of columns decides the layout of tiles, as do
            those of v and o. None where only sizes are wanted, as are they.
        v: an operand in device memory, or None.
        o: the result in device memory, or None.
    """
    wgs, stages, block_kv = blocks.warpgroups, blocks.stages, blocks.block_kv
    aux, bar = AuxiliaryInputs(problem, q_axis=0), plgpu.Barrier
    tiles, v_shape = Matmuls(problem.dtype).buffer, (stages, block_kv, problem.v_head_dim)
    # O is staged in the shared memory of Q where no Q comes after it.
    apart = blocks.persistent or problem.head_dim != problem.v_head_dim
    in_q = (q,) if apart else (q, o)
    rows, claims = (wgs, WARPGROUP_ROWS), claims_tiles(problem, blocks)
    far = far_of(problem.spec, problem.dtype)
    return ForwardSmem(
        q=tiles((*rows, problem.head_dim), *in_q),
        k=tiles((stages, block_kv, problem.head_dim), *in_q),  # must have the swizzle of Q
        v=tiles(v_shape, v, summed_rows=block_kv),
        o=tiles((*rows, problem.v_head_dim), o) if apart else None,
        lse_log2=row_buffer(rows),
        shift=row_buffer(rows) if far else None,
        max_logit=row_buffer(rows) if problem.spec.max_logit else None,
        running_shift=row_buffer(rows) if far and blocks.speculation(problem) else None,
        aux=aux.buffers(stages, blocks.tile_rows, block_kv),
        tile_numbers=plgpu.SMEM((SLOTS, 1), jnp.int32) if claims else None,
        tangents=None,
        q_full=bar(num_barriers=wgs),
        q_empty=bar(num_barriers=wgs) if blocks.persistent else None,
        k_ring=Ring.declare(stages, copies=1 + aux.copies, readers=wgs),
        v_ring=Ring.declare(stages, readers=wgs),
        v_arrived=bar() if problem.is_dynamic else None,
        tile_full=bar(num_barriers=SLOTS) if claims else None,
    )


def team_scratch(problem: Problem, blocks: ForwardBlocks, *arrays) -> tuple[ForwardSmem, ...]:
    """Returns what a CTA allocates, `scratch` for each of its teams."""
    return (scratch(problem, blocks, *arrays),) * blocks.teams
