"""Which backend runs a call. Every UnsupportedByBackend is raised here."""

from __future__ import annotations

import dataclasses
import logging
from functools import lru_cache
from typing import Any

import jax

from .backends.base import Backend, UnsupportedByBackend
from .backends.hopper import HopperBackend
from .backends.xla import XlaBackend
from .core.decode import DecodeProblem
from .core.problem import Problem

# In order of preference: "auto" takes the first that can run a problem, and xla can run them all.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (HopperBackend(), XlaBackend())
}

AUTO = "auto"

_log = logging.getLogger("flash_pallas")


def select(problem: Problem | DecodeProblem, name: str) -> Backend:
    """The backend that runs `problem`.

    Args:
        problem: the shapes, of attention or of decoding.
        name: "auto" for the first in order that can, or a backend's name; a backend asked for by
            name never falls back to another.

    Raises:
        ValueError: an unknown name.
        UnsupportedByBackend: the named backend cannot run the problem; the message says why.
    """
    check_name(name)
    if name != AUTO:
        if reason := _refusal(BACKENDS[name], problem):
            raise UnsupportedByBackend(f"backend={name!r}: {reason}; {_way_out(problem, name)}")
        return BACKENDS[name]
    for backend in BACKENDS.values():
        reason = _refusal(backend, problem)
        if reason is None:
            return backend
        # Nothing is lost on a machine without a GPU, and nobody wants to read about it there.
        if jax.default_backend() == "gpu":
            _log_once(f"backend {backend.name!r} was passed over: {reason}")
    raise AssertionError("the last backend takes every problem")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run, and why not something else; `str()` makes a text of it.

    Attributes:
        problem: the shapes.
        backend: name of the backend that would run.
        blocks: its tile sizes.
        reasons: for every other backend, one sentence saying why it would not run.
    """

    problem: Problem | DecodeProblem
    backend: str
    blocks: Any
    reasons: dict[str, str]

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
            f"v [{rows}, {length}, {p.kv_heads}, {p.v_head_dim}], {p.dtype}",
            f"  runs on: {self.backend}" + (f", {self.blocks}" if self.blocks is not None else ""),
        ]
        return "\n".join(lines + [f"  not on {name}: {why}" for name, why in self.reasons.items()])


def explanation(
    problem: Problem | DecodeProblem, name: str, override: dict[str, Any] | None = None
) -> Explanation:
    """What `select` and the chosen backend's `blocks` would answer, without running anything.

    Raises:
        ValueError: an unknown name, or tile sizes that the backend cannot take.
        UnsupportedByBackend: as `select`.
    """
    check_name(name)
    if 0 in (problem.batch, problem.q_len, problem.kv_len):
        reasons = dict.fromkeys(BACKENDS, "there is no query or no key, so nothing to compute")
        return Explanation(problem, "none", None, reasons)
    chosen = select(problem, name)
    passed_over = (
        "another backend was asked for"
        if name != AUTO
        else f"{chosen.name!r} can run and is preferred"
    )
    reasons = {
        other.name: _refusal(other, problem) or passed_over
        for other in BACKENDS.values()
        if other is not chosen
    }
    decodes = isinstance(problem, DecodeProblem)
    blocks = chosen.decode_blocks(problem) if decodes else chosen.blocks(problem, override)
    return Explanation(problem, chosen.name, blocks, reasons)


def check_name(name):
    """Raise ValueError, listing the choices, unless `name` is "auto" or a backend's."""
    choices = [AUTO, *BACKENDS]
    if name not in choices:
        raise ValueError(f"backend is {name!r}: choose one of {', '.join(map(repr, choices))}")


def _refusal(backend: Backend, problem: Problem | DecodeProblem) -> str | None:
    if isinstance(problem, DecodeProblem):
        return backend.unsupported_decode(problem)
    return backend.unsupported(problem)


def _way_out(problem: Problem | DecodeProblem, name: str) -> str:
    able = [b.name for b in BACKENDS.values() if b.name != name and not _refusal(b, problem)]
    return f"backend='auto' or {able[0]!r} can run this call"


@lru_cache(maxsize=256)
def _log_once(message: str):
    _log.info(message)
