"""Choice of the backend that runs a call. Every UnsupportedByBackend is raised here."""

from __future__ import annotations

import dataclasses
import logging
from functools import lru_cache
from typing import Any

import jax

from ..backends.base import Backend, UnsupportedByBackend
from ..backends.hopper import HopperBackend
from ..backends.portable import PortableBackend
from ..backends.xla import XlaBackend
from ..core.decode import DecodeProblem
from ..core.problem import Problem
from . import tables
from .devices import Device, device_of

# In order of preference: "auto" takes the first that can run a problem, and xla can run them all.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (HopperBackend(), PortableBackend(), XlaBackend())
}

AUTO = "auto"

_log = logging.getLogger("flash_pallas")


def select(
    problem: Problem | DecodeProblem,
    name: str,
    device: Device | None = None,
    platform: str | None = None,
) -> Backend:
    """Returns the backend that runs `problem`.

    Args:
        problem: the shapes, of attention or of decoding.
        name: "auto" for the first in order that can, or a backend's name; a backend asked for by
            name never falls back to another.
        device: the GPU to answer for; None is the one here.
        platform: the platform that the call will run on, from `platform_of`; None is JAX's default
            backend.

    Raises:
        ValueError: an unknown name.
        UnsupportedByBackend: the named backend cannot run the problem; the message says why.
    """
    check_name(name)
    backends = _backends(device)
    if name != AUTO:
        if reason := _refusal(backends[name], problem, platform):
            able = [b.name for b in backends.values() if not _refusal(b, problem, platform)]
            raise UnsupportedByBackend(
                f"backend={name!r}: {reason}; backend='auto' or {able[0]!r} can run this call"
            )
        return backends[name]
    for backend in backends.values():
        reason = _refusal(backend, problem, platform)
        if reason is None:
            return backend
        # Nothing is lost on a machine without a GPU, and nobody wants to read about it there.
        if device is None and jax.default_backend() == "gpu":
            _log_once(f"backend {backend.name!r} was passed over: {reason}")
    raise AssertionError("the last backend takes every problem")


def _backends(device: Device | None) -> dict[str, Backend]:
    """Returns the backends as they are here, or as they would be on another machine's GPU."""
    if device is None:
        return BACKENDS
    return {
        **BACKENDS,
        "hopper": HopperBackend(num_sms=device.sms, capability=device.capability),
        "portable": PortableBackend(capability=device.capability, multiprocessors=device.sms),
    }


def platform_of(arrays) -> str | None:
    """Returns the platform ("cpu", "gpu") of a call on these arrays, as far as can be seen.

    It is that of the device that one of them was put on, else that of `jax.default_device`; None
    if neither says. While jit traces, only the second can be seen.
    """
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
            return next(iter(x.devices())).platform
    default = jax.config.jax_default_device
    return default if default is None or isinstance(default, str) else default.platform


def tiles(
    backend: Backend,
    problem: Problem,
    override: dict[str, Any] | None = None,
    kind: str | None = None,
) -> Any:
    """Returns the tile sizes that `problem` runs with on `backend`.

    For each kernel, in this order of precedence: the caller's, put into the backend's own; those
    timed for exactly this call, here or for the package; the backend's own.

    Args:
        backend: the backend that runs it.
        problem: the shapes.
        override: the caller's tile sizes.
        kind: kind of device whose tables are asked; None is the one here.

    Raises:
        ValueError: tile sizes of the caller's that the backend cannot take.
    """
    if override is None:
        return _tiles(backend, problem, kind)[0]
    _, tuned = _tiles(backend, problem, kind)
    return backend.blocks(problem, {**(tuned.blocks if tuned else {}), **override})


# An eager call would otherwise spend 0.1 ms on the same choice every time.
@lru_cache(maxsize=1024)
def _tiles(backend: Backend, problem: Problem, kind: str | None) -> tuple[Any, tables.Tuned | None]:
    """Returns the tile sizes without the caller's, and the table entry that they come from."""
    tuned = tables.lookup(backend.name, problem, kind)
    if tuned is not None:
        try:
            return backend.blocks(problem, tuned.blocks), tuned
        except (TypeError, ValueError) as error:
            tables.ignore(tuned.path, str(error))
    return backend.blocks(problem, None), None


def forget_tiles() -> None:
    """Lets the next call look into the tables again."""
    _tiles.cache_clear()


