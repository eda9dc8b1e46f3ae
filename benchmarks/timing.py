"""Time on the device, for work launched by jax and by torch in one process."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from . import clocks, cupti


class Launch(NamedTuple):
    """Something to time.

    Attributes:
        run: starts the work and returns its outputs without waiting for them.
        framework: "jax" or "torch".
    """

    run: Callable[[], Any]
    framework: str


class Sample(NamedTuple):
    """One reading: milliseconds and pieces of device work, per iteration.

    Attributes:
        mhz: the SM clock meanwhile; None where nothing reads it.
    """

    ms: float
    launches: float
    mhz: float | None = None


class Timer(Protocol):
    """One way to take a time. `name` goes into the results."""

    name: str

    def measure(self, launch: Launch, iterations: int) -> Sample:
        """Returns the time of `iterations` runs, divided by their number."""
        ...


def torch_or_none():
    """Returns the torch module where it is installed and sees a GPU, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def synchronize(outputs: Any = None) -> None:
    """Waits for everything on the device.

    It waits first for the given outputs: jax may still be enqueueing when its call returns, and a
    wait for the device does not see what has not been enqueued.
    """
    jax.block_until_ready(outputs)
    torch = torch_or_none()
    if torch is not None:
        torch.cuda.synchronize()


def _repeat(launch: Launch, iterations: int) -> None:
    outputs = None
    for _ in range(iterations):
        outputs = launch.run()
    synchronize(outputs)


def _sample(intervals: list[cupti.Interval], iterations: int) -> Sample:
    if not intervals:
        raise RuntimeError("the profiler saw no device work")
    return Sample(cupti.busy_ns(intervals) / iterations / 1e6, len(intervals) / iterations)


class CuptiTimer:
    """Busy time from CUPTI's records of kernels, memsets and copies."""

    name = "cupti: device busy time over kernels, memsets and copies"

    def __init__(self) -> None:
        self._recorder = cupti.Recorder()

    def measure(self, launch: Launch, iterations: int) -> Sample:
        """Measures by CUPTI's records; see Timer."""
        synchronize()
        with self._recorder.record() as intervals:
            _repeat(launch, iterations)
        return _sample(intervals, iterations)


class KinetoTimer:
    """Busy time from the same records through torch.profiler, which also sees what jax launches."""

    name = "torch.profiler: device busy time over kernels, memsets and copies"

    _CATEGORIES = ("kernel", "gpu_memset", "gpu_memcpy")

    def __init__(self) -> None:
        self._torch = torch_or_none()
        if self._torch is None:
            raise RuntimeError("torch with a GPU is not installed")

    def measure(self, launch: Launch, iterations: int) -> Sample:
        """Measures by the trace of torch.profiler; see Timer."""
        profiler = self._torch.profiler
        synchronize()
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            _repeat(launch, iterations)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return _sample(self.intervals(events), iterations)

    @classmethod
    def intervals(cls, events: list[dict[str, Any]]) -> list[cupti.Interval]:
        """Returns the device work among the events of a trace, whose times are microseconds."""
        return [
            cupti.Interval(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3), e["name"])
            for e in events
            if e.get("ph") == "X" and e.get("cat") in cls._CATEGORIES
        ]


class HostTimer:
    """The last resort: CUDA events around torch, the host's clock around jax.

    The dispatch of jax is in its number (5 to 20 % at short lengths), so a ratio of jax to torch
    taken this way is a lower bound.
    """

    name = "cuda events (torch), wall clock (jax)"

    def measure(self, launch: Launch, iterations: int) -> Sample:
        """Measures by CUDA events or the host's clock, with NaN for launches; see Timer."""
        synchronize()
        torch = torch_or_none() if launch.framework == "torch" else None
        if torch is None:
            begin = time.perf_counter()
            _repeat(launch, iterations)
            return Sample((time.perf_counter() - begin) * 1e3 / iterations, math.nan)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(iterations):
            launch.run()
        stop.record()
        torch.cuda.synchronize()
        return Sample(start.elapsed_time(stop) / iterations, math.nan)


TIMERS: dict[str, Callable[[], Timer]] = {
    "cupti": CuptiTimer,
    "kineto": KinetoTimer,
    "host": HostTimer,
}

# A long launch keeps the device busy, so its device time is nearly its wall time. A timer that
# reads much less has lost records; one that reads more than clocks drift counted something twice.
_PLAUSIBLE = (0.7, 1.1)


