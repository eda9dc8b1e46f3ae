"""Runs a suite.

    python -m benchmarks.run --suite h200 --out benchmarks/results/h200.json

Providers whose results miss the oracle get no number. The file is written after every cell, so that
a run cut short keeps what it has; --append goes on from there. A markdown table is printed last.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import itertools
import multiprocessing
import os
import pathlib
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp

from . import clocks, flops, gate, memory, results, suites, tables, timing
from .providers import DEFAULT_PROVIDERS, PROVIDERS, YARDSTICK, Runner, Unsupported, prepare

DIRECTIONS = ("forward", "backward")
GATED = {"forward": gate.FORWARD, "backward": gate.BACKWARD}


GEMM = "gemm"  # among the contestants; no provider, so it has no row


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Compiled programs of one cell; the futures are done."""

    oracle: Future
    providers: dict[str, Future]


@dataclasses.dataclass
class Entry:
    """One provider on one cell: a runner and verdicts, or the reason why there are none."""

    runner: Runner | None = None
    verdicts: dict[str, gate.Verdict] = dataclasses.field(default_factory=dict)
    refused: str | None = None

    def refusal(self, direction: str) -> str | None:
        """Returns why this direction gets no number, or None."""
        if self.refused is not None:
            return self.refused
        wrong = [n for n in GATED[direction] if n in self.verdicts and not self.verdicts[n].ok]
        if wrong:
            worst = max(wrong, key=lambda n: self.verdicts[n].used)
            used = self.verdicts[worst].used
            return f"wrong result: {worst} is {used:.3g} times its allowed error from the oracle"
        return None


def compile_cells(cells: Sequence[suites.Cell], arguments) -> list[Compiled]:
    """Compiles all providers' programs of these cells in parallel; nothing is timed meanwhile.

    A job that failed keeps its exception until it is asked for its result.
    """
    begin = time.perf_counter()
    dtype, traced_by = jnp.dtype(arguments.dtype), contextlib.nullcontext()
    if arguments.processes:
        # Not forked: this process has a CUDA context.
        spawn = multiprocessing.get_context("spawn")
        traced_by = concurrent.futures.ProcessPoolExecutor(arguments.processes, spawn)
    compiled = []
    # More threads than processors: some of them wait for a process that traces.
    workers = (os.cpu_count() or 1) + arguments.processes
    with traced_by as processes, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for cell in cells:
            like = gate.input_shapes(cell.shape, dtype)
            oracle = pool.submit(gate.compile_oracle, like, cell.causal)
            jobs = [pool.submit(prepare, p, cell, dtype, processes) for p in arguments.providers]
            programs = dict(zip(arguments.providers, jobs, strict=True))
            compiled.append(Compiled(oracle, programs))
    seconds = time.perf_counter() - begin
    print(f"compiled {len(compiled)} cells in {seconds:.0f} s", flush=True)
    return compiled


def admit(name: str, job: Future, inputs: gate.Inputs, oracle: gate.Oracle) -> Entry:
    """Gives a provider its inputs and lets it through the gate, or says why not."""
    begin = time.perf_counter()
    try:
        runner = job.result()(inputs)
        entry = Entry(runner, oracle.check(runner.results()))
    except (Unsupported, NotImplementedError) as error:
        entry = Entry(refused=f"unsupported: {error}")
    except Exception as error:  # One provider's crash must not cost the others their numbers.
        entry = Entry(refused=f"failed: {type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    print(f"  {name}: {entry.refused or 'ready'} ({seconds:.1f} s)"[:300], flush=True)
    return entry


def run_cell(
    cell: suites.Cell, compiled: Compiled, timer: timing.Timer, arguments
) -> list[dict[str, Any]]:
    """Returns the rows of one cell: every provider, both directions."""
    inputs = gate.random_inputs(cell.shape, jnp.dtype(arguments.dtype))
    oracle = compiled.oracle.result()(inputs)
    entries = {name: admit(name, job, inputs, oracle) for name, job in compiled.providers.items()}
    del oracle
    rows = []
    for direction in DIRECTIONS:
        asked = [name for name in entries if direction in PROVIDERS[name].directions]
        refusals = {name: entries[name].refusal(direction) for name in asked}
        contestants = {
            name: entries[name].runner.launches[direction]
            for name in asked
            if refusals[name] is None
        }
        if contestants and jax.default_backend() == "gpu":
            contestants[GEMM] = gemm()
        samples, failures = timing.interleave(
            timer, contestants, arguments.rounds, arguments.reading_ms, clocks.reader_or_none()
        )
        for name in asked:
            refused = refusals[name] or failures.get(name)
            row = make_row(cell, direction, name, samples, refused, entries[name].verdicts)
            rows.append(row)
    return rows


@functools.cache
def gemm() -> timing.Launch:
    """Returns the limit for all numbers: a large matmul of standard normal bfloat16 matrices."""
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (flops.GEMM_SIZE,) * 2, jnp.bfloat16) for key in keys)
    product = jax.jit(jnp.dot).lower(x, y).compile()
    return timing.Launch(lambda: product(x, y), "jax")


