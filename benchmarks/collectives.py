"""Collectives of a program: their kinds and bytes, and how long they take by themselves."""

from __future__ import annotations

import collections
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
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


class Sent(NamedTuple):
    """A collective of a compiled program.

    Attributes:
        kind: name of the HLO operation, without "-start".
        nbytes: bytes that one device hands over.
        group: devices that take part together.
    """

    kind: str
    nbytes: int
    group: int

    @property
    def sent(self) -> float:
        """The least number of bytes that one device sends to the others."""
        share = (self.group - 1) / self.group
        return self.nbytes * {
            "all-reduce": 2 * share,
            "all-gather": self.group - 1.0,
            "collective-permute": 1.0,
        }.get(self.kind, share)


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|branch_computations|to_apply)={?((?:%?[\w.-]+(?:, )?)+)")
_TRIPS = re.compile(r'"known_trip_count":{"n":"(\d+)"')
# Groups are listed, or counted as [groups,size], or axes of a mesh: mesh['a'=2,'b'=2] {'a'}.
_GROUP = re.compile(r"replica_groups=(?:{{([\d,]+)}|\[\d+,(\d+)\]|mesh\[(.*?)\] {(.*?)})")
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def _bytes(shape: str) -> int:
    """Returns the bytes of all arrays in the text of a shape."""
    sizes = ((int(bits or 8), dims.split(",")) for bits, dims in _ARRAY.findall(shape))
    return sum(bits * math.prod(int(n) for n in dims if n) // 8 for bits, dims in sizes)


def _group(rest: str, devices: int) -> int:
    """Returns the size of a collective's groups, from the text behind its name."""
    found = _GROUP.search(rest)
    if found is None:
        return devices
    listed, size, mesh, axes = found.groups()
    if mesh is None:
        return len(listed.split(",")) if listed else int(size)
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh)}
    # A part of an axis is written 'a':(major)size.
    parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part) if part else sizes[name] for name, part in parts)


def in_hlo(hlo: str, devices: int) -> collections.Counter[Sent]:
    """Counts the collectives that one run of a compiled program calls, from its text.

    A loop counts as often as XLA knows that it runs; one of unknown length counts once.

    Args:
        hlo: text of the compiled program.
        devices: number of devices, for collectives whose groups are not listed.
    """
    shapes: dict[str, str] = {}
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    entry, inside = "", ""
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            inside = found[2]
            bodies[inside] = []
            entry = inside if found[1] else entry
        elif found := _INSTRUCTION.match(line):
            name, shape, operation, rest = found.groups()
            shapes[name] = shape
            bodies.setdefault(inside, []).append((name, operation, rest))
    counts: collections.Counter[Sent] = collections.Counter()

    def visit(computation: str, times: int) -> None:
        for _, operation, rest in bodies.get(computation, ()):
            kind = operation.removesuffix("-start")
            if kind in _KINDS:
                operands = re.findall(r"%([\w.-]+)", rest.split(")")[0])
                nbytes = sum(_bytes(shapes.get(name, "")) for name in operands)
                counts[Sent(kind, nbytes, _group(rest, devices))] += times
                continue
            trips = _TRIPS.search(rest) if operation == "while" else None
            for names in _CALLED.findall(rest):
                for name in names.replace("%", "").split(", "):
                    visit(name, times * int(trips[1] if trips else 1))

    visit(entry, 1)
    return counts


def rate_program(kind: str, nbytes: int, devices) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Returns a jitted function that runs a collective REPEATS times in a row, and its operand.

    Each result goes into the next operand, so that XLA can neither merge nor drop one.

    Args:
        kind: name of the HLO operation.
        nbytes: bytes that each device hands over, in bfloat16.
        devices: devices that take part.
    """
    count = len(devices)
    mesh = jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=devices)
    size = max(nbytes // 2 // count, 1) * count
    ring = [(i, (i + 1) % count) for i in range(count)]
    call = {
        "all-reduce": lambda x: lax.psum(x, "x"),
        "all-gather": lambda x: lax.all_gather(x, "x", tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "x", tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, "x", ring),
    }[kind]

    def repeated(x):
        for _ in range(REPEATS):
            one = lax.slice(call(x), (0,), (1,))
            x = lax.dynamic_update_slice(x, one, (0,))
        return x

    spec = P("x")
    cut = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    return jax.jit(cut), jax.ShapeDtypeStruct((size * count,), jnp.bfloat16, sharding=sharding)
