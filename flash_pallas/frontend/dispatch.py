"""Choice of the backend and of the tile sizes. Every UnsupportedByBackend is raised here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import jax

from ..backends.base import Backend, UnsupportedByBackend
from ..backends.cudnn import OLDEST as OLDEST_CUDNN
from ..backends.cudnn import CudnnBackend
from ..backends.hopper import HopperBackend
from ..backends.portable import PortableBackend
from ..backends.target import TargetBackend
from ..backends.xla import XlaBackend
from ..core import block_mask
from ..core.decode import DecodeProblem
from ..core.problem import EXTRA_GRADS, Problem
from ..core.ragged import RaggedBlocks, RaggedProblem
from ..devices import GENERATIONS, Device, capability_here, device_of, targeted

# --- Choice of the backend that runs a call. Every UnsupportedByBackend is raised here ------------

# In order of preference: "auto" takes the first that can run a problem and says that it may be
# taken unasked. xla can run them all.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (HopperBackend(), CudnnBackend(), PortableBackend(), XlaBackend())
}

AUTO = "auto"

AnyProblem = Problem | DecodeProblem | RaggedProblem

_log = logging.getLogger("flash_pallas")


def select(
    problem: AnyProblem,
    name: str,
    device: Device | None = None,
    platform: str | None = None,
) -> Backend:
    """Returns the backend that runs `problem`.

    Args:
        problem: the shapes, of attention, of decoding or of ragged attention.
        name: "auto" for the first in order that can, or a backend's name; a backend asked for by
            name never falls back to another.
        device: the GPU to answer for; None is that of the `target` around, else the one here.
        platform: the platform that the call will run on, from `platform_of`; None is JAX's default
            backend. Within a `target` it does not count, as jnp runs outside of CUDA.

    Raises:
        ValueError: an unknown name.
        UnsupportedByBackend: the named backend cannot run the problem; the message says why.
    """
    there = device or targeted()
    platform = platform if there is None else None
    # Nothing is lost on a machine without a GPU, and nobody wants to read about it there.
    has_gpu = there is not None or jax.default_backend() == "gpu"
    chosen = _chosen(problem, name, _backends(there), platform, says=device is None and has_gpu)
    if device is not None:
        return chosen
    if chosen.name == XlaBackend.name:
        return XlaBackend(unasked=name == AUTO and not has_gpu)
    return chosen if there is None else cast(Backend, TargetBackend(chosen, there))


def _chosen(
    problem: AnyProblem,
    name: str,
    backends: dict[str, Backend],
    platform: str | None,
    *,
    says: bool,
) -> Backend:
    """Returns what `select` does, of these backends; `says`: the log says what was passed over."""
    check_name(name)
    if name != AUTO:
        if reason := _refusal(backends[name], problem, platform):
            able = [b.name for b in backends.values() if not _passed_over(b, problem, platform)]
            raise UnsupportedByBackend(
                f"backend={name!r}: {reason}; backend='auto' or {able[0]!r} can run this call"
            )
        return backends[name]
    reasons = {}
    for backend in backends.values():
        reason = _passed_over(backend, problem, platform)
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
        note := _of_chunks(chosen, chosen.ragged_blocks(problem))
    ):
        _log_once(f"ragged_paged_attention runs on {chosen.name!r}: {note}", logging.WARNING)


def _backends(device: Device | None) -> dict[str, Backend]:
    """Returns the backends as they are here, or as they would be on another machine's GPU."""
    if device is None:
        return BACKENDS
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
        kind: kind of device whose tables are asked; None is that of the `target` around, else the
            one here.

    Raises:
        ValueError: tile sizes of the caller's that the backend cannot take.
    """
    if kind is None and (there := targeted()) is not None:
        kind = there.kind
    if override is None:
        return _tiles(backend, problem, kind)[0]
    _, tuned = _tiles(backend, problem, kind)
    return backend.blocks(problem, {**(tuned.blocks if tuned else {}), **override})


# An eager call would otherwise spend 0.1 ms on the same choice every time.
@lru_cache(maxsize=1024)
def _tiles(backend: Backend, problem: Problem, kind: str | None) -> tuple[Any, Tuned | None]:
    """Returns the tile sizes without the caller's, and the table entry that they come from."""
    tuned = lookup(backend.name, problem, kind)
    if tuned is not None:
        try:
            return backend.blocks(problem, tuned.blocks), tuned
        except (TypeError, ValueError) as error:
            ignore(tuned.path, str(error))
    return backend.blocks(problem, None), None


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
    if not chosen.candidates(problem):
        has = lambda other: "has some" if other.candidates(problem) else "has none either"
        others = [
            f"{other.name!r} {_refusal(other, problem) or has(other)}"
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
        gpu: the kind of the GPU that was asked about; None is what is here.
        note: what runs, where it is no kernel of this package; None where it is.
        orders: what runs for tangents and for second derivatives, where differentiable is "any".
    """

    problem: AnyProblem
    backend: str
    blocks: Any
    reasons: dict[str, str]
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    gpu: str | None = None
    note: str | None = None
    orders: str | None = None

    def __str__(self) -> str:
        whole = p = self.problem
        if isinstance(whole, RaggedProblem):
            p = whole.steps
        function, rows, length = "flash_attention", p.batch, p.kv_len
        queries = f"{p.batch}, {p.q_len}"
        if isinstance(p, DecodeProblem):
            function = "flash_decode"
            if p.num_pages is not None:
                rows, length = p.num_pages, p.spec.page_size
        if isinstance(whole, RaggedProblem):
            function, queries = "ragged_paged_attention", f"{whole.tokens}"
        lines = [
            f"{function} on q [{queries}, {p.q_heads}, {p.head_dim}], "
            f"k [{rows}, {length}, {p.kv_heads}, {p.head_dim}], "
            f"v [{rows}, {length}, {p.kv_heads}, {p.v_head_dim}], {p.dtype}"
            + (f", on {self.gpu}" if self.gpu else ""),
            f"  runs on: {self.backend}" + (f", {self.blocks}" if self.blocks is not None else ""),
        ]
        if isinstance(p, Problem) and p.is_listed:
            lines.append("  skips blocks of {} queries and {} keys".format(*p.list_block))
        if isinstance(p, DecodeProblem) and p.spec.shares_prefix:
            lines.append("  reads shared prefixes once")
        if self.orders:
            lines.append(f"  {self.orders}")
        if self.note:
            lines.append(f"  which is {self.note}")
        if self.sources:
            sources = (f"{kernel}: {source}" for kernel, source in self.sources.items())
            lines.append(f"  blocks from: {'; '.join(sources)}")
        return "\n".join(lines + [f"  not on {name}: {why}" for name, why in self.reasons.items()])


def explanation(
    problem: AnyProblem,
    name: str,
    override: dict[str, Any] | None = None,
    gpu: str | None = None,
    platform: str | None = None,
) -> Explanation:
    """Returns what `select` and the chosen backend's `blocks` would answer, running nothing.

    Args:
        problem: the shapes.
        name: "auto", or a backend's name.
        override: the caller's tile sizes.
        gpu: a name of `devices.DEVICES`; None is that of the `target` around, else what is here.
        platform: as in `select`.

    Raises:
        ValueError: an unknown name, or tile sizes that the backend cannot take.
        UnsupportedByBackend: as in `select`.
    """
    check_name(name)
    there = device_of(gpu) or targeted()
    kind = None if there is None else there.kind
    ragged = isinstance(problem, RaggedProblem)  # none of its sizes is 0
    if not ragged and 0 in (problem.batch, problem.q_len, problem.kv_len):
        reasons = dict.fromkeys(BACKENDS, "there is no query or no key, so nothing to compute")
        return Explanation(problem, "none", None, reasons, gpu=kind)
    if there is not None:
        platform = None  # not here, so wherever the arrays are
    chosen = select(problem, name, there, platform)
    not_needed = (
        "another backend was asked for"
        if name != AUTO
        else f"{chosen.name!r} can run and is preferred"
    )
    reasons = {
        other.name: (_passed_over if name == AUTO else _refusal)(other, problem, platform)
        or not_needed
        for other in _backends(there).values()
        if other.name != chosen.name
    }
    if isinstance(problem, DecodeProblem):
        tile = chosen.decode_blocks(problem)
        return Explanation(problem, chosen.name, tile, reasons, gpu=kind)
    if isinstance(problem, RaggedProblem):
        tile = chosen.ragged_blocks(problem)
        note = _of_chunks(chosen, tile)
        return Explanation(problem, chosen.name, tile, reasons, gpu=kind, note=note)
    tile = tiles(chosen, problem, override, kind)
    sources = {} if tile is None else _sources(chosen, problem, override, kind)
    orders = _orders(chosen, problem, tile) if problem.spec.differentiable == "any" else None
    return Explanation(problem, chosen.name, tile, reasons, sources, kind, chosen.note, orders)


def _of_chunks(chosen: Backend, blocks: RaggedBlocks) -> str | None:
    """Says what runs chunks of prompts where it is no kernel of the chosen backend."""
    if blocks.chunks_on == chosen.name:
        return None
    return f"a kernel for steps alone: chunks of prompts run on {blocks.chunks_on}"


def _orders(chosen: Backend, problem: Problem, tile: Any) -> str:
    """Says what runs for tangents in all operands and for Hessian-vector products in q, k and v."""
    qkv = frozenset("qkv")
    moves = qkv | (problem.features & {*EXTRA_GRADS, "sinks"})
    by_kernels = (
        chosen.pushes(problem, tile, moves, primal=False),
        chosen.pushes_backward(problem, qkv, qkv),
    )
    first, second = ("kernels" if there else "blockwise jnp" for there in by_kernels)
    return f"tangents: {first}; Hessian-vector products: {second}; other orders: blockwise jnp"


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


def _refusal(backend: Backend, problem: AnyProblem, platform: str | None = None) -> str | None:
    if backend.name == CudnnBackend.name and targeted() is not None:
        return "is not for flash_pallas.target, as jax asks the cuDNN that is here"
    default = jax.default_backend()
    if platform not in (None, default) and backend.name != XlaBackend.name:
        return (
            f"the arrays are on the {platform}, and its kernels would be compiled for the {default}"
        )
    if isinstance(problem, DecodeProblem):
        return backend.unsupported_decode(problem)
    if isinstance(problem, RaggedProblem):
        return backend.unsupported_ragged(problem)
    return backend.unsupported(problem)


def _passed_over(backend: Backend, problem: AnyProblem, platform: str | None = None) -> str | None:
    """Returns why "auto" does not take a backend, or None."""
    return _refusal(backend, problem, platform) or backend.not_automatic(problem)


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


# --- Tables of tuned tile sizes -------------------------------------------------------------------
# A table belongs to one kind of device and one minor version of jax (whose compiler decides what a
# tile costs), and names each call by everything that is static in it, so it says nothing of calls
# that were not timed. Its entries are what a caller could have passed as `blocks=`.

CACHE_VARIABLE = "FLASH_PALLAS_CACHE_DIR"
FORMAT = 1  # raised when kernels change so much that older timings say nothing

_SHIPPED = pathlib.Path(__file__).parent.parent / "tuned"
_H200 = "nvidia_h200.json"
# Names of devices as jax spells them. The two differ in memory, not in SMs.
_SHIPPED_FOR = {"NVIDIA H200": _H200, "NVIDIA H100 80GB HBM3": _H200}


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Entry of a table for one call.

    Attributes:
        blocks: tile sizes as the caller might pass them, of those kernels for which the heuristics
            are not best.
        path: path of the table.
        timed: names of the kernels that were timed.
    """

    blocks: dict[str, dict[str, Any]]
    path: pathlib.Path
    timed: frozenset[str] = frozenset()

    @property
    def source(self) -> str:
        """Name of the table as `explain` shows it."""
        if self.path.parent == _SHIPPED:
            return f"shipped table {self.path.name}"
        return f"user cache {self.path}"


def key(backend: str, problem: Problem) -> str | None:
    """Returns the name of a call in a table; None if a function of the user's takes part in it.

    It contains every field of the problem and of its spec that is not at its default.
    """
    if problem.spec.score_mod is not None or problem.spec.mask_mod is not None:
        return None
    fields = {**_stated(problem), **_stated(problem.spec)}
    del fields["spec"]
    if problem.features:
        fields["features"] = ",".join(sorted(problem.features))
    return " ".join([backend, *(f"{name}={value}" for name, value in fields.items())])


def _stated(record) -> dict[str, Any]:
    values = {field: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {field.name: value for field, value in values.items() if value != field.default}


def lookup(backend: str, problem: Problem, device: str | None = None) -> Tuned | None:
    """Looks up what was timed for exactly this call: by the user, else as shipped.

    Args:
        backend: name of the backend.
        problem: the call.
        device: a kind of device, as jax spells it; None is the one here.
    """
    name = key(backend, problem)
    if name is None:
        return None
    for path in _tables(device):
        entry = _read(path).get(name)
        if entry is not None:
            return Tuned(entry["blocks"], path, frozenset(entry.get("gain", ())))
    return None


def _tables(device: str | None) -> list[pathlib.Path]:
    """Returns the paths of the tables in order of precedence."""
    shipped, folder = _SHIPPED_FOR.get(device or _device()), _user_folder()
    own = [] if folder is None else [folder / _file_name(device)]
    return [*own, *([_SHIPPED / shipped] if shipped else [])]


def user_path(kind: str | None = None) -> pathlib.Path:
    """Returns the path of the user's table for a kind of device (None: the one here) and this jax.

    It is in the folder that FLASH_PALLAS_CACHE_DIR names, else in flash_pallas under XDG_CACHE_HOME
    or ~/.cache.

    Raises:
        OSError: there is no such folder, as this user has no home directory.
    """
    folder = _user_folder()
    if folder is None:
        raise OSError(
            f"this user has no home directory to keep tile sizes in: set {CACHE_VARIABLE} to a "
            "folder that can be written to"
        )
    return folder / _file_name(kind)


def _user_folder() -> pathlib.Path | None:
    """Returns the folder of the user's tables.

    It is None if no variable names one and the user, as in many containers, has no home.
    """
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return pathlib.Path(folder)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if caches.startswith("~") else pathlib.Path(caches) / "flash_pallas"


def _file_name(kind: str | None) -> str:
    device = re.sub(r"[^a-z0-9]+", "_", (kind or _device()).lower()).strip("_")
    return f"{device}_jax{_jax()}.json"


def store(path: pathlib.Path, name: str, blocks: dict[str, Any], gain: dict[str, float]) -> None:
    """Adds one call to a table, in one step; what else is in it stays.

    Other processes and threads may do so at the same time: each waits for the others, and adds to
    what is in the file by then.

    Args:
        path: path of the table.
        name: the call's `key`.
        blocks: the tile sizes of those kernels for which the heuristics are not best.
        gain: for the reader, speed relative to the heuristics of every kernel that was timed.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_suffix(".draft")
    with _only_writer(path):
        entries = {**_entries(path), name: {"blocks": blocks, "gain": gain}}
        table = {"format": FORMAT, "device": _device(), "jax": _jax(), "entries": entries}
        try:
            draft.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    _read.cache_clear()


@contextlib.contextmanager
def _only_writer(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a table; it is released when the process ends, however it does."""
    import fcntl  # not on Windows, where nothing is tuned either

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_writable(path: pathlib.Path) -> None:
    """Makes the folder of a table and checks that it can be written to.

    Raises:
        OSError: it cannot be made or written to; the message names it and the way out.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent), _only_writer(path):
            pass
    except OSError as error:
        raise OSError(
            f"{path.parent} cannot be written to ({error}): set {CACHE_VARIABLE} to a folder that "
            "can"
        ) from error


def ignore(path: pathlib.Path, reason: str) -> None:
    """Warns, once for each file, that it is not used."""
    _warn(f"{path} is ignored: {reason}. Delete it, or run flash_pallas.autotune again")


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


# Read once: a table that changes under a running program must not change what it computes with.
@functools.cache
def _read(path: pathlib.Path) -> dict[str, Any]:
    return _entries(path)


def _entries(path: pathlib.Path) -> dict[str, Any]:
    """Returns the entries of a table; none if there is no file or it cannot be used."""
    if not os.path.exists(path):  # False too where this user may not look into the folder
        return {}
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")  # to read from a pipe would never end
        table = json.loads(path.read_text())
        if not _well_formed(table):
            raise ValueError("it is no table of this version")
    except (OSError, ValueError) as error:  # JSON's and Unicode's errors are ValueErrors
        ignore(path, str(error))
        return {}
    except RecursionError:
        ignore(path, "it is nested too deeply")
        return {}
    # What another compiler made of these tiles says nothing. The shipped table has one jax.
    return table["entries"] if table["jax"] == _jax() else {}


def _well_formed(table) -> bool:
    if not isinstance(table, dict) or table.get("format") != FORMAT or "jax" not in table:
        return False
    entries = table.get("entries")
    return isinstance(entries, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("blocks"), dict)
        for entry in entries.values()
    )


def _device() -> str:
    return jax.devices()[0].device_kind


def _jax() -> str:
    return ".".join(jax.__version__.split(".")[:2])
