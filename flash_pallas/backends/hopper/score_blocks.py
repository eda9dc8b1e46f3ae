"""Tile sizes of the kernel for gradients of what modifies scores, and what a launch of it sums."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.problem import Problem
from .forward_blocks import wants_narrow_tiles
from .memory import MOST_SMEM, WARPGROUP_ROWS, vector_bytes
from .side_inputs import SideInputs

ENOUGH_CTAS = 2 * 132  # with fewer, a sum over batch entries and heads is cut into parts


@dataclasses.dataclass(frozen=True)
class ScoreBlocks:
    """The kernel of backward_scores.py.

    Attributes:
        warpgroups: compute warpgroups, 64 query rows each.
        block_kv: keys per step.
        stages: tiles of Q, K, V and dO in flight.
        keep_bias: a CTA that owns a tile of the bias holds it in registers for all its steps.
    """

    warpgroups: int = 2
    block_kv: int = 128
    stages: int = 2
    keep_bias: bool = False

    producer_registers = 24

    @property
    def compute_registers(self) -> int:
        """Of a thread of a compute warpgroup."""
        return {1: 240, 2: 240, 3: 160}[self.warpgroups]

    @property
    def block_q(self) -> int:
        """Queries of a step."""
        return self.warpgroups * WARPGROUP_ROWS


# bf16, H200: 1.08 (head dim 64) to 1.26 (32) times as fast as the next for a tile of the bias. 160
# registers a thread hold the bias, the sums and the accumulators, but no modifier beside them.
OWN_TILE = ScoreBlocks(warpgroups=3, block_kv=64, stages=3, keep_bias=True)
CHOICES = (
    ScoreBlocks(stages=3),
    ScoreBlocks(),
    ScoreBlocks(block_kv=64),
    ScoreBlocks(warpgroups=1, block_kv=64),
    ScoreBlocks(warpgroups=1, block_kv=64, stages=1),
    ScoreBlocks(warpgroups=1, block_kv=32),
    ScoreBlocks(warpgroups=1, block_kv=32, stages=1),
)


@dataclasses.dataclass(frozen=True)
class Sums:
    """What one launch adds up, of the gradient dS of the scores.

    Attributes:
        problem: what is computed, head dims as they run.
        axes: "tile": over batch entries and heads, one sum per query and key; "columns": over
            queries, one per key; "rows": over keys, one per query.
        names: whose gradients: "bias", "alibi_slopes" or the index of a score_param. Only rows has
            more than one.
    """

    problem: Problem
    axes: str
    names: tuple[Any, ...]

    @property
    def holds_bias(self) -> bool:
        """A CTA reads one tile of the bias for all its steps."""
        return self.axes == "tile"

    @property
    def side(self) -> SideInputs:
        """What modifiers read in every step."""
        problem = self.problem
        if self.holds_bias:
            problem = dataclasses.replace(
                problem, bias_shape=None, bias_dtype=None, features=problem.features - {"bias"}
            )
        return SideInputs(problem, q_axis=0)

    @property
    def members(self) -> int:
        """Batch entries times heads that share one entry of the bias; 1 unless axes is "tile"."""
        if self.axes != "tile":
            return 1
        entries, heads = self.problem.bias_shape[:2]
        return (self.problem.batch // entries) * (self.problem.q_heads // heads)

    def parts(self, blocks: ScoreBlocks) -> int:
        """Into how many sums of their own the members are cut, for the sake of enough CTAs."""
        if self.axes != "tile":
            return 1
        entries, heads = self.problem.bias_shape[:2]
        tiles = -(-self.problem.q_len // blocks.block_q) * -(
            -self.problem.kv_len // blocks.block_kv
        )
        return max(1, min(self.members, ENOUGH_CTAS // (entries * heads * tiles)))

    def smem_bytes(self, blocks: ScoreBlocks) -> int:
        """Shared memory without barriers."""
        problem, rows, columns = self.problem, blocks.block_q, blocks.block_kv
        stage = problem.dtype.itemsize * (problem.head_dim + problem.v_head_dim) * (rows + columns)
        per_row = 4 * blocks.stages * rows  # lse; delta
        total = blocks.stages * stage + vector_bytes(per_row, per_row)
        total += self.side.smem_bytes(blocks.stages, rows, columns)
        if self.axes == "tile":
            staging = 0 if self.parts(blocks) == 1 else 4
            total += rows * columns * (problem.bias_dtype.itemsize + staging)
        elif self.axes == "columns":
            total += 4 * rows * columns + vector_bytes(4 * blocks.warpgroups * columns)
        return total + vector_bytes(4 * rows * len(self.names))

    def blocks(self) -> ScoreBlocks:
        """The first choice that fits into shared memory and into registers."""
        spec = self.problem.spec
        modified = spec.softcap or spec.score_mod or spec.mask_mod or spec.dropout_rate
        widest = 64 if self.axes != "rows" and (modified or "mask" in self.side.streams) else 128
        if self.axes == "rows" and wants_narrow_tiles(self.problem):
            widest = 32
        own = self.holds_bias and not (modified or "mask" in self.side.streams)
        own = own and self.problem.dtype.itemsize == 2
        fits = lambda b: b.block_kv <= widest and self.smem_bytes(b) <= MOST_SMEM
        return next(b for b in (OWN_TILE,) * own + CHOICES if fits(b))