def make_row(cell, direction, name, samples, refused, verdicts) -> dict[str, Any]:
    """Returns one row of the results file."""
    row = dict.fromkeys((*results.ROW_FIELDS, *results.LATER_FIELDS))
    shape = {f: getattr(cell.shape, f) for f in results.ROW_FIELDS[:5]}
    row.update(shape, causal=cell.causal, direction=direction, provider=name, refused=refused)
    row["gate"] = gate_summary({n: verdicts[n] for n in GATED[direction] if n in verdicts})
    if refused is None:
        times = [sample.ms for sample in samples[name]]
        row["ms"], row["spread"] = timing.median_and_spread(times)
        row["tflops"] = flops.tflops(cell.shape, cell.causal, direction, row["ms"])
        row["launches"] = samples[name][-1].launches
        read = [sample.mhz for sample in samples[name] if sample.mhz is not None]
        row["mhz"] = statistics.median(read) if read else None
        others = [other for other in samples if other not in (name, GEMM)]
        row["relative"] = {o: timing.speed_ratio(samples[o], samples[name]) for o in others}
        if YARDSTICK in samples:
            row["ratio_to_torch_cudnn"] = timing.speed_ratio(samples[YARDSTICK], samples[name])
        if GEMM in samples:
            work = flops.attention_flops(cell.shape, cell.causal, direction)
            row["share_of_gemm"] = (
                work / flops.GEMM_FLOPS * timing.speed_ratio(samples[GEMM], samples[name])
            )
    return row


def gate_summary(verdicts: dict[str, gate.Verdict]) -> dict[str, Any] | None:
    """Returns the tensor nearest to its bound, and all of them as [maximum, root mean square]."""
    if not verdicts:
        return None
    # A NaN compares false with everything, so a failed tensor is looked for first.
    failed = [name for name, verdict in verdicts.items() if not verdict.ok]
    worst = failed[0] if failed else max(verdicts, key=lambda name: verdicts[name].used)
    return {
        "ok": not failed,
        "tensor": worst,
        "error": verdicts[worst].error[0],
        "bound": verdicts[worst].bound[0],
        "tensors": {n: {"error": v.error, "bound": v.bound} for n, v in verdicts.items()},
    }


def probes() -> dict[str, timing.Launch]:
    """Returns work whose device time is nearly its wall time, to try a timer on."""
    found = {}
    x = jnp.ones((8192, 8192), jnp.bfloat16)
    product = jax.jit(jnp.dot)
    found["jax matmul"] = timing.Launch(lambda: product(x, x), "jax")
    torch = timing.torch_or_none()
    if torch is not None:
        y = torch.ones((8192, 8192), device="cuda", dtype=torch.bfloat16)
        zeroed = torch.empty(2**32, device="cuda", dtype=torch.uint8)
        found["torch matmul"] = timing.Launch(lambda: y @ y, "torch")
        found["torch memset"] = timing.Launch(zeroed.zero_, "torch")
    return found


def method(timer: timing.Timer, log: dict[str, Any], arguments) -> dict[str, Any]:
    """Describes, for the results file, how the numbers were taken."""
    summary = (
        f"TFLOP/s, in parentheses the speed relative to {YARDSTICK} (above 1 is faster), "
        f"{arguments.dtype}; {timer.name}; median of {arguments.rounds} interleaved rounds, "
        "each reading behind another of its own."
    )
    return {
        "summary": summary,
        "timer": timer.name,
        "timer_check": log,
        "rounds": arguments.rounds,
        "dtype": arguments.dtype,
        "inputs": "standard normal",
        "spread": "interquartile range / median",
        "ratio": f"median over the rounds of ({YARDSTICK} time / provider time)",
    }


