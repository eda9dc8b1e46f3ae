"""Runs Hopper kernels on CPU: JAX's Mosaic GPU interpreter, extended for attention kernels.

    from tests.interpreter import race_checked

    with race_checked():
        out = jax.jit(f)(q, k, v)  # f calls plgpu.kernel(..., interpret=INTERPRET)

JAX's interpreter (0.11, 0.12) lacks or simplifies parts of these kernels. This module adds:

* `acc_ref[...] = value` on a `plgpu.ACC`, and wgmma with its left operand in registers;
* asynchronous wgmma: it reads shared memory from its issue until `wgmma_wait(n)` or
  `wgmma_accumulator_load(wait_n=n)` retires it, so a slot released too early is a race, and so is
  touching an accumulator that is still being added to;
* `copy_smem_to_gmem(reduction_op=...)`;
* words in device memory by which CTAs tell each other what they have written (`inline.set_bits`,
  `inline.await_bits`): who waits for a CTA that starts later is a deadlock;
* the race rules of `interpreter_races`, and an end to deadlocks.

Multicast is still missing and runs only on a GPU: for a copy with `collective_axes` every CTA
copies all parts itself.

Installation replaces functions of `jax._src` (once, when first needed). Every function that is
replaced is looked up by name first, so a JAX that moved one fails here and says which. `NPROC=16`
must be in the environment before jax is imported: every waiting warpgroup occupies a thread of
XLA's pool, which has one thread per core, and two cores hang now and then.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import jax
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import (
    gpu_callbacks,
    interpret_pallas_call,
    jaxpr_interpret,
    shared_memory,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from flash_pallas.backends.gpu.ptx import inline

from . import interpreter_callbacks as callbacks
from .interpreter_races import RaceLog, WatchedCondition, reset_monitor

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


class KernelFault(AssertionError):
    """Error of an interpreted kernel that broke a rule which the GPU would punish silently."""


class RaceError(KernelFault):
    """Error of two unordered accesses to one place, or of touching an accumulator in flight."""


class DeadlockError(KernelFault):
    """Error of a thread that waited for a barrier that nobody completes."""


@contextlib.contextmanager
def race_checked(deadlock_s: float = 60.0) -> Iterator[None]:
    """Checks that everything interpreted inside is free of races and deadlocks.

    Kernels must be traced inside or after a first use of this context, with `interpret=INTERPRET`.
    The interpreter's state is reset on the way out, whatever happened.

    Args:
        deadlock_s: a wait fails after this many seconds in which no barrier completed. The default
            leaves time for another warpgroup that XLA still compiles on a busy machine.

    Raises:
        RaceError: with the conflicting pairs of source lines.
        DeadlockError: a barrier was waited for in vain.
        AssertionError: no interpreted, race-checked kernel ran inside.
        jax.errors.JaxRuntimeError: the interpreter itself refused the kernel (a barrier phase that
            was never observed, an access out of bounds, ...).
    """
    _install()
    seen = reset_monitor(deadlock_s=deadlock_s)
    cause = None
    try:
        yield
        jax.effects_barrier()
    except Exception as error:
        cause = error
        if not (seen.races or seen.deadlocks):
            raise
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    if seen.deadlocks:
        raise DeadlockError("\n".join(seen.deadlocks)) from cause
    if seen.races:
        pairs = list(dict.fromkeys(seen.races))
        shown = "\n  ".join(pairs[:8])
        raise RaceError(f"{len(pairs)} race(s), first:\n  {shown}") from cause
    if not seen.accesses:
        raise AssertionError("no race-checked kernel was interpreted inside race_checked()")


def _emit(interpreter, function, token, **operands):
    return callback.io_callback(
        function,
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        thread=interpreter.thread,
        **operands,
    )


def _interpret_wait(interpreter, eqn, token, _):
    return _emit(interpreter, functools.partial(callbacks.wgmma_wait, n=eqn.params["n"]), token), []


def _interpret_store(interpreter, eqn, token, invals):
    key, value = invals
    store = functools.partial(callbacks.accumulator_store, source_info=eqn.source_info)
    return _emit(interpreter, store, token, key=key, value=value), [value]


def _interpret_bits(function, interpreter, eqn, token, invals):
    key, index, bits = invals
    function = functools.partial(function, source_info=eqn.source_info)
    return _emit(interpreter, function, token, key=key, index=index, bits=bits), []


def _interpret_fence(interpreter, eqn, token, _):
    return _emit(interpreter, callbacks.fence_copies, token), []


_RULES = {
    gpu_primitives.wgmma_wait_p: _interpret_wait,
    gpu_primitives.wgmma_accumulator_store_p: _interpret_store,
}
_INLINE_RULES = {
    inline.set_bits_body: functools.partial(_interpret_bits, callbacks.set_bits),
    inline.await_bits_body: functools.partial(_interpret_bits, callbacks.await_bits),
    inline.fence_copies_body: _interpret_fence,
}


def _rule(eqn):
    if eqn.primitive is gpu_primitives.inline_mgpu_p:
        return _INLINE_RULES.get(eqn.params["mgpu_fn"])
    return _RULES.get(eqn.primitive)


def _interpret(original, self, jaxpr, token, *args):
    """Runs JaxprInterpreter.interpret with these rules; JAX gets other equations, one by one."""
    if not any(map(_rule, jaxpr.eqns)):
        return original(self, jaxpr, token, *args)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, jax_core.Literal) else env[atom]
    for eqn in jaxpr.eqns:
        outs = [v for v in eqn.outvars if not isinstance(v, jax_core.DropVar)]
        if rule := _rule(eqn):
            token, values = rule(self, eqn, token, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, values, strict=True))
            continue
        ins = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jax_core.Literal)))
        single = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=[eqn])
        token, values = original(self, single, token, *(env[v] for v in ins))
        env.update(zip(outs, values, strict=True))
    return token, [read(v) for v in jaxpr.outvars]


def _patch(owner, name: str, replacement, *, wrap: bool = False) -> None:
    original = getattr(owner, name, None)
    if original is None:
        raise ImportError(f"jax {jax.__version__} has no {owner.__name__}.{name}: adapt {__file__}")
    if wrap:
        wrapped = functools.partial(replacement, original)
        replacement = lambda *args, **kwargs: wrapped(*args, **kwargs)  # binds as a method
    setattr(owner, name, replacement)


def _watch_barrier(original, barrier, *args, **kwargs) -> None:
    original(barrier, *args, **kwargs)
    barrier.cv = WatchedCondition()


def _next_block(original, memory) -> None:
    original(memory)
    if isinstance(gpu_callbacks._races, RaceLog):
        gpu_callbacks._races.block += 1


def _interpret_narrow(original, *args, **kwargs):
    """Interprets a kernel without `jax_enable_x64`, as it was traced and as its threads run."""
    with jax.enable_x64(False):
        return original(*args, **kwargs)


@functools.cache
def _install() -> None:
    if int(os.environ.get("NPROC", "0")) < 16:
        raise RuntimeError("set NPROC=16 before jax is imported, or interpreted kernels may hang")
    _patch(gpu_callbacks, "GPURaceDetectionState", RaceLog)
    _patch(gpu_callbacks, "wgmma", callbacks.wgmma)
    _patch(gpu_callbacks, "wgmma_accumulator_deref", callbacks.accumulator_load)
    _patch(gpu_callbacks, "copy_smem_to_gmem", callbacks.copy_smem_to_gmem, wrap=True)
    _patch(gpu_callbacks.AsyncCopyGmemToSmemTask, "post_read", callbacks.log_tma_write)
    _patch(shared_memory.Barrier, "__init__", _watch_barrier, wrap=True)
    _patch(shared_memory.GPUSharedMemory, "reset_per_cluster_state", _next_block, wrap=True)
    _patch(jaxpr_interpret.JaxprInterpreter, "interpret", _interpret, wrap=True)
    _patch(interpret_pallas_call, "interpret_pallas_call", _interpret_narrow, wrap=True)
