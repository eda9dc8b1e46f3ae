"""Calls that ask for so much that score tiles of the usual size lack registers."""

from __future__ import annotations

import numpy as np

from ....core.problem import Problem


def wants_narrow_tiles(problem: Problem) -> bool:
    """Returns whether float32 score tiles 64 wide lack registers: 140 to 300 bytes of spills."""
    wide = max(problem.head_dim, problem.v_head_dim) > 64
    return problem.dtype == np.float32 and wide and many(modifiers(problem))


def many(asked: set[str]) -> bool:
    """Returns whether so much is asked for that tiles of the usual size spill."""
    return "mask_mod" in asked or len(asked) > 2


def modifiers(problem: Problem) -> set[str]:
    """Returns the names of what the call asks for that takes registers."""
    spec = problem.spec
    by_spec = ("softcap", "score_mod", "mask_mod")
    by_array = {"bias", "mask", "alibi_slopes", "dropout_keys", "kv_segments"}
    return (by_array & problem.features) | {x for x in by_spec if getattr(spec, x) is not None}
