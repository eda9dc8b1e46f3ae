"""Times the groups of features.py.

    python -m benchmarks.run_features --out results/features.json

Every variant, and each peer in peers.GATED, must first agree, within the 2x rule, with this
package's jnp backend in float32 on the same inputs (at most 2,048 queries of 2 batch entries, as
whole arrays would take minutes).
Peak memory is XLA's plan of the compiled program: arguments, results and temporaries. The plan of
the backward starts from saved residuals; where a group asks for it, gradients in one program are
planned too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import json
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import results, timing
from .features import GROUPS, Group, Sizes, Variant
from .peers import GATED, PEERS, Unsupported
from .programs import Program, compile_jax
from .run import prepare_process, probes
from .tables import groups

DIRECTIONS = ("forward", "backward")
GATE_LENGTH, GATE_BATCH = 2048, 2
FACTORS = {"forward": 2.0, "backward": 3.0}
# Of the error that bfloat16 may have. In float32, products are right to 2**-16, not 2**-8.
SHARES = {"bfloat16": 1.0, "float32": 2.0**-8}


def gate(variant: Variant, sizes: Sizes, backend: str, peer: str | None = None) -> dict[str, Any]:
    """Returns the errors of o and of all gradients from float32, as shares of what is allowed.

    That is the 2x rule's bound on the root mean square; for float32 inputs, 2**-8 of it.

    Args:
        variant: the call.
        sizes: its sizes, which are cut to GATE_BATCH and GATE_LENGTH.
        backend: of ours that is judged.
        peer: a key of GATED that is judged in its place.
    """
    small = dataclasses.replace(
        sizes, batch=min(sizes.batch, GATE_BATCH), length=min(sizes.length, GATE_LENGTH)
    )
    *qkv, do = small.arrays()
    extra = variant.make(small, jax.random.key(1))

    judged = variant.attention(backend) if peer is None else GATED[peer](variant)

    def all_results(call, dtype):
        wide = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        wanted = {name: extra[name] for name in variant.differentiated}
        fixed = {name: x for name, x in extra.items() if name not in wanted}

        @jax.jit
        def run(q, k, v, wanted, do):
            o, pull = jax.vjp(lambda *x: call(*x[:3], x[3] | fixed), q, k, v, wanted)
            return {"forward": o, "backward": pull(do)}

        return run(*map(wide, qkv), jax.tree.map(wide, wanted), wide(do))

    dense = variant.attention("xla")
    exact, plain = all_results(dense, jnp.float32), all_results(dense, jnp.bfloat16)
    found = all_results(judged, jnp.dtype(sizes.dtype))
    used = {}
    for direction, factor in FACTORS.items():
        factor *= SHARES[sizes.dtype]
        pairs = zip(*(jax.tree.leaves(x[direction]) for x in (exact, plain, found)), strict=True)
        used[direction] = max(_rms(f - e) / (factor * _rms(p - e)) for e, p, f in map(_f32, pairs))
    return used


def gate_of(group: int, variant: int, backend: str, peer: str | None = None) -> dict[str, Any]:
    """Returns `gate` of a variant of GROUPS, by number: another process has the same."""
    found = GROUPS[group]
    return gate(found.variants[variant], found.sizes, backend, peer)


def gates_apart(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    """Makes processes for gates.

    Half of the time that a group takes is the tracing and lowering of its gates, which threads of
    one process do in turn. The processes are idle while anything is timed.
    """
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, spawn, initializer=_share_the_gpu)


def _share_the_gpu() -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def _f32(arrays):
    return [x.astype(jnp.float32) for x in arrays]


def _rms(x) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.square(x)))) + 1e-12


Prepared = tuple[dict[str, Program], dict[str, str], dict]


def prepare(group: Group, backend: str = "hopper", processes: Any = None) -> Prepared:
    """Compiles a group in parallel; returns (programs, refusals, gates) by variant or peer.

    `processes` are those of `gates_apart`, for a group of GROUPS; None: gates run here.
    """
    *qkv, do = group.sizes.arrays()
    gates: dict[str, dict[str, float]] = {}

    def checked(variant: Variant, peer: str | None = None) -> Callable[[], dict[str, float]]:
        if processes is None:
            return functools.partial(gate, variant, group.sizes, backend, peer)
        place = GROUPS.index(group), group.variants.index(variant)
        return processes.submit(gate_of, *place, backend, peer).result

    def admit(name: str, used: dict[str, float]) -> None:
        gates[name] = used
        worst = max(used.values())
        if not worst <= 1.0:
            raise Unsupported(f"wrong result: {worst:.3g} times the allowed error")

    def ours(variant: Variant) -> Program:
        used = checked(variant)
        extra = variant.make(group.sizes, jax.random.key(1))
        call = variant.attention(backend)
        program = compile_jax(call, (*qkv, extra), do, variant.differentiated, group.whole)
        admit(variant.name, used())
        return program

    def peers(name: str) -> Program:
        last = group.variants[-1]
        program = PEERS[name](last, (*qkv, last.make(group.sizes, jax.random.key(1))), do)
        if name in GATED:
            admit(name, checked(last, name)())
        return program

    programs, refused = {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {v.name: pool.submit(ours, v) for v in group.variants}
        jobs |= {name: pool.submit(peers, name) for name in group.peers}
        for name, job in jobs.items():
            try:
                programs[name] = job.result()
            except Exception as error:  # One's failure must not cost the others their numbers.
                refused[name] = f"{type(error).__name__}: {error}"[:300]
    return programs, refused, gates


def run_group(
    group: Group, prepared: Prepared, timer: timing.Timer, rounds: int
) -> list[dict[str, Any]]:
    """Times one group, whose programs `prepare` made, and returns its rows."""
    programs, refused, gates = prepared
    shares = {v.name: v.visible(group.sizes) for v in group.variants if v.visible}
    rows = []
    for direction in DIRECTIONS:
        contestants = {name: p.launches[direction] for name, p in programs.items()}
        samples, failures = timing.interleave(timer, contestants, rounds)
        first = group.variants[0].name
        for name in (*programs, *refused):
            row = {
                "group": group.name,
                "shape": group.sizes.label,
                "name": name,
                "direction": direction,
                "refused": refused.get(name) or failures.get(name),
                "visible": shares.get(name),
                "gate": gates.get(name, {}).get(direction),
            }
            if name in samples:
                times = [s.ms for s in samples[name]]
                row["ms"], row["spread"] = timing.median_and_spread(times)
                peaks = programs[name].peak_bytes
                row["peak_bytes"] = peaks[direction]
                if direction == "backward" and "both" in peaks:
                    row["peak_bytes_both"] = peaks["both"]
                if first in samples:
                    row["speed"] = timing.speed_ratio(samples[first], samples[name])
            rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """Formats one row for a terminal."""
    head = f"{row['group']:<10} {row['shape']:<22} {row['name']:<30} {row['direction']:<9}"
    if row.get("ms") is None:
        return f"{head} {row['refused']}"[:200]
    speed = row.get("speed")
    return (
        f"{head} {row['ms']:9.3f} ms  speed {'-' if speed is None else f'{speed:.2f}':>5}  "
        f"{row['peak_bytes'] / 2**30:7.2f} GiB  gate {row['gate'] or 0:.2f}"
    )


def refreshed(earlier: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the run `found`, with the groups of an earlier run that it has not timed.

    Rows that are not of the commit in the header name theirs.
    """
    names = lambda rows: frozenset(row["name"] for row in rows)  # refused ones come last
    key = lambda rows: (rows[0]["group"], rows[0]["shape"], names(rows))
    again = {key(rows): rows for rows in groups(found["rows"])}
    kept = []
    for rows in groups(earlier["rows"]):
        kept += again.pop(key(rows), [{"commit": earlier["commit"]} | row for row in rows])
    return found | {"rows": kept + [row for rows in again.values() for row in rows]}


