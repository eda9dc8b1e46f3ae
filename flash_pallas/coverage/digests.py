"""Names for what a GPU is given to run: digests of the Mosaic modules of a lowered program.

A module is hashed as text without locations, so that paths and line numbers of this package and of
JAX do not count, and without the architecture that it was lowered on: a host without a GPU finds
the digest of a kernel that has run on one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from jax.experimental.mosaic.gpu import core as mosaic_gpu
from jaxlib.mlir import ir

KERNEL = "mosaic_gpu_v2"  # name of the custom call
LENGTH = 12  # hexadecimal digits: no two of 4,000 kernels collide by chance
_ARCHITECTURE = re.compile(r"mosaic_gpu\.arch_(major|minor) = \d+ : i32,? ?")


def of(lowered) -> str:
    """Returns the digest of all kernels of a `jax.stages.Lowered`; "" where there is none."""
    texts = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts_of(lowered))
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:LENGTH] if texts else ""


def texts_of(lowered) -> Iterator[str]:
    """Yields each kernel's module as text."""
    module = lowered.compiler_ir("stablehlo")
    for raw in sorted(set(_serialised(module))):
        with module.context as context, ir.Location.unknown():
            mosaic_gpu.dialect.register_dialect(context)
            unregistered = context.allow_unregistered_dialects
            context.allow_unregistered_dialects = True
            try:
                kernel = ir.Module.parse(raw)
                text = kernel.operation.get_asm(enable_debug_info=False)
            finally:
                context.allow_unregistered_dialects = unregistered
        yield _ARCHITECTURE.sub("", str(text))


def _serialised(module) -> list[bytes]:
    kernels: list[bytes] = []

    def visit(op: Any):
        attributes = op.attributes
        if op.name == "stablehlo.custom_call" and KERNEL in str(attributes["call_target_name"]):
            config = ir.DictAttr(attributes["mhlo.backend_config"])
            kernels.append(ir.StringAttr(config["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return kernels
