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
from ..core.problem import Operands, Outputs
from ..core.softmax import LOG2E
from ..devices import Device, within
from .base import Backend, Vjp
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

    @property
    def attention(self) -> Any:
        """Attention of whole sequences."""
        unit = lambda spec, operands: problem.describe(operands, spec).unit
        return _ByPlatform(self, "attention", problem.describe, unit)

    @property
    def decode(self) -> Any:
        """Attention to a cache."""
        return _ByPlatform(self, "decode", decode.describe, _unit)

    @property
    def ragged(self) -> Any:
        """Attention over pages."""
        unit = lambda spec, operands: _unit(spec.decode, operands)
        return _ByPlatform(self, "ragged", ragged.describe, unit)

    @property
    def vjp(self) -> Any:
        """The gradients of attention."""
        return _VjpByPlatform(self)


def _unit(spec: decode.DecodeSpec, operands) -> float:
    return spec.attention.unit(operands.alibi_slopes is not None)


class _ByPlatform:
    """An operation of the kernels, which jnp computes elsewhere.

    Attributes:
        backend: the backend that the operation is of.
        name: the operation's name.
        describe: (operands, spec) -> the problem.
        unit: (spec, operands) -> that of `softmax.finish`.
    """

    def __init__(self, backend: TargetBackend, name: str, describe: Callable, unit: Callable):
        self.backend, self.name, self.describe, self.unit = backend, name, describe, unit

    @property
    def kernels(self) -> Any:
        """The operation of the kernels."""
        return getattr(self.backend.kernels, self.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def run(self, spec, blocks, operands) -> Outputs:
        """Computes the operation on the platform that the program runs on."""
        jnp_operation = getattr(_JNP, self.name)

        def elsewhere(operands):
            tiles = jnp_operation.plan(self.describe(operands, spec))
            return jnp_operation.run(spec, tiles, operands)

        on_cuda, unit = partial(self.kernels.run, spec, blocks), self.unit(spec, operands)
        return _outputs(self.backend.device, on_cuda, elsewhere, operands, unit)


class _VjpByPlatform(Vjp):
    """The gradients by kernels, or in jnp elsewhere."""

    def __init__(self, backend: TargetBackend):
        self.backend = backend

    @property
    def reads_output(self) -> bool:
        """True if the kernels read it; see `Vjp`."""
        return self.backend.kernels.vjp.reads_output

    def run(self, spec, blocks, operands, cotangents, wanted) -> Operands:
        """Computes the gradients on the platform that the program runs on."""

        def on_cuda(operands, cotangents):
            return self.backend.kernels.vjp.run(spec, blocks, operands, cotangents, wanted)

        def elsewhere(operands, cotangents):
            tiles = _JNP.attention.plan(problem.describe(operands, spec))
            return _JNP.vjp.run(spec, tiles, operands, cotangents, wanted)

        return by_platform(self.backend.device, on_cuda, elsewhere, operands, cotangents)


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
    leaves = _by_platform.bind(*jax.tree.leaves(args), cuda=cuda, elsewhere=other, device=device)
    return jax.tree.unflatten(jax.tree.structure(results), leaves)


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
