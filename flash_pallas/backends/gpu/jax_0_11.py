"""Repairs of Mosaic GPU in jax 0.11; jax 0.12 has both of them.

- Each kernel is numbered in its process, and its digest is of that number too. The forward of a
  training step was compiled again after that of an evaluation, and JAX's persistent cache did not
  find a program before which another process had lowered other kernels.
- The inference of layouts prints the whole kernel for each of some hundred variables, to sort them:
  a quarter of the time in which the forward is lowered, a sixth of that for a gradient.
"""

from __future__ import annotations

import os

import jax
from jax.experimental.mosaic.gpu import constraints
from jax.experimental.pallas import mosaic_gpu as plgpu

NEEDED = jax.__version_info__ < (0, 12)
SORTING = "compute_transitively_equal_vars"  # of constraints


def repaired(kernel):
    """Returns a kernel that is lowered to the same module whatever was lowered before, and faster.

    Where files of kernels are asked for, numbers stay: the files are named by them.
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
    for one in system.constraints:
        sides = (one.lhs, one.rhs) if isinstance(one, constraints.Equals) else ()
        if sides and all(isinstance(side, constraints.Variable) for side in sides):
            left, right = (groups.setdefault(side, [side]) for side in sides)
            if left is not right:
                left += right
                groups |= dict.fromkeys(right, left)
    return {v: [other for other in group if other != v] for v, group in groups.items()}
