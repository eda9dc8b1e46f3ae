"""The launches of the fused backward: of which pairs of a head and a batch entry and which keys.

One launch takes all, where nothing else is said. Several, one after the other, each for an equal
portion of the pairs, need float32 sums of dQ, and of a bias's gradient, for one portion at a time.
A launch that ends leaves multiprocessors idle for as long as a CTA and more takes.

Where the first key block of every pair has a launch of its own, that one writes dQ's sums and the
next adds to them, so that nothing clears them.
"""

from __future__ import annotations

import dataclasses

from ...core import bounds
from ...core.problem import Problem
from .fused_blocks import FusedBlocks, may_sum_bias, without_sums


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
    """Those of a portion of the pairs, in their order; the same for every portion."""
    pairs = problem.batch * problem.kv_heads // blocks.launches
    entries = min(pairs, problem.batch)
    sizes = entries, pairs // entries
    key_blocks = -(-problem.kv_len // blocks.block_kv)
    if not blocks.first_alone:
        return (Launch(*sizes, 0, key_blocks),)
    return Launch(*sizes, 0, 1, adds=False), Launch(*sizes, 1, key_blocks - 1)


def origins(problem: Problem, blocks: FusedBlocks) -> list[tuple[int, int]]:
    """(batch entry, key head) of the first pair of each portion."""
    pairs = problem.batch * problem.kv_heads // blocks.launches
    firsts = (n * pairs for n in range(blocks.launches))
    return [(first % problem.batch, first // problem.batch) for first in firsts]


def may_launch(problem: Problem, blocks: FusedBlocks) -> bool:
    """Portions are whole heads of keys, or some entries of one, and of whole clusters."""
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


def fitting(problem: Problem, blocks: FusedBlocks) -> FusedBlocks:
    """`blocks` as `problem` can run them, which may be a shard of the call they were chosen for.

    A shard has fewer batch entries and heads: a cluster's CTAs may not find as many entries that
    share a bias, and portions may not be whole heads.
    """
    if not may_sum_bias(problem, blocks.bias_cluster):
        blocks = without_sums(blocks)
    if not may_launch(problem, blocks):
        return dataclasses.replace(blocks, launches=1, first_alone=False)
    return blocks


# Portions of a call that sums the gradient of a bias: at most so many, from so many keys on by head
# dim, of so many rounds of CTAs each. H200, B = 128, 4 heads, four portions against one, speed and,
# in parentheses, what gradients in one program keep: head dim 64 T=2048 0.96 (0.85), 4096 1.00
# (0.79); 32 T=2048 0.92 (0.79), 4096 0.95 (0.79); 16 T=4096 0.95 (0.91). T=1024: 0.90 to 0.98, and
# 0.91 at 16 T=2048.
MOST_PORTIONS, LEAST_ROUNDS = 4, 15
LEAST_KEYS = {16: 4096, 32: 2048, 64: 2048}

# Keys for which the first blocks are launched alone without a mask: at head dim 128, and with the
# sums of a bias at 64. H200: 16 heads, B=16, T=1024 1.02 and 1.04, B=8, T=2048 1.025, 32 heads for
# 8 of keys 1.05 (causal 1.00 to 1.02: not taken); bias T=512 1.02, 1024 and 1536 1.015, 2048 0.98.
# At 128 T=512 1.00; at 64 (spills) 0.97 and 1.00, at 32 and 16 0.98 to 1.00.
ALONE = {128: (1024, 2048), 64: (512, 1536)}


def choose_launches(problem: Problem, blocks: FusedBlocks, num_sms: int) -> FusedBlocks:
    """`blocks` with the launches that pay.

    Args:
        problem: of the head dims that run.
        blocks: of the kernel.
        num_sms: multiprocessors, each of which holds one CTA.
    """
    ctas = problem.batch * problem.kv_heads * -(-problem.kv_len // blocks.block_kv)
    if blocks.sums_bias and problem.kv_len >= LEAST_KEYS[problem.head_dim]:
        most = min(MOST_PORTIONS, ctas // (LEAST_ROUNDS * num_sms))
        for portions in range(most, 1, -1):
            several = dataclasses.replace(blocks, launches=portions)
            if problem.kv_heads % portions == 0 and may_launch(problem, several):
                return several
    alone = dataclasses.replace(blocks, first_alone=True)
    return alone if _alone_pays(problem, alone, ctas, num_sms) else blocks


def _alone_pays(problem: Problem, blocks: FusedBlocks, ctas: int, num_sms: int) -> bool:
    least, most = ALONE.get(problem.head_dim, (1, 0))
    if not least <= problem.kv_len <= most or not problem.spec.mask.is_trivial:
        return False
    if (problem.head_dim == 64) != blocks.sums_bias or not blocks.producer:
        return False
    rounds = lambda n: -(-n // num_sms)
    first = problem.batch * problem.kv_heads
    as_many = rounds(first) + rounds(ctas - first) <= rounds(ctas)
    return as_many and may_launch(problem, blocks) and may_write(problem, blocks)
