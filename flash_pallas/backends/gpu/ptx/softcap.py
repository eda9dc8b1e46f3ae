"""Softcaps of logits in registers, by a polynomial where all logits of a warp are small.

The hardware's tanh takes as long as an exponential, in the same unit. Far below the cap a
polynomial of two multiplications and two multiply-adds is as accurate.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, math

from .inline import WGMMA, assembly, at, f32_constant, of_some_lane

SMALL = 0.4375  # of logits relative to the cap: up to here the polynomial serves
# tanh(z) / z in powers of z**2, with a relative error of 1.1e-5 for |z| up to SMALL.
TANH = (0.9999895086480253, -0.3323387163083041, 0.119106402226565)
# Squares and fifth powers from here to its inverse stay far inside the range of float32.
_SMALLEST_FACTOR = 2.0**-20
_CHAINS = 4  # of maxima that do not wait for each other


class Cap(NamedTuple):
    """Softcap: the capped logits of x are tanh(x * factor) * limit, in base 2.

    Attributes:
        limit: the cap, in base 2.
        factor: what x is multiplied by, relative to the cap.
        small: x has no element above `largest`, so that the polynomial suffices.
    """

    limit: float
    factor: float
    small: bool = False

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients of x, x**3 and x**5 in the capped logits of small x."""
        return tuple(
            self.limit * b * self.factor ** (2 * power + 1) for power, b in enumerate(TANH)
        )

    @property
    def largest(self) -> float:
        """The largest |x| for which the polynomial suffices."""
        return SMALL / abs(self.factor)

    @property
    def representable(self) -> bool:
        """True if no coefficient, of up to factor**5, underflows or overflows in float32."""
        return _SMALLEST_FACTOR <= abs(self.factor) <= 1.0 / _SMALLEST_FACTOR

    @property
    def log2_scale(self) -> float:
        """Factor by which results of `plain` and `element` become logits in base 2."""
        return 1.0 if self.small else self.limit

    def plain(self, x):
        """Caps a tile of x, up to the factor `log2_scale`."""
        if not self.small:
            return jnp.tanh(x * self.factor)
        *others, total = self.coefficients
        for coefficient in reversed(others):
            total = total * (x * x) + coefficient
        return total * x

    def element(self, x):
        """Caps an f32 register of x, up to the factor `log2_scale`."""
        if not self.small:
            angle = arith.mulf(x, f32_constant(self.factor))
            return assembly(x.type, "tanh.approx.f32 $0, $1;", angle)
        square = arith.mulf(x, x)
        *others, last = map(f32_constant, self.coefficients)
        total = last
        for coefficient in reversed(others):
            total = math.fma(total, square, coefficient)
        return arith.mulf(x, total)


def _large_body(largest, _, x):
    tops = [f32_constant(0.0)] * _CHAINS
    # max.f32 passes over a NaN: whether small or not, it stays one.
    code = "{ .reg .f32 t; abs.f32 t, $2; max.f32 $0, $1, t; }"
    for n, (register, e) in enumerate(itertools.product(x.registers.flat, range(2))):
        top = tops[n % _CHAINS]
        tops[n % _CHAINS] = assembly(top.type, code, top, at(register, e))
    top = functools.reduce(arith.maximumf, tops)
    large = arith.cmpf(arith.CmpFPredicate.OGT, top, f32_constant(largest))
    return mgpu.FragmentedArray.splat(of_some_lane(large), (), is_signed=True)


def is_large(x, cap: Cap, interpret: bool):
    """Returns i32, uniform over a warp: 1 if the polynomial fails for an element of its rows.

    It may guard arithmetic but no barrier or copy. The interpreter treats all rows as one warp's.
    """
    if interpret:
        return (jnp.abs(x) > cap.largest).any().astype(jnp.int32)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(functools.partial(_large_body, cap.largest))
    return run(x)
