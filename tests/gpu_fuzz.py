"""Random calls of every public function, with values, on the kernels of a GPU.

    python -m tests.gpu_fuzz --count 1500 --seed 1 --json benchmarks/results/gpu_fuzz.json

What is right comes from dense_reference.py in float64, which shares nothing with the package, and
how far a result may be from it, from rounding_bounds.py. Calls take turns on the backends, a
quarter of them with jax_enable_x64; portable calls also take turns with the tiles of GPUs that
have 163 and 99 KB of shared memory. `--backend xla` runs the draws where there is no GPU. A wrong
call is repeated by `--first NUMBER --count 1` and the same seed and backends. The file has a digest
of each call's kernels. After a change of kernels, few calls need to run again:

    python -m tests.gpu_fuzz --check FILE   # without a GPU: finds calls whose kernels have changed
    python -m tests.gpu_fuzz --again FILE   # on a GPU: runs these
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.coverage import digests
from flash_pallas.frontend import dispatch

from . import fuzz_attention, fuzz_serving, fuzzing, rounding_bounds
from .fuzz_attention import Call
from .random_calls import Draw

# GPUs whose tiles the portable kernels take turns with: that at hand, those of 163 and of 99 KB.
TILES = (None, None, ("8.0", 108), ("8.9", 142))
# The GPU that results are of, for a host that has none.
H200 = {
    "hopper": HopperBackend(capability="9.0", num_sms=132),
    "portable": PortableBackend(capability="9.0", num_sms=132),
}
# Of 100 calls.
SHARES = (
    (fuzz_attention.attention, 48),
    (fuzz_attention.varlen, 12),
    (fuzz_serving.decode, 23),
    (fuzz_serving.ragged, 9),
    (fuzz_serving.caches, 5),
    (fuzz_serving.rings, 3),
)
X64 = 0.25
# Keys of a file.
LARGEST = "largest errors, of what is allowed"
WAITING = "changed since, not run again"
# Of the processes. They share the GPU's memory, and all cores compile: a thread for the products of
# the reference, and no kernels ahead.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "FLASH_PALLAS_COMPILE_AHEAD": "0",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one call.

    Attributes:
        number: of the call.
        backend: that it ran on.
        tiles: compute capability whose tiles it had, where not that of the GPU at hand.
        function: name of the public function.
        x64: whether jax_enable_x64 was set.
        kind: "right", "refused" or "wrong".
        call: what was drawn.
        why: the refusal, or what is wrong.
        errors: largest error of each result, in what is allowed.
        kernels: digest of its kernels, as `coverage.digests.of` has it.
        broken: whether the process may not go on.
    """

    number: int
    backend: str
    tiles: str | None
    function: str
    x64: bool
    kind: str = "right"
    call: str = ""
    why: str = ""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: str = ""
    broken: bool = False


def backend_of(number: int, backends: tuple[str, ...]) -> str:
    """Returns the backend of a call: they take turns."""
    return backends[number % len(backends)]


