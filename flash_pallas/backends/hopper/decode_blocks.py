"""Tile sizes and the number of splits of the decode kernel: what can be chosen, and why."""

from __future__ import annotations

import dataclasses
import math

from ...core.decode import MAX_SPLITS, DecodeProblem
from ...core.integers import round_up
from .forward_blocks import BARRIER_BYTES, NATIVE_HEAD_DIMS, native_head_dims
from .memory import SMEM_LIMIT, WARPGROUP_ROWS, swizzles
from .products import LENGTH_MULTIPLE, Products

SMEM_PER_SM = 233_472  # bytes of a multiprocessor
RESERVED_BYTES = 1024  # that each CTA takes beyond what it asks for
# Blocks of keys that the start and the end of a CTA cost as much time as: the first copies take
# about 1 us, in which a multiprocessor's share of 4 TB/s is 32 KB, and so do its last stores.
START_BLOCKS = 2
MOST_STAGES = 8
ALIGNED = 1024  # bytes to a multiple of which buffers start
NARROWEST_RAW = 32  # bytes of a row of a tile for TMA
SCALE_BYTES = 1024  # that those of the pages of a block take at most
MIN_KEYS_PER_SPLIT = 256  # fewer, and starting costs as much as reading
LONE_RATE = 0.7  # of two CTAs, one widens eight bits while the other computes; of one, neither
NEARLY_BEST = 1.01  # of the modelled time: fewer splits write and read fewer partial results


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    """The decode kernel: 64 rows of (query, head of a group), a range of keys per CTA.

    Attributes:
        block_kv: keys per step, a multiple of 16 up to 256.
        stages: blocks of K and of V in flight. Little's law asks for 4 TB/s times about 1 us of
            latency over 132 multiprocessors, 32 KB, on each; two or three times that also covers
            what a step does before it gives its slot back.
        num_splits: ranges that the keys of a sequence are read in.
        widened: of a cache in eight bits, blocks of K and of V made 16-bit ones at one time.
        guesses: the first blocks are copied before the length is known, where there is no window.
    """

    block_kv: int = 64
    stages: int = 3
    num_splits: int = 1
    widened: int = 1
    guesses: bool = True

    def __post_init__(self):
        if self.block_kv not in range(16, 257, 16):
            raise ValueError(f"block_kv of decode is {self.block_kv!r}: a multiple of 16 up to 256")
        if self.stages < 1:
            raise ValueError(f"stages of decode is {self.stages!r}: at least 1")
        if not 1 <= self.num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits is {self.num_splits!r}: from 1 to {MAX_SPLITS}")

    def smem_bytes(self, problem: DecodeProblem) -> int:
        """Shared memory without barriers. Results are staged where K and V were."""
        head_dim, v_head_dim = native_head_dims(problem.head_dim, problem.v_head_dim)
        itemsize, block = problem.dtype.itemsize, self.block_kv * (head_dim + v_head_dim)
        streamed, held = self.stages * block * itemsize, WARPGROUP_ROWS * head_dim * itemsize
        if problem.quantised:
            streamed = self.widened * block * itemsize
            held += self.stages * block * problem.kv_dtype.itemsize
        if "page_scales" in problem.features:
            held += SCALE_BYTES
        staged = WARPGROUP_ROWS * v_head_dim * (4 if self.num_splits > 1 else itemsize)
        return held + max(streamed, round_up(staged + 4 * WARPGROUP_ROWS, ALIGNED))

    def ctas_per_sm(self, problem: DecodeProblem) -> int:
        """How many run on a multiprocessor at one time."""
        each = self.smem_bytes(problem) + BARRIER_BYTES + RESERVED_BYTES
        few = _takes_few_registers(problem) and self.block_kv <= 64
        return 2 if few and 2 * each <= SMEM_PER_SM else 1


