"""A compiled call of attention and of its gradient."""

from __future__ import annotations

import dataclasses

import jax

from . import timing


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled forward, and a backward with its residuals.

    Attributes:
        launches: what to time, by direction.
        peak_bytes: bytes that each direction plans to allocate, and perhaps "both": gradients in
            one program.
    """

    launches: dict[str, timing.Launch]
    peak_bytes: dict[str, int]


def compile_jax(attention, arrays, do, differentiated, whole: bool = False) -> Program:
    """Compiles (q, k, v, extra arrays) -> o to a Program; its backward starts from saved residuals.

    `whole` also plans the gradients as one program with the forward inside, which is not launched.
    """
    q, k, v, extra = arrays
    wanted = {name: extra[name] for name in differentiated}
    fixed = {name: x for name, x in extra.items() if name not in differentiated}

    def primal(q, k, v, wanted, fixed):
        return attention(q, k, v, wanted | fixed)

    def save(q, k, v, wanted, fixed):
        return jax.vjp(lambda *x: primal(*x, fixed), q, k, v, wanted)

    forward = jax.jit(primal).lower(q, k, v, wanted, fixed).compile()
    saved = jax.jit(save).lower(q, k, v, wanted, fixed).compile()
    # The pullback is given as its arrays: as a tree it holds functions, which differ between traces
    # of other threads.
    residuals, tree = jax.tree.flatten(jax.eval_shape(save, q, k, v, wanted, fixed)[1])
    pull = jax.jit(lambda arrays, do: jax.tree.unflatten(tree, arrays)(do))
    pull = pull.lower(residuals, do).compile()
    pullback = jax.tree.leaves(saved(q, k, v, wanted, fixed)[1])
    peaks = {"forward": _peak(forward), "backward": _peak(pull)}
    if whole:
        gradients = jax.jit(lambda *given: save(*given[:-1])[1](given[-1]))
        peaks["both"] = _peak(gradients.lower(q, k, v, wanted, fixed, do).compile())
    return Program(
        {
            "forward": timing.Launch(lambda: forward(q, k, v, wanted, fixed), "jax"),
            "backward": timing.Launch(lambda: pull(pullback, do), "jax"),
        },
        peaks,
    )


def _peak(compiled) -> int:
    plan = compiled.memory_analysis()
    return plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
