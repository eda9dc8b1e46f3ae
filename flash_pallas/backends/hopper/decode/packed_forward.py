"""Attention of few queries to many keys, by the decode kernels.

A CTA of the forward kernel has 64, 128 or 192 queries of one head and reads all of their keys.
Where that makes few CTAs, or mostly empty ones, the decode kernels are faster: their tiles
are 64 rows of (query, head of a group), and CTAs share the keys of a tile.
"""

from __future__ import annotations

import jax.numpy as jnp

from ....core import decode
from ....core.problem import Operands, Outputs, Problem
from . import tiles
from .kernel import decode as launch_decode

# Features of the calls that these kernels take. `q_lengths` are handled outside of all kernels.
_FEATURES = frozenset({"q_offset", "q_lengths", "kv_lengths", "sinks"})


def described(problem: Problem) -> decode.DecodeProblem | None:
    """Returns the problem as one of decoding; None where it is not."""
    spec, mask = problem.spec, problem.spec.mask
    if (
        spec.modifiers - {"softcap"}
        or spec.max_logit
        or spec.scale <= 0
        or not problem.features <= _FEATURES
    ):
        return None
    if not mask.is_trivial and (mask.right != 0 or (mask.left or 0) < 0):
        return None
    as_decoded = decode.DecodeProblem(
        batch=problem.batch,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        q_heads=problem.q_heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
        kv_dtype=problem.dtype,
        spec=decode.DecodeSpec(spec.scale, mask.left, spec.softcap),
        features=problem.features & {"sinks"},
    )
    return None if tiles.unsupported(as_decoded) else as_decoded


def packs(problem: Problem, num_sms: int) -> bool:
    """Returns whether decode kernels are faster: their tiles are few, or one holds a whole group.

    Few means at most half as many as SMs; CTAs then share the keys of a tile. H200, (batch,
    queries, keys), query heads and key heads, head dim 128, in the last case 64: speedup over the
    usual tiles, in brackets that of a forward kernel of one warpgroup:

        (1, 16, 8k)    32  8   5.90 [1.31]
        (1, 64, 4k)    16 16   3.30 [1.34]
        (1, 32, 4k)    32  8   3.37 [1.31]
        (1, 128, 4k)   16 16   2.23 [1.31]
        (1, 128, 8k)   32  8   1.51 [1.31]
        (1, 512, 8k)    8  8   2.37 [1.80]

    With the heads of a group in one tile, their keys are read once: (32, 16, 4k) 32 8 2.63 [1.30].
    Neither holds for (8, 64, 4k) 16 16: 0.96 [1.03].

    Args:
        problem: the problem of the call, one that `may_pack` of forward/tiles.py says may gain.
        num_sms: number of SMs.
    """
    as_decoded = described(problem)
    if as_decoded is None:
        return False
    row_tiles = tiles.row_tiles(as_decoded)
    few = 2 * problem.batch * problem.kv_heads * row_tiles <= num_sms
    return few or (problem.group > 1 and row_tiles == 1)


def forward_packed(problem: Problem, operands: Operands, num_sms: int, interpret: bool) -> Outputs:
    """Launches the decode kernels; returns what forward.forward does, but without padding.

    Args:
        problem: a problem for which `described` is not None.
        operands: the operands of the call.
        num_sms: number of SMs.
        interpret: run by the interpreter.
    """
    as_decoded = described(problem)
    if as_decoded is None:
        raise AssertionError(f"not a problem of decoding: {problem}")
    everywhere = lambda value: jnp.full((problem.batch,), value, jnp.int32)
    lengths, offset = operands.kv_lengths, operands.q_offset
    if problem.spec.mask.is_trivial:
        offset = everywhere(problem.kv_len)  # behind all keys: each query sees every key
    elif offset is None:
        offset = everywhere(problem.spec.q_offset)
    decode_operands = decode.DecodeOperands(
        q=operands.q,
        k=operands.k,
        v=operands.v,
        kv_lengths=everywhere(problem.kv_len) if lengths is None else lengths,
        q_offset=offset,
        sinks=operands.sinks,
    )
    blocks = tiles.choose_decode(as_decoded, num_sms)
    return launch_decode(as_decoded, blocks, decode_operands, interpret)
