"""The second decode kernel: joins what was computed for each share of the keys.

core.softmax.merge is what it computes; in one launch, where XLA makes several of that.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import softmax
from ...core.integers import round_up
from ...core.problem import Outputs
from .decode_plan import Plan, Results
from .memory import float32, launch

THREADS = 128  # of the one warpgroup that joins a row, one element or more each


def columns(v_head_dim: int) -> int:
    """Of a row of the partial O: the threads of a warpgroup share it evenly."""
    return round_up(v_head_dim, THREADS)


@dataclasses.dataclass(frozen=True)
class Combine:
    """One launch.

    Attributes:
        plan: of the decode kernel.
    """

    plan: Plan

    def __call__(self, o, lse, sinks, out_o, out_lse):
        batch, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        group, splits = jnp.int32(self.plan.problem.group), self.plan.blocks.num_splits
        query, q_head = lax.div(row, group), head * group + lax.rem(row, group)
        log2 = [_or_none(lse[batch, head, split, row]) for split in range(splits)]
        if sinks is not None:  # one more share, which has no values
            log2.append(sinks[batch, q_head])
        most = functools.reduce(jnp.maximum, log2)
        # Constants are literals: those of jnp.zeros_like, as in softmax.finish, come with a reshard
        # where the call's arrays are laid out over a mesh, which Mosaic does not lower.
        finite = jnp.where(most == -jnp.inf, 0.0, most)
        weights = [jnp.exp2(x - finite) for x in log2]
        sums = functools.reduce(jnp.add, weights)
        empty = sums == 0.0
        sums = jnp.where(empty, 1.0, sums)
        joined = jnp.where(empty, softmax.EMPTY_ROW, finite + jnp.log(sums) * softmax.LOG2E)
        parts = [_load(o.at[batch, head, split, row]) for split in range(splits)]
        total = functools.reduce(jnp.add, map(jnp.multiply, parts, weights[:splits]))
        out_o[batch, query, q_head] = (total * (1.0 / sums)).astype(out_o.dtype)
        out_lse[batch, q_head, query] = joined


def _or_none(lse):
    """The log-sum-exp of a share, -inf where a row sees none of its keys."""
    return jnp.where(lse >= softmax.EMPTY_ROW / 2, -jnp.inf, lse)


def _load(ref):
    size = ref.shape[0]
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS))


def combine(plan: Plan, parts: Results, sinks: Any) -> Outputs:
    """Launch.

    Args:
        plan: of the decode kernel.
        parts: what it wrote.
        sinks: f32[B, N], base 2, or None.

    Returns:
        Outputs: o [B, T, N, Hv] in q's dtype and lse_log2 f32[B, N, T].
    """
    problem = plan.problem
    heads = (problem.batch, problem.q_heads, problem.q_len)
    o_shape = (problem.batch, problem.q_len, problem.q_heads, parts.o.shape[-1])
    run = launch(
        Combine(plan),
        out=(jax.ShapeDtypeStruct(o_shape, problem.dtype), float32(heads)),
        scratch=(),
        grid={"batch": problem.batch, "head": problem.kv_heads, "row": plan.rows},
        threads=1,
        name="flash_pallas_decode_combine",
        interpret=plan.interpret,
    )
    o, lse = run(parts.o, parts.lse, sinks)
    return Outputs(o[..., : problem.v_head_dim], lse)
