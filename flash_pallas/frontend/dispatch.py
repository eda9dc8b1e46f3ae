"""Choice of the backend and of the tile sizes. Every UnsupportedByBackend is raised here."""

from __future__ import annotations

import contextlib
import logging
from functools import lru_cache
from typing import Any, Protocol, cast

import jax

from ..backends.base import Backend, UnsupportedByBackend
from ..backends.cudnn import OLDEST as OLDEST_CUDNN
from ..backends.cudnn import CudnnBackend
from ..backends.target import TargetBackend
from ..backends.unloaded import UnloadedBackend
from ..backends.xla import XlaBackend
from ..core import block_mask
from ..core.decode import DecodeProblem
from ..core.problem import Problem
from ..core.ragged import RaggedBlocks, RaggedProblem
from ..devices import GENERATIONS, Device, capability_here, targeted
from . import tables
from .tables import Tuned

# In order of preference: "auto" takes the first that can run a problem and says that it may be
# taken unasked. xla can run them all.
BACKENDS: dict[str, Backend] = {
    "hopper": cast(Backend, UnloadedBackend("hopper", "HopperBackend", "9.0")),
    "cudnn": CudnnBackend(),
    "portable": cast(Backend, UnloadedBackend("portable", "PortableBackend", "8.0 or above")),
    "xla": XlaBackend(),
}

AUTO = "auto"

AnyProblem = Problem | DecodeProblem | RaggedProblem

_log = logging.getLogger("flash_pallas")


class Listener(Protocol):
    """Something that plans all calls that are traced in its presence."""

    def plan(
        self, problem: AnyProblem, name: str, override: dict[str, Any] | None, platform: str | None
    ) -> tuple[Backend, Any]:
        """Returns what `plan` does of a call with these arguments."""
        ...


# Part of the key of every cache of JAX that holds what was traced: a function that is jitted is
# traced anew for each listener.
_listener = jax.make_user_context(None)


