"""Each kernel is compiled as soon as it is lowered, not when its program is, where that is wanted.

Mosaic GPU lowers a kernel in Python and compiles it when XLA has finished the program that it is
in: one after the other, with LLVM and ptxas, 0.7 to 0.9 s each for the forward and the fused
backward, while all other cores are idle. What is compiled is kept for the process, by the kernel's
digest (jaxlib/mosaic/gpu/custom_call.cc). So a thread that compiles a program of nothing but the
kernel, which never runs, leaves it where the program will find it. Meanwhile Python lowers the next
kernel or the rest of a model, or XLA times the matmuls of a training step. A program that needs the
kernel before the thread has ended compiles it too, and waits no longer than it would have.

Two pieces of JAX's inside are used: `KNOWN_KERNELS`, the dict in which a lowering notes each kernel
under its digest, and the name and attributes of the custom call. Without the first nothing is
compiled ahead, without the second the attempt fails in the thread; either way the program compiles
its kernels itself. Because it reaches into JAX, and has not been timed on a GPU, it is done only
where the environment variable FLASH_PALLAS_COMPILE_AHEAD is 1.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import core as mosaic_gpu

VARIABLE = "FLASH_PALLAS_COMPILE_AHEAD"
KERNELS = "KNOWN_KERNELS"  # of jax.experimental.mosaic.gpu.core: serialised kernels by digest
OURS = b"flash_pallas_"  # how the names of this package's kernels begin
AT_ONCE = 4  # the kernels of a gradient; jaxlib 0.11 compiles them side by side

_log = logging.getLogger("flash_pallas")


class Kernels(dict):
    """A dict of serialised kernels by digest that has every new one of this package compiled."""

    def __setitem__(self, digest: bytes, module: bytes):
        super().__setitem__(digest, module)
        if OURS in module:
            with contextlib.suppress(RuntimeError):  # no thread can start, as when Python ends
                _threads().submit(_try, digest, module)


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="flash_pallas_compile")


def wait() -> None:
    """Waits until everything that was lowered so far has been compiled ahead."""
    _threads().shutdown()
    _threads.cache_clear()


def watch() -> None:
    """Compiles ahead what is lowered from now on, if that is wanted and there is a GPU."""
    if os.environ.get(VARIABLE) != "1" or jax.default_backend() != "gpu":
        return
    known = getattr(mosaic_gpu, KERNELS, None)
    if type(known) is dict:  # not yet watched
        setattr(mosaic_gpu, KERNELS, Kernels(known))


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
    run = lambda: call(kernel_hash=digest, module=module, **attributes)
    return jax.jit(run, out_shardings=sharding).lower().compile()


def _try(digest: bytes, module: bytes) -> None:
    try:
        compiled(digest, module)
    except Exception as error:  # the program that has the kernel will say it to the user
        _log.debug("a kernel was not compiled ahead: %s", error)
