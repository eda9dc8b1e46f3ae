"""The plan of the forward kernel: the refs of a CTA, its Q tiles and the KV blocks they read."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ....core import bounds
from ....core import integers as ints
from ....core.mask import Mask
from ....core.problem import Problem
from ....core.tile import Limits
from ...gpu import auxiliary_arrays
from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.register_tile import RegisterTile
from ...gpu.row_maxima import far_of
from ..common.auxiliary_inputs import AuxiliaryInputs
from ..common.far_rows import Part
from ..common.pipeline import Ring
from ..common.wgmma import Matmuls
from ..common.zero_padding import Padding
from . import tiles
from .scheduler import Assignment, QueryTile, TileQueue
from .tiles import ForwardBarriers, ForwardBlocks, ForwardSmem


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
    only: Any = None  # f32[64], bits of gpu/lone_weight.py; None unless ForwardScores.bounded


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
        return bool(self.far) and tiles.keeps_shift(self.problem, self.blocks)

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
        return tiles.claims(self.problem, self.blocks)

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
