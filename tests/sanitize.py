"""Every kernel under compute-sanitizer: `make sanitize-gpu`.

    python -m tests.sanitize --json benchmarks/results/sanitizer.json

Each case runs in a process of its own under memcheck and in another under racecheck, several at a
time, and its numbers are checked too. `--case hopper/d128` is what such a process runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import results
from flash_pallas.backends.gpu import launch
from flash_pallas.backends.hopper.backward.fused import launches
from flash_pallas.frontend import dispatch

from . import checks, hopper_decode_cases, ragged_cases, tangent_checks, test_shared_prefix
from .cases import Case
from .hopper_cases import ON_DEVICE
from .hopper_decode_cases import STEPS

TOOLS = ("memcheck", "racecheck")
BACKENDS = ("hopper", "portable")
NAMES = (
    "d64_causal",
    "d128",
    "d64_split",
    "d256_causal",
    "bias_1NTS",
    "bias_1N1S",
    "bias_shared_32",
    "alibi",
    "everything",
    "packed_causal",
    "float32_bias",
    "wide_512_causal",
)
DECODES = (
    "splits",
    "two_tiles_of_rows",
    "pages_of_64",
    "starts",
    "starts_of_int8",
    "int8",
    "int8_as_rows",
    "drafts",
    "drafts_as_rows",
    "wide_512",
    "wide_int8",
    "latent",
    "shared_latent",
)

HOPPER = """forward backward_fused backward_fused_far backward_paired zeros backward_dkv backward_dq
backward_scores_tile backward_scores_rows backward_scores_columns forward_wide
backward_wide_dkv backward_wide_dq jvp tangents backward_push_kv backward_push_q decode
decode_combine decode_join decode_latent ragged"""
PORTABLE = """forward fused narrow dkv dk dv dq scores_tile scores_rows scores_columns tangents
decode"""
KERNELS = {f"flash_pallas_{name}" for name in HOPPER.split()}
KERNELS |= {f"flash_pallas_portable_{name}" for name in PORTABLE.split()}

# Head dims of which dK and dV have a kernel each, where nothing is added up atomically.
APART = Case("apart", T=70, S=90, H=256, dtype="bfloat16", deterministic=True)
# Pairs of CTAs that exchange dS.
EXCHANGED = Case("exchanged", T=130, S=200, H=192, dtype="bfloat16", causal=True)
# Tangents, and tangents of gradients.
TANGENTS = Case("tangents", T=130, S=200, H=64, dtype="bfloat16", causal=True)
# Rows that are left to launches of their own.
FAR = Case("far", T=130, S=130, B=4, N=32, K=32, magnitude=(0, 15, 0, 9), dtype="bfloat16")


ATTENTION = {case.name: case for case in ON_DEVICE if case.name in NAMES}
ATTENTION |= {case.name: case for case in (APART, EXCHANGED, FAR)}
STEP = {step.name: step for step in STEPS if step.name in DECODES}


def ragged_mix(backend: str) -> None:
    """Checks prompts and steps over pages."""
    mix = ragged_cases.MIXES["bfloat16"]
    drawn = mix.draw()
    call = jax.jit(functools.partial(ragged_cases.attend, mix, backend=backend))
    found = call(*jax.tree.map(jnp.asarray, drawn))
    ragged_cases.assert_right(mix, drawn, found, kernels=True)


def shared_prefixes(backend: str) -> None:
    """Checks steps of sequences that share prefixes."""
    drawn = test_shared_prefix.drawn(1, "bfloat16", (8, 2), (128, 128))
    test_shared_prefix.assert_right(backend, *drawn)


def forward_mode(backend: str, how: str) -> None:
    """Checks tangents, with O ("jvp") or after it ("linearize")."""
    call, case = tangent_checks.bind(backend), TANGENTS
    tangent_checks.assert_matches_oracle(call, case, kernels=True, how=how)


def second_order(backend: str) -> None:
    """Checks tangents of gradients."""
    tangent_checks.assert_second_order_matches_oracle(tangent_checks.bind(backend), TANGENTS)


OTHERS: dict[str, Callable[[str], None]] = {
    "ragged": ragged_mix,
    "shared_prefixes": shared_prefixes,
    "jvp": functools.partial(forward_mode, how="jvp"),
    "linearize": functools.partial(forward_mode, how="linearize"),
    "second_order": second_order,
}

LAUNCHED = "launched:"  # what a process says of its kernels


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict of a tool on a case.

    Attributes:
        tool: one of TOOLS.
        case: backend and name, as `--case` takes them.
        kernels: names of the kernels that ran.
        said: the tool's summary, or how the process ended without one.
        clean: whether the process ended well and the tool found nothing.
    """

    tool: str
    case: str
    kernels: tuple[str, ...]
    said: str
    clean: bool


