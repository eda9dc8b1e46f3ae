"""Each kernel is compiled as soon as it is lowered, not when its program is, where that is wanted.

Mosaic GPU lowers a kernel in Python and compiles it when XLA has finished the program that it is
in: one after the other, with LLVM and ptxas, 0.7 to 0.9 s each for the forward and the fused
backward, while all other cores are idle. What is compiled is kept for the process, by the kernel's
digest (jaxlib/mosaic/gpu/custom_call.cc). So a thread that compiles a program of nothing but the
kernel, which never runs, leaves it where the program will find it. Meanwhile Python lowers the next
kernel or the rest of a model, or XLA times the matmuls of a training step. A program that needs the
kernel before the thread has ended compiles it too, and waits no longer than it would have.

A program of one kernel gains nothing: it would compile the kernel at the same time. So the first
kernel of a program starts a moment later, and not at all if the program's lowering ends with it.

On a host with few cores the others have work already. FLASH_PALLAS_COMPILE_AHEAD is 0 or 1 to
decide otherwise. H200, 32 cores, medians of a fresh process: gradient 3.6 s for 5.8, training step
of 22 layers 9.4 for 10.5 (benchmarks/results/first_call.json).

Two pieces of JAX's inside are used: the dict in which a lowering notes each kernel under its digest
(`jax_compat.watch_kernels`), and the name and attributes of the custom call. Without the first
nothing is compiled ahead, without the second the attempt fails in the thread; either way the
program compiles its kernels itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import threading

import jax
import jax.numpy as jnp

from . import jax_compat

VARIABLE = "FLASH_PALLAS_COMPILE_AHEAD"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # JAX's event: a program is lowered
OURS = b"flash_pallas_"  # how the names of this package's kernels begin
AT_ONCE = 4  # the kernels of a gradient; jaxlib 0.11 compiles them side by side
CORES = 4  # of a host that compiles ahead by itself
MOMENT = 0.03  # seconds in which a program of one kernel is lowered behind it, with much to spare

_log = logging.getLogger("flash_pallas")
_thread = threading.local()  # program: what this thread lowers


class Program:
    """The program that a thread lowers: how many kernels it has so far, and whether it has ended.

    Attributes:
        kernels: number of kernels.
        ended: set when it is lowered and has one kernel.
    """

    def __init__(self):
        self.kernels, self.ended = 0, threading.Event()


class Kernels(dict):
    """A dict of serialised kernels by digest that has every new one of this package compiled."""

    def __setitem__(self, digest: bytes, module: bytes):
        super().__setitem__(digest, module)
        if OURS in module:
            program = _thread.program = getattr(_thread, "program", None) or Program()
            program.kernels += 1
            work = functools.partial(_try_first, program) if program.kernels == 1 else _try
            with contextlib.suppress(RuntimeError):  # no thread can start, as when Python ends
                _threads().submit(work, digest, module)


def _lowered(event: str, *_, **__) -> None:
    """Listens to JAX's events: notes that the program which this thread lowers has ended."""
    program = getattr(_thread, "program", None)
    if event == LOWERED and program is not None:
        _thread.program = None
        if program.kernels == 1:
            program.ended.set()


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="flash_pallas_compile")


def wait() -> None:
    """Waits until everything that was lowered so far has been compiled ahead."""
    _threads().shutdown()
    _threads.cache_clear()


def wanted() -> bool:
    """Returns whether kernels are compiled ahead here, if there is a GPU.

    Raises:
        ValueError: The environment variable has another value than 0 and 1.
    """
    setting = os.environ.get(VARIABLE, "")
    if setting not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE} is {setting!r}; set it to 1 to compile kernels ahead, to 0 not to, or "
            f"unset it to do so on {CORES} cores and more"
        )
    return setting == "1" if setting else len(os.sched_getaffinity(0)) >= CORES


def watch() -> None:
    """Compiles ahead what is lowered from now on, if that is wanted and there is a GPU."""
    if jax.default_backend() != "gpu" or not wanted():
        return
    if jax_compat.watch_kernels(Kernels):
        _listen()


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_lowered)


def compiled(digest: bytes, module: bytes, sharding=None) -> jax.stages.Compiled:
    """Compiles a program of one kernel, which leaves its machine code in jaxlib's cache.

    Args:
        digest: SHA-256 of `module`.
        module: the kernel as Mosaic GPU serialises it.
        sharding: of the program's result, which says what it is compiled for; None is JAX's device.
    """
    attributes = {"use_custom_barrier": False, "skip_device_barrier": False}
    attributes |= {"uses_xla_collective_metadata": False}
    form = jax.ShapeDtypeStruct((1,), jnp.float32)  # only what compiles the kernel looks at it
    call = jax.ffi.ffi_call("mosaic_gpu_v2", form, has_side_effect=True)

    def flash_pallas_ahead():  # the name that jax_log_compiles prints
        return call(kernel_hash=digest, module=module, **attributes)

    return jax.jit(flash_pallas_ahead, out_shardings=sharding).lower().compile()


def _try_first(program: Program, digest: bytes, module: bytes) -> None:
    if not program.ended.wait(MOMENT):
        _try(digest, module)


def _try(digest: bytes, module: bytes) -> None:
    try:
        compiled(digest, module)
    except Exception as error:  # the program that has the kernel will say it to the user
        _log.debug("a kernel was not compiled ahead: %s", error)
