"""Runs one row and says whether it is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import calls, digests, expected
from .calls import Row
from .rows import Target, override

RIGHT, WRONG, HANGS, FAILS = "right", "wrong", "hangs", "fails"


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of one row.

    Attributes:
        key: of the row.
        digest: of its kernels.
        verdict: RIGHT, WRONG, HANGS (or ended its process), or FAILS (with an error).
        error: largest error of a result, as a part of what is allowed; that of the worst result.
        why: what was furthest off, or the error's text.
        seconds: time that it took, compilation included.
    """

    key: str
    digest: str
    verdict: str
    error: float | None = None
    why: str = ""
    seconds: float = 0.0


def program(row: Row, target: Target) -> Callable:
    """Returns the function (moving, others, moves) -> results by name that a row runs."""
    fixed: dict[str, Any] = {"backend": target.backend}
    if (blocks := override(row, target)) is not None:
        fixed["blocks"] = blocks

    def outputs(moving, others):
        positional, named = calls.arguments(row, others | moving)
        o, lse = calls.function_of(row)(*positional, **named, **fixed)
        return {"o": o, "lse": lse}

    def gradient(moving, others, moves):
        o_and_lse, pull = jax.vjp(lambda x: outputs(x, others), moving)
        (grads,) = pull({"o": moves["do"], "lse": moves["dlse"]})
        return o_and_lse | {f"d{name}": x for name, x in grads.items()}

    def tangents(moving, others, moves):
        of_moving = lambda x: outputs(x, others)
        if row.wanted == "linear":
            o_and_lse, push = jax.linearize(of_moving, moving)
            moved = push(moves)
        else:
            o_and_lse, moved = jax.jvp(of_moving, (moving,), (moves,))
        return o_and_lse | {f"{name}_tangent": x for name, x in moved.items()}

    def hessian(moving, others, moves):
        cotangents = {name: others[name] for name in ("do", "dlse")}
        rest = {name: x for name, x in others.items() if name not in cotangents}
        pull = lambda x: gradient(x, rest, cotangents)
        moved = jax.jvp(pull, (moving,), (moves,))[1]
        return {f"{name}_tangent": moved[name] for name in ("dq", "dk", "dv")}

    def output(moving, others, moves):
        return outputs(moving, others)

    programs = {"gradient": gradient, "hessian": hessian, "output": output}
    return programs.get(row.wanted, tangents)


def arrays_of(row: Row) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws (arrays of the call, with cotangents where they are read; tangents of those that move).

    Tangents are only of those rows that want them.
    """
    arrays, rng = calls.drawn(row), np.random.default_rng(5)
    if row.function in ("decode", "ragged"):
        return arrays, {}
    q, v, dtype = arrays["q"], arrays["v"], jnp.dtype(row.dtype)
    arrays["do"] = rng.normal(size=(*q.shape[:-1], v.shape[-1])).astype(dtype)
    arrays["dlse"] = rng.normal(size=q.shape[:-1]).swapaxes(-1, -2).astype(np.float32)
    if row.wanted in ("gradient", "output"):
        return arrays, {}
    moving = calls.moving(row, arrays)
    return arrays, {n: rng.normal(size=arrays[n].shape).astype(arrays[n].dtype) for n in moving}


def parts(row: Row, arrays, moves) -> tuple[dict, dict, dict]:
    """Returns the arguments of `program`."""
    moving = {name: arrays[name] for name in calls.moving(row, arrays)}
    cotangents = {name: arrays[name] for name in ("do", "dlse") if name in arrays}
    others = {n: x for n, x in arrays.items() if n not in moving and n not in cotangents}
    if row.wanted == "gradient":
        return moving, others, cotangents
    if row.wanted == "hessian":
        others |= cotangents
    return moving, others, moves


def lowered(row: Row, target: Target, *arguments) -> Any:
    """Returns the row's program, lowered for a GPU, be it here or not."""
    traced = jax.jit(program(row, target)).trace(*arguments)
    return traced if target.interpret else traced.lower(lowering_platforms=("cuda",))


def digest(row: Row, target: Target) -> str:
    """Returns the digest of the row's kernels; needs no GPU."""
    of_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = jax.tree.map(of_shape, parts(row, *arrays_of(row)))
    with target.placed():
        return digests.of(lowered(row, target, *shapes))


def run(row: Row, target: Target) -> Result:
    """Runs a row on the GPU here, or under the interpreter."""
    arrays, moves = arrays_of(row)
    operands = jax.tree.map(jnp.asarray, parts(row, calls.poisoned(row, arrays), moves))
    with target.placed():
        staged = lowered(row, target, *operands)
        name = "" if target.interpret else digests.of(staged)
        compiled = (staged.lower() if target.interpret else staged).compile()
        computed = compiled(*operands)
    computed = {n: np.asarray(x).astype(np.float64) for n, x in computed.items()}
    return compared(row, name, computed, expected.Expected(row, arrays, moves), arrays)


def compared(row: Row, digest: str, computed, right: expected.Expected, arrays) -> Result:
    """Compares results with what they should be; the worst of them is the row's."""
    worst, why = 0.0, ""
    computed = expected.packed(row, arrays, computed)
    for name, exact in right.exact.items():
        if computed[name].shape != exact.shape:
            return Result(row.key, digest, WRONG, None, f"{name} has shape {computed[name].shape}")
        errors = expected.sizes(expected.error(computed[name], exact))
        limits = right.allowed[name], right.allowed_rms[name]
        for kind, size, limit in zip(("maximum", "root mean square"), errors, limits, strict=True):
            if not size <= worst * limit:
                if not np.isfinite(size):
                    return Result(row.key, digest, WRONG, None, f"{name} is not finite")
                worst = size / limit if limit else np.inf
                why = f"{name}: {kind} {size:.2g}, allowed {limit:.2g}"
    verdict = RIGHT if worst <= 1.0 else WRONG
    return Result(row.key, digest, verdict, float(worst), why)
