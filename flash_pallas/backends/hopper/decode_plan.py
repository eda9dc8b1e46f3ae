"""What a CTA of the decode kernel is made of, and which keys it reads."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import integers as ints
from ...core.decode import DecodeProblem
from ..mosaic import inline
from ..mosaic.launch import WARPGROUP_ROWS, float32
from .decode_blocks import DecodeBlocks, piece_rows, tile_rows
from .forward_blocks import native_head_dims
from .inline_columns import WARPS
from .memory import Ring, row_buffer, swizzles, tile_buffer
from .packed_rows import PackedRows
from .products import Products

JOINING_THREADS = 128  # of the one warpgroup that joins a row of shares, one element or more each


class Gmem(NamedTuple):
    """Operands in device memory; row r of a key head is head r % group of query r // group."""

    q: Any  # [B, T, K, group, H]
    k: Any  # [B, S, K, H] or [num_pages, page_size, K, H]
    v: Any  # [B, S, K, Hv] or [num_pages, page_size, K, Hv]
    kv_lengths: Any  # int32[B]
    q_offset: Any  # int32[B], or None: the last query is the last key
    page_table: Any = None  # int32[B, max_pages], or None: the cache is contiguous
    slopes: Any = None  # f32[B, K, group]
    sinks: Any = None  # f32[B, K, group], natural; where there is one split
    k_scale: Any = None  # f32[1, K], f32[B, K] or f32[num_pages, K], of a cache in eight bits
    v_scale: Any = None  # likewise


class Results(NamedTuple):
    """Results in device memory: of each split, or with one split the final ones in q's dtype."""

    o: Any  # f32[B, K, splits, T, group, columns], or [B, T, K, group, Hv]
    lse: Any  # f32[B, K, splits, group, T], or f32[B, K, group, T]; base 2, EMPTY_ROW: no key seen
    shift: Any  # as lse; see core/softmax.py


class Smem(NamedTuple):
    """Shared memory of one CTA. What K and V leave has been read when results are staged there."""

    q: Any  # [rows, H], of as many rows as Plan.tile_rows says
    # ((k [slots, block_kv, H], v [slots, block_kv, Hv]), (o [rows, Hv], lse, shift f32[rows]))
    ring: Any
    raw: Any = None  # blocks of K and V [stages, ...] in eight bits, that the producer widens
    scales: Any = None  # f32[2, slots, pieces], of the pages of the blocks in k and v
    p: Any = None  # [queries, block_kv] weights, where queries are columns
    across: Any = None  # f32[WARPS, queries] that the warps exchange, likewise
    q_scale: Any = None  # f32[queries] that Q was divided by, where it was made float16

    @property
    def k(self):
        """Blocks of K."""
        return self.ring[0][0]

    @property
    def v(self):
        """Blocks of V."""
        return self.ring[0][1]

    @property
    def o(self):
        """Staging of the output."""
        return self.ring[1][0]

    @property
    def lse(self):
        """Staging of the log-sum-exp."""
        return self.ring[1][1]

    @property
    def shift(self):
        """Staging of its shift."""
        return self.ring[1][2]


class Barriers(NamedTuple):
    """mbarriers: k and v one per stage; a full one gets one arrival of each copy."""

    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    v_arrived: Any = None  # the block of V whose end the producer clears
    raw_full: Any = None  # of blocks of K and V in eight bits, that the producer widens


class Keys(NamedTuple):
    """The blocks that a CTA reads: its n-th is first + n * step, from n = 0 to stop.

    Of these [full_start, full_stop) need no mask.
    """

    first: Any
    step: int
    full_start: Any
    full_stop: Any
    stop: Any
    length: Any  # keys of the sequence
    position: Any  # of query 0

    def block(self, n):
        """Which block of keys the n-th is."""
        return self.first + n * self.step

    def zones(self, windowed: bool):
        """(low, high, masked) of each part."""
        left = ((jnp.int32(0), self.full_start, True),) * windowed
        rest = (self.full_start, self.full_stop, False), (self.full_stop, self.stop, True)
        return left + rest


@dataclasses.dataclass(frozen=True)
class Cta:
    """The refs of one CTA, and which it is."""

    gmem: Gmem
    out: Results
    smem: Smem
    bars: Barriers
    k: Ring
    v: Ring
    batch: Any
    head: Any  # of K and V
    tile: Any  # of rows
    split: Any


