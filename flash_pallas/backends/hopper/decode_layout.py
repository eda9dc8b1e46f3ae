"""Shared memory and barriers of a CTA of the decode kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.decode import DecodeProblem
from ...core.integers import round_up
from ..mosaic.launch import WARPGROUP_ROWS
from .forward_blocks import native_head_dims
from .inline_columns import WARPS
from .memory import row_buffer, swizzles, tile_buffer
from .products import Products

if TYPE_CHECKING:
    from .decode_blocks import DecodeBlocks

LEAST_COLUMNS = 8  # of a result of wgmma


class Smem(NamedTuple):
    """Shared memory of one CTA. Results are staged where K and V were, after their last read."""

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
        """Slots of K blocks."""
        return self.ring[0][0]

    @property
    def v(self):
        """Slots of V blocks."""
        return self.ring[0][1]

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


class Barriers(NamedTuple):
    """The mbarriers of one CTA: those of k and v, one for each slot.

    A full one gets one arrival of each copy; where the producer widens blocks, one of the producer.
    """

    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    v_arrived: Any = None  # the block of V whose end the producer clears
    raw_full: Any = None  # of blocks of K and V in eight bits, that the producer widens


def tile_rows(problem: DecodeProblem, upright: bool) -> int:
    """Returns the rows of Q in shared memory: in eights as columns of a product, 64 as its rows."""
    if not upright:
        return WARPGROUP_ROWS
    return round_up(min(problem.q_len * problem.group, WARPGROUP_ROWS), LEAST_COLUMNS)


def piece_rows(problem: DecodeProblem, block_kv: int) -> int:
    """Returns how many keys of a block one copy brings; they lie in one page."""
    page_size = problem.spec.page_size
    return block_kv if page_size is None else math.gcd(block_kv, page_size)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Use of shared memory by one launch.

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
        """Products of the 16-bit operands, which decide how those lie in memory."""
        dtype = jnp.dtype(jnp.float16) if self.in_registers else self.problem.dtype
        return Products(dtype, self.interpret)

    @property
    def tile_rows(self) -> int:
        """Rows of Q in shared memory."""
        return tile_rows(self.problem, self.blocks.upright)

    @property
    def several(self) -> bool:
        """True if the keys of a sequence are read in several ranges."""
        return self.blocks.num_splits > 1

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dims as tiles have them: (that of Q and K, that of V)."""
        return native_head_dims(self.problem.head_dim, self.problem.v_head_dim)

    @property
    def in_registers(self) -> bool:
        """True if the compute warpgroup makes a cache in eight bits float16, in registers."""
        return self.problem.quantised and self.blocks.upright

    @property
    def in_memory(self) -> bool:
        """True if the producer widens a cache in eight bits, in shared memory."""
        return self.problem.quantised and not self.blocks.upright

    @property
    def slots(self) -> int:
        """Number of slots of the rings that products read."""
        return self.blocks.widened if self.in_memory else self.blocks.stages

    @property
    def page_scales(self) -> bool:
        """True if scales differ from page to page."""
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
        """Returns the swizzle of blocks in eight bits of K (kind 0) or V (1), in bytes."""
        width = (self.problem.head_dim, self.problem.v_head_dim)[kind]
        return swizzles(self.head_dims[kind], self.problem.kv_dtype, width)[0]

    def scratch(self, k: Any = None, v: Any = None) -> tuple[Smem, Barriers]:
        """Returns what to allocate for these cache arrays; None will do where only sizes matter."""
        (head_dim, v_head_dim), slots = self.head_dims, self.slots
        block, products, rows = self.blocks.block_kv, self.products, self.tile_rows
        barrier = lambda arrivals, number: plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)
        of_k, of_v = self.copied(k), self.copied(v)
        keys = products.buffer((slots, block, head_dim), *of_k)
        values = products.buffer((slots, block, v_head_dim), *of_v, summed_rows=block)
        ring = self.raw(slots) if self.in_registers else (keys, values)
        result = jnp.float32 if self.several else self.problem.dtype
        staging = tile_buffer((rows, v_head_dim), result), *[row_buffer((rows,))] * 2
        q = products.buffer((rows, head_dim), *of_k)
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
        """Returns the buffers of blocks in eight bits, (K, V)."""
        return tuple(
            tile_buffer(
                (stages, self.blocks.block_kv, width),
                self.problem.kv_dtype,
                self.raw_swizzle(kind),
            )
            for kind, width in enumerate(self.head_dims)
        )
