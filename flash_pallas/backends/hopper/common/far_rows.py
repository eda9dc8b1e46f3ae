"""Calls whose rows with large logits are computed by a launch of their own, in the fused backward.

Most kernels have code for such rows (core/softmax.py) next to the code for all others. Hardly any
call ever runs it, but at head dim 64 it makes the other code slower, by 6.5 % (H200; benchmarks/
NOTES.md, "Large logits"). There, the kernel that all calls run has none of it. It leaves groups of
heads that have such rows to a second launch, which ends at once where there are none.
CTAs that take several heads, where a bias's gradient is summed, leave all of a call or nothing. In
the forward that code costs 2.3 % at most (H200, 4,4096,32,64 without a mask; options.json), so it
stays in the kernel, as at other head dims.
"""

from __future__ import annotations

import enum

from ....core.problem import Problem
from ...gpu.ptx.online_softmax import far_of

# Pairs of a batch entry and a KV head: the backward's second launch has a CTA for each. One that
# has nothing to do occupies its SM for about a microsecond.
MOST_PAIRS = 512
# Least number of tiles or KV blocks, eight for each SM: in shorter calls 2 us more would show.
ENOUGH = 1056


class Part(enum.Enum):
    """Rows that a launch computes."""

    ALL = "all"
    NEAR = "near"  # rows of heads without large logits
    FAR = "far"  # the rows that NEAR leaves
    ALL_IF_NEAR = "all if near"  # none, if some row of the call has large logits
    ALL_IF_FAR = "all if far"  # none, if no row has


def parts(tiles: int, wanted: bool) -> tuple[Part, ...]:
    """Returns the launches in order: two where they are `wanted` and worth it."""
    return (Part.NEAR, Part.FAR) if wanted and tiles >= ENOUGH else (Part.ALL,)


# Operands that do not make small logits large, and do not decide which Q tiles a KV tile has,
# except by a length.
ALLOWED = {"sinks", "kv_lengths", "alibi_slopes", "dropout_keys", "score_params"}


def leaves_in_backward(problem: Problem) -> bool:
    """Returns whether two launches are possible in the fused backward and make it faster.

    It knows beforehand which rows are far, and computes none of them twice. Speed over that of
    one launch, H200: 1.065 at head dim 64, but 0.991 at 96 and 0.987 at 128 (options.json).

    Args:
        problem: problem with native head dims.
    """
    few = problem.batch * problem.kv_heads <= MOST_PAIRS
    near = problem.dtype.itemsize == 2 and bool(far_of(problem.spec, problem.dtype))
    return problem.head_dim == 64 and problem.features <= ALLOWED and few and near


def leaves_calls(problem: Problem, tiles: int) -> bool:
    """Returns whether the fused backward that sums a bias's gradient has two launches, one idle.

    H200, B = 128, 4 heads of 64, T=1024 and 2048: 1.05 and 1.07 times as fast as one launch; at 32
    and 16 1.00 and 1.01 (T=1024).

    Args:
        problem: problem with native head dims.
        tiles: number of KV tiles of the call.
    """
    far = bool(far_of(problem.spec, problem.dtype))
    return problem.head_dim == 64 and tiles >= ENOUGH and far
