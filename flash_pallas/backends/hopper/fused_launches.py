"""The launches of the fused backward: which pairs of a key head and a batch entry, which key blocks.

One launch takes all, where nothing else is said. Several, one after the other, each for an equal
part of the pairs, need float32 sums of dQ for one part at a time: at head dim 64 they are 4 of the
20 bytes that a backward keeps for an element of Q.

Where the first key block of every pair has a launch of its own, that one writes dQ's sums and the
next adds to them, so that nothing clears them. It must see all queries, and multiprocessors must
not idle for it: `choose_launches`.
"""

from __future__ import annotations

import dataclasses

from ...core import bounds
from ...core.problem import Problem
from .fused_blocks import FusedBlocks


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the CTAs of one launch share.

    Attributes:
        entries, heads: batch entries and key heads; each of their pairs is here.
        first_block: of the keys that this launch has.
        key_blocks: how many it has.
        adds: to dQ's sums; False: writes them.
    """

    entries: int
    heads: int
    first_block: int
    key_blocks: int
    adds: bool = True

    @property
    def pairs(self) -> int:
        """Of a key head and a batch entry."""
        return self.entries * self.heads


def launches_of(problem: Problem, blocks: FusedBlocks) -> tuple[Launch, ...]:
    """Those of an equal part of the pairs, in their order; the same for every part."""
    pairs = problem.batch * problem.kv_heads // blocks.launches
    entries = min(pairs, problem.batch)
    sizes = entries, pairs // entries
    key_blocks = -(-problem.kv_len // blocks.block_kv)
    if not blocks.first_alone:
        return (Launch(*sizes, 0, key_blocks),)
    return Launch(*sizes, 0, 1, adds=False), Launch(*sizes, 1, key_blocks - 1)


def origins(problem: Problem, blocks: FusedBlocks) -> list[tuple[int, int]]:
    """(batch entry, key head) of the first pair of each part."""
    pairs = problem.batch * problem.kv_heads // blocks.launches
    firsts = (n * pairs for n in range(blocks.launches))
    return [(first % problem.batch, first // problem.batch) for first in firsts]


def may_launch(problem: Problem, blocks: FusedBlocks) -> bool:
    """Parts are whole heads of keys, or equal parts of one's entries, and whole clusters."""
    pairs, rest = divmod(problem.batch * problem.kv_heads, blocks.launches)
    if rest or not pairs or pairs % blocks.bias_cluster:
        return False
    whole = pairs % problem.batch == 0 or problem.batch % pairs == 0
    several = blocks.launches > 1 or blocks.first_alone
    return whole and not (several and blocks.parts > 1)


def may_write(problem: Problem, blocks: FusedBlocks) -> bool:
    """The first key block walks over every query, whatever arrays say, and is not the only one."""
    if bounds.is_dynamic(problem) or problem.traced_offset or problem.kv_len <= blocks.block_kv:
        return False
    whole = -(-problem.q_len // blocks.block_q) * blocks.block_q
    found = problem.spec.mask.q_blocks(
        -problem.spec.q_offset, blocks.block_kv, whole, blocks.block_q
    )
    return found.start <= 0 and found.stop >= whole // blocks.block_q
