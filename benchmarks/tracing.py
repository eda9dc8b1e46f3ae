"""The programs of a differentiable jax function: traced here or elsewhere, compiled, run.

Tracing a kernel takes Python half a second and holds its lock, so many programs are traced by
several processes. They hand them over in the form of jax.export, which knows no pytrees of ours:
what goes from one program to the next are lists of arrays.
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
_CUSTOM_CALLS = (
    "mosaic_gpu",
    "mosaic_gpu_v2",
    "triton_kernel_call",
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
)


class Attention(NamedTuple):
    """A function (q, k, v) -> o, and (q, k, v) -> (o, lse) for the gate where there is one."""

    run: Callable[..., Any]
    with_lse: Callable[..., Any] | None = None


class Programs(NamedTuple):
    """Of one function: its forward, the forward that saves residuals, and the backward alone."""

    forward: Any  # (q, k, v) -> o
    save: Any  # (q, k, v) -> residuals, a list, and lse or None
    pull: Any  # (residuals, do) -> (dq, dk, dv)


class Runner(NamedTuple):
    """One provider, compiled and with its residuals saved, for one cell.

    Attributes:
        launches: what to time, by direction. The backward starts from saved residuals and includes
            everything it needs: delta, zeroed buffers, conversions.
        results: o, dq, dk, dv and, where the provider gives it, lse, in the layout of the public
            API; computed when called.
    """

    launches: dict[str, Launch]
    results: Callable[[], dict[str, Any]]


def _jitted(attention: Attention, like: Inputs) -> list[tuple[Any, tuple]]:
    """The jitted functions of Programs, each with what it is called on.

    The pullback of jax.vjp is a pytree of the residuals, so it is computed by one program and given
    to another, which is then the backward and nothing else.
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
    """The programs for inputs of these shapes, traced and ready to compile."""
    return Programs(*(function.lower(*args) for function, args in _jitted(attention, like)))


def export(attention: Attention, like: Inputs) -> Programs:
    """The same as records that can be pickled, for `lower_exported` in another process."""
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]
    exported = (
        jax.export.export(function, disabled_checks=allowed)(*args)
        for function, args in _jitted(attention, like)
    )
    # The derivative of an exported function is a closure, which cannot be pickled.
    return Programs(*(dataclasses.replace(program, _get_vjp=None) for program in exported))


def lower_exported(programs: Programs) -> Programs:
    """What `lower` gives, of what `export` gave."""
    lowered = []
    for exported in programs:
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.in_avals]
        args, _ = jax.tree.unflatten(exported.in_tree, like)
        lowered.append(jax.jit(exported.call).lower(*args))
    return Programs(*lowered)


def compiled(lowered: Programs) -> Callable[[Inputs], Runner]:
    """What makes a Runner of inputs."""
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
