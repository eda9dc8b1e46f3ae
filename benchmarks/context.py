"""Context parallelism: the steps that are timed, and what the interconnect allows."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas
from flash_pallas.parallel import context_parallel_attention, from_zigzag, to_zigzag

from . import cupti, flops, gate, suites

AXIS = "context"
ALONE = "one GPU"


class Kind(NamedTuple):
    """One way to shard a sequence; strategy None is attention on one device."""

    strategy: str | None
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """Name in tables."""
        return ALONE if self.strategy is None else f"{self.strategy} {self.layout}"


KINDS = {
    kind.name: kind
    for kind in (
        Kind(None),
        Kind("ring", "zigzag"),
        Kind("ring", "contiguous"),
        Kind("all_gather", "zigzag"),
        Kind("ulysses", "contiguous"),
    )
}

# Options besides causal that every strategy is checked with; "documents" packs that many.
FEATURES = {
    "dropout": {"dropout_rate": 0.1, "dropout_seed": 7},
    "window and softcap": {"window": (700, 0), "softcap": 20.0},
    "packed documents": {"documents": 5},
}
# Parts of the names of kernels of attention.
ATTENTION_KERNELS = ("flash_pallas", "mosaic_gpu", "sdpa", "fmha")
ERROR_FACTORS = {"o": 2.0} | dict.fromkeys(gate.BACKWARD, 3.0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes, devices and backend that all calls of a run have in common.

    Attributes:
        sizes: query heads, KV heads and head dim; one sequence, bfloat16, causal.
        mesh: device mesh whose only axis is AXIS.
        backend: backend of flash_pallas.
    """

    sizes: tuple[int, int, int]
    mesh: jax.sharding.Mesh
    backend: str

    @classmethod
    def of(cls, devices, sizes, backend: str) -> Setting:
        """Makes a setting on these devices."""
        types = (AxisType.Auto,)
        mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=types, devices=devices)
        return cls(tuple(sizes), mesh, backend)

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return self.mesh.size

    def shape(self, length: int) -> suites.Shape:
        """Returns the shape of one sequence of this length."""
        return suites.Shape(1, length, *self.sizes)

    def sharding(self, kind: Kind):
        """Returns the sharding of q, k, v and do."""
        if kind.strategy is None:
            return jax.sharding.SingleDeviceSharding(self.mesh.devices.flat[0])
        return NamedSharding(self.mesh, P(None, AXIS))

    def like(self, kind: Kind, length: int) -> gate.Inputs:
        """Returns the shapes of q, k, v and do, with their sharding."""
        bare = gate.input_shapes(self.shape(length))
        put = functools.partial(jax.ShapeDtypeStruct, sharding=self.sharding(kind))
        return gate.Inputs(*(put(x.shape, x.dtype) for x in bare))

    def draw(self, kind: Kind, length: int) -> gate.Inputs:
        """Draws standard normal arrays, made where they lie."""
        make = functools.partial(gate.random_inputs, self.shape(length))
        return jax.jit(make, out_shardings=self.sharding(kind))()

    def step(self, kind: Kind, **options: Any) -> Callable[..., Any]:
        """Returns the jitted (q, k, v, do) -> (o, (dq, dk, dv)), causal and with these options."""
        options = {"causal": True, "backend": self.backend} | options
        if kind.strategy is None:
            attend = flash_pallas.flash_attention
        else:
            attend = functools.partial(
                context_parallel_attention,
                mesh=self.mesh,
                axis=AXIS,
                strategy=kind.strategy,
                layout=kind.layout,
            )

        def forward_and_backward(q, k, v, do):
            o, pullback = jax.vjp(functools.partial(attend, **options), q, k, v)
            return o, pullback(do)

        return jax.jit(forward_and_backward)

    def moved(self, kind: Kind, arrays) -> list[jax.Array]:
        """Puts arrays, given in order, into a kind's layout and sharding."""
        there = lambda x: to_zigzag(x, self.devices) if kind.layout == "zigzag" else x
        return [jax.device_put(there(x), self.sharding(kind)) for x in arrays]

    def named(self, kind: Kind, results) -> dict[str, Any]:
        """Returns a step's results by the gate's names, in sequence order, on the first device."""
        back = lambda x: from_zigzag(x, self.devices) if kind.layout == "zigzag" else x
        o, gradients = results
        first = self.mesh.devices.flat[0]
        alone = [back(jax.device_put(jax.device_get(x), first)) for x in (o, *gradients)]
        return dict(zip(("o", *gate.BACKWARD), alone, strict=True))

    def feature_error(self, kind: Kind, name: str, length: int) -> float:
        """Returns the error of a call with a feature, as a share of what is allowed.

        1 is twice (gradients: three times) the root mean square error of plain jnp attention in
        bfloat16.
        """
        alone = KINDS[ALONE]
        inputs = self.draw(alone, length)
        options = dict(FEATURES[name])
        here = lambda x: self.moved(kind, [x])[0]
        if (documents := options.pop("documents", None)) is not None:
            ids = jnp.arange(length)[None] * documents // length
            options |= {"q_segment_ids": ids, "kv_segment_ids": ids}
        wide = (x.astype(jnp.float32) for x in inputs)
        on_xla = self.step(alone, backend="xla", **options)
        exact, plain = (self.named(alone, on_xla(*arrays)) for arrays in (wide, inputs))
        moved = {n: here(x) if n.endswith("segment_ids") else x for n, x in options.items()}
        found = self.named(kind, self.step(kind, **moved)(*self.moved(kind, inputs)))
        rms = lambda x, y: float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32) - y))))
        return max(
            rms(found[n], exact[n]) / (factor * rms(plain[n], exact[n]))
            for n, factor in ERROR_FACTORS.items()
        )

    def flops(self, length: int) -> int:
        """Returns the floating-point operations of one step, forward and backward."""
        shape = self.shape(length)
        return sum(flops.attention_flops(shape, True, d) for d in ("forward", "backward"))


