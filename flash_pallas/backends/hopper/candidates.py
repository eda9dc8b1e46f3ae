"""Tile sizes that are worth timing where the rules of *_blocks.py may not be the best."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ...core.problem import Problem
from .backward.select import SplitBlocks
from .tiling import choose_blocks

# Each replaces fields of what the rules take. What only the rules know how to combine (which loops
# are masked, where polynomials pay next to modifiers, speculation) stays as it is.
_FORWARD = (
    {"warpgroups": 2, "block_kv": 128},
    {"warpgroups": 2, "block_kv": 96},
    {"warpgroups": 3, "block_kv": 64},
    {"warpgroups": 3, "block_kv": 128},
    {"persistent": False},
    {"packed": False},
)
_FUSED = (
    {"alternate": False, "polynomials": 0.0},
    {"polynomials": 0.0},
    {"polynomials": 0.25},
    {"block_q": 64},
    {"block_q": 64, "stages": 4, "do_stages": 4},
    {"stages": 3, "do_stages": 3},
    {"stages": 2, "do_stages": 2},
    {"parts": 1},
    {"first_alone": True},
    {"first_alone": False},
    {"launches": 1, "key_launches": 1},
    {"resident": 1, "kv_stages": 1},
)
_DKV = ({"block_q": 128}, {"block_q": 64}, {"stages": 3}, {"do_stages": 1}, {"p_stages": 1})
_DQ = (
    {"block_kv": 128},
    {"block_kv": 64},
    {"k_stages": 3},
    {"v_stages": 1},
    {"v_stages": 2},
    {"warpgroups": 1, "block_kv": 64},
)
CHANGES = {"forward": _FORWARD, "fused": _FUSED, "dkv": _DKV, "dq": _DQ}


def candidates(problem: Problem, producer: bool, num_sms: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the tile sizes that each kernel of a call can run with; those of the rules first.

    `producer` and `num_sms` are those of `choose_blocks`.
    """
    by_kernel = functools.partial(_by_kernel, problem, producer, num_sms)
    chosen = by_kernel(None)
    found = {}
    for kernel, blocks in chosen.items():
        tried = [blocks]
        for change in CHANGES[kernel]:
            try:
                tried.append(by_kernel({kernel: change})[kernel])
            except ValueError:  # they do not fit, or the kernel cannot take them
                continue
        found[kernel] = [dataclasses.asdict(b) for b in dict.fromkeys(tried)]
    return found


def _by_kernel(problem: Problem, producer: bool, num_sms: int, override: dict[str, Any] | None):
    blocks = choose_blocks(problem, override, producer, num_sms)
    backward = blocks.backward
    if isinstance(backward, SplitBlocks):
        return {"forward": blocks.forward, "dkv": backward.dkv, "dq": backward.dq}
    return {"forward": blocks.forward, "fused": backward}
