"""Calls whose rows with large logits are computed by a launch of their own.

Most kernels have code for such rows (core/softmax.py) beside that for all others. At head dim 64
that code, which hardly any call ever runs, makes the other slower: the forward without a mask by
2.4 %, the causal backward by 5.9 % (H100, T=4096, benchmarks/results/versions_head_dim_64.json).
There the kernel that all calls run has none of it. It says where it met such rows, and leaves their
CTA or their group of heads to a second launch, which ends at once where there are none.

Only plain calls: a bias may make every row of a padded batch large, and then everything would be
computed twice. In a plain call logits beyond 2^12 come from q and k themselves.
"""

from __future__ import annotations

import enum

from ...core import bounds
from ...core.problem import Problem
from ..mosaic.row_maxima import far_of

HEAD_DIM = 64
# Of a batch entry and a head of keys: a CTA of the backward's second launch for each. One that has
# nothing to do takes its multiprocessor for about a microsecond.
MOST_PAIRS = 512


class Part(enum.Enum):
    """Which rows a launch computes."""

    ALL = "all"
    NEAR = "near"  # small logits; it says where there were others
    FAR = "far"  # what NEAR has left


def apart(problem: Problem) -> bool:
    """Rows with large logits have a launch of their own.

    Args:
        problem: with native head dims.
    """
    spec = problem.spec
    modified = spec.softcap or spec.score_mod or spec.mask_mod or spec.dropout_rate
    plain = not (problem.features or modified or spec.max_logit or bounds.is_dynamic(problem))
    sizes = (problem.head_dim, problem.v_head_dim) == (HEAD_DIM, HEAD_DIM)
    few = problem.batch * problem.kv_heads <= MOST_PAIRS
    return plain and sizes and few and problem.dtype.itemsize == 2


def parts(problem: Problem, takes: bool) -> tuple[Part, ...]:
    """The launches, in their order; one where the tiles do not take two (`takes`)."""
    if takes and far_of(problem.spec, problem.dtype) and apart(problem):
        return Part.NEAR, Part.FAR
    return (Part.ALL,)
