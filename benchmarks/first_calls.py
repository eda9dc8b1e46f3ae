"""A first call, phase by phase, and the fresh processes in which it is one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.export

from .tracing import CHECKS

MARK = "result: "  # begins the line of a process that its parent reads
PHASES = ("trace_s", "lower_s", "compile_s", "run_s")


class Exported(NamedTuple):
    """A jitted function whose program `jax.export` keeps in a file; the first `trace` writes it.

    Its arguments and results are leaves, as jax.export asks for types of pytrees by name.

    Attributes:
        function: the jitted function.
        file: where its program lies.
    """

    function: Any
    file: pathlib.Path

    def trace(self, *args: Any) -> Any:
        """Returns what jax.jit's `trace` does, of the program in the file."""
        leaves, form = jax.tree.flatten(args)
        if not self.file.exists():
            flat = lambda *leaves: jax.tree.leaves(self.function(*jax.tree.unflatten(form, leaves)))
            exported = jax.export.export(jax.jit(flat), disabled_checks=CHECKS)(*leaves)
            self.file.write_bytes(exported.serialize())
        program = jax.export.deserialize(self.file.read_bytes())
        call = lambda *args: program.call(*jax.tree.leaves(args))
        return jax.jit(call).trace(*args)


def first_run(function: Any, *args: Any) -> tuple[jax.stages.Compiled, dict[str, float], Any]:
    """Traces, lowers, compiles and runs a jitted function.

    Returns:
        (program, seconds of each of PHASES, results).
    """
    at = [time.perf_counter()]
    traced = function.trace(*args)
    at.append(time.perf_counter())
    lowered = traced.lower()
    at.append(time.perf_counter())
    program = lowered.compile()
    at.append(time.perf_counter())
    result = jax.block_until_ready(program(*args))
    at.append(time.perf_counter())
    seconds = {name: b - a for name, a, b in zip(PHASES, at, at[1:], strict=False)}
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
