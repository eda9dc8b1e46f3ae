"""Forward mode of one call: padding, tile sizes, and the launch."""

from __future__ import annotations

import dataclasses

import jax

from ....core import padding
from ....core.problem import Operands, Outputs, Problem, Tangents
from ..common.wgmma import Matmuls
from ..forward.tiles import ForwardBlocks, native_problem
from .kernel import tangents
from .tiles import choose_tangent, moves_of


def blocks_of(problem: Problem, given: Operands, *, primal: bool, producer: bool):
    """Returns the tile sizes of the kernel that runs, ForwardBlocks; None if there is none."""
    found = choose_tangent(native_problem(problem), moves_of(given), primal=primal)
    return found if found is None else dataclasses.replace(found, producer=producer)


def push(
    problem: Problem,
    blocks: ForwardBlocks,
    operands: Operands,
    given: Operands,
    found: Outputs | None,
    num_sms: int,
    interpret: bool,
) -> Tangents:
    """Computes what `Backend.tangents` does; see `kernel.tangents` for the arguments.

    Here operands, tangents and `found` are those of the call.
    """
    native = native_problem(problem)
    matmuls = Matmuls(problem.dtype, interpret)
    widths = {"q": (native.head_dim,), "k": (native.head_dim,)}
    widths |= {"v": (native.v_head_dim, blocks.block_kv)}
    # A weight of 0 times the tangent of a score of padding is 0 only if that is finite.
    both = padding.cleared(operands), padding.cleared(operands, given)
    both = [
        x._replace(**{n: matmuls.operand(getattr(x, n), *w) for n, w in widths.items()})
        for x in both
    ]
    results = tangents(native, blocks, *both, found, num_sms, interpret)
    queries = slice(problem.q_len)
    whole = lambda x: None if x is None else matmuls.joined(x)[:, queries, :, : problem.v_head_dim]
    rows = jax.tree.map(lambda x: x[:, :, queries], results._replace(o=None, do=None))
    return Tangents(*rows._replace(o=whole(results.o), do=whole(results.do)))
