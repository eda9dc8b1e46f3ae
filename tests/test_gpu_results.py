"""Kernels that have run on a GPU are those that run now: gpu_coverage.json and gpu_fuzz.json.

`make coverage-gpu` writes the first on an H200, and `make coverage-check` compares all its rows.
Here are a fixed set of rows, a sample of the others, and calls that "auto" gives to kernels.
`make fuzz-gpu` writes the second, of whose calls a sample is compared here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import jax
import pytest

import flash_pallas as fp
from flash_pallas.core.decode import DecodeProblem
from flash_pallas.core.ragged import RaggedProblem
from flash_pallas.coverage import check, rows, run
from flash_pallas.coverage.calls import Row
from flash_pallas.coverage.rows import TARGETS

from . import digest, gpu_fuzz
from .random_calls import random_call

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PATH, FUZZ = RESULTS / "gpu_coverage.json", RESULTS / "gpu_fuzz.json"
PORTABLE = tuple(name for name in TARGETS if name != "hopper")
HINT = "run `make coverage-gpu` on an H200: rows that have not changed are left out"
CALLS = 10
GPUS = {"h200": "hopper", "a100": "portable", "l40s": "portable"}


@functools.cache
def found() -> dict[str, list[Any]]:
    """Returns the rows of the file."""
    return run.read(PATH)


def entry(row: Row) -> list[Any]:
    """Returns what the file has of a row: its own, or that of another GPU with the same tiles."""
    tiles = rows.plan(row, TARGETS[row.target])
    assert tiles is not None, f"{row.key}: the backend does not run it any more"
    targets = (row.target, *(PORTABLE if row.target in PORTABLE else ()))
    # A deterministic backward may be what runs anyway.
    for target, more in itertools.product(targets, ((), ("deterministic",))):
        twin = dataclasses.replace(row, target=target, options=(*row.options, *more))
        if twin.key in found() and rows.plan(twin, TARGETS[target]) == tiles:
            return found()[twin.key]
    raise AssertionError(f"{row.key}: has not run on a GPU; {HINT}")


def check_digest(row: Row) -> None:
    """Checks that a row was right with the kernels that it has now."""
    known, _, verdict = entry(row)
    assert verdict == check.RIGHT, row.key
    now = check.digest(row, TARGETS[row.target])
    assert now == known, f"{row.key}: its kernels are not those that ran; {HINT}"


# --- The file -------------------------------------------------------------------------------------


def test_every_row_was_right():
    assert PATH.exists(), HINT
    wrong = {key: x for key, x in found().items() if x[-1] != check.RIGHT}
    assert not wrong, wrong
    targets = collections.Counter(key.split(" ")[0] for key in found())
    assert targets.keys() == TARGETS.keys() and all(count > 250 for count in targets.values())


def test_keys_are_read_back():
    assert all(Row.parse(key).key == key for key in found()) and found(), HINT


# --- Digests --------------------------------------------------------------------------------------

_DECODE_ALL = ("24 rows", "pages of 64", *rows.DECODE_ALL)
_RAGGED_ALL = ("pages of 64", *rows.RAGGED_ALL)


def _of(target: str, function: str, wanted: str, dims, options=(), dtype="bfloat16") -> list[Row]:
    pairs = [(h, min(h, 512) if function in ("decode", "ragged") else h) for h in dims]
    return [Row(target, function, wanted, *pair, dtype, options) for pair in pairs]


FIXED = (
    *_of("hopper", "attention", "gradient", (64, 128)),
    *_of("hopper", "decode", "output", (576,), _DECODE_ALL),
    *_of("hopper", "ragged", "output", (128,), _RAGGED_ALL),
    *_of("portable-227", "attention", "gradient", (128,)),
    *_of("portable-163", "attention", "linear", (64,)),
    *_of("portable-99", "decode", "output", (512,), _DECODE_ALL),
)


SAMPLE = 5


@pytest.mark.parametrize("row", FIXED, ids=lambda row: row.key)
def test_kernels_are_those_that_ran(row):
    check_digest(row)


def test_a_sample_of_kernels_are_those_that_ran():
    rng = random.Random(digest.seed())
    name = rng.choice(sorted(TARGETS))
    makers = rows._gradients, rows._tangents, rows._varlen, rows._decodes, rows._ragged
    make = rng.choice(makers)
    listed = [row for row in make(name, TARGETS[name]) if rows.plan(row, TARGETS[name])]
    for row in rng.sample(listed, min(SAMPLE, len(listed))):
        check_digest(row)


# --- Calls that "auto" gives to kernels -----------------------------------------------------------


def kind_of(problem: Any) -> str:
    if isinstance(problem, RaggedProblem):
        return "ragged"
    return "decode" if isinstance(problem, DecodeProblem) else "attention"


def parts(problem: Any) -> set[str]:
    """Returns what a call has, by the names of its problem: each must have run on a GPU."""
    problem = problem.steps if isinstance(problem, RaggedProblem) else problem
    spec = problem.spec
    names = set(problem.features)
    if isinstance(problem, DecodeProblem):
        names |= {
            n for n in ("window_left", "softcap", "v_columns") if getattr(spec, n) is not None
        }
        names |= {f"cache in {problem.kv_dtype}"} if problem.quantised else set()
        rows_of_group = problem.q_len * problem.group
        return names | {"at most 16 rows" if rows_of_group <= 16 else "more rows"}
    names |= {f"modifier {name}" for name in spec.modifiers}
    names |= {"causal"} if spec.mask.right is not None else set()
    return names | ({"window"} if spec.mask.left is not None else set())


@functools.cache
def ran() -> dict[tuple[str, str], tuple[set[tuple[int, str]], set[str]]]:
    """Returns, by (backend, function), the (head dim, dtype) and the `parts` that have run."""
    every: dict[Any, Any] = collections.defaultdict(lambda: (set(), set()))
    asked = set()
    for key, (_, _, verdict) in found().items():
        row = Row.parse(key)
        function = "attention" if row.function == "varlen" else row.function
        dims, names = every[TARGETS[row.target].backend, function]
        if verdict != check.RIGHT:
            continue
        dims |= {(row.head_dim, row.dtype), (row.v_head_dim, row.dtype)}
        if (row.target, row.function, row.options) not in asked and len(row.options) < 4:
            asked.add((row.target, row.function, row.options))
            names |= parts(rows.problem_of(row))
    return every


@pytest.mark.parametrize("gpu", GPUS)
def test_what_auto_gives_to_a_kernel_has_run(gpu):
    missing = []
    for number in range(CALLS):
        for explanation in explained(number, gpu):
            backend, problem = explanation.backend, explanation.problem
            if backend not in ("hopper", "portable"):
                continue
            dims, names = ran()[backend, kind_of(problem)]
            of_steps = problem.steps if isinstance(problem, RaggedProblem) else problem
            wanted = {-(-h // 8) * 8 for h in (of_steps.head_dim, of_steps.v_head_dim)}
            heads = {h for h, dtype in dims if dtype == of_steps.dtype.name or dtype == "bfloat16"}
            if not wanted <= heads or not parts(problem) <= names:
                more = wanted - heads, parts(problem) - names
                missing.append(f"call {number}, {backend} {kind_of(problem)}: {more}")
    assert not missing, f"{missing}; {HINT}"


def explained(number: int, gpu: str) -> list[Any]:
    """Returns what `explain` says of a random call; nothing where it raises."""
    call = random_call(digest.seed(), number)
    twin = dataclasses.replace(call, wanted=())
    # As users have it: in a mask_mod positions are int32, and its lengths may be int64.
    standard = jax.numpy_dtype_promotion("standard")
    with standard, jax.enable_x64(call.x64), fp.target(gpu):
        return list(fp.explain(twin.run("auto"), *twin.arguments).calls)


# --- Random calls ---------------------------------------------------------------------------------

FUNCTIONS = (
    "RingCache",
    "append_kv",
    "dot_product_attention",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "flash_decode",
    "ragged_paged_attention",
)


def test_random_calls_of_every_function_were_right():
    fuzz = json.loads(FUZZ.read_text())
    assert fuzz["wrong"] == [] and fuzz["calls"] >= 1500
    assert not fuzz.get(gpu_fuzz.WAITING), "run make fuzz-gpu AGAIN=1 on an H200"
    right = lambda table, key: fuzz[table][key].get("right", 0)
    assert right("by backend", "portable") >= 500 and right("by x64", "x64") >= 300
    tiles = {"portable of this GPU", "portable 8.0", "portable 8.9"}
    assert all(right("by tiles", name) for name in tiles)
    assert all(right("by function", name) for name in FUNCTIONS)


def test_the_kernels_of_random_calls_are_those_that_ran():
    fuzz, rng = json.loads(FUZZ.read_text()), random.Random(digest.seed())
    hint = "run make fuzz-check, and make fuzz-gpu AGAIN=1 on an H200"
    for number in rng.sample(sorted(fuzz["kernels"]), SAMPLE):
        now = gpu_fuzz.kernels(fuzz["seed"], tuple(fuzz["backends"]), int(number))
        assert now == fuzz["kernels"][number], f"the kernels of call {number} have changed: {hint}"