def verify(timer: Timer, probes: dict[str, Launch], iterations: int = 10) -> dict[str, float]:
    """Returns device time over wall time for each probe.

    Raises:
        RuntimeError: the timer cannot be trusted with one of them.
    """
    ratios = {}
    for name, probe in probes.items():
        _repeat(probe, 2)
        begin = time.perf_counter()
        _repeat(probe, iterations)
        wall = (time.perf_counter() - begin) * 1e3 / iterations
        ratios[name] = timer.measure(probe, iterations).ms / wall
        if not _PLAUSIBLE[0] <= ratios[name] <= _PLAUSIBLE[1]:
            raise RuntimeError(f"{name}: reads {ratios[name]:.2f} of the wall time")
    return ratios


def choose(name: str, probes: dict[str, Launch]) -> tuple[Timer, dict[str, Any]]:
    """Chooses the timer of this name, or for "auto" the first that passes `verify`.

    Returns:
        The timer, and what was found on the way, for the results.

    Raises:
        RuntimeError: the named timer does not work here.
    """
    log: dict[str, Any] = {}
    for candidate in TIMERS if name == "auto" else (name,):
        if candidate == "host":
            log[candidate] = "not verified: it is the host's clock"
            return HostTimer(), log
        try:
            timer = TIMERS[candidate]()
            log[candidate] = verify(timer, probes)
            return timer, log
        except (OSError, RuntimeError) as error:
            log[candidate] = str(error)
    raise RuntimeError(f"the timer {name!r} does not work here: {log}")


def iterations_for(pilot_ms: float, target_ms: float = 30.0) -> int:
    """Returns how often to run what takes pilot_ms, so that a reading lasts about target_ms.

    It is at least 2, and at most 100 per 30 ms: shorter work takes the host longer to dispatch than
    the device to run.
    """
    most = max(100, round(100 * target_ms / 30.0))
    return min(max(math.ceil(target_ms / max(pilot_ms, 1e-6)), 2), most)


def order(count: int, turn: int) -> list[int]:
    """Returns the order of `count` contestants in a round: each follows every other equally often.

    This holds over `count` rounds where that is even, else over twice as many (Williams 1949, for
    residual effects of treatments). A contestant that always follows the same one is timed on the
    card as that one leaves it (benchmarks/NOTES.md, "Measuring method").
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    if count % 2 and turn // count % 2:
        zigzag.reverse()
    return [(i + turn) % count for i in zigzag]


def interleave(
    timer: Timer,
    contestants: dict[str, Launch],
    rounds: int,
    reading_ms: float = 30.0,
    clock: clocks.ClockReader | None = None,
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Takes readings of all contestants, round by round, in the order of `order`.

    The card is power-limited and drifts by 10 % within minutes, so only readings of the same round
    are comparable. Each is taken after another of the same contestant, which is dropped. One that
    raises drops out.

    Returns:
        Samples by name, one a round, and by name why a contestant dropped out.
    """
    samples: dict[str, list[Sample]] = {}
    failures: dict[str, str] = {}
    iterations = {}

    def attempt(name: str, count: int) -> Sample | None:
        try:
            with clocks.median_clock(clock and clock.mhz) as mhz:
                sample = timer.measure(contestants[name], count)
            return sample._replace(mhz=mhz())
        except Exception as error:  # Whatever it is, the others go on.
            failures[name] = f"{type(error).__name__}: {error}"
            samples.pop(name, None)
            return None

    for name in contestants:
        # The first call may still compile or tune; the second gives the estimate.
        pilot = attempt(name, 1) and attempt(name, 2)
        if pilot is not None:
            iterations[name] = iterations_for(pilot.ms, reading_ms)
            samples[name] = []
    names = list(samples)
    for turn in range(rounds):
        for name in (names[i] for i in order(len(names), turn)):
            if name in samples:
                # The first of two is dropped: in it the card is as warm as who came before left it.
                count = iterations[name]
                sample = attempt(name, count) and attempt(name, count)
                if sample is not None:
                    samples[name].append(sample)
    return samples, failures


def median_and_spread(values: list[float]) -> tuple[float, float]:
    """Returns the median, and the interquartile range as a fraction of it."""
    middle = statistics.median(values)
    if len(values) < 2:
        return middle, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / middle


def speed_ratio(yardstick: list[Sample], mine: list[Sample]) -> float:
    """Returns the median over the rounds of (yardstick's time / my time): above 1 is faster."""
    pairs = zip(yardstick, mine, strict=True)
    return statistics.median(theirs.ms / ours.ms for theirs, ours in pairs)
