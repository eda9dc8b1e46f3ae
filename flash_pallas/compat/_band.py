"""The window of a mask_mod, found in its comparisons of positions so that blocks can be skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..core.elementwise import Tape

LARGEST = 2**30  # beyond it, sums of int32 positions could wrap


@dataclasses.dataclass(frozen=True)
class Band:
    """Keys j that query i may see: i - left <= j <= i + right.

    Attributes:
        left: int of any sign; None is unbounded.
        right: the same.
        exact: whether all keys of the band are visible. Otherwise the band is an upper bound.
    """

    left: int | None = None
    right: int | None = None
    exact: bool = True

    def __and__(self, other: Band) -> Band:
        return Band(*map(_tighter, self._sides, other._sides), exact=self.exact and other.exact)

    def __or__(self, other: Band) -> Band:
        """Returns the hull, which is exact if one of the two holds the other."""
        pairs = list(zip(self._sides, other._sides, strict=True))
        left, right = (None if None in pair else max(pair) for pair in pairs)
        exact = any(b.exact and b._sides == (left, right) for b in (self, other))
        return Band(left, right, exact=exact)

    @property
    def _sides(self) -> tuple[Any, Any]:
        return self.left, self.right

    @property
    def is_window(self) -> bool:
        """True if `window` alone describes what is visible."""
        return self.exact and (self.window is not None or self._sides == (None, None))

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """The argument of `flash_attention`; None if it is unbounded or a side is negative."""
        if self._sides == (None, None) or min(x for x in self._sides if x is not None) < 0:
            return None
        return self._sides


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The integer i * of_query + j * of_key + constant."""

    of_query: int
    of_key: int
    constant: int

    def plus(self, other: _Sum, sign: int) -> _Sum:
        mine, others = (dataclasses.astuple(x) for x in (self, other))
        return _Sum(*(a + sign * b for a, b in zip(mine, others, strict=True)))


ANY = Band(exact=False)
# Comparisons x ? y as (sign, constant) of sign * (x - y) + constant <= 0.
COMPARISONS = {"le": (1, 0), "lt": (1, 1), "ge": (-1, 0), "gt": (-1, 1)}


def band_of(mask_mod: Callable) -> Band:
    """Returns the smallest band that provably contains all keys that a mask_mod shows.

    It follows sums and differences of i, j and integers, comparisons between two of them, "and" and
    "or". Everything else is treated as unknown.

    Args:
        mask_mod: (b, n, i, j) -> bool, traceable.

    Example:
        >>> from flash_pallas.compat._band import band_of
        >>> band_of(lambda b, n, i, j: (j <= i) & (i - j < 128))
        Band(left=127, right=0, exact=True)
    """
    closed = jax.make_jaxpr(mask_mod)(*(jax.ShapeDtypeStruct((), jnp.int32),) * 4)
    tape, names = Tape(), [object() for _ in range(4)]
    (result,) = tape.inline(closed.jaxpr, closed.consts, names)
    symbolic: dict[Any, _Sum | Band | None] = {names[2]: _Sum(1, 0, 0), names[3]: _Sum(0, 1, 0)}
    for value, constant in tape.constants.items():
        symbolic[value] = _constant(constant)
    read = lambda x: _constant(x.val) if isinstance(x, Literal) else symbolic.get(x)
    for primitive, params, operands, results in tape.equations:
        if len(results) == 1:
            symbolic[results[0]] = _step(primitive.name, params, [read(x) for x in operands])
    answer = read(result)
    return answer if isinstance(answer, Band) else ANY


def _constant(x) -> _Sum | Band | None:
    """Returns what a number means; None is unknown."""
    if isinstance(x, jax.core.Tracer) or np.ndim(x):
        return None
    x = np.asarray(x)
    if x.dtype == bool:
        return Band() if x else ANY
    known = np.issubdtype(x.dtype, np.integer) and abs(int(x)) <= LARGEST
    return _Sum(0, 0, int(x)) if known else None


def _step(name: str, params, operands: list) -> _Sum | Band | None:
    """Returns what one equation computes; None is unknown."""
    if name in ("and", "or"):
        a, b = (x if isinstance(x, Band) else ANY for x in operands)
        return a & b if name == "and" else a | b
    if name == "convert_element_type":
        kept = isinstance(operands[0], Band) and params["new_dtype"] == jnp.bool_
        kept |= isinstance(operands[0], _Sum) and params["new_dtype"] == jnp.int32
        return operands[0] if kept else None
    if not operands or not all(isinstance(x, _Sum) for x in operands):
        return None
    if name == "neg":
        return _Sum(0, 0, 0).plus(operands[0], -1)
    if name in ("add", "sub"):
        return operands[0].plus(operands[1], 1 if name == "add" else -1)
    return _compared(name, *operands) if name in COMPARISONS else None


def _compared(name: str, x: _Sum, y: _Sum) -> Band | None:
    """Returns the band in which a comparison holds; None if it is no band."""
    sign, constant = COMPARISONS[name]
    below = _Sum(0, 0, constant).plus(x.plus(y, -1), sign)
    if abs(below.constant) > LARGEST:
        return None
    if (below.of_query, below.of_key) == (1, -1):
        return Band(left=-below.constant)
    if (below.of_query, below.of_key) == (-1, 1):
        return Band(right=-below.constant)
    return None
