"""Calls whose rows with large logits are computed by a launch of their own.

Most kernels have code for such rows (core/softmax.py) next to the code for all others. Hardly any
call ever runs it, but in some kernels it makes the other code slower: the forward of head dim 64
without a mask by 2.4 %, the causal backward of 64 by 5.9 % and of 128 by 2.0 % (H100, T=4096;
benchmarks/NOTES.md, "Large logits"). There, the kernel that all calls run has none of it. It
says where it met such rows, and leaves their CTA or their group of heads to a second launch, which
ends at once where there are none.

Only plain calls have two launches: a bias may make every row of a padded batch large, and then
everything would be computed twice. In a plain call logits beyond 2^12 come from q and k themselves.
"""

from __future__ import annotations

import enum

from ....core.problem import Problem
from ...gpu.online_softmax import far_of

# Of a batch entry and a head of keys: a CTA of the backward's second launch for each. One that has
# nothing to do takes its SM for about a microsecond.
MOST_PAIRS = 512
# Of tiles or KV blocks, eight for each SM: shorter calls would notice 2 us more.
ENOUGH = 1056


class Part(enum.Enum):
    """Rows that a launch computes."""

    ALL = "all"
    NEAR = "near"  # small logits; it says where there were others
    FAR = "far"  # what NEAR has left


def may_be_apart(problem: Problem) -> bool:
    """Says whether rows with large logits can have a launch of their own.

    Args:
        problem: problem with native head dims.
    """
    spec = problem.spec
    plain = not (problem.features or spec.modifiers or spec.max_logit or problem.is_dynamic)
    few = problem.batch * problem.kv_heads <= MOST_PAIRS
    return plain and few and problem.dtype.itemsize == 2 and bool(far_of(spec, problem.dtype))


def parts(problem: Problem, tiles: int, wanted: bool) -> tuple[Part, ...]:
    """Returns the launches in order: two where they are `wanted`, possible and worth it."""
    several = wanted and tiles >= ENOUGH and may_be_apart(problem)
    return (Part.NEAR, Part.FAR) if several else (Part.ALL,)


def forward_gains(problem: Problem) -> bool:
    """Says whether two launches make the forward faster; if causal, the launch costs 1 %."""
    return (problem.head_dim, problem.v_head_dim) == (64, 64) and problem.spec.mask.is_trivial


def backward_gains(problem: Problem) -> bool:
    """Says whether two launches make the fused backward faster.

    At head dim 128 without a mask they make it 2 to 3 % slower; 96 goes with it, untimed.
    """
    masked = not problem.spec.mask.is_trivial
    return problem.head_dim == 64 or (problem.head_dim in (96, 128) and masked)
