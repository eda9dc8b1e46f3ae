"""Intervals in which the GPU worked, from CUPTI's activity records, whoever launched the work.

jax's own CUPTI profiler records kernels only. A backward that accumulates into a zeroed buffer
begins with a memset, and a timer that does not see memsets would flatter it; so kernels, memsets
and copies are all recorded here.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

# Enumerators of cupti_activity.h (CUpti_ActivityKind) and cupti_result.h (CUptiResult).
_MEMCPY, _MEMSET, _CONCURRENT_KERNEL = 1, 2, 10
_KINDS = {_MEMCPY: "memcpy", _MEMSET: "memset", _CONCURRENT_KERNEL: "kernel"}
_NO_MORE_RECORDS = 12
_FLUSH_FORCED = 1

# In the records of these three kinds, in every version from CUDA 11 to 13.5, `kind` is the first
# field, and the start and end times (uint64 nanoseconds) are at the same offsets; the number of the
# device (uint32) is where it is since CUDA 8.
_START, _END, _KERNEL_NAME = 16, 24, 104
_DEVICE = {"kernel": 40, "memcpy": 32, "memset": 32}
_BUFFER_BYTES = 8 << 20

_REQUESTED = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_COMPLETED = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class Interval(NamedTuple):
    """One piece of work on the device, with its start and end in nanoseconds."""

    start_ns: int
    end_ns: int
    name: str
    device: int = 0


class CuptiError(RuntimeError):
    """Raised where a call to CUPTI fails; the message names the call."""


def busy_ns(intervals: list[Interval]) -> int:
    """Returns the nanoseconds in which at least one of the intervals was running.

    It is a union and not a sum: kernels that overlap on purpose (programmatic dependent launch) are
    not charged twice.
    """
    total, reached = 0, 0
    for start, end, *_ in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


class Recorder:
    """CUPTI's activity records of this process.

    Raises:
        OSError: no CUPTI library was found.
        CuptiError: CUPTI refused, for example because another profiler is attached.
    """

    def __init__(self) -> None:
        self._lib = _load()
        self._buffers: dict[int, ctypes.Array] = {}
        self._intervals: list[Interval] = []
        self._failures: list[str] = []
        # CUPTI keeps the function pointers, so this object must keep the functions.
        self._callbacks = (_REQUESTED(self._requested), _COMPLETED(self._completed))
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Interval]]:
        """Yields a list that holds what ran in the block once the block has ended.

        The caller synchronises the device at the end of the block.
        """
        self._intervals.clear()
        for kind in _KINDS:
            self._call("cuptiActivityEnable", kind)
        result: list[Interval] = []
        try:
            yield result
            self._call("cuptiActivityFlushAll", _FLUSH_FORCED)
        finally:
            for kind in _KINDS:
                self._call("cuptiActivityDisable", kind)
        if self._failures:
            raise CuptiError(self._failures[0])
        result.extend(self._intervals)

    def _call(self, function: str, *arguments) -> None:
        status = getattr(self._lib, function)(*arguments)
        if status != 0:
            message = ctypes.c_char_p()
            self._lib.cuptiGetResultString(status, ctypes.byref(message))
            raise CuptiError(f"{function}: {(message.value or b'?').decode()} ({status})")

    def _requested(self, buffer, size, max_records) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES)
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], max_records[0] = address, _BUFFER_BYTES, 0

    def _completed(self, context, stream, buffer, size, valid) -> None:
        del context, stream, size
        record = ctypes.c_void_p()
        while valid:
            status = self._lib.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
            )
            if status == _NO_MORE_RECORDS:
                break
            if status != 0:
                self._failures.append(f"cuptiActivityGetNextRecord failed ({status})")
                break
            interval = parse(record.value)
            if interval is not None:
                self._intervals.append(interval)
        self._buffers.pop(buffer, None)


def parse(address: int) -> Interval | None:
    """Parses the activity record at this address; returns None for a kind that is not measured."""
    kind = _KINDS.get(ctypes.c_uint32.from_address(address).value)
    if kind is None:
        return None
    start = ctypes.c_uint64.from_address(address + _START).value
    end = ctypes.c_uint64.from_address(address + _END).value
    name = kind
    if kind == "kernel":
        name = (ctypes.c_char_p.from_address(address + _KERNEL_NAME).value or b"?").decode()
    device = ctypes.c_uint32.from_address(address + _DEVICE[kind]).value
    return Interval(start, end, name, device)


def _load() -> ctypes.CDLL:
    """Loads CUPTI: one that is loaded or on the loader's path, else that of NVIDIA's wheels."""
    candidates = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        candidates += [str(p) for p in sorted(pathlib.Path(root).glob("*/lib/libcupti.so.*"))]
    errors = []
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            errors.append(str(error))
    raise OSError("; ".join(errors))
