"""The race log of the extended interpreter: accesses, their order, and barriers never completed.

Warpgroups of a cluster run as Python threads at the same time, clusters one after the other.
Every access carries a vector clock; two accesses to one place race if one of them writes and
neither clock is behind the other. This module keeps that log (`RaceLog`) in place of JAX's own,
because three rules of the hardware are missing there:

* **Generic read, then TMA write.** A slot is read with ordinary loads, released through an mbarrier
  and refilled by TMA. JAX orders a TMA access after the *committed* (`plgpu.commit_smem`) part of
  the past only, and so calls this a race. A proxy fence makes generic *writes* visible to the
  async proxy; a load has returned its value before its thread can arrive, so nothing is left to
  make visible. Therefore a TMA write is compared with earlier reads by the clock of ordinary
  synchronization, and with earlier writes by the committed one. Kernels thus need no
  `commit_smem` before they release a slot that they only read.
* **Reductions commute.** Two `copy_smem_to_gmem(reduction_op=...)` to one place do not race with
  each other, but do with plain accesses.
* **CTAs of a grid are ordered by words in device memory alone.** Their clocks start anew and cannot
  be compared: a conflict in GMEM between two CTAs is a race, unless the earlier one set bits of a
  word behind its access, for which the other one waited before its own (`signal`, `awaited`).

Not modeled: hazards between the warps of one warpgroup (`unsafe_no_auto_barriers`), the contents of
registers, bank conflicts, anything that depends on time.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from typing import Any

from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state as jax_races


@dataclasses.dataclass
class Monitor:
    """Observations of one `race_checked` context.

    Attributes:
        races: one text per pair of conflicting accesses.
        deadlocks: one text per thread that waited in vain.
        accesses: number of race-checked accesses; zero means that no kernel was interpreted.
        deadlock_s: longest time without any barrier completing while a thread waits for one.
        last_progress: when a barrier last completed a phase (time.monotonic).
        in_flight: per thread, the wgmma groups that no wait has retired yet, oldest first.
    """

    races: list[str] = dataclasses.field(default_factory=list)
    deadlocks: list[str] = dataclasses.field(default_factory=list)
    accesses: int = 0
    deadlock_s: float = 60.0
    last_progress: float = dataclasses.field(default_factory=time.monotonic)
    in_flight: dict[Any, collections.deque] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.deque)
    )


_monitor = Monitor()


def monitor() -> Monitor:
    """Returns the monitor of the `race_checked` context that runs now."""
    return _monitor


def reset_monitor(**settings: Any) -> Monitor:
    """Starts a new monitor with these attributes and returns it."""
    global _monitor
    _monitor = Monitor(**settings)
    return _monitor


@dataclasses.dataclass(frozen=True)
class _Access:
    thread: Any
    where: str
    block: int
    range: tuple
    write: bool
    reduction: bool
    clock: Any  # orders it against writes
    read_clock: Any  # orders it against reads

    def __str__(self) -> str:
        kind = "reduction" if self.reduction else "write" if self.write else "read"
        return f"{kind} of {self.range} by {self.thread} at {self.where}"


def _conflict(new: _Access, old: _Access) -> bool:
    if not (new.write or old.write) or (new.reduction and old.reduction):
        return False
    ordered = old.clock.ordered(new.clock if old.write else new.read_clock)
    if new.block == old.block and ordered:
        return False
    return _ranges_overlap(new.range, old.range)


class RaceLog(jax_races.GPURaceDetectionState):
    """All accesses of one kernel launch; conflicts go to the monitor. Module docstring: the rules.

    Attributes:
        block: number of the CTA (or cluster) that runs now.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.block = 0
        self._signals: dict[Any, list[tuple[int, int, Any]]] = collections.defaultdict(list)
        self._seen: dict[int, list[tuple[int, Any, Any]]] = collections.defaultdict(list)
        self._accesses: dict[Any, list[_Access]] = collections.defaultdict(list)

    def check_read(self, thread, clock, buffer_key, rnge, source_info=None) -> None:
        """Logs a read at `rnge` (an Access of the interpreter) with the time `clock`."""
        self._log(thread, clock, buffer_key, rnge, source_info)
        self._check_ref_union(thread, clock, buffer_key, False, source_info)

    def check_write(
        self,
        thread,
        clock,
        buffer_key,
        rnge,
        source_info=None,
        *,
        read_clock=None,
        reduction=False,
    ) -> None:
        """Logs a write; `read_clock` (default: `clock`) is its time against earlier reads."""
        how = {"write": True, "reduction": reduction, "read_clock": read_clock}
        self._log(thread, clock, buffer_key, rnge, source_info, **how)
        self._check_ref_union(thread, clock, buffer_key, True, source_info)

    def _log(
        self, thread, clock, key, rnge, source_info, write=False, reduction=False, read_clock=None
    ) -> None:
        where = "?" if source_info is None else source_info_util.summarize(source_info)
        new = _Access(
            thread, where, self.block, rnge.range, write, reduction, clock, read_clock or clock
        )
        with self.lock:
            earlier = list(self._accesses[key])
            self._accesses[key].append(new)
            monitor().accesses += 1
        conflicts = (a for a in earlier if _conflict(new, a) and not self._handed_over(a, new))
        old = next(conflicts, None)
        if old is not None:
            monitor().races.append(f"{new}\n    is not ordered after the {old}")

    def signal(self, word, bits: int, clock) -> None:
        """Logs that this CTA sets bits of a word at its time `clock`."""
        with self.lock:
            self._signals[word].append((self.block, bits, clock))

    def awaited(self, word, bits: int, clock) -> None:
        """Logs that this CTA has seen bits of a word at its time `clock`."""
        with self.lock:
            for block, signalled, then in self._signals[word]:
                if signalled & bits:
                    self._seen[self.block].append((block, then, clock))

    def _handed_over(self, old: _Access, new: _Access) -> bool:
        return any(
            block == old.block and old.clock.lt(then) and seen.lt(new.clock)
            for block, then, seen in self._seen[new.block]
        )

    # JAX's check of RefUnion members prints and sets this flag (0.11) or raises (0.12).
    @property
    def races_found(self) -> bool:
        return bool(monitor().races)

    @races_found.setter
    def races_found(self, found: bool) -> None:
        if found:
            monitor().races.append("conflicting accesses through aliased members of a RefUnion")


class WatchedCondition(threading.Condition):
    """A condition variable that gives up once no barrier has completed a phase for `deadlock_s`."""

    def notify_all(self) -> None:
        monitor().last_progress = time.monotonic()
        super().notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        started = time.monotonic()
        while not super().wait(0.25 * monitor().deadlock_s):
            quiet = time.monotonic() - max(started, monitor().last_progress)
            if quiet >= monitor().deadlock_s:
                text = f"{threading.current_thread().name}: no barrier completed for {quiet:.1f} s"
                monitor().deadlocks.append(text)
                raise RuntimeError(f"deadlock: {text}")
        return True
