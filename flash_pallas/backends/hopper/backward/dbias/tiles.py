"""Tile sizes of the kernel for gradients of score modifiers, and what a launch of it sums."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Problem
from ....gpu.bias_tiles import BiasTiles, parts_of
from ....gpu.launch import WARPGROUP_ROWS
from ...common.auxiliary_inputs import AuxiliaryInputs, Streamed, wants_narrow_tiles
from ...common.pipeline import Matmuls, Ring, fits, row_buffer, tile_buffer
from ..operands import BackwardArrays

ENOUGH_CTAS = 2 * 132  # with fewer, a sum over batch entries and heads is cut into parts


@dataclasses.dataclass(frozen=True)
class ScoreBlocks:
    """Tile sizes of the kernel for gradients of modifiers.

    Attributes:
        warpgroups: number of compute warpgroups, 64 query rows each.
        block_kv: keys per step.
        stages: tiles of Q, K, V and dO in flight.
        keep_bias: a CTA that owns a tile of the bias holds it in registers for all its steps.
        cluster: number of CTAs with neighbouring keys that load Q, dO, LSE and delta together:
            common/pipeline.py.
        producer: a warpgroup of its own loads; else the last compute warpgroup does.
    """

    warpgroups: int = 2
    block_kv: int = 128
    stages: int = 2
    keep_bias: bool = False
    cluster: int = 1
    producer: bool = True

    compute_registers, producer_registers = 240, 24

    @property
    def block_q(self) -> int:
        """Number of queries per step."""
        return self.warpgroups * WARPGROUP_ROWS


# For a tile of a 16-bit bias: 240 registers a thread hold it next to the sums and two accumulators,
# but no modifier.
KEEPING = (ScoreBlocks(stages=3, keep_bias=True), ScoreBlocks(keep_bias=True))
# bf16, H200: a pair of CTAs is 1.10 to 1.17 (head dim 64) and 1.21 (32) times as fast as two on
# their own. Where the number of key tiles is odd, one CTA of the last pair computes a tile in vain.
PAIR = 2
PAIRS_FROM = 9  # an odd number of tiles, of which a tenth is little enough to waste
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
    """Sums of dS, the gradient of the scores, that one launch computes.

    Attributes:
        problem: what is computed, head dims as they run.
        axes: "tile": over batch entries and heads, one sum per query and key; "columns": over
            queries, one per key; "rows": over keys, one per query.
        names: operands whose gradients these are: "bias", "alibi_slopes" or the index of a
            score_param. Only "rows" has more than one.
    """

    problem: Problem
    axes: str
    names: tuple[Any, ...]

    @property
    def holds_bias(self) -> bool:
        """True if a CTA reads one tile of the bias for all its steps."""
        return self.axes == "tile"

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Auxiliary inputs, which modifiers read in every step."""
        problem = self.problem
        if self.holds_bias:
            problem = dataclasses.replace(
                problem, bias_shape=None, bias_dtype=None, features=problem.features - {"bias"}
            )
        return AuxiliaryInputs(problem, q_axis=0)

    def parts(self, blocks: ScoreBlocks) -> int:
        """Returns the number of sums into which members are split, to have enough CTAs."""
        if self.axes != "tile":
            return 1
        tiles = BiasTiles.of(self.problem, blocks.block_q, blocks.block_kv).clusters
        return parts_of(self.problem, tiles, ENOUGH_CTAS)

    def blocks(self) -> ScoreBlocks:
        """Returns the first choice that fits into shared memory and into registers."""
        modified = bool(self.problem.spec.modifiers)
        narrow = modified or "mask" in self.auxiliary.streams
        if self.holds_bias:  # these would spill 100 and 108 bytes
            wide = self.problem.bias_dtype.itemsize > self.problem.dtype.itemsize
            narrow = narrow or self.problem.hides_by_arrays or wide
        widest = 64 if self.axes != "rows" and narrow else 128
        # Positions of columns take as many registers as the scores: 736 bytes of spills at 128.
        positions = "kv_positions" in self.problem.features
        if self.axes == "rows" and (positions or wants_narrow_tiles(self.problem)):
            widest = 32
        if self.problem.is_listed:
            widest = min(widest, self.problem.list_block[1])
        keeping = () if modified else self.keeping()
        narrow = (b for b in keeping + CHOICES if b.block_kv <= widest)
        return next(b for b in narrow if fits(scratch(self, b)))

    def keeping(self) -> tuple[ScoreBlocks, ...]:
        """Returns choices that keep the bias in registers, if it is all that modifies scores."""
        problem = self.problem
        if not self.holds_bias or problem.features - {"sinks"} != {"bias"}:
            return ()
        if problem.dtype.itemsize != 2 or problem.bias_dtype.itemsize != 2:
            return ()
        tiles = -(-problem.kv_len // ScoreBlocks.block_kv)
        alone = tiles % PAIR and tiles < PAIRS_FROM
        return tuple(dataclasses.replace(b, cluster=1 if alone else PAIR) for b in KEEPING)


LOADED = ("q", "do", "k", "v", "lse", "delta")  # in every step


class DbiasSmem(NamedTuple):
    """Shared memory of one CTA; q, do, k and v are operands of Matmuls."""

    q: Any  # [stages, block_q, D]
    do: Any  # [stages, block_q, Dv]
    k: Any  # [stages, block_kv, D]
    v: Any  # [stages, block_kv, Dv]
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[stages, block_q]
    auxiliary: Streamed | None
    bias: Any  # [block_q, block_kv]; None unless Sums.holds_bias
    sums: Any  # staging; tile: f32[block_q, block_kv], or None: in place of the bias, if there is
    # one part; columns: f32[warpgroups, 64, block_kv or 64]; rows: None
    vectors: Any  # rows: f32[names, block_q]; columns: f32[warpgroups, block_kv or 64]; else None


class DbiasBarriers(NamedTuple):
    """The mbarriers of one CTA."""

    bias: Any
    ring: Ring  # of all tiles that a step reads


def scratch(
    sums: Sums, blocks: ScoreBlocks, arrays: BackwardArrays | None = None
) -> tuple[DbiasSmem, DbiasBarriers]:
    """Returns the shared memory and the barriers to allocate.

    Args:
        sums: what the launch adds up.
        blocks: tile sizes.
        arrays: operands, whose columns decide how tiles lie; None where sizes alone are wanted.
    """
    problem, stages = sums.problem, blocks.stages
    rows, columns = blocks.block_q, blocks.block_kv
    buffer = Matmuls(problem.dtype).buffer

    def tile(length: int, dim: int, name: str):
        copied = () if arrays is None else (getattr(arrays, name),)
        return buffer((stages, length, dim), *copied)

    staging, vectors = None, None
    if sums.axes == "tile" and sums.parts(blocks) > 1:
        staging = tile_buffer((rows, columns), jnp.float32)
    elif sums.axes == "columns":
        wide = max(columns, WARPGROUP_ROWS)  # its transpose is as high as a warpgroup's tiles
        staging = tile_buffer((blocks.warpgroups, WARPGROUP_ROWS, wide), jnp.float32)
        vectors = row_buffer((blocks.warpgroups, wide))
    elif sums.axes == "rows":
        vectors = row_buffer((len(sums.names), rows))
    smem = DbiasSmem(
        q=tile(rows, problem.head_dim, "q"),
        do=tile(rows, problem.v_head_dim, "do"),
        k=tile(columns, problem.head_dim, "k"),
        v=tile(columns, problem.v_head_dim, "v"),
        lse=row_buffer((stages, rows)),
        delta=row_buffer((stages, rows)),
        auxiliary=sums.auxiliary.buffers(stages, rows, columns),
        bias=tile_buffer((rows, columns), problem.bias_dtype) if sums.holds_bias else None,
        sums=staging,
        vectors=vectors,
    )
    bar = plgpu.Barrier
    bars = DbiasBarriers(
        bias=bar() if sums.holds_bias else None,
        ring=Ring.declare(
            stages,
            copies=len(LOADED) + sums.auxiliary.copies,
            readers=blocks.warpgroups,
            cluster=blocks.cluster,
        ),
    )
    return smem, bars
