"""A warning where jnp is lowered for CUDA on a host without a GPU, and no `target` is named.

What a program is lowered for is not known while it is traced, so an operand passes through a
primitive that does nothing but be lowered.
"""

from __future__ import annotations

import functools
import logging

from jax.extend.core import Primitive
from jax.interpreters import mlir

_log = logging.getLogger("flash_pallas")


def passed(x):
    """Returns x; where that is lowered for CUDA, a warning is logged, once in a process."""
    return _unnamed.bind(x)


@functools.cache
def warn() -> None:
    """Says that jnp is exported, and how to export kernels."""
    _log.warning(
        "attention is lowered for CUDA as blockwise jnp, as there is no GPU here to choose kernels "
        "for: name one, as in: with flash_pallas.target('H100'): jax.export.export(...)"
    )


def _for_cuda(_, x):
    warn()
    return [x]


_unnamed = Primitive("flash_attention_without_target")
_unnamed.def_impl(lambda x: x)
_unnamed.def_abstract_eval(lambda x: x)
mlir.register_lowering(_unnamed, lambda _, x: [x])
mlir.register_lowering(_unnamed, _for_cuda, platform="cuda")
