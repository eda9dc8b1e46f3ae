"""Differences between versions of jax and jaxlib, and what is replaced inside Mosaic GPU.

Kernels ask here, and nowhere else, which version is installed. Three objects of Mosaic GPU are
replaced for the whole process, as it has no setting for what they decide:

- `constraints.compute_transitively_equal_vars`, with jax 0.11 alone, by `repaired`.
- `utils._infer_arch`, by `infer_targets`.
- `core.KNOWN_KERNELS`, by `watch_kernels`.

docs/internals/jax-upgrade.md lists what to look at for a new jax.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import jax
import jaxlib.version
from jax.experimental.mosaic.gpu import constraints, core, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

# --- jaxlib 0.12: setmaxnreg ----------------------------------------------------------------------


def trades_registers() -> bool:
    """Returns whether jaxlib compiles setmaxnreg, by which warpgroups trade registers.

    From 0.12 on its wheels compile Mosaic GPU kernels through nvJitLink, as code to be linked, in
    which the instruction has no effect (C7504). Three warpgroups then have 168 registers a thread;
    code made for 240 spills up to 1,300 bytes and has its wgmma serialised. Two have 255.
    """
    return jaxlib.version.__version_info__ < (0, 12)


# --- The GPU that kernels are lowered for ---------------------------------------------------------


@functools.cache
def infer_targets(capability: Callable[[], str | None]) -> None:
    """Makes Mosaic GPU lower kernels for another compute capability than the default device's.

    Args:
        capability: called for each kernel; returns such as "9.0", or None for the default device's.
    """
    infer_default = utils._infer_arch

    def infer_target() -> tuple[int, int]:
        if (target := capability()) is None:
            return infer_default()
        major, minor = map(int, target.split("."))
        return major, minor

    utils._infer_arch = infer_target


# --- The kernels that were lowered ----------------------------------------------------------------

KERNELS = "KNOWN_KERNELS"  # serialised kernels by digest, in which a lowering notes each


def watch_kernels(kind: type[dict]) -> bool:
    """Makes a dict of this kind of the dict of lowered kernels; returns whether it was a plain one.

    A jax without it is left as it is.
    """
    known = getattr(core, KERNELS, None)
    if type(known) is not dict:
        return False
    setattr(core, KERNELS, kind(known))
    return True


# --- jax 0.11: repairs ----------------------------------------------------------------------------

NEEDED = jax.__version_info__ < (0, 12)
SORTING = "compute_transitively_equal_vars"  # of constraints


def repaired(kernel):
    """Returns a kernel that jax 0.11 lowers as jax 0.12 does: to the same module, and faster.

    - Each kernel is numbered in its process, and its digest is of that number too. The forward of a
      training step was compiled again after that of an evaluation, and JAX's persistent cache did
      not find a program before which another process had lowered other kernels. Where files of
      kernels are asked for, numbers stay: the files are named by them.
    - The inference of layouts prints the whole kernel for each of some hundred variables, to sort
      them: a quarter of the time in which the forward is lowered, a sixth of that for a gradient.
    """
    if not NEEDED:
        return kernel
    if hasattr(constraints, SORTING):
        setattr(constraints, SORTING, equal_variables)
    if any(name.startswith("MOSAIC_GPU_DUMP_") for name in os.environ):
        return kernel

    def named(*refs):
        plgpu.inline_mgpu()(_name)()
        kernel(*refs)

    return named


def _name(context) -> None:
    """Gives a module the name for its files, which otherwise would be made with a number."""
    attributes = context.module.operation.attributes
    attributes["mosaic_gpu.dump_basename"] = attributes["sym_name"]


def equal_variables(system):
    """Returns the other variables that each variable is equal to, in order of appearance.

    Args:
        system: a jax.experimental.mosaic.gpu.constraints.ConstraintSystem.
    """
    groups = {}
    for constraint in system.constraints:
        sides = (
            (constraint.lhs, constraint.rhs) if isinstance(constraint, constraints.Equals) else ()
        )
        if sides and all(isinstance(side, constraints.Variable) for side in sides):
            left, right = (groups.setdefault(side, [side]) for side in sides)
            if left is not right:
                left += right
                groups |= dict.fromkeys(right, left)
    return {v: [other for other in group if other != v] for v, group in groups.items()}
