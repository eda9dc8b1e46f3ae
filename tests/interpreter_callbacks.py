"""Interpreted wgmma and TMA: values are computed at once, effects reach the race log over time.

Each function replaces the callback of the same purpose in JAX's interpreter (`interpreter`) and
runs in the Python thread of the warpgroup that issued the instruction.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from .interpreter_races import monitor

Key = shared_memory.HostAllocationKey


@dataclasses.dataclass(frozen=True)
class _Group:
    """One committed wgmma: the accumulator it adds to and the shared memory it reads."""

    accumulator: Key
    reads: tuple
    source_info: Any


def _access(key: Key, transforms):
    transforms = gpu_callbacks._remove_noop_transforms(transforms)
    return gpu_callbacks._get_shared_memory().access(key, jax.tree.map(int, transforms))


def _log_operand_reads(thread, group: _Group) -> None:
    """Logs that `group` reads its operands now, through the async proxy.

    The time of the tensor core is the vector-clock place of the warpgroup's warp 3, which cannot
    issue wgmma. The warpgroup's own place would not do: advancing it in the async clock would mark
    the warpgroup's earlier stores as committed.
    """
    memory = gpu_callbacks._get_shared_memory()
    if not memory.detect_races:
        return
    with memory.lock:
        memory.clocks[thread].inc(memory.thread_to_vc_position(thread.warp(3)))
        now = memory.clocks[thread].async_smem_clock.copy()
    for key, access in group.reads:
        gpu_callbacks.get_races().check_read(thread, now, key, access, group.source_info)


def _retire(thread, n: int) -> None:
    """Executes `wgmma.wait_group n`: all but the newest n groups have read all their operands."""
    groups = monitor().in_flight[thread]
    while len(groups) > n:
        _log_operand_reads(thread, groups.popleft())


def _require_idle(thread, accumulator: Key, what: str, source_info) -> None:
    for group in monitor().in_flight[thread]:
        if group.accumulator == accumulator:
            where = source_info_util.summarize(source_info)
            monitor().races.append(f"{what} at {where} while a wgmma into it is in flight")
            return


def _is_key(operand) -> bool:
    spec = Key.shape_and_dtype()
    return operand.shape == spec.shape and operand.dtype == spec.dtype


def _read(key: Key, access) -> np.ndarray:
    return gpu_callbacks._get_shared_memory().get_buffer_content(key, access, None)[0]


@gpu_callbacks.fail_on_exception
def wgmma(
    *,
    token,
    mesh_location,
    thread,
    acc_allocation_key_as_array,
    acc_transforms,
    a_allocation_key_as_array,
    a_transforms,
    b_allocation_key_as_array,
    b_transforms,
    source_info=None,
):
    """Computes acc += a @ b; `a` is a buffer's key or, for an operand in registers, the values."""
    del mesh_location
    memory = gpu_callbacks._get_shared_memory()
    acc_key = Key.from_array(acc_allocation_key_as_array)
    b_key = Key.from_array(b_allocation_key_as_array)
    reads = [(b_key, _access(b_key, b_transforms))]
    if _is_key(a_allocation_key_as_array):
        a_key = Key.from_array(a_allocation_key_as_array)
        reads.append((a_key, _access(a_key, a_transforms)))
        a = _read(*reads[-1])
    else:
        a = np.asarray(a_allocation_key_as_array)
    b = _read(*reads[0])
    group = _Group(acc_key, tuple(reads), source_info)
    _log_operand_reads(thread, group)
    monitor().in_flight[thread].append(group)

    acc_access = _access(acc_key, acc_transforms)
    acc = _read(acc_key, acc_access)
    with np.errstate(invalid="ignore"):  # padding may hold NaN and Inf
        product = np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(acc.dtype)
        total = acc + product
    memory.store_buffer_content(acc_key, acc_access, total, thread)
    return token


@gpu_callbacks.fail_on_exception
def wgmma_wait(*, token, thread, n):
    """Implements `plgpu.wgmma_wait(n)`, which retires all but the newest n groups."""
    _retire(thread, n)
    return token


@gpu_callbacks.fail_on_exception
def accumulator_load(
    *, token, mesh_location, thread, acc_allocation_key_as_array, wait_n, source_info=None
):
    """Implements `plgpu.wgmma_accumulator_load(acc, wait_n)`, and `acc[...]` with wait_n = 0."""
    del mesh_location
    if wait_n is not None:
        _retire(thread, wait_n)
    key = Key.from_array(acc_allocation_key_as_array)
    _require_idle(thread, key, "accumulator read", source_info)
    return token, _read(key, _access(key, ()))


@gpu_callbacks.fail_on_exception
def accumulator_store(*, token, thread, key, value, source_info=None):
    """Implements `acc[...] = value`."""
    key = Key.from_array(key)
    _require_idle(thread, key, "accumulator overwritten", source_info)
    memory = gpu_callbacks._get_shared_memory()
    memory.store_buffer_content(key, _access(key, ()), np.asarray(value), thread)
    return token


