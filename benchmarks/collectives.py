"""Collectives of a program: their kinds and bytes, and how long they take by themselves."""

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

REPEATS = 8  # collectives in one program: a launch costs as much as a short one of them

# GB/s that a GPU sends one way, by the MiB of the message.
PUBLISHED_MIB = (16, 128, 1024)
PUBLISHED = {
    "ppermute": (106, 136, 342),
    "all_to_all": (77, 239, 316),
    "all_reduce": (100, 255, 309),  # also of its two halves, all_gather and reduce_scatter
}
RATES = {
    "measured": f"each collective by itself, {REPEATS} in a row that depend on one another",
    "published": "not measured here: reckoned from GB/s one way at 16 / 128 / 1024 MiB that were "
    "measured before, through JAX, on four H200 with NVLink: ppermute 106 / 136 / 342, all_to_all "
    "77 / 239 / 316, all_reduce 100 / 255 / 309 (also for all_gather and reduce_scatter), in "
    "between by the logarithm of the bytes sent",
}


class Message(NamedTuple):
    """One collective, as every device calls it.

    Attributes:
        name: name of jax's primitive.
        shapes: dtypes and shapes of the arrays that one device hands over.
        equation: jax's own equation (of the jaxpr).
    """

    name: str
    shapes: str
    equation: Any

    @property
    def key(self) -> tuple[str, str]:
        """Name and shapes; two messages with the same key are the same work."""
        return self.name, self.shapes

    @property
    def nbytes(self) -> int:
        """Bytes that one device hands over."""
        return sum(v.aval.size * v.aval.dtype.itemsize for v in self.equation.invars)

    def sent(self, devices: int) -> float:
        """Returns the least number of bytes that one device sends to the others."""
        share = (devices - 1) / devices
        return self.nbytes * {
            "ppermute": 1.0,
            "all_gather": devices - 1.0,
            "reduce_scatter": share,
            "all_to_all": share,
        }.get(self.name, 2 * share)  # of an all-reduce

    def program(self, mesh, axis: str) -> tuple[Any, jax.ShapeDtypeStruct]:
        """Returns a jitted function that runs it REPEATS times in a row, and its operand's shape.

        One element of each result goes into the next operand: XLA would merge collectives of the
        same array, and no barrier keeps it from that.
        """
        (operand,) = (v.aval for v in self.equation.invars)
        shape = (operand.shape[0] * mesh.size, *operand.shape[1:])

        def repeated(x):
            found = x
            for _ in range(REPEATS):
                found = self.equation.primitive.bind(x, **self.equation.params)
                found = found[0] if self.equation.primitive.multiple_results else found
                one = found[(0,) * found.ndim].reshape((1,) * x.ndim)
                x = lax.dynamic_update_slice(x, one, (0,) * x.ndim)
            return found

        spec = P(axis)
        cut = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        like = jax.ShapeDtypeStruct(shape, operand.dtype, sharding=NamedSharding(mesh, spec))
        return jax.jit(cut), like

    def published_ms(self, devices: int) -> float:
        """Returns ms at PUBLISHED rates, interpolated over the logarithm of the bytes sent."""
        rates = PUBLISHED.get(self.name, PUBLISHED["all_reduce"])
        sent = self.sent(devices)
        rate = np.interp(np.log2(sent / 2**20), np.log2(PUBLISHED_MIB), rates)
        return sent / float(rate) / 1e6


_COLLECTIVES = ("ppermute", "all_gather", "reduce_scatter", "all_to_all", "psum")


def messages(function, like) -> list[tuple[Message, int]]:
    """Returns every collective of a program, and how often it is called."""
    found: dict[tuple[str, str], Message] = {}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name.startswith(_COLLECTIVES):
                avals = (v.aval for v in equation.invars)
                shapes = " ".join(f"{a.dtype.name}{list(a.shape)}" for a in avals)
                message = Message(name, shapes, equation)
                found[message.key] = message
                counts[message.key] += 1
            for inner in jax.tree.leaves(equation.params, is_leaf=_is_program):
                if _is_program(inner):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(function)(*like).jaxpr)
    return [(message, counts[key]) for key, message in found.items()]


def _is_program(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


_IN_HLO = re.compile(
    r"\b(?:collective-permute|all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\("
)


def kept(hlo: str) -> int:
    """Counts the collectives in the HLO text of a compiled program."""
    return len(_IN_HLO.findall(hlo))
