"""Gradients of score modifiers: of the bias, of ALiBi's slopes, of what score_mod captured.

All are sums of the gradient dS of the scores, which is as large as the scores. So S and dP are
computed once more, tile by tile, and summed in registers; dS is never stored. The axes of the sum
decide what a CTA owns:

    tile     a tile of the bias, for all batch entries and heads that share it: per_tile.py
    columns  some keys of one head, for all queries: a bias that is the same for every query
    rows     some queries of one head, for all keys: everything else; both in per_line.py

No sum depends on the order in which CTAs run: the same bits in every run.
"""

from __future__ import annotations

from .....core.problem import Operands, Problem
from ....gpu.launch import score_grads
from ...tiling import ScoreBlocks
from ..arrays import BackwardArrays
from .per_line import line_sums
from .per_tile import tile_sums


def scores(
    problem: Problem,
    blocks: ScoreBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    wanted: frozenset[str],
    interpret: bool,
):
    """Computes gradients by name: those of core.problem.EXTRA_GRADS that are in `wanted`."""

    def launch(axes, names):
        if axes == "tile":
            return tile_sums(problem, blocks.tile, operands, arrays, interpret)
        return line_sums(problem, axes, names, blocks.lines, operands, arrays, interpret)

    return score_grads(problem, operands, wanted, launch)