def row_tiles(problem: DecodeProblem) -> int:
    """Tiles of 64 rows that the queries of one key head fill."""
    return -(-problem.q_len * problem.group // WARPGROUP_ROWS)


def piece_rows(problem: DecodeProblem, block_kv: int) -> int:
    """Keys of a block that one copy brings: it lies in one page."""
    page_size = problem.spec.page_size
    return block_kv if page_size is None else math.gcd(block_kv, page_size)


def unsupported(problem: DecodeProblem) -> str | None:
    """Why the kernel does not take this problem, or None."""
    widest = max(problem.head_dim, problem.v_head_dim)
    if problem.dtype.name not in ("bfloat16", "float16"):
        return f"decodes bfloat16 and float16, not {problem.dtype}: cast q and the cache"
    if problem.dtype.name == "float16" and "page_scales" in problem.features:
        return "multiplies float16 weights by no scales of pages: cast q to bfloat16"
    if widest > NATIVE_HEAD_DIMS[-1]:
        return f"takes head dims up to {NATIVE_HEAD_DIMS[-1]}, not {widest}"
    if problem.spec.page_size is None and problem.kv_len % LENGTH_MULTIPLE:
        return f"decodes caches of a multiple of {LENGTH_MULTIPLE} keys, not {problem.kv_len}"
    native = native_head_dims(problem.head_dim, problem.v_head_dim)
    products = Products(problem.dtype)
    for width, tile in zip((problem.head_dim, problem.v_head_dim), native, strict=True):
        if problem.quantised:
            copies, tile = bool(swizzles(tile, problem.kv_dtype, width)), max(tile, NARROWEST_RAW)
        else:
            copies = products.columns(width, tile) == width
        if not copies:
            return f"would have to copy a cache with head dim {width}: pad it to {tile}"
    return None


def choose_decode(problem: DecodeProblem, num_sms: int) -> DecodeBlocks:
    """16 KB of K per step, and as many stages as two CTAs have room for, else one.

    Two CTAs share a multiprocessor where registers allow: the copies of one go on while the other
    starts, ends or computes. At head dim 128 each has 16 KB of Q and three stages of 32 KB; or four
    of 16 KB of eight bits and 32 KB for a block of K and of V in 16.
    """
    # H200, head dim 64, B=16, S=8k: 128 keys in three stages 67 us, in six 68, 64 keys in six 78.
    narrow = max(problem.head_dim, problem.v_head_dim) <= 64
    keys, most = (128, 3) if narrow and not problem.quantised else (64, MOST_STAGES)
    # Partial results are staged in float32, the larger case.
    deep = [DecodeBlocks(block_kv=keys, stages=n, num_splits=2) for n in range(most, 0, -1)]
    fitting = [b for b in deep if b.smem_bytes(problem) + BARRIER_BYTES <= SMEM_LIMIT]
    shared = [b for b in fitting if b.stages > 2 and b.ctas_per_sm(problem) > 1]
    blocks = (shared or fitting)[0]
    splits = problem.spec.num_splits or choose_splits(problem, blocks, num_sms)
    return dataclasses.replace(blocks, num_splits=splits)


def _takes_few_registers(problem: DecodeProblem) -> bool:
    """At most 128 per thread, so that two CTAs of 256 threads share a multiprocessor.

    Head dim 128: 124, with softcap 128, with a window 141, with slopes 157. Head dim 256: 204. With
    128 keys at head dim 64, 130: see `ctas_per_sm`.
    """
    narrow = max(problem.head_dim, problem.v_head_dim) <= 128
    positions = problem.spec.window_left is not None or "alibi_slopes" in problem.features
    return narrow and not positions


def choose_splits(problem: DecodeProblem, blocks: DecodeBlocks, num_sms: int) -> int:
    """The fewest ranges that read the longest possible cache in nearly the least modelled time.

    Time is counted in blocks of keys: those that the busiest multiprocessor reads, and what it
    costs to start its CTAs, those that fit together at one time. H200, 8 key heads of dim 128, us
    of the kernel: B=1, S=32k, 16 ranges 33.8 (one CTA on each of 128 multiprocessors), 24 38.5 (two
    on some), 33 34.4 (two on each), 48 38.3, 128 39.2; B=16, S=8k, 1 range 123, 2 125, 3 135.
    A window shortens what is read.

    int8, before loads came first when widening: 16 ranges 44.0, 32 33.3; at B=16, 1 159, 2 114.
    """
    slots = num_sms * blocks.ctas_per_sm(problem)
    tiles = problem.batch * problem.kv_heads * row_tiles(problem)
    visible = problem.kv_len
    if problem.spec.window_left is not None:
        visible = min(visible, problem.spec.window_left + problem.q_len)
    most = max(1, min(MAX_SPLITS, visible // MIN_KEYS_PER_SPLIT))
    keys = max(1, round_up(visible, blocks.block_kv) // blocks.block_kv)

    def time(splits: int) -> float:
        ctas = tiles * splits
        blocks_read = -(-ctas // num_sms) * -(-keys // splits)
        if problem.quantised and ctas <= num_sms:
            blocks_read /= LONE_RATE
        return blocks_read + -(-ctas // slots) * START_BLOCKS

    best = min(map(time, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if time(n) <= NEARLY_BEST * best)
