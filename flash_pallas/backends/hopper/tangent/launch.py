"""Forward mode of one call: padding, tile sizes, and the launch."""

from __future__ import annotations

import jax

from ....core import padding
from ....core.problem import EXTRA_GRADS, Operands, Outputs, Problem, Tangents
from ...gpu.auxiliary_arrays import moves_of
from ..common.wgmma import Matmuls
from ..forward.tiles import ForwardBlocks, native_problem
from .kernel import tangents
from .tiles import choose_tangent


def blocks_of(
    problem: Problem, moves: frozenset[str], primal: bool, producer: bool
) -> ForwardBlocks | None:
    """Returns the tile sizes of the kernel that runs; None if there is none.

    Args:
        problem: the problem of the call.
        moves: names of the operands that have tangents.
        primal: the forward is to be computed too.
        producer: a warpgroup of its own loads.
    """
    moves &= set(EXTRA_GRADS)
    return choose_tangent(native_problem(problem), moves, primal=primal, producer=producer)


def push(
    problem: Problem,
    operands: Operands,
    operand_tangents: Operands,
    outputs: Outputs | None,
    producer: bool,
    interpret: bool,
) -> Tangents:
    """Computes the tangents of O and of the log-sum-exp, as `Jvp.run` does.

    Args:
        problem: the problem of the operands.
        operands: operands of the call.
        operand_tangents: tangents of q, k, v and others; None where an operand has none.
        outputs: results of a forward of this call; None: they are computed too.
        producer: a warpgroup of its own loads.
        interpret: run under the interpreter.
    """
    blocks = blocks_of(problem, moves_of(operand_tangents), outputs is None, producer)
    assert blocks is not None
    native = native_problem(problem)
    matmuls = Matmuls(problem.dtype, interpret)
    widths = {"q": (native.head_dim,), "k": (native.head_dim,)}
    widths |= {"v": (native.v_head_dim, blocks.block_kv)}
    # A weight of 0 times the tangent of a score of padding is 0 only if that is finite.
    laid_out = lambda x: x._replace(
        **{name: matmuls.operand(getattr(x, name), *sizes) for name, sizes in widths.items()}
    )
    cleared, moved = (laid_out(padding.cleared(operands, x)) for x in (operands, operand_tangents))
    results = tangents(native, blocks, cleared, moved, outputs, interpret)
    queries = slice(problem.q_len)
    cut = lambda x: None if x is None else matmuls.joined(x)[:, queries, :, : problem.v_head_dim]
    rows = jax.tree.map(lambda x: x[:, :, queries], results._replace(o=None, do=None))
    return Tangents(*rows._replace(o=cut(results.o), do=cut(results.do)))