def log_tma_write(task, tma_thread_id: int, memory) -> None:
    """Logs the write half of a TMA load (AsyncCopyGmemToSmemTask.post_read); rule 1 of the log."""
    if not memory.detect_races:
        return
    task.clock.inc(tma_thread_id)
    gpu_callbacks.get_races().check_write(
        task.thread,
        task.clock.async_smem_clock.copy(),
        task.dst_allocation_key,
        task.dst_access,
        source_info=task.source_info,
        read_clock=task.clock.generic_clock.copy(),
    )


# Held while a thread reads device memory, changes what it found and writes that back: clusters run
# one after the other, the CTAs of one at the same time.
_ATOMIC = threading.Lock()


def _word(key, index) -> tuple[Key, int, np.ndarray]:
    """Returns the buffer of words in device memory, the index of one, and all their values."""
    key = Key.from_array(key)
    return key, int(index), _read(key, _access(key, ()))


@gpu_callbacks.fail_on_exception
def set_bits(*, token, thread, key, index, bits, source_info=None):
    """Implements `inline.set_bits`: who waits for them sees what this thread has written."""
    memory = gpu_callbacks._get_shared_memory()
    with _ATOMIC:
        key, index, words = _word(key, index)
        found = words[index]
        words[index] |= int(bits)
        memory.store_buffer_content(key, _access(key, ()), words, thread)
    if found & int(bits):
        where = source_info_util.summarize(source_info)
        monitor().races.append(f"bits {int(bits):#x} of word {index} at {where} were set before")
    if memory.detect_races:
        now = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().signal((key, index), int(bits), now)
    return token


@gpu_callbacks.fail_on_exception
def await_bits(*, token, thread, key, index, bits, source_info=None):
    """Implements `inline.await_bits`; clusters run one after the other: it finds them or never."""
    memory = gpu_callbacks._get_shared_memory()
    key, index, words = _word(key, index)
    if ~words[index] & int(bits):
        where = source_info_util.summarize(source_info)
        found = f"bits {int(words[index]):#x} of word {index}, not {int(bits):#x}"
        monitor().deadlocks.append(f"{thread} at {where} found {found}")
        raise RuntimeError(monitor().deadlocks[-1])
    if memory.detect_races:
        now = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().awaited((key, index), int(bits), now)
    return token


@gpu_callbacks.fail_on_exception
def fence_copies(*, token, thread):
    """Implements `inline.fence_copies`: copies come after what this thread has seen."""
    gpu_callbacks._get_shared_memory().commit_smem(thread)
    return token


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


class _Reduction(gpu_callbacks.AsyncCopySmemToGmemTask):
    """A TMA store that combines its values with those in GMEM."""

    operation = np.add

    def __call__(self, tma_thread_id: int) -> None:
        memory = gpu_callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, memory)
        value = _read(self.src_allocation_key, self.src_access)
        self.post_read(tma_thread_id, memory)
        shape = tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        inside = gpu_callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if inside is not None:
            access, value = inside
            with _ATOMIC:
                value = self.operation(_read(self.dst_allocation_key, access), value)
                memory.store_buffer_content(self.dst_allocation_key, access, value, self.thread)
        self.post_write(tma_thread_id, memory)

    def post_read(self, tma_thread_id: int, memory) -> None:
        if not memory.detect_races:
            return
        self.clock.inc(tma_thread_id)
        self.write_clock = self.clock.copy()
        gpu_callbacks.get_races().check_write(
            self.thread,
            self.clock.async_smem_clock.copy(),
            self.dst_allocation_key,
            self.dst_access,
            source_info=self.source_info,
            reduction=True,
        )


@gpu_callbacks.fail_on_exception
def copy_smem_to_gmem(original, *, token, thread, reduction_op=None, **call):
    """Implements `plgpu.copy_smem_to_gmem`; JAX's own function does all but reductions."""
    if reduction_op is None:
        return original(token=token, thread=thread, reduction_op=None, **call)
    if call["predicate"] is not None:
        raise NotImplementedError("a reduction with a predicate")
    memory = gpu_callbacks._get_shared_memory()
    src = Key.from_array(call["src_allocation_key_as_array"])
    dst = Key.from_array(call["dst_allocation_key_as_array"])
    task = _Reduction(
        mesh_location=call["mesh_location"],
        thread=thread,
        src_allocation_key=src,
        src_access=_access(src, call["src_transforms"]),
        dst_allocation_key=dst,
        dst_access=_access(dst, call["dst_transforms"]),
        source_info=call["source_info"],
        clock=memory.incr_clock(thread) if memory.detect_races else None,
    )
    task.operation = _REDUCTIONS[str(reduction_op)]
    memory.execute_async_task(task)
    return token