def main() -> None:
    """Parses the command line, times the chosen groups and writes the file after each of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="groups that have one of these texts"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ahead", type=int, default=4, help="groups compiled side by side")
    parser.add_argument(
        "--processes", type=int, default=0, help="that run gates; 0: none of their own"
    )
    parser.add_argument("--time-limit", type=float, default=3600)
    parser.add_argument("--refresh", type=pathlib.Path, help="results whose other groups are kept")
    arguments = parser.parse_args()
    prepare_process(arguments.time_limit + 300)
    timer, log = timing.choose("auto", probes())
    summary = (
        "ms of device time; speed relative to the first row of each group; GiB planned by XLA; "
        f"bfloat16 unless it says otherwise; {timer.name}; median of {arguments.rounds} "
        "interleaved rounds."
    )
    method = {"summary": summary, "timer": timer.name, "timer_check": log}
    found = results.header("features", method) | {"rows": []}
    earlier = results.load(arguments.refresh) if arguments.refresh else {"rows": []}
    begin = time.monotonic()
    chosen = [group for group in GROUPS if any(map(group.has, arguments.only))]
    processes = gates_apart(arguments.processes) if arguments.processes else None
    prepared_by = functools.partial(prepare, processes=processes)
    for chunk in itertools.batched(chosen, arguments.ahead):
        if time.monotonic() - begin > arguments.time_limit:
            print(f"time is up before {chunk[0].name} {chunk[0].sizes.label}")
            break
        with concurrent.futures.ThreadPoolExecutor(len(chunk)) as pool:
            prepared = list(pool.map(prepared_by, chunk))
        print(f"{time.monotonic() - begin:.0f} s: prepared {len(chunk)} groups", flush=True)
        for group in chunk:
            rows = run_group(group, prepared.pop(0), timer, arguments.rounds)
            found["rows"] += rows
            print("\n".join(map(line, rows)), flush=True)
            arguments.out.write_text(json.dumps(refreshed(earlier, found), indent=1) + "\n")
            gc.collect()
    if processes is not None:
        processes.shutdown()


if __name__ == "__main__":
    main()