def combined_columns(v_head_dim: int) -> int:
    """Of a row of a share's O: the threads of a warpgroup divide it evenly."""
    return ints.round_up(v_head_dim, JOINING_THREADS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch.

    Attributes:
        problem: what is computed.
        blocks: tile sizes and the number of splits.
        interpret: run by the interpreter.
    """

    problem: DecodeProblem
    blocks: DecodeBlocks
    interpret: bool

    @property
    def products(self) -> Products:
        """How 16-bit operands lie in memory."""
        dtype = jnp.dtype(jnp.float16) if self.in_registers else self.problem.dtype
        return Products(dtype, self.interpret)

    @property
    def rows(self) -> int:
        """Of all queries and heads that share a key head."""
        return self.problem.q_len * self.problem.group

    @property
    def tile_rows(self) -> int:
        """Of Q in shared memory."""
        return tile_rows(self.problem, self.blocks.upright)

    @property
    def several(self) -> bool:
        """The keys of a sequence are read in several ranges."""
        return self.blocks.num_splits > 1

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of Q and K and of V, as tiles have them."""
        return native_head_dims(self.problem.head_dim, self.problem.v_head_dim)

    @property
    def in_registers(self) -> bool:
        """A cache in eight bits is made float16 by who multiplies it."""
        return self.problem.quantised and self.blocks.upright

    @property
    def in_memory(self) -> bool:
        """A cache in eight bits is widened by the producer."""
        return self.problem.quantised and not self.blocks.upright

    @property
    def slots(self) -> int:
        """Of the rings that products read."""
        return self.blocks.widened if self.in_memory else self.blocks.stages

    @property
    def page_scales(self) -> bool:
        """Scales differ from page to page."""
        return "page_scales" in self.problem.features

    @property
    def piece_rows(self) -> int:
        """Keys of one copy."""
        return piece_rows(self.problem, self.blocks.block_kv)

    @property
    def pieces(self) -> int:
        """Copies of one block of K or V."""
        return self.blocks.block_kv // self.piece_rows

    def packed(self, tile) -> PackedRows:
        """The rows of a tile."""
        first = tile * WARPGROUP_ROWS
        layout = inline.COLS if self.blocks.upright else inline.ROWS
        sizes = self.problem.q_len, self.problem.group
        return PackedRows(*sizes, first, self.interpret, self.tile_rows, layout)

    def by_key_head(self, x, axis: int):
        """x with [N] at `axis` as [K, group]; None is None. No copy."""
        if x is None:
            return None
        heads = self.problem.kv_heads, self.problem.group
        return x.reshape(*x.shape[:axis], *heads, *x.shape[axis + 1 :])

    def result_shapes(self) -> Results:
        """What the launch returns."""
        problem = self.problem
        lead, last = (problem.batch, problem.kv_heads), (problem.q_len, problem.group)
        if self.several:
            lead = (*lead, self.blocks.num_splits)
            o = float32((*lead, *last, combined_columns(self.head_dims[1])))
        else:
            shape = (problem.batch, problem.q_len, *lead[1:], problem.group, problem.v_head_dim)
            o = jax.ShapeDtypeStruct(shape, problem.dtype)
        per_row = float32((*lead, *last[::-1]))
        return Results(o, per_row, per_row)

    def results(self, cta: Cta) -> Results:
        """Where the CTA's rows go: o [T, group, columns], lse and shift [group, T]."""
        if self.several:
            return Results(*(x.at[cta.batch, cta.head, cta.split] for x in cta.out))
        rows = (x.at[cta.batch, cta.head] for x in (cta.out.lse, cta.out.shift))
        return Results(cta.out.o.at[cta.batch, :, cta.head], *rows)

    def copied(self, x) -> tuple:
        """The array of the cache that 16-bit blocks are copied from: none where they are made."""
        return () if self.problem.quantised else (x,)

    def q_swizzle(self, gmem: Gmem) -> int:
        """Of Q in shared memory, in bytes: that of K, with which it is multiplied."""
        return self.products.swizzle(self.head_dims[0], *self.copied(gmem.k))

    def wide_swizzle(self, kind: int) -> int:
        """Of blocks that were widened, of K (0) or V (1), in bytes."""
        summed = self.blocks.block_kv if kind else 0
        return self.products.swizzle(self.head_dims[kind], summed_rows=summed)

    def raw_swizzle(self, kind: int) -> int:
        """Of blocks in eight bits, in bytes."""
        width = (self.problem.head_dim, self.problem.v_head_dim)[kind]
        return swizzles(self.head_dims[kind], self.problem.kv_dtype, width)[0]

    def queries(self, tile):
        """(first, last) query of a tile of rows."""
        if self.rows <= WARPGROUP_ROWS:
            return 0, self.problem.q_len - 1
        first = tile * WARPGROUP_ROWS
        group, last = self.problem.group, first + (WARPGROUP_ROWS - 1)
        most = self.problem.q_len - 1
        return ints.floor_div(first, group), ints.minimum(ints.floor_div(last, group), most)

    @property
    def guesses(self) -> bool:
        """A CTA knows its first blocks before it knows the length."""
        return self.blocks.guesses and self.problem.spec.window_left is None

    def guessed(self, cta: Cta):
        """Of its first `stages` blocks those that there is room for, whatever the length."""
        if not self.guesses:
            return jnp.int32(0)
        room = -(-self.problem.kv_len // self.blocks.block_kv)
        return lax.min(self._uses(cta.split, room), jnp.int32(self.blocks.stages))

    def keys(self, cta: Cta) -> Keys:
        """Every so manieth of the blocks that its rows see, so that all CTAs read neighbours."""
        room, offset = jnp.int32(self.problem.kv_len), cta.gmem.q_offset
        length = lax.clamp(jnp.int32(0), cta.gmem.kv_lengths[cta.batch], room)
        position = length - self.problem.q_len if offset is None else offset[cta.batch]
        first, last = self.queries(cta.tile)
        mask = self.problem.spec.mask
        seen = mask.kv_blocks(position + first, last - first + 1, length, self.blocks.block_kv)
        block = cta.split if mask.left is None else seen.start + cta.split
        return Keys(
            first=block,
            step=self.blocks.num_splits,
            full_start=self._uses(block, seen.full_start),
            full_stop=self._uses(block, seen.full_stop),
            stop=self._uses(block, seen.stop),
            length=length,
            position=position,
        )

    def _uses(self, block, end):
        """How many of block, block + num_splits, ... lie before `end`."""
        return ints.ceil_div(jnp.int32(end - block), self.blocks.num_splits)

    def scratch(self, gmem: Gmem, out: Results) -> tuple[Smem, Barriers]:
        """Shared memory and barriers."""
        (head_dim, v_head_dim), slots = self.head_dims, self.slots
        block, products, rows = self.blocks.block_kv, self.products, self.tile_rows
        barrier = lambda arrivals, number: plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)
        k = products.buffer((slots, block, head_dim), *self.copied(gmem.k))
        v = products.buffer((slots, block, v_head_dim), *self.copied(gmem.v), summed_rows=block)
        ring = self.raw(slots) if self.in_registers else (k, v)
        staging = tile_buffer((rows, v_head_dim), out.o.dtype), *[row_buffer((rows,))] * 2
        q = products.buffer((rows, head_dim), *self.copied(gmem.k))
        smem = Smem(q, plgpu.RefUnion(ring, staging))
        empty, copied = barrier(1, slots), barrier(self.pieces, self.blocks.stages)
        if self.blocks.upright:
            q_scale = row_buffer((rows,)) if self.in_registers else None
            p, across = products.buffer((rows, block)), row_buffer((WARPS, rows))
            smem = smem._replace(p=p, across=across, q_scale=q_scale)
            return smem, Barriers(copied, empty, copied, empty)
        if not self.in_memory:
            return smem, Barriers(copied, empty, copied, empty, barrier(self.pieces, 1))
        scales = row_buffer((2, slots, self.pieces)) if self.page_scales else None
        smem = smem._replace(raw=self.raw(self.blocks.stages), scales=scales)
        full = barrier(1, slots)
        return smem, Barriers(full, empty, full, empty, None, (copied,) * 2)

    def raw(self, stages: int) -> tuple:
        """Blocks of K and of V in eight bits."""
        return tuple(
            tile_buffer(
                (stages, self.blocks.block_kv, width),
                self.problem.kv_dtype,
                self.raw_swizzle(kind),
            )
            for kind, width in enumerate(self.head_dims)
        )
