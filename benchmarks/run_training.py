"""Times the training step of a Llama-like model of 1.1 billion parameters on one GPU.

    python -m benchmarks.run_training --out results/training.json --lengths 2048,8192

A step is forward, backward and AdamW of at least 32,768 tokens, with the attention of this package
and of others. Each contestant first has a process of its own, which says how long its first step
takes (tracing, compiling and running), what it computes and how much memory it needs; then all of
them run in turns on one training state. --size tiny is for a CPU. The file is saved after
every row; other lengths of an earlier run stay in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import flash_pallas

from . import first_calls, flops, llama, results, steps, suites, tables, timing

TOKENS = 32_768
# Contestants compute the same up to the rounding of bfloat16, 2^-8 of each number. The loss and the
# norm of the gradients are means over very many, and differ by less than this.
ALLOWED = 2.0**-8


class Contestant(NamedTuple):
    """An attention function, and what remat keeps of a layer.

    Attributes:
        attend: (q, k, v) -> o, causal.
        policy: of `jax.checkpoint`; None computes a layer's forward again in the backward.
    """

    attend: Callable
    policy: Callable | None = None


def tokamax(q, k, v):
    """Computes causal attention by Tokamax's kernels for Hopper."""
    import tokamax

    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic")


_flash = functools.partial(flash_pallas.flash_attention, causal=True)
_jax_nn = functools.partial(jax.nn.dot_product_attention, is_causal=True)
_cudnn = functools.partial(_jax_nn, implementation="cudnn")
KEPT = ", output kept"
CONTESTANTS = {
    "flash_pallas": Contestant(_flash),
    f"flash_pallas{KEPT}": Contestant(_flash, llama.keeps_attention),
    "jax_cudnn": Contestant(_cudnn),
    f"jax_cudnn{KEPT}": Contestant(_cudnn, llama.keeps_attention),
    "tokamax": Contestant(tokamax),
    "jax_xla": Contestant(functools.partial(_jax_nn, implementation="xla")),
}
DEFAULT = tuple(name for name in CONTESTANTS if name != "jax_xla")  # dense: too much memory


def step_like(arguments, name: str):
    """Returns a contestant's jitted step, and the shapes of state and batch."""
    config, layout = arguments.config, llama.Layout()
    step = llama.step_of(config, layout, *CONTESTANTS[name])
    state = jax.eval_shape(functools.partial(llama.initial_state, config))
    batch = functools.partial(llama.batch_of, config, arguments.batch, arguments.length, layout)
    return step, state, jax.eval_shape(batch)


def drawn(arguments):
    """Makes the initial state and the batch."""
    layout = llama.Layout()
    batch = llama.batch_of(arguments.config, arguments.batch, arguments.length, layout)
    return llama.state_maker(arguments.config, layout)(), batch


