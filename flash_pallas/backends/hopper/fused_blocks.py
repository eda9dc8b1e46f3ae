"""Tile sizes of the fused backward: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses

from ...core.problem import Problem
from .key_walk import mask_everywhere
from .memory import MOST_SMEM, WARPGROUP_ROWS, vector_bytes
from .side_inputs import SideInputs


@dataclasses.dataclass(frozen=True)
class FusedBlocks:
    """The fused backward: 128 keys and two compute warpgroups per CTA.

    Attributes:
        block_q: queries per step.
        stages, do_stages: tiles of Q and of dO in flight.
        ds_stages: slots for dS; with one, the warpgroups meet twice per step.
        mask_all: one loop that masks every tile (if the mask hides anything), instead of a loop for
            the masked tiles and one for the rest: fewer registers, more instructions.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    mask_all: bool = False

    block_kv = 2 * WARPGROUP_ROWS
    compute_registers = 240
    producer_registers = 24

    @property
    def dq_by_rows(self) -> bool:
        """Each warpgroup computes half of dQ's rows (64 of 128), else half of its columns."""
        return self.block_q == 2 * WARPGROUP_ROWS

    def dq_tile(self, head_dim: int) -> tuple[int, int]:
        """What one warpgroup computes of dQ."""
        if self.dq_by_rows:
            return self.block_q // 2, head_dim
        return self.block_q, head_dim // 2

    def smem_bytes(self, problem: Problem) -> int:
        """Shared memory without barriers, for the head dim that runs."""
        head_dim = problem.head_dim
        tiles = (self.stages + self.do_stages) * self.block_q * head_dim
        keys = 2 * self.block_kv * head_dim + self.ds_stages * self.block_kv * self.block_q
        rows = vector_bytes(4 * self.stages * self.block_q, 4 * self.do_stages * self.block_q)
        side = SideInputs(problem, q_axis=1).smem_bytes(self.stages, self.block_kv, self.block_q)
        return 2 * (tiles + keys) + 4 * self.block_q * head_dim + rows + side


FUSED_HEAD_DIMS = (32, 64, 128)  # that this kernel runs, of Q, K and V alike

# bf16, H200. Where some tile is masked, all are, in one loop: with a second loop for the tiles that
# need no mask, ptxas runs out of registers and serialises every wgmma at head dim 64, and at 128
# nothing is gained (1.016 of cuDNN; with two loops 1.019).
#
# At 128, block_q 128 would need 2 x 64 more accumulator registers than there are. One slot for dO
# and one for dS is 5 % faster than two, but not where masking or modifiers need the registers.
PLAIN = {
    32: FusedBlocks(block_q=128),
    64: FusedBlocks(block_q=128),
    128: FusedBlocks(block_q=64, do_stages=1, ds_stages=1),
}
MASKED = {
    32: FusedBlocks(block_q=128, mask_all=True),
    64: FusedBlocks(block_q=128, mask_all=True),
    128: FusedBlocks(block_q=64, mask_all=True),
}
# Modifiers that need registers of their own. At 64 with 128 queries softcap spills 272 bytes and
# dropout 556, with 64 neither spills.
MODIFIED = MASKED | {64: FusedBlocks(block_q=64, mask_all=True)}
SMALLEST = FusedBlocks(block_q=64, do_stages=1, ds_stages=1, mask_all=True)


def choose_fused(problem: Problem) -> FusedBlocks | None:
    """Tiles for a problem of a native head dim; None where nothing fits into shared memory."""
    spec, features = problem.spec, problem.features
    ragged = problem.kv_len % FusedBlocks.block_kv != 0
    masked = ragged or not spec.mask.is_trivial or {"kv_lengths", "kv_segments"} & features
    side = SideInputs(problem, q_axis=1)
    tiles = "tile" in (side.kind(problem.bias_shape), side.kind(problem.mask_shape))
    modified = tiles or spec.dropout_rate or spec.softcap or spec.score_mod or spec.mask_mod
    table = MODIFIED if modified else MASKED if masked else PLAIN
    first = table[problem.head_dim]
    # Where arrays or a window leave most tiles whole, two loops pay. Modifiers need the registers.
    some = mask_everywhere(problem) or "kv_lengths" in features
    if problem.head_dim == 128 and some and not modified and _some_tile_is_whole(problem, first):
        first = dataclasses.replace(first, mask_all=False)
    candidates = (first, dataclasses.replace(first, do_stages=1, ds_stages=1), SMALLEST)
    return next((b for b in candidates if b.smem_bytes(problem) <= MOST_SMEM), None)


def _some_tile_is_whole(problem: Problem, blocks: FusedBlocks) -> bool:
    """The band of the mask is wide enough to hold a tile."""
    left, right = problem.spec.mask.left, problem.spec.mask.right
    if left is None or right is None:
        return True
    return left + right >= blocks.block_q + blocks.block_kv - 2
