"""Problems that no GPU backend accepts."""

from __future__ import annotations

import numpy as np

from ...core.problem import Problem
from .stand_ins import UNSUPPORTED

MAX_GRID = 65_535  # CUDA's limit on the second and third grid dimension


def refusal(problem: Problem) -> str | None:
    """Returns the reason why no GPU backend can run `problem`, or None."""
    if problem.batch > MAX_GRID:
        return f"takes batches up to {MAX_GRID}, not {problem.batch}: split the batch"
    if problem.bias_dtype == np.float64:
        return "takes no float64 bias: cast it to float32"
    for name in ("score_mod", "mask_mod"):
        mod = getattr(problem.spec, name)
        if mod is not None and (primitives := sorted(mod.primitives & UNSUPPORTED)):
            return f"cannot compile {', '.join(primitives)} of {name}"
    return None
