"""Times what each option of a kernel's tiles earns: the same call with the option and without it.

    python -m benchmarks.run_options --out benchmarks/results/options.json

A row is an option that the tables choose for a call, and the time without it over the time with it,
both in one process. An option below 1.05 in every row should leave.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import multiprocessing
import pathlib
import statistics
from typing import Any
from unittest import mock

import jax

from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments

from . import feature_programs, features, results, timing, tracing
from .features import CAUSAL, FULL, Sizes, Variant
from .run import probes

Row = tuple[Sizes, Variant]


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a kernel, and the calls for which the tables choose it.

    Attributes:
        kernel: name of the kernel, a key of `blocks`.
        off: the fields that are without it, and their values.
        rows: the calls.
        module: `off` are constants of this module of the backend, instead of fields.
    """

    kernel: str
    off: dict[str, Any]
    rows: tuple[Row, ...]
    module: str = ""

    @property
    def name(self) -> str:
        """The kernel and the fields."""
        return f"{self.kernel}: " + ", ".join(f"{name} {x}" for name, x in self.off.items())

    @property
    def direction(self) -> str:
        """The direction that the kernel computes."""
        return "forward" if self.kernel == "forward" else "backward"


def label(row: Row) -> str:
    """Returns the sizes and the name of a row."""
    return f"{row[0].label} {row[1].name}"


def _of(batch, length, heads, head_dim, *variants: Variant, kv_heads=None, v=None) -> list[Row]:
    sizes = Sizes(batch, length, heads, kv_heads or heads, head_dim, v or head_dim)
    return [(sizes, variant) for variant in variants]


def _biased(head_dim: int, *lengths: int) -> list[Row]:
    return [row for n in lengths for row in _of(128, n, 4, head_dim, features.PAIR_BIAS)]


_FULL_128 = (
    _of(4, 4096, 16, 128, FULL) + _of(1, 16384, 16, 128, FULL) + _of(16, 1024, 16, 128, FULL)
)
_FULL_64 = _of(4, 4096, 32, 64, FULL) + _of(16, 1024, 32, 64, FULL)
_FULL_32 = _of(128, 2048, 4, 32, FULL)

OPTIONS = tuple(
    Option(kernel, off, tuple(rows), *module)
    for kernel, off, rows, *module in (
        (
            "fused",
            {"whole_dq": False},
            _of(2, 8192, 16, 96, FULL, CAUSAL) + _of(16, 1024, 16, 96, FULL, CAUSAL),
        ),
        (
            "fused",
            {"late_handover": False},
            _FULL_128 + _FULL_32 + _of(2, 8192, 16, 96, FULL),
        ),
        (
            "fused",
            {"mask_all": True},
            _of(1, 32768, 16, 128, features.PACKED) + _of(1, 131072, 16, 128, features.PACKED),
        ),
        ("fused", {"stages": 2, "do_stages": 2}, _FULL_128),
        (
            "fused",
            {"ping_pong": False, "late_handover": False},
            _FULL_128[:1] + _FULL_64[:1] + _of(4, 4096, 32, 64, CAUSAL),
        ),
        ("fused", {"signs": False, "block_q": 64}, _of(4, 4096, 32, 64, features.DROPOUT)),
        ("fused", {"defer": False, "block_q": 64}, _of(4, 4096, 32, 64, features.SOFTCAP)),
        ("fused", {"split_q": 1}, _of(1, 2048, 32, 128, CAUSAL, kv_heads=8)),
        ("fused", {"bias_cluster": 1}, _biased(16, 1024) + _biased(32, 1024) + _biased(64, 1024)),
        ("paired", {"stagger": False}, _of(4, 4096, 8, 256, FULL)),
        (
            "forward",
            {"lazy_rescale": 0.0},
            _of(4, 4096, 8, 256, FULL, CAUSAL) + _of(1, 16384, 8, 256, FULL, CAUSAL),
        ),
        (
            "forward",
            {"persistent": False},
            _of(4, 4096, 16, 128, FULL, CAUSAL)
            + _of(16, 1024, 16, 128, FULL, CAUSAL)
            + _of(4, 4096, 32, 64, FULL, CAUSAL),
        ),
        (
            "forward",
            {"polynomials": 0.0},
            _of(4, 4096, 16, 128, features.SOFTCAP_LARGE)
            + _of(4, 4096, 32, 64, features.SOFTCAP_LARGE),
        ),
        (
            "forward",
            {"speculates": 0.0},
            _of(4, 4096, 16, 128, FULL, CAUSAL) + _of(4, 4096, 32, 64, FULL, CAUSAL),
        ),
        (
            "fused",
            {"ENOUGH": 2**31},  # rows with large logits have no launch of their own
            _of(4, 4096, 32, 64, FULL, CAUSAL, features.SINKS)
            + _of(16, 1024, 32, 64, CAUSAL)
            + _biased(64, 1024),
            "backward.fused.launches",
        ),
        (
            "fused",
            {"MOST_BLOCKS": 0, "MOST_BLOCKS_64": 0},  # CTAs add all of dQ, and store none
            _of(4, 4096, 16, 128, CAUSAL)
            + _of(8, 2048, 16, 128, CAUSAL)
            + _of(16, 1024, 16, 128, CAUSAL)
            + _of(8, 2048, 32, 64, CAUSAL)
            + _of(16, 1024, 32, 64, CAUSAL),
            "backward.dq_sums",
        ),
        ("forward", {"teams": 1}, _of(1, features.VIDEO_LENGTH, 7, 128, features._chosen(64, 64))),
    )
)