def sanitizer() -> str:
    """Finds the wheel's sanitizer, else the one on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    wheel = Path(sysconfig.get_path("purelib"), "nvidia/cu13/compute-sanitizer/compute-sanitizer")
    found = str(wheel) if wheel.exists() else shutil.which("compute-sanitizer")
    if found is None:
        raise FileNotFoundError("no compute-sanitizer: install nvidia-cuda-sanitizer-api>=13.5")
    return found


def cases() -> list[str]:
    """Returns the cases that the backends take, as `--case` takes them."""
    takes = lambda backend, case: dispatch.BACKENDS[backend].attention.refusal(case.problem) is None
    found = [f"{b}/{name}" for b in BACKENDS for name, c in ATTENTION.items() if takes(b, c)]
    narrow = lambda step: max(step.H, step.Hv) <= 256
    decodes = lambda backend, step: backend == "hopper" or (not step.cache and narrow(step))
    found += [f"{b}/{name}" for b in BACKENDS for name, s in STEP.items() if decodes(b, s)]
    return found + [f"{b}/{name}" for b in BACKENDS for name in OTHERS]


def run_case(case: str) -> set[str]:
    """Runs a case and checks its numbers; returns the names of the kernels that it launched."""
    backend, name = case.split("/")
    launched: set[str] = set()
    kernel = launch.plgpu.kernel

    def spy(*arguments, kernel_name, **options):
        launched.add(kernel_name)
        return kernel(*arguments, kernel_name=kernel_name, **options)

    several = mock.patch.object(launches, "ENOUGH", 1)
    with mock.patch.object(launch.plgpu, "kernel", spy), several:
        if name in OTHERS:
            OTHERS[name](backend)
        elif name in STEP:
            hopper_decode_cases.decodes(backend, STEP[name])
        else:
            bound = checks.bind(dispatch.BACKENDS[backend])
            checks.assert_matches_oracle(bound, ATTENTION[name], kernels=True)
    return launched


def under(program: str, tool: str, case: str, seconds: float) -> Verdict:
    """Runs a case under a tool; returns the verdict."""
    command = [
        program,
        "--tool",
        tool,
        "--kernel-name",
        "kns=flash_pallas",
        "--error-exitcode",
        "9",
    ]
    command += [sys.executable, "-m", "tests.sanitize", "--case", case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(tool, case, (), f"not done in {seconds:.0f} s", clean=False)
    told = re.search(rf"^{LAUNCHED}(.*)$", done.stdout, re.MULTILINE)
    kernels = tuple(told.group(1).split()) if told else ()
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", done.stdout)
    clean = done.returncode == 0 and bool(summary) and bool(kernels)
    said = (
        summary[-1] if clean else f"exit {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
    )
    return Verdict(tool, case, kernels, said, clean)


def report(tools: Sequence[str], verdicts: list[Verdict]) -> dict[str, Any]:
    """Returns the kernels that each tool found clean or has not seen, and verdicts not clean."""
    found = {}
    for tool in tools:
        seen = {k for v in verdicts if v.tool == tool and v.clean for k in v.kernels}
        found[tool] = {"clean": sorted(seen), "not_seen": sorted(KERNELS - seen)}
    return found | {"not_clean": [dataclasses.asdict(v) for v in verdicts if not v.clean]}


def run_all(arguments: argparse.Namespace) -> int:
    """Runs every case under every tool; returns 1 if one is not clean or a kernel was not seen."""
    program = sanitizer()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    jobs = [(tool, case) for tool in arguments.tools for case in cases()]
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        run = lambda job: under(program, *job, arguments.seconds)
        verdicts = list(pool.map(run, jobs))
    found = {
        "device": jax.devices()[0].device_kind,
        "sanitizer": version.stdout.strip().splitlines()[-1],
        "jax": jax.__version__,
        "commit": results.commit(),
        "date": datetime.date.today().isoformat(),
    } | report(arguments.tools, verdicts)
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    missed = any(found[tool]["not_seen"] for tool in arguments.tools)
    return 1 if missed or found["not_clean"] else 0


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("--case", help="run this one, under no tool")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=300.0, help="for a case")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    arguments = parser.parse_args()
    if arguments.case is None:
        return run_all(arguments)
    print(LAUNCHED, *sorted(run_case(arguments.case)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
