"""Whole training steps side by side: compiled, refused or timed; first calls, fresh processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from . import timing

MARK = "result: "  # begins the line of a process that its parent reads


def reason(error: Exception) -> str:
    """Returns what an error says in its first line, without the allocator's details."""
    first = str(error).splitlines()[0].split(" [")[0]
    return f"{type(error).__name__}: {first[:200]}"


def compare(
    steps: dict[str, Callable], args: Sequence[Any], timer: timing.Timer, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, list[timing.Sample]]]:
    """Times steps on the same arguments, in turns.

    A step that cannot be compiled or run is refused, and the others go on: dense attention may not
    fit into memory.

    Args:
        steps: functions of `args` that return (loss, anything else), by name.
        args: arguments.
        timer: what takes the time.
        rounds: how many readings of each.

    Returns:
        A row for each step, (step, provider, refused, ms, spread, temporary_bytes, loss), and the
        readings by name.
    """
    launches, memory, refused, losses = {}, {}, {}, {}
    for name, step in steps.items():
        try:
            program = jax.jit(step).lower(*args).compile()
            memory[name] = program.memory_analysis().temp_size_in_bytes
            losses[name] = float(program(*args)[0])
            launches[name] = timing.Launch(functools.partial(program, *args), "jax")
        except Exception as error:  # Whatever it is, the others go on.
            refused[name] = reason(error)
    samples, failures = timing.interleave(timer, launches, rounds)
    refused |= failures
    rows = []
    for name in steps:
        times = [sample.ms for sample in samples.get(name, ())]
        ms, spread = timing.median_and_spread(times) if times else (None, None)
        row = {"step": name, "provider": name, "refused": refused.get(name)}
        row |= {"ms": ms, "spread": spread, "temporary_bytes": memory.get(name)}
        rows.append(row | {"loss": losses.get(name)})
    return rows, samples


def in_turns(
    programs: dict[str, Callable], state: Any, batch: Any, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Returns seconds of a step by program, one reading a round; each round in another order.

    Args:
        programs: functions (state, batch) -> (state, anything), which may donate the state.
        state: training state that they share.
        batch: data of every step.
        rounds: how many readings of each.
        steps: steps of a reading, besides one that is not timed, behind the other program's.
    """
    found: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for turn in range(rounds if names else 0):
        first = turn % len(names)
        order = names[first:] + names[:first]
        for name in order if turn // len(names) % 2 == 0 else order[::-1]:
            state, result = programs[name](state, batch)
            jax.block_until_ready(result)
            begin = time.perf_counter()
            for _ in range(steps):
                state, result = programs[name](state, batch)
            jax.block_until_ready(result)
            found[name].append((time.perf_counter() - begin) / steps)
    return found


def first_run(function: Any, *args: Any) -> tuple[jax.stages.Compiled, dict[str, float], Any]:
    """Traces, lowers, compiles and runs a jitted function.

    Returns:
        (program, seconds of each phase, results): the phases are trace_s, lower_s, compile_s and
        run_s.
    """
    reached, seconds = time.perf_counter(), {}

    def lap(what: str) -> None:
        nonlocal reached
        now = time.perf_counter()
        seconds[what], reached = now - reached, now

    traced = function.trace(*args)
    lap("trace_s")
    lowered = traced.lower()
    lap("lower_s")
    program = lowered.compile()
    lap("compile_s")
    result = jax.block_until_ready(program(*args))
    lap("run_s")
    return program, seconds, result


def tell(found: dict[str, Any]) -> None:
    """Prints what the parent of this process reads (`fresh_process`)."""
    print(MARK + json.dumps(found))


def fresh_process(
    command: Sequence[str], patience: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what a fresh process tells, or {"failed": reason}.

    Args:
        command: what to run.
        patience: seconds to wait for it.
        environment: variables besides those of this process.
    """
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=patience,
            env=os.environ | dict(environment),
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {patience} s"}
    lines = [x.removeprefix(MARK) for x in run.stdout.splitlines() if x.startswith(MARK)]
    if run.returncode or not lines:
        errors = [x for x in run.stderr.splitlines() if "Error" in x] or run.stderr.splitlines()
        return {"failed": (errors or ["no output"])[-1][:300]}
    return json.loads(lines[-1])
