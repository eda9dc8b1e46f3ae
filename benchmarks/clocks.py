"""The clock at which the GPU ran while something was timed, from NVIDIA's management library.

A power-limited card slows down for what draws more power, so equal clocks are part of what a ratio
means.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import statistics
import threading
from collections.abc import Callable, Iterator

# Enumerators of nvml.h (nvmlReturn_t, nvmlClockType_t).
_SUCCESS = 0
_SM_CLOCK = 1

_BUS_ID_BYTES = 32
_EVERY_S = 0.002  # The library itself takes some 10 us a reading.


class ClockReader:
    """Reads the clock of jax's first GPU, in MHz.

    Raises:
        OSError: there is no such library, or no GPU that it knows.
    """

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self._device = ctypes.c_void_p()
        # The number of a device depends on CUDA_VISIBLE_DEVICES, where it sits does not.
        steps = {
            "cuInit": lambda: cuda.cuInit(0),
            "cuDeviceGetPCIBusId": lambda: cuda.cuDeviceGetPCIBusId(bus_id, _BUS_ID_BYTES, 0),
            "nvmlInit": lambda: self._nvml.nvmlInit_v2(),
            "nvmlDeviceGetHandleByPciBusId": lambda: self._nvml.nvmlDeviceGetHandleByPciBusId_v2(
                bus_id, ctypes.byref(self._device)
            ),
        }
        for name, step in steps.items():
            status = step()
            if status != _SUCCESS:
                raise OSError(f"{name} failed with status {status}")

    def mhz(self) -> int | None:
        """Reads the SM clock of this moment, in MHz; returns None where it cannot be read."""
        found = ctypes.c_uint()
        status = self._nvml.nvmlDeviceGetClockInfo(self._device, _SM_CLOCK, ctypes.byref(found))
        return found.value if status == _SUCCESS else None


@functools.cache
def reader_or_none() -> ClockReader | None:
    """Returns a reader, where there is a GPU and NVIDIA's library, else None."""
    try:
        return ClockReader()
    except (OSError, AttributeError):  # AttributeError: a library without one of the functions.
        return None


@contextlib.contextmanager
def median_clock(
    read: Callable[[], int | None] | None, every_s: float = _EVERY_S
) -> Iterator[Callable[[], float | None]]:
    """Reads the clock in a thread of its own while the block runs.

    Yields:
        A function that returns the median in MHz once the block is left; None without readings.
    """
    readings: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every_s):
            found = read()
            if found is not None:
                readings.append(found)

    median = lambda: statistics.median(readings) if readings else None
    if read is None:
        yield median
        return
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield median
    finally:
        done.set()
        thread.join()
