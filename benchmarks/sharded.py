"""Training steps over a mesh: the ways of sharding, their attention, and what the links allow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import flash_pallas
from flash_pallas.parallel import context_parallel_attention

from . import collectives, llama

TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# How each axis of sequences is used: strategy and layout of flash_pallas.parallel.
SEQUENCES = {"context": ("ring", "zigzag"), "sequence": ("ulysses", "contiguous")}
PROVIDERS = ("flash_pallas", "jax_cudnn", "jax_xla")


class Way(NamedTuple):
    """One way of sharding: the axes of the mesh and their sizes."""

    axes: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """Name in tables, as in "fsdp 2, model 2"."""
        return ", ".join(f"{axis} {size}" for axis, size in self.axes) or "one GPU"

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    def fits(self, batch: int, length: int) -> bool:
        """Says whether this way divides a batch of sequences, and is meant for their length.

        Sequences that are sharded are long ones: of a batch of one for each part of the batch.
        """
        sizes = dict(self.axes)
        rows = sizes.get("data", 1) * sizes.get("fsdp", 1)
        parts = sizes.get("context", 1) * sizes.get("sequence", 1)
        if batch % rows or length % (2 * parts):
            return False
        return not self.axes or (parts > 1) == (batch == rows and batch < self.devices)


def ways(devices: int) -> list[Way]:
    """Returns the ways to use so many devices: each axis alone, and two of them together."""
    if devices == 1:
        return [Way()]
    names = ("data", "fsdp", "model", "context", "sequence")
    found = [Way(((name, devices),)) for name in names]
    if devices % 2 == 0 and devices > 2:
        half = devices // 2
        found += [Way((("fsdp", half), (name, 2))) for name in ("model", "context")]
    return found


@dataclasses.dataclass(frozen=True)
class Job:
    """One program: a step of the model, sharded in one way.

    Attributes:
        way: axes of the mesh.
        types: key of TYPES, the kind of these axes.
        provider: one of PROVIDERS.
        batch: sequences of a step.
        length: tokens of a sequence.
    """

    way: Way
    types: str
    provider: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        """Name on a terminal, and what --only looks at."""
        size = f"{self.batch}x{self.length}"
        return f"{size}; {self.way.devices} GPUs; {self.way.name}; {self.types}; {self.provider}"

    def layout(self) -> llama.Layout:
        """Makes the mesh of the first devices."""
        if not self.way.axes:
            return llama.Layout()
        names, sizes = zip(*self.way.axes, strict=True)
        kinds, devices = (TYPES[self.types],) * len(names), jax.devices()[: self.way.devices]
        mesh = jax.make_mesh(sizes, names, kinds, devices=devices)
        zigzag = any(SEQUENCES.get(name, ("", ""))[1] == "zigzag" for name in names)
        return llama.Layout(mesh, zigzag)


def attention(provider: str, layout: llama.Layout):
    """Returns causal attention of [B, T, N, H] that is sharded as the layout says.

    Raises:
        NotImplementedError: sequences are sharded, which jax.nn's attention does not do.
    """
    sequence = layout.axes(*SEQUENCES)
    if provider != "flash_pallas":
        if sequence:
            raise NotImplementedError("jax.nn has no attention to sharded sequences")
        implementation = provider.removeprefix("jax_")
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=implementation
        )
        if not layout.explicit:
            return attend
        spec = layout.spec(*layout.rows, "model", None)
        return jax.shard_map(attend, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    if not sequence:
        return functools.partial(flash_pallas.flash_attention, causal=True)
    strategy, order = SEQUENCES[sequence[0]]
    return functools.partial(
        context_parallel_attention,
        mesh=layout.mesh,
        axis=sequence[0],
        strategy=strategy,
        layout=order,
        batch_axis=layout.rows[0],
        head_axis=layout.axes("model") or None,
        causal=True,
    )


def within(layout: llama.Layout):
    """Returns the context in which a layout's programs are traced."""
    return contextlib.nullcontext() if layout.mesh is None else jax.set_mesh(layout.mesh)


def lowered(job: Job, config: llama.Config, policy):
    """Lowers the step of a job; returns it with the layout."""
    layout = job.layout()
    with within(layout):
        step = llama.step_of(config, layout, attention(job.provider, layout), policy)
        state = jax.eval_shape(functools.partial(llama.initial_state, config))
        state = like(state, layout.shardings(state))
        shape = jax.ShapeDtypeStruct((job.batch, job.length), jnp.int32)
        rows = None
        if layout.mesh is not None:
            rows = jax.sharding.NamedSharding(layout.mesh, layout.spec(*layout.rows))
        batch = dict.fromkeys(("tokens", "targets", "positions"), like(shape, rows))
        return step.lower(state, batch), layout


def like(tree, shardings):
    """Returns the shapes of a tree with these shardings, or as they are where those are None."""
    if shardings is None or jax.tree.leaves(shardings) == []:
        return tree
    put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(put, tree, shardings)


class Links:
    """Rates of collectives, each measured once at the largest message of its kind."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._rates: dict[tuple[str, int, int], float] = {}

    def rate(self, kind: str, nbytes: int, count: int) -> float:
        """Returns the bytes a second that each of `count` devices sends."""
        nbytes = 1 << max(nbytes - 1, 1).bit_length()  # of about this size
        key = kind, nbytes, count
        if key not in self._rates:
            devices = jax.devices()[:count]
            function, operand = collectives.rate_program(kind, nbytes, devices)
            program = function.lower(operand).compile()
            x = jnp.ones(operand.shape, operand.dtype, device=operand.sharding)
            jax.block_until_ready(program(x))
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                jax.block_until_ready(program(x))
                times.append((time.perf_counter() - begin) / collectives.REPEATS)
            sent = collectives.Sent(kind, nbytes, count).sent
            self._rates[key] = sent / statistics.median(times)
            kept = collectives.kept(program.as_text())
            fields = {"what": "link", "gpus": count, "name": kind, "sent_bytes": sent}
            fields |= {"gb_per_s": self._rates[key] / 1e9}
            left = None if kept >= collectives.REPEATS else f"XLA left {kept}"
            self.rows.append(fields | {"refused": left})
        return self._rates[key]

    def reckon(self, hlo: str, devices: int) -> dict[str, Any]:
        """Returns bytes that a device sends in a step and their ms by the links' rates, by kind.

        Rates are those of the largest message; what is short takes longer than is reckoned.
        """
        counts = collectives.in_hlo(hlo, devices)
        found: dict[str, dict[str, float]] = {}
        for kind in sorted({message.kind for message in counts}):
            mine = {m: n for m, n in counts.items() if m.kind == kind and m.group > 1}
            if not mine:
                continue
            largest = max(mine, key=lambda m: m.nbytes)
            sent = sum(m.sent * times for m, times in mine.items())
            rate = self.rate(kind, largest.nbytes, largest.group)
            found[kind] = {"calls": sum(mine.values()), "bytes": sent, "ms": sent / rate * 1e3}
        total = lambda what: sum(each[what] for each in found.values())
        return {"sent": found, "sent_bytes": total("bytes"), "sending_ms": total("ms")}
