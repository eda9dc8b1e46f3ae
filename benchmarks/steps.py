"""Whole training steps side by side: compiled, refused or timed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import timing


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


def in_order(names: Sequence[str], turn: int) -> Sequence[str]:
    """Returns names in the order of a round: each is first, then each is last, and so on."""
    if not names:
        return names
    cycle, first = divmod(turn, len(names))
    order = [*names[first:], *names[:first]]
    return order[::-1] if cycle % 2 else order


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
    for turn in range(rounds):
        for name in in_order(list(programs), turn):
            state, result = programs[name](state, batch)
            jax.block_until_ready(result)
            begin = time.perf_counter()
            for _ in range(steps):
                state, result = programs[name](state, batch)
            jax.block_until_ready(result)
            found[name].append((time.perf_counter() - begin) / steps)
    return found
