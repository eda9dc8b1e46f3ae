"""Tables of tuned tile sizes: the user's, which `autotune` writes, and the shipped one.

A table belongs to one kind of device and one minor version of jaxlib (whose compiler decides what a
tile costs), and names each call by everything that is static in it, so it says nothing of calls
that were not timed. Its entries are what a caller could have passed as `blocks=`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jaxlib.version

from ..core.problem import Problem

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
    """Returns the path of the user's table for a kind of device (None: this one) and this jaxlib.

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
    return f"{device}_jaxlib{_jaxlib()}.json"


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
        table = {"format": FORMAT, "device": _device(), "jaxlib": _jaxlib(), "entries": entries}
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


def _entries(path: pathlib.Path) -> dict[str, Any]:
    """Returns the entries of a table; none if there is no file or it cannot be used."""
    if not os.path.exists(path):  # also False where the folder cannot be read
        return {}
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")  # reading a pipe would never end
        table = json.loads(path.read_text())
        if not _well_formed(table):
            raise ValueError("it is no table of this version")
    except (OSError, ValueError) as error:  # JSON's and Unicode's errors are ValueErrors
        ignore(path, str(error))
        return {}
    except RecursionError:
        ignore(path, "it is nested too deeply")
        return {}
    # Timings of another compiler's kernels do not apply. The shipped table has one jaxlib.
    return table["entries"] if table["jaxlib"] == _jaxlib() else {}


# Read once: a table that changes under a running program must not change what it computes with.
_read = functools.cache(_entries)


def _well_formed(table) -> bool:
    if not isinstance(table, dict) or table.get("format") != FORMAT or "jaxlib" not in table:
        return False
    entries = table.get("entries")
    return isinstance(entries, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("blocks"), dict)
        for entry in entries.values()
    )


def _device() -> str:
    return jax.devices()[0].device_kind


def _jaxlib() -> str:
    return ".".join(map(str, jaxlib.version.__version_info__[:2]))