def tiles_for(number: int, backends: tuple[str, ...]) -> tuple[str, int] | None:
    """Returns (capability, number of SMs) of the GPU whose tiles a call has; None: of this one."""
    if backend_of(number, backends) != "portable":
        return None
    return TILES[number // len(backends) % len(TILES)]


def drawn(seed: int, number: int, backend: str) -> Call:
    """Draws the call of this number."""
    draw = Draw(seed, number)
    x64 = draw.chance(X64)
    kinds = [make for make, share in SHARES for _ in range(share)]
    return draw.one_of(kinds)(draw, backend, x64=x64)


@contextlib.contextmanager
def tiles_of(gpu: tuple[str, int] | None):
    """Makes portable kernels take the tiles of a GPU of this capability and number of SMs."""
    if gpu is None:
        yield
        return
    there = PortableBackend(capability=gpu[0], num_sms=gpu[1])
    dispatch.forget_tiles()
    with mock.patch.object(dispatch, "BACKENDS", {**dispatch.BACKENDS, "portable": there}):
        yield
    dispatch.forget_tiles()


def attempt(seed: int, backends: tuple[str, ...], number: int) -> list[Outcome]:
    """Runs a call; prints a wrong result at once."""
    backend = backend_of(number, backends)
    gpu = tiles_for(number, backends)
    found = Outcome(number, backend, gpu and gpu[0], "not drawn", x64=False)
    try:
        call = drawn(seed, number, backend)
        found = dataclasses.replace(found, function=call.function, x64=call.x64, call=call.text)
        found = compared(found, call, gpu)
    except fp.UnsupportedByBackend as error:
        found = dataclasses.replace(found, kind="refused", why=str(error))
    except Exception as error:  # whatever it is: the call has failed, and the rest goes on
        why, broken = traceback.format_exc(limit=-4), isinstance(error, jax.errors.JaxRuntimeError)
        found = dataclasses.replace(found, kind="wrong", why=why, broken=broken)
    if found.kind == "wrong":
        print(f"WRONG seed {seed} call {number} on {backend}: {found.call}", flush=True)
        print(found.why, flush=True)
    return [found]


def compared(outcome: Outcome, call: Call, gpu) -> Outcome:
    """Runs a call and compares its results with what is right; returns the outcome with both."""
    backend = outcome.backend
    with jax.enable_x64(call.x64), tiles_of(gpu):
        lowered = jax.jit(call.program(backend)).lower(call.arrays)
        results = lowered.compile()(call.arrays)
        results = {name: np.asarray(x) for name, x in results.items()}
    right, errors, wrong = call.expected(backend != "xla"), {}, []
    if set(results) != set(right):
        wrong.append(f"has {sorted(results)}, not {sorted(right)}")
        right = {}
    for name, (exact, deviation) in right.items():
        errors[name], said = difference(results[name], exact, deviation)
        wrong += [f"{name}: {each}" for each in said]
    kind, why, kernels = "wrong" if wrong else "right", "; ".join(wrong), digests.of(lowered)
    return dataclasses.replace(outcome, kind=kind, why=why, errors=errors, kernels=kernels)


def kernels(seed: int, backends: tuple[str, ...], number: int) -> str:
    """Returns `Outcome.kernels` of a call as it would be on an H200, which need not be there.

    Raises:
        UnsupportedByBackend: the call is refused.
    """
    backend, gpu = backend_of(number, backends), tiles_for(number, backends)
    call = drawn(seed, number, backend)
    there = mock.patch.dict(dispatch.BACKENDS, H200)
    with there, jax.enable_x64(call.x64), tiles_of(gpu):
        traced = jax.jit(call.program(backend)).trace(call.arrays)
        return digests.of(traced.lower(lowering_platforms=("cuda",)))


def difference(found, exact, deviation) -> tuple[float, list[str]]:
    """Returns the largest error of a result in what is allowed, and what is wrong with it."""
    found = found.astype(np.float64)
    if found.shape != exact.shape:
        return np.inf, [f"has shape {found.shape}, not {exact.shape}"]
    if not found.size:
        return 0.0, []
    with np.errstate(all="ignore"):
        error = np.abs(found - exact) / deviation
    error = np.where((found == exact) | np.isinf(deviation), 0.0, error)
    each = float(np.max(error)) / rounding_bounds.ELEMENT
    by_row = 0.0  # of scalars and of LSE
    if error.ndim > 2:
        by_row = float(np.max(np.sqrt(np.mean(np.square(error), -1)))) / rounding_bounds.ROW
    worst = max(each, by_row)
    if worst <= 1.0:  # a NaN is not
        return round(worst, 3), []
    place = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    said = f"{found[place]:.5g} for {exact[place]:.5g} at {[int(n) for n in place]}, "
    said += f"{np.mean(~(error <= rounding_bounds.ELEMENT)):.2g} of the elements are off; "
    return worst, [said + f"error {each:.3g}, by rows {by_row:.3g}, of what is allowed"]


def late(seed: int, backends: tuple[str, ...], number: int, why: str) -> list[Outcome]:
    """Returns the outcome of a call whose process was ended."""
    print(f"WRONG seed {seed} call {number}: {why}", flush=True)
    backend = backend_of(number, backends)
    try:
        call = drawn(seed, number, backend)
        told = call.function, call.x64, "wrong", call.text
    except Exception:
        told = "not drawn", False, "wrong", ""
    return [Outcome(number, backend, None, *told, why)]


TABLES: dict[str, Callable[[Outcome], str]] = {
    "by backend": lambda x: x.backend,
    "by function": lambda x: x.function,
    "by x64": lambda x: "x64" if x.x64 else "x32",
    "by tiles": lambda x: f"{x.backend} {x.tiles or 'of this GPU'}",
}


def summary(
    seed: int, backends: tuple[str, ...], started: float, outcomes: list[Outcome]
) -> dict[str, Any]:
    """Returns the figures of a run: what ran, counts of outcomes, wrong calls, seconds."""
    tables = {
        name: _counts((key(each), each.kind) for each in outcomes) for name, key in TABLES.items()
    }
    refused = collections.Counter(x.why.split(": ")[-1][:70] for x in outcomes if x.why)
    return {
        "device": jax.devices()[0].device_kind,
        **tables,
        LARGEST: _largest(outcomes),
        "refused": dict(refused.most_common(8)) if refused else {},
        "wrong": _wrong(seed, backends, outcomes),
        "backends": backends,
        "kernels": {each.number: each.kernels for each in outcomes if each.kernels},
        "seconds": round(time.monotonic() - started),
    }


def _largest(outcomes: list[Outcome]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for each in outcomes:
        for name, error in each.errors.items():
            key = f"{each.backend} {name.rstrip('0123456789')}"
            worst[key] = max(worst.get(key, 0.0), error)
    return dict(sorted(worst.items()))


def _wrong(seed: int, backends: tuple[str, ...], outcomes: list[Outcome]) -> list[dict[str, Any]]:
    repeat = f"python -m tests.gpu_fuzz --seed {seed} --backend {' '.join(backends)} --count 1"
    return [
        {"repeat": f"{repeat} --first {each.number}"}
        | {name: getattr(each, name) for name in ("number", "backend", "tiles", "x64")}
        | {"call": each.call, "why": each.why}
        for each in outcomes
        if each.kind == "wrong"
    ]


def _counts(pairs) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for key, kind in sorted(pairs):
        found.setdefault(key, {}).setdefault(kind, 0)
        found[key][kind] += 1
    return found


# --- Calls whose kernels have changed -------------------------------------------------------------


def changed(seed: int, backends: tuple[str, ...], known: dict[str, str], number: int) -> list[int]:
    """Returns [number] of a call whose kernels are not those of a file, [] of any other."""
    try:
        same = kernels(seed, backends, number) == known[str(number)]
    except fp.UnsupportedByBackend:  # it ran before
        same = False
    return [] if same else [number]


def without(file: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
    """Returns a file that claims nothing of the kernels of these calls: they wait for a GPU."""
    waiting = sorted({*file.get(WAITING, ()), *numbers})
    known = {key: x for key, x in file["kernels"].items() if int(key) not in waiting}
    return file | {"kernels": known, WAITING: waiting}


def merged(file: dict[str, Any], again: dict[str, Any], outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns a file with the outcomes of waiting calls, which were right with earlier kernels.

    Args:
        file: of all calls.
        again: figures of the run of those that waited, as `fuzzing.run` has them.
        outcomes: of these.
    """
    tables = {name: {key: dict(kinds) for key, kinds in file[name].items()} for name in TABLES}
    for each in outcomes:
        for name, key in TABLES.items():
            kinds = tables[name][key(each)]
            kinds["right"] -= 1
            kinds[each.kind] = kinds.get(each.kind, 0) + 1
    before, now = file[LARGEST], again[LARGEST]
    largest = {x: max(before.get(x, 0.0), now.get(x, 0.0)) for x in sorted({*before, *now})}
    known = {int(key): x for key, x in {**file["kernels"], **again["kernels"]}.items()}
    done = {each.number for each in outcomes}
    run = {key: again[key] for key in ("device", "calls", "seconds", "versions", "commit", "date")}
    more = {
        LARGEST: largest,
        "wrong": [*file["wrong"], *again["wrong"]],
        "kernels": {str(number): known[number] for number in sorted(known)},
        WAITING: [number for number in file[WAITING] if number not in done],
        "again": [*file.get("again", ()), run],
    }
    return file | tables | more


# --- Command line ---------------------------------------------------------------------------------


def _run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    which = arguments.seed, tuple(arguments.backend)
    figures = functools.partial(summary, *which, time.monotonic())
    late_calls = functools.partial(late, *which)
    return fuzzing.run(functools.partial(attempt, *which), arguments, figures, late_calls)


def _run_again(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the calls of a file that wait, and writes it with their outcomes."""
    file = json.loads(arguments.again.read_text())
    if not file.get(WAITING):
        return {"changed": []}
    arguments.seed = file["seed"]
    which, started = (file["seed"], tuple(file["backends"])), time.monotonic()
    outcomes: list[Outcome] = []

    def figures(so_far: list[Outcome]) -> dict[str, Any]:
        outcomes[:] = so_far
        return summary(*which, started, so_far)

    late_calls, calls = functools.partial(late, *which), functools.partial(attempt, *which)
    again = fuzzing.run(calls, arguments, figures, late_calls, file[WAITING])
    _write(arguments.again, merged(file, again, outcomes))
    return again


def _check(arguments: argparse.Namespace) -> dict[str, Any]:
    """Finds the calls of a file whose kernels have changed, and writes it without these."""
    file = json.loads(arguments.check.read_text())
    which = file["seed"], tuple(file["backends"])
    calls = functools.partial(changed, *which, file["kernels"])
    numbers = [int(key) for key in file["kernels"]]
    found = fuzzing.run(calls, arguments, lambda those: {"changed": those}, numbers=numbers)
    _write(arguments.check, without(file, found["changed"]))
    return found


def _write(path: Path, file: dict[str, Any]) -> None:
    path.write_text(json.dumps(file, indent=2) + "\n")


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = fuzzing.parser("gpu_fuzz", __doc__, max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--backend", nargs="+", default=["hopper", "portable"])
    parser.add_argument("--check", type=Path, help="file whose changed calls are to be found")
    parser.add_argument("--again", type=Path, help="file whose changed calls are to run again")
    arguments = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    act = _check if arguments.check else _run_again if arguments.again else _run_all
    found = act(arguments)
    told = {k: v for k, v in found.items() if k not in ("wrong", "kernels")}
    print(json.dumps(told, indent=2))
    return 1 if found.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