class Workshop:
    """Background compilation: programs are lowered when announced, then compiled in parallel."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._pool = concurrent.futures.ThreadPoolExecutor()
        self._steps: dict[tuple[Kind, int], concurrent.futures.Future] = {}

    def step(self, kind: Kind, length: int) -> concurrent.futures.Future:
        """Returns the future executable of a step; it is made once, even if asked for twice."""
        if (kind, length) not in self._steps:
            like = self._setting.like(kind, length)
            self._steps[kind, length] = self.other(self._setting.step(kind), *like)
        return self._steps[kind, length]

    def other(self, function, *like) -> concurrent.futures.Future:
        """Returns the future executable of a jitted function; its result raises any failure."""
        try:
            lowered = function.lower(*like)
        except Exception as error:
            failed: concurrent.futures.Future = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        return self._pool.submit(lowered.compile)


def said(error: Exception) -> str:
    """Formats an error for a row."""
    return f"{type(error).__name__}: {error}"[:300]


def balance(kind: Kind, devices: int) -> float:
    """Returns the mean device's share of the busiest one's causal work."""
    if kind.strategy in ("ring", "all_gather") and kind.layout == "contiguous":
        return devices / (2 * devices - 1)
    return 1.0


def bound(kind: Kind, devices: int, compute_ms: float, sending_ms: float) -> float:
    """Returns the best share of `devices` times one GPU's speed that the interconnect allows.

    The keys of a ring travel while others are used. Arrays that are gathered or exchanged must
    arrive before anything is computed, and results follow after.

    Args:
        kind: how the sequence is sharded.
        devices: number of devices.
        compute_ms: time of a step at one GPU's speed, divided among all.
        sending_ms: time of its collectives alone.
    """
    busiest = compute_ms / balance(kind, devices)
    if kind.strategy == "ring":
        return compute_ms / max(busiest, sending_ms)
    return compute_ms / (busiest + sending_ms)


def overlap(intervals: list[cupti.Interval]) -> dict[str, float]:
    """Measures how a step's device work overlaps, in milliseconds, as the mean of the devices.

    Returns:
        sending: while a kernel of NCCL runs; hidden: the part of it overlapped with attention;
        exposed: the part of it in which nothing else runs; attention: while one of our kernels
        runs, or cuDNN's; other: while something runs that is neither; whole: from the first start
        to the last end.
    """
    devices = sorted({i.device for i in intervals})
    names = ("sending", "hidden", "exposed", "attention", "other", "whole")
    sums = dict.fromkeys(names, 0.0)
    for device in devices:
        mine = [i for i in intervals if i.device == device]
        nccl = [i for i in mine if "nccl" in i.name.lower()]
        ours = [i for i in mine if any(name in i.name for name in ATTENTION_KERNELS)]
        rest = [i for i in mine if "nccl" not in i.name.lower()]
        sending, attention, either = map(cupti.busy_ns, (nccl, ours, nccl + ours))
        sums["exposed"] += cupti.busy_ns(mine) - cupti.busy_ns(rest)
        sums["sending"] += sending
        sums["attention"] += attention
        sums["hidden"] += sending + attention - either
        sums["other"] += cupti.busy_ns(mine) - either
        sums["whole"] += max(i.end_ns for i in mine) - min(i.start_ns for i in mine)
    return {name: total / len(devices) / 1e6 for name, total in sums.items()}


def planned_bytes(executable) -> dict[str, int]:
    """Returns XLA's plan of a program's memory on one device."""
    plan = executable.memory_analysis()
    found = {
        "argument_bytes": plan.argument_size_in_bytes,
        "output_bytes": plan.output_size_in_bytes,
        "temp_bytes": plan.temp_size_in_bytes,
    }
    return found | {"planned_bytes": sum(found.values()) - plan.alias_size_in_bytes}


def longest(intervals: list[cupti.Interval]) -> dict[str, float]:
    """Returns the ms of the six kernels that took most, by name, on all devices together."""
    sums: dict[str, float] = collections.defaultdict(float)
    for start, end, name, _ in intervals:
        sums[name[:80]] += (end - start) / 1e6
    return dict(sorted(sums.items(), key=lambda item: -item[1])[:6])