def heard_by(listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Has this listener plan the calls that are traced within."""
    return _listener(listener)


def plan(
    problem: AnyProblem, name: str, arrays, override: dict[str, Any] | None = None
) -> tuple[Backend, Any]:
    """Returns (backend, tile sizes) that run a call, or raises why nothing does.

    There are tile sizes of attention alone: those of decoding follow from the shapes of each shard.

    Args:
        problem: the shapes.
        name: as in `select`.
        arrays: those whose device counts; see `platform_of`.
        override: the caller's tile sizes; see `tiles`.

    Raises:
        ValueError: an unknown name, or tile sizes that the backend cannot take.
        UnsupportedByBackend: as in `select`.
    """
    platform, listener = platform_of(arrays), _listener.value
    if listener is not None:
        return listener.plan(problem, name, override, platform)
    return planned(problem, select(problem, name, platform), override)


def plan_nothing(problem: AnyProblem, name: str) -> None:
    """Notes a call without a query or a key, whose result is known without a backend.

    Raises:
        ValueError: an unknown name.
    """
    check_name(name)
    if _listener.value is not None:
        _listener.value.plan(problem, name, None, None)


def planned(
    problem: AnyProblem, chosen: Backend, override: dict[str, Any] | None = None
) -> tuple[Backend, Any]:
    """Returns what `plan` does of a call on this backend."""
    return chosen, tiles(chosen, problem, override) if isinstance(problem, Problem) else None


def select(problem: AnyProblem, name: str, platform: str | None = None) -> Backend:
    """Returns the backend that runs `problem`.

    Args:
        problem: the shapes, of attention, of decoding or of ragged attention.
        name: "auto" for the first in order that can, or a backend's name; a backend asked for by
            name never falls back to another.
        platform: the platform that the call will run on, from `platform_of`; None is JAX's default
            backend. Within a `target` it does not count, as jnp runs outside of CUDA.

    Raises:
        ValueError: an unknown name.
        UnsupportedByBackend: the named backend cannot run the problem; the message says why.
    """
    there = targeted()
    # Nothing is lost on a machine without a GPU, and nobody wants to read about it there.
    has_gpu = there is not None or jax.default_backend() == "gpu"
    chosen = choose(problem, name, platform, says=has_gpu)
    if chosen.name == XlaBackend.name:
        return XlaBackend(unasked=name == AUTO and not has_gpu)
    return chosen if there is None else cast(Backend, TargetBackend(chosen, there))


def choose(problem: AnyProblem, name: str, platform: str | None, *, says: bool) -> Backend:
    """Returns the backend that `select` does, without what a `target` adds to it.

    Args:
        problem: as in `select`.
        name: as in `select`.
        platform: as in `select`.
        says: whether the log tells what was passed over.
    """
    check_name(name)
    there = targeted()
    backends, platform = backends_of(there), platform if there is None else None
    if name == AUTO:
        chosen = _first_able(problem, list(backends.values()), platform, says=says)
    elif reason := refusal(backends[name], problem, platform):
        able = [b.name for b in backends.values() if not passed_over(b, problem, platform)]
        raise UnsupportedByBackend(
            f"backend={name!r}: {reason}; backend='auto' or {able[0]!r} can run this call"
        )
    else:
        chosen = backends[name]
    return chosen.loaded if isinstance(chosen, UnloadedBackend) else chosen


def _first_able(
    problem: AnyProblem, backends: list[Backend], platform: str | None, *, says: bool
) -> Backend:
    """Returns the first of these backends that "auto" may take; the others are as of `choose`."""
    reasons = {}
    for backend in backends:
        reason = passed_over(backend, problem, platform)
        if reason is None:
            if says and backend.note:
                _log_once(f"backend {backend.name!r} was taken: {backend.note}")
            if says and platform in (None, "gpu"):
                _warn_of_jnp(problem, backend, reasons)
            return backend
        reasons[backend.name] = reason
        if says:
            _log_once(f"backend {backend.name!r} was passed over: {reason}")
    raise AssertionError("the last backend takes every problem")


def _warn_of_jnp(problem: AnyProblem, chosen: Backend, reasons: dict[str, str]) -> None:
    """Warns once, with the way out, of a call on a GPU that runs jnp, or of chunks that do.

    Args:
        problem: the call.
        chosen: the backend that "auto" takes.
        reasons: for each that it passed over, why.
    """
    if chosen.name == XlaBackend.name:
        there = targeted()
        capability = capability_here() if there is None else there.capability
        known = GENERATIONS.get(capability)
        able = reasons if known is None else known.backends
        why = "; ".join(f"{name!r} {reasons[name]}" for name in able if name in reasons)
        dtype = (problem.steps if isinstance(problem, RaggedProblem) else problem).dtype
        _log_once(
            f"attention in {dtype} runs as blockwise jnp on this GPU, which is slow: {why}"
            + (". In Flax, dtype=jnp.bfloat16 of a layer casts" if dtype.itemsize > 2 else ""),
            logging.WARNING,
        )
    elif isinstance(problem, RaggedProblem) and (
        note := of_chunks(chosen, chosen.ragged.plan(problem))
    ):
        _log_once(f"ragged_paged_attention runs on {chosen.name!r}: {note}", logging.WARNING)


def backends_of(device: Device | None) -> dict[str, Backend]:
    """Returns the backends as they are here, or as they would be on another machine's GPU."""
    if device is None:
        return BACKENDS
    from ..backends.hopper import HopperBackend
    from ..backends.portable import PortableBackend

    return {
        **BACKENDS,
        "hopper": HopperBackend(num_sms=device.sms, capability=device.capability),
        # The oldest cuDNN that would do: the one there cannot be known.
        "cudnn": CudnnBackend(capability=device.capability, version=OLDEST_CUDNN),
        "portable": PortableBackend(capability=device.capability, num_sms=device.sms),
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


def tiles(backend: Backend, problem: Problem, override: dict[str, Any] | None = None) -> Any:
    """Returns the tile sizes that `problem` runs with on `backend`.

    For each kernel, in this order of precedence: the caller's, put into the backend's own; those
    timed for exactly this call on this kind of device (that of the `target` around, else the one
    here), by the user or for the package; the backend's own.

    Args:
        backend: the backend that runs it.
        problem: the shapes.
        override: the caller's tile sizes.

    Raises:
        ValueError: tile sizes of the caller's that the backend cannot take.
    """
    own, tuned = _tiles(backend, problem, targeted())
    if override is None:
        return own
    return backend.attention.plan(problem, {**(tuned.blocks if tuned else {}), **override})


def tuned_for(backend: Backend, problem: Problem) -> Tuned | None:
    """Returns the table entry that `tiles` takes into account."""
    return _tiles(backend, problem, targeted())[1]


# An eager call would otherwise spend 0.1 ms on the same choice every time.
@lru_cache(maxsize=1024)
def _tiles(backend: Backend, problem: Problem, there: Device | None) -> tuple[Any, Tuned | None]:
    """Returns the tile sizes without the caller's, and the table entry that they come from."""
    tuned = tables.lookup(backend.name, problem, None if there is None else there.kind)
    if tuned is not None:
        try:
            return backend.attention.plan(problem, tuned.blocks), tuned
        except (TypeError, ValueError) as error:
            tables.ignore(tuned.path, str(error))
    return backend.attention.plan(problem), None


def forget_tiles() -> None:
    """Lets the next call look into the tables again."""
    _tiles.cache_clear()


def tunable(problem: Problem, name: str) -> Backend:
    """Returns the backend that runs `problem`, if it has tile sizes to choose from.

    Raises:
        ValueError: an unknown name.
        UnsupportedByBackend: as in `select`, or it has none, or within a `target`.
    """
    if targeted() is not None:
        raise UnsupportedByBackend(
            "tile sizes are timed on the GPU that is here: call autotune outside of "
            "flash_pallas.target"
        )
    chosen = select(problem, name)
    if not chosen.attention.candidates(problem):
        has = lambda other: "has some" if other.attention.candidates(problem) else "has none either"
        others = [
            f"{other.name!r} {refusal(other, problem) or has(other)}"
            for other in BACKENDS.values()
            if other.name != chosen.name
        ]
        raise UnsupportedByBackend(
            f"backend={chosen.name!r} has no tile sizes to time; {'; '.join(others)}"
        )
    return chosen


def of_chunks(chosen: Backend, blocks: RaggedBlocks) -> str | None:
    """Says what runs chunks of prompts where it is no kernel of the chosen backend."""
    if blocks.chunks_on == chosen.name:
        return None
    return f"a kernel for steps alone: chunks of prompts run on {blocks.chunks_on}"


def check_name(name):
    """Raises ValueError, listing the choices, unless `name` is "auto" or a backend's name."""
    choices = [AUTO, *BACKENDS]
    if name not in choices:
        raise ValueError(f"backend is {name!r}: choose one of {', '.join(map(repr, choices))}")


def refusal(backend: Backend, problem: AnyProblem, platform: str | None = None) -> str | None:
    """Returns why a backend cannot run a call, or None."""
    default = jax.default_backend()
    if platform not in (None, default) and backend.name != XlaBackend.name:
        return (
            f"the arrays are on the {platform}, and its kernels would be compiled for the {default}"
        )
    operation: Any = getattr(backend, problem.operation)
    if reason := operation.refusal(problem):
        return reason
    if backend.name == CudnnBackend.name and targeted() is not None:
        there = "" if operation.not_automatic(problem) else "; on that GPU itself 'auto' takes it"
        return f"is not for flash_pallas.target, as jax asks the cuDNN that is here{there}"
    return None


def passed_over(backend: Backend, problem: AnyProblem, platform: str | None = None) -> str | None:
    """Returns why "auto" does not take a backend, or None."""
    reason = refusal(backend, problem, platform)
    return reason or getattr(backend, problem.operation).not_automatic(problem)


def tell_of_cost(problem: Problem) -> None:
    """Says once, at INFO, that a mask_mod without a block mask skips nothing.

    One that reads positions alone has been looked at: what it hides is skipped, or is little.
    """
    moved = problem.traced_offset or problem.spec.q_offset != 0
    places = {"q_positions", "kv_positions"} & problem.features
    if problem.spec.mask_mod is None or problem.is_listed or moved or places:
        return  # a block mask of a function counts from 0
    q_len, kv_len = problem.q_len, problem.kv_len
    alone = not problem.spec.mask_mod.vectors and "mask_params" not in problem.features
    if alone and block_mask.is_looked_at(q_len, kv_len):
        return
    if q_len * kv_len >= block_mask.PAIRS:
        _log_once(
            f"mask_mod skips nothing: what it hides of {q_len} x {kv_len} pairs of a query and a "
            "key is computed. Pass "
            f"block_mask=BlockMask.from_mask_mod(mask_mod, 1, 1, {q_len}, {kv_len}) in its place "
            "(with the batch and the heads where it depends on b or n), and blocks that it hides "
            "cost nothing"
        )


def tell_of_place(problem: Problem) -> None:
    """Warns once that queries of a call for which `arguments.is_unplaced` holds begin at 0."""
    q_len, kv_len = problem.q_len, problem.kv_len
    if 2 <= q_len < kv_len:
        _log_once(
            f"q has {q_len} queries, k {kv_len} keys, and causal=True (or window=(.., 0)) without "
            f"q_offset puts query 0 at position 0, where the last query sees {q_len} keys: pass "
            f"q_offset={kv_len - q_len} if the last query belongs to the last key, as with a cache "
            "or in FlashAttention, or q_offset=0 if this is meant, as in jax.nn",
            logging.WARNING,
        )


@lru_cache(maxsize=256)
def _log_once(message: str, level: int = logging.INFO):
    _log.log(level, message)