def alone(arguments) -> dict[str, Any]:
    """Measures a contestant's first steps in this process, which has not compiled it before."""
    (name,) = arguments.contestants
    state, batch = jax.block_until_ready(drawn(arguments))
    step, *_ = step_like(arguments, name)
    program, seconds, (state, (loss, norm)) = first_calls.first_run(step, state, batch)
    losses, norms = [float(loss)], [float(norm)]
    for _ in range(arguments.check_steps - 1):
        state, (loss, norm) = program(state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    plan = program.memory_analysis()
    stats = jax.local_devices()[0].memory_stats() or {}
    planned = plan.argument_size_in_bytes + plan.temp_size_in_bytes + plan.output_size_in_bytes
    found = {**seconds, "first_s": sum(seconds.values()), "losses": losses, "norms": norms}
    found["planned_bytes"] = planned - plan.alias_size_in_bytes
    return found | {"peak_bytes": stats.get("peak_bytes_in_use")}


def together(arguments) -> dict[str, Any]:
    """Measures seconds of a step of all contestants, in turns on one state; or why there are none.

    Programs are lowered one after the other and compiled in parallel.
    """
    programs, refused, jobs = {}, {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name in arguments.contestants:
            try:
                step, *like = step_like(arguments, name)
                jobs[name] = pool.submit(step.lower(*like).compile)
            except Exception as error:  # One's failure must not cost the others their numbers.
                refused[name] = steps.reason(error)
        for name, job in jobs.items():
            try:
                programs[name] = job.result()
            except Exception as error:
                refused[name] = steps.reason(error)
    state, batch = drawn(arguments)
    pilots = {}
    for name in list(programs):
        try:
            # The first run may load and tune; the second one is the estimate.
            for _ in range(2):
                begin = time.perf_counter()
                state, result = jax.block_until_ready(programs[name](state, batch))
                pilots[name] = time.perf_counter() - begin
            del result
        except Exception as error:
            refused[name] = steps.reason(error)
            del programs[name]
            state, _ = drawn(arguments)  # that one was donated
    if not programs:
        return {"seconds": {}, "refused": refused}
    each = max(1, round(arguments.reading / max(pilots[name] for name in programs)))
    round_s = (each + 1) * sum(pilots[name] for name in programs)
    rounds = int(min(max(arguments.seconds / round_s, 3), arguments.rounds))
    return {"seconds": steps.in_turns(programs, state, batch, rounds, each), "refused": refused}


def answer(arguments, what: str, names: list[str]) -> dict[str, Any]:
    """Returns what a fresh process finds, or {"failed": reason}."""
    command = [sys.executable, "-m", "benchmarks.run_training", "--worker", what]
    command += ["--out", str(arguments.out), "--contestants", ";".join(names)]
    for name in ("size", "batch", "length", "rounds", "seconds", "reading", "check_steps"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--loop"] * arguments.loop
    # All but what this process and CUDA take. On a CPU nothing reads it.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    return first_calls.fresh_process(command, arguments.patience, memory)


def wrong(name: str, found: dict[str, Any], others: dict[str, dict[str, Any]]) -> str | None:
    """Says how a contestant's first step differs from that of the first contestant, or None."""
    yardstick, other = next(iter(others.items()))
    for what in ("losses", "norms"):
        one, two = found[what][0], other[what][0]
        if not abs(one - two) <= ALLOWED * abs(two):
            return f"wrong result: first of {what} {one:.6g}, {two:.6g} with {yardstick}"
    return None


def rows(arguments, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Measures one length and gives its rows to `keep`, again after every contestant.

    A refused contestant has the reason and no number.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.contestants:
        found[name] = answer(arguments, "alone", [name])
        keep([row(arguments, name, found, {}) for name in found])
        print(f"{arguments.length} {name}: {found[name]}", flush=True)
    ran = {name: one for name, one in found.items() if "failed" not in one}
    right = [name for name in ran if wrong(name, ran[name], ran) is None]
    taken = answer(arguments, "together", right) if right else {}
    keep([row(arguments, name, found, taken) for name in found])


def row(arguments, name: str, found: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a contestant.

    Args:
        arguments: with batch and length.
        name: the contestant's.
        found: what `alone` found, by contestant.
        taken: what `together` found; no times without it.
    """
    config, length = arguments.config, arguments.length
    shape = suites.Shape(arguments.batch, length, config.heads, config.kv_heads, config.head_dim)
    work = flops.training_flops(config.matmul_parameters, config.layers, shape)
    ran = {name: one for name, one in found.items() if "failed" not in one}
    one, seconds = found[name], taken.get("seconds", {})
    reason = one.get("failed") or wrong(name, one, ran)
    reason = reason or taken.get("refused", {}).get(name) or taken.get("failed")
    made: dict[str, Any] = {"provider": name, "batch": arguments.batch, "length": length}
    made |= {"size": arguments.size, "layers_as": "loop" if arguments.loop else "scan"}
    made |= {"refused": reason} | {n: x for n, x in one.items() if n != "failed"}
    made |= dict.fromkeys(("ms", "spread", "rounds", "tokens_per_s", "tflops", "relative"))
    if name in seconds:
        middle, spread = timing.median_and_spread(seconds[name])
        made |= {"ms": middle * 1e3, "spread": spread, "rounds": len(seconds[name])}
        made["tokens_per_s"] = arguments.batch * length / middle
        made["tflops"] = work / middle / 1e12
        samples = {n: [timing.Sample(s, 1) for s in x] for n, x in seconds.items()}
        made["relative"] = {n: timing.speed_ratio(x, samples[name]) for n, x in samples.items()}
    return made


def merged(path: pathlib.Path, found: dict[str, Any]) -> dict[str, Any]:
    """Returns `found` with the file's rows of other lengths."""
    about = lambda row: (row["length"], row["layers_as"])
    both = results.with_earlier(path, found, about)
    return both | {"rows": sorted(both["rows"], key=lambda row: row["length"])}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser.add_argument("--lengths", type=numbers, default=[2048, 8192, 32_768, 65_536])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a step, at least")
    names = lambda text: text.split(";")
    listed = "; ".join(CONTESTANTS)
    parser.add_argument("--contestants", type=names, default=list(DEFAULT), help=listed)
    parser.add_argument("--size", choices=llama.SIZES, default="1b")
    parser.add_argument("--loop", action="store_true", help="layers by a Python loop, no scan")
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--seconds", type=float, default=45, help="of readings at every length")
    parser.add_argument("--reading", type=float, default=1.0, help="seconds of one reading")
    parser.add_argument("--check-steps", type=int, default=3, help="whose losses are kept")
    parser.add_argument("--patience", type=float, default=240, help="seconds for one process")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds; no length after")
    parser.add_argument("--worker", choices=["alone", "together"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    unknown = set(arguments.contestants) - set(CONTESTANTS)
    if unknown:
        parser.error(f"unknown contestants {sorted(unknown)}; there are {list(CONTESTANTS)}")
    if "tokamax" in arguments.contestants and importlib.util.find_spec("tokamax") is None:
        arguments.contestants.remove("tokamax")
    arguments.config = llama.SIZES[arguments.size]
    if arguments.loop:
        arguments.config = dataclasses.replace(arguments.config, scan=False)
    return arguments


def main(arguments: argparse.Namespace) -> None:
    """Measures every length, saves after each, and prints the table."""
    begin = time.monotonic()
    config = arguments.config
    summary = (
        f"training steps of {config.layers} layers, {config.width} wide, "
        f"{config.matmul_parameters / 1e9:.2f} billion parameters in matmuls, bfloat16, float32 "
        "AdamW, remat of each layer; wall time, medians of interleaved rounds; model FLOPs are 6 "
        "for each token and parameter in a matmul, and six matmuls of attention over visible pairs."
    )
    method = {"summary": summary, "flags": os.environ.get("XLA_FLAGS", "")}
    header = results.header("training", method)
    made: dict[int, list[dict[str, Any]]] = {}

    def keep(rows: list[dict[str, Any]]) -> None:
        made[arguments.length] = rows
        found = header | {"rows": [row for each in made.values() for row in each]}
        results.save(arguments.out, merged(arguments.out, found))

    for length in sorted(arguments.lengths):
        if time.monotonic() - begin > arguments.time_limit:
            print(f"time is up before T={length}", flush=True)
            break
        arguments.length, arguments.batch = length, max(1, arguments.tokens // length)
        rows(arguments, keep)
        print(f"T={length} done, {time.monotonic() - begin:.0f} s", flush=True)
    if made:
        print(tables.render(results.load(arguments.out)), flush=True)


if __name__ == "__main__":
    given = parse(None)
    if given.worker is None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        main(given)
    else:
        first_calls.tell({"alone": alone, "together": together}[given.worker](given))