def problem_of(row: Row):
    """Returns the problem that a row's call runs."""
    sizes, variant = row
    extra = variant.make(sizes, jax.random.key(1)) if not variant.differentiated else _like(row)
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(sizes.arrays)[:3]]
    found = []

    def look(q, k, v, *wanted):
        named = extra | dict(zip(variant.differentiated, wanted, strict=True))
        call = validate.canonicalize(q, k, v, Arguments(**dict(variant.static), **named))
        found.append(call.problem)

    jax.eval_shape(look, *arrays, *(extra[name] for name in variant.differentiated))
    return found[0]


def _like(row: Row) -> dict[str, Any]:
    sizes, variant = row
    return jax.eval_shape(lambda key: variant.make(sizes, key), jax.random.key(1))


# Rows and options hold functions without a name, so processes are sent their names.
ROWS = {label(row): row for option in OPTIONS for row in option.rows}
BY_NAME = {option.name: option for option in OPTIONS}


def export(row_name: str, option_name: str) -> tracing.Programs:
    """Traces the programs of a call without an option ("": with all), in a worker process."""
    row, option = ROWS[row_name], BY_NAME.get(option_name)
    blocks = None
    if option is not None and option.module:
        module = importlib.import_module(f"flash_pallas.backends.hopper.{option.module}")
        with mock.patch.multiple(module, **option.off):
            jax.clear_caches()  # whose keys do not have these constants
            traced = feature_programs.export(*row, backend="hopper")
        jax.clear_caches()
        return traced
    if option is not None:
        blocks = {option.kernel: option.off}
    return feature_programs.export(*row, backend="hopper", blocks=blocks)


def compiled(rows: dict[str, list[Option]], workers: int) -> dict[str, dict[str, Any]]:
    """Compiles every call, by the name of the row, with all options ("") and without each."""
    apart = multiprocessing.get_context("spawn")
    finish = lambda job: tracing.compiled(tracing.lower_exported(job.result()))
    made: dict[str, dict[str, Any]] = {row: {} for row in rows}
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=apart) as processes:
        traced = {
            (row, name): processes.submit(export, row, name)
            for row, options in rows.items()
            for name in ("", *(option.name for option in options))
        }
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            done = {key: pool.submit(finish, job) for key, job in traced.items()}
        for (row, name), job in done.items():
            if error := job.exception():
                print(f"{row} {name}: {str(error)[:300]}", flush=True)
            else:
                made[row][name] = job.result()
    return made


def compare(row: str, options: list[Option], made, timer, arguments) -> list[dict[str, Any]]:
    """Returns a row of results for each option of a call."""
    inputs = feature_programs.inputs_of(*ROWS[row])
    runners = {name: make(inputs) for name, make in made.items()}
    found = []
    for direction in ("forward", "backward"):
        asked = [o for o in options if o.direction == direction and o.name in runners]
        if not asked or "" not in runners:
            continue
        launches = {n: runners[n].launches[direction] for n in ("", *(o.name for o in asked))}
        samples, failures = timing.interleave(
            timer, launches, arguments.rounds, arguments.reading_ms
        )
        if failures:
            raise RuntimeError(f"{row} {direction}: {failures}")
        for option in asked:
            pairs = zip(samples[option.name], samples[""], strict=True)
            ratio = statistics.median(x.ms / y.ms for x, y in pairs)
            ms = statistics.median(x.ms for x in samples[""])
            found.append(
                {
                    "kernel": option.kernel,
                    "off": option.off,
                    "row": row,
                    "direction": direction,
                    "ms": ms,
                    "without_over_with": ratio,
                }
            )
            print(f"{option.name:<50} {row:<50} {ms:8.4f} ms {ratio:.3f}", flush=True)
    return found


def main() -> None:
    """Parses the command line, and writes the results after every row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_options", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="options whose name has one of these"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--reading-ms", type=float, default=8.0)
    parser.add_argument("--workers", type=int, default=14, help="processes that trace")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    rows: dict[str, list[Option]] = {}
    for option in OPTIONS:
        if any(text in option.name for text in arguments.only):
            for row in map(label, option.rows):
                rows.setdefault(row, []).append(option)
    made = compiled(rows, arguments.workers)
    timer, log = timing.HostTimer(), {"host": "no GPU"}
    if jax.default_backend() == "gpu":
        timer, log = timing.choose("auto", probes())
    about = {
        "summary": "device time without an option over that with it, median of "
        f"{arguments.rounds} interleaved rounds of {arguments.reading_ms} ms, bfloat16",
        "timer": timer.name,
        "timer_check": log,
    }
    found = results.header("options", about) | {"rows": []}
    for row, options in rows.items():
        found["rows"] += compare(row, options, made.pop(row), timer, arguments)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
