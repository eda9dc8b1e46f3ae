"""A backend for `flash_pallas.target`: kernels of that GPU on CUDA, blockwise jnp elsewhere.

Both are traced into one program, and lowering for a platform takes that platform's. So one exported
program serves several platforms, and what is traced for a GPU still runs on the CPU that traces it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ..core import decode, mesh_axes, problem, ragged
from ..core.problem import Grads, Outputs
from ..core.softmax import LOG2E
from ..devices import Device, within
from .base import Backend
from .xla import XlaBackend

_JNP = XlaBackend()


@dataclasses.dataclass(frozen=True)
class TargetBackend:
    """Kernels on CUDA and jnp elsewhere.

    Whatever else is asked of a `Backend` is answered by that of the kernels. Its forward mode is
    the kernels' alone: transforms/equations.py, which has it in jnp, calls it on CUDA only.

    Attributes:
        kernels: the backend that runs on CUDA.
        device: the GPU that it is made for.
    """

    kernels: Backend
    device: Device

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "kernels"), name)

    def forward(self, spec, blocks, operands) -> Outputs:
        """Computes attention; see `Backend`, as for the others."""

        def elsewhere(operands):
            tiles = _JNP.blocks(problem.describe(operands, spec), None)
            return _JNP.forward(spec, tiles, operands)

        unit = problem.describe(operands, spec).unit
        on_cuda = partial(self.kernels.forward, spec, blocks)
        return _outputs(self.device, on_cuda, elsewhere, operands, unit)

    def backward(self, spec, blocks, operands, cotangents, wanted) -> Grads:
        """Computes gradients."""

        def on_cuda(operands, cotangents):
            return self.kernels.backward(spec, blocks, operands, cotangents, wanted)

        def elsewhere(operands, cotangents):
            tiles = _JNP.blocks(problem.describe(operands, spec), None)
            return _JNP.backward(spec, tiles, operands, cotangents, wanted)

        return by_platform(self.device, on_cuda, elsewhere, operands, cotangents)

    def decode(self, spec, blocks, operands) -> Outputs:
        """Computes attention of a few queries to a cache."""

        def elsewhere(operands):
            tiles = _JNP.decode_blocks(decode.describe(operands, spec))
            return _JNP.decode(spec, tiles, operands)

        unit = spec.attention.unit(operands.alibi_slopes is not None)
        on_cuda = partial(self.kernels.decode, spec, blocks)
        return _outputs(self.device, on_cuda, elsewhere, operands, unit)

    def ragged(self, spec, blocks, operands) -> Outputs:
        """Computes ragged attention over pages."""

        def elsewhere(operands):
            tiles = _JNP.ragged_blocks(ragged.describe(operands, spec))
            return _JNP.ragged(spec, tiles, operands)

        unit = spec.decode.attention.unit(operands.alibi_slopes is not None)
        on_cuda = partial(self.kernels.ragged, spec, blocks)
        return _outputs(self.device, on_cuda, elsewhere, operands, unit)


def _outputs(
    device: Device, on_cuda: Callable, elsewhere: Callable, operands, unit: float
) -> Outputs:
    """Computes Outputs by platform, with a shift only where the kernels have one.

    Args:
        device: as of `by_platform`.
        on_cuda: operands -> Outputs, by kernels; it is traced first.
        elsewhere: the same by jnp, always with a shift.
        operands: the arrays.
        unit: that of `softmax.finish`.
    """
    shifts = []

    def noted(operands):
        out = on_cuda(operands)
        shifts.append(out.shift)
        return out

    def alike(operands):
        out = elsewhere(operands)
        if shifts != [None]:
            return out
        return out._replace(lse_log2=out.lse_log2 + out.shift * (unit * LOG2E), shift=None)

    return by_platform(device, noted, alike, operands)


# --- Two programs in one --------------------------------------------------------------------------
# jax.lax.platform_dependent would do, but Pallas asks for the platforms of the whole program, and
# refuses more than one. A primitive is lowered for each platform by itself.


def by_platform(device: Device, on_cuda: Callable, elsewhere: Callable, *args):
    """Computes on_cuda(*args) where the program runs on CUDA, and elsewhere(*args) where not.

    Args:
        device: the GPU that on_cuda is traced and lowered for.
        on_cuda: the one function.
        elsewhere: the other, with results of the same shapes.
        *args: trees of arrays.
    """
    axes = mesh_axes.varying(args)

    def traced(call):
        typed = lambda *args: mesh_axes.spread(call(*args), axes)
        return jax.make_jaxpr(typed, return_shape=True)(*args)

    with within(device):
        cuda, results = traced(on_cuda)
    other, _ = traced(elsewhere)
    found = _by_platform.bind(*jax.tree.leaves(args), cuda=cuda, elsewhere=other, device=device)
    return jax.tree.unflatten(jax.tree.structure(results), found)


_by_platform = Primitive("flash_attention_by_platform")
_by_platform.multiple_results = True


def _avals(*_, cuda, elsewhere, device):
    return cuda.out_avals, cuda.effects | elsewhere.effects


def _on_cuda(*args, cuda, elsewhere, device):
    return jaxpr_as_fun(cuda)(*args)


def _elsewhere(*args, cuda, elsewhere, device):
    return jaxpr_as_fun(elsewhere)(*args)


def _apart(context):
    """Returns a context of lowering whose cached functions no other platform's code calls.

    JAX keeps functions that it has lowered, such as those of jnp, without regard to the platform.
    """
    if context.platforms is None:
        return context
    own = context.module_context.replace(cached_primitive_lowerings={})
    return context.replace(module_context=own)


_of_cuda = mlir.lower_fun(_on_cuda, multiple_results=True)
_of_others = mlir.lower_fun(_elsewhere, multiple_results=True)


def _lower_on_cuda(context, *args, device, **params):
    with within(device):
        return _of_cuda(_apart(context), *args, device=device, **params)


def _lower_elsewhere(context, *args, **params):
    return _of_others(_apart(context), *args, **params)


_by_platform.def_impl(lambda *args, **params: jax.jit(partial(_by_platform.bind, **params))(*args))
_by_platform.def_effectful_abstract_eval(_avals)
mlir.register_lowering(_by_platform, _lower_on_cuda, platform="cuda")
mlir.register_lowering(_by_platform, _lower_elsewhere)
