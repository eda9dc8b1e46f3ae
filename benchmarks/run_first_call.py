"""Times first calls in fresh processes: a forward, a gradient and a training step.

    python -m benchmarks.run_first_call --out results/first_call.json

Each process makes its inputs and then traces, lowers, compiles and runs one program that it has not
seen before. Processes of all contestants take turns, and a round is in another order than the one
before. "Cached" programs are in JAX's persistent cache, where an earlier process left them.
"Exported" ones are there, too, and are not traced and lowered but read from a file of `jax.export`.
Without a GPU the calls of this package are those of its jnp backend.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import first_calls, gate, llama, results, run_training, steps, suites, tables, timing
from .first_calls import PHASES
from .training_tables import CACHED, EXPORTED, YARDSTICK

FOLDER = "JAX_COMPILATION_CACHE_DIR"
WORK = ("forward", "gradient", "training step")


class Contestant(NamedTuple):
    """An attention function, and the environment of its processes.

    Attributes:
        attention: name of it in `run_training.CONTESTANTS`.
        environment: variables; where `FOLDER` is one of them, its value is that of a folder.
    """

    attention: str
    environment: Mapping[str, str] = {}


_CACHE = {FOLDER: "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
CONTESTANTS = {
    "flash_pallas": Contestant("flash_pallas"),
    "flash_pallas, none ahead": Contestant("flash_pallas", {"FLASH_PALLAS_COMPILE_AHEAD": "0"}),
    YARDSTICK: Contestant(YARDSTICK),
    f"flash_pallas{CACHED}": Contestant("flash_pallas", _CACHE),
    f"{YARDSTICK}{CACHED}": Contestant(YARDSTICK, _CACHE),
    f"flash_pallas{EXPORTED}": Contestant("flash_pallas", _CACHE),
    f"{YARDSTICK}{EXPORTED}": Contestant(YARDSTICK, _CACHE),
}
SHAPES = {
    "1b": suites.Shape(4, 4096, 16, 16, 128),
    "tiny": suites.Shape(1, 64, 2, 2, 16),
}
TOKENS = {"1b": (4, 8192), "tiny": (1, 32)}


def program(work: str, attention: str, size: str) -> tuple[Any, Callable[[], tuple]]:
    """Returns the jitted function of one kind of work, and what makes its arguments."""
    attend, policy = run_training.CONTESTANTS[attention]
    if work == "training step":
        config, layout = llama.SIZES[size], llama.Layout()
        batch, length = TOKENS[size]
        make = lambda: (
            llama.state_maker(config, layout)(),
            llama.batch_of(config, batch, length, layout),
        )
        return llama.step_of(config, layout, attend, policy), make
    inputs = lambda: gate.random_inputs(SHAPES[size], jnp.dtype(jnp.bfloat16))
    if work == "forward":
        return jax.jit(attend), lambda: inputs()[:3]
    return jax.jit(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do)), inputs


def measure(work: str, name: str, size: str) -> dict[str, float]:
    """Returns the seconds of each phase of the first call, in this process."""
    attention = CONTESTANTS[name].attention
    function, make = program(work, attention, size)
    if name.endswith(EXPORTED):
        function = first_calls.Exported(function, pathlib.Path(os.environ[FOLDER]) / attention)
    _, seconds, _ = first_calls.first_run(function, *jax.block_until_ready(make()))
    return seconds


def answer(arguments, work: str, name: str, folder: str) -> dict[str, Any]:
    """Returns what a fresh process measures, or {"failed": reason}."""
    command = [sys.executable, "-m", "benchmarks.run_first_call", "--out", str(arguments.out)]
    command += ["--size", arguments.size, "--worker", name, "--work", work]
    given = dict(CONTESTANTS[name].environment)
    if FOLDER in given:
        given[FOLDER] = folder
    return first_calls.fresh_process(command, arguments.patience, given)


def rows(arguments, work: str) -> list[dict[str, Any]]:
    """Measures one kind of work and returns a row for each contestant.

    A refused contestant has the reason and no number.
    """
    names, found, refused = list(arguments.contestants), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = []
            # Its first process fills the cache, or exports its program, and has no number.
            if FOLDER in CONTESTANTS[name].environment:
                answer(arguments, work, name, folder)
        for turn in range(arguments.rounds):
            for name in steps.in_order(names, turn):
                if name in refused:
                    continue
                one = answer(arguments, work, name, folder)
                if "failed" in one:
                    refused[name] = one["failed"]
                else:
                    found[name].append(one)
    return [row(work, name, found, refused.get(name)) for name in names]


def row(work: str, name: str, found: dict[str, list], refused: str | None) -> dict[str, Any]:
    """Returns the row of a contestant; `found`: the seconds of every round, by contestant.

    Its time relative to another contestant's is the median over rounds of their ratio.
    """
    made: dict[str, Any] = {"work": work, "provider": name, "refused": refused}
    made |= dict.fromkeys((*PHASES, "first_s", "spread", "rounds", "relative"))
    if refused is not None:
        return made
    whole = {other: [sum(one.values()) for one in each] for other, each in found.items()}
    made |= {phase: statistics.median(one[phase] for one in found[name]) for phase in PHASES}
    made["first_s"], made["spread"] = timing.median_and_spread(whole[name])
    made["rounds"] = whole[name]
    made["relative"] = {
        other: statistics.median(a / b for a, b in zip(whole[name], each, strict=True))
        for other, each in whole.items()
        if len(each) == len(whole[name])
    }
    return made


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    words = lambda text: text.split(";")
    parser.add_argument("--work", type=words, default=list(WORK), help="; ".join(WORK))
    listed = "; ".join(CONTESTANTS)
    parser.add_argument("--contestants", type=words, default=list(CONTESTANTS), help=listed)
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=120, help="seconds for one process")
    parser.add_argument("--worker", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    unknown = {*arguments.contestants} - {*CONTESTANTS} | {*arguments.work} - {*WORK}
    if unknown:
        parser.error(f"unknown {sorted(unknown)}; there are {list(CONTESTANTS)} and {WORK}")
    return arguments


def main(arguments: argparse.Namespace) -> None:
    """Measures all work, saves after each kind, and prints the table."""
    begin, config, shape = time.monotonic(), llama.SIZES[arguments.size], SHAPES[arguments.size]
    batch, length = TOKENS[arguments.size]
    summary = (
        f"seconds of a first call in a fresh process, medians of {arguments.rounds} interleaved "
        f"rounds, {os.cpu_count()} CPUs; causal attention of {shape.label} (B,T,N,K,H), bfloat16; "
        f"the step has {config.layers} layers, {config.width} wide, {batch} x {length} tokens."
    )
    found = results.header("first_call", {"summary": summary}) | {"rows": []}
    for work in arguments.work:
        found["rows"] += rows(arguments, work)
        results.save(arguments.out, found)
        print(f"{work} done, {time.monotonic() - begin:.0f} s", flush=True)
    print(tables.render(found), flush=True)


if __name__ == "__main__":
    asked = parse(None)
    if asked.worker is None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        main(asked)
    else:
        first_calls.tell(measure(*asked.work, asked.worker, asked.size))
