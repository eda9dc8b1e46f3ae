"""Tile sizes and the number of splits of the decode kernel: what can be chosen, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.decode import MAX_SPLITS, VALUES_BEHIND_KEYS, DecodeProblem
from ....core.integers import round_up
from ...gpu.launch import WARPGROUP_ROWS, shared_memory
from ...gpu.ptx import draft_bits
from ...gpu.ptx.inline_columns import WARPS
from ..common.pipeline import (
    LENGTH_MULTIPLE,
    SMEM_LIMIT,
    Matmuls,
    Ring,
    row_buffer,
    swizzles,
    tile_buffer,
)
from ..forward.tiles import NATIVE_HEAD_DIMS, native_head_dims

SMEM_PER_SM = 233_472  # bytes of an SM
RESERVED_BYTES = 1024  # that each CTA takes beyond what it asks for
# The start and the end of a CTA cost as much time as so many blocks of keys: the first copies take
# about 1 us, in which an SM's share of 4 TB/s is 32 KB, and so do the last stores.
START_BLOCKS = 2
MOST_STAGES = 8
UPRIGHT_ROWS = 16  # queries times heads of a group: see `takes_upright`
# In flight on each of two CTAs that share an SM. H200, head dim 128, S=32k, us: two
# stages of 32 KB 33.6, three 33.6, four 33.7; B=16 119.9, three 120.3; int8, three of 16 KB 20.5,
# four 20.4, and at B=16 67.1, 67.1 and six 69.1.
UPRIGHT_BYTES = 65_536
NARROWEST_RAW = 32  # bytes of a row of a tile for TMA
MIN_KEYS_PER_SPLIT = 256  # with fewer, the start of a CTA costs as much as what it reads
# Rate of a CTA in eight bits that has an SM to itself. Of two on an SM one widens a block while the
# other multiplies. int8, H200, S=32k: 16 ranges 27.8 us, 32 20.4; B=16, S=8k: one 89.3, two 67.1.
LONE_RATE = 0.7
NEARLY_BEST = 1.01  # of the modelled time: fewer splits write and read fewer partial results
WIDEST = (576, 512)  # head dims of q and k, and of v: those of multi-head latent attention
# Above head dim 256: see `takes_wide`. A block of 32 keys is 70 KB at head dims 576 and 512, so the
# first copies and the last stores cost as much time as one.
WIDE_KEYS = 32
WIDE_START_KEYS = 32
WIDE_UNIT = 64  # columns to a multiple of which tiles are filled up: a row of the widest swizzle
WIDE_MULTIPLE = 16  # columns of an array that a tile with the narrowest swizzle reads in place
PART_COLUMNS = NATIVE_HEAD_DIMS[-1]  # of O that a warpgroup holds: 128 registers of each thread
# Of three warpgroups, which start with 168 registers for each thread, 504 in all. With 256 columns
# of O the compute warpgroups take 169 to 187; with 168 they would spill 128 to 200 bytes and have
# their matmuls serialised. With 192 columns they take 139 to 156, and nothing is traded.
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 224, 56
EVEN_COLUMNS = 192


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    """Tile sizes of the decode kernel, in which a CTA reads a range of keys of one KV head.

    Its rows are (query, head of the group) pairs that share the KV head.

    Attributes:
        block_kv: keys per step, a multiple of 16 up to 256; a multiple of 64 if upright.
        stages: blocks of K and of V in flight. Little's law asks for 4 TB/s times about 1 us of
            latency over 132 SMs, which is 32 KB on each; two or three times that also covers the
            work of a step before it gives its slot back.
        num_splits: number of ranges into which the keys of a sequence are split.
        widened: number of blocks of K and of V that are held in 16 bits at one time, where the
            producer widens a cache in eight bits.
        guesses: the first blocks are copied before the length is known, unless a window or a start
            says which these are.
        upright: queries are the columns of the matmuls, as many as needed; else the rows, always
            64. See `takes_upright`.
        v_stages: blocks of V in flight, one fewer than `stages`; None: as many.
    """

    block_kv: int = 64
    stages: int = 3
    num_splits: int = 1
    widened: int = 1
    guesses: bool = True
    upright: bool = False
    v_stages: int | None = None

    def __post_init__(self):
        if self.block_kv not in range(16, 257, 16):
            raise ValueError(f"block_kv of decode is {self.block_kv!r}: a multiple of 16 up to 256")
        if self.upright and self.block_kv % WARPGROUP_ROWS:
            raise ValueError(f"block_kv of decode is {self.block_kv!r}: upright, a multiple of 64")
        if self.stages < 1:
            raise ValueError(f"stages of decode is {self.stages!r}: at least 1")
        if self.v_stages not in (None, self.stages, self.stages - 1) or self.v_stages == 0:
            raise ValueError(
                f"v_stages of decode is {self.v_stages!r}: `stages` or one fewer, and at least 1"
            )
        if not 1 <= self.num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits is {self.num_splits!r}: from 1 to {MAX_SPLITS}")

    def smem_bytes(self, problem: DecodeProblem) -> int:
        """Returns the bytes of shared memory that a CTA allocates."""
        return shared_memory(DecodeLayout(problem, self, interpret=False).scratch())

    def streamed_bytes(self, problem: DecodeProblem) -> int:
        """Returns the bytes of all stages of K and V, in the dtype of the cache."""
        columns = sum(tile_head_dims(problem, self.upright))
        return self.stages * self.block_kv * columns * problem.kv_dtype.itemsize

    def ctas_per_sm(self, problem: DecodeProblem) -> int:
        """Returns how many CTAs run on an SM at one time: 1 or 2."""
        cta_bytes = self.smem_bytes(problem) + RESERVED_BYTES
        return 2 if self._takes_few_registers(problem) and 2 * cta_bytes <= SMEM_PER_SM else 1

    def _takes_few_registers(self, problem: DecodeProblem) -> bool:
        """Checks for at most 128 registers per thread: two CTAs of 256 threads then share an SM.

        Upright with 16 rows takes 87 registers at head dim 128 (96 with every feature) and 123 at
        head dim 256. With a cache in eight bits it takes 127 (133 with every feature, 115 to 129
        with scales of pages, of 8 rows 92 to 97), and 225 at head dim 256. Not upright takes 124 at
        head dim 128 (128 with softcap, 137 to 147 with a window or starts, 157 with slopes), 204 at
        head dim 256, and 130 with 128 keys at head dim 64.
        """
        if takes_wide(problem):
            return False
        if self.upright and not problem.quantised:
            return True
        narrow = max(problem.head_dim, problem.v_head_dim) <= 128
        held = {"alibi_slopes", "window_left"} | (set() if self.upright else {"kv_starts"})
        positions = problem.spec.window_left is not None or problem.features & held
        return narrow and not positions and (self.upright or self.block_kv <= 64)


def takes_wide(problem: DecodeProblem) -> bool:
    """Checks for a head dim above 256, of q and k or of v.

    Up to UPRIGHT_ROWS queries are columns where blocks of 64 keys fit: two of K and one of V at
    head dim 512, where K is 64 KB and V is 64 KB, or two at head dim 576 where K's tile is V's. A
    step of 64 keys reads 90 KB of K and Q and 82 KB of V and P from shared memory, 1,350 cycles of
    128 bytes; an SM's share of 3.35 TB/s brings 72 KB in 5,000 and 128 KB in 9,000. Slots are given
    back in their own step: at most one other is under way.

    More are rows, of blocks of 32 keys, or 64 where K's tile is V's. Up to two compute warpgroups
    have equal parts of the columns of V and of O. Each computes all scores: that way they never
    wait for one another. At head dims 576 and 512 a step of 32 keys reads 216 KB of Q and K and 32
    KB of V from shared memory, 1,980 cycles; one of 64 keys 352 KB, 2,820. The tensor cores take
    3,330 for those, of which the second computation of the scores is 1,150.

    The producer widens a cache in eight bits, upright too: in registers 64 keys of 576 columns and
    of their 512 values would be 272 of each thread.
    """
    return max(problem.head_dim, problem.v_head_dim) > NATIVE_HEAD_DIMS[-1]


def value_parts(problem: DecodeProblem) -> int:
    """Returns the number of compute warpgroups, which have equal parts of the columns of V."""
    return -(-problem.v_head_dim // PART_COLUMNS)


def tile_head_dims(problem: DecodeProblem, upright: bool) -> tuple[int, int]:
    """Returns the head dims that tiles have, of Q and K and of all parts of V; zeros fill them.

    Where values are columns of the keys, what fills the values up are further columns of those.
    """
    if not takes_wide(problem):
        return native_head_dims(problem.head_dim, problem.v_head_dim)
    parts = 1 if upright else value_parts(problem)
    values = parts * round_up(-(-problem.v_head_dim // parts), WIDE_UNIT)
    keys = round_up(problem.head_dim, WIDE_UNIT)
    return max(keys, values) if shares_tiles(problem) else keys, values


def shares_tiles(problem: DecodeProblem) -> bool:
    """Checks whether the tile of K in shared memory is that of V, too.

    Up to head dim 256 the first columns of the keys are copied once more, the second time from L2.
    """
    return problem.shares_kv and takes_wide(problem)


def trades_registers(problem: DecodeProblem) -> bool:
    """Checks whether the producer gives registers to the compute warpgroups."""
    parts = value_parts(problem)
    return parts > 1 and tile_head_dims(problem, False)[1] > parts * EVEN_COLUMNS


def takes_upright(problem: DecodeProblem) -> bool:
    """Checks whether queries can be, and should be, the columns of the matmuls.

    Keys and columns of V are then the 64 rows of wgmma. A block of 64 keys at head dim 128 takes
    154 instructions of each scheduler for 8 queries, 221 for 16 and 347 for 32, with 53, 87 and 141
    registers; two CTAs have 128 each. Queries as rows always take 313. H200, B=16, S=8k: one token
    of groups of four takes 119.9 us instead of 122.1, but 16 tokens (64 columns) take 133.5 instead
    of 126.0. A cache in eight bits, which the producer would otherwise widen, takes 67.1 us instead
    of 102.9 (int8). The order in which its K and V lie in registers requires head dims of 64, 128
    or 256.
    """
    if takes_wide(problem):
        return wide_upright(problem) is not None
    widths = native_head_dims(problem.head_dim, problem.v_head_dim)
    if problem.q_len * problem.group > UPRIGHT_ROWS or widths[1] % WARPGROUP_ROWS:
        return False
    return not problem.quantised or all(width in (64, 128, 256) for width in widths)


def wide_upright(problem: DecodeProblem) -> DecodeBlocks | None:
    """Returns the deepest upright blocks that fit above head dim 256; None where none do."""
    if problem.q_len * problem.group > UPRIGHT_ROWS:
        return None
    sizes = {"block_kv": WARPGROUP_ROWS, "num_splits": 2, "upright": True}
    if problem.quantised:
        return _deepest_widened(problem, sizes)
    for stages in range(MOST_STAGES, 1, -1):
        for v_stages in (None,) if shares_tiles(problem) else (None, stages - 1):
            blocks = DecodeBlocks(stages=stages, v_stages=v_stages, **sizes)
            if blocks.smem_bytes(problem) <= SMEM_LIMIT:
                return blocks
    return None


def _deepest_widened(problem: DecodeProblem, sizes: dict[str, Any]) -> DecodeBlocks | None:
    """Returns the deepest blocks of these sizes for a cache that the producer widens, or None.

    With two widened blocks it works while the matmuls do. With one a block in eight bits arrives
    all the same while the one before is widened and multiplied.
    """
    for widened, fewest in ((2, 2), (1, 1)):
        for stages in range(MOST_STAGES, fewest - 1, -1):
            blocks = DecodeBlocks(stages=stages, widened=widened, **sizes)
            if blocks.smem_bytes(problem) <= SMEM_LIMIT:
                return blocks
    return None


def wide_rows(problem: DecodeProblem) -> DecodeBlocks:
    """Returns the blocks above head dim 256 where queries are rows.

    Where K's tile is V's, two blocks of 64 keys fit; a step of 64 reads Q once, and not twice. In
    eight bits two widened blocks of 32 keys do.
    """
    if problem.quantised:
        widened = _deepest_widened(problem, {"block_kv": WIDE_KEYS, "num_splits": 2})
        assert widened is not None, f"no blocks fit: {problem}"
        return widened
    for keys in (2 * WIDE_KEYS,) * shares_tiles(problem) + (WIDE_KEYS,):
        for stages in range(MOST_STAGES, 0, -1):
            blocks = DecodeBlocks(keys, stages, num_splits=2)
            if blocks.smem_bytes(problem) <= SMEM_LIMIT and (stages > 1 or keys == WIDE_KEYS):
                return blocks
    raise AssertionError(f"no blocks fit: {problem}")


def row_tiles(problem: DecodeProblem) -> int:
    """Returns how many tiles of 64 rows the queries of one KV head fill."""
    return -(-problem.q_len * problem.group // WARPGROUP_ROWS)


def unsupported(problem: DecodeProblem) -> str | None:
    """Returns why the kernel does not take this problem, or None if it does."""
    if problem.dtype.name not in ("bfloat16", "float16"):
        return f"decodes bfloat16 and float16, not {problem.dtype}: cast q and the cache"
    if problem.spec.v_first:
        return VALUES_BEHIND_KEYS
    scaled = "page_scales" in problem.features
    if problem.dtype.name == "float16" and scaled and not takes_upright(problem):
        return (
            f"multiplies float16 weights of more than {UPRIGHT_ROWS} queries and heads of a group, "
            "or of narrow heads, by no scales of pages: cast q to bfloat16"
        )
    if reason := draft_bits.unsupported(problem):
        return reason
    if problem.spec.page_size is None and problem.kv_len % LENGTH_MULTIPLE:
        return f"decodes caches of a multiple of {LENGTH_MULTIPLE} keys, not {problem.kv_len}"
    if takes_wide(problem):
        return _unsupported_wide(problem)
    native = native_head_dims(problem.head_dim, problem.v_head_dim)
    matmuls = Matmuls(problem.dtype)
    for width, tile in zip((problem.head_dim, problem.v_head_dim), native, strict=True):
        if problem.quantised:
            copies, tile = bool(swizzles(tile, problem.kv_dtype, width)), max(tile, NARROWEST_RAW)
        else:
            copies = matmuls.columns(width, tile) == width
        if not copies:
            return f"would have to copy a cache with head dim {width}: pad it to {tile}"
    return None


def _unsupported_wide(problem: DecodeProblem) -> str | None:
    """Returns why the kernel does not take a problem with a head dim above 256, or None."""
    widths = problem.head_dim, problem.v_head_dim
    multiple = NARROWEST_RAW if problem.quantised else WIDE_MULTIPLE
    for name, width, most in zip(("q and k", "v"), widths, WIDEST, strict=True):
        if width > most:
            return f"decodes head dims of {name} up to {most}, not {width}"
        if rest := -width % multiple:
            return f"would have to copy a cache with head dim {width}: pad it to {width + rest}"
    return None


def choose_decode(problem: DecodeProblem, num_sms: int) -> DecodeBlocks:
    """Chooses a step, stages that leave room for two CTAs per SM (else for one), and splits.

    In 16 bits a step reads 16 KB of K at head dims 64 and 128. Two CTAs share an SM where registers
    allow: the copies of one go on while the other starts, ends or computes. At head dim 128 each
    has 4 KB of Q and two stages of 32 KB, or four stages in eight bits. If not upright, it has 16
    KB of Q and three stages; or four stages in eight bits and 32 KB for a block of K and of V in 16
    bits.
    """
    if takes_wide(problem):
        blocks = wide_upright(problem) or wide_rows(problem)
        return _with_splits(problem, blocks, num_sms)
    upright = takes_upright(problem)
    # H200, head dim 64, B=16, S=8k: 128 keys in three stages 67 us, in six 68, 64 keys in six 78.
    narrow = max(problem.head_dim, problem.v_head_dim) <= 64
    keys, most = (128, 3) if narrow and not problem.quantised else (64, MOST_STAGES)
    # Partial results are staged in float32, the larger case.
    sizes = {"block_kv": keys, "num_splits": 2, "upright": upright}
    deep = [DecodeBlocks(stages=n, **sizes) for n in range(most, 0, -1)]
    fitting = [b for b in deep if b.smem_bytes(problem) <= SMEM_LIMIT]
    shared = [b for b in fitting if b.ctas_per_sm(problem) > 1 and b.stages > 2 - upright]
    if upright:
        shared = [b for b in shared if b.streamed_bytes(problem) <= UPRIGHT_BYTES]
    return _with_splits(problem, (shared or fitting)[0], num_sms)


def _with_splits(problem: DecodeProblem, blocks: DecodeBlocks, num_sms: int) -> DecodeBlocks:
    splits = problem.spec.num_splits or choose_splits(problem, blocks, num_sms)
    return dataclasses.replace(blocks, num_splits=splits)


def choose_splits(problem: DecodeProblem, blocks: DecodeBlocks, num_sms: int) -> int:
    """Returns the fewest splits whose modelled time is nearly the least, for the longest cache.

    Time is counted in KV blocks: those that the busiest SM reads, and START_BLOCKS for each wave of
    CTAs that fit together at one time. H200, 8 KV heads of dim 128, us of the kernel: B=1, S=32k:
    16 splits 33.8 (one CTA on each of 128 SMs), 24 38.5 (two on some), 33 34.4 (two on each), 48
    38.3, 128 39.2; B=16, S=8k: 1 split 123, 2 125, 3 135. A window shortens what is read.

    Upright: 16 splits 33.6, 32 33.8, 33 34.0; B=16: 1 split 119.9, 2 122.8.
    """
    slots = num_sms * blocks.ctas_per_sm(problem)
    tiles = problem.batch * problem.kv_heads * row_tiles(problem)
    visible = problem.kv_len
    if problem.spec.window_left is not None:
        visible = min(visible, problem.spec.window_left + problem.q_len)
    most = max(1, min(MAX_SPLITS, visible // MIN_KEYS_PER_SPLIT))
    keys = max(1, round_up(visible, blocks.block_kv) // blocks.block_kv)
    start = WIDE_START_KEYS / blocks.block_kv if takes_wide(problem) else START_BLOCKS

    def time(splits: int) -> float:
        ctas = tiles * splits
        blocks_read = -(-ctas // num_sms) * -(-keys // splits)
        if problem.quantised and ctas <= num_sms and not takes_wide(problem):
            blocks_read /= LONE_RATE
        return blocks_read + -(-ctas // slots) * start

    best = min(map(time, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if time(n) <= NEARLY_BEST * best)


LEAST_COLUMNS = 8  # of a result of wgmma


class DecodeInputs(NamedTuple):
    """Tiles of a CTA that nothing reads any more when its results are staged.

    In parts, v is [slots, parts, block_kv, part_columns].
    """

    k: Any  # [slots, block_kv, H]
    v: Any = None  # [slots, block_kv, Hv]; None where values are columns of the keys
    q: Any = None  # where room is scarce: see DecodeLayout.stages_over_q


class DecodeSmem(NamedTuple):
    """Shared memory of one CTA. Results are staged where K and V were, after their last read."""

    own_q: Any  # [rows, H], of as many rows as Plan.tile_rows says; None where `ring` has it
    # (DecodeInputs, (o [rows, Hv], lse, shift f32[rows])). In parts, o is [parts, rows,
    # part_columns].
    ring: Any
    raw: Any = None  # blocks of K and V [stages, ...] in eight bits, that the producer widens
    # Of the pages of the blocks, f32[2, slots, pieces]: those of K in the slots of k, those of V in
    # the slots of v, or in those of k where queries are columns.
    scales: Any = None
    p: Any = None  # [queries, block_kv] weights, where queries are columns
    across: Any = None  # f32[WARPS, queries] that the warps exchange, likewise
    q_scale: Any = None  # f32[queries] that Q was divided by, where it was made float16

    @property
    def q(self):
        """The tile of Q."""
        return self.ring[0].q if self.own_q is None else self.own_q

    @property
    def k(self):
        """Slots of K blocks."""
        return self.ring[0].k

    @property
    def v(self):
        """Slots of V blocks."""
        return self.k if self.ring[0].v is None else self.ring[0].v

    @property
    def o(self):
        """Staging buffer of the output."""
        return self.ring[1][0]

    @property
    def lse(self):
        """Staging buffer of the log-sum-exp."""
        return self.ring[1][1]

    @property
    def shift(self):
        """Staging buffer of the shift of the log-sum-exp."""
        return self.ring[1][2]


class DecodeBarriers(NamedTuple):
    """The mbarriers of one CTA.

    A fill of k or v has one arrival of each copy, and that of k another one where scales are handed
    over with it; where the producer widens blocks, one of the producer.
    """

    k: Ring
    v: Ring | None = None  # None where the tile of K is that of V, too
    v_arrived: Any = None  # the block of V whose end the producer clears
    raw: tuple[Ring, ...] = ()  # of blocks of K and V in eight bits, which the producer widens
    met: Any = None  # at which several compute warpgroups meet


def _barrier(arrivals: int):
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=1)


def tile_rows(problem: DecodeProblem, upright: bool) -> int:
    """Returns the rows of Q in shared memory: in eights as columns of a matmul, 64 as its rows."""
    if not upright:
        return WARPGROUP_ROWS
    return round_up(min(problem.q_len * problem.group, WARPGROUP_ROWS), LEAST_COLUMNS)


def piece_rows(problem: DecodeProblem, block_kv: int) -> int:
    """Returns how many keys of a block one copy brings; they lie side by side."""
    return block_kv if problem.part_len is None else math.gcd(block_kv, problem.part_len)


@dataclasses.dataclass(frozen=True)
class DecodeLayout:
    """Use of shared memory by one launch.

    Attributes:
        problem: what is computed.
        blocks: tile sizes and the number of splits.
        interpret: run by the interpreter.
        joined: results are joined with those of another launch, so they are shares even where
            there is one split.
    """

    problem: DecodeProblem
    blocks: DecodeBlocks
    interpret: bool
    joined: bool = False

    @property
    def matmuls(self) -> Matmuls:
        """Products of the 16-bit operands, which decide how those lie in memory."""
        dtype = jnp.dtype(jnp.float16) if self.in_registers else self.problem.dtype
        return Matmuls(dtype, self.interpret)

    @property
    def tile_rows(self) -> int:
        """Rows of Q in shared memory."""
        return tile_rows(self.problem, self.blocks.upright)

    @property
    def several(self) -> bool:
        """True if results are shares: of several ranges of a sequence's keys, or `joined`."""
        return self.joined or self.blocks.num_splits > 1

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dims as tiles have them: (that of Q and K, that of V)."""
        return tile_head_dims(self.problem, self.blocks.upright)

    @property
    def parts(self) -> int:
        """Number of compute warpgroups; see `value_parts`."""
        return 1 if self.blocks.upright else value_parts(self.problem)

    @property
    def part_columns(self) -> int:
        """Columns of V of one compute warpgroup, with the zeros that fill them up."""
        return self.head_dims[1] // self.parts

    @property
    def in_registers(self) -> bool:
        """True if the compute warpgroup makes a cache in eight bits float16, in registers."""
        return self.problem.quantised and self.blocks.upright and not takes_wide(self.problem)

    @property
    def in_memory(self) -> bool:
        """True if the producer widens a cache in eight bits, in shared memory."""
        return self.problem.quantised and not self.in_registers

    @property
    def slots(self) -> int:
        """Number of slots of the rings that matmuls read."""
        return self.blocks.widened if self.in_memory else self.blocks.stages

    @property
    def v_slots(self) -> int:
        """Number of slots of the ring of V."""
        return self.blocks.v_stages or self.slots

    @property
    def shares(self) -> bool:
        """True if the tile of K is that of V, too; its ring is then the only one."""
        return shares_tiles(self.problem)

    def k_swizzle(self, *arrays) -> int:
        """Returns the swizzle of Q and K in bytes, where K is copied from these arrays."""
        summed = self.blocks.block_kv if self.shares else 0
        return self.matmuls.swizzle(self.head_dims[0], *arrays, summed_rows=summed)

    def v_swizzle(self, *arrays) -> int:
        """Returns the swizzle of V in bytes, where it is copied from these arrays."""
        if self.shares:
            return self.k_swizzle(*arrays)
        summed = self.blocks.block_kv
        return self.matmuls.swizzle(self.part_columns, *arrays, summed_rows=summed)

    def p_swizzle(self, *arrays) -> int:
        """Returns the swizzle of P^T in bytes, where V is copied from these arrays.

        It is V's, with which it is multiplied, unless V is widened in registers.
        """
        if self.in_registers:
            return self.matmuls.swizzle(self.blocks.block_kv)
        return self.v_swizzle(*arrays)

    @property
    def defers(self) -> bool:
        """True if V of an upright step is given back when QK^T of the next has been computed."""
        return not self.in_registers and not takes_wide(self.problem)

    @property
    def stages_over_q(self) -> bool:
        """True if results take the place of Q too: 64 rows of 512 float32 are 128 KB."""
        return self.in_memory and takes_wide(self.problem)

    @property
    def page_scales(self) -> bool:
        """True if scales differ from page to page; the producer puts them next to the blocks."""
        return "page_scales" in self.problem.features

    @property
    def piece_rows(self) -> int:
        """Keys that one copy brings."""
        return piece_rows(self.problem, self.blocks.block_kv)

    @property
    def pieces(self) -> int:
        """Number of copies that bring one block of K or V."""
        return self.blocks.block_kv // self.piece_rows

    def copied(self, x) -> tuple:
        """Returns (x,) if 16-bit blocks are copied from cache array x, () if they are made."""
        return () if self.problem.quantised or x is None else (x,)

    def raw_swizzle(self, kind: int) -> int:
        """Returns the swizzle of blocks in eight bits of K (kind 0) or V (1), in bytes.

        It divides a part of V, as the parts are widened one by one.
        """
        width = (self.problem.head_dim, self.problem.v_head_dim)[kind]
        columns = (self.head_dims[0], self.part_columns)[kind]
        return swizzles(columns, self.problem.kv_dtype, width)[0]

    def scratch(self, k: Any = None, v: Any = None) -> tuple[DecodeSmem, DecodeBarriers]:
        """Returns what to allocate for these cache arrays; None will do where only sizes matter."""
        head_dim, v_head_dim, slots = self.head_dims[0], self.part_columns, self.slots
        block, matmuls, rows = self.blocks.block_kv, self.matmuls, self.tile_rows
        of_k, of_v = self.copied(k), self.copied(v)
        tile = lambda shape, swizzle: tile_buffer(shape, matmuls.operand_dtype, swizzle)
        keys = tile((slots, block, head_dim), self.k_swizzle(*of_k))
        part = (self.parts,) if self.parts > 1 else ()
        values = tile((self.v_slots, *part, block, v_head_dim), self.v_swizzle(*of_v))
        q = tile((rows, head_dim), self.k_swizzle(*of_k))
        inputs = DecodeInputs(keys, None if self.shares else values)
        if self.in_registers:
            inputs = DecodeInputs(*self.raw(slots))
        if self.stages_over_q:
            inputs, q = inputs._replace(q=q), None
        o_dtype = jnp.float32 if self.several else self.problem.dtype
        staging = tile_buffer((*part, rows, v_head_dim), o_dtype), *[row_buffer((rows,))] * 2
        smem = DecodeSmem(q, plgpu.RefUnion(inputs, staging))
        if self.blocks.upright:
            q_scale = row_buffer((rows,)) if self.in_registers else None
            p, across = tile((rows, block), self.p_swizzle(*of_v)), row_buffer((WARPS, rows))
            smem = smem._replace(p=p, across=across, q_scale=q_scale)
        if self.page_scales:
            smem = smem._replace(scales=row_buffer((2, slots, self.pieces)))
        if self.in_memory:
            smem = smem._replace(raw=self.raw(self.blocks.stages))
            return smem, self.widened_barriers()
        return smem, self.copied_barriers()

    def copied_barriers(self) -> DecodeBarriers:
        """Returns the barriers where matmuls read blocks as they are copied."""
        parts, copies_of_v = self.parts, self.pieces * self.parts
        k = Ring.declare(self.slots, copies=self.pieces + self.page_scales, readers=parts)
        v = v_arrived = None
        if not self.shares:
            v = Ring.declare(self.v_slots, copies=copies_of_v, readers=parts)
            v_arrived = None if self.blocks.upright else _barrier(copies_of_v)
        meets = not self.blocks.upright and (self.shares or parts > 1)
        return DecodeBarriers(k, v, v_arrived, met=_barrier(parts) if meets else None)

    def widened_barriers(self) -> DecodeBarriers:
        """Returns the barriers of blocks that the producer widens."""
        k = Ring.declare(self.slots, readers=self.parts)
        raw = (Ring.declare(self.blocks.stages, copies=self.pieces, readers=0),) * len(self.kinds)
        met = _barrier(self.parts) if self.parts > 1 else None
        return DecodeBarriers(k, None if self.shares else k, raw=raw, met=met)

    @property
    def kinds(self) -> range:
        """The kinds of blocks that are copied: K (0) and V (1), or K alone."""
        return range(1 if self.shares else 2)

    def raw(self, stages: int) -> tuple:
        """Returns the buffers of blocks in eight bits, of each kind."""
        return tuple(
            tile_buffer(
                (stages, self.blocks.block_kv, self.head_dims[kind]),
                self.problem.kv_dtype,
                self.raw_swizzle(kind),
            )
            for kind in self.kinds
        )
