"""Random calls with values, on the kernels of a GPU, by the one numerical check.

    python -m tests.gpu_fuzz --count 500 --seed 1

Every call runs on the hopper and on the portable kernels, where they take it; one in eight decodes
instead, one in ten is packed documents. `--backend xla` tries the same calls where there is no GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from typing import Any

import jax

import flash_pallas as fp
from flash_pallas.frontend import dispatch

from . import checks, draft_masks, fuzzing, hopper_decode_cases
from .hopper_decode_cases import Step
from .random_calls import Draw
from .random_cases import Sizes, packed, random_case, random_packed_case

# What the kernels run natively, what is filled up with zeros, and both at once.
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 64, 72, 96, 128, 128, 128, 160, 192, 256, 320, 512)
WIDEST_FLOAT32 = 128
SIZES = Sizes(
    length=700,
    batch=3,
    kv_heads=3,
    group=4,
    head_dims=HEAD_DIMS,
    v_head_dims=(None, None, None, 16, 64, 128),
    dtypes=("bfloat16", "bfloat16", "float16", "float32"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one call on one backend: "right", "refused" or "wrong", and why."""

    number: int
    backend: str
    kind: str
    call: str
    why: str = ""


def one_call(seed: int, number: int, backends: tuple[str, ...]) -> list[Outcome]:
    """Runs the call of this number on each of these backends."""
    draw = Draw(seed, number)
    if draw.chance(0.125):
        step = random_step(draw)
        return [_outcome(number, name, repr(step), decodes, step) for name in backends]
    make, check = random_case, _attends
    if draw.chance(0.11):
        make, check = random_packed_case, _attends_to_documents
    case = make(draw, SIZES)
    if case.dtype == "float32" and max(case.H, case.v_head_dim) > WIDEST_FLOAT32:
        case = dataclasses.replace(case, dtype="bfloat16")
    return [_outcome(number, name, repr(case), check, case) for name in backends]


def _outcome(number: int, backend: str, call: str, check, what) -> Outcome:
    try:
        reason = check(backend, what)
    except Exception:  # a wrong result or an error: the call has failed, and the rest goes on
        return Outcome(number, backend, "wrong", call, traceback.format_exc(limit=-3))
    return Outcome(number, backend, "refused" if reason else "right", call, reason or "")


def _attends(backend: str, case) -> str | None:
    found = dispatch.BACKENDS[backend]
    if reason := found.unsupported(case.problem):
        return reason
    checks.assert_matches_oracle(checks.bind(found), case, kernels=backend != "xla")
    return None


def _attends_to_documents(backend: str, case) -> str | None:
    call = packed(functools.partial(fp.flash_attention_varlen, backend=backend))
    try:
        checks.assert_matches_oracle(call, case, kernels=backend != "xla")
    except fp.UnsupportedByBackend as error:
        return str(error)
    return None


def decodes(backend: str, step: Step) -> str | None:
    """Checks one call of flash_decode; returns why the backend does not take it, or None."""
    given, whole = step.operands()
    options: dict[str, Any] = {"softcap": step.softcap, "num_splits": step.num_splits}
    if step.scaled == "heads":  # as users have them: one per head
        one = lambda scale: None if scale is None else scale[0]
        given = given._replace(k_scale=one(given.k_scale), v_scale=one(given.v_scale))
    if step.shared:
        options["v_head_dim"] = step.Hv
    arrays = given._asdict()
    window, prefix = arrays.pop("window_left"), arrays.pop("prefix_lengths")
    assert prefix is None  # no `Step` has shared prefixes
    options["window"] = step.window if window is None else (window, None)
    try:
        found = fp.flash_decode(**arrays, **options, backend=backend, return_lse=True)
    except fp.UnsupportedByBackend as error:
        return str(error)
    hopper_decode_cases.assert_matches_oracle(step, whole, found)
    return None


_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 128, 256, 304, 512, 576)  # of 16-bit caches


def random_step(draw: Draw) -> Step:
    """Draws a call of flash_decode."""
    kv_heads, queries = draw.between(1, 3), draw.one_of((1, 1, 1, 2, 4, 16))
    page_size = draw.one_of((None, None, 16, 48, 64, 128))
    room = (page_size or 8) * draw.between(1, 9) * (1 if page_size else 8)
    cache = draw.one_of((None, None, None, "int8", "float8_e4m3fn"))
    head_dim = draw.one_of((64, 128, 256) if cache else _HEAD_DIMS)
    batch = draw.between(1, 4)
    numbers = lambda most: tuple(draw.between(0, most) for _ in range(batch))
    step = Step(
        "drawn",
        lengths=numbers(room),
        T=queries,
        N=kv_heads * draw.one_of((1, 2, 3, 4, 8)),
        K=kv_heads,
        H=head_dim,
        Hv=min(head_dim, 512) if draw.chance(0.8) else 64,
        S=room,
        dtype=draw.one_of(("bfloat16", "float16")),
        page_size=page_size,
        num_splits=draw.one_of((1, 2, 3, 7)),
        window=draw.one_of((None, None, 0, 70)),
        starts=numbers(room) if draw.chance(0.3) else None,
        windows=numbers(room) if draw.chance(0.2) else None,
        softcap=draw.one_of((None, None, 3.0)),
        sides=tuple(name for name in ("slopes", "sinks") if draw.chance(0.3)),
        cache=cache,
        scaled=draw.one_of(("", "heads", "rows")) if cache else "",
    )
    step = dataclasses.replace(step, shared=step.Hv <= step.H and draw.chance(0.2))
    if not draw.chance(0.25):
        return step
    tokens, sides = draw.one_of((4, 16, 40, 64)), tuple(s for s in step.sides if s != "slopes")
    return dataclasses.replace(step, T=tokens, sides=sides, drafts=draw.one_of(draft_masks.KINDS))


def attempt(seed: int, backends: tuple[str, ...], number: int) -> list[Outcome]:
    """Runs a call on each of these backends; prints wrong results at once."""
    found = one_call(seed, number, backends)
    for each in found:
        if each.kind == "wrong":
            print(f"WRONG seed {seed} call {number} on {each.backend}: {each.call}", flush=True)
            print(each.why, flush=True)
    return found


def summary(started: float, outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns the figures of a run: device, counts of outcomes, wrong calls, seconds."""
    counts = collections.Counter(f"{each.backend} {each.kind}" for each in outcomes)
    return {
        "device": jax.devices()[0].device_kind,
        "outcomes": dict(sorted(counts.items())),
        "wrong": [dataclasses.asdict(each) for each in outcomes if each.kind == "wrong"],
        "seconds": round(time.monotonic() - started),
    }


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = fuzzing.parser("gpu_fuzz", __doc__, max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--backend", nargs="+", default=["hopper", "portable"])
    arguments = parser.parse_args()
    attempts = functools.partial(attempt, arguments.seed, tuple(arguments.backend))
    found = fuzzing.run(attempts, arguments, functools.partial(summary, time.monotonic()))
    print(json.dumps({k: v for k, v in found.items() if k != "wrong"}, indent=2))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
