"""The benchmarks' timers: what they count as time, and which of them is believed."""

from __future__ import annotations

import collections
import ctypes
import itertools
import struct
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import clocks, cupti, timing

# --- cupti


def test_busy_time_is_a_union():
    make = lambda *pairs: [cupti.Interval(a, b, "x") for a, b in pairs]
    assert cupti.busy_ns(make((10, 20), (30, 40))) == 20
    assert cupti.busy_ns(make((30, 40), (10, 35))) == 30
    assert cupti.busy_ns(make((10, 40), (20, 30))) == 30
    assert cupti.busy_ns([]) == 0


def _record(kind: int, start: int, end: int, name: bytes | None = None, device: int = 0):
    """Packs an activity record as in cupti_activity.h; returns it and its name's buffer."""
    text = ctypes.create_string_buffer(name) if name else None
    address = ctypes.addressof(text) if text else 0
    devices = (0, device) if name else (device, 0)  # of copies, and of kernels
    return struct.pack("<I12xQQI4xI60xQ", kind, start, end, *devices, address), text


class FakeCupti:
    """A CUPTI that delivers the given records when it is flushed."""

    def __init__(self, records, enable_status=0):
        self.records, self.enable_status = records, enable_status
        self.enabled, self.log = set(), []

    def cuptiActivityRegisterCallbacks(self, requested, completed):
        self.requested, self.completed = requested, completed
        return 0

    def cuptiActivityEnable(self, kind):
        self.enabled.add(kind)
        return self.enable_status

    def cuptiActivityDisable(self, kind):
        self.enabled.remove(kind)
        return 0

    def cuptiActivityFlushAll(self, flag):
        assert flag == 1
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(7)
        self.requested(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
        assert most.value == 0
        data = b"".join(self.records)
        assert len(data) <= size.value
        ctypes.memmove(buffer.value, data, len(data))
        self.addresses = [
            buffer.value + offset
            for offset in itertools.accumulate(map(len, self.records), initial=0)
        ][:-1]
        self.completed(None, 0, buffer, size.value, len(data))
        return 0

    def cuptiActivityGetNextRecord(self, buffer, valid, record):
        del buffer, valid
        if not self.addresses:
            return 12
        record._obj.value = self.addresses.pop(0)
        return 0

    def cuptiGetResultString(self, status, message):
        del status
        message._obj.value = b"CUPTI_ERROR_FAKE"
        return 0


def test_recorder_reads_kernels_memsets_and_copies(monkeypatch):
    kernel, text = _record(10, 1000, 3000, b"attention", device=3)
    memset, _ = _record(2, 500, 800, device=2)
    fake = FakeCupti([kernel, memset, _record(1, 0, 100)[0], _record(4, 0, 9)[0]])
    monkeypatch.setattr(cupti, "_load", lambda: fake)
    recorder = cupti.Recorder()
    for _ in range(2):
        with recorder.record() as intervals:
            assert fake.enabled == {1, 2, 10}
        assert intervals == [
            (1000, 3000, "attention", 3),
            (500, 800, "memset", 2),
            (0, 100, "memcpy", 0),
        ]
        assert not fake.enabled
    assert text.value == b"attention"


def test_recorder_names_the_call_that_failed(monkeypatch):
    fake = FakeCupti([], enable_status=39)
    monkeypatch.setattr(cupti, "_load", lambda: fake)
    recorder = cupti.Recorder()
    message = r"cuptiActivityEnable: CUPTI_ERROR_FAKE \(39\)"
    with pytest.raises(cupti.CuptiError, match=message), recorder.record():
        pass


# --- timing


class FakeTimer:
    """A timer that reads durations announced by the launches; keeps the order of readings."""

    name = "fake"

    def __init__(self):
        self.order = []

    def measure(self, launch, iterations):
        name, ms = launch.run()
        self.order.append((name, iterations))
        return timing.Sample(ms, 3.0)


def _contestants(**durations):
    def make(name, ms):
        if isinstance(ms, list):
            steps = iter(ms)
            return timing.Launch(lambda: (name, next(steps)), "jax")
        return timing.Launch(lambda: (name, ms), "jax")

    return {name: make(name, ms) for name, ms in durations.items()}


def test_the_clock_is_the_median_of_what_is_read_meanwhile():
    values = itertools.cycle([1500, None, 1700, 1600])
    enough = threading.Event()
    count = itertools.count(1)

    def read():
        if next(count) == 40:
            enough.set()
        return next(values)

    with clocks.median_clock(read, every_s=1e-4) as mhz:
        assert enough.wait(10)
    assert mhz() == 1600
    assert next(count) >= 41


def test_without_a_reader_there_is_no_clock():
    with clocks.median_clock(None) as mhz:
        pass
    assert mhz() is None


def test_samples_carry_the_clock():
    class Reader:
        def mhz(self):
            return 1755

    class Slow(FakeTimer):
        def measure(self, launch, iterations):
            time.sleep(0.05)
            return super().measure(launch, iterations)

    found, _ = timing.interleave(Slow(), _contestants(a=10.0), rounds=1, clock=Reader())
    assert [sample.mhz for sample in found["a"]] == [1755]


def test_rounds_are_interleaved():
    timer = FakeTimer()
    samples, failures = timing.interleave(timer, _contestants(a=10.0, b=20.0, c=1.0), rounds=4)
    assert not failures
    assert {name: len(found) for name, found in samples.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = [name for name, _ in timer.order[6:]]
    in_turn = ["".join(rounds[i : i + 6]) for i in range(0, 24, 6)]
    assert in_turn == ["aabbcc", "bbccaa", "ccaabb", "ccbbaa"]
    assert dict(timer.order[6:]) == {"a": 3, "b": 2, "c": 30}


@pytest.mark.parametrize("count", range(2, 8))
def test_each_comes_behind_every_other_equally_often(count):
    rounds = count * (1 + count % 2)
    orders = [timing.order(count, turn) for turn in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    behind = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(behind.values()) == {rounds // count} and len(behind) == count * (count - 1)


def test_a_contestant_that_raises_drops_out_and_the_others_go_on():
    timer = FakeTimer()
    # The iterator ends in the second round, after two pilots and a reading that is taken twice.
    ends = _contestants(a=1.0, b=[1.0, 1.0, 1.0, 1.0])
    found, failures = timing.interleave(timer, ends, rounds=3)
    assert set(found) == {"a"}
    assert len(found["a"]) == 3
    assert set(failures) == {"b"}


def test_ratio_is_taken_within_rounds():
    # Both slow down threefold: the ratio of every round is 2, that of the medians is not.
    yardstick = [timing.Sample(ms, 1) for ms in (2.0, 4.0, 60.0)]
    mine = [timing.Sample(ms, 1) for ms in (1.0, 2.0, 30.0)]
    assert timing.speed_ratio(yardstick, mine) == 2.0
    assert timing.median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(2 / 3))
    assert timing.median_and_spread([7.0]) == (7.0, 0.0)


def test_iterations_fill_a_reading():
    assert timing.iterations_for(1.0) == 30
    assert timing.iterations_for(1000.0) == 2
    assert timing.iterations_for(0.0) == 100


def test_kineto_reads_device_events_only():
    events = [
        {"ph": "X", "cat": "kernel", "ts": 1.5, "dur": 2.0, "name": "k"},
        {"ph": "X", "cat": "gpu_memset", "ts": 4, "dur": 1, "name": "m"},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 99, "name": "launch"},
        {"ph": "M", "name": "process_name"},
    ]
    assert timing.KinetoTimer.intervals(events) == [(1500, 3500, "k", 0), (4000, 5000, "m", 0)]


def test_a_timer_that_loses_work_is_not_chosen(monkeypatch):
    class Deaf:
        name = "deaf"

        def measure(self, launch, iterations):
            return timing.Sample(1e-9, 1.0)

    monkeypatch.setitem(timing.TIMERS, "cupti", Deaf)
    monkeypatch.setattr(timing, "torch_or_none", lambda: None)
    probes = {"sum": timing.Launch(lambda: jnp.ones(8).sum(), "jax")}
    timer, log = timing.choose("auto", probes)
    assert isinstance(timer, timing.HostTimer)
    assert "of the wall time" in log["cupti"]
    assert "torch" in log["kineto"]
    with pytest.raises(RuntimeError, match="does not work here"):
        timing.choose("cupti", probes)


def test_host_timer_measures_time():
    product = jax.jit(jnp.dot)
    launch = lambda n: timing.Launch(lambda: product(jnp.ones((n, n)), jnp.ones((n, n))), "jax")
    timer = timing.HostTimer()
    timer.measure(launch(16), 1), timer.measure(launch(1024), 1)
    assert timer.measure(launch(1024), 3).ms > timer.measure(launch(16), 3).ms > 0
