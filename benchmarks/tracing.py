"""Programs of a differentiable jax function: traced in this process or another, compiled and run.

Tracing a kernel takes half a second of Python and holds the interpreter's lock, so several
processes share the tracing of many programs. They hand the programs over in the form of jax.export,
which does not know our pytrees: one program passes lists of arrays to the next.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export

from .gate import Inputs
from .timing import Launch

# What the exported programs call and jax does not promise to keep: all run where they were made.
CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in (
        "mosaic_gpu",
        "mosaic_gpu_v2",
        "triton_kernel_call",
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    )
)


class Attention(NamedTuple):
    """A function (q, k, v) -> o and, where there is one, (q, k, v) -> (o, lse) for the gate."""

    run: Callable[..., Any]
    with_lse: Callable[..., Any] | None = None


class Programs(NamedTuple):
    """Programs of one function: its forward, the forward that saves residuals, and the backward."""

    forward: Any  # (q, k, v) -> o
    save: Any  # (q, k, v) -> residuals, a list, and lse or None
    pull: Any  # (residuals, do) -> (dq, dk, dv)


class Runner(NamedTuple):
    """One provider, compiled and with its residuals saved, for one cell.

    Attributes:
        launches: what to time, by direction. The backward starts from saved residuals and includes
            everything it needs: delta, zeroed buffers, conversions.
        results: computes o, dq, dk, dv and, where the provider gives it, lse, in the layout of the
            public API.
    """

    launches: dict[str, Launch]
    results: Callable[[], dict[str, Any]]


def _jitted(attention: Attention, like: Inputs) -> list[tuple[Any, tuple]]:
    """Returns the jitted functions of Programs, each with the arguments it is called on.

    The pullback of jax.vjp is a pytree of the residuals. One program computes it and hands it to
    another, which is then the backward and nothing else.
    """
    *qkv, do = like
    primal = attention.with_lse or (lambda *args: (attention.run(*args), None))
    _, pullback, _ = jax.eval_shape(lambda *args: jax.vjp(primal, *args, has_aux=True), *qkv)
    residuals, form = jax.tree.flatten(pullback)

    def save(*args):
        _, pullback, lse = jax.vjp(primal, *args, has_aux=True)
        return jax.tree.leaves(pullback), lse

    def pull(residuals, do):
        return jax.tree.unflatten(form, residuals)(do)

    return [
        (jax.jit(attention.run), tuple(qkv)),
        (jax.jit(save), tuple(qkv)),
        (jax.jit(pull), (residuals, do)),
    ]


def lower(attention: Attention, like: Inputs) -> Programs:
    """Traces and lowers the programs for inputs of these shapes; they are ready to compile."""
    return Programs(*(function.lower(*args) for function, args in _jitted(attention, like)))


def export(attention: Attention, like: Inputs) -> Programs:
    """Traces the same programs as records that can be pickled, for `lower_exported` elsewhere."""
    exported = (
        jax.export.export(function, disabled_checks=CHECKS)(*args)
        for function, args in _jitted(attention, like)
    )
    # The derivative of an exported function is a closure, which cannot be pickled.
    return Programs(*(dataclasses.replace(program, _get_vjp=None) for program in exported))


def lower_exported(programs: Programs) -> Programs:
    """Lowers what `export` returned to what `lower` would return."""
    lowered = []
    for exported in programs:
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.in_avals]
        args, _ = jax.tree.unflatten(exported.in_tree, like)
        lowered.append(jax.jit(exported.call).lower(*args))
    return Programs(*lowered)


def compiled(lowered: Programs) -> Callable[[Inputs], Runner]:
    """Compiles the programs; returns a function from inputs to a Runner."""
    # XLA and ptxas compile outside Python's lock: three programs in the time of the slowest.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = pool.map(lambda program: program.compile(), lowered)
        return functools.partial(_runner, Programs(*programs))


def _runner(programs: Programs, inputs: Inputs) -> Runner:
    *qkv, do = inputs
    residuals, lse = programs.save(*qkv)

    def results():
        gradients = programs.pull(residuals, do)
        found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        if lse is not None:
            found["lse"] = lse
        return {"o": programs.forward(*qkv), **found}

    launches = {
        "forward": Launch(lambda: programs.forward(*qkv), "jax"),
        "backward": Launch(lambda: programs.pull(residuals, do), "jax"),
    }
    return Runner(launches, results)