def tunable(problem: Problem, name: str) -> Backend:
    """Returns the backend that runs `problem`, if it has tile sizes to choose from.

    Raises:
        ValueError: an unknown name.
        UnsupportedByBackend: as in `select`, or it has none.
    """
    chosen = select(problem, name)
    if not chosen.candidates(problem):
        others = [
            f"{other.name!r} {_refusal(other, problem) or 'has some'}"
            for other in BACKENDS.values()
            if other is not chosen
        ]
        raise UnsupportedByBackend(
            f"backend={chosen.name!r} has no tile sizes to time; {'; '.join(others)}"
        )
    return chosen


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The backend and tiles that a call would run, and why not others; `str()` makes text of it.

    Attributes:
        problem: the shapes.
        backend: name of the backend that would run.
        blocks: its tile sizes.
        reasons: for every other backend, one sentence saying why it would not run.
        sources: for every kernel, the source of its tile sizes: "caller", the user's cache or the
            shipped table with the name of the file, or "heuristic"; also where a table says that
            the heuristic's were the fastest of those timed.
        device: the kind of the GPU that was asked about; None is what is here.
    """

    problem: Problem | DecodeProblem
    backend: str
    blocks: Any
    reasons: dict[str, str]
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    device: str | None = None

    def __str__(self) -> str:
        p = self.problem
        function, rows, length = "flash_attention", p.batch, p.kv_len
        if isinstance(p, DecodeProblem):
            function = "flash_decode"
            if p.num_pages is not None:
                rows, length = p.num_pages, p.spec.page_size
        lines = [
            f"{function} on q [{p.batch}, {p.q_len}, {p.q_heads}, {p.head_dim}], "
            f"k [{rows}, {length}, {p.kv_heads}, {p.head_dim}], "
            f"v [{rows}, {length}, {p.kv_heads}, {p.v_head_dim}], {p.dtype}"
            + (f", on {self.device}" if self.device else ""),
            f"  runs on: {self.backend}" + (f", {self.blocks}" if self.blocks is not None else ""),
        ]
        if self.sources:
            sources = (f"{kernel}: {source}" for kernel, source in self.sources.items())
            lines.append(f"  blocks from: {'; '.join(sources)}")
        return "\n".join(lines + [f"  not on {name}: {why}" for name, why in self.reasons.items()])


def explanation(
    problem: Problem | DecodeProblem,
    name: str,
    override: dict[str, Any] | None = None,
    device: str | None = None,
    platform: str | None = None,
) -> Explanation:
    """Returns what `select` and the chosen backend's `blocks` would answer, running nothing.

    Args:
        problem: the shapes.
        name: "auto", or a backend's name.
        override: the caller's tile sizes.
        device: a name of `devices.DEVICES`; None is the device here.
        platform: as in `select`.

    Raises:
        ValueError: an unknown name, or tile sizes that the backend cannot take.
        UnsupportedByBackend: as in `select`.
    """
    check_name(name)
    there = device_of(device)
    kind = None if there is None else there.kind
    if 0 in (problem.batch, problem.q_len, problem.kv_len):
        reasons = dict.fromkeys(BACKENDS, "there is no query or no key, so nothing to compute")
        return Explanation(problem, "none", None, reasons, device=kind)
    if there is not None:
        platform = None  # not here, so wherever the arrays are
    chosen = select(problem, name, there, platform)
    not_needed = (
        "another backend was asked for"
        if name != AUTO
        else f"{chosen.name!r} can run and is preferred"
    )
    reasons = {
        other.name: _refusal(other, problem, platform) or not_needed
        for other in _backends(there).values()
        if other.name != chosen.name
    }
    if isinstance(problem, DecodeProblem):
        tile = chosen.decode_blocks(problem)
        return Explanation(problem, chosen.name, tile, reasons, device=kind)
    tile = tiles(chosen, problem, override, kind)
    sources = _sources(chosen, problem, override, kind)
    return Explanation(problem, chosen.name, tile, reasons, sources, kind)


def _sources(
    chosen: Backend, problem: Problem, override: dict[str, Any] | None, kind: str | None
) -> dict[str, str]:
    """Returns, by kernel, the source of its tile sizes."""
    kernels = chosen.candidates(problem)
    if not kernels:
        return {"all": "caller" if override else "heuristic"}
    _, tuned = _tiles(chosen, problem, kind)
    found = dict.fromkeys(kernels, "heuristic")
    if tuned is not None:
        found |= {
            name: f"heuristic, fastest in {tuned.source}" for name in found if name in tuned.timed
        }
        found |= dict.fromkeys(tuned.blocks, tuned.source)
    return found | dict.fromkeys(override or {}, "caller")


def check_name(name):
    """Raises ValueError, listing the choices, unless `name` is "auto" or a backend's name."""
    choices = [AUTO, *BACKENDS]
    if name not in choices:
        raise ValueError(f"backend is {name!r}: choose one of {', '.join(map(repr, choices))}")


def _refusal(
    backend: Backend, problem: Problem | DecodeProblem, platform: str | None = None
) -> str | None:
    default = jax.default_backend()
    if platform not in (None, default) and backend.name != XlaBackend.name:
        return (
            f"the arrays are on the {platform}, and its kernels would be compiled for the {default}"
        )
    if isinstance(problem, DecodeProblem):
        return backend.unsupported_decode(problem)
    return backend.unsupported(problem)


@lru_cache(maxsize=256)
def _log_once(message: str):
    _log.info(message)