def run_timing(arguments) -> dict[str, Any]:
    """Runs a timing suite; the file is saved after every cell."""
    begin = time.monotonic()
    if jax.default_backend() == "gpu":
        timer, log = timing.choose(arguments.timer, probes())
    else:
        timer, log = timing.HostTimer(), {"host": "no GPU"}
    print(f"timer: {timer.name}\n{log}", flush=True)
    found = results.header(arguments.suite, method(timer, log, arguments)) | {"rows": []}
    if arguments.append and arguments.out.exists():
        found["rows"] = reusable_rows(results.load(arguments.out), found)
    done = {row_label(row) for row in found["rows"]}
    suite = suites.SUITES[arguments.suite]
    missing = [c for c in suite if c.label not in done and arguments.only in c.label]
    for batch in itertools.batched(missing, arguments.ahead):
        left_out = time_batch(batch, timer, arguments, begin, found)
        if left_out is not None:
            print(f"time is up before {left_out.label}; go on with --append")
            break
    return found


def time_batch(cells, timer: timing.Timer, arguments, begin: float, found) -> suites.Cell | None:
    """Times some cells, compiled together, and adds their rows to the file.

    Returns:
        The cell at which time was up, or None.
    """
    longest = 0.0
    left = lambda: arguments.time_limit - (time.monotonic() - begin)
    if left() < 0:
        return cells[0]
    everything = compile_cells(cells, arguments)
    for cell, compiled in zip(cells, everything, strict=True):
        if left() < longest:
            return cell
        started = time.monotonic()
        print(cell.label, flush=True)
        found["rows"] += run_cell(cell, compiled, timer, arguments)
        results.save(arguments.out, found)
        gc.collect()
        torch = timing.torch_or_none()
        if torch is not None:
            torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - started)
    return None


def reusable_rows(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of an earlier part of the same run.

    Raises:
        ValueError: they were taken on something else, and one table must not mix the two.
    """
    same = ("suite", "commit", "device", "versions")
    different = [name for name in same if old[name] != new[name]]
    if old["method"]["timer"] != new["method"]["timer"]:
        different.append("timer")
    if different:
        raise ValueError(f"--append: the file differs in {different}")
    return old["rows"]


def row_label(row: dict[str, Any]) -> str:
    """Returns the label of the cell that a row belongs to."""
    sizes = ",".join(str(row[name]) for name in results.ROW_FIELDS[:5])
    return f"{sizes} {'causal' if row['causal'] else 'full'}"


def run_memory(arguments) -> dict[str, Any]:
    """Runs the memory suite and saves its file."""
    shape = suites.MEMORY_SHAPE
    summary = (
        f"GiB at the peak of one causal forward and backward, inputs and gradients included, "
        f"bfloat16, B={shape.batch}, {shape.q_heads} heads of {shape.head_dim}; "
        "~ is XLA's plan where the allocator's peak could not be read."
    )
    found = results.header("memory", {"summary": summary})
    # Each provider's own process needs the memory, so this one must not have reserved it.
    found["rows"] = memory.run_suite(arguments.providers, arguments.lengths)
    results.save(arguments.out, found)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=[*suites.SUITES, "memory"], default="quick")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    parser.add_argument("--providers", type=lambda s: s.split(","), help="comma-separated")
    parser.add_argument("--timer", choices=["auto", *timing.TIMERS], default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reading-ms", type=float, default=30.0, help="length of one reading")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--only", default="", help='cells whose label has this, e.g. "causal"')
    parser.add_argument("--append", action="store_true", help="go on with the file at --out")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds; no new cell after")
    parser.add_argument("--ahead", type=int, default=12, help="cells compiled side by side")
    parser.add_argument("--processes", type=int, default=0, help="that trace; 0: this one does")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(suites.MEMORY_LENGTHS))
    arguments = parser.parse_args(argv)
    is_memory = arguments.suite == "memory"
    default = memory.DEFAULT_PROVIDERS if is_memory else DEFAULT_PROVIDERS
    arguments.providers = arguments.providers or list(default)
    known = {*memory.JAX_ATTENTION, "torch_cudnn"} if is_memory else set(PROVIDERS)
    unknown = set(arguments.providers) - known
    if unknown:
        parser.error(f"unknown providers {sorted(unknown)}; there are {sorted(known)}")
    return arguments


def prepare_process(time_limit: float) -> None:
    """Sets variables that jax reads when it first touches the device, and a watchdog for hangs."""
    # Torch needs its share of the memory. And CUPTI sees the kernels of a CUDA graph only where it
    # was attached when the graph was made: without command buffers XLA makes none.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    # A hang becomes a traceback of all threads instead of a silent end from outside.
    faulthandler.dump_traceback_later(time_limit + 120, exit=True)


def main(arguments: argparse.Namespace) -> None:
    """Runs the suite and prints its table."""
    found = run_memory(arguments) if arguments.suite == "memory" else run_timing(arguments)
    print(tables.render(found))


if __name__ == "__main__":
    given = parse(None)
    prepare_process(given.time_limit)
    main(given)
